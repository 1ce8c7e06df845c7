"""Starting, replacing and giving up workers, their engine processes, and forking."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any
from unittest import mock

import psutil
import pytest
from kit.services import turn
from kit.virtual_loop import VirtualLoop
from kit.waits import WAIT, eventually
from torchpipe_server.front.journal import Journal
from torchpipe_server.front.loop import new_loop
from torchpipe_server.options import Options, parse_options
from torchpipe_server.supervisor import fleet as module
from torchpipe_server.supervisor.fleet import (
    FIRST_DELAY,
    LONGEST_DELAY,
    SETTLED_SECONDS,
    START_ATTEMPTS,
    Fleet,
    Starts,
    Successor,
    successor,
)
from torchpipe_server.supervisor.forker import Forker
from torchpipe_server.supervisor.generation import MOST_CHANGES, Configuration, Generation, WorkerSlot
from torchpipe_server.supervisor.messages import Committed, Prepared, Ready
from torchpipe_server.worker import worker
from torchpipe_server.worker.service import engine_processes, make_plan

from torchpipe_py import ConfigError, Overloaded
from torchpipe_py.plan.config import Tables
from torchpipe_py.plan.folder import Folder

SHARED = {"global": {}, "model": {"backend": "Identity", "shared": True}}


class Fleets:
    """Makes a `Fleet` that forks nothing: ``starts`` has slot and time of each start, ``failed`` its problems."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop, self.journal = VirtualLoop(), Journal(1)
        self.starts: list[tuple[WorkerSlot, float]] = []
        self.failed: list[str] = []
        monkeypatch.setattr(module, "Forker", self._make_forker)
        monkeypatch.setattr(module, "Child", self._make_child)
        monkeypatch.setattr(module, "call_on_thread", self._call)

    @staticmethod
    def _call(loop: Any, name: str, work: Any, done: Any) -> None:
        """``call_on_thread`` without a thread."""
        try:
            outcome = work()
        except Exception as error:
            outcome = error
        done(outcome)

    @property
    def started(self) -> list[int]:
        return [slot.index for slot, _ in self.starts]

    def _make_forker(self, loop: Any, options: Any, journal: Any, is_wanted: Any, done: Any) -> mock.Mock:
        self.forked = done
        """Takes a slot and its process or why there is none."""
        return mock.Mock(fork=lambda slot: self.starts.append((slot, self.loop.time)))

    def _make_child(self, loop: Any, name: str, forked: Any, on_message: Any, on_end: Any) -> mock.Mock:
        child = mock.Mock(is_ready=True, has_served=False, ready_at=0.0, stats={}, clients=set(), failure="")
        child.configure_mock(reason="died", answered=True, problems={}, end=lambda: on_end(child))
        return child

    def make(self, tables: Any = SHARED, **options: Any) -> Fleet:
        connections = mock.Mock(journal=self.journal, died=lambda child: 0)
        loop: Any = self.loop
        options_, configuration = Options("test", **options), Configuration(tables)
        load, clock = lambda: configuration, lambda: self.loop.time
        return Fleet(loop, options_, connections, configuration, load, self.failed.append, clock)

    def die(self, slot: WorkerSlot, **changes: Any) -> None:
        """Start the slot's process and let it end."""
        self.forked(slot, mock.Mock())
        child: Any = slot.child
        child.configure_mock(**changes)
        child.end()


@pytest.fixture
def fleets(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleets]:
    made = Fleets(monkeypatch)
    yield made
    made.journal.close()


def test_worker_that_served_is_replaced_at_once_however_often_it_dies(fleets: Fleets) -> None:
    """A client that keeps sending what kills a worker must not keep the others waiting."""
    fleet = fleets.make(workers=2)
    fleet.has_begun = True
    for _ in range(50):
        fleets.die(fleet.generation.workers[0], has_served=True, ready_at=fleets.loop.time)
    assert fleets.started == [0] * 50
    assert fleet.is_recovering
    assert (fleet.generation.workers[0].restarts, fleet.restarts) == (50, {"died": 50})


def test_worker_that_dies_before_it_serves_is_replaced_after_a_delay_that_doubles(fleets: Fleets) -> None:
    fleet = fleets.make(workers=2)
    fleet.has_begun = True
    worker = fleet.generation.workers[0]
    delays = []
    for _ in range(9):
        died, count = fleets.loop.time, len(fleets.starts)
        fleets.die(worker, ready_at=died)
        assert (len(fleets.starts), fleet.is_recovering) == (count, False)
        fleets.loop.advance(LONGEST_DELAY)
        delays.append(fleets.starts[-1][1] - died)
    assert delays == [FIRST_DELAY * 2**doublings for doublings in range(7)] + 2 * [LONGEST_DELAY]
    fleets.die(worker, ready_at=fleets.loop.time - SETTLED_SECONDS)
    assert fleets.starts[-1] == (worker, fleets.loop.time)
    fleets.die(worker, ready_at=fleets.loop.time)
    died = fleets.loop.time
    fleets.loop.advance(LONGEST_DELAY)
    assert fleets.starts[-1] == (worker, died + FIRST_DELAY), "it worked for a while, so the delay is the first again"


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN])
def test_start_without_system_resources_does_not_count_as_failed(fleets: Fleets, number: int) -> None:
    """A worker is given up only for its own failures."""
    fleet = fleets.make(workers=1)
    for _ in range(2 * START_ATTEMPTS):
        fleets.forked(fleet.generation.workers[0], OSError(number, os.strerror(number)))
    assert (fleet.generation.workers[0].failures, fleets.failed) == (0, [])
    fleets.forked(fleet.generation.workers[0], OSError(errno.ESRCH, "it is gone"))
    assert fleet.generation.workers[0].failures == 1


def test_change_of_the_configuration_is_answered_once(fleets: Fleets) -> None:
    fleet, answers = fleets.make({}, workers=1), list[str]()
    with pytest.raises(Overloaded, match="starting or stopping"):
        fleet.change(dict, answers.append)
    fleet.has_begun = True
    for _ in range(1 + MOST_CHANGES):
        fleet.change(lambda: {"global": {}}, answers.append)
    with pytest.raises(Overloaded, match=f"more than {MOST_CHANGES} changes wait"):
        fleet.change(dict, answers.append)
    fleet.drain()
    fleets.forked(fleets.starts[-1][0], OSError(errno.EPERM, "not any more"))
    fleets.loop.advance(0.01)
    assert answers == ["the service is stopping"] * (1 + MOST_CHANGES)


@pytest.mark.parametrize("where", ["load", "Generation", "ModelChange"])
def test_change_that_raises_is_answered_and_the_next_one_begins(
    fleets: Fleets, monkeypatch: pytest.MonkeyPatch, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    fleet, answers = fleets.make(workers=1), list[str]()
    fleets.forked(fleet.generation.workers[0], mock.Mock())
    fleet.has_begun = True
    raising = mock.Mock(side_effect=ValueError("embedded null byte"))
    with monkeypatch.context() as patched:
        if where != "load":
            patched.setattr(module, where, raising)
        fleet.change(raising if where == "load" else dict, answers.append, "a" if where == "ModelChange" else "")
    assert answers == ["ValueError: embedded null byte"]
    assert (fleet.reloads["failed"], fleet.is_last_reload_ok, fleets.starts) == (1, False, [])
    assert "internal error while a reload began" in caplog.messages
    fleet.change(dict, answers.append)
    assert [slot.role for slot, _ in fleets.starts] == ["worker"]


@pytest.mark.parametrize("how", ["end", "stop"])
def test_an_outcome_that_cannot_be_reported_stops_no_other_change(
    fleets: Fleets, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    fleet, answers, raising = fleets.make({}, workers=1), list[str](), mock.Mock(side_effect=ValueError("it is gone"))
    fleet.has_begun = True
    fleet.change(lambda: {"global": {}}, raising)
    for done in (answers.append, raising, answers.append):
        fleet.change(mock.Mock(side_effect=ConfigError("not valid TOML")), done)
    if how == "end":
        fleets.forked(fleets.starts[-1][0], OSError(errno.EPERM, "not any more"))
    else:
        fleet.drain()
    fleets.loop.advance(0.01)
    assert answers == ["not valid TOML" if how == "end" else "the service is stopping"] * 2
    assert raising.call_count == 2
    assert caplog.messages.count("internal error while the outcome of a change was reported") == 2


class Reader:
    """Reads like a storage that does not answer until ``answer``."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self._answers = SimpleQueue[Any]()

    def read(self) -> Any:
        self.asked.set()
        return self._answers.get(timeout=WAIT)

    def answer(self, configuration: Any) -> None:
        self._answers.put(configuration)


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Fleet, list[WorkerSlot]]]:
    """A loop, a fleet on it that has begun, and the slots for which it would fork."""
    loop, journal, starts = new_loop(is_fast=False), Journal(1), list[WorkerSlot]()
    monkeypatch.setattr(module, "Forker", lambda *_: mock.Mock(fork=starts.append))
    fleet = Fleet(loop, Options("test", workers=1), mock.Mock(), Configuration({}), dict, [].append)
    fleet.has_begun = True
    yield loop, fleet, starts
    journal.close()
    loop.close()


def test_a_storage_that_does_not_answer_stops_no_loop(reading: tuple[Any, Fleet, list[WorkerSlot]]) -> None:
    loop, fleet, starts = reading
    reader, answers = Reader(), list[str]()
    fleet.change(reader.read, answers.append)
    turns = list[int]()
    eventually(lambda: turn(loop) or reader.asked.is_set())
    loop.call_soon(turns.append, 1)
    turn(loop)
    assert (turns, starts, answers) == ([1], [], [])
    reader.answer({"global": {}})
    eventually(lambda: turn(loop) or starts)
    assert [slot.tables for slot in starts] == [{"global": {}}]


@pytest.mark.parametrize("how", ["reload", "stop"])
def test_what_is_read_after_a_reload_or_a_stop_is_dropped(
    reading: tuple[Any, Fleet, list[WorkerSlot]], how: str
) -> None:
    loop, fleet, starts = reading
    late, reader, answers, ended = Reader(), Reader(), list[str](), threading.Event()

    def read_late() -> Any:
        tables = late.read()
        loop.call_soon_threadsafe(loop.call_soon, ended.set)  # after what follows this
        return tables

    fleet._load = reader.read
    fleet.change(read_late, answers.append)
    eventually(late.asked.is_set)
    fleet.reload() if how == "reload" else fleet.drain()
    assert answers == ["interrupted by a reload" if how == "reload" else "the service is stopping"]
    late.answer({"global": {"late": 1}})
    eventually(lambda: turn(loop) or ended.is_set())
    assert starts == []
    if how == "reload":
        reader.answer(Configuration({"global": {}}))
        eventually(lambda: turn(loop) or starts)
        assert [slot.tables for slot in starts] == [{"global": {}}]


def test_files_that_are_never_read_end_the_change_in_time(fleets: Fleets, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, answers = fleets.make({}, workers=1, start_seconds=5.0), list[str]()
    fleet.has_begun = True
    calls = list[Any]()
    with monkeypatch.context() as patched:
        patched.setattr(module, "call_on_thread", lambda loop, name, work, done: calls.append(done))
        fleet.change(dict, answers.append)
        fleets.loop.advance(4.9)
    fleet.change(lambda: {"global": {}}, answers.append)
    assert (answers, fleets.starts) == ([], [])
    fleets.loop.advance(0.2)
    assert answers == ["its files are not read after 5 s (--start-seconds)"]
    assert fleets.starts == [], "the next change waits for the thread"
    calls[0](Configuration({"late": {}}))
    assert [slot.tables for slot, _ in fleets.starts] == [{"global": {}}]
    fleets.loop.advance(5.0)
    assert len(answers) == 1, "it is no longer late once its files are read"


@pytest.mark.parametrize("how", ["refused", "reload", "stop"])
def test_the_time_limit_of_a_read_keeps_no_change_that_is_over(
    fleets: Fleets, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Anyone may ask for unloads that are refused, a thousand a second."""
    fleet = fleets.make({}, workers=1, start_seconds=3600.0)
    fleet.has_begun = True
    waiting = fleets.loop.waiting
    if how == "refused":
        fleet.change(mock.Mock(side_effect=ConfigError("no such model")), lambda problem: None)
    else:
        monkeypatch.setattr(module, "call_on_thread", lambda *_: None)
        fleet.change(dict, lambda problem: None)
        fleet.reload() if how == "reload" else fleet.drain()
    fleets.loop.advance(0.01)
    assert fleets.loop.waiting == waiting + (how == "reload"), "only that of the read in progress"


def test_files_are_read_by_one_thread_for_the_newest_reload(
    fleets: Fleets, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each SIGHUP during a hang of the storage would leave a thread that waits for it."""
    fleet, calls, loaded = fleets.make({}, workers=1, start_seconds=5.0), list[Any](), list[str]()
    fleet.has_begun = True
    monkeypatch.setattr(module, "call_on_thread", lambda loop, name, work, done: calls.append((work, done)))

    def answer() -> None:
        work, done = calls.pop()
        done(work())

    fleet.change(lambda: loaded.append("change") or {"global": {"of": "the change"}}, lambda problem: None)
    for number in range(10):
        fleet._load = lambda number=number: loaded.append(number) or Configuration({"global": {"of": number}})
        fleet.reload()
    assert len(calls) == 1
    answer()
    assert ("still being read" in caplog.text, fleets.starts, len(calls)) == (True, [], 1)
    answer()
    assert [slot.tables for slot, _ in fleets.starts] == [{"global": {"of": 9}}]
    assert (loaded, calls) == (["change", 9], [])
    fleet.reload()
    fleets.loop.advance(5.1)
    answer()
    assert (calls, fleet._is_reader_busy) == ([], False), "it was too late, and nothing else is wanted"


@pytest.mark.parametrize("how", ["refused", "reload"])
def test_workers_are_replaced_once_if_they_may_serve_different_models(fleets: Fleets, how: str) -> None:
    """One worker serves the new model; the other one refuses, or a reload comes between."""
    before, after = Folder(source="before"), Folder(source="after")
    fleet, answers = fleets.make(before, workers=2), list[str]()
    for slot in fleet.generation.workers:
        fleets.forked(slot, mock.Mock())
    fleet.has_begun = True
    for _ in range(2):
        fleet.change(lambda: after, answers.append, "a")
    one, other = fleet.ready
    number = one.ask_change.call_args.args[1]
    for child in (one, other):
        fleet._receive(child, Prepared(number, "", ""))
    fleet._receive(one, Committed(number, ""))
    if how == "refused":
        fleet._receive(other, Committed(number, "no memory"))
    else:
        fleet.reload()
    assert answers == ["no memory" if how == "refused" else "interrupted by a reload"]
    fleets.loop.advance(0.01)
    assert [slot.tables.source for slot, _ in fleets.starts] == ["before"] * 2
    for slot, _ in list(fleets.starts):
        fleets.forked(slot, mock.Mock())
        slot.child.configure_mock(tables=slot.tables)
    fleet._receive(slot.child, Ready(""))
    # Nobody has asked for the reload that repairs; another one counts.
    assert (fleet.reloads, fleet.is_last_reload_ok) == ({"ok": int(how == "reload"), "failed": 1}, how == "reload")
    assert slot in fleet.generation.workers
    fleets.loop.advance(0.01)
    slot.child.ask_change.assert_called_once()
    assert (len(fleets.starts), len(answers)) == (2, 1), "the next change has begun"


@pytest.mark.parametrize("what", ["read", "start"])
def test_a_repair_that_a_reload_interrupts_follows_if_that_fails(
    fleets: Fleets, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Otherwise workers would serve different models for good."""
    fleet, calls = fleets.make(Folder(source="before"), workers=1), list[Any]()
    fleet.has_begun = fleet._may_differ = True
    monkeypatch.setattr(module, "call_on_thread", lambda loop, name, work, done: calls.append((work, done)))

    def answer() -> None:
        work, done = calls.pop()
        Fleets._call(None, "", work, done)

    fleet._begin_change()
    if what == "start":
        answer()
        assert len(fleets.starts) == 1
    fleet._load = mock.Mock(side_effect=ConfigError("not valid TOML"))
    fleet.reload()
    if what == "read":
        answer()
    answer()
    fleets.starts.clear()
    fleets.loop.advance(0.01)
    answer()
    assert ([slot.tables.source for slot, _ in fleets.starts], fleet.reloads["failed"]) == (["before"], 1)
    slot = fleets.starts[0][0]
    fleets.forked(slot, mock.Mock())
    slot.child.configure_mock(tables=slot.tables)
    fleet._receive(slot.child, Ready(""))
    fleets.loop.advance(0.01)
    assert (slot in fleet.generation.workers, calls) == (True, []), "once"


def test_workers_get_all_problems_of_models_once_they_are_ready(fleets: Fleets) -> None:
    """A worker that starts takes no messages but links, and may have been forked before a load failed."""
    folder = Folder(source="models")
    folder.problems["a/1"] = "not valid TOML"
    fleet, before = fleets.make(folder, workers=2), folder.problems
    for slot in fleet.generation.workers:
        fleets.forked(slot, mock.Mock(tables=folder))
        slot.child.configure_mock(tables=folder)
    ready, starting = (slot.child for slot in fleet.generation.workers)
    starting.is_ready = False
    fleet.add_problems({"b/1": "no memory"})
    assert before == {"a/1": "not valid TOML"}, "it may be on its way to a worker that is being forked"
    problems = {"a/1": "not valid TOML", "b/1": "no memory"}
    assert folder.problems == problems
    sent = [mock.call("problems", problems=problems)]
    assert (ready.send.mock_calls, starting.send.mock_calls) == (sent, [])
    starting.is_ready = True
    fleet._receive(starting, Ready(""))
    assert (ready.send.mock_calls, starting.send.mock_calls) == (sent, sent)


def test_engine_processes_get_no_problems_of_models(fleets: Fleets) -> None:
    folder = Folder({"a/1": Tables(SHARED)}, "models")
    folder.problems["b/1"] = "not valid TOML"
    fleet = fleets.make(folder, workers=2)
    for slot in fleet.generation.slots:
        fleets.forked(slot, mock.Mock())
        slot.child.configure_mock(tables=folder)
        fleet._receive(slot.child, Ready(""))
    sent = {slot.role: slot.child.send.mock_calls for slot in fleet.generation.slots}
    assert sent == {"engine process": [], "worker": [mock.call("problems", problems=folder.problems)]}


@pytest.mark.parametrize(
    ("reason", "counted"), [("died", "failed_start"), ("slow_start", "slow_start"), ("misbehaved", "misbehaved")]
)
def test_restart_of_a_process_that_never_was_ready_counts_by_its_reason(
    fleets: Fleets, reason: str, counted: str
) -> None:
    fleet = fleets.make(workers=1)
    fleet.has_begun = True
    fleets.die(fleet.generation.workers[0], reason=reason)
    assert fleet.restarts == {counted: 1}


KILLED, NOT_READY, IN_USE = "killed, or crashed", "not ready after 5 s", "port in use"
SUCCESSORS = [
    # What ended, how, and whether it has worked: what follows.
    ({"ready_at": 1.0}, "died", True, Successor(Starts.AT_ONCE, "died")),
    ({"ready_at": 1.0}, "hung_batch", True, Successor(Starts.AT_ONCE, "hung_batch")),
    ({"ready_at": 1.0}, "died", False, Successor(Starts.AFTER_PAUSE, "died", "ended as soon as it was ready")),
    ({}, "died", False, Successor(Starts.AS_RETRY, "failed_start", f"ended while it started: {KILLED}")),
    ({}, "misbehaved", False, Successor(Starts.AS_RETRY, "misbehaved", f"ended while it started: {KILLED}")),
    (
        {"failure": NOT_READY}, "slow_start", False,
        Successor(Starts.AS_RETRY, "slow_start", f"ended while it started: {NOT_READY}"),
    ),
    (
        {"ready_at": 1.0, "failure": IN_USE}, "died", True,
        Successor(Starts.AFTER_PAUSE, "failed_start", f"ended: {IN_USE}"),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("state", "reason", "has_worked", "expected"), SUCCESSORS)
def test_how_a_process_that_ended_is_replaced(
    state: dict[str, Any], reason: str, has_worked: bool, expected: Successor
) -> None:
    child: Any = mock.Mock(**{"ready_at": 0.0, "failure": "", "reason": reason, **state})
    assert successor(child, has_worked) == expected


def test_process_with_an_outdated_configuration_is_replaced_and_not_counted(fleets: Fleets) -> None:
    """Nor does it end the pauses of a worker that crashes each time, however many models are loaded meanwhile."""
    fleet = fleets.make(workers=2)
    fleet.has_begun = True
    worker = fleet.generation.workers[0]
    fleets.die(worker, ready_at=fleets.loop.time)
    fleets.loop.advance(FIRST_DELAY)
    count = len(fleets.starts)
    fleets.die(worker, ready_at=fleets.loop.time, reason="dismissed", tables={})
    assert (len(fleets.starts), worker.restarts, fleet.restarts) == (count + 1, 1, {"died": 1})
    fleets.die(worker, ready_at=fleets.loop.time)
    fleets.loop.advance(FIRST_DELAY)
    assert len(fleets.starts) == count + 1
    fleets.loop.advance(FIRST_DELAY)
    assert len(fleets.starts) == count + 2


def test_service_ends_if_a_process_reports_why_it_cannot_start(fleets: Fleets) -> None:
    """Also one that was ready for long, since the others were not."""
    fleet = fleets.make(workers=2)
    fleets.die(fleet.generation.workers[0], failure=IN_USE, ready_at=fleets.loop.time - SETTLED_SECONDS)
    assert (fleets.failed, fleets.starts) == ([IN_USE], [])


def test_service_ends_if_an_engine_process_cannot_be_started(fleets: Fleets) -> None:
    """Workers wait for both engine processes, one of which dies whenever it starts."""
    fleet = fleets.make(workers=2, engines=2)
    ready, dying = fleet.generation.engines
    ready.child = mock.Mock(is_ready=True, clients=set())
    for _ in range(START_ATTEMPTS):
        assert fleets.failed == []
        fleets.die(dying)
    assert fleets.failed == [f"engine process 1 cannot be started, after {START_ATTEMPTS} attempts"]


def test_reload_ends_if_the_engine_process_that_it_keeps_is_given_up(fleets: Fleets) -> None:
    """Its workers would wait for that one forever, and the service would not end while they do."""
    fleet = fleets.make(workers=2)
    for slot in fleet.generation.slots:
        fleets.forked(slot, mock.Mock())
    fleet.has_begun = True
    fleet.reload()
    assert [slot.role for slot, _ in fleets.starts] == ["worker"] * 2
    for _ in range(START_ATTEMPTS):
        assert (fleets.failed, fleet.reloads["failed"]) == ([], 0)
        fleets.die(fleet.generation.engines[0])
    fleets.loop.advance(0.01)
    assert fleet.reloads["failed"] == 1
    assert fleets.failed == [f"no engine process can be started, after {START_ATTEMPTS} attempts each"]


@pytest.mark.parametrize("outcome", ["mended", "wrong", "another reload", "too late", "load"])
def test_service_that_a_reload_may_mend_does_not_end_while_files_are_read(
    fleets: Fleets, monkeypatch: pytest.MonkeyPatch, outcome: str
) -> None:
    """The last worker is given up while the storage of the mended configuration takes its time."""
    fleet, calls = fleets.make(Folder(source="models"), workers=1, start_seconds=50.0), list[Any]()
    fleet.has_begun = True
    monkeypatch.setattr(module, "call_on_thread", lambda loop, name, work, done: calls.append(done))
    if outcome == "load":
        fleet.change(dict, lambda problem: None, "a")
    else:
        fleet.reload()
    for _ in range(START_ATTEMPTS):
        fleets.die(fleet.generation.workers[0])
    assert fleet.generation.workers[0].is_given_up
    if outcome == "another reload":
        fleet.reload()
        calls.pop()(ConfigError("not valid TOML"))
    fleets.loop.advance(1.0)
    assert fleets.failed == []
    if outcome == "too late":
        fleets.loop.advance(50.0)
    else:
        mends = outcome in ("mended", "load")
        calls.pop()(Configuration(Folder(source="models")) if mends else ConfigError("not valid TOML"))
    fleets.loop.advance(1.0)
    given_up = f"no worker can be started, after {START_ATTEMPTS} attempts each"
    assert fleets.failed == ([] if outcome == "mended" else [given_up]), "a load of one model changes no worker here"


@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("model", ["", "a"])
def test_a_reload_says_what_it_interrupts(
    fleets: Fleets, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, model: str, is_read: bool
) -> None:
    caplog.set_level(logging.INFO, "torchpipe_server")
    fleet = fleets.make(workers=2)
    fleet.has_begun = True
    if not is_read:
        monkeypatch.setattr(module, "call_on_thread", lambda *_: None)
    if model:  # its nodes are shared, so other workers take over
        fleet.change(lambda: Folder({"a/1": Tables(SHARED)}, "models"), lambda problem: None, model)
    else:
        fleet.reload()
    assert (fleet._next_generation is not None) == is_read
    fleet.reload()
    (line,) = [line for line in caplog.messages if line.startswith("SIGHUP")]
    what = "the change of model 'a' is given up" if model else "the reload in progress starts over"
    assert line == f"SIGHUP: {what}"


# -- engine processes -----------------------------------------------------------------------------------------------


FEWER = "--engines 4: 2 engine processes instead of 4, one for each worker (--workers)"


@pytest.mark.parametrize(
    ("args", "engines", "line"),
    [
        ("--workers=1", [], ""),
        ("--workers=3", [0, 0, 0], ""),
        ("--workers=5 --engines=2", [0, 1, 0, 1, 0], ""),
        ("--workers=2 --engines=4", [0, 1], FEWER),
        ("--workers=4 --devices=0,1", [0, 1, 0, 1], ""),
        ("--workers=6 --devices=0,1 --engines=2", [0, 1, 2, 3, 0, 1], ""),
        ("--workers=1 --engines=2", [], "--engines 2 does nothing: it takes --workers of 2 or more"),
    ],
)
def test_workers_use_the_engine_processes_of_their_device(
    args: str, engines: list[int], line: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = parse_options(["x.toml", *args.split()])
    generation = Generation(Configuration(SHARED), options)
    used = [generation.engine_of(worker) for worker in generation.workers]
    assert [engine.index for engine in used if engine is not None] == engines
    assert caplog.messages == ([line] if line else [])


def none_is_left(pid: int) -> int:
    raise OSError(errno.EMFILE, "none is left")


def test_process_is_killed_if_no_descriptor_is_left_for_it(fleets: Fleets, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its end would go unnoticed, and it would not be replaced."""
    loop, process, failed = new_loop(is_fast=False), mock.Mock(pid=1), list[Any]()
    context = mock.Mock(Process=mock.Mock(return_value=process))
    monkeypatch.setattr(multiprocessing, "get_context", lambda name: context)
    monkeypatch.setattr(os, "pidfd_open", none_is_left)
    before = psutil.Process().num_fds()
    subject = Forker(loop, Options("test"), fleets.journal, lambda slot: True, lambda slot, error: failed.append(error))
    subject.fork(WorkerSlot(0, {}))
    eventually(lambda: turn(loop) or failed)
    assert [error.errno for error in failed] == [errno.EMFILE]
    process.kill.assert_called_once()
    failed.clear()
    context.reset_mock()
    assert psutil.Process().num_fds() <= before
    subject.close()
    loop.close()


# -- the plans of workers and engine processes ----------------------------------------------------


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the process-wide settings that were changed."""
    names: list[str] = []
    monkeypatch.setattr(worker, "limit_threads", lambda: names.append("threads"))
    monkeypatch.setattr(worker, "keep_freed_memory", lambda: names.append("malloc"))
    return names


def test_making_a_plan_changes_no_process_wide_setting(done: list[str]) -> None:
    options = parse_options(["x.toml", "--max-inflight", "7", "--import", "no_such_module"])
    tables: Any = {"global": {}, "a": {"backend": "Identity"}}
    assert list(make_plan(options, tables, 1).plans) == ["a"]
    assert tables["global"]["max_inflight"] == 7
    assert done == []


@pytest.mark.parametrize(
    ("flags", "shared", "workers", "engines"),
    [("--workers=1", False, 1, 1), ("--workers=4", False, 4, 1), ("--workers=4 --engines=2", True, 4, 2)],
)
def test_cores_are_divided_among_the_processes_that_run_a_node(
    flags: str, shared: bool, workers: int, engines: int
) -> None:
    options = parse_options(["x.toml", *flags.split()])
    tables: Any = {"global": {}, "a": {"backend": "Identity", "shared": shared}}
    assert make_plan(options, tables, options.workers).plans["a"].processes == workers
    assert engine_processes(options, tables) == engines


@pytest.mark.parametrize(
    ("flags", "backend", "expected"),
    [
        ("--workers=3 --engines=2 --devices=0,1", "Identity", 3),  # no more than workers
        ("--workers=8 --engines=2 --devices=0,1", "Identity", 4),
        ("--workers=8", "S[ResizeTensor,TensorrtTensor]", 1),
        ("--workers=8", "SyncTensor[S[DecodeTensor,ResizeTensor]]", 2),
        ("--workers=8 --engines=1", "DecodeTensor", 1),
    ],
)
def test_default_number_of_engine_processes(flags: str, backend: str, expected: int) -> None:
    options = parse_options(["x.toml", *flags.split()])
    assert engine_processes(options, {"a": {"backend": backend, "shared": True}}) == expected
