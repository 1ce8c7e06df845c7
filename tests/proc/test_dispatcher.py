"""Where ``Process`` hands requests over: which worker process has which, and what happens to those that wait."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import Any

import numpy as np
import process_backends
import pytest
from conftest import Register
from kit.waits import WAIT, error_of, eventually, outcome

from torchpipe_py import DeadlineExceeded, ItemBackend, PipeClosed, pipe
from torchpipe_py.proc.link import Link
from torchpipe_py.proc.pool import AHEAD, Pool

Data = dict[str, Any]
Start = Callable[..., pipe]


@pytest.fixture
def start(register: Register) -> Start:
    name = register(process_backends.Single)
    return lambda instances=1, **more: pipe({"backend": f"Process[{name}]", "instance_num": instances, **more})


class Held:
    """A request that a worker process is at until the gate is opened."""

    def __init__(self, p: pipe, folder: Path, **more: Any) -> None:
        self._file, self._gate = folder / f"{id(self)}", folder / f"{id(self)}.gate"
        os.mkfifo(self._gate)
        self.future: Future[Data] = p.submit({"data": "hold", "file": str(self._file), "gate": str(self._gate), **more})

    @property
    def pid(self) -> int:
        """Of the worker process; 0 where it has not begun."""
        return int(self._file.read_text(encoding="utf-8") or 0) if self._file.exists() else 0

    def open(self) -> None:
        self._gate.write_bytes(b"")


def test_what_waits_behind_another_goes_to_the_one_that_is_idle(start: Start, tmp_path: Path) -> None:
    with start(2) as p:
        held = Held(p, tmp_path)
        eventually(lambda: held.pid)
        pids = {outcome(future)["result"][0] for future in [p.submit({"data": "x"}) for _ in range(12)]}
        assert held.pid not in pids
        assert len(pids) == 1
        assert not held.future.done()
        held.open()
        outcome(held.future)
        eventually(lambda: not p.stats()["nodes"]["node"]["busy"])  # which ends behind the answer
        node = p.stats()["nodes"]["node"]
        assert (node["requests"], node["failed"], node["queued"]) == (13, 0, 0)
        assert all(node["instance_compute_ms"])


def test_close_ends_what_runs_and_fails_what_waits(start: Start, tmp_path: Path) -> None:
    p = start()
    held = Held(p, tmp_path)
    eventually(lambda: held.pid)
    others = [p.submit({"data": "x"}) for _ in range(9)]
    closing = threading.Thread(target=p.close)
    closing.start()
    for future in others:
        error = error_of(future)
        assert isinstance(error, PipeClosed)
        assert "while the request was queued at node 'node'" in str(error)
    assert not held.future.done()
    held.open()
    assert outcome(held.future)["result"][0] == held.pid
    closing.join(WAIT)
    assert not closing.is_alive()


def test_a_pipe_that_is_collected_on_the_thread_that_takes_answers_ends(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collection may come anywhere. Whoever ends the pipe waits for answers that this thread has to take."""
    read = Link.read

    def collect_first(self: Link, *given: Any, **more: Any) -> Any:
        gc.collect()
        return read(self, *given, **more)

    monkeypatch.setattr(Link, "read", collect_first)
    gc.disable()  # elsewhere
    try:
        p = start()
        runtime, held = p._runtime, Held(p, tmp_path)
        eventually(lambda: held.pid)
        vars(p)["itself"] = p
        del p
        held.open()
        outcome(held.future)
        eventually(lambda: not any(instance.is_alive for instance in runtime.nodes["node"].instances))
    finally:
        gc.enable()


def test_what_was_given_up_in_the_queue_is_not_run(start: Start, tmp_path: Path) -> None:
    with start() as p:
        held = Held(p, tmp_path)
        eventually(lambda: held.pid)
        others = [p.submit({"data": "x"}) for _ in range(AHEAD)]
        dropped = Held(p, tmp_path)
        assert dropped.future.cancel()
        last = p.submit({"data": "x"})
        held.open()
        eventually(lambda: last.done() or dropped.pid)
        assert not dropped.pid
        for future in [held.future, *others, last]:
            outcome(future)


def test_a_callback_may_close_the_pipe(start: Start) -> None:
    p = start()
    closed = threading.Event()

    def close(future: Future[Data]) -> None:
        p.close()
        closed.set()

    p.submit({"data": "x"}).add_done_callback(close)
    assert closed.wait(WAIT)
    eventually(lambda: not p.stats()["nodes"]["node"]["alive"])
    assert p.stats()["nodes"]["node"]["oldest_batch_s"] == 0.0


def test_a_handler_of_a_signal_may_call_the_pipe_while_a_call_is_given_up(start: Start, tmp_path: Path) -> None:
    asked: list[int] = []
    answered: list[int] = []

    def handle(frame: FrameType, event: str, argument: object) -> Any:
        if event == "line" and frame.f_code is Pool.give_up.__code__:
            asked.append(frame.f_lineno)
            p({"data": "x"}, timeout=WAIT)
            answered.append(frame.f_lineno)
        return handle

    with start(2) as p:
        held = Held(p, tmp_path)
        eventually(lambda: held.pid)
        before = sys.gettrace()
        sys.settrace(handle)
        try:
            assert held.future.cancel()
        finally:
            sys.settrace(before)
        assert asked
        assert answered == asked
        held.open()


def test_a_deadline_that_passes_in_the_queue(start: Start, tmp_path: Path) -> None:
    with start() as p:
        held = Held(p, tmp_path)
        eventually(lambda: held.pid)
        late = p.submit({"data": "x"}, timeout=0.01)
        end = perf_counter() + 0.01
        eventually(lambda: perf_counter() > end)
        held.open()
        assert isinstance(error_of(late), DeadlineExceeded)
        outcome(held.future)
        eventually(lambda: p.stats()["nodes"]["node"]["expired"] == 1)


def test_large_items_leave_one_process_to_the_others(start: Start, tmp_path: Path) -> None:
    with start(2) as p:
        first, second = Held(p, tmp_path, large=True), Held(p, tmp_path, large=True)
        eventually(lambda: first.pid)
        for _ in range(5):
            outcome(p.submit({"data": "x"}))
        assert not second.pid
        first.open()
        eventually(lambda: second.pid)
        second.open()
        outcome(first.future), outcome(second.future)


class Keep(ItemBackend):
    """Keeps the arrays that came."""

    def setup(self) -> None:
        self.kept: list[np.ndarray] = []
        kept_by.append(self.kept)

    def forward_item(self, item: Data) -> None:
        self.kept.append(item["data"])
        item["result"] = item["data"] = int(item["data"][0, 0])


kept_by: list[list[np.ndarray]] = []


def lies_in_a_slot(array: np.ndarray) -> bool:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array.base is not None


def test_the_next_node_reads_answers_where_they_lie(register: Register) -> None:
    first, second = register(process_backends.Fill), register(Keep)
    with pipe({"a": {"backend": f"Process[{first}]", "next": "b"}, "b": {"backend": second}}) as p:
        kept = kept_by.pop()
        for times in range(2):
            kept.clear()
            for number in range(20):
                p(item := {"data": number})
                assert item["result"] == number
            # Those that are kept stay as they are, and are copies where too many are kept.
            assert [int(array.max()) for array in kept] == [int(array.min()) for array in kept] == [*range(20)]
            assert [lies_in_a_slot(array) for array in kept] == [True] * 14 + [False] * 6, times


def test_a_caller_gets_copies(register: Register) -> None:
    with pipe({"backend": f"Process[{register(process_backends.Fill)}]"}) as p:
        p(item := {"data": 1})
    assert not lies_in_a_slot(item["result"])  # type: ignore[arg-type]
