"""Both clients against the service itself."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from conftest import Register
from fakes import WAIT, Gate, in_threads
from flaky import CLIENTS, pauses
from service import LIGHT, ROOT, Process, eventually, reserved_port, serving
from torchpipe_client import (
    ClientError,
    ConnectionLost,
    DeadlineExceeded,
    DecodeError,
    InferenceError,
    InvalidRequest,
    NoResult,
    NotConnected,
    Overloaded,
    Result,
    TimedOut,
    UnknownNode,
    WorkerDied,
)

FATAL = '''
import os, pathlib, time
from torchpipe_py import ItemBackend, register_backend

HERE = pathlib.Path(__file__).parent

@register_backend
class Fatal(ItemBackend):
    """Ends its process at "die", and at "die once" the first time; blocks at "block"."""

    def forward_item(self, item):
        data = bytes(item["data"]).decode()
        if data == "die" or (data == "die once" and not (HERE / "died").exists()):
            (HERE / "died").touch()
            os._exit(9)
        if data == "block":
            (HERE / "blocked").touch()
            time.sleep(60)
        item["result"] = (data, 1.0)
'''


@pytest.fixture(params=CLIENTS)
def make(request: pytest.FixtureRequest) -> Any:
    """Client, or the same calls of AsyncClient."""
    return CLIENTS[request.param]


@pytest.fixture(scope="module")
def echo() -> Iterator[str]:
    """The address of a service whose result is its data."""
    with serving("Identity", max_message_bytes=100_000) as server:
        yield f"127.0.0.1:{server.port}"


@pytest.fixture
def fatal(tmp_path: Path) -> Iterator[Process]:
    (tmp_path / "fatal.py").write_text(FATAL)
    (tmp_path / "fatal.toml").write_text('[node]\nbackend = "Fatal"\n')
    args, light = ("--import", str(tmp_path / "fatal.py")), {"PYTHONPATH": LIGHT}
    with Process(*args, config=str(tmp_path / "fatal.toml"), env=light) as process:
        yield process.wait_started()


# -- values and errors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", ">i4", "float16", "float32", ">f8"])
def test_arrays_come_back_as_they_went(make, echo, dtype):
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    with make(echo) as client:
        for sent in (array, array[:, ::2].T, array[:0], np.array(1, dtype)):
            result = client.infer({"data": sent})["result"]
            assert result.dtype == sent.dtype.newbyteorder("=")
            np.testing.assert_array_equal(result, sent)
            result[...] = 0  # its own


def test_values_come_back_as_they_went(make, echo):
    arrays = [np.zeros((1, 2), np.float32), np.ones(3, np.uint8)]
    with make(echo) as client:
        for sent in (b"bytes", "text", 7, -1.5):
            assert client.infer({"data": sent})["result"] == sent
        for sent in (np.float32(0.5), torch.tensor([[0.5]])):
            assert client.infer({"data": sent})["result"] == 0.5
        assert client.infer({"data": memoryview(b"bytes")})["result"] == b"bytes"
        assert [one.shape for one in client.infer({"data": arrays})["result"]] == [(1, 2), (3,)]
        outputs = client.infer({"data": b"", "boxes": "1", "scale": 2.0}, outputs=["scale", "boxes"])
        assert outputs == {"boxes": "1", "scale": 2.0}


@pytest.mark.parametrize(
    ("sent", "dtype"),
    [
        ([1, 1, 3, 3], "int64"),
        ((0.5, 1), "float64"),
        ([[1, 2], [3, 4]], "int64"),
        ([True, False], "bool"),
        ([-(2**63), 2**63 - 1], "int64"),
        (list(np.array([1.5, 2], np.float32)), "float32"),
        ([np.int64(1), 2], "int64"),
    ],
    ids=str,
)
def test_a_list_of_numbers_is_an_array(make, echo, sent, dtype):
    with make(echo) as client:
        result = client.infer({"data": sent})["result"]
    assert result.dtype == dtype
    assert result.tolist() == np.array(sent).tolist()


def test_a_box_beside_an_image(make):
    image = cv2.imencode(".png", np.zeros((5, 6, 3), np.uint8))[1].tobytes()
    with serving("S[DecodeMat,CropMat]") as server, make(f"127.0.0.1:{server.port}") as client:
        for box in ([1, 1, 3, 4], (1.0, 1, 3, 4), np.array([1, 1, 3, 4]), list(np.array([1, 1, 3, 4]))):
            assert client.infer({"data": image, "box": box})["result"].shape == (3, 2, 3)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (["a", "b"], r"^inputs\['data'\]\[0\]: a str has no form on the wire in a list, which holds arrays or numbers"),
        ([1, "a"], r"^inputs\['data'\]: a list of numbers, in which not all are numbers of at most 64 bits"),
        ([1, None], r"^inputs\['data'\]: a list of numbers, in which not all are numbers of at most 64 bits"),
        ([2**64], r"^inputs\['data'\]: a list of numbers, in which not all are numbers of at most 64 bits"),
        ([-1, 2**63], r"^inputs\['data'\]: an integer of more than 64 bits"),
        ([[1], [1, 2]], r"^inputs\['data'\]: a list that NumPy makes no array of: "),
        (None, r"^inputs\['data'\]: a NoneType has no form on the wire"),
        ([np.zeros(1), b"a"], r"^inputs\['data'\]\[1\]: a bytes has no form on the wire in a list, which holds arr"),
        (torch.zeros(1, dtype=torch.bfloat16), r"^inputs\['data'\]: a Tensor that NumPy makes no array of: "),
        (2**63, r"^inputs\['data'\]: an integer of more than 64 bits"),
        (np.zeros(2, np.complex64), r"^inputs\['data'\]: an array of complex64; the wire has bool, "),
    ],
)
def test_values_that_have_no_form_are_refused_here(make, value, text):
    with make("127.0.0.1:1") as client, pytest.raises(InvalidRequest, match=text):
        client.infer({"data": value})


def test_images_that_are_no_bytes_are_refused_here(make):
    with make("127.0.0.1:1") as client:
        with pytest.raises(InvalidRequest, match=r"^image: expected bytes, got a str; of a file they are Path"):
            client.infer_batch("photo.jpg")
        with pytest.raises(InvalidRequest, match=r"^images\[1\]: expected bytes, got a PosixPath"):
            client.infer_many([b"a", Path("photo.jpg")])
        with pytest.raises(InvalidRequest, match=r"^images: expected a list of bytes, got bytes$"):
            client.infer_many(b"a")


def test_a_request_that_is_no_dict_and_keys_that_are_no_list_are_refused_here(make):
    with make("127.0.0.1:1") as client:
        with pytest.raises(InvalidRequest, match=r"^inputs: expected a dict, as {'data': …}, got bytes$"):
            client.infer(b"a")
        with pytest.raises(InvalidRequest, match=r"^outputs: expected a list of keys, as \['result'\], got 'result'$"):
            client.infer({"data": b"a"}, outputs="result")


def test_what_the_service_refuses_is_told(make, echo):
    with make(echo) as client:
        with pytest.raises(UnknownNode, match="no root 'other'"):
            client.infer({"data": b""}, node_name="other")
        with pytest.raises(NoResult, match="no 'boxes'"):
            client.infer({"data": b""}, outputs=["boxes"])
        for size in (200_000, 20_000_000):  # one that the sockets take, and one of which the rest is never read
            with pytest.raises(InferenceError, match="limit is 100000") as raised:
                client.infer({"data": bytes(size)})
            assert raised.value.code == "too_large"
            client.ping()
        with pytest.raises(InvalidRequest, match=r"^infer_batch: .*uuid"):
            client.infer_batch(b"a", uuid=5)


def test_the_demo(make):
    images = [path.read_bytes() for path in sorted((ROOT / "configs/demo/images").glob("*.jpg"))[::12]]
    with serving(str(ROOT / "configs/demo.toml")) as server, make(f"127.0.0.1:{server.port}") as client:
        client.ping()
        results = [client.infer_batch(image) for image in images]
        assert [type(one) for one in results] == [Result] * len(images)
        *many, broken = client.infer_many([*images, b"no image"])
        assert [one.label for one in many] == [label for label, _ in results]
        assert isinstance(broken, DecodeError)
        with pytest.raises(DecodeError, match="8 bytes are no image"):
            client.infer_batch(b"no image")
        outputs = client.infer({"data": images[0]})
        assert (outputs["label"], outputs["score"]) == (results[0].label, pytest.approx(results[0].score, abs=1e-4))
        assert json.loads(outputs["result"]) == [outputs["label"], outputs["score"]]


# -- load and time --------------------------------------------------------------------------------------------------


def test_fifty_threads_get_their_own_answers(make, echo):
    with make(echo, max_connections=16) as client:

        def work(index: int) -> None:
            for turn in range(4):
                sent = np.full((index + 1, 3), turn, np.float32)
                np.testing.assert_array_equal(client.infer({"data": sent})["result"], sent)

        in_threads(50, work)


def test_a_full_service_is_asked_again(make, register: Register, monkeypatch):
    gate = Gate()
    config = {"global": {"max_inflight": 1}, "node": {"backend": register(gate.backend)}}
    with serving(config) as server, gate, make(f"127.0.0.1:{server.port}") as client:
        first = threading.Thread(target=lambda: client.infer({"data": b"a"}))
        first.start()
        gate.wait_entered()
        with make(f"127.0.0.1:{server.port}", retries=0) as hasty, pytest.raises(Overloaded) as raised:
            hasty.infer({"data": b"b"})
        assert raised.value.retry_after_ms
        with pauses(monkeypatch, lambda: (gate.open(), first.join(WAIT))) as delays:
            assert client.infer({"data": b"c"}) == {"result": b"c"}
        assert len(delays) == 1
        assert delays[0] >= raised.value.retry_after_ms / 1000


def test_what_takes_too_long_ends_by_the_service_or_by_the_client(make, register: Register):
    gate = Gate()
    config = {"node": {"backend": register(gate.backend)}}
    with serving(config) as server, gate, make(f"127.0.0.1:{server.port}") as client:
        with pytest.raises(DeadlineExceeded) as raised:
            client.infer({"data": b"a"}, deadline_ms=50)
        assert isinstance(raised.value, TimeoutError)
        many = client.infer_many([b"a", b"b"], deadline_ms=50)
        assert [type(one) for one in many] == [DeadlineExceeded] * 2
        with pytest.raises(TimedOut):
            client.infer_batch(b"a", timeout=0.05)
        gate.open()
        assert client.infer({"data": b"b"}) == {"result": b"b"}


def test_a_restarted_service_is_found_again(make):
    with reserved_port() as port, make(f"127.0.0.1:{port}", retries=0) as client:
        for turn in range(2):
            with serving("Identity", listener=socket.create_server(("127.0.0.1", port))):
                for _ in range(2):  # the second one over the same connection
                    assert client.infer({"data": turn}) == {"result": turn}
            with pytest.raises((NotConnected, ConnectionLost)):
                client.ping()


# -- workers that die -----------------------------------------------------------------------------------------------


def test_a_call_whose_worker_died_is_repeated_once(fatal, tmp_path):
    for make in CLIENTS.values():
        with make(f"127.0.0.1:{fatal.port}", timeout=WAIT) as client:
            assert client.infer_batch(b"die once").label == "die once"
            with pytest.raises(WorkerDied):
                client.infer_batch(b"die")
        (tmp_path / "died").unlink()
        with make(f"127.0.0.1:{fatal.port}", timeout=WAIT, idempotent=False) as careful:
            with pytest.raises(WorkerDied):
                careful.infer_batch(b"die once")
            assert careful.infer_batch(b"die once").label == "die once"
        (tmp_path / "died").unlink()


def test_a_service_that_is_killed_ends_its_calls(fatal, tmp_path):
    ends: list[str] = []

    def work(make: Any) -> None:
        with make(f"127.0.0.1:{fatal.port}", retries=0, timeout=WAIT) as client:
            try:
                client.infer_batch(b"block")
            except ClientError as error:
                ends.append(error.code)

    threads = [threading.Thread(target=work, args=(make,)) for make in CLIENTS.values()]
    for thread in threads:
        thread.start()
    eventually((tmp_path / "blocked").exists)
    workers = fatal.workers
    fatal.signal(signal.SIGKILL)
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    for thread in threads:
        thread.join(WAIT)
    assert len(ends) == 2
    assert "connection_lost" in ends
    assert set(ends) <= {"connection_lost", "not_connected"}  # by whether the second one was connected yet


# -- what it needs --------------------------------------------------------------------------------------------------

ALONE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "torchpipe_py", "torchpipe_server", "cv2", *sys.argv[2:]}:
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Refuse())
from torchpipe_client import Client
with Client(sys.argv[1]) as client:
    client.ping()
    print(client.infer({"data": b"a"})["result"])
"""


def test_it_needs_thriftpy2_and_no_more(echo):
    def alone(*missing: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-W", "error", "-c", ALONE, echo, *missing]
        return subprocess.run(command, capture_output=True, text=True, timeout=WAIT, check=False)

    done = alone("numpy")
    assert (done.returncode, done.stdout, done.stderr) == (0, "b'a'\n", "")
    done = alone("thriftpy2")
    assert done.stderr.splitlines()[-1].startswith(
        "ImportError: torchpipe_client needs thriftpy2 (pip install thriftpy2)"
    )
