"""The options of the training scripts, and how they end."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from torchpipe_py import TorchpipeError
from torchpipe_py.arguments import ArgumentParser
from torchpipe_py.training.options import BAD_SAMPLES

INTERRUPTED = 130  # as a shell says of Ctrl-C


def to_device(text: str) -> int | str:
    """A CUDA device's number, or a name."""
    return int(text) if text.isdigit() else text


def make_parser(description: str | None, toml: bool = True) -> ArgumentParser:
    """All options but those of one script alone; ``toml``: whether a pipe does the preprocessing."""
    parser = ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="a folder with train/ and val/, each of class folders")
    if toml:
        parser.add_argument("--toml", type=Path, required=True, help="preprocessing, as it will be served")
        parser.add_argument("--val-toml", type=Path, help="preprocessing to validate with (default: --toml)")
        parser.add_argument(
            "--workers-decode",
            action="store_true",
            help="the workers, one at least, make whole batches, on the GPU too",
        )
    parser.add_argument("--arch", default="small", help="'small' or a torchvision classifier (default: %(default)s)")
    parser.add_argument(
        "--weights",
        metavar="FILE|pretrained",
        help="to start from, but for a classifier of other classes (default: random)",
    )
    parser.add_argument("--epochs", type=whole(1), default=10, help="(default: %(default)s)")
    parser.add_argument("--batch-size", type=whole(1), default=32, help="of each process (default: %(default)s)")
    parser.add_argument("--workers", type=whole(0), default=2, help="processes that read files (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="the highest learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, order and augmentation (default: %(default)s)")
    parser.add_argument("--bad-samples", choices=BAD_SAMPLES, default="raise", help="(default: %(default)s)")
    parser.add_argument("--device", type=to_device, help="'cpu', or a CUDA device (default: a GPU where there is one)")
    parser.add_argument("--checkpoint", type=Path, help="written after each epoch, and read where it is there")
    parser.add_argument("--save-every", type=whole(0), default=0, help="also after so many steps (default: never)")
    parser.add_argument("--max-steps", type=whole(1), help="stop after so many steps of this run, with a checkpoint")
    parser.add_argument("--tensorboard", type=Path, help="a folder for scalars; needs tensorboard")
    return parser


def guarded(name: str, work: Callable[[], object]) -> int:
    """The exit status: 0; 2 with one line on stderr where ``work`` raises what a user can mend; 130 after Ctrl-C."""
    try:
        work()
    except (TorchpipeError, OSError) as error:
        sys.stderr.write(f"{name}: {'; '.join(str(error).splitlines())}\n")  # at once, beside other ranks'
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def whole(low: int) -> Callable[[str], int]:
    """An argparse type: a whole number of at least ``low``."""

    def number(text: str) -> int:
        if int(text) < low:
            raise argparse.ArgumentTypeError(f"expected at least {low}, got {text}")
        return int(text)

    return number
