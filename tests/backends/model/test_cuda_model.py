"""GPU models on the host, where a CPU is in place of the GPU and TensorRT is replaced."""

from __future__ import annotations

import ctypes
import enum
import math
import pickle
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import picture
from kit.fake_gpu import cpu_as_gpu
from kit.models import answer

from torchpipe_py import BackendError, BackendUnavailable, ConfigError, InvalidRequest, pipe
from torchpipe_py.backends import cuda
from torchpipe_py.backends.base import BackendConfig
from torchpipe_py.backends.model import cuda_model
from torchpipe_py.backends.model import tensorrt as backend
from torchpipe_py.backends.model.check import to_bounds
from torchpipe_py.backends.model.cuda_model import CudaRunner, StagedInput
from torchpipe_py.backends.model.inputs import InputSpec
from torchpipe_py.backends.model.model import ModelBackend, Shapes
from torchpipe_py.backends.params import Param
from torchpipe_py.values import to_str

# -- what GPU models do on the host ------------------------------------------------------------------------------------


class Runner(CudaRunner):
    """Runs a model of one input, which is not declared."""

    def input_specs(self, count: int) -> list[InputSpec]:
        return [InputSpec("x", torch.float32, (3, None, None))]


@cuda.on_stream
class Model(ModelBackend):
    """Sums of each channel: N×C×H×W to N×C."""

    model = Param(to_str, "", doc="none")
    use_graphs = False
    default_dtype = torch.float32
    guard: cuda.Guard

    def setup(self) -> None:
        super().setup()
        self.runner = Runner(self)
        self.sizes_run: list[int] = []
        self.forgotten: list[Shapes] = []

    def read(self, item: dict[str, Any]) -> Any:
        return self.runner.read(item)

    def run_on_host(self, inputs: list[np.ndarray]) -> list[np.ndarray]:
        return self.runner.run_on_host(inputs)

    def run_group(self, shapes: Shapes, items: list[dict[str, Any]], rows: list[list[Any]]) -> None:
        self.runner.run_group(shapes, items, rows)

    def size_for(self, count: int, shapes: Shapes) -> int:
        return self.runner.least_size(count)

    def enqueue(self, inputs: list[Any]) -> list[Any]:
        self.sizes_run.append(len(inputs[0]))
        return [inputs[0].flatten(2).sum(2) if inputs[0].ndim == 4 else inputs[0] * 2]

    def forget(self, shapes: Shapes) -> None:
        self.forgotten.append(shapes)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    cpu_as_gpu(monkeypatch)

    def make_model(**settings: Any) -> Model:
        defaults = {name: param.default for name, param in Model.parameters().items()}
        model = Model(BackendConfig(params={**defaults, "max_batch": to_bounds(16), **settings}))
        model.setup()
        return model

    return make_model


def run(model: Model, values: list[Any]) -> list[Any]:
    items = [{"data": value} for value in values]
    model.forward(items)
    return [item["result"] for item in items]


def sums(mat: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(mat.astype(np.float32).sum((0, 1)))[None]


KINDS = {
    "mat": lambda mat: mat,
    "mat, reversed twice": lambda mat: np.ascontiguousarray(mat[::-1, ::-1])[::-1, ::-1],
    "mat, unpickled": lambda mat: pickle.loads(pickle.dumps(mat)),
    "array": lambda mat: np.ascontiguousarray(mat.transpose(2, 0, 1))[None],
    "array, strided": lambda mat: mat.astype(np.float32).transpose(2, 0, 1)[None, :, ::-1][:, :, ::-1],
    "uint8": lambda mat: torch.from_numpy(mat).permute(2, 0, 1)[None],
    "float": lambda mat: torch.from_numpy(mat).permute(2, 0, 1).float(),
    "half": lambda mat: torch.from_numpy(mat).permute(2, 0, 1)[None].half(),
    "bfloat16": lambda mat: torch.from_numpy(mat).permute(2, 0, 1)[None].bfloat16(),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 2, 5, 9, 16])
def test_every_kind_of_value_arrives(make: Any, kind: str, count: int) -> None:
    model = make()
    mats = [picture(6, 10, seed) for seed in range(count)]
    results = run(model, [KINDS[kind](mat) for mat in mats])
    run(model, [KINDS[kind](mat[::-1, ::-1] // 2) for mat in mats])  # into the same buffers, which are no results
    for mat, result in zip(mats, results, strict=True):
        assert torch.equal(result, sums(mat)) or kind == "bfloat16"
        torch.testing.assert_close(result, sums(mat), rtol=1e-3, atol=1e-3)


def test_a_batch_of_all_kinds_and_two_sizes(make: Any) -> None:
    model = make()
    mats = [picture(6, 10, seed) for seed in range(len(KINDS))]
    other = picture(4, 4)
    values = [kind(mat) for kind, mat in zip(KINDS.values(), mats, strict=True)]
    results = run(model, [*values, other])
    for mat, result in zip([*mats, other], results, strict=True):
        torch.testing.assert_close(result, sums(mat), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_concatenates_gpu_tensors_with_or_without_batch_dimension(dtype: torch.dtype) -> None:
    staged = StagedInput(torch.zeros(4, 3, 2, 2))
    values = [torch.full(shape, number).to(dtype) for number, shape in ((1, (3, 2, 2)), (2, (1, 3, 2, 2)))]
    staged._concatenate(values, dtype)  # what `gather` does with tensors that are there already
    assert staged.buffer[:, 0, 0, 0].tolist() == [1, 2, 0, 0]


def test_releases_least_recently_used_shape(make: Any) -> None:
    model = make()
    for side in range(1, cuda_model.MAX_SHAPES + 3):
        run(model, [picture(side, 4)])
        run(model, [picture(1, 4)])
    assert model.forgotten == [((3, 2, 4),), ((3, 3, 4),)]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros((4, 4, 1), np.uint8), "takes 1x3x.x., got 4x4x1"),
        (torch.zeros(2, 3, 4, 4), "takes one item, 1x…, got 2x3x4x4"),
        (["a", "b"], "a list with 'a' at .0.; expected numbers"),
        ([1, "b", 3], "a list with 'b' at .1.; expected numbers"),
        ([[0]] * 65, "data holds 65 inputs, more than the 64 that a model may have"),
    ],
)
def test_misfit_fails_only_its_item(make: Any, value: Any, message: str) -> None:
    items = [{"data": picture(6, 10)}, {"data": value}, {"data": picture(6, 10)}]
    make().forward(items)
    assert ["result" in item for item in items] == [True, False, True]
    assert isinstance(items[1]["error"], InvalidRequest)
    assert re.search(message, str(items[1]["error"]))


# -- what TensorrtTensor does around TensorRT, which is replaced -------------------------------------------------------


Range = tuple[tuple[int, ...], tuple[int, ...]]


class Mode(enum.Enum):
    INPUT = 0
    OUTPUT = 1


class FakeContext:
    """Output ``y`` of N×2, mean and sum, for any input ``x``; remembers how it was used."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.shape: tuple[int, ...] = ()
        self.profile = -1
        self.addresses: dict[str, int] = {}
        self.device_memory: int | None = 0

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self.profile = profile
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        low, high = self.engine.profiles[self.profile]
        self.shape = shape
        return all(least <= dim <= most for least, dim, most in zip(low, shape, high, strict=True))

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return (self.shape[0], 2) if name == "y" else self.shape

    def set_tensor_address(self, name: str, address: int) -> None:
        assert address
        self.addresses[name] = address

    def execute_async_v3(self, stream: int) -> bool:
        self.engine.runs.append((self.profile, self.shape))
        rows = self._memory("x", self.shape).reshape(self.shape[0], -1)
        y = self._memory("y", (self.shape[0], 2))
        y[:, 0], y[:, 1] = rows.mean(1), rows.sum(1)

        return not self.engine.fails

    def _memory(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        floats = (ctypes.c_float * math.prod(shape)).from_address(self.addresses[name])
        return np.ctypeslib.as_array(floats).reshape(shape)


class FakeEngine:
    num_io_tensors = 2

    def __init__(self, dims: tuple[int, ...], profiles: list[Range]) -> None:
        self.dims, self.profiles = dims, profiles
        self.num_optimization_profiles = len(profiles)
        self.device_memory_size = 1024
        self.runs: list[tuple[int, tuple[int, ...]]] = []
        self.contexts: list[FakeContext] = []
        self.fails = False
        self.out: tuple[int, ...] = (-1, 2)

    def get_tensor_name(self, index: int) -> str:
        return "xy"[index]

    def get_tensor_mode(self, name: str) -> Mode:
        return Mode.INPUT if name == "x" else Mode.OUTPUT

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self.dims if name == "x" else self.out

    def get_tensor_dtype(self, name: str) -> str:
        return "float32"

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, ...]]:
        low, high = self.profiles[profile]
        return [low, high, high]

    def create_execution_context_without_device_memory(self) -> FakeContext:
        self.contexts.append(FakeContext(self))
        return self.contexts[-1]

    def create_execution_context(self) -> FakeContext:
        """One that has memory of its own."""
        self.contexts.append(FakeContext(self))
        self.contexts[-1].device_memory = None
        return self.contexts[-1]


TRT = SimpleNamespace(__version__="8.6.0", Builder=None, TensorIOMode=Mode, float32="float32")


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    cpu_as_gpu(monkeypatch)
    monkeypatch.setattr(backend.api, "load_tensorrt", lambda: TRT)
    monkeypatch.setattr(backend.api, "messages", lambda trt: SimpleNamespace(last=lambda: "its own words"))
    path = tmp_path / "model.trt"
    path.write_bytes(b"engine")

    def make(dims: tuple[int, ...], profiles: list[Range], **settings: Any) -> tuple[FakeEngine, dict[str, Any]]:
        engine = FakeEngine(dims, profiles)
        monkeypatch.setattr(backend, "load_engine", lambda trt, content, name, version_compatible: engine)
        return engine, {"backend": "TensorrtTensor", "model": str(path), "batching_timeout": 30, **settings}

    return make


def test_the_profile_is_that_of_the_whole_shape(build: Any) -> None:
    profiles = [((1, 3, 8, 8), (4, 3, 8, 8)), ((1, 3, 16, 16), (4, 3, 16, 16)), ((3, 3, 32, 32), (4, 3, 32, 32))]
    engine, config = build((-1, 3, -1, -1), profiles, max="4;4;4", min="1;1;3")
    with pipe(config) as run:
        for side, expected in ((8, (0, (1, 3, 8, 8))), (16, (1, (1, 3, 16, 16))), (32, (2, (3, 3, 32, 32)))):
            run({"data": picture(side, side)})
            assert engine.runs[-1] == expected
        run(item := {"data": picture(9, 9)})
    assert isinstance(item["error"], InvalidRequest)
    assert "no profile of the engine takes 1 of 3x9x9" in str(item["error"])


def test_the_lean_runtime_wants_version_compatible_engines(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, config = build((-1, 3, 8, 8), [((1, 3, 8, 8), (4, 3, 8, 8))])
    monkeypatch.delattr(TRT, "Builder")
    with pytest.raises(BackendUnavailable, match=r"lean runtime of .* runs version-compatible engines only"):
        pipe(config)
    answer({**config, "version_compatible": True}, picture(8, 8))
    assert len(engine.runs) > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max": 16}, r"a batch of 16 is outside the engine's profiles \(1\.\.4\)"),
        ({"max": 4, "mean": "1"}, "mean, std and model::cache go with an ONNX model"),
        ({"max": 4, "model::cache": "x"}, "mean, std and model::cache go with an ONNX model"),
    ],
)
def test_refuses_settings_that_engine_file_cannot_have(build: Any, settings: dict[str, Any], message: str) -> None:
    _, config = build((-1, 3, 8, 8), [((1, 3, 8, 8), (4, 3, 8, 8))], **settings)
    with pytest.raises(ConfigError, match=message):
        pipe(config)


def test_failed_run_quotes_tensorrt(build: Any) -> None:
    engine, config = build((-1, 3, 8, 8), [((1, 3, 8, 8), (4, 3, 8, 8))], max=4)
    with pipe(config) as run:
        engine.fails = True
        with pytest.raises(BackendError, match="TensorRT did not run the batch: its own words"):
            run({"data": np.zeros((8, 8, 3), np.uint8)})
        engine.fails = False
        assert run({"data": torch.zeros(3, 8, 8)})["result"].shape == (1, 2)
