"""Train a classifier in mixed precision on one GPU, or in bf16 on the CPU.

python scripts/train_amp.py --data DIR --toml configs/train_gpu.toml --precision fp16
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from recipes.command import guarded
from recipes.options import make_parser
from recipes.place import Place
from recipes.session import run


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--precision", choices=("bf16", "fp16"), default="bf16", help="(default: %(default)s)")
    args = parser.parse_args(argv)
    return guarded("train_amp", lambda: run(args, Place("single", devices=args.device), args.precision))


if __name__ == "__main__":
    sys.exit(main())
