"""What TensorrtTensor does around TensorRT, which is replaced: profiles, sizes, contexts, messages."""

from __future__ import annotations

import ctypes
import enum
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import picture
from kit.fake_gpu import cpu_as_gpu

from torchpipe_py import BackendError, BackendUnavailable, ConfigError, InvalidRequest, pipe
from torchpipe_py.backends.model import tensorrt as backend

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
        if self.engine.mixes:
            y -= y.mean(0)
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
        self.fails = self.mixes = False
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


TRT = SimpleNamespace(
    __version__="8.6.0",
    Builder=None,
    TensorIOMode=Mode,
    float32="float32",
)


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


def run_batch(config: dict[str, Any], values: list[Any]) -> list[dict[str, Any]]:
    items = [{"data": value} for value in values]
    with pipe(config) as run:
        run(items)
    return items


def test_batches_have_sizes_that_get_a_graph_and_results_are_rows(build: Any) -> None:
    profiles = [((1, 3, 8, 8), (2, 3, 8, 8)), ((6, 3, 8, 8), (10, 3, 8, 8))]
    engine, config = build((-1, 3, 8, 8), profiles, max="2;10", min="1;6")
    items = run_batch(config, [picture(8, 8, seed) for seed in range(9)])
    sizes = [shape[0] for _, shape in engine.runs]
    assert sum(sizes) >= 9
    assert set(sizes) <= {1, 2, 6, 7, 8, 10}
    assert [item["result"].shape for item in items] == [(1, 2)] * 9


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


def test_items_that_mix_are_refused(build: Any) -> None:
    """When the engine is loaded where its shape is known, else with the first request."""
    engine, config = build((-1, 3, 8, 8), [((1, 3, 8, 8), (4, 3, 8, 8))], max=4)
    engine.mixes = True
    with pytest.raises(ConfigError, match=r"model .*: an item's output depends on what else is in its batch: output"):
        pipe(config)
    engine, config = build((-1, 3, -1, -1), [((1, 3, 8, 8), (4, 3, 9, 9))], max=4)
    engine.mixes = True
    with pipe(config) as run:
        for _ in range(2):
            with pytest.raises(BackendError, match="an item's output depends on what else is in its batch"):
                run({"data": picture(8, 8)})
        assert [shape[0] for _, shape in engine.runs] == [1, 1, 1, 2]


def test_contexts_of_a_version_compatible_engine_have_memory_of_their_own(build: Any) -> None:
    for version_compatible in (False, True):
        engine, config = build((-1, 3, 8, 8), [((1, 3, 8, 8), (4, 3, 8, 8))], version_compatible=version_compatible)
        items = run_batch(config, [picture(8, 8, seed) for seed in range(3)])
        assert [item["result"].shape for item in items] == [(1, 2)] * 3
        assert {context.device_memory is None for context in engine.contexts} == {version_compatible}


def test_the_lean_runtime_wants_version_compatible_engines(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, config = build((-1, 3, 8, 8), [((1, 3, 8, 8), (4, 3, 8, 8))])
    monkeypatch.delattr(TRT, "Builder")
    with pytest.raises(BackendUnavailable, match=r"lean runtime of .* runs version-compatible engines only"):
        pipe(config)
    run_batch({**config, "version_compatible": True}, [picture(8, 8)])
    assert len(engine.runs) > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max": 16}, r"a batch of 16 is outside the engine's profiles \(1\.\.4\)"),
        ({"max": 4, "mean": "1"}, "mean, std and model::cache go with an ONNX model"),
        ({"max": 4, "model::cache": "x"}, "mean, std and model::cache go with an ONNX model"),
    ],
)
def test_settings_an_engine_file_does_not_take(build: Any, settings: dict[str, Any], message: str) -> None:
    _, config = build((-1, 3, 8, 8), [((1, 3, 8, 8), (4, 3, 8, 8))], **settings)
    with pytest.raises(ConfigError, match=message):
        pipe(config)


def test_a_run_that_fails_is_told_in_tensorrts_words(build: Any) -> None:
    engine, config = build((-1, 3, 8, 8), [((1, 3, 8, 8), (4, 3, 8, 8))], max=4)
    with pipe(config) as run:
        engine.fails = True
        with pytest.raises(BackendError, match="TensorRT did not run the batch: its own words"):
            run({"data": np.zeros((8, 8, 3), np.uint8)})
        engine.fails = False
        item = {"data": torch.zeros(3, 8, 8)}
        run(item)
        assert item["result"].shape == (1, 2)
