"""Shared nodes: a pipe that runs them for several processes, and the pipes of these processes, which use it."""

from __future__ import annotations

import os
import select
import socket
import threading
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager
from functools import partial
from math import inf
from time import perf_counter
from typing import Any

from torchpipe_py.backends.base import Data
from torchpipe_py.errors import Failure, describe, log_failure, logger
from torchpipe_py.keys import TASK_DATA_KEY, TASK_NODE_NAME_KEY, TASK_RESULT_KEY
from torchpipe_py.plan.binding import BackendPlan
from torchpipe_py.plan.build import Pipeline
from torchpipe_py.plan.sharing import Section, engine_part, sections, worker_part
from torchpipe_py.proc.backends import Remote
from torchpipe_py.proc.child import keep_from_forks
from torchpipe_py.proc.client import ENDED, EngineClient, receive_fds, watch_on
from torchpipe_py.proc.codec import ItemOutcome, Packed, loaded_torch, pack_outcomes
from torchpipe_py.proc.link import (
    DONE,
    MOST_SLOTS,
    SLEEP_SECONDS,
    Bell,
    Header,
    Link,
    barrier,
    new_bell,
    require_machine,
)
from torchpipe_py.runtime.pipe import pipe

__all__ = ["EngineClient", "EngineServer", "pipe_of_worker", "watch_on"]


def pipe_of_worker(pipeline: Pipeline, engine: EngineClient) -> pipe:
    """The pipe of a worker whose shared nodes ``engine`` runs."""

    def remote(section: Section, label: str) -> BackendPlan:
        plans = [pipeline.plans[name] for name in section.nodes]
        read = [None if plan.jumps() else plan.keys_read() for plan in plans]
        keys = None if None in read else frozenset().union(*[each for each in read if each is not None])
        return BackendPlan(Remote, label, {"engine": engine, "section": section.head, "reads": keys})

    return pipe(worker_part(pipeline, remote))


class EngineServer:
    """Runs the shared nodes of a plan for the workers that are attached to it.

    The thread that forms the next batch takes requests from shared memory; while no thread does, the workers ring a
    thread that takes them. The thread that finishes a request writes its answer there. So no thread wakes for a
    request while all instances compute. A batch may hold requests of all workers.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._heads = [section.head for section in sections(pipeline)]
        self._bell = Bell(new_bell())  # before code that may raise, since ``__del__`` closes it
        require_machine("an engine process")
        self._links: dict[int, WorkerLink] = {}
        self._new: list[socket.socket] = []
        self._is_closed = False
        self._answered = Answered()
        self._taking = threading.Lock()  # guards taking requests and ``_sleepers``
        self._sleepers: set[object] = {None}  # nodes whose leader sleeps or soon will; None if some have no leader
        self._bell.await_ring(True)
        self.pipe = pipe(engine_part(pipeline), source=self)
        # NOTE: a custom backend may keep an array after ``forward`` and gets a copy: the next request reuses the slot.
        self._copies = self.pipe.has_own_code
        self._section_table = {head: (index, self.pipe.signature(head)) for index, head in enumerate(self._heads)}
        if self.pipe.forms_batches_at_entry:
            self._sleepers.discard(None)
        self._poller = select.poll()
        self._poller.register(self._bell.fd, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="torchpipe-slots", daemon=True)
        self._thread.start()

    def attach(self, sock: socket.socket) -> None:
        """Serve the worker at the other end until it ends."""
        self._new.append(sock)
        self._bell.wake()

    @property
    def workers(self) -> int:
        """Number of attached workers."""
        return len(self._links) + len(self._new)

    def close(self, timeout: float | None = None) -> bool:
        """Accept no further request, finish running batches; see ``pipe.close``."""
        self._is_closed = True
        self._bell.wake()
        self._thread.join()
        is_closed = self.pipe.close(timeout)
        for link in self._links.values():
            link.end()
        for sock in self._new:
            sock.close()
        return is_closed

    def __del__(self) -> None:
        os.close(self._bell.fd)

    # -- incoming requests: ``Source`` of the pipe's nodes --------------------------------------------------------

    def fetch(self, node: object) -> None:
        """Submit all waiting requests. The node's leader calls it again before it sleeps."""
        with self._taking:
            if node in self._sleepers:
                self._sleepers.remove(node)
                self._bell.await_ring(bool(self._sleepers))
            self._take()

    def announce(self, node: object) -> bool:
        """The node's leader will sleep: let workers ring for new requests; returns whether any wait now."""
        with self._taking:
            if node not in self._sleepers:
                self._sleepers.add(node)
                self._bell.await_ring(True)
            barrier()
            return any(link.has_work() for link in self._links.values())

    def together(self) -> AbstractContextManager[None]:
        """A context in which a worker is rung once for consecutive answers of the calling thread."""
        return self._answered

    def _run(self) -> None:
        while not self._is_closed:
            try:
                self._round()
            except Exception as error:
                log_failure("cannot read a message from a worker", error)

    def _round(self) -> None:
        while self._new:
            try:
                link = WorkerLink(self._new[0], self._answered)
                self._poller.register(link, select.POLLIN)
                with self._taking:
                    self._links[link.fileno()] = link
            finally:
                self._new.pop(0)  # NOTE: not earlier: ``workers`` must not be 0 while one is being attached
        for fd in self._bell.wait(self._poller, SLEEP_SECONDS):
            link = self._links[fd]
            with self._taking:
                if not link.handshake(self._section_table, self._bell):
                    self._poller.unregister(link)
                    del self._links[fd]
                    link.end()
        with self._taking:
            self._take()

    def _take(self) -> None:
        if self._is_closed:
            return
        with self.together():
            for link in self._links.values():
                try:
                    self._take_from(link)
                    link.answer_abandoned()
                except Exception as error:
                    log_failure("cannot read a message from a worker", error)

    def _take_from(self, link: WorkerLink) -> None:
        if not link.has_work():
            return
        asked, abandoned = link.slots.take()
        for header, slot, number in asked:
            self._begin(link, header, slot, number)
            # NOTE: perhaps before it was written, so not in the next ``take``.
            if link.slots.is_abandoned(slot, number):
                link.abandon(slot, number)
        for slot, number in abandoned:
            link.abandon(slot, number)

    def _begin(self, link: WorkerLink, header: Header, slot: int, number: int) -> None:
        now = perf_counter()
        try:
            item: Data = link.slots.read(slot, header, self._copies)[0]
            before = dict(item)
            item[TASK_NODE_NAME_KEY] = self._heads[header.kind]
            answer = partial(self._answer, link, slot, number, before, now)
            link.keep(
                slot, number, self.pipe.dispatch(item, answer, None if header.second == inf else header.second - now)
            )
        except Exception as error:
            link.answer(slot, number, Failure.of(error), now)

    def _answer(
        self, link: WorkerLink, slot: int, number: int, before: Data, taken: float,
        data: Data, error: BaseException | None,
    ) -> None:  # fmt: skip
        if isinstance(error, GivenUpError):
            return  # see ``WorkerLink.abandon``
        try:
            message = _outcome(before, data) if error is None else Failure.of(error)
        except Exception as failure:
            message = Failure.of(failure)
        link.answer(slot, number, message, taken)


class Answered(threading.local, AbstractContextManager[None]):
    """The worker that a thread has answered but not rung yet. Waking another process may take as long as an answer."""

    _waits = False
    _last: Link | None = None

    def __enter__(self) -> None:
        self._waits = True

    def __exit__(self, *error: object) -> None:
        self._waits = False
        self.ring(None)

    def ring(self, link: Link | None) -> None:
        """The worker of ``link`` has an answer: ring the previous worker, and this one too unless more may come."""
        # A batch holds the requests of a worker in a row, as they are taken together.
        last, self._last = self._last, link
        if last is not None and last is not link:
            last.other.ring()
        if link is not None and not self._waits:
            self._last = None
            link.other.ring()


class GivenUpError(CancelledError):
    """Ends a request that the worker has abandoned."""


class WorkerLink:
    """An engine process's side of a worker: a socket, and ``slots`` once the link is set up."""

    slots: Link

    def __init__(self, sock: socket.socket, answered: Answered) -> None:
        keep_from_forks(sock)
        sock.setblocking(False)
        self._sock, self._answered = sock, answered
        self._bell: Bell | None = None
        self._is_over = False
        self._tickets: list[tuple[int, Any] | None] = [None] * MOST_SLOTS
        self._abandoned: list[tuple[int, int, Any]] = []

    def fileno(self) -> int:
        """A descriptor that is readable when the worker has sent something or has ended."""
        return self._sock.fileno()

    def handshake(self, section_table: Any, bell: Bell) -> bool:
        """Map the worker's memory, and send it the sections and the bell to ring; ``False`` if it has ended or cannot
        be linked.
        """
        fds: list[int] = []
        try:
            memory_fd, bell_fd = receive_fds(self._sock, 2, fds)
            if self._bell is not None:
                return False
            slots = Link(memory_fd, fds=fds)
            slots.other = Bell(bell_fd, slots.asker_asleep)
            [(_, slot, number)], _ = slots.take()
            slots.answer(slot, number, Packed.of(section_table), DONE, perf_counter())
            bell.add(slots.answerer_asleep)
            self.slots, self._bell = slots, bell
            socket.send_fds(self._sock, [b"bell"], [bell.fd])
        except ENDED:
            return False
        except (OSError, ValueError) as error:
            logger.error("a worker cannot be linked: %s", describe(error))
            return False
        return True

    def has_work(self) -> bool:
        """Whether the worker has new requests, or abandoned some."""
        return self._bell is not None and self.slots.has_work()

    def keep(self, slot: int, number: int, ticket: Any) -> None:
        """Store the pipe's ticket for the request of a slot; the request may already be over."""
        self._tickets[slot] = number, ticket
        if ticket.is_over:
            self._tickets[slot] = None

    def abandon(self, slot: int, number: int) -> None:
        """Drop a request that the worker abandoned; ``answer_abandoned`` answers it."""
        kept = self._tickets[slot]
        if kept is not None and kept[0] == number and kept[1].cancel(GivenUpError()):
            self._abandoned.append((slot, number, kept[1]))

    def answer_abandoned(self) -> None:
        """Answer the dropped requests that no backend is running."""
        # NOTE: after the answer the worker reuses the slot for its next request; a backend that still used the arrays
        # of this one, perhaps changing them in place, would corrupt the next one. A node first records a request that
        # it takes and then checks whether it is over: a request that is over and not taken now will never run.
        if self._abandoned:
            dropped, self._abandoned = self._abandoned, []
            for slot, number, ticket in dropped:
                if ticket.is_running:
                    self._abandoned.append((slot, number, ticket))
                else:
                    self.answer(slot, number, Failure.of(GivenUpError()), perf_counter())

    def answer(self, slot: int, number: int, message: ItemOutcome | Failure, taken: float) -> None:
        """Send the worker the outcome of a request."""
        self._tickets[slot] = None
        if self._is_over:
            return
        if isinstance(message, ItemOutcome):
            try:
                self.slots.answer(slot, number, pack_outcomes([message]), DONE, taken)
            except Exception as error:
                message = Failure.of(error)
        if isinstance(message, Failure):
            self.slots.fail(slot, number, message, taken)
        self._answered.ring(self.slots)

    def end(self) -> None:
        """Drop the remaining requests of a worker that has ended."""
        self._is_over = True
        for kept in [*self._tickets]:
            if kept is not None:
                kept[1].cancel()
        if self._bell is not None:
            self._bell.remove(self.slots.answerer_asleep)
        self._sock.close()


def _outcome(before: Data, data: Data) -> ItemOutcome:
    """The outcome of a request's dict, to be sent to the worker.

    If there is a result, ``data`` stays as the worker sent it: the ``data`` of a later node may be on the GPU.
    """
    if TASK_NODE_NAME_KEY in before:
        data[TASK_NODE_NAME_KEY] = before[TASK_NODE_NAME_KEY]
    else:
        data.pop(TASK_NODE_NAME_KEY, None)  # a backend may have cleared the dict
    if TASK_RESULT_KEY in data and TASK_DATA_KEY in data:
        data[TASK_DATA_KEY] = before[TASK_DATA_KEY]
    outcome = ItemOutcome.of(before, data, keeps_arrays=True)
    return ItemOutcome(_on_cpu(outcome.changed), outcome.kept)


def _on_cpu(data: Data) -> Data:
    """The dict without tensors on a device, which cannot be sent to another process."""
    torch = loaded_torch()
    if torch is None:
        return data

    def moved(value: Any) -> Any:
        kind = type(value)
        if kind is list or kind is tuple:
            return kind([moved(each) for each in value])
        return value.cpu() if isinstance(value, torch.Tensor) else value

    return {key: moved(value) for key, value in data.items()}
