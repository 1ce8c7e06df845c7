"""Accuracy of a trained model on labelled images: everything in one pipe, or the pipe for preprocessing only.

"pipe": preprocessing and model in one pipe, with several requests in it, as in a service. "torch": the pipe
preprocesses only, and PyTorch runs the model in batches, as in training.
"""

from __future__ import annotations

import argparse
import json
import shlex
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from recipes.data import Normalise
from recipes.options import guarded
from recipes.serving import PRECISIONS, check_preprocessing, load_model, serving_config
from torchpipe_py import pipe
from torchpipe_py.arguments import ArgumentParser
from torchpipe_py.tools.options import at_least
from torchpipe_py.tools.statistics import wilson_interval
from torchpipe_py.training import ImageFolder, UnreadableFile, wrap_dataloader_torchpipe

SOLUTIONS = ("pipe", "torch")
NO_PREDICTION = -1


class Predictions:
    """``classes``: int64 N, -1 for an image that could not be read; ``scores``: float64 N, of the class named.

    ``seconds``: how long all took once the model was loaded and warm. With few images the time of ``by_torch`` is
    mostly that of its first batch: reading processes start with it.
    """

    def __init__(self, count: int) -> None:
        self.classes: Any = np.full(count, NO_PREDICTION, np.int64)
        self.scores: Any = np.zeros(count)
        self.seconds = 0.0


def score(labels: Sequence[int], predictions: Sequence[int], classes: int) -> dict[str, float]:
    """Of labels in 0..``classes`` - 1 and as many predictions, -1 for none, which count as wrong.

    Shares in 0..1: top-1 ``accuracy``, Wilson's 95 % interval ``low`` to ``high``, macro ``recall``, ``precision``:
    means over the classes that have images; a class that is never named has precision 0.
    """
    true, named = np.asarray(labels, np.int64), np.asarray(predictions, np.int64)
    right = np.bincount(true[true == named], minlength=classes)
    images, times_named = np.bincount(true, minlength=classes), np.bincount(named + 1, minlength=classes + 1)[1:]
    there, hits = images > 0, int(right.sum())
    low, high = wilson_interval(hits, len(true))
    return {
        "images": len(true),
        "unread": int((named == NO_PREDICTION).sum()),
        "accuracy": hits / len(true),
        "low": low,
        "high": high,
        "recall": float((right[there] / images[there]).mean()),
        "precision": float((right[there] / np.maximum(1, times_named[there])).mean()),
    }


def by_pipe(args: argparse.Namespace, dataset: ImageFolder) -> Predictions:
    """Preprocessing and model in one pipe, with ``--clients`` requests in it at a time."""
    predictions = Predictions(len(dataset))
    numbers = {name: number for number, name in enumerate(dataset.classes)}
    with ExitStack() as stack:
        folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = args.arch, args.size, args.precision
        config = serving_config(args.checkpoint, args.toml, *model, folder, dataset.classes)
        run = stack.enter_context(pipe(config))

        def requests(indices: Iterable[int]) -> Iterator[dict[str, Any]]:
            for index in indices:
                with suppress(UnreadableFile):
                    yield {"data": dataset[index][0], "index": index}

        deque(run.map(requests([0])), 0)
        began = perf_counter()
        for answer in run.map(requests(range(len(dataset))), ahead=args.clients):
            if "result" in answer:
                name, predictions.scores[answer["index"]] = answer["result"]
                predictions.classes[answer["index"]] = numbers[name]
        predictions.seconds = perf_counter() - began
    return predictions


def by_torch(args: argparse.Namespace, dataset: ImageFolder) -> Predictions:
    """Preprocessing by the pipe, the model by PyTorch in batches, as a training validates."""
    model = load_model(args.checkpoint, args.arch, dataset.classes)
    check_preprocessing(args.toml, args.size)
    plain = DataLoader(dataset, args.batch_size, num_workers=args.workers)
    predictions = Predictions(len(dataset))
    options: dict[str, Any] = {"bad_samples": "mask", "transforms_batch": Normalise()}
    with wrap_dataloader_torchpipe("single", plain, args.toml, **options) as loader:
        device = loader.devices[0]
        model.to(device)
        _probabilities(model, torch.zeros(args.batch_size, 3, args.size, args.size, device=device), args.precision)
        began = perf_counter()
        for batch in loader:
            scores, named = _probabilities(model, batch.images, args.precision).max(dim=1)
            indices = batch.indices[batch.mask].numpy()
            predictions.classes[indices] = named.cpu()[batch.mask].numpy()
            predictions.scores[indices] = scores.cpu()[batch.mask].numpy()
        predictions.seconds = perf_counter() - began
    return predictions


@torch.inference_mode()  # type: ignore[untyped-decorator]
def _probabilities(model: Any, images: Any, precision: str) -> Any:
    """float32 N×classes."""
    # NOTE: by default PyTorch rounds the operands of convolutions to TF32, which has fewer bits than fp32.
    with (
        torch.backends.cudnn.flags(enabled=True, allow_tf32=False),
        torch.autocast(images.device.type, torch.float16, enabled=precision == "fp16"),
    ):
        return model(images).float().softmax(dim=1)


# -- the command --------------------------------------------------------------------------------------------------


def evaluate(args: argparse.Namespace) -> dict[str, Any]:
    """Run and print the chosen ``--solution``; returns all figures. Raises ``TorchpipeError``."""
    dataset = ImageFolder(args.data)
    labels = [label for _, label in dataset.samples]
    runs: dict[str, Predictions] = {}
    report: dict[str, Any] = {"data": str(args.data), "precision": args.precision, "solutions": {}}
    for name in SOLUTIONS if args.solution == "both" else (args.solution,):
        runs[name] = {"pipe": by_pipe, "torch": by_torch}[name](args, dataset)
        scores, rate = score(labels, runs[name].classes, len(dataset.classes)), len(labels) / runs[name].seconds
        unread = f", {scores['unread']} could not be read" if scores["unread"] else ""
        print(
            f"{name}: {scores['images']} images{unread}, top-1 accuracy {scores['accuracy']:.4f} (95 % interval "
            f"{scores['low']:.4f} to {scores['high']:.4f}), macro recall {scores['recall']:.4f}, "
            f"macro precision {scores['precision']:.4f}, {rate:.1f} images/s",
            flush=True,
        )
        report["solutions"][name] = {**scores, "images_per_s": rate}
    if args.folder is not None and "pipe" in runs:
        print(f"torchpipe-serve {shlex.quote(str(args.folder / 'served.toml'))} serves that pipe")
    if len(runs) == 2:
        first, second = runs.values()
        both = (first.classes != NO_PREDICTION) & (second.classes != NO_PREDICTION)
        share = float((first.classes == second.classes).mean())
        largest = float(np.abs(first.scores - second.scores)[both].max(initial=0.0))
        report["agreement"] = {"share": share, "largest": largest}
        print(f"top-1 agreement {share:.4f}, scores differ by {largest:.2g} at most")
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """0 when evaluated, 2 with one line on stderr otherwise."""
    parser = ArgumentParser(description="How good a trained model is on labelled images.")
    option = parser.add_argument
    option("--checkpoint", type=Path, required=True, help="written by scripts/train.py")
    option("--data", type=Path, required=True, help="a folder of class folders, DIR/val say")
    option("--toml", type=Path, required=True, help="preprocessing, as in training")
    option("--solution", choices=(*SOLUTIONS, "both"), default="both", help="(default: %(default)s)")
    option("--precision", choices=PRECISIONS, default="fp32", help="of the model (default: %(default)s)")
    option("--arch", help="as in training (default: the checkpoint's)")
    option("--size", type=at_least(1), default=224, help="the TOML's, in pixels (default: %(default)s)")
    option("--clients", type=at_least(1), default=8, help="requests in the pipe at a time (default: %(default)s)")
    option("--batch-size", type=at_least(1), default=32, help="of PyTorch (default: %(default)s)")
    option("--workers", type=int, default=2, help="processes that read for PyTorch (default: %(default)s)")
    option("--folder", type=Path, help="keeps model, labels, engine and served.toml (default: none)")
    option("--json", type=Path, metavar="FILE", help="all figures")
    args = parser.parse_args(argv)

    def work() -> None:
        report = evaluate(args)
        if args.json is not None:
            args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")

    return guarded("test_gpu", work)
