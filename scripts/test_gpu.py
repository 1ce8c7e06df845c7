"""How good a trained model is on labelled images, served by a pipe or run by PyTorch; on a GPU, or the CPU.

    python scripts/test_gpu.py --checkpoint last.pt --data DIR/val --toml configs/preprocess_gpu.toml --solution both

"pipe": preprocessing and model in one pipe, called from several threads, as a service does. "torch": the pipe
preprocesses only, and PyTorch runs the model in batches, as in training. DIR/val has a folder for each class.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recipes.command import guarded, whole
from recipes.evaluation import Agreement, Scores
from recipes.serving import PRECISIONS
from recipes.solutions import Run, by_pipe, by_torch

from torchpipe_py.training import ImageFolder

SOLUTIONS = ("pipe", "torch")


def main(argv: Sequence[str] | None = None) -> int:
    """0 when evaluated, 2 with one line on stderr otherwise."""
    args = _parser().parse_args(argv)

    def work() -> None:
        report = evaluate(args)
        if args.json is not None:
            args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")

    return guarded("test_gpu", work)


def evaluate(args: argparse.Namespace) -> dict[str, Any]:
    """Run and print what ``--solution`` asks for; all figures. Raises ``TorchpipeError``."""
    dataset = ImageFolder(args.data)
    labels = [label for _, label in dataset.samples]
    runs: dict[str, Run] = {}
    report: dict[str, Any] = {"data": str(args.data), "precision": args.precision, "solutions": {}}
    for name in SOLUTIONS if args.solution == "both" else (args.solution,):
        run = runs[name] = {"pipe": by_pipe, "torch": by_torch}[name](args, dataset)
        scores = Scores.of(labels, run.predictions.classes, len(dataset.classes))
        rate = len(labels) / run.seconds
        print(f"{name}: {scores}, {rate:.1f} images/s", flush=True)
        report["solutions"][name] = {**asdict(scores), "images_per_s": rate}
    if args.folder is not None and "pipe" in runs:
        print(f"torchpipe-serve {shlex.quote(str(args.folder / 'served.toml'))} serves that pipe")
    if len(runs) == 2:
        found = Agreement.of(*(run.predictions for run in runs.values()))
        print(f"top-1 agreement {found.share:.4f}, scores differ by {found.largest:.2g} at most")
        report["agreement"] = asdict(found)
    return report


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, required=True, help="written by scripts/train.py")
    parser.add_argument("--data", type=Path, required=True, help="a folder of class folders, DIR/val say")
    parser.add_argument("--toml", type=Path, required=True, help="preprocessing, as in training")
    parser.add_argument("--solution", choices=(*SOLUTIONS, "both"), default="both", help="(default: %(default)s)")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32", help="of the model (default: %(default)s)")
    parser.add_argument(
        "--engine", choices=("onnx", "tensorrt"), help="of the pipe (default: TensorRT where it works, else ONNX)"
    )
    parser.add_argument("--arch", help="as in training (default: the checkpoint's)")
    parser.add_argument("--size", type=whole(1), default=224, help="the TOML's, in pixels (default: %(default)s)")
    parser.add_argument("--clients", type=whole(1), default=8, help="threads that call the pipe (default: %(default)s)")
    parser.add_argument("--batch-size", type=whole(1), default=32, help="of PyTorch (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="processes that read for PyTorch (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="keeps model, labels, engine and served.toml (default: none)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all figures")
    return parser


if __name__ == "__main__":
    sys.exit(main())
