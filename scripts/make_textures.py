"""Draw a JPEG classification set of fine textures, the same for the same seed and libraries.

    python scripts/make_textures.py --out DIR --train 200 --val 50

writes DIR/train/CLASS/NNNN.jpg and DIR/val/…, for ``scripts/train.py --data DIR``. Started again, it goes on where it
stopped.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from recipes.textures import KINDS, SUBSAMPLINGS, write_set


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder, new or of a run that was stopped")
    parser.add_argument("--train", type=int, default=200, help="images of each class (default: %(default)s)")
    parser.add_argument("--val", type=int, default=50, help="images of each class (default: %(default)s)")
    parser.add_argument("--classes", type=int, default=8, help=f"2 to {len(KINDS)} (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="processes that draw (default: %(default)s)")
    parser.add_argument(
        "--subsampling", default="420", help=f"of chroma: {', '.join(SUBSAMPLINGS)} (default: %(default)s)"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """0 when all is written; 2, after a line that says why, for options that make no sense."""
    args = _parser().parse_args(argv)
    start = time.perf_counter()
    try:
        write_set(args.out, args.train, args.val, args.classes, args.seed, args.jobs, args.subsampling)
    except ValueError as error:
        print(f"make_textures: --{str(error).replace('root:', 'out:', 1)}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"make_textures: --out: {error}", file=sys.stderr)
        return 2
    counts = f"{args.classes} classes, {args.train} images of each to train on, {args.val} to validate with"
    print(f"{args.out}: {counts}; {time.perf_counter() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
