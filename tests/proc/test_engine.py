"""Shared nodes in one process: an engine, and workers whose requests it runs."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import select
import socket
import sys
import threading
from collections import Counter
from concurrent.futures import CancelledError
from operator import le
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Register
from kit.backends import Gate
from kit.engines import Watcher, Worker, engine_of, link, workers_of
from kit.waits import WAIT, error_of, eventually, in_threads, outcome, run

from torchpipe_py import Backend, ItemBackend, Param, PipeClosed, WorkerDied
from torchpipe_py import pipe as plain_pipe
from torchpipe_py.errors import EngineUnavailable
from torchpipe_py.plan.build import plan_pipeline
from torchpipe_py.proc import client
from torchpipe_py.proc.engine import EngineClient, EngineServer
from torchpipe_py.proc.link import MOST_SLOTS, Link

Data = dict[str, Any]


def shared(backend: str, **keys: Any) -> dict[str, Any]:
    return {"a": {"backend": backend, "shared": True, **keys}}


def queued(server: EngineServer) -> int:
    return int(server.pipe.stats()["nodes"]["a"]["queued"])


def lose(worker: Worker) -> None:
    """Cut the way between the two, as the death of either does."""
    with socket.socket(fileno=os.dup(worker.way.fileno())) as way:
        way.shutdown(socket.SHUT_RDWR)


# -- results --------------------------------------------------------------------------------------------------------


GRAPHS: dict[str, dict[str, Any]] = {
    "a fork, a join, a section of two nodes": {
        "root": {"by": 2, "next": "left,right"},
        "left": {"by": 3, "next": "more", "shared": True},
        "more": {"by": 5, "next": "join", "shared": True},
        "right": {"by": 7, "next": "join", "shared": True},
        "join": {"by": 11, "map": "more[result:data],right[result:other]", "next": "last", "shared": True},
        "last": {"by": 13, "next": "end", "shared": True},
        "end": {"by": 17},
    },
    "a filter that decides of the first shared node alone": {
        "root": {"by": 2, "next": "fallback"},
        "fallback": {"by": 3, "next": "more", "filter": "or", "shared": True},
        "more": {"by": 5, "next": "last", "shared": True},
        "last": {"by": 7, "next": "end", "shared": True},
        "end": {"by": 11, "map": "more[data:before],last[result:data]"},
    },
}


class Scale(ItemBackend):
    """``result`` is ``data`` times ``by``; nothing for what is negative."""

    by = Param(int, 1, doc="factor")

    def forward_item(self, item: Data) -> None:
        item[f"seen_{self.by}"] = item["data"].shape
        if item["data"][0] >= 0:
            item["result"] = item["data"] * self.by


@pytest.mark.parametrize("graph", GRAPHS)
def test_results_equal_those_of_a_plain_pipe(register: Register, graph: str) -> None:
    """Two workers, many threads, arrays in and out."""
    config = {"global": {"backend": register(Scale), "instance_num": 2}, **GRAPHS[graph]}

    def request(number: int) -> Data:
        return {"data": np.full(3 + number % 2000, number - 5, np.int64), "number": number, "text": "ä"}

    def comparable(data: Data) -> Data:
        return {key: value.tolist() if isinstance(value, np.ndarray) else str(value) for key, value in data.items()}

    expected = [request(number) for number in range(200)]
    with plain_pipe(config) as plain:
        plain(expected)
    found = [request(number) for number in range(200)]
    with workers_of(config, 2) as workers:
        in_threads(8, lambda thread: [workers[thread % 2].pipe(found[at]) for at in range(thread, 200, 8)] and None)
        assert [worker.pipe.stats()["inflight"] for worker in workers] == [0, 0]
    for mine, theirs in zip(found, expected, strict=True):
        assert comparable(mine) == comparable(theirs)


@pytest.mark.parametrize("array", [np.zeros(3), torch.zeros(3)], ids=["array", "tensor"])
def test_result_that_is_the_changed_data_leaves_the_callers_data_alone(register: Register, array: Any) -> None:
    class Draw(ItemBackend):
        """``result`` is ``data``, in which it has written, as the drawing functions of OpenCV do."""

        def forward_item(self, item: Data) -> None:
            item["data"][:] = 1
            item["result"] = item["data"]

    with workers_of(shared(register(Draw))) as (worker,):
        data = worker.pipe({"data": array})
        assert type(data["result"]) is type(array)
        assert data["result"].tolist() == [1, 1, 1]
        assert data["data"] is array
        assert array.tolist() == [0, 0, 0]


# -- batches --------------------------------------------------------------------------------------------------------


def test_batch_holds_requests_of_all_workers(register: Register) -> None:
    gate = Gate(8)
    with workers_of(shared(register(gate.backend)), 2) as workers, gate:
        held = gate.hold(workers[0].pipe, {"data": "first"})
        futures = [worker.pipe.submit({"data": number}) for worker in workers for number in range(3)]
        eventually(lambda: queued(workers[0].server) == 6)
        gate.open()
        for future in (held, *futures):
            outcome(future)
    assert [len(batch) for batch in gate.batches] == [1, 6]


def test_takes_the_first_request_of_a_node_while_another_computes(
    register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchpipe_py.proc.engine.SLEEP_SECONDS", 10 * WAIT)
    gate = Gate(blocks=lambda data: data == "held")
    name = register(gate.backend)
    with workers_of({node: {"backend": name, "shared": True} for node in "ab"}) as (worker,), gate:
        outcome(worker.pipe.submit({"data": 1, "node_name": "a"}))
        held = gate.hold(worker.pipe, {"data": "held", "node_name": "a"})
        assert outcome(worker.pipe.submit({"data": 2, "node_name": "b"}))["result"] == 2
        gate.open()
        outcome(held)


# -- requests that end before their turn -----------------------------------------------------------------------------


def test_request_abandoned_while_it_is_written_is_not_run(register: Register, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its deadline passes, say: the engine process hears of that before it hears of the request."""
    gate, ask = Gate(), Link.ask
    with workers_of(shared(register(gate.backend))) as (worker,), gate:
        held = gate.hold(worker.pipe, {"data": "held"})
        (way,) = worker.server._links.values()

        def ask_late(asked: Link, slot: int, number: int, *rest: Any) -> None:
            asked.abandon(slot, number)
            asked.other.ring()
            eventually(lambda: not way.has_work())
            ask(asked, slot, number, *rest)

        monkeypatch.setattr(Link, "ask", ask_late)
        given_up = worker.pipe.submit({"data": "given up"})
        assert isinstance(error_of(given_up), CancelledError)
        gate.open()
        assert outcome(held)["result"] == "held"
    assert gate.batches == [["held"]]


def test_request_abandoned_while_it_runs_keeps_its_slot(register: Register) -> None:
    """Or its backend, which changes arrays in place, would change the next request's."""
    gate = Gate(blocks=lambda data: data[0] == 0)

    class InPlace(gate.backend):  # type: ignore[name-defined, misc]
        """``result`` is the first of ``data``, which is one more."""

        def forward(self, items: list[Data]) -> None:
            super().forward(items)
            for item in items:
                item["data"] += 1
                item["result"] = float(item["data"][0])

    with workers_of(shared(register(InPlace))) as (worker,), gate:
        given_up = gate.hold(worker.pipe, {"data": np.zeros(5000)})
        assert given_up.cancel()
        futures = [worker.pipe.submit({"data": np.full(5000, number)}) for number in (10.0, 20.0)]
        eventually(lambda: queued(worker.server) == 2)
        assert worker.engine.pending() == 3
        gate.open()
        assert [outcome(future)["result"] for future in futures] == [11.0, 21.0]
        eventually(lambda: worker.engine.pending() == 0)


@pytest.mark.parametrize("has_slot", [True, False])
def test_abandoned_request_no_longer_counts_as_load(register: Register, has_slot: bool) -> None:
    """Or company at a node behind would be waited for; and while the engine process hangs, memory would grow."""
    gate = Gate()
    with workers_of(shared(register(gate.backend))) as (worker,), gate:
        held = gate.hold(worker.pipe, {"data": "held"})
        if not has_slot:
            worker.engine.most = 0
        ended: list[Any] = []
        given_up = worker.pipe.dispatch({"data": "given up"}, lambda data, error: ended.append(error))
        eventually(lambda: queued(worker.server) == has_slot)
        assert worker.pipe.stats()["nodes"]["a"]["queued"] == 1
        assert given_up.cancel()
        assert [type(error) for error in ended] == [CancelledError]
        assert worker.pipe.stats()["nodes"]["a"]["queued"] == 0
        assert not worker.engine.is_waiting()
        eventually(lambda: worker.server.pipe.stats()["inflight"] == 1)
        gate.open()
        assert outcome(held)["result"] == "held"
        eventually(lambda: worker.pipe.stats()["nodes"]["a"]["busy"] == 0)
    assert gate.batches == [["held"]]


# -- ends -----------------------------------------------------------------------------------------------------------


def test_closed_engine_finishes_running_requests_and_fails_others(register: Register) -> None:
    gate = Gate()
    config = shared(register(gate.backend))
    server = EngineServer(plan_pipeline(config))
    worker = Worker(config, server)
    with gate:
        held = gate.hold(worker.pipe, {"data": "first"})
        futures = [worker.pipe.submit({"data": number}) for number in range(5)]
        eventually(lambda: queued(server) == 5)
        closer = threading.Thread(target=server.close)
        closer.start()
        assert [type(error_of(future)) for future in futures] == [PipeClosed] * 5
        gate.open()
        assert outcome(held)["result"] == "first"
    closer.join(WAIT)
    assert not closer.is_alive()
    assert isinstance(error_of(worker.pipe.submit({"data": 1})), (WorkerDied, EngineUnavailable))
    worker.close()


def test_dead_engine_fails_its_requests_and_the_next_runs_the_others(
    register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what waited is run by the next one: nothing is lost, and nothing runs twice."""
    monkeypatch.setattr(client, "HOLD_SECONDS", WAIT)
    gate = Gate(8)
    config = shared(register(gate.backend))
    with gate, workers_of(config) as (worker,), engine_of(config) as second:
        ends: Counter[int] = Counter()
        futures = [gate.hold(worker.pipe, {"data": 0})]
        futures += [worker.pipe.submit({"data": number}) for number in range(1, 200)]
        for number, future in enumerate(futures):
            future.add_done_callback(lambda _, number=number: ends.update([number]))
        eventually(lambda: queued(worker.server) == MOST_SLOTS - 1)
        lose(worker)
        for future in futures[:MOST_SLOTS]:
            error = error_of(future)
            assert (type(error), str(error)) == (WorkerDied, "the engine process died while it had the request")
        eventually(lambda: worker.server.pipe.stats()["inflight"] <= 1, "it keeps what nobody waits for")
        gate.open()
        link(worker, second)
        for number, future in enumerate(futures[MOST_SLOTS:], MOST_SLOTS):
            assert outcome(future)["result"] == number
        assert worker.pipe({"data": "more"})["result"] == "more"
        assert worker.pipe.stats()["inflight"] == 0
    assert ends == Counter(range(200))
    ran = Counter(data for batch in gate.batches for data in batch)
    assert ran == Counter([0, *range(MOST_SLOTS, 200), "more"])


def test_backend_may_keep_its_input(register: Register) -> None:
    class Before(Backend):
        """``result`` is ``data`` of the request before."""

        kept: Any = None

        def forward(self, items: list[Data]) -> None:
            for item in items:
                item["result"], self.kept = self.kept, item["data"]

    with workers_of(shared(register(Before))) as (worker,):
        items: list[Data] = [{"data": np.full((50, 50), number)} for number in range(4)]
        for item in items:
            worker.pipe(item)
    assert items[0]["result"] is None
    assert [int(item["result"].max()) for item in items[1:]] == [0, 1, 2]


@pytest.mark.parametrize("large", [False, True])
def test_answers_are_delivered_in_turns_and_once(
    register: Register, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    """By the thread that watches, one each time that the bell has rung; a large one by a thread of its own, which may
    still copy it when the engine process is gone.
    """
    monkeypatch.setattr(client, "SLEEP_SECONDS", WAIT)
    monkeypatch.setattr(client, "_TURN_SECONDS", 0.0)
    monkeypatch.setattr(client, "LARGE_BYTES", 0 if large else 2**22)
    goes_on, read, threads = threading.Event(), Link.read, list[str]()

    def read_late(link: Link, slot: int, *given: Any, **more: Any) -> Any:
        if threading.current_thread().name == "torchpipe-large-answer":
            assert goes_on.wait(WAIT)
        return read(link, slot, *given, **more)

    monkeypatch.setattr(Link, "read", read_late)
    watched: dict[int, Any] = {}
    gate = Gate(8, blocks=lambda data: data == 0)
    config = shared(register(gate.backend))
    with gate, engine_of(config) as server:
        worker = Worker(config, server, lambda fd, take: watched.update({fd: take} if take else {}))
        ((fd, take),) = watched.items()
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        futures = [gate.hold(worker.pipe, {"data": 0}), *[worker.pipe.submit({"data": number}) for number in (1, 2)]]
        for future in futures:
            future.add_done_callback(lambda _: threads.append(threading.current_thread().name))
        eventually(lambda: queued(server) == 2)
        gate.open()
        for done in range(1, 4):
            assert poller.poll(1000 * WAIT)
            take()
            assert len(threads) == (0 if large else done)
        lose(worker)
        eventually(lambda: not worker.engine.links)
        goes_on.set()
        assert [outcome(future)["result"] for future in futures] == [0, 1, 2]
        worker.close()
    assert threads == 3 * ["torchpipe-large-answer" if large else threading.current_thread().name]


def test_request_without_an_engine_fails_after_a_while(register: Register, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "HOLD_SECONDS", 0.01)
    with workers_of(shared("Identity")) as (worker,):
        lose(worker)
        eventually(lambda: not worker.engine.links)
        with pytest.raises(EngineUnavailable) as caught:
            worker.pipe({"data": 1})
        assert str(caught.value) == "the engine process has died, and the next one is not ready yet"
        assert caught.value.code == "unavailable"
        assert worker.pipe.stats()["inflight"] == 0
        # One that has come and does not say what it runs is no help.
        ours, theirs = socket.socketpair()
        with ours:
            worker.engine.attach(theirs)
            with pytest.raises(EngineUnavailable):
                worker.pipe({"data": 1})
            link(worker, worker.server)
        eventually(lambda: worker.engine.links)
        assert worker.pipe({"data": 1})["result"] == 1


def test_worker_reports_whether_it_is_linked(register: Register) -> None:
    linked: list[bool] = []
    watcher = Watcher()
    engine = EngineClient(watcher.watch, linked.append)
    with engine_of(shared(register(Scale))) as server:
        for _ in range(2):
            ours, theirs = socket.socketpair()
            server.attach(ours)
            assert engine.attach_and_wait(theirs)
            assert linked[-1] is True
            ours.shutdown(socket.SHUT_RDWR)
            eventually(lambda: linked[-1] is False)
        engine.close()
        watcher.close()


@pytest.mark.parametrize("call", ["memfd_create", "recv_fds", "mmap"])
def test_link_is_created_once_descriptors_or_memory_are_available(
    call: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config, told = shared("Identity"), list[bool]()
    number = errno.ENOMEM if call == "mmap" else errno.EMFILE
    module = {"recv_fds": socket, "mmap": mmap}.get(call, os)

    def fail(*args: Any) -> Any:
        if threading.current_thread().name != "torchpipe-engine":
            return real(*args)
        if call == "recv_fds":
            return (real(*args)[0], [], socket.MSG_CTRUNC, None)
        raise OSError(number, os.strerror(number))

    real = getattr(module, call)
    with engine_of(config) as server:
        engine = EngineClient(lambda fd, take: None, told.append)

        def meets() -> bool:
            ours, theirs = socket.socketpair()
            server.attach(ours)
            return engine.attach_and_wait(theirs)

        with monkeypatch.context() as patch:
            patch.setattr(module, call, fail)
            assert not meets()
        eventually(lambda: server.workers == 0)
        assert told == [True, False]
        assert meets()
        assert told[-1]
        engine.close()
    line = f"there is no link to the engine process: OSError: [Errno {number}] {os.strerror(number)}"
    assert [record.getMessage() for record in caplog.records] == [line]


FORK = """
import os, socket, warnings
warnings.simplefilter("ignore")
from torchpipe_py.proc.client import EngineClient
from torchpipe_py.proc.engine import Answered, WorkerLink

end, keep = os.pipe()

def fork():
    if os.fork() == 0:
        os.close(keep)
        os.read(end, 1)  # for as long as the parent lives
        os._exit(0)

client = EngineClient(lambda fd, take: None)
client._fail_late = fork
for make in (lambda sock: (WorkerLink(sock, Answered()), fork()), client._link):
    ours, theirs = socket.socketpair()
    try:
        client.is_closed = True
        made = make(ours)
    except EOFError:
        pass
    ours.close()
    theirs.settimeout(60)
    while theirs.recv(64):
        pass
"""


def test_process_forked_by_a_backend_does_not_hide_the_end_of_its_parent() -> None:
    """Or a worker would wait for an engine process that was killed, as long as a child of that one lives."""
    done = run(sys.executable, "-c", FORK)
    assert (done.returncode, done.stderr) == (0, "")


def test_dead_worker_leaves_nothing_behind(register: Register) -> None:
    gate = Gate()
    with workers_of(shared(register(gate.backend)), 2) as (gone, other), gate:
        held = gate.hold(other.pipe, {"data": "other"})
        futures = [gone.pipe.submit({"data": number}) for number in range(150)]
        eventually(lambda: queued(gone.server) == MOST_SLOTS)
        assert gone.pipe.close()
        assert {type(error_of(future)) for future in futures} == {PipeClosed}
        with pytest.raises(PipeClosed):
            gone.pipe({"data": 1})
        eventually(lambda: gone.engine.pending() == 0)
        gone.close()
        eventually(lambda: gone.server.pipe.stats()["inflight"] == 1)
        gate.open()
        assert outcome(held)["result"] == "other"
        assert other.pipe({"data": 1})["result"] == 1
        eventually(lambda: gone.server.workers == 1)
    assert gate.batches == [["other"], [1]]


def test_ended_links_leave_no_descriptor_or_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "HOLD_SECONDS", WAIT)

    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:torchpipe")

    with workers_of(shared("Identity")) as (worker,):
        worker.pipe({"data": 1})
        before = descriptors(), mapped(), threading.active_count()
        for cycle in range(15):
            lose(worker)
            eventually(lambda: not worker.engine.links)
            for index in range(2):  # neither says hello
                ends = socket.socketpair()
                (worker.engine, worker.server)[index].attach(ends[0])
                ends[1].close()
            link(worker, worker.server)
            assert worker.pipe({"data": cycle})["result"] == cycle
        eventually(lambda: worker.server.workers == 1)
        eventually(
            lambda: all(map(le, (descriptors(), mapped(), threading.active_count()), before)), "something is left"
        )
