"""Both clients under a server that breaks the contract: a call ends with a ``ClientError``, soon and in little memory.

``Step``s answer as planned; ``mutated`` changes good answers in any way.
"""

from __future__ import annotations

import socket
import struct
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit.peer import CLIENTS, Call, HangUpError, ScriptedServer, label, pauses, sends
from torchpipe_client import BadReply, Client, ClientError, ConnectionLost, InferenceError, Overloaded, Result, TimedOut

BOOL, DOUBLE, I32, I64, STRING, STRUCT, MAP, LIST = 2, 4, 8, 10, 11, 12, 13, 15
REPLY, EXCEPTION = 2, 3
NUMBERS = {BOOL: ">?", DOUBLE: ">d", I32: ">i", I64: ">q"}
STOP = b"\0"


def text(value: bytes) -> bytes:
    return struct.pack(">i", len(value)) + value


def field(kind: int, number: int, value: Any) -> bytes:
    """A field; ``value`` is bytes, which for structs, lists and maps are already encoded, or a number."""
    if kind in NUMBERS:
        value = struct.pack(NUMBERS[kind], value)
    return struct.pack(">bh", kind, number) + (text(value) if kind == STRING else value)


def listed(kind: int, *items: bytes) -> bytes:
    return struct.pack(">bi", kind, len(items)) + b"".join(items)


def mapped(**items: bytes) -> bytes:
    entries = b"".join(text(name.encode()) + value for name, value in items.items())
    return struct.pack(">bbi", STRING, STRUCT, len(items)) + entries


def message(call: Call, body: bytes, kind: int = REPLY) -> bytes:
    head = struct.pack(">HH", 0x8001, kind) + text(call.method.encode()) + struct.pack(">i", call.sequence)
    return struct.pack(">i", len(head) + len(body)) + head + body


Body = bytes
Step = Callable[[ScriptedServer, socket.socket, Call], object]


def answers(body: Body, kind: int = REPLY) -> Step:
    """The method's own answer with this content."""
    return lambda server, sock, call: sock.sendall(message(call, body, kind))


# -- good answers, which the planned ones are variations of -----------------------------------------------------------


def result(name: bytes = b"a") -> bytes:
    return field(STRING, 1, name) + field(DOUBLE, 2, 0.5) + STOP


def error(code: bytes = b"overloaded", retry_after_ms: int = 1) -> bytes:
    return field(STRING, 1, code) + field(STRING, 2, b"why") + field(I32, 3, retry_after_ms) + STOP


def tensor(dtype: bytes = b"uint8", shape: tuple[int, ...] = (2,), data: bytes = b"\0\1") -> bytes:
    sizes = listed(I64, *(struct.pack(">q", size) for size in shape))
    return field(STRUCT, 1, field(STRING, 1, dtype) + field(LIST, 2, sizes) + field(STRING, 3, data) + STOP) + STOP


def response(uuid: bytes = b"u", json: tuple[bytes, ...] = (), **outputs: bytes) -> bytes:
    named = field(LIST, 3, listed(STRING, *map(text, json)))
    return field(STRING, 1, uuid) + field(MAP, 2, mapped(**outputs)) + named + STOP


def batch(body: bytes) -> bytes:
    return field(STRUCT, 0, body) + STOP


def many(*outcomes: bytes) -> bytes:
    return field(LIST, 0, listed(STRUCT, *outcomes)) + STOP


def value(content: str) -> bytes:
    return field(STRING, 3, content.encode()) + STOP


def outcome(number: int, body: bytes) -> bytes:
    return field(STRUCT, number, body) + STOP


GOOD = {
    "infer_batch": batch(result()),
    "infer_many": many(outcome(1, result()), outcome(2, error(b"decode_error"))),
    "infer": batch(response(json=(b"result",), result=value('{"boxes": [[1, 2.5]]}'), mask=tensor())),
    "outputs": many(outcome(3, response(result=value("a"))), outcome(2, error(b"no_result"))),
    "ping": STOP,
}
CALLS: dict[str, Callable[[Any], Any]] = {
    "infer_batch": lambda client: client.infer_batch(b"a"),
    "infer_many": lambda client: client.infer_many([b"a", b"b"]),
    "infer": lambda client: client.infer({"data": 1}, uuid="u"),
    "outputs": lambda client: client.infer_many([b"a", {"data": 1}], outputs=["result"], uuid="u"),
    "ping": lambda client: client.ping(),
}


@pytest.mark.parametrize("method", GOOD)
def test_returns_good_answers(make: Any, method: str) -> None:
    with ScriptedServer(answers(GOOD[method])) as server, make(server.address) as client:
        got = CALLS[method](client)
        if method == "infer":
            np.testing.assert_array_equal(got.pop("mask"), np.array([0, 1], np.uint8))
            assert got == {"result": {"boxes": [[1, 2.5]]}}
        elif method in ("infer_many", "outputs"):
            assert got[0] == (Result("a", 0.5) if method == "infer_many" else {"result": "a"})
            assert isinstance(got[1], InferenceError)
        else:
            assert got == {"infer_batch": Result("a", 0.5), "ping": None}[method]


# -- planned answers --------------------------------------------------------------------------------------------------

HUGE = 2**31 - 1
OTHER_TYPES = {kind: field(kind, 1, 1) for kind in NUMBERS} | {
    STRING: field(STRING, 1, b"a"),
    STRUCT: field(STRUCT, 1, STOP),
    LIST: field(LIST, 1, listed(STRING)),
    MAP: field(MAP, 1, mapped()),
}
BAD: dict[str, tuple[str, Step, str]] = {
    "another number": ("infer_batch", lambda server, sock, call: sock.sendall(
        message(call._replace(sequence=call.sequence + 1), GOOD["infer_batch"])), "number 2 in place of"),
    "another method": ("infer_batch", lambda server, sock, call: sock.sendall(
        message(call._replace(method="infer_many"), GOOD["infer_batch"])), "an answer to infer_many number 1"),
    "a call": ("ping", answers(STOP, 1), "a message of type 1"),
    "no frame": ("ping", sends(b"HTTP/1.1 302 Found\r\nLocation: /\r\n\r\n"), "not a Thrift frame"),
    "frame of 2 GiB": ("ping", sends(b"\x7f\xff\xff\xff"), "not a Thrift frame"),
    "frame of -1": ("ping", sends(b"\xff\xff\xff\xff"), "not a Thrift frame"),
    "empty frame": ("ping", sends(b"\0\0\0\0"), "not a message of the contract"),
    "name of 2 GiB": ("ping", sends(struct.pack(">iHHi", 16, 0x8001, REPLY, HUGE) + bytes(8)), "a size of 2147483647"),
    "name of -1": ("ping", sends(struct.pack(">iHHi", 16, 0x8001, REPLY, -1) + bytes(8)), "a size of -1"),
    "no version": ("ping", sends(struct.pack(">i", 13) + text(b"ping") + b"\2\0\0\0\1"), "does not begin as"),
    "bytes after the end": ("ping", answers(STOP + b"a"), "1 bytes after its end"),
    "two answers": ("ping", lambda server, sock, call: sock.sendall(2 * message(call, STOP)), "not a Thrift frame"),
    "nothing": ("infer_batch", answers(STOP), "neither a result nor an error"),
    "label of 2 GiB": ("infer_batch", answers(batch(struct.pack(">bhi", STRING, 1, HUGE))), "a size of 2147483647"),
    "label that is not UTF-8": ("infer_batch", answers(batch(result(b"\xff\xfe"))), "label: .*utf-8"),
    "no label": ("infer_batch", answers(batch(field(DOUBLE, 2, 1.0) + STOP)), "InferenceResult without label"),
    **{f"label of type {kind}": ("infer_batch", answers(batch(other + STOP)), f"label: a value of type {kind}, not 11")
       for kind, other in OTHER_TYPES.items() if kind != STRING},
    **{f"result of type {kind}": ("infer_batch", answers(struct.pack(">bh", kind, 0) + other[3:] + STOP),
                                  f"success: a value of type {kind}, not 12")
       for kind, other in OTHER_TYPES.items() if kind != STRUCT},
    "unknown type": ("infer_batch", answers(struct.pack(">bh", 99, 9) + STOP), "a value of type 99"),
    "error without a code": ("infer_batch", answers(field(STRUCT, 1, STOP) + STOP),
        "InferenceError without code, message"),
    "error with a negative wait": ("infer_batch", answers(field(STRUCT, 1, error(retry_after_ms=-(2**31))) + STOP),
                                   "retried after -2147483648 ms"),
    "one of two outcomes": ("infer_many", answers(many(outcome(1, result()))), "1 outcomes for 2 requests"),
    "outcomes of another type": ("infer_many", answers(field(LIST, 0, listed(STRING, text(b"a"), text(b"b"))) + STOP),
                                 "a value of type 11, not 12"),
    "2 billion outcomes": ("infer_many", answers(struct.pack(">bhbi", LIST, 0, STRUCT, HUGE)),
        "more than 262144 values"),
    "empty outcome": ("infer_many", answers(many(STOP, STOP)), "an outcome with 0 fields instead of one"),
    "outcome and error": ("infer_many",
                          answers(many(*2 * [field(STRUCT, 1, result()) + field(STRUCT, 2, error()) + STOP])),
                          "an outcome with 2 fields"),
    "outputs in place of a label": ("infer_many", answers(many(*2 * [outcome(3, response())])),
        "without label and score"),
    "label in place of outputs": ("outputs", answers(many(*2 * [outcome(1, result())])), "an outcome without outputs"),
    "outcome with a negative wait": ("infer_many", answers(many(*2 * [outcome(2, error(retry_after_ms=-1))])),
        "after -1 ms"),
    "another uuid": ("infer", answers(batch(response(b"v", result=value("a")))), "the request 'v' in place of 'u'"),
    "no result": ("infer", answers(batch(response(other=value("a")))), "an answer without 'result'"),
    "outputs not UTF-8": ("infer", answers(batch(response(result=field(STRING, 3, b"\xff") + STOP))),
        "outputs: text: .*utf-8"),
    "empty value": ("infer", answers(batch(response(result=STOP))), "result: a value with 0 fields"),
    "JSON that is none": ("infer", answers(batch(response(json=(b"result",), result=value("[")))), "not valid JSON"),
    "JSON too deep": ("infer", answers(batch(response(json=(b"result",), result=value(200_000 * "[")))),
        "not valid JSON"),
    "JSON too long": ("infer", answers(batch(response(json=(b"result",), result=value("[" + 2**22 * "[]," + "[]]")))),
                      "JSON of more than 4194304 values"),
    "JSON that is an array": ("infer", answers(batch(response(json=(b"result",), result=tensor()))),
        "JSON that is not text"),
    **{f"tensor of {name}": ("infer", answers(batch(response(result=wrong))), said) for name, wrong, said in (
        ("a negative shape", tensor(shape=(-1, -2)), r"shape \(-1, -2\)"),
        ("another size", tensor(shape=(3,)), "2 bytes do not fit an array"),
        ("2**62 x 0", tensor(b"float32", (2**62, 0), b""), "NumPy has no array of shape"),
        ("objects", tensor(b"object", (1,), bytes(8)), "dtype 'object'"),
        ("bools of 2", tensor(b"bool", (2,), b"\1\2"), "neither 0 nor 1"),
        ("65 dimensions", tensor(shape=65 * (1,), data=b"a"), "65 dimensions; the limit is 64"),
        ("40,000 large dimensions", tensor(shape=40_000 * (2**62,)), "40000 dimensions; the limit is 64"),
        ("no fields", field(STRUCT, 1, STOP) + STOP, "Tensor without data, dtype, shape"),
    )},
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_refuses_bad_answers(make: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    method, step, said = BAD[name]
    with pauses(monkeypatch) as delays, ScriptedServer(step) as server, make(server.address) as client:
        with pytest.raises(BadReply, match=said) as raised:
            CALLS[method](client)
        assert (len(server.calls), delays) == (1, []), "it is not repeated"
        assert len(str(raised.value)) < 500
        assert label(client) == "a"
        assert server.connections == 2, "nothing of that answer is left"


def test_refuses_small_answers_in_little_memory() -> None:
    names = ("name of 2 GiB", "label of 2 GiB", "2 billion outcomes", "tensor of 2**62 x 0", "tensor of another size")
    for name in names:
        method, step, _ = BAD[name]
        with ScriptedServer(step) as server, Client(server.address) as client:
            tracemalloc.start()
            try:
                with pytest.raises(BadReply):
                    CALLS[method](client)
                assert tracemalloc.get_traced_memory()[1] < 2**22, name
            finally:
                tracemalloc.stop()


@pytest.mark.parametrize("method", ["infer_batch", "infer_many"])
def test_gives_up_if_the_wait_is_longer_than_the_timeout(
    make: Any, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    endless = error(retry_after_ms=HUGE)
    body = field(STRUCT, 1, endless) + STOP if method == "infer_batch" else many(*2 * [outcome(2, endless)])
    with pauses(monkeypatch) as delays, ScriptedServer(answers(body)) as server, make(server.address) as client:
        try:
            outcomes = CALLS[method](client)
        except Overloaded as raised:
            outcomes = [raised]
        assert {type(one) for one in outcomes} == {Overloaded}
        assert {one.retry_after_ms for one in outcomes} == {HUGE}
        assert delays == []


def test_answer_without_end_is_a_timeout(make: Any) -> None:
    def endless(server: ScriptedServer, sock: socket.socket, call: Call) -> None:
        sock.sendall(struct.pack(">i", 2**28))
        while not server.ended.wait(0.005):
            sock.sendall(b"a")

    with ScriptedServer(endless) as server, make(server.address) as client, pytest.raises(TimedOut):
        label(client, timeout=0.3)


def test_second_answer_is_not_that_of_the_next_call(make: Any) -> None:
    def twice(server: ScriptedServer, sock: socket.socket, call: Call) -> None:
        sock.sendall(message(call, GOOD["infer_batch"]))
        sock.sendall(message(call, batch(result(b"late"))))

    with ScriptedServer(twice) as server, make(server.address, retries=0) as client:
        for _ in range(2):
            with suppress(BadReply, ConnectionLost):  # if both answers arrived together
                assert label(client) == "a"
            server.script.append(twice)


# -- mutated answers --------------------------------------------------------------------------------------------------

NUMBER = st.sampled_from([0, 1, -1, 2, 8, 11, 12, 13, 15, 16, 255, 2**15, 2**24, HUGE, -(2**31)])
WHERE = st.integers(0, 2**16)
EDITS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), WHERE, st.integers(0, 255).map(lambda byte: bytes([byte]))),
        st.tuples(st.just("set"), WHERE, NUMBER.map(lambda number: struct.pack(">i", number))),
        st.tuples(st.just("insert"), WHERE, st.binary(min_size=1, max_size=8)),
        st.tuples(st.just("delete"), WHERE, st.binary(max_size=8)),
        st.tuples(st.just("cut"), WHERE, st.just(b"")),
        st.tuples(st.just("repeat"), WHERE, st.just(b"")),
    ),
    max_size=6,
)


def mutated(data: bytes, edits: list[tuple[str, int, bytes]]) -> bytes:
    for how, where, new in edits:
        at = where % (len(data) + 1)
        if how == "set":
            data = data[:at] + new + data[at + len(new) :]
        elif how == "insert":
            data = data[:at] + new + data[at:]
        elif how == "delete":
            data = data[:at] + data[at + len(new) :]
        else:
            data = data[:at] if how == "cut" else data[:at] + data
    return data


def is_allowed(method: str, got: Any) -> bool:
    """Whether a call may return this."""
    if method == "ping":
        return got is None
    if method == "infer":
        return isinstance(got, dict) and "result" in got and all(type(key) is str for key in got)
    if method == "infer_batch":
        return type(got) is Result and type(got.label) is str and type(got.score) is float
    kind = Result if method == "infer_many" else dict
    return len(got) == 2 and all(isinstance(one, (kind, InferenceError)) for one in got)


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize("method", GOOD)
def test_mutated_answers_are_results_or_client_errors(method: str, kind: str) -> None:
    with ScriptedServer() as server, CLIENTS[kind](server.address, retries=0) as client:

        @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
        @given(EDITS, st.booleans())
        def check(edits: list[tuple[str, int, bytes]], has_frame: bool) -> None:
            def step(server: ScriptedServer, sock: socket.socket, call: Call) -> None:
                whole = message(call, GOOD[method])
                inner = mutated(whole[4:], edits)
                sock.sendall(struct.pack(">i", len(inner)) + inner if has_frame else mutated(whole, edits))
                raise HangUpError  # an incomplete answer ends

            server.script[:] = [step]
            with suppress(ClientError):
                assert is_allowed(method, CALLS[method](client))

        check()
