"""Small models, and what a node with one of them answers or refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from conftest import save_model
from onnx import TensorProto, helper

from torchpipe_py import ConfigError, pipe

Data = dict[str, Any]
Dims = list[int | str]


def one_node(
    path: Path,
    dims: Dims,
    kind: str = "Identity",
    *inputs: str,
    gives: Dims | None = None,
    dtype: int = TensorProto.FLOAT,
    constants: dict[str, Any] | None = None,
    **attributes: Any,
) -> str:
    """An ONNX model of one operator, from ``x`` of ``dims`` to ``y`` of the same dims or of ``gives``."""
    node = helper.make_node(kind, ["x", *inputs], ["y"], **attributes)
    arrays = {name: np.array(value) for name, value in (constants or {}).items()}
    return save_model(path, [node], {"x": dims}, {"y": dims if gives is None else gives}, arrays, dtype=dtype)


def torch_model(path: Path, module: torch.nn.Module, *example: torch.Tensor, shapes: Any = None) -> Data:
    """A node with the module: exported where there is an ``example``, else as TorchScript."""
    if example:
        torch.export.save(torch.export.export(module.eval(), example, dynamic_shapes=shapes), path)
    else:
        torch.jit.script(module.eval()).save(str(path))
    return {"backend": "TorchTensor", "model": str(path), "trusted": True}


def batched(count: int = 1) -> Any:
    """The shapes of ``count`` inputs whose batch is open."""
    batch = torch.export.Dim("batch", min=1, max=64)
    return ({0: batch},) * count


def onnx_node(model: str, **keys: Any) -> Data:
    return {"backend": "OnnxTensor", "model": model, **keys}


def answer(config: Data, *values: Any) -> Any:
    """The dict of the value, or the dicts of several, after a run."""
    items = [{"data": value} for value in values]
    with pipe(config) as run:
        run(items)
    return items if len(items) > 1 else items[0]


def refused(config: Data, problem: str) -> None:
    """``pipe`` refuses the configuration for what matches ``problem``."""
    with pytest.raises(ConfigError, match=problem):
        pipe(config)


def reference(model: str | bytes, **feed: Any) -> list[np.ndarray]:
    """The outputs of ONNX Runtime for the model."""
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return session.run(None, {name: np.asarray(value) for name, value in feed.items()})


def tensors(count: int, *shape: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, *shape, generator=generator) for _ in range(count)]
