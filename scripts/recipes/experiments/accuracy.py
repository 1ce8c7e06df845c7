"""What it costs to serve a model on other pixels than it was trained on: trained and served on the CPU and the GPU."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import local
from typing import Any

import torch
from benchmarks.service.servers import serving
from examples.textures import write_set

from recipes.data import pipe_on_cpu, pipe_on_gpu
from recipes.evaluation import Agreement, Predictions, Scores, by_torch
from recipes.options import make_parser
from recipes.place import Place
from recipes.serving import serving_config
from recipes.session import run
from torchpipe_py.cores import usable_cores
from torchpipe_py.idl import load_idl
from torchpipe_py.tools.parity.figures import Z_95
from torchpipe_py.training import ImageFolder, TrainingError

CLIENTS = 8
SMOOTHED = "GPU by nvImageCodec"

Row = dict[str, Any]


@dataclass(frozen=True)
class Difference:
    """``value``: accuracy of one run less that of another on the same images; ``low`` to ``high``: 95 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, labels: Any, first: Predictions, second: Predictions) -> Difference:
        """Of paired predictions, by the normal approximation of the discordant pairs."""
        gains = int(((first.classes == labels) & (second.classes != labels)).sum())
        losses = int(((first.classes != labels) & (second.classes == labels)).sum())
        count = len(labels)
        value = (gains - losses) / count
        half = Z_95 * math.sqrt(max(0.0, gains + losses - (gains - losses) ** 2 / count)) / count
        return cls(value, value - half, value + half)


def preprocessing(size: int) -> dict[str, dict[str, Any]]:
    """A pipe on the CPU, and those on the GPU where there is one; all to float32 1×3×``size``×``size`` of 0..255."""
    pipes = {"CPU": pipe_on_cpu(size, min(8, usable_cores()))}
    if torch.cuda.is_available():
        pipes |= {"GPU": pipe_on_gpu(size, 16), SMOOTHED: pipe_on_gpu(size, 16, decoder="nvimgcodec")}
    return pipes


def accuracy_table(args: argparse.Namespace) -> dict[str, Any]:
    """Rows of the table, each with its scores, and its difference to the row it is compared with."""
    _claim(args)
    whole, part = _data(args)
    pipes = preprocessing(args.size)
    models = {}
    for decoded in (name for name in pipes if name != SMOOTHED):
        models[decoded, 1.0] = _train(args, whole, pipes[decoded], args.work / f"{decoded}.pt", args.epochs)
    models["CPU", args.share] = _train(
        args, part, pipes["CPU"], args.work / "CPU_part.pt", round(args.epochs * args.part_epochs)
    )
    dataset = ImageFolder(whole / "val")
    labels = torch.tensor([label for _, label in dataset.samples]).numpy()
    predictions: dict[str, Predictions] = {}
    rows: list[Row] = []

    def row(name: str, predict: Callable[[], Predictions] | None, against: str | None = None) -> None:
        if predict is None:
            rows.append({"name": name, "not_measured": "PyTorch finds no CUDA device"})
            return
        try:
            predictions[name] = predict()
        except Exception as error:
            rows.append({"name": name, "not_measured": f"{type(error).__name__}: {error}"})
            return
        rows.append({"name": name, **asdict(Scores.of(labels, predictions[name].classes, len(dataset.classes)))})
        if against in predictions:
            rows[-1] |= {
                "against": against,
                "difference": asdict(Difference.of(labels, predictions[name], predictions[against])),
                "agreement": asdict(Agreement.of(predictions[name], predictions[against])),
            }

    def torch_on(trained: str, share: float, served: str) -> Callable[[], Predictions] | None:
        if trained not in pipes or served not in pipes:
            return None
        return lambda: by_torch(_evaluation(args, models[trained, share], pipes[served]), dataset).predictions

    def service(precision: str, engine: str) -> Callable[[], Predictions] | None:
        trained = "GPU" if "GPU" in pipes else "CPU"
        folder = args.work / f"{engine}_{precision}"
        return lambda: _by_service(args, models[trained, 1.0], pipes[trained], precision, engine, folder, dataset)

    for share in (1.0, args.share):
        reference = f"train CPU, {share:.0%} of the data; serve CPU"
        row(reference, torch_on("CPU", share, "CPU"))
        for served in ("GPU", SMOOTHED):
            row(f"train CPU, {share:.0%} of the data; serve {served}", torch_on("CPU", share, served), reference)
    own = "GPU" if "GPU" in pipes else "CPU"
    reference = f"train {own}; serve {own}, validation loop, PyTorch"
    row(reference, torch_on(own, 1.0, own))
    for engine, precision in (("tensorrt", "fp32"), ("tensorrt", "fp16")) if own == "GPU" else (("onnx", "fp32"),):
        row(f"train {own}; serve {own}, Thrift service, {engine} {precision}", service(precision, engine), reference)
    return {"images": len(dataset), "classes": len(dataset.classes), "arch": args.arch, "rows": rows}


def textures(args: argparse.Namespace) -> Path:
    """The generated set in the folder of the experiments, made where it is not there."""
    folder: Path = args.work / "textures"
    try:
        write_set(folder, args.train, args.val, args.classes, args.seed, jobs=usable_cores())
    except ValueError as error:
        raise TrainingError(f"--{error}") from error
    return folder


def _claim(args: argparse.Namespace) -> None:
    """Checkpoints and images in the folder are used again: ``TrainingError`` where they were made otherwise."""
    names = ["train", "val", "classes", "seed", "arch", "size", "epochs", "share", "part_epochs", "batch_size", "lr"]
    settings = {name: getattr(args, name) for name in names}
    path = args.work / "accuracy_settings.json"
    if path.exists():
        made_with = json.loads(path.read_text(encoding="utf-8"))
        other = [
            f"--{name.replace('_', '-')} {made_with.get(name)}"
            for name in names
            if made_with.get(name) != settings[name]
        ]
        if other:
            raise TrainingError(f"{args.work} holds models that were made with {', '.join(other)}; take another --work")
    path.write_text(json.dumps(settings), encoding="utf-8")


def _data(args: argparse.Namespace) -> tuple[Path, Path]:
    """The whole set, and one with a share of its training images and the same validation images."""
    whole, part = textures(args), args.work / f"textures_{args.share:g}"
    kept = max(1, round(args.share * args.train))
    for source in sorted((whole / "train").iterdir()):
        target = part / "train" / source.name
        target.mkdir(parents=True, exist_ok=True)
        for path in sorted(source.iterdir())[:kept]:
            if not (target / path.name).exists():
                (target / path.name).symlink_to(path.resolve())
    if not (part / "val").exists():
        (part / "val").symlink_to((whole / "val").resolve())
    return whole, part


def _train(args: argparse.Namespace, data: Path, toml: Any, checkpoint: Path, epochs: int) -> Path:
    """Train, unless that was done; the checkpoint."""
    per_class = len(list(next((data / "train").iterdir()).iterdir()))
    batch = max(2, min(args.batch_size, per_class * args.classes // 4))
    options = ["--data", data, "--toml", "-", "--arch", args.arch, "--epochs", epochs, "--batch-size", batch]
    options += ["--lr", args.lr, "--workers", args.workers, "--checkpoint", checkpoint, "--seed", args.seed]
    given = make_parser("a training").parse_args([str(option) for option in options])
    given.toml = toml
    print(f"training {checkpoint.stem}: {epochs} epochs of {per_class * args.classes} images", flush=True)
    run(given, Place("single"))
    return checkpoint


def _evaluation(args: argparse.Namespace, checkpoint: Path, toml: Any) -> argparse.Namespace:
    return argparse.Namespace(
        checkpoint=checkpoint,
        toml=toml,
        arch=args.arch,
        size=args.size,
        precision="fp32",
        batch_size=args.batch_size,
        workers=args.workers,
    )


def _by_service(
    args: argparse.Namespace,
    checkpoint: Path,
    toml: Any,
    precision: str,
    engine: str,
    folder: Path,
    dataset: ImageFolder,
) -> Predictions:
    """Every image sent to a service over Thrift, from several connections."""
    from thriftpy2.rpc import make_client

    serving_config(checkpoint, toml, args.arch, args.size, precision, engine, folder, dataset.classes)
    idl = load_idl()
    predictions = Predictions.none(len(dataset))
    numbers = {name: number for number, name in enumerate(dataset.classes)}
    with serving(str(folder / "served.toml")) as port, ThreadPoolExecutor(CLIENTS) as clients:
        mine = local()

        def predict(index: int) -> None:
            if not hasattr(mine, "client"):
                mine.client = make_client(idl.InferenceService, "127.0.0.1", port, timeout=60_000)
            answer = mine.client.infer_batch(idl.InferenceParams(uuid=str(index), data=dataset[index][0]))
            predictions.classes[index], predictions.scores[index] = numbers[answer.label], answer.score

        for _ in clients.map(predict, range(len(dataset))):
            pass
    return predictions
