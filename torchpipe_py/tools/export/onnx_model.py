"""An ONNX file of the user's: its inputs, outputs and metadata, what it does first, and what it gives for an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from torchpipe_py.backends.model.onnx_graph import ELEMENT_TYPES, load_problem, missing_weights
from torchpipe_py.backends.signature import BYTES, TensorSpec
from torchpipe_py.encryption.model_file import ModelFile
from torchpipe_py.tools.export.onnx_file import one_line, open_session
from torchpipe_py.tools.report import ToolError

CHANNELS = (1, 3)
"""Channels of images that are decoded here."""
FLOATS = ("float32", "float16", "float64")
DEFAULT_BATCH = 2
"""A trial's batch, if the file leaves it open."""


@dataclass(frozen=True)
class ImageInput:
    """The only input, an image, or N of them: ``axis`` is the dimension of the channels; sizes are ``None`` if open."""

    spec: TensorSpec
    axis: int
    channels: int
    sides: tuple[int | None, int | None]
    batch: int | None
    has_batch: bool
    is_sure: bool = True
    """Whether the file declares the channels."""

    @property
    def is_last(self) -> bool:
        """Whether channels are the last dimension."""
        return self.axis == len(self.spec.dims) - 1

    def shape(self, batch: int, sides: tuple[int, int]) -> tuple[int, ...]:
        """The shape of a batch."""
        item = (*sides, self.channels) if self.is_last else (self.channels, *sides)
        return (batch, *item) if self.has_batch else item


class OnnxModel:
    """A file and a session of ONNX Runtime with it. ``ToolError`` if it cannot be loaded."""

    def __init__(self, path: Path) -> None:
        import onnx

        self.path, file = path, ModelFile(str(path))
        if not path.is_file():
            raise ToolError(f"{path}: no such file")
        if problem := file.mismatch() or missing_weights(file):
            raise ToolError(f"{path}: {problem.removeprefix(f'{path} ')}")
        try:
            self._session = open_session(path)
            graph = onnx.load(path, load_external_data=False).graph
        except Exception as error:
            raise ToolError(f"{path}: ONNX Runtime cannot load it: {load_problem(file, error)}") from error
        self.inputs = tuple(map(_spec, self._session.get_inputs()))
        self.outputs = tuple(map(_spec, self._session.get_outputs()))
        self.metadata: Mapping[str, str] = self._session.get_modelmeta().custom_metadata_map
        types = {value.name: value.type.tensor_type for value in graph.input}
        self._without_shape = {name for name, tensor in types.items() if not tensor.HasField("shape")}

    def image_input(self) -> ImageInput | None:
        """The only input, if it is an image of one or three channels, N×C×H×W, N×H×W×C, or 3×H×W."""
        if len(self.inputs) != 1 or self.inputs[0].dtype not in (*FLOATS, "uint8"):
            return None
        (spec,) = self.inputs
        dims = spec.dims
        if len(dims) == 3 and dims[0] == 3:
            return ImageInput(spec, 0, 3, (dims[1], dims[2]), 1, has_batch=False)
        if len(dims) != 4:
            return None
        if dims[1] in CHANNELS and not (dims[1] == 1 and dims[3] == 3):
            return ImageInput(spec, 1, dims[1] or 3, (dims[2], dims[3]), dims[0], has_batch=True)
        if dims[3] in CHANNELS:
            return ImageInput(spec, 3, dims[3] or 3, (dims[1], dims[2]), dims[0], has_batch=True)
        if dims[1] is None:
            return ImageInput(spec, 1, 3, (dims[2], dims[3]), dims[0], has_batch=True, is_sure=False)
        return None

    def run(self, image: ImageInput, sides: tuple[int, int]) -> tuple[list[TensorSpec], list[np.ndarray]]:
        """The outputs for random images of this size: as declared, with the sizes that they have, and their values.

        The batch stays open where the file leaves it open. ``ToolError`` if the model does not take such images.
        """
        shape = image.shape(image.batch or DEFAULT_BATCH, sides)
        try:
            pixels = np.random.default_rng(0).integers(0, 256, shape)
            # As most models take them: how they are scaled does not change the shapes.
            values = pixels.astype(image.spec.dtype) if image.spec.dtype == "uint8" else pixels / 255
            arrays = self._session.run(None, {image.spec.name: values.astype(image.spec.dtype)})
        except Exception as error:  # also MemoryError, of an input that is fixed at a great size
            raise ToolError(f"{self.path}: does not take images of {shape}: {one_line(error)}") from error
        found = []
        for spec, array in zip(self.outputs, arrays, strict=True):
            if not isinstance(array, np.ndarray):
                raise ToolError(f"{self.path}: output {spec.name!r} is a sequence or a map, not a tensor")
            dims = array.shape if len(spec.dims) != array.ndim else spec.dims
            # Only rows that depend on the image stay open.
            known = [have if want is None else want for want, have in zip(dims, array.shape, strict=True)]
            rows = (None,) if image.has_batch and image.batch is None else tuple(known[:1])
            found.append(replace(spec, dims=(*rows, *known[1:]) if known else ()))
        return found, arrays

    def takes_a_batch(self, spec: TensorSpec) -> bool:
        """Whether an input's first dimension is open, or its shape is undeclared."""
        return spec.name in self._without_shape or spec.dims[:1] == (None,)


def _spec(value: Any) -> TensorSpec:
    dtype = value.type.removeprefix("tensor(").removesuffix(")")
    names = {"float": "float32", "double": "float64", "string": BYTES}
    dims = tuple(dim if isinstance(dim, int) and dim > 0 else None for dim in value.shape)
    dtype = names.get(dtype, dtype)
    return TensorSpec(value.name, dims, dtype if dtype in ELEMENT_TYPES.values() else "")


def is_probability(arrays: Sequence[np.ndarray]) -> bool:
    """Whether rows of the first output are positive and add up to 1."""
    rows = np.asarray(arrays[0], np.float64)
    return rows.ndim == 2 and rows.shape[1] > 1 and rows.min() >= 0 and bool((abs(rows.sum(1) - 1) < 1e-3).all())
