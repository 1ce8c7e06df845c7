"""InferenceService over Thrift: values, lists of images, deadlines, wrong arguments and pipelining.

What every protocol does alike is in ``tests/kit/contract.py``.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torchpipe_server.front.connection
from kit.clients import FRAMINGS, IDL, Client, connect, every_client, pack_batch, read_all
from kit.services import FakePipe, LocalServer, serving, steered
from kit.steered import Steered
from kit.waits import WAIT, eventually
from thriftpy2.thrift import TApplicationException

from torchpipe_py import Overloaded
from torchpipe_py.methods.many import ROUNDS

every_framing = pytest.mark.parametrize(("framed", "compact"), FRAMINGS)


def tensor(array: np.ndarray) -> Any:
    return IDL.Value(tensor=IDL.Tensor(dtype=array.dtype.name, shape=list(array.shape), data=array.tobytes()))


def bad_tensor(dtype: str, shape: list[int], data: bytes = b"\0" * 8) -> Any:
    return IDL.Value(tensor=IDL.Tensor(dtype=dtype, shape=shape, data=data))


# -- values -------------------------------------------------------------------------------------------------------


VALUES = [
    *(IDL.Value(bytes=b"\0\xff"), IDL.Value(text="größe"), IDL.Value(number=-0.5), IDL.Value(integer=-(2**63))),
    IDL.Value(tensors=[tensor(np.arange(3.0)).tensor, tensor(np.arange(2)).tensor]),
    tensor(np.arange(24, dtype=np.uint8).reshape(2, 3, 4)),
    tensor(np.array([-(2**62), 2**62])),
    tensor(np.array([[True, False]])),
    tensor(np.zeros((0, 4), np.float32)),
    tensor(np.array(3.5)),
]


@every_framing
def test_values_survive_a_round_trip(framed, compact):
    with serving("Identity") as server, Client(server.port, framed, compact) as client:
        for value in VALUES:
            assert client.infer({"data": value})["result"] == value


BAD_VALUES = {
    "empty": IDL.Value(),
    "two": IDL.Value(text="a", integer=1),
    "dtype": bad_tensor("float33", [2]),
    "record": bad_tensor("i4,i4", [1]),
    "shape": bad_tensor("uint8", [9]),
    "overflow": bad_tensor("uint8", [2**62, 2**62]),
    "ragged": bad_tensor("int64", [1], b"\0" * 9),
}


def test_bad_values_are_invalid_requests():
    with serving("Identity") as server, Client(server.port) as client:
        for inputs in (*({"data": value} for value in BAD_VALUES.values()), {"other": IDL.Value(integer=1)}):
            error = client.error_of("infer", request=IDL.InferRequest(uuid="x", inputs=inputs))
            assert error.code == "invalid_request", inputs


# -- lists of images ------------------------------------------------------------------------------------------------


def test_each_image_of_a_list_has_an_outcome():
    with steered() as server, Client(server.port) as client:
        outcomes = client.infer_many([b"a", b"raise", b"bcd", b"none"])
        assert [one.result and one.result.label for one in outcomes] == ["a", None, "bcd", None]
        assert [one.error and one.error.code for one in outcomes] == [None, "backend_error", None, "no_result"]
        assert client.infer_many([], deadline_ms=1) == []


def request(text: str) -> dict[str, Any]:
    return {"data": IDL.Value(text=text)}


WRONG_MANY = {
    "params or inputs": ({"params": [IDL.InferenceParams(uuid="", data=b"")], "inputs": [request("a")]}, "not both"),
    "too many": ({"inputs": [request("a")] * 3}, "3 requests in one call; the limit is 2 (--max-batch)"),
    "outputs of images": ({"params": [], "outputs": ["result"]}, "outputs, node_name and parameters are for 'inputs'"),
    "a long key": ({"inputs": [{"x" * 5000: IDL.Value(integer=1)}]}, "a name of 5000 characters"),
    "a long uuid": ({"inputs": [], "uuid": "x" * 5000}, "a name of 5000 characters"),
    "an empty value": ({"inputs": [{"data": IDL.Value()}]}, "exactly one field set"),
    "neither": ({}, "'params' is missing"),
}


@pytest.mark.parametrize("name", WRONG_MANY)
def test_wrong_lists_of_inputs_are_invalid_requests(name: str) -> None:
    args, said = WRONG_MANY[name]
    with steered(max_batch=2) as server, Client(server.port) as client:
        error = client.error_of("infer_many", **args)
        assert (error.code, said in error.message) == ("invalid_request", True), error.message


@every_framing
def test_each_input_of_a_list_has_an_outcome(framed, compact):
    with steered() as server, Client(server.port, framed, compact) as client:
        ok, failed = client.call("infer_many", inputs=[request("ab"), request("raise")], uuid="u")
        assert (ok.result, ok.error, failed.response, failed.error.code) == (None, None, None, "backend_error")
        assert (ok.response.uuid, ok.response.json) == ("u", ["result"])
        assert ok.response.outputs["label"].text == "ab"


def test_responses_of_a_list_are_bounded_together() -> None:
    with steered(max_reply_bytes=2**16) as server, Client(server.port) as client:
        inputs = [{"data": IDL.Value(tensor=tensor(np.zeros(2**14, np.uint8)).tensor)}] * 8
        outcomes = client.call("infer_many", inputs=inputs)
        codes = Counter(one.error and one.error.code for one in outcomes)
        assert codes == {None: 3, "too_large": 5}


# -- deadlines ------------------------------------------------------------------------------------------------------


class Measured(FakePipe):
    """A pipe that says how long a request would have to wait; ``seconds`` of time that the last one was given."""

    def __init__(self, wait: float) -> None:
        self.wait, self.seconds = wait, -1.0

    def check_delay(self, seconds: float | None, priority: int = 0, node_name: object = None) -> None:
        if seconds is not None and self.wait > seconds:
            raise Overloaded(f"the deadline is {1000 * seconds:.15g} ms", math.ceil(1000 * self.wait))

    def dispatch(self, data: Any, on_done: Any, timeout: float | None = None) -> Any:
        self.seconds = math.inf if timeout is None else timeout
        on_done({**data, "result": ("a", 1.0)}, None)


@pytest.mark.parametrize(
    ("wait_ms", "service_ms", "call_ms", "given_ms"),
    [
        *((500, 0, 499, None), (1.2, 0, 1, None), (500, 400, None, None), (500, 400, 600, None)),
        *((500, 0, None, math.inf), (500, 0, 0, math.inf), (500, 0, -1, math.inf), (500, 0, 60_000, 60_000)),
        # No call lifts the service's deadline. Clients in most languages cannot leave theirs out: 0 means it.
        *((0, 60_000, call_ms, 60_000) for call_ms in (None, 90_000, -1, 0)),
        (0, 90_000, 60_000, 60_000),
    ],
)
@pytest.mark.parametrize("method", ["infer_many", "infer"])
def test_shorter_deadline_holds(method, wait_ms, service_ms, call_ms, given_ms):
    """What cannot meet it is refused at once."""
    run = Measured(wait_ms / 1000)
    request = IDL.InferRequest(uuid="x", inputs={"data": IDL.Value(bytes=b"x")}, deadline_ms=call_ms)
    many = {"params": [IDL.InferenceParams(uuid="x", data=b"x")], "deadline_ms": call_ms}
    args = many if method == "infer_many" else {"request": request}
    with LocalServer(run, deadline_ms=float(service_ms)) as server, Client(server.port) as client:
        if given_ms is None:
            error = client.error_of(method, **args)
            assert (error.code, error.retry_after_ms, run.seconds) == ("overloaded", math.ceil(wait_ms), -1)
        else:
            client.call(method, **args)
            assert 0.5 * given_ms <= 1000 * run.seconds <= given_ms


# -- every message is answered --------------------------------------------------------------------------------------


@every_framing
def test_refuses_unknown_method(framed, compact):
    with serving("Identity") as server, Client(server.port, framed, compact) as client:
        for name in ("no_such_method", "größe", "x" * 255):
            with pytest.raises(TApplicationException) as caught:
                client.call(name)
            assert caught.value.type == TApplicationException.UNKNOWN_METHOD
        client.ping()


# -- pipelining -----------------------------------------------------------------------------------------------------


@every_framing
def test_pipelined_requests_are_answered_in_order(framed, compact):
    """Four instances: all but the first request could be answered while that one blocks."""
    config = {"node": {"backend": "Steered", "instance_num": 4}}
    texts = [b"block", *(str(index).encode() for index in range(40))]
    with steered(config) as server, Client(server.port, framed, compact) as client:
        seqids = [client.send_batch(text) for text in texts]
        pings = [client.send("ping") for _ in range(300)]
        assert Steered.entered.acquire(timeout=WAIT)
        client.sock.settimeout(0.1)
        with pytest.raises(TimeoutError):
            client.sock.recv(1)
        client.sock.settimeout(WAIT)
        Steered.opened.set()
        assert [client.receive(seqid).label.encode() for seqid in seqids] == texts
        assert [client.receive(seqid) for seqid in pings] == [None] * 300


@pytest.mark.parametrize("rest", [b"", pack_batch(b"half")[:9]], ids=["whole", "half"])
@every_client
def test_half_closed_connection_gets_its_answers(client_type, rest, monkeypatch):
    for name in ("END_SECONDS", "QUEUE_SECONDS"):
        monkeypatch.setattr(torchpipe_server.front.connection, name, WAIT)
    with steered() as server, connect(server.port) as sock:
        sock.sendall(client_type.pack(b"first") + client_type.pack(b"block") + rest)
        sock.shutdown(1)
        assert Steered.entered.acquire(timeout=WAIT)
        eventually(lambda: all(connection.ended_at for connection in server.connections()))
        Steered.opened.set()
        received = read_all(sock)
    assert b"first" in received
    assert b"block" in received, "the one that was in work is not answered"


@every_client
def test_queued_request_of_departed_client_is_not_computed(client_type, monkeypatch):
    monkeypatch.setattr(torchpipe_server.front.connection, "QUEUE_SECONDS", WAIT)
    with steered() as server, connect(server.port) as first, connect(server.port) as second:
        first.sendall(client_type.pack(b"block"))
        assert Steered.entered.acquire(timeout=WAIT)
        second.sendall(client_type.pack(b"queued"))
        eventually(lambda: [bool(connection.call) for connection in server.connections()] == [True] * 2)
        for connection in server.connections():
            connection.call.began -= WAIT  # as long ago
        second.shutdown(1)
        assert read_all(second) == b""
        eventually(lambda: server.server.connections == 1)
        Steered.opened.set()
        first.shutdown(1)
        assert b"block" in read_all(first)
    assert b"queued" not in map(bytes, Steered.seen)


# -- calls of many images: they enter the pipe in turns, and each image is answered once ------------------------------


def images(data: bytes, count: int) -> list[Any]:
    return [IDL.InferenceParams(uuid="x", data=data) for _ in range(count)]


def test_single_request_does_not_wait_for_all_images_of_a_call():
    with steered() as server, Client(server.port) as client, Client(server.port) as other:
        large = client.send("infer_many", params=images(b"block", 256))
        assert Steered.entered.acquire(timeout=WAIT)
        single = other.send_batch(b"single")
        eventually(lambda: server.run.stats()["admitted"] == ROUNDS + 1)
        Steered.opened.set()
        assert other.receive(single).label == "single"
        assert len(client.receive(large)) == 256
    assert len(Steered.seen) == 257
    assert Steered.seen.index(b"single") == ROUNDS


def test_queued_images_end_with_their_call():
    with steered() as server, Client(server.port) as client, Client(server.port) as leaving:
        leaving.send("infer_many", params=images(b"block", 256))
        assert Steered.entered.acquire(timeout=WAIT)
        assert {one.error.code for one in client.infer_many([b"late"] * 256, deadline_ms=100)} == {"deadline_exceeded"}
        leaving.close()
        eventually(lambda: server.run.stats()["inflight"] == 0)
        Steered.opened.set()
        assert len(client.infer_many([b"y"] * 256)) == 256
    assert Counter(Steered.seen) == {b"block": 1, b"y": 256}
