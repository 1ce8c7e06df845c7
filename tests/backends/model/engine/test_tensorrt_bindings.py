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

ENGINE = {
    "get_tensor_name": 1,
    "get_tensor_mode": 1,
    "get_tensor_shape": 1,
    "get_tensor_dtype": 1,
    "get_tensor_profile_shape": 2,
    "create_engine_inspector": 0,
    "num_io_tensors": None,
    "num_optimization_profiles": None,
}
CONTEXT = {
    "set_input_shape": 2,
    "set_optimization_profile_async": 2,
    "set_tensor_address": 2,
    "get_tensor_shape": 1,
    "execute_async_v3": 1,
}
BUILDER = {
    "create_network": 1,
    "create_builder_config": 0,
    "create_optimization_profile": 0,
    "build_serialized_network": 2,
}
CONFIG = {
    "set_memory_pool_limit": 2,
    "set_flag": 1,
    "clear_flag": 1,
    "profiling_verbosity": None,
    "add_optimization_profile": 1,
    "create_timing_cache": 1,
    "set_timing_cache": 2,
    "get_timing_cache": 0,
}
# What the code asks for before it uses it, or uses in a branch of its own, and the versions that have it.
UNTIL_10 = {"BuilderFlag.FP16", "BuilderFlag.INT8", "BuilderFlag.OBEY_PRECISION_CONSTRAINTS"}
ONLY_8 = {"TacticSource.CUBLAS", "TacticSource.CUBLAS_LT", "TacticSource.CUDNN", "PreviewFeature.PROFILE_SHARING_0806"}
FROM_10 = {"ExecutionContextAllocationStrategy", "ExecutionContextAllocationStrategy.USER_MANAGED"}


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"{name}: {error}")


@pytest.fixture(params=["tensorrt_lean_bindings", "tensorrt_bindings", "tensorrt"])
def trt(request: pytest.FixtureRequest) -> ModuleType:
    return _module(request.param)


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


@pytest.mark.parametrize(
    ("owner", "members"),
    [("ICudaEngine", ENGINE), ("IExecutionContext", CONTEXT), ("Builder", BUILDER), ("IBuilderConfig", CONFIG)],
)
def test_every_call_takes_what_it_is_given(trt: ModuleType, owner: str, members: dict[str, int | None]) -> None:
    if api.is_lean(trt) and owner in ("Builder", "IBuilderConfig"):
        pytest.skip("the lean runtime builds no engines")
    for name, count in members.items():
        member = getattr(getattr(trt, owner), name)
        if count is not None:
            assert count in _counts(member.__doc__), f"{owner}.{name} takes {member.__doc__.strip().splitlines()[0]}"


def _counts(doc: str) -> set[int]:
    """How many arguments besides ``self`` the overloads take, by the signatures that pybind11 writes."""
    lines = [line.strip() for line in doc.splitlines() if "(self" in line]
    found = set()
    for line in lines:
        most = line[: line.rindex("->")].count(": ") - 1
        found.update(range(most - line.count(" = "), most + 1))
    return found


def test_memory_of_contexts(trt: ModuleType) -> None:
    engine, context = trt.ICudaEngine, trt.IExecutionContext
    if api.version(trt)[0] < 10:
        assert 0 in _counts(engine.create_execution_context_without_device_memory.__doc__)
        assert hasattr(engine, "device_memory_size")
        assert isinstance(context.device_memory, property)
    else:
        assert {0, 1} <= _counts(engine.create_execution_context.__doc__)
        assert 2 in _counts(context.set_device_memory.__doc__)
        assert hasattr(engine, "device_memory_size_v2")


def test_the_runtime_may_run_the_code_of_an_engine(trt: ModuleType) -> None:
    assert isinstance(trt.Runtime.engine_host_code_allowed, property)
    assert 1 in _counts(trt.Runtime.deserialize_cuda_engine.__doc__)


def test_one_logger_takes_messages(trt: ModuleType) -> None:
    messages = api.Messages(trt)
    messages.logger.log(trt.ILogger.ERROR, " its own words ")
    assert messages.last() == "its own words"
