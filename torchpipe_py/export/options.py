"""The options of ``torchpipe export``."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from torchpipe_py.errors import ConfigError
from torchpipe_py.values import to_floats


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare every option."""
    option = parser.add_argument
    option("source", metavar="MODEL", help="a torchvision classifier, or module:function or file.py:function of yours")
    option(
        "--weights",
        metavar="FILE",
        help="a state dict, or a checkpoint that has one; of torchvision's models also 'pretrained' (the default), the "
        "name of weights, or 'random' to measure speed",
    )
    option("--out", type=_stem, default="model", metavar="NAME", help="NAME.onnx and NAME.toml (default: %(default)s)")
    option("--force", action="store_true", help="replace files that are there")
    option("--labels", type=Path, metavar="FILE", help="a class a line; default: the weights' own, if they have any")
    option(
        "--postprocessor",
        metavar="NAME",
        default="SoftmaxMax",
        help="of a classifier: SoftmaxMax (the default), TopK, Sigmoid for several labels, or '' for plain outputs",
    )
    pixels = parser.add_argument_group("preprocessing", "as the model was evaluated; default: that of the weights")
    option = pixels.add_argument
    option(
        "--transforms", metavar="WEIGHTS", help="torchvision's for these weights: ResNet50_Weights.IMAGENET1K_V1, say"
    )
    option("--resize", type=_sides, metavar="N|HxW", help="the shorter side, or height and width, pixels")
    option("--crop", type=_sides, metavar="N|HxW", help="of the middle, pixels")
    option("--interpolation", choices=("bilinear", "bicubic"), help="of the resize")
    option("--mean", type=_floats, metavar="R,G,B", help="of pixels from 0 to 1, as transforms.Normalize takes it")
    option("--std", type=_floats, metavar="R,G,B", help="the same")
    option("--color", choices=("rgb", "bgr", "gray"), default="rgb", help="that the model takes (default: %(default)s)")
    option("--preprocess", type=Path, metavar="TOML", help="decode and resize by this file instead, as in training")
    parser.add_argument("--opset", type=int, default=17, help="of ONNX (default: %(default)s)")


def _stem(text: str) -> Path:
    path = Path(text)
    return path.with_suffix("") if path.suffix in (".onnx", ".toml") else path


def _sides(text: str) -> int | tuple[int, int]:
    if not re.fullmatch(r"0*[1-9]\d*(x0*[1-9]\d*)?", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"expected pixels, as 224, or height and width, as 224x160, got {text!r}")
    height, by, width = text.partition("x")
    return (int(height), int(width)) if by else int(height)


def _floats(text: str) -> tuple[float, ...]:
    try:
        numbers = to_floats(text)
    except (ConfigError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if len(numbers) not in (1, 3):
        raise argparse.ArgumentTypeError(f"expected one number or three, got {len(numbers)}")
    return tuple(numbers)
