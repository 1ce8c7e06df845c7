"""Two ways to use a trained model: everything in one pipe, or the pipe for preprocessing and PyTorch for the model."""

from __future__ import annotations

import argparse
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import DataLoader

from recipes.data import Normalise
from recipes.evaluation import Predictions
from recipes.serving import check_preprocessing, load_model, serving_config
from torchpipe_py import pipe
from torchpipe_py.training import ImageFolder, UnreadableFile, wrap_dataloader_torchpipe


@dataclass(frozen=True)
class Run:
    """A solution's predictions, in the dataset's order, and how long all took once the model was loaded and warm.

    With few images the time of ``by_torch`` is mostly that of its first batch: reading processes start with it.
    """

    predictions: Predictions
    seconds: float


def by_pipe(args: argparse.Namespace, dataset: ImageFolder) -> Run:
    """Preprocessing and model in one pipe, called from ``--clients`` threads."""
    found = Predictions.none(len(dataset))
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
                name, found.scores[index] = request["result"]
                found.classes[index] = numbers[name]

        predict(0)
        began = perf_counter()
        for _ in clients.map(predict, range(len(dataset))):
            pass
        return Run(found, perf_counter() - began)


def by_torch(args: argparse.Namespace, dataset: ImageFolder) -> Run:
    """Preprocessing by the pipe, the model by PyTorch in batches: what validates in training."""
    model = load_model(args.checkpoint, args.arch, dataset.classes)
    check_preprocessing(args.toml, args.size)
    plain = DataLoader(dataset, args.batch_size, num_workers=args.workers)
    found = Predictions.none(len(dataset))
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
            found.classes[indices] = named.cpu()[batch.mask].numpy()
            found.scores[indices] = scores.cpu()[batch.mask].numpy()
        return Run(found, perf_counter() - began)


@torch.inference_mode()
def _probabilities(model: Any, images: Any, precision: str) -> Any:
    """float32 N×classes."""
    # NOTE: by default PyTorch rounds the operands of convolutions to TF32, which is not what fp32 says.
    with (
        torch.backends.cudnn.flags(enabled=True, allow_tf32=False),
        torch.autocast(images.device.type, torch.float16, enabled=precision == "fp16"),
    ):
        return model(images).float().softmax(dim=1)
