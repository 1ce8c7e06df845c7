"""How good a trained model is on labelled images: everything in one pipe, or the pipe for preprocessing only.

"pipe": preprocessing and model in one pipe, called from several threads, as a service does. "torch": the pipe
preprocesses only, and PyTorch runs the model in batches, as in training.
"""

from __future__ import annotations

import argparse
import json
import shlex
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from recipes.data import Normalise
from recipes.options import guarded, whole
from recipes.serving import PRECISIONS, check_preprocessing, load_model, serving_config
from torchpipe_py import pipe
from torchpipe_py.arguments import ArgumentParser
from torchpipe_py.tools.parity.figures import wilson
from torchpipe_py.training import ImageFolder, UnreadableFile, wrap_dataloader_torchpipe

SOLUTIONS = ("pipe", "torch")
NO_PREDICTION = -1


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
        agreement = Agreement.of(*(run.predictions for run in runs.values()))
        print(f"top-1 agreement {agreement.share:.4f}, scores differ by {agreement.largest:.2g} at most")
        report["agreement"] = asdict(agreement)
    return report


def _parser() -> ArgumentParser:
    parser = ArgumentParser(description="How good a trained model is on labelled images.")
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


@dataclass(frozen=True)
class Predictions:
    """``classes``: int64 N, -1 for an image that could not be read; ``scores``: float64 N, of the class named."""

    classes: Any
    scores: Any

    @classmethod
    def none(cls, count: int) -> Predictions:
        """To be filled in."""
        return cls(np.full(count, NO_PREDICTION, np.int64), np.zeros(count))


@dataclass(frozen=True)
class Scores:
    """Shares in 0..1: top-1 ``accuracy``, Wilson's 95 % interval ``low`` to ``high``, macro ``recall``, ``precision``.

    Recall and precision are means over the classes that have images; one that is never named has precision 0.
    ``unread`` images have no prediction, and count as wrong.
    """

    images: int
    unread: int
    accuracy: float
    low: float
    high: float
    recall: float
    precision: float

    @classmethod
    def of(cls, labels: Sequence[int], predictions: Sequence[int], classes: int) -> Scores:
        """Of N labels in 0..``classes`` - 1 and N predictions, -1 for none; ``ValueError`` where these do not fit."""
        true, named = np.asarray(labels, np.int64), np.asarray(predictions, np.int64)
        if true.shape != named.shape or not len(true):
            raise ValueError(f"{len(true)} labels and {len(named)} predictions; expected equally many, at least one")
        if min(true.min(), named.min() + 1) < 0 or max(true.max(), named.max()) >= classes:
            raise ValueError(f"a label or prediction is none of the {classes} classes")
        right = np.bincount(true[true == named], minlength=classes)
        images, times_named = np.bincount(true, minlength=classes), np.bincount(named + 1, minlength=classes + 1)[1:]
        there = images > 0
        hits, count = int(right.sum()), len(true)
        low, high = wilson(hits, count)
        return cls(
            images=count,
            unread=int((named == NO_PREDICTION).sum()),
            accuracy=hits / count,
            low=low,
            high=high,
            recall=float((right[there] / images[there]).mean()),
            precision=float((right[there] / np.maximum(1, times_named[there])).mean()),
        )

    def __str__(self) -> str:
        interval = f"95 % interval {self.low:.4f} to {self.high:.4f}"
        unread = f", {self.unread} could not be read" if self.unread else ""
        return (
            f"{self.images} images{unread}, top-1 accuracy {self.accuracy:.4f} ({interval}), "
            f"macro recall {self.recall:.4f}, macro precision {self.precision:.4f}"
        )


@dataclass(frozen=True)
class Agreement:
    """``share`` of the images that get the same class; ``largest`` difference of scores, of images both could read."""

    share: float
    largest: float

    @classmethod
    def of(cls, first: Predictions, second: Predictions) -> Agreement:
        """Of two runs over the same images, at least one."""
        both = (first.classes != NO_PREDICTION) & (second.classes != NO_PREDICTION)
        gaps = np.abs(first.scores - second.scores)[both]
        return cls(float((first.classes == second.classes).mean()), float(gaps.max(initial=0.0)))


@dataclass(frozen=True)
class Run:
    """A solution's predictions, in the dataset's order, and how long all took once the model was loaded and warm.

    With few images the time of ``by_torch`` is mostly that of its first batch: reading processes start with it.
    """

    predictions: Predictions
    seconds: float


def by_pipe(args: argparse.Namespace, dataset: ImageFolder) -> Run:
    """Preprocessing and model in one pipe, called from ``--clients`` threads."""
    predictions = Predictions.none(len(dataset))
    numbers = {name: number for number, name in enumerate(dataset.classes)}
    with ExitStack() as stack:
        folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        config = serving_config(
            args.checkpoint, args.toml, args.arch, args.size, args.precision, args.engine, folder, dataset.classes
        )
        run = stack.enter_context(pipe(config))
        clients = stack.enter_context(ThreadPoolExecutor(args.clients))

        def predict(index: int) -> None:
            try:
                request: dict[str, Any] = {"data": dataset[index][0]}
            except UnreadableFile:
                return
            run(request)
            if "result" in request:
                name, predictions.scores[index] = request["result"]
                predictions.classes[index] = numbers[name]

        predict(0)
        began = perf_counter()
        for _ in clients.map(predict, range(len(dataset))):
            pass
        return Run(predictions, perf_counter() - began)


def by_torch(args: argparse.Namespace, dataset: ImageFolder) -> Run:
    """Preprocessing by the pipe, the model by PyTorch in batches: what validates in training."""
    model = load_model(args.checkpoint, args.arch, dataset.classes)
    check_preprocessing(args.toml, args.size)
    plain = DataLoader(dataset, args.batch_size, num_workers=args.workers)
    predictions = Predictions.none(len(dataset))
    with wrap_dataloader_torchpipe(
        "single", plain, args.toml, bad_samples="mask", transforms_batch=Normalise()
    ) as loader:
        device = loader.devices[0]
        model.to(device)
        _probabilities(model, torch.zeros(args.batch_size, 3, args.size, args.size, device=device), args.precision)
        began = perf_counter()
        for batch in loader:
            scores, named = _probabilities(model, batch.images, args.precision).max(dim=1)
            indices = batch.indices[batch.mask].numpy()
            predictions.classes[indices] = named.cpu()[batch.mask].numpy()
            predictions.scores[indices] = scores.cpu()[batch.mask].numpy()
        return Run(predictions, perf_counter() - began)


@torch.inference_mode()  # type: ignore[untyped-decorator]
def _probabilities(model: Any, images: Any, precision: str) -> Any:
    """float32 N×classes."""
    # NOTE: by default PyTorch rounds the operands of convolutions to TF32, which is not what fp32 says.
    with (
        torch.backends.cudnn.flags(enabled=True, allow_tf32=False),
        torch.autocast(images.device.type, torch.float16, enabled=precision == "fp16"),
    ):
        return model(images).float().softmax(dim=1)
