"""The names and calls that the bindings of TensorRT must have for this project, where they are installed.

They import without a GPU, the lean runtime's with its library. The full ones want libnvinfer beside them.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import torchpipe_py.backends.model.engine.api as api
from torchpipe_py.backends.model import tensorrt
from torchpipe_py.backends.model.engine import build, precision

# What the code asks for before it uses it, or uses in a branch of its own, and the versions that have it.
UNTIL_10 = {"BuilderFlag.FP16", "BuilderFlag.INT8", "BuilderFlag.OBEY_PRECISION_CONSTRAINTS"}
ONLY_8 = {"TacticSource.CUBLAS", "TacticSource.CUBLAS_LT", "TacticSource.CUDNN", "PreviewFeature.PROFILE_SHARING_0806"}
FROM_10 = {"ExecutionContextAllocationStrategy", "ExecutionContextAllocationStrategy.USER_MANAGED"}


@pytest.fixture(params=["tensorrt_lean_bindings", "tensorrt_bindings", "tensorrt"])
def trt(request: pytest.FixtureRequest) -> ModuleType:
    try:
        return importlib.import_module(request.param)
    except ImportError as error:
        pytest.skip(f"{request.param}: {error}")


def _names_used() -> set[str]:
    """Dotted names behind ``trt`` in the modules that use it, such as ``BuilderFlag.FP16``."""
    names = set()
    for module in (api, build, precision, tensorrt):
        for node in ast.walk(ast.parse(Path(inspect.getfile(module)).read_text(encoding="utf-8"))):
            parts = []
            while isinstance(node, ast.Attribute):
                parts.append(node.attr)
                node = node.value
            if parts and (isinstance(node, ast.Name) and node.id in ("trt", "flag")):
                names.add(".".join((*(["BuilderFlag"] if node.id == "flag" else []), *reversed(parts))))
            elif parts[-1:] == ["_trt"] and len(parts) > 1:
                names.add(".".join(reversed(parts[:-1])))
    return names


def _holds(trt: ModuleType, name: str) -> bool:
    value: Any = trt
    for part in name.split("."):
        if not hasattr(value, part):
            return False
        value = getattr(value, part)
    return True


def test_every_name_is_there_in_the_versions_that_it_is_used_with(trt: ModuleType) -> None:
    major = api.version(trt)[0]
    names = _names_used() - (set() if major < 11 else UNTIL_10) - (set() if major < 10 else ONLY_8)
    names -= FROM_10 if major < 10 else set()
    if api.is_lean(trt):
        names = {name for name in names if not name.startswith(_OF_THE_BUILDER)}
    assert "Runtime" in names
    assert [name for name in sorted(names) if not _holds(trt, name)] == []


_OF_THE_BUILDER = ("Builder", "OnnxParser", "NetworkDefinitionCreationFlag", "LayerType", "init_libnvinfer_plugins")


def test_one_logger_takes_messages(trt: ModuleType) -> None:
    messages = api.Messages(trt)
    messages.logger.log(trt.ILogger.ERROR, " its own words ")
    assert messages.last() == "its own words"
