"""``python scripts/run.py NAME ...``: the tools that few need. ``NAME --help`` explains its options.

``demo`` draws and trains ``configs/demo``; ``textures`` draws a set to train on; ``loader_throughput`` measures data
loaders of a training; ``tfrecord`` packs class folders; ``restoration`` trains on pairs of images, by NVIDIA DALI.
"""

from __future__ import annotations

import sys
from importlib import import_module

from torchpipe_py.arguments import ArgumentParser

MODULES = {
    "demo": "examples.demo",
    "textures": "examples.textures",
    "loader_throughput": "recipes.loaders",
    "tfrecord": "recipes.tfrecord",
    "restoration": "recipes.restoration",
}


def main() -> int:
    """The exit status of the tool."""
    parser = ArgumentParser(description="Tools that few need.")
    parser.add_argument("name", choices=MODULES)
    args = parser.parse_args(sys.argv[1:2])
    sys.argv[0] += f" {args.name}"
    status: int = import_module(MODULES[args.name]).main(sys.argv[2:])
    return status


if __name__ == "__main__":
    sys.exit(main())
