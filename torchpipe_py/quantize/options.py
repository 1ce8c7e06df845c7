"""The options of ``torchpipe quantize``, without anything that runs it."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchpipe_py.parity.options import count, points

MOST = 128
"""Images to calibrate with, unless told: what a layer gives hardly goes beyond what that many have shown."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare every option."""
    add = parser.add_argument
    add("config", metavar="CONFIG.toml", help="the pipe whose model is quantised; its result is a class")
    add(
        "--img_dir",
        required=True,
        metavar="DIR",
        help="images, found recursively; labelled ones are LABEL/name.jpg or LABEL_name.jpg",
    )
    add(
        "--out",
        type=_onnx,
        default="model.int8.onnx",
        metavar="FILE.onnx",
        help="where the int8 model is written (default: %(default)s)",
    )
    add("--force", action="store_true", help="replace a file that is there")
    add("--node", metavar="NAME", help="the node whose model is meant, where several run one")
    add(
        "--max-drop",
        type=points,
        default=0.5,
        metavar="X",
        help="points of accuracy, 0 to 100, that it may lose (default: %(default)s); without labels: that many of 100 "
        "images may change their class",
    )
    add(
        "--calibrate",
        type=count,
        default=MOST,
        metavar="N",
        help="images to calibrate with (default: %(default)s), half of them all at most; it is checked on the others",
    )
    add(
        "--keep",
        type=count,
        default=0,
        metavar="N",
        help="look for layers that int8 harms most, and keep up to N of them in fp32 (default: none)",
    )


def _onnx(text: str) -> Path:
    path = Path(text)
    if path.suffix != ".onnx":
        raise argparse.ArgumentTypeError(
            f"expected a name that ends in .onnx, got {text!r}; {path.stem or 'model.int8'}.onnx, say"
        )
    return path
