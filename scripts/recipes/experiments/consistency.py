"""Cost of serving a model on other pixels than it was trained on, as the table of torchpipe's document.

    python scripts/run.py consistency --work DIR            # on a GPU, some minutes
    python scripts/run.py consistency --work DIR --small    # on two cores, within two minutes

Trains a classifier of generated fine textures on pixels decoded by the CPU (all images, and a small share) and by the
GPU, and names the validation images on each decoder's pixels: by PyTorch, and by a pipe in fp32 and fp16. A row is
compared with the same model on its training pixels. Rows that need a GPU are marked on a machine without one.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from benchmarks.common import aligned, machine
from examples.textures import KINDS, write_set

from recipes.evaluation import Predictions, by_pipe, by_torch, score
from recipes.options import Place, guarded, make_parser
from recipes.session import run
from torchpipe_py.arguments import ArgumentParser
from torchpipe_py.cores import usable_cores
from torchpipe_py.errors import logger
from torchpipe_py.tools.options import at_least
from torchpipe_py.tools.statistics import paired_interval
from torchpipe_py.training import ImageFolder, TrainingError

CPU, PILLOW = "cpu decode", "cpu decode, PillowResizeMat"
GPU, SMOOTH = "gpu decode (nvJPEG)", "gpu decode (nvImageCodec)"
NO_GPU = "PyTorch finds no CUDA device"
SETTINGS = ("train", "val", "classes", "arch", "size", "epochs", "share", "part_epochs", "batch_size", "lr", "seed")
SMALL: dict[str, Any] = {"arch": "small", "classes": 4, "train": 60, "val": 50, "epochs": 10, "part_epochs": 4.0}
SMALL |= {"batch_size": 16, "lr": 3e-3}

Row = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """One training: on pixels decoded as ``decode`` says, ``share`` of the images, so many epochs."""

    name: str
    decode: str
    share: float
    epochs: int

    def row_name(self) -> str:
        """For the table's column "train type"."""
        part = "all data" if self.share == 1 else f"{self.share:.0%} data"
        return f"{self.decode}, {part} train"


def preprocessing(size: int) -> dict[str, dict[str, Any]]:
    """Configurations by name, all to Tensors 1×3×``size``×``size`` of 0..255; with a GPU also those on it."""
    sides = {"resize_h": size, "resize_w": size}
    on_cpu = {**sides, "color": "rgb", "device": "cpu", "instance_num": min(8, usable_cores())}
    nodes = {
        CPU: {"backend": "S[DecodeMat,ResizeMat,cvtColorMat,Mat2Tensor]", **on_cpu},
        PILLOW: {"backend": "S[DecodeMat,PillowResizeMat,cvtColorMat,Mat2Tensor]", **on_cpu},
    }
    if torch.cuda.is_available():
        on_gpu = {"backend": "S[DecodeTensor,ResizeTensor,SyncTensor]", **sides, "max": 16}
        nodes |= {GPU: {**on_gpu, "decoder": "torchvision"}, SMOOTH: {**on_gpu, "decoder": "nvimgcodec"}}
    return {name: {"preprocess": node} for name, node in nodes.items()}


def consistency(args: argparse.Namespace) -> dict[str, Any]:
    """Train and evaluate; the figures. What fails is a row with the reason in ``not_measured``."""
    began = perf_counter()
    _claim(args)
    data = _draw(args)
    pipes = preprocessing(args.size)
    models = [
        Model("cpu_all", CPU, 1.0, args.epochs),
        Model("cpu_part", CPU, args.share, max(1, round(args.epochs * args.part_epochs))),
        Model("gpu_all", GPU, 1.0, args.epochs),
    ]
    problems = {model.name: _train(args, model, data, pipes) for model in models}
    rows = Rows(ImageFolder(data / "val"), problems, pipes)

    def by_pytorch(model: Model, decode: str) -> tuple[Predictions, str]:
        return by_torch(_evaluation(args, model, pipes[decode]), rows.dataset), ""

    def by_torchpipe(model: Model, precision: str) -> tuple[Predictions, str]:
        with chosen_backends() as names:
            predictions = by_pipe(_evaluation(args, model, pipes[model.decode], precision), rows.dataset)
        return predictions, " ".join(dict.fromkeys(names))

    cpu_all, cpu_part, gpu_all = models
    for model in (cpu_all, cpu_part):
        reference = rows.add(model, CPU, CPU, partial(by_pytorch, model, CPU))
        for decode in (GPU, SMOOTH, PILLOW):
            rows.add(model, decode, decode, partial(by_pytorch, model, decode), reference)
    for model in (gpu_all,) if GPU in pipes else (gpu_all, cpu_all):
        own = model.decode
        reference = rows.add(model, own, f"{own} + torch model", partial(by_pytorch, model, own))
        for precision in ("fp32", "fp16"):
            predict = partial(by_torchpipe, model, precision)
            rows.add(model, own, f"{own} + torchpipe {precision}", predict, reference)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return {
        "machine": {**machine(), "device": device, "torch": torch.__version__},
        "settings": {name: getattr(args, name) for name in SETTINGS},
        "images": len(rows.dataset),
        "seconds": perf_counter() - began,
        "rows": rows.rows,
    }


class Rows:
    """The rows of the table, and the predictions that later rows are held against."""

    def __init__(self, dataset: ImageFolder, problems: dict[str, str], pipes: dict[str, Any]) -> None:
        self.dataset, self._problems, self._pipes = dataset, problems, pipes
        self.rows: list[Row] = []
        self._labels = np.array([label for _, label in dataset.samples])
        self._predictions: dict[int, Predictions] = {}

    def add(
        self,
        model: Model,
        decode: str,
        inference: str,
        predict: Callable[[], tuple[Predictions, str]],
        against: int | None = None,
    ) -> int:
        """Measure a row; its index, from 1. ``predict`` gives predictions, and the backends that ran the model."""
        index = len(self.rows) + 1
        row: Row = {"index": index, "train": model.row_name(), "inference": inference}
        self.rows.append(row)
        if decode not in self._pipes or model.decode not in self._pipes:
            row["not_measured"] = NO_GPU
        elif self._problems[model.name]:
            row["not_measured"] = self._problems[model.name]
        else:
            try:
                predictions, row["engine"] = predict()
            except Exception as error:
                row["not_measured"] = _one_line(error)
                return index
            self._predictions[index] = predictions
            row |= score(self._labels.tolist(), predictions.classes.tolist(), len(self.dataset.classes))
            if against in self._predictions:
                row |= self._held_against(against, row, predictions)
        return index

    def _held_against(self, against: int, row: Row, predictions: Predictions) -> Row:
        """Differences to a row before it, and Newcombe's 95 % interval of that of the accuracies."""
        other, reference = self.rows[against - 1], self._predictions[against]
        right, before = predictions.classes == self._labels, reference.classes == self._labels
        counts = [int(part.sum()) for part in (right & before, right & ~before, ~right & before, ~right & ~before)]
        low, high = paired_interval(*counts)
        return {
            "against": against,
            "recall_diff": row["recall"] - other["recall"],
            "precision_diff": row["precision"] - other["precision"],
            "agreement": float((predictions.classes == reference.classes).mean()),
            "accuracy_diff": float(right.mean() - before.mean()),
            "accuracy_diff_low": low,
            "accuracy_diff_high": high,
        }


# -- data and models ----------------------------------------------------------------------------------------------


def _claim(args: argparse.Namespace) -> None:
    """Images and checkpoints in the folder are used again: ``TrainingError`` where they were made otherwise."""
    settings = {name: getattr(args, name) for name in SETTINGS}
    path = args.work / "settings.json"
    args.work.mkdir(parents=True, exist_ok=True)
    if path.exists():
        made_with = json.loads(path.read_text(encoding="utf-8"))
        other = [
            f"--{name.replace('_', '-')} {made_with.get(name)}"
            for name in SETTINGS
            if made_with.get(name) != settings[name]
        ]
        if other:
            raise TrainingError(f"--work {args.work} was made with {', '.join(other)}; repeat these, or take another")
    path.write_text(json.dumps(settings), encoding="utf-8")


def _draw(args: argparse.Namespace) -> Path:
    """The folder of the textures, drawn unless that was done."""
    folder: Path = args.work / "textures"
    if not folder.exists():
        print(f"drawing {args.classes} classes of {args.train} + {args.val} images", flush=True)
        unfinished = args.work / "textures.unfinished"
        write_set(unfinished, args.train, args.val, args.classes)
        unfinished.rename(folder)
    return folder


def _train(args: argparse.Namespace, model: Model, data: Path, pipes: dict[str, Any]) -> str:
    """Train it, unless its checkpoint is complete; the reason if that failed."""
    if model.decode not in pipes:
        return NO_GPU
    is_part = model.share < 1
    images = max(1, round(model.share * args.train))
    folder = _training_folder(args.work / model.name, data, images)
    options = {"data": folder, "toml": "-", "arch": args.arch, "epochs": model.epochs, "lr": args.lr}
    options |= {"batch-size": max(2, min(args.batch_size, images * args.classes // 4)), "seed": args.seed}
    options |= {"workers": 0 if is_part else args.workers}  # to start them would take longer than an epoch
    options |= {"checkpoint": args.work / f"{model.name}.pt"}
    given = make_parser().parse_args([str(part) for name, value in options.items() for part in (f"--{name}", value)])
    given.toml = pipes[model.decode]
    log = args.work / f"{model.name}.log"
    print(f"{model.row_name()}: {model.epochs} epochs of {images * args.classes} images; see {log}", flush=True)
    try:
        with log.open("a", encoding="utf-8") as file, redirect_stdout(file):
            run(given, Place())
    except Exception as error:
        return f"its training failed: {_one_line(error)}"
    return ""


def _training_folder(folder: Path, data: Path, images: int) -> Path:
    """A folder with links to so many training images of each class, and to one that each epoch is validated with."""
    if not folder.exists():
        unfinished = folder.with_name(f"{folder.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        for split, count in (("train", images), ("val", 1)):
            for source in sorted((data / split).iterdir()):
                target = unfinished / split / source.name
                target.mkdir(parents=True)
                for path in sorted(source.iterdir())[:count]:
                    (target / path.name).symlink_to(path.resolve())
        unfinished.rename(folder)
    return folder


def _evaluation(args: argparse.Namespace, model: Model, toml: Any, precision: str = "fp32") -> argparse.Namespace:
    """The options of ``test_gpu.py`` that ``by_torch`` and ``by_pipe`` read."""
    return argparse.Namespace(
        checkpoint=args.work / f"{model.name}.pt",
        toml=toml,
        arch=args.arch,
        size=args.size,
        precision=precision,
        batch_size=args.batch_size,
        workers=args.workers,
        clients=8,
        folder=args.work / f"{model.name}_{precision}",  # with TensorRT's engine
    )


@contextmanager
def chosen_backends() -> Iterator[list[str]]:
    """Names of the backends that ``FirstAvailable`` takes meanwhile, as it logs them."""
    names: list[str] = []

    class Choices(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            names.extend(re.findall(r": using (\w+)", record.getMessage()))

    handler, level = Choices(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield names
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


# -- the command --------------------------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> str:
    """The rows in Markdown: the document's columns, with the comparison's before the last one."""
    header = ["index", "train type", "model inference method", "recall", "Diff", "precision", "Diff"]
    lines = [[*header, "same class", "accuracy Diff (95 % interval)", "remark"]]
    for row in rows:
        engine = f" ({row['engine']})" if row.get("engine") else ""
        cells = [str(row["index"]), row["train"], row["inference"] + engine]
        if "not_measured" in row:
            cells += [*[""] * 6, f"not measured: {row['not_measured']}"]
        elif "against" in row:
            for name in ("recall", "precision"):
                cells += [f"{row[name]:.2%}", f"{row[f'{name}_diff']:+.2%}"]
            interval = f"{row['accuracy_diff_low']:+.2%} to {row['accuracy_diff_high']:+.2%}"
            cells += [f"{row['agreement']:.2%}", f"{row['accuracy_diff']:+.2%} ({interval})"]
            cells += [f"against row {row['against']}"]
        else:
            cells += [f"{row['recall']:.2%}", "", f"{row['precision']:.2%}", "", "", "", ""]
        lines.append(cells)
    return aligned(lines)


def to_share(text: str) -> float:
    """A share of the images, more than 0 and less than 1."""
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text}: a share of the images, more than 0 and less than 1")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """0 when a row was measured, 1 when none was, 2 with one line on stderr for wrong input."""
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    option = parser.add_argument
    option("--work", type=Path, required=True, help="a folder for images, checkpoints and served models")
    small = ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in SMALL.items())
    option("--small", action="store_true", help=f"for two cores: {small}; options beside it come first")
    given: dict[str, Any] = {"default": argparse.SUPPRESS}
    defaults: dict[str, Any] = {"train": 150, "val": 100, "classes": len(KINDS), "arch": "resnet18", "size": 224}
    defaults |= {"epochs": 12, "share": 0.05, "part_epochs": 5.0, "batch_size": 64, "lr": 1e-3, "seed": 0}
    option("--train", type=at_least(2), **given, help="images of each class (default: 150)")
    option("--val", type=at_least(1), **given, help="of each class, to validate with (default: 100)")
    option("--classes", type=int, choices=range(2, len(KINDS) + 1), **given, help="(default: 8)")
    option("--arch", **given, help="'small' or a torchvision classifier (default: resnet18)")
    option("--size", type=at_least(8), **given, help="side of the network's input in pixels (default: 224)")
    option("--epochs", type=at_least(1), **given, help="(default: 12)")
    option("--share", type=to_share, **given, help="of the images, for the small training (default: 0.05)")
    option("--part-epochs", type=float, **given, help="times the epochs, for the small training (default: 5)")
    option("--batch-size", type=at_least(2), **given, help="(default: 64)")
    option("--lr", type=float, **given, help="the highest learning rate (default: 0.001)")
    option("--seed", type=int, **given, help="of weights, order and augmentation (default: 0)")
    option("--workers", type=at_least(0), default=2, help="processes that read files (default: %(default)s)")
    option("--json", type=Path, metavar="FILE", help="write all figures")
    args = parser.parse_args(argv)
    args = argparse.Namespace(**{**defaults, **(SMALL if args.small else {}), **vars(args)})
    figures: dict[str, Any] = {}

    def work() -> None:
        figures.update(consistency(args))
        here = figures["machine"]
        print(f"\n{here['device']}, {here['cpu']}, {here['cores']} cores, PyTorch {here['torch']}")
        print(f"{figures['images']} images of {args.classes} classes, {args.arch}, {figures['seconds']:.0f} s")
        print(table(figures["rows"]))
        if args.json is not None:
            args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")

    if status := guarded("consistency", work):
        return status
    return 0 if any("recall" in row for row in figures["rows"]) else 1
