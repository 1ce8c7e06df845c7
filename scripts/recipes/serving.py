"""From a checkpoint of a training to the configuration of a pipe that serves it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from examples.export import ExportError, compare_logits, save_onnx
from examples.files import to_toml
from torch import nn

from recipes import checkpoints
from recipes.data import MEAN, STD, Normalise
from recipes.models import make_model
from torchpipe_py import parse_toml
from torchpipe_py.backends.models.onnx_graph import half_model, normalized_model
from torchpipe_py.plan.config import GLOBAL
from torchpipe_py.training import TrainingError
from torchpipe_py.training.batches.decoder import Config, Decoder
from torchpipe_py.training.devices import choose_devices

OPSET = 17
TOLERANCE = 1e-3  # of a logit, or of the largest one where that is above 1
PRECISIONS = ("fp32", "fp16")
ENGINES = {
    None: "SyncTensor[FirstAvailable[TensorrtTensor,OnnxTensor]]",
    "onnx": "OnnxTensor",
    "tensorrt": "SyncTensor[TensorrtTensor]",
}


def load_model(checkpoint: Path, arch: str | None, classes: Sequence[str]) -> nn.Module:
    """The trained network, on the CPU and in eval mode; ``arch`` is the checkpoint's unless given.

    ``TrainingError`` for a file that is not there or no checkpoint of a training, other classes, or another ``arch``.
    """
    state = checkpoints.load(checkpoint)
    if state is None:
        raise TrainingError(f"{checkpoint}: no such file")
    checkpoints.check_classes(checkpoint, state["classes"], classes)
    arch = arch or state.get("arch") or "small"
    model = make_model(arch, len(classes), seed=0)
    checkpoints.load_weights(checkpoint, model, state["model"], arch, state.get("arch"))
    return model.eval()


def serving_config(
    checkpoint_path: Path,
    toml: Config,
    arch: str | None,
    size: int,
    precision: str,
    engine: str | None,
    folder: Path,
    classes: Sequence[str],
) -> dict[str, Any]:
    """What ``pipe`` takes: the nodes of ``toml``, then the model, whose result is ``(class name, score)``.

    ``toml`` gives Tensors 1×3×``size``×``size`` of 0..255, in the last node of its only way; ``precision`` is "fp32" or
    "fp16"; ``engine`` is "onnx", "tensorrt", or ``None`` for TensorRT where it works. The model, ``labels.txt``, and
    the whole as ``served.toml`` are written into ``folder``, where TensorRT keeps its engine too. Raises
    ``TrainingError`` and what ``pipe`` raises.
    """
    model = load_model(checkpoint_path, arch, classes)
    check_preprocessing(toml, size)
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    path, labels = folder / "model.onnx", folder / "labels.txt"
    _export(model, path, size)
    labels.write_text("".join(f"{name}\n" for name in classes), encoding="utf-8")
    node = {
        "backend": ENGINES[engine],
        "model": str(path),
        "min": 1,
        "max": 8,
        "instance_num": 2,
        "batching_timeout": 2,
        "mean": _numbers(MEAN),
        "std": _numbers(STD),
        "postprocessor": "SoftmaxMax",
        "labels": str(labels),
    }
    if engine != "onnx":
        node |= {"precision": precision, "model::cache": str(folder / "model.trt")}
    if engine != "tensorrt" and precision == "fp16":
        half = folder / "model_fp16.onnx"
        half.write_bytes(half_model(path.read_bytes(), ()))
        node["OnnxTensor::model"] = str(half)
    config = _followed_by(dict(toml) if isinstance(toml, Mapping) else parse_toml(toml), node)
    (folder / "served.toml").write_text(to_toml(config), encoding="utf-8")
    return config


def check_preprocessing(toml: Config, size: int) -> None:
    """``TrainingError`` where the result for a small JPEG is no Tensor 1×3×``size``×``size``."""
    decoder = Decoder(toml, choose_devices("single", None, None))
    decoder.close()
    shape = tuple(decoder.trial.shape[-3:])
    if shape != (3, size, size):
        raise TrainingError(f"the TOML gives images of {'x'.join(map(str, shape))}, the model takes 3x{size}x{size}")


def _export(model: nn.Module, path: Path, size: int) -> None:
    """Write ``model`` for normalised input, and compare it, fed with pixels as a node feeds it, with PyTorch's."""
    try:
        save_onnx(model, path, size, OPSET)
    except ExportError as error:
        raise TrainingError(f"{path.name}: {error}") from error
    mean, std = ([255 * value for value in values] for values in (MEAN, STD))
    served = onnxruntime.InferenceSession(normalized_model(str(path), mean, std), providers=["CPUExecutionProvider"])
    pixels = torch.randint(0, 256, (3, 3, size, size), generator=torch.Generator().manual_seed(0)).float()
    difference, scale = compare_logits(lambda batch: model(Normalise()(batch)), served, [pixels])
    if not difference <= TOLERANCE * max(1.0, scale):  # NOTE: written so that NaN is refused
        raise TrainingError(
            f"{path.name}: its logits differ from PyTorch's by {difference:.2g}, of {scale:.2g} at most"
        )


def _followed_by(tables: dict[str, Any], node: Mapping[str, Any]) -> dict[str, Any]:
    """The tables with ``node`` behind the one that ends; ``TrainingError`` where several do."""
    nodes = {name: dict(table) for name, table in tables.items() if isinstance(table, Mapping) and name != GLOBAL}
    ends = [name for name, table in nodes.items() if not table.get("next")]
    if len(ends) != 1:
        raise TrainingError(f"the TOML ends in {len(ends)} nodes ({', '.join(ends)}); a model follows one")
    name = "model"
    while name in nodes:
        name += "_"
    nodes[ends[0]]["next"] = name
    return {GLOBAL: dict(tables.get(GLOBAL, {})), **nodes, name: dict(node)}


def _numbers(values: Sequence[float]) -> str:
    """On the scale 0..255, as a node's ``mean`` and ``std`` are."""
    return ", ".join(f"{255 * value:.10g}" for value in values)
