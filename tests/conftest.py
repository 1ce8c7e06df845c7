"""What every test may use: small images and models, fake backends, and the check that no thread is left behind."""

from __future__ import annotations

import functools
import gc
import itertools
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cv2
import hypothesis
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from torchpipe_py import Registry, registry

# Hypothesis times each example and what makes them: on a busy machine both fail without a fault. The examples are the
# same in each run; `--hypothesis-profile random` looks for others.
hypothesis.settings.register_profile("random", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("same", hypothesis.settings.get_profile("random"), derandomize=True)
hypothesis.settings.load_profile("same")

# A shell starts what it runs in the background with SIGINT ignored, which every process started here would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

Register = Callable[[type], str]

_numbers = itertools.count()


@functools.cache
def has_gpu() -> bool:
    import torch  # here: processes that a test starts import this module for their backends, and need no PyTorch

    return torch.cuda.is_available()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if collection_path == Path(__file__).with_name("gpu") and not has_gpu() else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not has_gpu():
        terminalreporter.write_line("not run: tests/gpu (there is no CUDA device)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The processes of pytest-xdist have to agree on what there is; what takes longest comes first.

    At the end each of them takes tests from the others: of a module whose tests share a service, each would start it.
    """
    different = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if different:
        raise pytest.UsageError(f"an id that is another one in each process: {different[0]}")
    items.sort(key=lambda item: "training" not in item.path.parts)


def pytest_collection_finish() -> None:
    """What is imported by now stays: the collector, which tests call again and again, need not look at it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """A test that leaves a thread of a pipe behind fails; nothing is closed for it.

    A thread that ends by itself may still run its last lines when the test has its result. A server that several tests
    share starts its reader with the first large body, its writer with the first large answer, and ends both when it is
    closed.
    """
    before = set(threading.enumerate())
    yield
    ends = time.monotonic() + 30
    new = set(threading.enumerate()) - before
    shared = {"torchpipe-reader_0", "torchpipe-reader-long_0", "torchpipe-writer_0"}
    left = [thread for thread in new if thread.name.startswith("torchpipe-") and thread.name not in shared]
    for thread in left:
        thread.join(max(0.0, ends - time.monotonic()))
    assert {thread.name for thread in left if thread.is_alive()} == set()


@pytest.fixture
def restored_logging() -> Iterator[None]:
    """The root logger has the handlers and the level afterwards that it had before, and stderr is what it was."""
    root = logging.getLogger()
    handlers, level, stderr = root.handlers[:], root.level, sys.stderr
    yield
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    sys.stderr = stderr
    for thread in threading.enumerate():
        if thread.name == "torchpipe-log":
            thread.join(30)


@pytest.fixture
def restored() -> Iterator[Registry]:
    """The registry of pipes that are given no other; what a test registers in it is forgotten afterwards."""
    with registry.default.restored() as default:
        yield default


@pytest.fixture
def register(restored: Registry) -> Register:
    """Registers a backend class for this test, under a name that no other has; returns the name."""

    def register_unique(cls: type) -> str:
        name = f"{cls.__name__}{next(_numbers)}"
        restored.register_backend(cls, name)
        return name

    return register_unique


@pytest.fixture
def images(tmp_path: Path) -> Callable[..., Path]:
    """A directory of files with these contents."""

    def make(**contents: str | bytes) -> Path:
        directory = tmp_path / "images"
        directory.mkdir()
        for name, content in contents.items():
            (directory / f"{name}.jpg").write_bytes(content if isinstance(content, bytes) else content.encode())
        return directory

    return make


@pytest.fixture
def toml(tmp_path: Path) -> str:
    """Of the tests in ``training``: to 1×3×24×20, RGB, uint8."""
    from kit.training_data import write_toml

    return write_toml(tmp_path)


@pytest.fixture
def dataset(tmp_path: Path) -> Any:
    """Of the tests in ``training``: eleven images."""
    from kit.training_data import write_images

    return write_images(tmp_path / "images", 11)


@pytest.fixture(params=["threads", "asyncio"])
def make(request: pytest.FixtureRequest) -> Any:
    """Of the tests in ``client``: ``Client``, or the same calls of ``AsyncClient``."""
    from kit.peer import CLIENTS

    return CLIENTS[request.param]


@pytest.fixture
def workers_may_die() -> Iterator[None]:
    """Of the tests in ``training``: PyTorch's handler of SIGCHLD, which any DataLoader before may have set, is off.

    It raises in the main thread as soon as a worker has died, wherever that thread is.
    """
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGCHLD, before)


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    """A smooth colorful Mat, the same for the same arguments."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (max(2, height // 25), max(2, width // 25), 3), np.uint8)
    return cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)


def encode(mat: np.ndarray, extension: str = ".jpg", *options: int) -> bytes:
    done, encoded = cv2.imencode(extension, mat, options)
    assert done
    return encoded.tobytes()


@pytest.fixture(scope="session")
def jpeg() -> bytes:
    """500×375, quality 90."""
    return encode(picture(375, 500), ".jpg", cv2.IMWRITE_JPEG_QUALITY, 90)


def model_of(
    nodes: list[onnx.NodeProto],
    inputs: dict[str, list[int | str]],
    outputs: dict[str, list[int | str]],
    constants: dict[str, np.ndarray] | None = None,
    dtype: int = TensorProto.FLOAT,
) -> onnx.ModelProto:
    """An ONNX model; ``inputs`` and ``outputs`` give dimensions by name, a string is a free one."""
    graph = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info(name, dtype, dims) for name, dims in inputs.items()],
        [helper.make_tensor_value_info(name, dtype, dims) for name, dims in outputs.items()],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in (constants or {}).items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.checker.check_model(model)
    return model


def save_model(path: Path, *args: Any, **more: Any) -> str:
    """Write the ``model_of`` the other arguments; its path."""
    onnx.save(model_of(*args, **more), str(path))
    return str(path)


def _classifier(path: Path, dims: list[int | str]) -> str:
    rng = np.random.default_rng(7)
    nodes = [
        helper.make_node("Conv", ["x", "kernel"], ["conv"], pads=[1, 1, 1, 1]),
        helper.make_node("GlobalAveragePool", ["conv"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["flat"]),
        helper.make_node("Gemm", ["flat", "weight", "bias"], ["y"]),
    ]
    constants = {
        "kernel": rng.normal(0, 0.05, (4, 3, 3, 3)).astype(np.float32),
        "weight": rng.normal(0, 1, (4, 5)).astype(np.float32),
        "bias": rng.normal(0, 1, 5).astype(np.float32),
    }
    return save_model(path, nodes, {"x": dims}, {"y": [dims[0], 5]}, constants)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def classifier(models: Path) -> str:
    """N×3×H×W to N×5."""
    return _classifier(models / "classifier.onnx", ["N", 3, "H", "W"])


@pytest.fixture(scope="session")
def fixed_batch(models: Path) -> str:
    """2×3×8×8 to 2×5, and no other batch."""
    return _classifier(models / "fixed_batch.onnx", [2, 3, 8, 8])


@pytest.fixture(scope="session")
def sum_and_difference(models: Path) -> str:
    """a and b, N×2, to a+b and a-b."""
    nodes = [helper.make_node("Add", ["a", "b"], ["sum"]), helper.make_node("Sub", ["a", "b"], ["difference"])]
    both: dict[str, list[int | str]] = {"a": ["N", 2], "b": ["N", 2]}
    return save_model(models / "sum_and_difference.onnx", nodes, both, {"sum": ["N", 2], "difference": ["N", 2]})
