"""Train a classifier on one GPU or the CPU, on images that a pipe decodes.

    python scripts/train.py --data DIR --toml configs/preprocess_cpu.toml --checkpoint run/last.pt

Started again with the same ``--checkpoint``, it goes on with the very next batch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from recipes.command import guarded
from recipes.options import make_parser
from recipes.place import Place
from recipes.session import run


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser(__doc__ or "").parse_args(argv)
    return guarded("train", lambda: run(args, Place("single", devices=args.device)))


if __name__ == "__main__":
    sys.exit(main())
