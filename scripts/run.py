"""``python scripts/run.py NAME ...``: rarely used tools. ``NAME --help`` explains the options of each."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

from torchpipe_py.arguments import ArgumentParser

TOOLS = {
    "demo": ("examples.demo", "draw and train configs/demo"),
    "textures": ("examples.textures", "draw a set to train on, whose classes differ by fine textures"),
    "lmdb": ("recipes.datasets", "pack class folders into LMDB"),
    "tfrecord": ("recipes.tfrecord", "pack class folders into TFRecord files"),
    "restoration": ("recipes.restoration", "train on pairs of images that NVIDIA DALI loads"),
    "loaders": ("recipes.experiments.comparison", "compare loaders of a training: torchvision, DALI, ours"),
    "decoders": ("benchmarks.decoders", "compare image decoders"),
    "compiling": ("benchmarks.compiling", "compile six configurations; whether the stated loss holds"),
    "profile": ("recipes.experiments.profile", "show where the time of a training goes"),
    "tricks": ("recipes.experiments.tricks", "measure what makes a training faster, one by one"),
    "consistency": (
        "recipes.experiments.consistency",
        "train on some pixels and serve on others: what it costs",
    ),
}


def main() -> int:
    """The exit status of the tool."""
    width = max(map(len, TOOLS))
    listed = "\n".join(f"  {name:{width}}  {purpose}" for name, (_, purpose) in TOOLS.items())
    about = f"Tools that few need:\n\n{listed}"
    parser = ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=TOOLS)
    args = parser.parse_args(sys.argv[1:2])
    sys.argv[0] += f" {args.name}"
    status: int = import_module(TOOLS[args.name][0]).main(sys.argv[2:])
    return status


if __name__ == "__main__":
    sys.exit(main())
