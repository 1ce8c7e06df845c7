"""The tables of training and serving.

``python scripts/experiments.py accuracy|throughput|epochs|report --work DIR``

``accuracy``: recall and precision where training and serving decode alike, and where they do not, on generated
textures. ``throughput``: loaders side by side. ``epochs``: plain, mixed precision, DP, DDP. Each writes its figures
to DIR; ``report`` makes tables (``report.md``) of those that are there, and plots where matplotlib is installed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from recipes.experiments.accuracy import accuracy_table, textures
from recipes.experiments.epochs import SCRIPTS, epochs_table
from recipes.experiments.report import report
from recipes.models import make_model
from recipes.options import guarded
from torchpipe_py.arguments import ArgumentParser


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    if args.toml is None:
        name = "train_gpu.toml" if torch.cuda.is_available() else "preprocess_cpu.toml"
        args.toml = str(SCRIPTS.parent / "configs" / name)
    if args.name != "throughput":
        return guarded("experiments", lambda: _run(args))
    status = guarded("experiments", lambda: _prepare(args))
    command = [sys.executable, str(SCRIPTS / "loader_throughput.py"), "--data", str(args.data)]
    options = ["--json", str(args.work / "throughput.json"), *args.more]
    return status or subprocess.run([*command, *options], check=False).returncode


def _prepare(args: argparse.Namespace) -> None:
    """The folder, and images where none are given."""
    args.work.mkdir(parents=True, exist_ok=True)
    args.data = args.data or textures(args)


def _run(args: argparse.Namespace) -> None:
    if args.name == "report":
        print(report(args.work))
        return
    args.work.mkdir(parents=True, exist_ok=True)
    make_model(args.arch, args.classes, args.seed)  # whatever it lacks is told before any work
    if args.name == "accuracy":
        figures = accuracy_table(args)
    else:
        _prepare(args)
        figures = epochs_table(args)
    figures["machine"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    (args.work / f"{args.name}.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print(report(args.work, only=args.name))


def _parser() -> ArgumentParser:
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    option = parser.add_argument
    option("name", choices=("accuracy", "throughput", "epochs", "report"))
    option("--work", type=Path, required=True, help="a folder for data, checkpoints and figures")
    option("--data", type=Path, help="of throughput and epochs: a folder with train/ and val/ (default: textures)")
    option("--train", type=int, default=200, help="generated images of each class (default: %(default)s)")
    option("--val", type=int, default=250, help="and to validate with (default: %(default)s)")
    option("--classes", type=int, default=8, help="(default: %(default)s)")
    option("--seed", type=int, default=0, help="of images and training (default: %(default)s)")
    option("--arch", default="resnet18", help="'small' or a torchvision classifier (default: %(default)s)")
    option("--size", type=int, default=224, help="of accuracy: side of the network's input (default: %(default)s)")
    option("--epochs", type=int, default=8, help="(default: %(default)s)")
    option("--share", type=float, default=0.05, help="of the images, for the small training (default: %(default)s)")
    option("--part-epochs", type=float, default=5.0, help="so many times the epochs for it (default: %(default)s)")
    option("--batch-size", type=int, default=64, help="of accuracy and epochs (default: %(default)s)")
    option("--lr", type=float, default=1e-3, help="of accuracy (default: %(default)s)")
    option("--workers", type=int, default=4, help="of accuracy and epochs: reading processes (default: %(default)s)")
    option("--workers-decode", action="store_true", help="of epochs: they make whole batches, on the GPU too")
    option("--toml", help="of epochs (default: configs/train_gpu.toml, without a GPU configs/preprocess_cpu.toml)")
    option("--only", nargs="+", choices=("plain", "bf16", "fp16", "DP", "DDP"), help="of epochs")
    option("--more", nargs=argparse.REMAINDER, default=[], help="of throughput: options of loader_throughput.py")
    return parser
