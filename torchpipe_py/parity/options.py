"""The options of ``torchpipe parity``, without anything that runs it."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from torchpipe_py.files import output_problem


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare every option."""
    add = parser.add_argument
    add("a", metavar="A.toml", help="the reference: its result is a Mat, a Tensor or a class")
    add("b", metavar="B.toml", help="to hold against it, with a result of the same kind")
    add("--img_dir", required=True, metavar="DIR", help="images, found recursively by extension")
    add("--model", metavar="CONFIG.toml", help="a pipe that takes either result as data: compares top-1 classes")
    add("--limit", type=_positive, metavar="N", help="only the first N images, in the order of their names")
    add("--html", type=_output, metavar="FILE", help="write a report with pictures, one self-contained file")
    add("--json", type=_output, metavar="FILE", help="write every figure of every image")
    add("--worst", type=count, default=10, metavar="N", help="images to show (default: %(default)s)")
    add("--max-mean", type=_not_negative, metavar="X", help="bar: mean absolute difference, averaged over all images")
    add("--min-agreement", type=_share, metavar="X", help="bar: share of images with the same class, 0 to 1")
    add("--max-drop", type=points, metavar="X", help="bar: points of accuracy (0 to 100) that B may lose")


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}")
    return value


def _not_negative(text: str) -> float:
    value = _number(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"expected at least 0, got {text}")
    return value


def points(text: str) -> float:
    """Percentage points of accuracy, 0 to 100."""
    value = _number(text)
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError(f"expected points of accuracy, 0 to 100, got {text}")
    return value


def _share(text: str) -> float:
    value = _number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"expected a share from 0 to 1, got {text}")
    return value


def count(text: str) -> int:
    """A whole number, at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number, at least 0, got {text!r}")
    return int(text)


def _positive(text: str) -> int:
    value = count(text)
    if value == 0:
        raise argparse.ArgumentTypeError("expected at least 1, got 0")
    return value


def _output(text: str) -> Path:
    """A file that can be written, so that no comparison is made and lost."""
    if problem := output_problem(text):
        raise argparse.ArgumentTypeError(f"{text}: {problem}")
    return Path(text)
