"""Who is started, replaced and given up when, which engine process a worker uses, and how processes are forked."""

from __future__ import annotations

import errno
import multiprocessing
import os
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import psutil
import pytest
from kit.services import turn
from torchpipe_server.front.journal import Journal
from torchpipe_server.front.loop import new_loop
from torchpipe_server.options import Options, parse_options
from torchpipe_server.supervisor.fleet import FIRST_DELAY, START_ATTEMPTS, Fleet
from torchpipe_server.supervisor.forker import Forker
from torchpipe_server.supervisor.generation import MOST_CHANGES, Generation, WorkerSlot
from torchpipe_server.worker import worker
from torchpipe_server.worker.service import engine_processes, make_plan

import torchpipe_py.malloc
from torchpipe_py import Overloaded

SHARED = {"global": {}, "model": {"backend": "Identity", "shared": True}}


class Fleets:
    """A `Fleet` that starts nothing: `started` has the workers that it wanted to start, `failed` its last words."""

    def __init__(self) -> None:
        self.loop, self.journal = new_loop(is_fast=False), Journal(1)
        self.started: list[int] = []
        self.failed: list[str] = []

    def make(self, tables: Any = SHARED, **options: Any) -> Fleet:
        connections = mock.Mock(journal=self.journal, died=lambda child: 0)
        fleet = Fleet(self.loop, Options("test", **options), connections, tables, lambda: tables, self.failed.append)
        fleet._forker.fork = lambda slot: self.started.append(slot.index)  # type: ignore[method-assign]
        return fleet

    def die(self, fleet: Fleet, slot: WorkerSlot, **changes: Any) -> None:
        dying = {"stats": {}, "clients": set(), "failure": "", "reason": "died", "answered": True}
        slot.child = mock.Mock(**{"has_served": False, "ready_at": 0.0, **dying, **changes})
        fleet._ended(slot.child)


@pytest.fixture
def fleets() -> Iterator[Fleets]:
    made = Fleets()
    yield made
    made.loop.close()
    made.journal.close()


def test_a_worker_that_served_is_replaced_at_once_however_often_it_dies(fleets: Fleets) -> None:
    """A client that keeps sending what kills a worker must not keep the others waiting."""
    fleet = fleets.make(workers=2)
    fleet.has_begun = True
    for _ in range(50):
        fleets.die(fleet, fleet.now.workers[0], has_served=True, ready_at=time.monotonic())
    assert fleets.started == [0] * 50
    assert fleet.is_recovering
    assert (fleet.now.workers[0].restarts, fleet.restarts) == (50, {"died": 50})


def test_a_worker_that_dies_without_a_connection_is_replaced_later(fleets: Fleets) -> None:
    fleet = fleets.make(workers=2)
    fleet.has_begun = True
    fleets.die(fleet, fleet.now.workers[0], ready_at=time.monotonic())
    assert (fleets.started, fleet.is_recovering) == ([], False)
    turn(fleets.loop, 2 * FIRST_DELAY)
    assert fleets.started == [0]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN])
def test_a_start_for_which_the_system_has_nothing_left_is_no_failed_one(fleets: Fleets, number: int) -> None:
    """However often: a worker is given up for what is wrong with it."""
    fleet = fleets.make(workers=1)
    for _ in range(2 * START_ATTEMPTS):
        fleet._forked(fleet.now.workers[0], OSError(number, os.strerror(number)))
    assert (fleet.now.workers[0].failures, fleets.failed) == (0, [])
    fleet._forked(fleet.now.workers[0], OSError(errno.ESRCH, "it is gone"))
    assert fleet.now.workers[0].failures == 1


def test_who_changes_the_configuration_is_told_once_what_came_of_it(fleets: Fleets) -> None:
    fleet, told = fleets.make({}, workers=1), []
    with pytest.raises(Overloaded, match="starting or stopping"):
        fleet.change(dict, told.append)
    fleet.has_begun = True
    for _ in range(1 + MOST_CHANGES):
        fleet.change(lambda: {"global": {}}, told.append)
    with pytest.raises(Overloaded, match=f"more than {MOST_CHANGES} changes wait"):
        fleet.change(dict, told.append)
    fleet.drain()
    fleet._not_forked(fleet._next.workers[0], OSError(errno.EPERM, "not any more"))
    turn(fleets.loop, 0.01)
    assert told == ["the service is stopping"] * (1 + MOST_CHANGES)


def test_a_service_whose_workers_would_wait_for_ever_for_an_engine_process_ends(fleets: Fleets) -> None:
    """One of two is killed whenever it starts; workers are started when both are ready."""
    fleet = fleets.make(workers=2, engines=2)
    ready, dying = fleet.now.engines
    ready.child = mock.Mock(is_ready=True, clients=set())
    for _ in range(START_ATTEMPTS):
        assert fleets.failed == []
        fleets.die(fleet, dying)
    assert fleets.failed == [f"engine process 1 cannot be started, after {START_ATTEMPTS} attempts"]


def test_a_reload_ends_when_the_engine_process_that_goes_on_is_given_up(fleets: Fleets) -> None:
    """Its workers would wait for that one for ever, and the service would not end while they do."""
    fleet = fleets.make(workers=2)
    for slot in fleet._slots:
        slot.child = mock.Mock(is_ready=True, clients=set())
    fleet.has_begun = True
    fleet.reload()
    assert fleet._next is not None
    assert fleet._next.engines == fleet.now.engines
    for _ in range(START_ATTEMPTS):
        assert (fleets.failed, fleet._next is None) == ([], False)
        fleets.die(fleet, fleet.now.engines[0])
    assert fleet._next is None
    assert fleets.failed == [f"no engine process can be started, after {START_ATTEMPTS} attempts each"]


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
def test_workers_share_the_engine_processes_of_their_device(
    args: str, engines: list[int], line: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = parse_options(["x.toml", *args.split()])
    generation = Generation(SHARED, options)
    used = [generation.engine_of(worker) for worker in generation.workers]
    assert [engine.index for engine in used if engine is not None] == engines
    assert caplog.messages == ([line] if line else [])


def none_is_left(pid: int) -> int:
    raise OSError(errno.EMFILE, "none is left")


def test_a_process_for_which_no_descriptor_is_left_is_ended(fleets: Fleets, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise nobody would know of it, and nobody start another one."""
    process, failed = mock.Mock(pid=1), list[Any]()
    context = mock.Mock(Process=mock.Mock(return_value=process))
    monkeypatch.setattr(multiprocessing, "get_context", lambda name: context)
    monkeypatch.setattr(os, "pidfd_open", none_is_left)
    before = psutil.Process().num_fds()
    subject = Forker(
        fleets.loop, Options("test"), fleets.journal, lambda slot: True, lambda slot, error: failed.append(error)
    )
    subject._fork(WorkerSlot(0, {}))
    turn(fleets.loop)
    assert [error.errno for error in failed] == [errno.EMFILE]
    process.kill.assert_called_once()
    failed.clear()
    context.reset_mock()
    assert psutil.Process().num_fds() <= before
    subject.close()


# -- what a worker and an engine process make of the configuration ----------------------------------------------------


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done to the process."""
    names: list[str] = []
    monkeypatch.setattr(worker, "limit_threads", lambda: names.append("threads"))
    monkeypatch.setattr(torchpipe_py.malloc, "keep_freed_memory", lambda: names.append("malloc"))
    return names


def test_a_plan_is_made_without_a_change_of_the_process(done: list[str]) -> None:
    options = parse_options(["x.toml", "--max-inflight", "7", "--import", "no_such_module"])
    tables: Any = {"global": {}, "a": {"backend": "Identity"}}
    assert list(make_plan(options, tables, 1).plans) == ["a"]
    assert tables["global"]["max_inflight"] == 7
    assert done == []


@pytest.mark.parametrize(
    ("flags", "shared", "workers", "engines"),
    [("--workers=1", False, 1, 1), ("--workers=4", False, 4, 1), ("--workers=4 --engines=2", True, 4, 2)],
)
def test_the_cores_are_divided_among_the_processes_that_run_a_node(
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
def test_engine_processes_by_default(flags: str, backend: str, expected: int) -> None:
    options = parse_options(["x.toml", *flags.split()])
    assert engine_processes(options, {"a": {"backend": backend, "shared": True}}) == expected
