"""A backend that does not return: the figures tell, and neither ``close`` nor the interpreter waits for it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from conftest import Register
from kit.backends import Gate
from kit.waits import WAIT, error_of, eventually, outcome
from test_lifecycle import run_python

import torchpipe_py.runtime.runtime
from torchpipe_py import PipeClosed, pipe


def node_of(p: pipe) -> dict[str, Any]:
    node: dict[str, Any] = p.stats()["nodes"]["node"]
    return node


@pytest.mark.parametrize("most", [1, 4])
def test_the_figures_tell_how_long_the_oldest_batch_runs(register: Register, most: int) -> None:
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
def test_a_hung_backend_lets_the_interpreter_exit(end: str) -> None:
    ended = run_python(HUNG + ENDS[end])
    assert ended.returncode == (1 if end == "an exception" else 0), ended.stderr
    assert "given up" in ended.stdout
    assert ended.stderr.count(NOT_RETURNED) == 1, ended.stderr


@pytest.mark.parametrize("given_up", ["cancelled", "past its deadline"])
def test_close_leaves_what_nobody_waits_for(
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


def test_close_logs_no_error_for_a_backend_that_needs_a_moment(
    register: Register, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()
    with gate:
        p = pipe({"backend": register(gate.backend)})
        running = gate.hold(p, {"data": 1})
        assert p.close(timeout=0.01) is False
        assert [record for record in caplog.records if record.levelname == "ERROR"] == []
        assert isinstance(error_of(running), PipeClosed)
        gate.open()
        assert p.close() is True
