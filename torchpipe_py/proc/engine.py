"""Shared nodes: a pipe that runs them for several processes, and pipes that leave them to it."""

from __future__ import annotations

import os
import pickle
import select
import socket
import threading
from contextlib import AbstractContextManager
from functools import partial
from math import inf
from time import perf_counter
from typing import Any

from torchpipe_py.backends.base import Data
from torchpipe_py.errors import Failure, log_failure
from torchpipe_py.keys import TASK_DATA_KEY, TASK_NODE_NAME_KEY, TASK_RESULT_KEY
from torchpipe_py.plan.binding import BackendPlan
from torchpipe_py.plan.build import Pipeline
from torchpipe_py.plan.sharing import Section, engine_part, sections, worker_part
from torchpipe_py.proc.process.outcome import ItemOutcome
from torchpipe_py.proc.process.transport import loaded_torch
from torchpipe_py.proc.shared.client import EngineClient
from torchpipe_py.proc.shared.engine_link import Answered, EngineLink, GivenUpError
from torchpipe_py.proc.shared.memory import SLEEP_SECONDS, BellMemory, Header, barrier, wait_for
from torchpipe_py.proc.shared.remote import Remote
from torchpipe_py.runtime.pipe import pipe

__all__ = ["EngineClient", "EngineServer", "pipe_of_worker"]


def pipe_of_worker(pipeline: Pipeline, engine: EngineClient) -> pipe:
    """The pipe of a worker whose shared nodes ``engine`` runs."""

    def remote(section: Section, label: str) -> BackendPlan:
        return BackendPlan(Remote, label, {"engine": engine, "section": section.head})

    return pipe(worker_part(pipeline, remote))


class EngineServer:
    """Runs the shared nodes of a plan for the workers that are attached to it.

    The thread that forms the next batch takes their requests from shared memory; while no thread does, they ring one
    that takes them. The thread that finishes a request writes its answer there. So no thread wakes for a request while
    all instances compute. A batch holds requests of all workers.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        heads = [section.head for section in sections(pipeline)]
        self.pipe = pipe(engine_part(pipeline))
        self._heads = heads
        # NOTE: what may keep an array beyond its ``forward`` gets a copy, since the next request comes into the slot.
        self._copies = self.pipe.has_own_code
        told = {head: (index, self.pipe.signature(head)) for index, head in enumerate(heads)}
        self._memory = BellMemory(pickle.dumps(told))
        self._bell = self._memory.bell
        self._links: dict[int, EngineLink] = {}
        self._new: list[socket.socket] = []
        self._is_closed = False
        self._answered = Answered()
        self._taking = threading.Lock()  # of requests, and of who may be asleep
        self._sleepers: set[object] = {None}  # lanes whose leader sleeps, or is about to, and None where some have none
        self._bell.await_ring(True)
        if self.pipe.draw_from(self):
            self._sleepers.discard(None)
        self._poller = select.poll()
        self._poller.register(self._bell.fd, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="torchpipe-slots", daemon=True)
        self._thread.start()

    def attach(self, sock: socket.socket) -> None:
        """Serve the worker at the other end, until that is gone."""
        self._new.append(sock)
        os.eventfd_write(self._bell.fd, 1)

    @property
    def workers(self) -> int:
        """How many are attached."""
        return len(self._links) + len(self._new)

    def close(self, timeout: float | None = None) -> bool:
        """Take no further request, finish the batches that run; see ``pipe.close``."""
        self._is_closed = True
        os.eventfd_write(self._bell.fd, 1)
        self._thread.join()
        is_closed = self.pipe.close(timeout)
        for link in self._links.values():
            link.end()
        for sock in self._new:
            sock.close()
        return is_closed

    # -- requests that come: ``Source`` of the pipe's lanes -------------------------------------------------------

    def fetch(self, lane: object) -> None:
        """Bring what is there. The lane's leader comes again before it sleeps."""
        with self._taking:
            if lane in self._sleepers:
                self._sleepers.remove(lane)
                self._bell.await_ring(bool(self._sleepers))
            self._take()

    def announce(self, lane: object) -> bool:
        """The lane's leader is about to sleep: bring what comes; whether something is there now."""
        with self._taking:
            if lane not in self._sleepers:
                self._sleepers.add(lane)
                self._bell.await_ring(True)
            barrier()
            return self._has_work()

    def together(self) -> AbstractContextManager[None]:
        """A worker is rung once for the answers that the calling thread writes to it in a row."""
        return self._answered

    def _run(self) -> None:
        while not self._is_closed:
            try:
                self._round()
            except Exception as error:
                log_failure("what comes from a worker cannot be taken", error)

    def _round(self) -> None:
        while self._new:
            try:
                link = EngineLink(self._new[0], self._answered)
                self._poller.register(link, select.POLLIN)
                with self._taking:
                    self._links[link.fileno()] = link
            finally:
                self._new.pop(0)  # NOTE: not before: ``workers`` must not be 0 while one comes
        for fd in wait_for((self._bell,), self._poller, SLEEP_SECONDS):
            link = self._links[fd]
            if not link.meet(self._memory):
                self._poller.unregister(link)
                with self._taking:
                    del self._links[fd]
                    link.end()
        with self._taking:
            self._take()

    def _has_work(self) -> bool:
        return any(link.has_work() for link in self._links.values())

    def _take(self) -> None:
        if self._is_closed:
            return
        with self.together():
            for link in self._links.values():
                try:
                    self._take_from(link)
                    link.answer_given_up()
                except Exception as error:
                    log_failure("what comes from a worker cannot be taken", error)

    def _take_from(self, link: EngineLink) -> None:
        if not link.has_work():
            return
        asked, given_up = link.take()
        for header, slot, number in asked:
            self._begin(link, header, slot, number)
            if link.memory.is_given_up(slot, number):  # NOTE: perhaps before it was written, and so not among the next
                link.give_up(slot, number)
        for slot, number in given_up:
            link.give_up(slot, number)

    def _begin(self, link: EngineLink, header: Header, slot: int, number: int) -> None:
        now = perf_counter()
        try:
            item: Data = link.memory.read(slot, header, self._copies)[0]
            before = dict(item)
            item[TASK_NODE_NAME_KEY] = self._heads[header.kind]
            answer = partial(self._answer, link, slot, number, before, now)
            link.keep(
                slot, number, self.pipe.dispatch(item, answer, None if header.second == inf else header.second - now)
            )
        except Exception as error:
            link.answer(slot, number, Failure.of(error), now)

    def _answer(
        self, link: EngineLink, slot: int, number: int, before: Data, taken: float,
        data: Data, error: BaseException | None,
    ) -> None:  # fmt: skip
        if isinstance(error, GivenUpError):
            return  # see ``EngineLink.give_up``
        try:
            message = _outcome(before, data) if error is None else Failure.of(error)
        except Exception as failure:
            message = Failure.of(failure)
        link.answer(slot, number, message, taken)


def _outcome(before: Data, data: Data) -> ItemOutcome:
    """What the worker is told of the dict of a request.

    Where there is a result, ``data`` stays what the worker sent: what a node behind the first had may be on the GPU.
    """
    if TASK_NODE_NAME_KEY in before:
        data[TASK_NODE_NAME_KEY] = before[TASK_NODE_NAME_KEY]
    else:
        data.pop(TASK_NODE_NAME_KEY, None)  # a backend may have cleared the dict
    if TASK_RESULT_KEY in data and TASK_DATA_KEY in data:
        data[TASK_DATA_KEY] = before[TASK_DATA_KEY]
    outcome = ItemOutcome.of(before, data, keeps_arrays=True)
    return ItemOutcome(outcome.kept, _on_cpu(outcome.changed))


def _on_cpu(data: Data) -> Data:
    """The dict without tensors on a device, which cannot go to another process."""
    torch = loaded_torch()
    if torch is None:
        return data

    def moved(value: Any) -> Any:
        kind = type(value)
        if kind is list or kind is tuple:
            return kind([moved(each) for each in value])
        return value.cpu() if isinstance(value, torch.Tensor) else value

    return {key: moved(value) for key, value in data.items()}
