"""Outputs of detectors, made of random numbers, and postprocessors without a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from torchpipe_py.backends.base import Data
from torchpipe_py.backends.control.python import declared
from torchpipe_py.backends.image import original
from torchpipe_py.backends.image.geometry import Size, fit_inside
from torchpipe_py.backends.model.postprocess import make_postprocessor
from torchpipe_py.backends.signature import TensorSpec
from torchpipe_py.registry import default

SIZES: list[Size] = [(320, 416), (333, 500), (1, 700), (7, 3), (1080, 1921), (641, 479), (100, 100), (45, 2000)]


def made(
    name: str, outputs: Sequence[TensorSpec] = (), model: Any = None, labels: str = "", most: int = 4, **keys: Any
) -> Any:
    """A postprocessor with these keys of its node, for a model that declares these outputs; ``most`` is ``max``."""
    cls: Any = default.find_postprocessor(name)
    own = {key: param.default for key, param in declared(cls).items()}
    config = {"labels": labels, "k": 5, "threshold": 0.5, "max": most, "model": model}
    post = make_postprocessor(cls, config, {**own, **keys})
    post.fit(outputs)
    return post


def letterboxed(size: Size, to: Size) -> Data:
    """The dict of a request whose image of ``size`` was letterboxed to the model's input."""
    item: Data = {"data": torch.empty(1, 3, *to)}
    original.begin(item, *size)
    original.follow(item, *size, fit_inside(*size, *to, centred=True))
    return item


def yolo_output(rng: np.random.Generator, classes: int, size: Size, objects: int) -> np.ndarray:
    """1×(4+C)×A: some boxes of many places, others crowded around a few objects, over the edges too."""
    places = max(2100, objects)
    output = np.empty((1, 4 + classes, places), np.float32)
    output[0, :2] = rng.uniform(-20, 20 + np.array(size[::-1])[:, None], (2, places))
    output[0, 2:4] = rng.uniform(2, 150, (2, places))
    output[0, 4:] = rng.uniform(0, 0.2, (classes, places))
    chosen = rng.choice(places, objects, replace=False)
    which = rng.integers(0, 30, objects)
    middles, sides = rng.uniform(0, size[::-1], (30, 2)), rng.uniform(10, 200, (30, 2))
    output[0, :2, chosen] = middles[which] + rng.normal(0, 5, (objects, 2))
    output[0, 2:4, chosen] = sides[which] * rng.uniform(0.8, 1.2, (objects, 2))
    output[0, 4 + which % classes, chosen] = rng.uniform(0.2, 1, objects)
    return output


def detector_file(folder: Path, names: Any) -> str:
    """An ONNX file of a YOLO detector for N×3×64×64 that always finds the same two boxes; its ``names`` are metadata.

    Class 2 with 0.9 in [16, 24, 48, 40], class 0 with 0.5 in an area larger than the input.
    """
    output = np.zeros((1, 7, 84), np.float32)
    output[0, :, 0] = [32, 32, 32, 16, 0, 0, 0.9]
    output[0, :, 1] = [32, 32, 100, 100, 0.5, 0, 0]
    return constant_model(folder / "detector.onnx", {"output0": output}, {"names": str(names)})


def constant_model(path: Path, outputs: Mapping[str, np.ndarray], metadata: Mapping[str, str] = {}) -> str:
    """An ONNX file for images N×3×64×64 whose outputs, 1×…, are the same for each image."""
    # NOTE: opset 17, with the axes as an attribute, is the last one that TensorRT 8.6 reads.
    nodes = [helper.make_node("ReduceMean", ["images"], ["mean"], axes=[1, 2, 3], keepdims=1)]
    nodes.append(helper.make_node("Mul", ["mean", "zero"], ["zeros"]))  # N×1×1×1
    constants = {"zero": np.zeros((), np.float32)}
    values = []
    for name, array in outputs.items():
        constants[f"{name}_value"] = array.astype(np.float32)
        constants[f"{name}_shape"] = np.array([-1, *[1] * (array.ndim - 1)])
        nodes.append(helper.make_node("Reshape", ["zeros", f"{name}_shape"], [f"{name}_zeros"]))
        nodes.append(helper.make_node("Add", [f"{name}_zeros", f"{name}_value"], [name]))
        values.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", *array.shape[1:]]))
    images = helper.make_tensor_value_info("images", TensorProto.FLOAT, ["N", 3, 64, 64])
    weights = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "constant", [images], values, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    helper.set_model_props(model, dict(metadata))
    onnx.save(model, path)
    return str(path)


def _split(post: Any, outputs: list[torch.Tensor], items: list[Any]) -> list[Any]:
    tensors = [tensor.clone() for tensor in post.on_device(outputs)]
    results: list[Any] = post.on_host(tensors, items)
    for tensor in tensors:
        tensor.fill_(7)
    return results


FORWARD: Mapping[str, Callable[[Any, list[torch.Tensor], list[Any]], list[Any]]] = {
    "whole": lambda post, outputs, items: post.forward(outputs, items),
    "split": _split,
}
"""Results of a postprocessor: on the host at once, or as on a GPU, where what is read is overwritten afterwards."""
