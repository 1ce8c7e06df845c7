"""Deadlines of requests: the service's, the call's own, and what cannot be met."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
from conftest import Register
from fakes import Gate
from service import IDL, Client, FakePipe, LocalServer, eventually, serving

from torchpipe_py import Backend, Overloaded

PARAMS = IDL.InferenceParams(uuid="x", data=b"x")
NONE = [-1, -(2**31)]


def send(client: Client, method: str, deadline_ms: int | None = None) -> int:
    if method == "infer_batch":
        return client.send(method, params=PARAMS)
    if method == "infer_many":
        return client.send(method, params=[PARAMS, PARAMS], deadline_ms=deadline_ms)
    return client.send_infer({"data": IDL.Value(bytes=b"x")}, deadline_ms=deadline_ms)


def receive(client: Client, seqid: int) -> list[str]:
    """The codes of an answer, of each item."""
    try:
        answer = client.receive(seqid)
    except IDL.InferenceError as error:
        return [error.code]
    items = answer if isinstance(answer, list) else [answer]
    return [one.error.code if getattr(one, "error", None) else "ok" for one in items]


class Pass(Backend):
    def forward(self, items: list[dict[str, Any]]) -> None:
        for item in items:
            item["result"] = ("a", 1.0)


def gate_of_pairs() -> Gate:
    """Its results are (label, score)."""
    gate = Gate()

    class Pairs(gate.backend):  # type: ignore[misc,name-defined]
        def forward(self, items: list[dict[str, Any]]) -> None:
            super().forward(items)
            for item in items:
                item["result"] = ("a", 1.0)

    gate.backend = Pairs
    return gate


@pytest.mark.parametrize("method", ["infer_batch", "infer_many", "infer"])
def test_the_services_deadline_is_that_of_calls_that_name_none(register: Register, method):
    gate = gate_of_pairs()
    with serving(register(gate.backend), deadline_ms=150) as server, gate, Client(server.port) as client:
        began = time.monotonic()
        codes = receive(client, send(client, method))
        assert codes == ["deadline_exceeded"] * (2 if method == "infer_many" else 1)
        assert time.monotonic() - began >= 0.15
        assert not gate.opened.is_set()


@pytest.mark.parametrize("method", ["infer_many", "infer"])
@pytest.mark.parametrize("deadline_ms", [60_000, *NONE])
def test_no_call_lifts_the_services_deadline(register: Register, method, deadline_ms):
    gate = gate_of_pairs()
    with serving(register(gate.backend), deadline_ms=100) as server, gate, Client(server.port) as client:
        assert set(receive(client, send(client, method, deadline_ms))) == {"deadline_exceeded"}
        assert not gate.opened.is_set()


@pytest.mark.parametrize("method", ["infer_many", "infer"])
@pytest.mark.parametrize("deadline_ms", [60_000, *NONE])
def test_where_the_service_has_none_the_calls_own_deadline_holds(register: Register, method, deadline_ms):
    gate = gate_of_pairs()
    with serving(register(gate.backend)) as server, gate, Client(server.port) as client:
        seqid = send(client, method, deadline_ms)
        gate.wait_entered()
        gate.open()
        assert set(receive(client, seqid)) == {"ok"}


@pytest.mark.parametrize("method", ["infer_many", "infer"])
def test_0_names_no_deadline(register: Register, method):
    """Clients in most languages cannot leave it out."""
    gate = gate_of_pairs()
    with serving(register(gate.backend), deadline_ms=100) as server, gate, Client(server.port) as client:
        assert set(receive(client, send(client, method, 0))) == {"deadline_exceeded"}


@pytest.mark.parametrize("method", ["infer_many", "infer"])
def test_the_calls_own_deadline_may_be_shorter(register: Register, method):
    gate = gate_of_pairs()
    with serving(register(gate.backend), deadline_ms=600_000) as server, gate, Client(server.port) as client:
        assert set(receive(client, send(client, method, 100))) == {"deadline_exceeded"}
        assert not gate.opened.is_set()


def test_a_deadline_that_is_met_changes_nothing(register: Register):
    with serving(register(Pass), deadline_ms=20_000) as server, Client(server.port) as client:
        for method in ("infer_batch", "infer_many", "infer"):
            assert set(receive(client, send(client, method))) == {"ok"}
        client.ping()


def test_what_waits_behind_a_blocked_request_expires_in_its_queue(register: Register):
    gate = gate_of_pairs()
    with serving(register(gate.backend)) as server, gate, Client(server.port) as client, Client(server.port) as other:
        held = send(client, "infer")
        gate.wait_entered()
        assert receive(other, send(other, "infer", 50)) == ["deadline_exceeded"]
        gate.open()
        assert receive(client, held) == ["ok"]
        eventually(lambda: server.run.stats()["inflight"] == 0)
    assert len(gate.batches) == 1, "it was computed all the same"


# -- admission ------------------------------------------------------------------------------------------------------


class Measured(FakePipe):
    """A pipe that says how long a request would have to wait."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.started = seconds, 0

    def check_delay(self, seconds: float | None) -> None:
        if seconds is not None and self.seconds > seconds:
            raise Overloaded(f"the deadline is {1000 * seconds:.15g} ms", math.ceil(1000 * self.seconds))

    def dispatch(self, data: Any, on_done: Any, timeout: float | None = None) -> Any:
        self.started += 1
        data["result"] = ("a", 1.0)
        on_done(data, None)


@pytest.mark.parametrize(
    ("wait_ms", "deadline_ms", "retry_after_ms"),
    [(500, 499, 500), (500, 1, 500), (1.2, 1, 2), (60e3, 59_999, 60_000)],
)
@pytest.mark.parametrize("method", ["infer_many", "infer"])
def test_what_cannot_meet_its_deadline_is_refused_at_once(method, wait_ms, deadline_ms, retry_after_ms):
    run = Measured(wait_ms / 1000)
    with LocalServer(run) as server, Client(server.port) as client:
        with pytest.raises(IDL.InferenceError) as caught:
            client.receive(send(client, method, deadline_ms))
        assert (caught.value.code, caught.value.retry_after_ms) == ("overloaded", retry_after_ms)
        assert f"{deadline_ms} ms" in caught.value.message
        assert run.started == 0


@pytest.mark.parametrize("method", ["infer_batch", "infer_many", "infer"])
def test_the_services_deadline_is_looked_at_as_well(method):
    run = Measured(0.5)
    with LocalServer(run, deadline_ms=400.0) as server, Client(server.port) as client:
        assert receive(client, send(client, method)) == ["overloaded"]
        assert run.started == 0
        run.seconds = 0.3
        assert set(receive(client, send(client, method))) == {"ok"}


@pytest.mark.parametrize("deadline_ms", [None, 0, *NONE, 501])
@pytest.mark.parametrize("method", ["infer_many", "infer"])
def test_what_has_time_enough_is_let_in(method, deadline_ms):
    with LocalServer(Measured(0.5)) as server, Client(server.port) as client:
        assert set(receive(client, send(client, method, deadline_ms))) == {"ok"}


def test_the_wait_is_measured_and_an_idle_service_refuses_nothing(register: Register):
    gate = gate_of_pairs()

    class Slow(gate.backend):  # type: ignore[misc,name-defined]
        def forward(self, items: list[dict[str, Any]]) -> None:
            time.sleep(0.05)
            super().forward(items)

    with serving(register(Slow)) as server, gate, Client(server.port) as client, Client(server.port) as other:
        first = send(client, "infer")
        gate.wait_entered()
        assert receive(other, send(other, "infer", 100)) == ["deadline_exceeded"], "nothing is measured yet: tried"
        gate.open()
        assert receive(client, first) == ["ok"]
        eventually(lambda: server.run.stats()["inflight"] == 0)
        eventually(lambda: server.run.expected_wait() == 0)
        assert receive(client, send(client, "infer", 30_000)) == ["ok"], "idle, but slow before"
        gate.opened.clear()
        waiting = [send(client, "infer_many") for _ in range(2)]
        held = client.send_infer({"data": IDL.Value(bytes=b"x")})
        eventually(lambda: server.run.stats()["nodes"]["node"]["busy"] == 1)
        error = other.error_of(
            "infer", request=IDL.InferRequest(uuid="x", inputs={"data": IDL.Value(bytes=b"x")}, deadline_ms=10)
        )
        assert error.code == "overloaded"
        assert error.retry_after_ms >= 40
        gate.open()
        for seqid in (*waiting, held):
            assert set(receive(client, seqid)) == {"ok"}
        eventually(lambda: server.run.stats()["inflight"] == 0)
        assert receive(other, send(other, "infer", 20_000)) == ["ok"]
