"""Train a classifier on one GPU or the CPU, on images that NVIDIA DALI decodes.

    python scripts/train_dali.py --data DIR --augment both --checkpoint run/last.pt

The training of ``train.py``, with another loader. Started again with the same ``--checkpoint``, it goes on with the
next epoch: a DALI pipeline is saved between epochs only, so there is no ``--save-every``, and ``--max-steps`` writes no
checkpoint. Every file must be an image.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from recipes.command import guarded
from recipes.dali import AUGMENTS, dali_loaders
from recipes.options import make_parser
from recipes.place import Place
from recipes.session import run


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__ or "", toml=False)
    parser.add_argument(
        "--size", type=int, default=224, help="both sides of an image, in pixels (default: %(default)s)"
    )
    parser.add_argument("--decode", choices=["cpu", "gpu"], help="where (default: a GPU where there is one)")
    parser.add_argument("--augment", choices=AUGMENTS, default="none", help="to train with (default: %(default)s)")
    args = parser.parse_args(argv)
    reason = problem_of(args)
    if reason:
        parser.error(reason)
    place = Place("single", devices=args.device)
    return guarded("train_dali", lambda: run(args, place, open_loaders=dali_loaders))


def problem_of(args: argparse.Namespace) -> str:
    """Why the options do not go with DALI; empty if they do."""
    if args.bad_samples != "raise":
        return f"--bad-samples {args.bad_samples}: DALI stops at a file that is no image; only 'raise' works"
    if args.save_every:
        return "--save-every: a DALI pipeline is saved between epochs only; --checkpoint alone writes after each"
    if args.max_steps is not None and args.checkpoint is not None:
        return "--max-steps: a DALI pipeline is saved between epochs only; leave --checkpoint out, or use --epochs"
    return "--size: at least 1 pixel" if args.size < 1 else ""


if __name__ == "__main__":
    sys.exit(main())
