"""InferenceService over Thrift: values, lists of images, deadlines, wrong arguments and pipelining.

What every protocol does alike is in ``tests/contract.py``.
"""

from __future__ import annotations

import gc
import json
import math
import struct
import tracemalloc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torchpipe_server.front.connection
from conftest import Register
from kit.backends import Gate, returns
from kit.clients import (
    FRAMINGS,
    IDL,
    Client,
    connect,
    every_client,
    pack_batch,
    pack_call,
    pack_string,
    read_all,
)
from kit.services import FakePipe, LocalServer, serving, steered
from kit.steered import Steered
from kit.waits import WAIT, eventually
from thriftpy2.thrift import TApplicationException
from torchpipe_server.methods.many import ROUNDS

from torchpipe_py import Backend, Overloaded

every_framing = pytest.mark.parametrize(("framed", "compact"), FRAMINGS)


def raw(data: bytes) -> dict[str, Any]:
    return {"data": IDL.Value(bytes=data)}


def tensor(array: np.ndarray) -> Any:
    return IDL.Value(tensor=IDL.Tensor(dtype=array.dtype.name, shape=list(array.shape), data=array.tobytes()))


def bad_tensor(dtype: str, shape: list[int], data: bytes = b"\0" * 8) -> Any:
    return IDL.Value(tensor=IDL.Tensor(dtype=dtype, shape=shape, data=data))


def code_of(client: Client, inputs: dict[str, Any], **options: Any) -> str:
    return str(client.error_of("infer", request=IDL.InferRequest(uuid="x", inputs=inputs, **options)).code)


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
def test_values_come_back_as_they_went_in(framed, compact):
    with serving("Identity") as server, Client(server.port, framed, compact) as client:
        for value in VALUES:
            assert client.infer({"data": value})["result"] == value


BAD_VALUES = {
    "empty": IDL.Value(),
    "two": IDL.Value(text="a", integer=1),
    "dtype": bad_tensor("float33", [2]),
    "object": bad_tensor("object", [1]),
    "string": bad_tensor("S8", [1]),
    "record": bad_tensor("i4,i4", [1]),
    "no dtype": bad_tensor("", [1]),
    "shape": bad_tensor("uint8", [9]),
    "overflow": bad_tensor("uint8", [2**62, 2**62]),
    "negative": bad_tensor("uint8", [-8]),
    "deep": bad_tensor("uint8", [1] * 100),
    "ragged": bad_tensor("int64", [1], b"\0" * 9),
}


def test_bad_values_are_invalid_requests():
    with serving("Identity") as server, Client(server.port) as client:
        codes = {name: code_of(client, {"data": value}) for name, value in BAD_VALUES.items()}
        assert set(codes.values()) == {"invalid_request"}, codes
        assert code_of(client, {"other": IDL.Value(integer=1)}) == "invalid_request"


def test_one_of_several_roots_is_named(register: Register):
    roots = {"left": {"backend": register(returns("left"))}, "right": {"backend": "Identity"}}
    with serving(roots) as server, Client(server.port) as client:
        assert client.infer(raw(b""), node_name="left")["result"].text == "left"
        assert code_of(client, raw(b"")) == "unknown_node"
        strange = {**raw(b""), "node_name": IDL.Value(tensors=[tensor(np.arange(3)).tensor])}
        assert code_of(client, strange) in ("unknown_node", "invalid_request")


BOXES = [{"box": np.array([1, 2]), "label": "ü", "score": np.float64(0.5)}, {"box": torch.ones(2)}]


@pytest.mark.parametrize(
    ("written", "best", "text"),
    [
        ({"result": ("ü", 0.5)}, ("ü", 0.5), ["ü", 0.5]),
        ({"result": [("a", 0.75), (2, np.float32(0.25))]}, ("a", 0.75), [["a", 0.75], [2, 0.25]]),  # as of TopK
        ({"result": "b", "score": 0.5, "class": 1}, ("b", 0.5), "b"),  # as of ArgMax
        ({"result": []}, "no_result", []),
        ({"result": BOXES}, "no_result", [{"box": [1, 2], "label": "ü", "score": 0.5}, {"box": [1.0, 1.0]}]),
        ({"result": "\udc80ü"}, "no_result", "?ü"),
    ],
)
def test_results_as_label_and_score_and_as_text(register: Register, written, best, text):
    class Writes(Backend):
        def forward(self, items: list[dict[str, Any]]) -> None:
            for item in items:
                item.update(written)

    with serving(register(Writes)) as server, Client(server.port) as client:
        kept = client.infer(raw(b"x"), outputs=["result"])["result"].text
        assert (kept if isinstance(text, str) else json.loads(kept)) == text
        (outcome,) = client.infer_many([b"x"])
        if isinstance(best, str):
            assert outcome.error.code == best
        else:
            assert client.infer_batch(b"x") == (outcome.result.label, outcome.result.score) == best


def test_bfloat16_comes_as_float32(register: Register):
    value = torch.tensor([[1.5, -0.1, 2**127]], dtype=torch.bfloat16)
    with serving(register(returns([value, value]))) as server, Client(server.port) as client:
        for found in client.infer(raw(b"x"))["result"].tensors:
            assert (found.dtype, found.shape) == ("float32", [1, 3])
            assert np.frombuffer(found.data, "<f4").tolist() == value[0].tolist()


# -- lists of images ------------------------------------------------------------------------------------------------


def test_each_image_of_a_list_has_an_outcome():
    with steered() as server, Client(server.port) as client:
        outcomes = client.infer_many([b"a", b"raise", b"bcd", b"none"])
        assert [one.result and one.result.label for one in outcomes] == ["a", None, "bcd", None]
        assert [one.error and one.error.code for one in outcomes] == [None, "backend_error", None, "no_result"]
        assert client.infer_many([], deadline_ms=1) == []


def test_images_beyond_those_that_may_wait_are_refused(register: Register):
    gate = Gate()
    config = {"global": {"max_inflight": 3}, "node": {"backend": register(gate.backend)}}
    with serving(config) as server, gate, Client(server.port) as client:
        seqid = client.send("infer_many", params=[IDL.InferenceParams(uuid="x", data=b"x")] * (ROUNDS + 3 + 2))
        gate.wait_entered()
        gate.open()
        codes = [outcome.error.code for outcome in client.receive(seqid)]
        assert codes == ["no_result"] * (ROUNDS + 3) + ["overloaded"] * 2  # bytes are no label


# -- deadlines ------------------------------------------------------------------------------------------------------


def codes_of(client: Client, method: str, deadline_ms: int | None) -> set[str]:
    params = IDL.InferenceParams(uuid="x", data=b"block")
    try:
        if method == "infer_batch":
            client.call(method, params=params)
        elif method == "infer_many":
            outcomes = client.infer_many([params.data] * 2, deadline_ms)
            return {one.error.code if one.error else "ok" for one in outcomes}
        else:
            client.infer(raw(params.data), deadline_ms=deadline_ms)
    except IDL.InferenceError as error:
        return {error.code}
    return {"ok"}


@pytest.mark.parametrize(
    ("service_ms", "call_ms", "methods"),
    [
        (100, None, ("infer_batch", "infer_many", "infer")),
        (100, 60_000, ("infer_many", "infer")),  # no call lifts the service's
        (100, -1, ("infer_many", "infer")),
        (100, 0, ("infer_many", "infer")),  # clients in most languages cannot leave it out
        (600_000, 100, ("infer_many", "infer")),
        (0, 100, ("infer_many", "infer")),
    ],
)
def test_the_shorter_deadline_holds(service_ms, call_ms, methods):
    with steered(deadline_ms=service_ms) as server, Client(server.port) as client:
        for method in methods:
            assert codes_of(client, method, call_ms) <= {"deadline_exceeded", "overloaded"}, method


class Measured(FakePipe):
    """A pipe that says how long a request would have to wait."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.started = seconds, 0

    def check_delay(self, seconds: float | None, priority: int = 0, node_name: object = None) -> None:
        if seconds is not None and self.seconds > seconds:
            raise Overloaded(f"the deadline is {1000 * seconds:.15g} ms", math.ceil(1000 * self.seconds))

    def dispatch(self, data: Any, on_done: Any, timeout: float | None = None) -> Any:
        self.started += 1
        on_done({**data, "result": ("a", 1.0)}, None)


@pytest.mark.parametrize(
    ("wait_ms", "service_ms", "call_ms", "is_let_in"),
    [
        *((500, 0, 499, False), (1.2, 0, 1, False), (500, 400, None, False), (500, 400, 600, False)),
        *((500, 0, None, True), (500, 0, 0, True), (500, 0, -1, True), (500, 0, 501, True), (300, 400, None, True)),
    ],
)
@pytest.mark.parametrize("method", ["infer_many", "infer"])
def test_what_cannot_meet_its_deadline_is_refused_at_once(method, wait_ms, service_ms, call_ms, is_let_in):
    run = Measured(wait_ms / 1000)
    with LocalServer(run, deadline_ms=float(service_ms)) as server, Client(server.port) as client:
        if is_let_in:
            assert codes_of(client, method, call_ms) == {"ok"}
        else:
            request = IDL.InferRequest(uuid="x", inputs=raw(b"x"), deadline_ms=call_ms)
            params = {"params": [IDL.InferenceParams(uuid="x", data=b"x")], "deadline_ms": call_ms}
            error = client.error_of(method, **(params if method == "infer_many" else {"request": request}))
            assert (error.code, error.retry_after_ms, run.started) == ("overloaded", math.ceil(wait_ms), 0)


class Payload:
    """Stands for a request's image."""


def test_nothing_of_a_finished_request_is_kept(register: Register):
    """Neither until a deadline of a day, nor by a connection that is silent then."""
    payloads: list[weakref.ref[Payload]] = []

    class Testify(Backend):
        def forward(self, items: list[dict[str, Any]]) -> None:
            for item in items:
                item["witness"] = Payload()
                payloads.append(weakref.ref(item["witness"]))
                item["result"] = ("a", 1.0)

    def kept() -> int:
        gc.collect()
        return sum(one() is not None for one in payloads)

    with serving(register(Testify)) as server, Client(server.port) as client, Client(server.port) as other:
        for _ in range(20):
            client.infer(raw(b"x"), deadline_ms=24 * 3600 * 1000)
            client.infer_many([b"x"], deadline_ms=24 * 3600 * 1000)
        other.ping()
        eventually(lambda: kept() <= 1, "finished requests are kept")


# -- every message is answered --------------------------------------------------------------------------------------

PARAMS = struct.pack(">bh", 12, 1)
WRONG_ARGUMENTS = {
    "missing": b"\0",
    "no data": PARAMS + pack_string(1, b"x") + b"\0\0",
    "not utf-8": PARAMS + pack_string(1, b"\xff\xfe") + pack_string(2, b"abc") + b"\0\0",
    "wrong number": struct.pack(">bh", 12, 9) + pack_string(1, b"x") + b"\0\0",
}


@pytest.mark.parametrize("name", WRONG_ARGUMENTS)
def test_wrong_arguments_then_right_ones(name):
    with steered() as server, Client(server.port) as client:
        client.sock.sendall(pack_call("infer_batch", WRONG_ARGUMENTS[name]))
        with pytest.raises((IDL.InferenceError, TApplicationException)) as caught:
            client.receive(1)
        error = caught.value
        assert getattr(error, "code", "") == "invalid_request" or error.type == TApplicationException.PROTOCOL_ERROR
        assert client.infer_batch(b"abc") == ("abc", 3.0)


@every_framing
def test_an_unknown_method(framed, compact):
    with serving("Identity") as server, Client(server.port, framed, compact) as client:
        for name in ("no_such_method", "größe", "x" * 255):
            with pytest.raises(TApplicationException) as caught:
                client.call(name)
            assert caught.value.type == TApplicationException.UNKNOWN_METHOD
        client.ping()


class Broken(FakePipe):
    """A pipe whose `dispatch` raises what nobody declared."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def dispatch(self, data: Any, on_done: Any, timeout: float | None = None) -> Any:
        raise self._error


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("x"), MemoryError(), RecursionError("deep"), ValueError("\ud800"), Overloaded("x")]
)
def test_a_pipe_that_raises_is_answered(error):
    with LocalServer(Broken(error)) as server, Client(server.port) as client:
        answered = client.error_of("infer_batch", params=IDL.InferenceParams(uuid="x", data=b"x"))
        assert (answered.code, answered.retry_after_ms) == (getattr(error, "code", "internal"), None)
        assert all(outcome.error is not None for outcome in client.infer_many([b"x"]))
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


def test_requests_finished_within_dispatch():
    with LocalServer(Measured(0)) as server, Client(server.port) as client:
        seqids = [client.send_batch(b"x") for _ in range(100)]
        assert [client.receive(seqid).label for seqid in seqids] == ["a"] * 100


def test_a_oneway_message_is_done_and_not_answered():
    with steered() as server, Client(server.port) as client:
        for call in (pack_batch(b"oneway", seqid=5), pack_call("no_such")):
            client.sock.sendall(call[:3] + b"\4" + call[4:])
        client.receive(client.send("ping"))
        eventually(lambda: Steered.seen == [b"oneway"])


@pytest.mark.parametrize("rest", [b"", pack_batch(b"half")[:9]], ids=["whole", "half"])
@every_client
def test_a_client_that_is_done_sending_gets_its_answers(client_type, rest, monkeypatch):
    for name in ("ENDED_SECONDS", "QUEUED_SECONDS"):
        monkeypatch.setattr(torchpipe_server.front.connection, name, WAIT)
    with steered() as server, connect(server.port) as sock:
        sock.sendall(client_type.pack(b"first") + client_type.pack(b"block") + rest)
        sock.shutdown(1)
        assert Steered.entered.acquire(timeout=WAIT)
        eventually(lambda: all(connection.ended_at for connection in server.server._connections))
        Steered.opened.set()
        received = read_all(sock)
    assert b"first" in received
    assert b"block" in received, "the one that was in work is not answered"


@every_client
def test_what_waits_when_its_client_leaves_is_not_computed(client_type):
    with steered() as server, connect(server.port) as first, connect(server.port) as sock:
        first.sendall(client_type.pack(b"block"))
        assert Steered.entered.acquire(timeout=WAIT)
        sock.sendall(client_type.pack(b"waits"))
        eventually(lambda: server.run.stats()["inflight"] == 2)
        sock.close()
        eventually(lambda: server.run.stats()["inflight"] == 1)
        Steered.opened.set()
        first.shutdown(1)
        read_all(first)
    assert b"waits" not in Steered.seen


@pytest.mark.parametrize("way", ["thrift", "http"])
def test_nothing_is_kept_of_what_was_refused(way):
    """Without the collector of cycles, whose turn may come late."""
    size = 4 * 2**20
    gc.collect()
    gc.disable()
    try:
        with steered(max_message_bytes=2 * size) as server:
            clients = [connect(server.port) for _ in range(6)]
            tracemalloc.start()
            for sock in clients:
                if way == "thrift":
                    sock.sendall(pack_batch(b"x", uuid=b"u" * size))
                else:
                    head = f"POST /infer?x=1 HTTP/1.1\r\nHost: a\r\nContent-Length: {size}\r\n\r\n"
                    sock.sendall(head.encode() + bytes(size))
                assert sock.recv(1)
            eventually(lambda: tracemalloc.get_traced_memory()[0] < 2 * size, "it is kept")
            for sock in clients:
                sock.close()
    finally:
        tracemalloc.stop()
        gc.enable()
