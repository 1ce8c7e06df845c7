"""Both clients: how long a call takes, what is repeated, and what it ends with."""

from __future__ import annotations

import pytest
from kit.peer import (
    ScriptedServer,
    answer,
    fails,
    fails_items,
    fails_undeclared,
    half,
    hang_up,
    label,
    pauses,
    reset,
    stall,
    trickle,
)
from kit.waits import WAIT
from torchpipe_client import (
    AsyncClient,
    BackendError,
    Client,
    ConnectionLost,
    DeadlineExceeded,
    DecodeError,
    InferenceError,
    InvalidRequest,
    Overloaded,
    TimedOut,
    Unavailable,
    UnknownNode,
    WorkerDied,
)

# -- errors of the service ------------------------------------------------------------------------------------------

ONCE = {"idempotent": False}


@pytest.mark.parametrize(
    ("script", "options", "end", "calls", "connections"),
    [
        ([fails("decode_error")], {}, DecodeError, 1, 1),
        ([fails("unknown_node")], {}, UnknownNode, 1, 1),
        ([fails("invalid_request")], {}, InvalidRequest, 1, 1),
        ([fails("backend_error")], {}, BackendError, 1, 1),
        ([fails("deadline_exceeded")], {}, DeadlineExceeded, 1, 1),
        # Behind a message that it could not read, for which there are other codes, the service closes the connection.
        ([fails("a_new_one")], {}, InferenceError, 1, 2),
        # What was not begun is repeated, unless that would come too late.
        ([fails("overloaded", 60), fails("unavailable")], ONCE, None, 3, 1),
        ([fails("overloaded", 1000)] * 4, {}, Overloaded, 4, 1),
        ([fails("unavailable", 1)], {"retries": 0}, Unavailable, 1, 1),
        ([fails("overloaded", 60_000)], {}, Overloaded, 1, 1),
        # What was perhaps begun is repeated if it may be; a call that killed two workers gets no third.
        ([fails("worker_died")], {}, None, 2, 1),
        ([fails("worker_died")] * 3, {}, WorkerDied, 2, 1),
        ([fails("worker_died")], ONCE, WorkerDied, 1, 1),
        *(([step], {}, None, 2, 2) for step in (hang_up, reset, half)),
        *(([step], ONCE, ConnectionLost, 1, 2) for step in (hang_up, reset, half)),
    ],
)
def test_call_ends_with_answer_or_error_after_retries(make, monkeypatch, script, options, end, calls, connections):
    with pauses(monkeypatch), ScriptedServer(*script) as server, make(server.address, **options) as client:
        if end is None:
            assert label(client) == "a"
        else:
            with pytest.raises(end) as raised:
                label(client)
            assert type(raised.value) is end
        assert len(server.calls) == calls
        server.script.clear()
        assert label(client, "b") == "b"
        assert server.connections == connections


def test_delays_grow_and_are_not_the_same_for_all(make, monkeypatch):
    with pauses(monkeypatch) as delays:
        for _ in range(2):
            with ScriptedServer(*[fails("overloaded", 1000)] * 4) as server, make(server.address) as client:
                with pytest.raises(Overloaded) as raised:
                    label(client)
                assert (raised.value.retry_after_ms, len(server.calls)) == (1000, 4)
    assert len(set(delays)) == 6
    for first, second, third in (delays[:3], delays[3:]):
        assert 1.025 <= first <= 1.05 <= second <= 1.1 <= third <= 1.2


def test_ping_reads_undeclared_exceptions(make):
    steps = [fails_undeclared("Unavailable: no worker"), fails_undeclared("ValueError: a defect")]
    with ScriptedServer(*steps) as server, make(server.address) as client:
        with pytest.raises(InferenceError, match=r"^ValueError: a defect$") as raised:
            client.ping()
        assert (raised.value.code, len(server.calls)) == ("internal", 2)
        client.ping()


# -- many -----------------------------------------------------------------------------------------------------------


def test_only_the_images_that_were_refused_are_sent_again(make):
    steps = [fails_items(None, "overloaded", "decode_error", "overloaded"), fails_items(None, "overloaded")]
    with ScriptedServer(*steps) as server, make(server.address) as client:
        first, second, third, fourth = client.infer_many(image for image in (b"a", b"b", b"c", b"d"))
        assert [one.label for one in (first, second, fourth)] == ["a", "b", "d"]
        assert isinstance(third, DecodeError)
        assert [[one.data for one in call.args.params] for call in server.calls] == [
            [b"a", b"b", b"c", b"d"],
            [b"b", b"d"],
            [b"d"],
        ]


# -- time -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [stall, trickle])
def test_a_call_that_takes_too_long_gives_its_connection_up(make, step):
    with ScriptedServer(answer, step) as server, make(server.address, timeout=WAIT) as client:
        client.ping()  # what is left to do in time is to send
        with pytest.raises(TimedOut, match=r"^no answer within 0.5 s$"):
            label(client, 1000 * "a", timeout=0.5)
        assert label(client, "b") == "b"
        assert [call.connection for call in server.calls] == [1, 1, 2]


def test_the_service_is_told_how_much_time_is_left(make, monkeypatch):
    with pauses(monkeypatch), ScriptedServer(hang_up) as server, make(server.address, timeout=60) as client:
        client.infer({"data": b"a"}, deadline_ms=50_000)
        client.infer({"data": b"a"})
        client.infer({"data": b"a"}, deadline_ms=90_000)
        client.infer_many([b"a"], timeout=20)
        told = [getattr(call.args, "request", call.args).deadline_ms for call in server.calls]
        assert 0 < told[1] <= told[0] <= 50_000
        assert all(50_000 < one <= 60_000 for one in told[2:4])
        assert 0 < told[4] <= 20_000


@pytest.mark.parametrize("seconds", [float("inf"), 1e300, 1e12])
def test_a_call_may_take_forever(make, seconds):
    with ScriptedServer() as server, make(server.address, timeout=seconds, connect_timeout=seconds) as client:
        assert label(client, "b") == "b"
        assert client.infer({"data": b"a"}, timeout=seconds) == client.infer({"data": b"a"}, deadline_ms=10**15)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"timeout": 0}, "timeout must be"),
        ({"connect_timeout": -1}, "connect_timeout must be"),
        ({"retries": -1}, "retries must be"),
        ({"max_connections": 0}, "max_connections must be"),
        *(({"address": address}, "expected host:port, as 127.0.0.1:8888") for address in (
            "localhost", "localhost:", ":8888", "localhost:http", "::1:8888", "a:0", "a:70000",
        )),
    ],
)  # fmt: skip
def test_options_that_make_no_sense(options, text):
    for cls in (Client, AsyncClient):
        with pytest.raises(ValueError, match=text):
            cls(**{"address": "127.0.0.1:8888", **options})
