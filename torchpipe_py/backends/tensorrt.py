"""Models by TensorRT."""

from __future__ import annotations

import importlib.util

from torchpipe_py.backends.base import Param
from torchpipe_py.backends.model import ModelBackend
from torchpipe_py.errors import BackendUnavailable
from torchpipe_py.values import to_str, to_strings


class TensorrtTensor(ModelBackend):
    """ONNX to a TensorRT engine on a GPU. This version checks its parameters and says what is missing; it runs nothing.

    ``FirstAvailable[TensorrtTensor,OnnxTensor]`` therefore chooses ONNX Runtime everywhere.
    """

    cache = Param(to_str, "", key="model::cache", doc="file that keeps the engine between starts")
    precision = Param(to_str, "fp16", choices=("fp32", "fp16", "int8", "best"), doc="arithmetic of the engine")
    fp32_layers = Param(to_strings, (), key="precision::fp32", doc="names of layers that stay in fp32")

    def setup(self) -> None:
        super().setup()
        if importlib.util.find_spec("tensorrt") is None:
            raise BackendUnavailable("TensorRT is not installed (pip install 'torchpipe_py[tensorrt]')")
        raise BackendUnavailable("this version of torchpipe_py has no TensorRT support yet")
