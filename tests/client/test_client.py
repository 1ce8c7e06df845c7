"""Both clients against the service itself."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from kit.peer import CLIENTS
from kit.services import SteeredProcess, reserved_port, serving, steered
from kit.steered import Steered
from kit.waits import WAIT, run
from torchpipe_client import (
    BackendError,
    ConnectionLost,
    DecodeError,
    InferenceError,
    InvalidRequest,
    NoResult,
    NotConnected,
    Result,
    UnknownNode,
    WorkerDied,
)


@pytest.fixture(scope="module")
def echo() -> Iterator[str]:
    """The address of a service whose result is its data."""
    with serving("Identity", max_message_bytes=100_000) as server:
        yield f"127.0.0.1:{server.port}"


# -- values and errors ----------------------------------------------------------------------------------------------

BLOCK = np.arange(24).reshape(2, 3, 4)


@pytest.mark.parametrize(
    ("sent", "dtype"),
    [
        *((sent, None) for sent in (b"bytes", "text", 7, -1.5)),
        *((BLOCK.astype(dtype), dtype) for dtype in ("bool", "uint8", "int64", ">i4", "float16", "float32", ">f8")),
        *((array, "int64") for array in (BLOCK[:, ::2].T, BLOCK[:0], np.array(1))),
        (torch.tensor([[0.5]]), "float32"),
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
def test_value_survives_a_round_trip(make, echo, sent, dtype):
    with make(echo) as client:
        result = client.infer({"data": sent})["result"]
        if dtype is None:
            assert result == sent
        else:
            assert result.dtype == np.dtype(dtype).newbyteorder("=")
            np.testing.assert_array_equal(result, sent)
            result[...] = 0  # its own


VALUES = {
    "boxes": [{"label": "ring", "box": [1, 2.5, 3, 4]}, {}],
    "pair": ("ring", 0.5),
    "pairs": [("ring", 0.5), ("cross", 0.25)],
    "text": '{"no": "JSON"}',
    "nested": {"a": {"b": [None, True]}},
}


def test_infer_returns_dicts_and_lists(make):
    best = {"label": "ring", "score": 0.5}
    with steered() as server, make(f"127.0.0.1:{server.port}") as client:
        Steered.values = VALUES
        answers = {name: client.infer({"data": f"value {name}"}) for name in VALUES}
    assert answers == {
        "boxes": {"result": VALUES["boxes"]},
        "pair": {"result": ["ring", 0.5], **best},
        "pairs": {"result": [["ring", 0.5], ["cross", 0.25]], **best},
        "text": {"result": '{"no": "JSON"}'},
        "nested": {"result": VALUES["nested"]},
    }


def test_infer_many_runs_any_pipeline(make):
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    with steered() as server, make(f"127.0.0.1:{server.port}") as client:
        Steered.values = VALUES
        boxes, other, failed, missing = client.infer_many(
            [b"value boxes", {"data": array, "name": "x"}, {"data": "raise"}, {"data": "none"}],
            outputs=["result", "data"],
        )
        assert (boxes["result"], boxes["data"]) == (VALUES["boxes"], b"value boxes")
        np.testing.assert_array_equal(other["result"], array)
        assert [type(one) for one in (failed, missing)] == [BackendError, NoResult]
        assert client.infer_many([{"data": 1}, {"data": "value nested"}]) == [
            {"result": 1},
            {"result": VALUES["nested"]},
        ]
        assert client.infer_many([b"ab", b"raise"], node_name="node", priority=1)[0]["score"] == 2.0
        assert client.infer_many([], outputs=["result"]) == []
        (label,) = client.infer_many([b"value boxes"])
        assert isinstance(label, NoResult)
        assert "infer_many with inputs" in str(label)
        (unknown,) = client.infer_many([{"data": 1}], node_name="other")
        assert isinstance(unknown, UnknownNode)


@pytest.mark.parametrize(
    ("method", "args", "text"),
    [
        ("infer_many", [[{"data": None}]], r"^images\[0\]\['data'\]: a NoneType cannot be sent"),
        ("infer_many", [{"data": 1}], r"^images: expected a list of bytes or dicts, got dict$"),
        ("infer_many", [[b"a"], {"outputs": "result"}], r"^outputs: expected a list of keys, as \['result'\]"),
        ("infer", [{"data": ["a", "b"]}], r"^inputs\['data'\]\[0\]: a list cannot contain a str"),
        ("infer", [{"data": [b"a", b"b"]}], "a list cannot contain a bytes, .*; send several files with infer_many$"),
        ("infer", [{"data": [1, "a"]}], r"a list of numbers with an element that is not a number of at most 64 bits"),
        ("infer", [{"data": [2**64]}], r"a list of numbers with an element that is not a number of at most 64 bits"),
        ("infer", [{"data": [-1, 2**63]}], r"^inputs\['data'\]: an integer of more than 64 bits"),
        ("infer", [{"data": [[1], [1, 2]]}], r"NumPy cannot make an array of this list: "),
        ("infer", [{"data": None}], r"a NoneType cannot be sent"),
        ("infer", [{"data": torch.zeros(1, dtype=torch.bfloat16)}], r"NumPy cannot make an array of this Tensor: "),
        ("infer", [{"data": 2**63}], r"an integer of more than 64 bits"),
        ("infer", [{"data": np.zeros(2, np.complex64)}], r"an array of complex64; supported: bool, "),
        ("infer", [b"a"], r"^inputs: expected a dict, as {'data': …}, got bytes$"),
        (
            "infer",
            [{"data": b"a"}, {"outputs": "result"}],
            r"^outputs: expected a list of keys, as \['result'\], got 'result'$",
        ),
        ("infer_batch", ["photo.jpg"], r"^image: expected bytes, got a str; read a file with Path"),
        ("infer_many", [[b"a", Path("photo.jpg")]], r"^images\[1\]: expected bytes, got a PosixPath"),
        ("infer_many", [b"a"], r"^images: expected a list of bytes or dicts, got bytes$"),
        ("infer", [{}, {"priority": 0.5}], r"^priority: expected 0 \(normal\) or 1 \(low\), got 0.5$"),
        ("infer_many", [[], {"priority": 2}], r"^priority: expected 0 \(normal\) or 1 \(low\), got 2$"),
    ],
)
def test_arguments_that_are_refused_before_they_are_sent(make, method, args, text):
    with make("127.0.0.1:1") as client, pytest.raises(InvalidRequest, match=text):
        getattr(client, method)(args[0], **dict(*args[1:]))


def test_refusals_of_the_service_are_raised(make, echo):
    with make(echo) as client:
        with pytest.raises(UnknownNode, match="no root 'other'"):
            client.infer({"data": b""}, node_name="other")
        with pytest.raises(InvalidRequest, match="no 'boxes'"):
            client.infer({"data": b""}, outputs=["boxes"])
        for size in (200_000, 20_000_000):  # one that the sockets take, and one of which the rest is never read
            with pytest.raises(InferenceError, match="limit is 100000") as raised:
                client.infer({"data": bytes(size)})
            assert raised.value.code == "too_large"
            client.ping()
        with pytest.raises(InvalidRequest, match=r"^infer_batch: .*uuid"):
            client.infer_batch(b"a", uuid=5)


def test_a_restarted_service_is_found_again(make):
    with reserved_port() as port, make(f"127.0.0.1:{port}", retries=0) as client:
        for turn in range(2):
            with serving("Identity", listener=socket.create_server(("127.0.0.1", port))):
                for _ in range(2):  # the second one over the same connection
                    assert client.infer({"data": turn}) == {"result": turn}
            with pytest.raises((NotConnected, ConnectionLost)):
                client.ping()


def test_a_call_whose_worker_died_is_repeated_once(tmp_path):
    with SteeredProcess(tmp_path) as process:
        address = f"127.0.0.1:{process.wait_started().port}"
        for make in CLIENTS.values():
            with make(address, timeout=WAIT, retries=200) as client:
                assert client.infer_batch(b"die once") == Result("die once", 8.0)
                with pytest.raises(WorkerDied):
                    client.infer_batch(b"die")
                assert isinstance(client.infer_many([b"a", b"corrupt"])[1], DecodeError)
            (tmp_path / "died").unlink()
            with make(address, timeout=WAIT, retries=200, idempotent=False) as careful, pytest.raises(WorkerDied):
                careful.infer_batch(b"die once")
            (tmp_path / "died").unlink()


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
    done = run(sys.executable, "-W", "error", "-c", ALONE, echo, "numpy")
    assert (done.returncode, done.stdout, done.stderr) == (0, "b'a'\n", "")
    last = run(sys.executable, "-W", "error", "-c", ALONE, echo, "thriftpy2").stderr.splitlines()[-1]
    assert last.startswith("ImportError: torchpipe_client needs thriftpy2 (pip install thriftpy2)")
