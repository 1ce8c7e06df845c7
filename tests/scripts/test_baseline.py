"""The benchmarks' baseline: its preprocessing, and its service with a fake engine."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from benchmarks.gpu import baseline
from conftest import encode
from kit.waits import PROGRAM_WAIT, WAIT

pytest.importorskip("thriftpy2")
from thriftpy2.rpc import make_client

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "baseline_server.py"


class FakeEngine:
    """Logits that are the means of the three channels; what is not 1×3×size×size float32 is refused."""

    def __init__(self, engine_path: str = "", size: int = 224) -> None:
        self._shape = (1, 3, size, size)

    def infer(self, array: np.ndarray) -> np.ndarray:
        assert array.shape == self._shape
        assert array.dtype == np.float32
        return array.mean(axis=(2, 3)) / 10


def solid(red: int, green: int, blue: int) -> bytes:
    return encode(np.full((40, 60, 3), (blue, green, red), np.uint8), ".png")


# -- preprocessing, softmax -----------------------------------------------------------------------------------------


def test_preprocessing_is_opencvs(jpeg: bytes) -> None:
    mat = cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR)
    mat = cv2.cvtColor(cv2.resize(mat, (64, 64), interpolation=cv2.INTER_LINEAR), cv2.COLOR_BGR2RGB)
    array = baseline.preprocess(jpeg, 64)
    assert array.dtype == np.float32
    assert array.flags.c_contiguous
    assert baseline.preprocess(jpeg).shape == (1, 3, 224, 224)
    np.testing.assert_array_equal(array[0], mat.transpose(2, 0, 1))


# -- the service ----------------------------------------------------------------------------------------------------


@contextmanager
def serving(engine: Any) -> Iterator[int]:
    """The port of a server on a thread of this process."""
    listener = baseline.socket.create_server(("127.0.0.1", 0))
    server = baseline.make_server(listener, baseline.Baseline(engine))
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


def test_a_failure_is_a_typed_error_and_the_connection_lives_on() -> None:
    class Broken(FakeEngine):
        def infer(self, array: np.ndarray) -> np.ndarray:
            raise RuntimeError("no luck")

    with serving(Broken()) as port, connect(port) as client:
        for data, code, text in [(b"no image", "decode_error", "readable"), (solid(1, 2, 3), "backend_error", "luck")]:
            with pytest.raises(baseline.IDL.InferenceError) as caught:
                ask(client, data)
            assert caught.value.code == code
            assert text in caught.value.message
        with pytest.raises(baseline.IDL.InferenceError, match="invalid_request"):
            client.infer_many([], 0)
        client.ping()


# -- the command ----------------------------------------------------------------------------------------------------


def script(setup: str, *args: str) -> subprocess.Popen[str]:
    """The script in a process of its own, after some lines of Python in which it is `script`."""
    path = f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r})"
    code = f"{path}; from benchmarks.gpu import baseline as script\n{setup}\n"
    command = [sys.executable, "-c", code + "sys.exit(script.main(sys.argv[1:]))", *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_it_serves_until_sigterm() -> None:
    fake = """
import numpy
class Fake:
    def __init__(self, path, size): assert (path, size) == ("some.engine", 64)
    def infer(self, array): return array.mean(axis=(2, 3))
script.LockedEngine = Fake"""
    with script(fake, "--engine", "some.engine", "--port", "0", "--size", "64") as process:
        assert process.stdout is not None
        serves = re.fullmatch(r"serving some\.engine on 127\.0\.0\.1:(\d+) \(pid \d+\)\n", process.stdout.readline())
        assert serves, process.communicate()
        with connect(int(serves[1])) as client:  # an idle connection does not hold it up
            assert ask(client, solid(1, 2, 9)).label == "2"
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=PROGRAM_WAIT)
    assert (process.returncode, out, err) == (0, "", "")
