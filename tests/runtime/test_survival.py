"""No exception ends an instance's thread, and no backend that hangs keeps ``close`` or the interpreter."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from conftest import Register
from kit.backends import Echo, EchoFour, Gate
from kit.inside import runtime_of
from kit.waits import WAIT, all_idle, error_of, eventually, outcome, run

import torchpipe_py.runtime.runtime
from torchpipe_py import BackendError, PipeClosed, Registry, Status, pipe
from torchpipe_py.errors import MESSAGE_LIMIT, Failure, describe, first_line, message_of

# -- what is raised ---------------------------------------------------------------------------------------------------


Data = dict[str, Any]


class NoText(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise SystemExit("no text")

    __repr__ = __str__


class Liar(Exception):
    """Raises when asked for its class."""

    @property
    def __class__(self) -> Any:  # type: ignore[override]
        raise KeyboardInterrupt


class Texts(Exception):
    """Its text is no plain ``str``."""

    def __str__(self) -> str:
        return type("Text", (str,), {"encode": None, "strip": None, "split": None, "__format__": None})("a text")


# By name: pytest would ask the exceptions themselves what they are.
ERRORS: dict[str, BaseException] = {
    **{"no text": NoText(), "no class": Liar("a text"), "no string": Texts()},
    **{kind.__name__: kind() for kind in (SystemExit, KeyboardInterrupt, MemoryError, StopIteration)},
    **{"long": RuntimeError("x" * 10**6), "no unicode": RuntimeError("\ud800\x00")},
}


@pytest.mark.parametrize("name", ERRORS)
def test_describes_every_exception(name: str) -> None:
    error = ERRORS[name]
    for text in (message_of(error), describe(error), first_line(error), message_of(Failure.of(error).error())):
        assert type(text) is str
        assert 0 < len(text.encode()) < MESSAGE_LIMIT + 200


def test_long_message_is_cut() -> None:
    assert message_of(ValueError("short")) == "short"
    assert message_of(ValueError("x" * 50), 10) == "x" * 10 + " …"
    assert (message_of(ValueError()), describe(ValueError())) == ("ValueError", "ValueError")
    assert describe(ValueError("short")) == "ValueError: short"


@pytest.mark.parametrize("backend", [Echo, EchoFour])
@pytest.mark.parametrize("name", ERRORS)
def test_exception_of_backend_fails_its_request_only(register: Register, backend: Any, name: str) -> None:
    class Raises(backend):
        def forward_item(self, item: Data) -> None:
            if item["data"] == "bad":
                raise ERRORS[name]
            super().forward_item(item)

    with pipe({"node": {"backend": register(Raises), "batching_timeout": 50}}) as p:
        for _ in range(3):
            bad, good = p.submit({"data": "bad"}), p.submit({"data": 1})
            raised = error_of(bad)
            assert type(raised) is BackendError
            assert "node 'node'" in str(raised)
            assert len(str(raised)) < MESSAGE_LIMIT + 200
            assert outcome(good)["result"] == 1
        assert type(error_of(p.submit({"data": "bad"}))) is BackendError, "also as a batch of one"
        all_idle(p)
        assert p.stats()["nodes"]["node"]["failed"] == 4


@pytest.mark.parametrize("where", ["filter", "second filter", "batch_key", "on_done"])
@pytest.mark.parametrize("kind", [NoText, SystemExit])
def test_exception_outside_backend_fails_the_request_only(
    register: Register, restored: Registry, where: str, kind: type[BaseException]
) -> None:
    class Batches(EchoFour):
        def batch_key(self, item: Data) -> Any:
            if item["data"] == "batch_key":
                raise kind
            return super().batch_key(item)

    def filter_(bad: str) -> Callable[[Data], Status]:
        def decide(data: Data) -> Status:
            if data["data"] == bad:
                raise kind
            return Status.Run

        return decide

    restored.register_filter(filter_("filter"), "first")
    restored.register_filter(filter_("second filter"), "second")
    nodes = {
        "0": {"backend": register(Batches), "next": "a"},
        "a": {"backend": "Identity", "filter": "first", "next": "b"},
        "b": {"backend": register(Batches), "filter": "second"},
    }
    with pipe(nodes) as p:
        for _ in range(3):
            ended, raised = threading.Event(), []

            def on_done(data: Data, error: Any, raised: list[Any] = raised, ended: threading.Event = ended) -> None:
                raised.append(error)
                ended.set()
                if where == "on_done":
                    raise kind

            p.dispatch({"data": where}, on_done)
            assert ended.wait(WAIT)
            assert [type(error) for error in raised] == [type(None) if where == "on_done" else BackendError]
        p(good := {"data": 1}, timeout=WAIT)
        assert good["result"] == 1
        all_idle(p)


@pytest.mark.parametrize("backend", [Echo, EchoFour])
def test_exception_in_instance_loop_fails_its_requests(
    register: Register, monkeypatch: pytest.MonkeyPatch, backend: type
) -> None:
    """What a recorder of batches raises, say; the instance goes on."""
    with pipe({"backend": register(backend), "instance_num": 2}) as p:
        for instance in runtime_of(p).instances:
            monkeypatch.setattr(instance.record, "single" if backend is Echo else "batch", None)
        errors = [error_of(future) for future in [p.submit({"data": index}) for index in range(4)]]
        assert [type(error) for error in errors] == [BackendError] * 4
        monkeypatch.undo()
        p(data := {"data": 5}, timeout=WAIT)
        assert data["result"] == 5
        all_idle(p)


# -- what hangs -------------------------------------------------------------------------------------------------------


def node_of(p: pipe) -> dict[str, Any]:
    node: dict[str, Any] = p.stats()["nodes"]["node"]
    return node


@pytest.mark.parametrize("most", [1, 4])
def test_stats_report_age_of_oldest_batch(register: Register, most: int) -> None:
    gate = Gate(most)
    with pipe({"backend": register(gate.backend), "instance_num": 2}) as p, gate:
        assert (node_of(p)["alive"], node_of(p)["oldest_batch_s"]) == (2, 0.0)
        first = gate.hold(p, {"data": 1})
        before = node_of(p)["oldest_batch_s"]
        second = gate.hold(p, {"data": 2})
        assert node_of(p)["oldest_batch_s"] > before > 0.0, "that of the oldest grows on"
        gate.open()
        outcome(first)
        outcome(second)
        eventually(lambda: not node_of(p)["busy"])
        assert node_of(p)["oldest_batch_s"] == 0.0
    assert node_of(p)["alive"] == 0


# -- the end of a program ---------------------------------------------------------------------------------------------

HUNG = """
import ctypes, os, sys, threading, time
import torchpipe_py.runtime.runtime
from torchpipe_py import Backend, DeadlineExceeded, pipe, register_backend

torchpipe_py.runtime.runtime.LEAVE_SECONDS = 0.3

entered = threading.Event()

class Hangs(Backend):
    def forward(self, items):
        entered.set()
        if items[0]["data"] == "sleep":
            time.sleep(10**6)
        ctypes.CDLL(None).pause()

register_backend(Hangs, "Hangs")
config = {"broken": {"backend": "Hangs"}}

def call(p, what="sleep"):
    entered.clear()
    while not entered.is_set():  # the time may be over before it is run
        try:
            p({"data": what}, timeout=0.1)
        except DeadlineExceeded:
            print("given up", flush=True)

"""

NOT_RETURNED = "node 'broken': instance 0 of Hangs is still running"

ENDS = {
    "in C": "p = pipe(config); call(p, 'pause')",
    "closed": "p = pipe(config); call(p); assert p.close() is False; del p",
    "with": "with pipe(config) as p: call(p)",
    "dropped": "def main():\n    p = pipe(config); p.submit({'data': 'sleep'}); entered.wait()\n"
    "main(); print('given up')",
    "an exception": "p = pipe(config)\ncall(p)\nraise ValueError('mine')",
    "a forked child": "p = pipe(config); call(p)\nif os.fork():\n    assert os.wait()[1] == 0",
}


@pytest.mark.parametrize("end", ENDS)
def test_interpreter_exits_despite_hung_backend(end: str) -> None:
    ended = run(sys.executable, "-c", HUNG + ENDS[end])
    assert ended.returncode == (1 if end == "an exception" else 0), ended.stderr
    assert "given up" in ended.stdout
    assert ended.stderr.count(NOT_RETURNED) == 1, ended.stderr


@pytest.mark.parametrize("given_up", ["cancelled", "past its deadline"])
def test_close_abandons_hung_backend_without_callers(
    register: Register, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, given_up: str
) -> None:
    monkeypatch.setattr(torchpipe_py.runtime.runtime, "LEAVE_SECONDS", 0.1)
    gate = Gate()
    with gate:
        p = pipe({"broken": {"backend": register(gate.backend)}})
        timeout = 0.1 if "deadline" in given_up else None
        while not gate.batches:
            expired = threading.Event()
            request = p.dispatch({"data": 1}, lambda data, error, expired=expired: expired.set(), timeout=timeout)
            eventually(lambda expired=expired: gate.batches or expired.is_set())
            timeout = timeout and 2 * timeout  # on a busy machine the time may be over before it is run
        if given_up == "cancelled":
            assert request.cancel()
        assert p.close() is False
        assert [record.getMessage() for record in caplog.records if "node 'broken': instance 0" in record.getMessage()]
        monkeypatch.setattr(torchpipe_py.runtime.runtime, "LEAVE_SECONDS", WAIT)
        gate.open()
        assert p.close() is True


def test_close_logs_no_error_for_slow_backend(register: Register, caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    with gate:
        p = pipe({"backend": register(gate.backend)})
        running = gate.hold(p, {"data": 1})
        assert p.close(timeout=0.01) is False
        assert [record for record in caplog.records if record.levelname == "ERROR"] == []
        assert isinstance(error_of(running), PipeClosed)
        gate.open()
        assert p.close() is True
