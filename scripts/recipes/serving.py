"""The configuration of a pipe that serves a training's checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from recipes.data import MEAN, STD
from recipes.models import check_classes, load_checkpoint, load_weights, make_model
from torchpipe_py import parse_toml
from torchpipe_py.backends.model.engine.precision import half_model
from torchpipe_py.tools.export.config import ENGINE, Files, Transform, followed_by, model_node, to_toml
from torchpipe_py.tools.export.onnx_file import export_checked
from torchpipe_py.training import TrainingError
from torchpipe_py.training.decode import Config, Decoder, plans_of
from torchpipe_py.training.options import choose_devices

PRECISIONS = ("fp32", "fp16")


def load_model(checkpoint: Path, arch: str | None, classes: Sequence[str]) -> nn.Module:
    """The trained network, on the CPU and in eval mode; ``arch`` is the checkpoint's unless given.

    ``TrainingError`` for a file that is not there or no checkpoint of a training, other classes, or another ``arch``.
    """
    state = load_checkpoint(checkpoint)
    if state is None:
        raise TrainingError(f"{checkpoint}: no such file")
    check_classes(checkpoint, state["classes"], classes)
    arch = arch or state.get("arch") or "small"
    model = make_model(arch, len(classes), seed=0)
    load_weights(checkpoint, model, state["model"], arch, state.get("arch"))
    return model.eval()


def serving_config(
    checkpoint_path: Path,
    toml: Config,
    arch: str | None,
    size: int,
    precision: str,
    folder: Path,
    classes: Sequence[str],
) -> dict[str, Any]:
    """A configuration for ``pipe``: the nodes of ``toml``, then the model, whose result is ``(class name, score)``.

    ``toml`` gives Tensors 1×3×``size``×``size`` of 0..255, in the last node of its only way; ``precision`` is "fp32" or
    "fp16". TensorRT runs the model if it works, otherwise ONNX Runtime. The model, its labels, and all as
    ``served.toml`` are written to ``folder``, which may be moved later; TensorRT keeps its engine there, too.
    Raises ``TorchpipeError``: ``TrainingError``, ``ToolError`` and the errors of ``pipe``.
    """
    model = load_model(checkpoint_path, arch, classes)
    check_preprocessing(toml, size)
    folder.mkdir(parents=True, exist_ok=True)
    files = Files(folder / "served")
    export_checked(model, files.model, size=size)
    files.labels.write_text("".join(f"{name}\n" for name in classes), encoding="utf-8")
    node = model_node(files, Transform(mean=MEAN, std=STD), has_labels=True)
    node |= {"backend": ENGINE, "instance_num": 2, "precision": precision}
    if precision == "fp16":
        half = folder / "served_fp16.onnx"
        half.write_bytes(half_model(files.model.read_bytes(), ()))
        node["OnnxTensor::model"] = half.name
    tables = toml if isinstance(toml, Mapping) else parse_toml(toml)
    files.toml.write_text(to_toml(followed_by(tables, node)), encoding="utf-8")
    return parse_toml(files.toml)


def check_preprocessing(toml: Config, size: int) -> None:
    """Raise ``TrainingError`` unless the result for a small image is a Tensor 1×3×``size``×``size``."""
    decoder = Decoder(plans_of(toml, choose_devices("single", None, None)))
    decoder.close()
    shape = tuple(decoder.trial.shape[-3:])
    if shape != (3, size, size):
        raise TrainingError(f"the TOML gives images of {'x'.join(map(str, shape))}, the model takes 3x{size}x{size}")
