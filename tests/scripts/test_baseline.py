"""The benchmarks' baseline: its preprocessing, its service, its use of PyCUDA and TensorRT, which are fakes here."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
from benchmarks.gpu import baseline
from conftest import encode, picture
from kit.services import ROOT
from kit.waits import PROGRAM_WAIT, WAIT
from thriftpy2.rpc import make_client

from torchpipe_py.errors import BackendUnavailable, ConfigError

DEMO = ROOT / "configs" / "demo"


class FakeModel:
    """Returns the means of the three channels as logits; refuses all but 1×3×size×size float32."""

    description = "a fake"

    def __init__(self, size: int = 224) -> None:
        self._shape, self.is_closed = (1, 3, size, size), False

    def run(self, array: np.ndarray) -> np.ndarray:
        assert array.shape == self._shape
        assert array.dtype == np.float32
        return array.mean(axis=(2, 3)) / 10

    def close(self) -> None:
        self.is_closed = True


def solid(red: int, green: int, blue: int) -> bytes:
    return encode(np.full((40, 60, 3), (blue, green, red), np.uint8), ".png")


# -- preprocessing, softmax, the lock -------------------------------------------------------------------------------


def test_preprocessing_gives_the_pixels_of_opencv(jpeg: bytes) -> None:
    mat = cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR)
    mat = cv2.cvtColor(cv2.resize(mat, (64, 64), interpolation=cv2.INTER_LINEAR), cv2.COLOR_BGR2RGB)
    array = baseline.preprocess(jpeg, 64)
    assert (array.dtype, array.flags.c_contiguous) == (np.float32, True)
    assert baseline.preprocess(jpeg).shape == (1, 3, 224, 224)
    np.testing.assert_array_equal(array[0], mat.transpose(2, 0, 1))


@pytest.mark.parametrize("data", [b"", b"no image", encode(picture(20, 20))[:30]], ids=["empty", "text", "cut"])
def test_preprocessing_refuses_invalid_images(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a readable image"):
        baseline.preprocess(data)


def test_label_and_score_equal_the_softmax() -> None:
    label, score = baseline.Baseline(FakeModel())(solid(red=10, green=30, blue=20))
    assert label == "1"
    assert score == pytest.approx(np.exp(3) / np.exp([1, 3, 2]).sum(), rel=1e-5)


def test_one_thread_at_a_time_runs_the_model() -> None:
    """The first one runs until the others ask for the lock."""
    asked, inside, alone = threading.Semaphore(0), threading.Semaphore(1), []

    class Lock:
        def __init__(self) -> None:
            self._lock = threading.Lock()

        def __enter__(self) -> None:
            asked.release()
            self._lock.acquire()

        def __exit__(self, *_: object) -> None:
            self._lock.release()

    class Watched(FakeModel):
        def run(self, array: np.ndarray) -> np.ndarray:
            alone.append(inside.acquire(blocking=False))
            if len(alone) == 1:
                assert all(asked.acquire(timeout=WAIT) for _ in range(4))
            inside.release()
            return super().run(array)

    model = baseline.Baseline(Watched())
    model._lock = Lock()  # type: ignore[assignment]
    with ThreadPoolExecutor(4) as threads:
        assert [label for label, _ in threads.map(model, [solid(1, 2, 3)] * 4)] == ["2"] * 4
    assert alone == [True] * 4


# -- the service ----------------------------------------------------------------------------------------------------


@contextmanager
def serving(model: Any, size: int = 224) -> Iterator[int]:
    """The port of a server on a thread of this process."""
    listener = baseline.socket.create_server(("127.0.0.1", 0))
    server = baseline.make_server(listener, baseline.Baseline(model, size))
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.close()
        with connect(listener.getsockname()[1]):  # wakes it
            thread.join(WAIT)
        listener.close()
        assert not thread.is_alive()


def connect(port: int) -> Any:
    return closing(make_client(baseline.IDL.InferenceService, "127.0.0.1", port, timeout=int(WAIT * 1000)))


def ask(client: Any, data: bytes) -> Any:
    return client.infer_batch(baseline.IDL.InferenceParams(uuid="test", data=data))


def test_each_client_gets_the_results_of_its_own_images() -> None:
    def run(best: int) -> set[str]:
        levels = [10, 10, 10]
        levels[best] = 200
        with connect(port) as client:
            client.ping()
            return {ask(client, solid(*levels)).label for _ in range(20)}

    with serving(FakeModel()) as port, ThreadPoolExecutor(3) as threads:
        assert list(threads.map(run, range(3))) == [{"0"}, {"1"}, {"2"}]


def test_a_failure_is_a_typed_error_and_the_connection_stays() -> None:
    class Broken(FakeModel):
        def run(self, array: np.ndarray) -> np.ndarray:
            raise RuntimeError("no luck")

    with serving(Broken()) as port, connect(port) as client:
        for data, code, text in [(b"no image", "decode_error", "readable"), (solid(1, 2, 3), "backend_error", "luck")]:
            with pytest.raises(baseline.IDL.InferenceError) as caught:
                ask(client, data)
            assert caught.value.code == code
            assert text in caught.value.message
        client.ping()


# -- the command ----------------------------------------------------------------------------------------------------


def test_onnx_model_is_served_until_sigterm() -> None:
    options = ["--onnx", str(DEMO / "model.onnx"), "--size", "64", "--port", "0"]
    command = [sys.executable, str(ROOT / "scripts" / "baseline_server.py"), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        serves = re.fullmatch(r"serving \S+ on 127\.0\.0\.1:(\d+) \(pid \d+\), ONNX Runtime \S+ behind a lock\n", line)
        assert serves, (line, process.communicate())
        with connect(int(serves[1])) as client:  # an idle connection does not hold it up
            labels = (DEMO / "labels.txt").read_text(encoding="utf-8").split()
            assert labels[int(ask(client, (DEMO / "images" / "ring_00.jpg").read_bytes()).label)] == "ring"
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=PROGRAM_WAIT)
    assert (process.returncode, out, err) == (0, "", "")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--engine", "some.engine", "--cuda", "pycuda"], r"PyCUDA cannot be imported .*torchpipe_py\[pycuda\]'\)"),
        (["--onnx", "missing.onnx"], r"model missing\.onnx: No such file or directory"),
        (["--onnx", str(DEMO / "model.onnx")], r".*model\.onnx takes \['batch', 3, 64, 64\], not \[1, 3, 224, 224\]"),
    ],
    ids=["no PyCUDA", "no model", "another size"],
)
def test_says_in_one_line_why_it_cannot_serve(
    options: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pycuda", None)
    monkeypatch.setattr(baseline.signal, "signal", lambda *_: None)
    assert baseline.main([*options, "--port", "0"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(rf"baseline_server\.py: {said}\n", printed.err)


def test_says_that_pytorch_stands_in_for_pycuda(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pycuda", None)
    monkeypatch.setattr(baseline.signal, "signal", lambda *_: None)

    def no_engine(path: str, size: int) -> None:
        raise ConfigError(f"{path}: PyTorch was to feed this")

    monkeypatch.setattr(baseline, "TorchEngine", no_engine)
    assert baseline.main(["--engine", "some.engine", "--port", "0"]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("baseline_server.py: PyCUDA cannot be imported (")
    assert first.endswith(": PyTorch copies instead")
    assert second == "baseline_server.py: some.engine: PyTorch was to feed this"


# -- PyCUDA and TensorRT, as far as fakes can tell --------------------------------------------------------------------


class FakeGpu:
    """The parts of ``pycuda.driver`` and ``tensorrt`` that `PycudaEngine` uses; output ``y`` has the channels' means.

    ``takes`` is the engine's input shape. What happened since the engine was made is in ``events``. Work on the device
    without the context, or with it pushed twice, fails.
    """

    def __init__(self, takes: tuple[int, ...], dtype: str = "float32") -> None:
        self.takes, self.dtype, self.shapes = takes, dtype, dict[str, tuple[int, ...]]()
        self.memory: dict[int, np.ndarray] = {}
        self.addresses: dict[str, int] = {}
        self.events: list[str] = []
        self.depth, self.fails = 0, False
        context = SimpleNamespace(push=self._push)
        self.cuda = SimpleNamespace(
            Error=type("Error", (Exception,), {}),
            init=lambda: None,
            Device=lambda index: SimpleNamespace(retain_primary_context=lambda: context),
            Context=SimpleNamespace(pop=self._pop),
            Stream=lambda: SimpleNamespace(handle=7, synchronize=lambda: self._note("synchronize")),
            pagelocked_empty=np.empty,
            mem_alloc=self._allocate,
            memcpy_htod_async=self._to_device,
            memcpy_dtoh_async=self._to_host,
        )
        self.trt = SimpleNamespace(
            __version__="0.0", TensorIOMode=SimpleNamespace(INPUT="in", OUTPUT="out"), float32="float32"
        )

    def load_engine(self, trt: Any, content: bytes, name: str, version_compatible: bool) -> Any:
        assert (self.depth, version_compatible) == (1, True)
        if content != b"plan":
            raise ConfigError(f"{name}: TensorRT cannot load this engine")
        names = ["y", "x"]
        return SimpleNamespace(
            num_io_tensors=2,
            get_tensor_name=names.__getitem__,
            get_tensor_mode=lambda name: "in" if name == "x" else "out",
            get_tensor_shape=lambda name: self.takes,
            get_tensor_dtype=lambda name: self.dtype,
            create_execution_context=lambda: SimpleNamespace(
                set_input_shape=self._set_shape,
                get_tensor_shape=self.shapes.__getitem__,
                set_tensor_address=self.addresses.__setitem__,
                execute_async_v3=self._execute,
            ),
        )

    def _note(self, event: str) -> None:
        assert self.depth == 1, event
        self.events.append(event)

    def _push(self) -> None:
        self.depth += 1
        self._note("push")

    def _pop(self) -> None:
        self._note("pop")
        self.depth -= 1

    def _allocate(self, size: int) -> int:
        self._note("allocate")
        self.memory[len(self.memory)] = np.empty(size // 4, np.float32)
        return len(self.memory) - 1

    def _to_device(self, to: int, source: np.ndarray, stream: Any) -> None:
        self._note("to device")
        self.memory[to][:] = source.ravel()

    def _to_host(self, to: np.ndarray, source: int, stream: Any) -> None:
        self._note("to host")
        to.ravel()[:] = self.memory[source]

    def _set_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes.update({name: shape, "y": (shape[0], 3)})
        return all(have in (-1, wanted) for have, wanted in zip(self.takes, shape, strict=True))

    def _execute(self, stream: int) -> bool:
        assert stream == 7
        self._note("execute")
        x = self.memory[self.addresses["x"]].reshape(self.shapes["x"])
        self.memory[self.addresses["y"]][:] = x.mean(axis=(2, 3)).ravel()
        return not self.fails


RUN = ["push", "to device", "execute", "to host", "synchronize", "pop"]


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "some.engine"
    path.write_bytes(b"plan")
    return path


def install(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pycuda", SimpleNamespace(VERSION_TEXT="9", driver=gpu.cuda))
    monkeypatch.setitem(sys.modules, "pycuda.driver", gpu.cuda)
    monkeypatch.setattr(baseline, "load_tensorrt", lambda: gpu.trt)
    monkeypatch.setattr(baseline, "load_engine", gpu.load_engine)


@pytest.mark.parametrize("takes", [(-1, 3, 8, 8), (1, 3, 8, 8), (-1, 3, -1, -1)])
def test_a_call_pushes_the_context_copies_runs_and_pops(
    takes: tuple[int, ...], plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGpu(takes)
    install(gpu, monkeypatch)
    model = baseline.load_model(str(plan), size=8)
    assert model.description == "TensorRT 0.0, PyCUDA 9"
    assert gpu.events == ["push", "allocate", "allocate", "pop", *RUN]  # and a first run, which is slow
    gpu.events.clear()
    assert model.run(np.full((1, 3, 8, 8), 5, np.float32)).tolist() == [[5, 5, 5]]
    assert gpu.events == RUN
    model.close()
    assert gpu.depth == 0


def test_threads_share_the_buffers_and_keep_their_results(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu((1, 3, 8, 8))
    install(gpu, monkeypatch)
    model = baseline.load_model(str(plan), size=8)
    kept = [model.run(np.full((1, 3, 8, 8), value, np.float32)) for value in range(3)]
    assert [output.tolist() for output in kept] == [[[value] * 3] for value in range(3)]
    gpu.events.clear()
    locked = baseline.Baseline(model, 8)
    images = [solid(*(200 if channel == best else 10 for channel in range(3))) for best in range(3)] * 30
    with ThreadPoolExecutor(4) as threads:
        assert [label for label, _ in threads.map(locked, images)] == ["0", "1", "2"] * 30
    assert gpu.events == RUN * len(images)


def test_the_context_is_popped_after_a_failure(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu((1, 3, 8, 8))
    install(gpu, monkeypatch)
    model = baseline.load_model(str(plan), size=8)
    gpu.events.clear()
    gpu.fails = True
    with pytest.raises(RuntimeError, match="could not enqueue"):
        model.run(np.zeros((1, 3, 8, 8), np.float32))
    assert gpu.events == ["push", "to device", "execute", "pop"]
    gpu.fails = False
    assert model.run(np.ones((1, 3, 8, 8), np.float32)).tolist() == [[1, 1, 1]]


@pytest.mark.parametrize(
    ("gpu", "content", "error", "said"),
    [
        (FakeGpu((4, 3, 8, 8)), b"plan", ValueError, r"takes \[\(4, 3, 8, 8\)\], not one input of \(1, 3, 8, 8\)"),
        (FakeGpu((1, 3, 8, 8), "float16"), b"plan", ValueError, "y is float16, not float32"),
        (FakeGpu((1, 3, 8, 8)), b"of another version", ConfigError, "TensorRT cannot load this engine"),
    ],
    ids=["batches of 4", "float16", "another version"],
)
def test_an_engine_that_does_not_fit_is_refused(
    gpu: FakeGpu, content: bytes, error: type[Exception], said: str, plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(gpu, monkeypatch)
    plan.write_bytes(content)
    with pytest.raises(error, match=said):
        baseline.load_model(str(plan), size=8)
    assert gpu.depth == 0


def test_a_machine_without_a_device_is_reported(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu((1, 3, 8, 8))
    install(gpu, monkeypatch)

    def no_device() -> None:
        raise gpu.cuda.Error("no CUDA-capable device is detected")

    gpu.cuda.init = no_device
    with pytest.raises(BackendUnavailable, match="no usable CUDA device: no CUDA-capable device"):
        baseline.load_model(str(plan), size=8)


def test_pytorch_is_chosen_where_it_is_asked_for_or_pycuda_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    install(FakeGpu((1, 3, 8, 8)), monkeypatch)
    assert [baseline.choose_library(wanted) for wanted in ("auto", "pycuda", "torch")] == [
        ("pycuda", ""),
        ("pycuda", ""),
        ("torch", ""),
    ]
    monkeypatch.delitem(sys.modules, "pycuda.driver")
    monkeypatch.setitem(sys.modules, "pycuda", None)
    library, reason = baseline.choose_library("auto")
    assert library == "torch"
    assert reason.startswith("PyCUDA cannot be imported (")
    with pytest.raises(BackendUnavailable, match="PyCUDA cannot be imported"):
        baseline.choose_library("pycuda")
