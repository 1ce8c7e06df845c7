"""A worker's client for the engine process, which may be replaced."""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
from asyncio import AbstractEventLoop
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import chain
from math import inf
from time import perf_counter
from typing import Any, Protocol

from torchpipe_py.backends.signature import Signature
from torchpipe_py.errors import EngineUnavailable, WorkerDied, describe, log_failure, logger
from torchpipe_py.proc.child import keep_from_forks
from torchpipe_py.proc.codec import Packed
from torchpipe_py.proc.link import (
    MOST_SLOTS,
    SET_UP,
    SLEEP_SECONDS,
    Bell,
    Header,
    Link,
    Room,
    create_memory,
    new_bell,
    require_machine,
)
from torchpipe_py.proc.pool import Call, Pool

ROOM = Room(MOST_SLOTS, slot_bytes=2**28, kept_bytes=2**19)
"""Slots for requests; if all are in use, further requests wait in the worker."""

HOLD_SECONDS = 0.4
"""Seconds that a request waits for the next engine process after one has died."""

START_SECONDS = 60.0  # time for a ready engine process to report its sections
LARGE_BYTES = 2**22  # copying a larger answer takes milliseconds
_TURN_SECONDS = 0.02  # time for answers in one call of ``take``: the thread of ``watch`` has other work
_DIED = "the engine process has died, and the next one is not ready yet"
_LAST_CALL_WEIGHT = 1 / 16  # in the mean time of a call

ENDED = (EOFError, BrokenPipeError, ConnectionResetError)
"""Exceptions that a link raises if the other process has ended."""


class Watch(Protocol):
    """Calls ``take()`` on its thread whenever the descriptor is readable; ``None`` stops that.

    It may be called from any thread, and holds a reference to ``take`` until it has stopped.
    """

    def __call__(self, fd: int, take: Callable[[], object] | None) -> object: ...


def watch_on(loop: AbstractEventLoop, fd: int, take: Callable[[], object] | None) -> None:
    """A `Watch`, once ``loop`` is given: the loop calls ``take``."""
    change: tuple[Any, ...] = (loop.remove_reader, fd) if take is None else (loop.add_reader, fd, take)
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(*change)


class EngineClient(Pool):
    """Sends calls of any thread to the engine process; the thread of ``watch``, a shared event loop, takes the answers.

    A separate thread creates links, notices when the engine process ends, and takes leftover answers every
    ``SLEEP_SECONDS``; another thread copies a large answer. ``attach(sock)`` connects it to an engine process: the
    first one, or the next after one has died. ``set_linked(is_linked)`` is called from any thread: with true when a
    link exists or is being created, with false when there is none; then ``attach`` must be called again, with a socket
    to the next engine process, or to the same one if it is alive.
    """

    def __init__(self, watch: Watch, set_linked: Callable[[bool], object] = lambda is_linked: None) -> None:
        super().__init__(ROOM.slots, loses=True)
        self._watch, self._set_linked = watch, set_linked
        self._sock: socket.socket | None = None
        self._next: socket.socket | None = None
        self._is_attaching = self._has_sections = False
        self._unlinked_because = _DIED
        self._thread: threading.Thread | None = None
        self._rung = new_bell()
        self.sections: dict[str, tuple[int, Signature]] = {}
        self.figures = HandOverTimes()
        require_machine("a shared node")

    def attach(self, sock: socket.socket) -> None:
        """Use the engine process at the other end from now on, or as soon as the previous one has ended."""
        with self.changed:
            before, self._next = self._next, sock
            self._is_attaching = True
            self._set_linked(True)
            if before is not None:
                before.close()
            if self._thread is None:
                self._watch(self._rung, self._take_rung)
                self._thread = threading.Thread(target=self._run, name="torchpipe-engine", daemon=True)
                self._thread.start()
            self.changed.notify_all()

    def attach_and_wait(self, sock: socket.socket) -> bool:
        """Attach, and wait until the engine process has reported its sections; ``False`` if no link can be created."""
        self.attach(sock)
        with self.changed:
            self.changed.wait_for(lambda: self._has_sections or not self._is_attaching)
            return self._has_sections

    def section(self, head: str) -> tuple[int, Signature]:
        """The number of a section and its signature; waits until the engine process has reported them."""
        with self.changed:
            if not self.changed.wait_for(lambda: self._has_sections, START_SECONDS):
                raise EngineUnavailable(f"the engine process did not report its nodes within {START_SECONDS:g} s")
            return self.sections[head]

    def expected_wait(self) -> float:
        """Expected seconds of a new call, from the mean of recent calls; 0 if no call is under way."""
        return self.figures.recent if self.pending() else 0.0

    def close(self) -> None:
        """End the thread. Remaining calls get no answer."""
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(START_SECONDS)
            self._watch(self._rung, None)
        for sock in (self._sock, self._next):
            if sock is not None:
                sock.close()

    def hold_seconds(self) -> float:
        return HOLD_SECONDS

    def answered(self, call: Call, reply: Header) -> None:
        self.figures.answered(call, reply)

    def __del__(self) -> None:
        os.close(self._rung)  # NOTE: not earlier: the thread of ``watch`` may not know of the end yet

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self.is_closed:
            try:
                if self._sock is None:
                    self._connect()
                elif _is_readable(self._sock):
                    self._lose()
                else:
                    self._take_turn()
            except Exception as error:
                log_failure("cannot read a message from the engine process", error)

    def _connect(self) -> None:
        """Wait for an engine process, and meanwhile fail calls that have waited too long."""
        self._fail_late()
        with self.changed:
            sock, self._next = self._next, None
            if sock is None:
                first = min((call.until for call in chain(*self._queues)), default=inf)
                if not self.is_closed:
                    self.changed.wait(None if first == inf else max(0.0, first - perf_counter()))
                return
        try:
            link, sections = self._link(sock)
        except Exception as error:
            sock.close()
            if not isinstance(error, ENDED):
                self._unlinked_because = f"there is no link to the engine process: {describe(error)}"
                logger.error("%s", self._unlinked_because)
            with self.changed:
                self._is_attaching = self._next is not None
                self._set_linked(self._is_attaching)
                self.changed.notify_all()
            return
        self.add(link)
        with self.changed:
            self._sock, self._unlinked_because, self.sections = sock, _DIED, sections
            self._has_sections = True
            self._set_linked(True)
            self.changed.notify_all()

    def _link(self, sock: socket.socket) -> tuple[Link, dict[str, tuple[int, Signature]]]:
        """Wait until the engine process at the other end has reported its sections; returns the link and the sections.

        Raises one of ``ENDED`` if it ends first, another ``OSError`` if descriptors or memory run out.
        """
        keep_from_forks(sock)
        sock.setblocking(False)
        memory = create_memory(ROOM)
        link = Link(memory, ROOM, [memory])
        link.bell = Bell(self._rung, link.asker_asleep)
        link.bell.await_ring(True)  # always, since the waiting thread also waits for other events
        slot, number = link.take_slot(None)
        link.ask(slot, number, Packed.of(None), SET_UP, perf_counter(), inf)
        socket.send_fds(sock, [b"slots"], [memory, self._rung])
        while not _is_readable(sock):
            self._fail_late()
            if self.is_closed:
                raise EOFError
        (bell,) = receive_fds(sock, 1, link.fds)
        link.other = Bell(bell, link.answerer_asleep)
        link.take_answered()
        sections = link.read(slot, link.reply(slot), copies=True)
        link.free_slot(slot)
        return link, sections

    def _fail_late(self) -> None:
        self.fail_waiting(EngineUnavailable(self._unlinked_because), perf_counter())

    def _lose(self) -> None:
        """Handle the death of the engine process: fail its calls, and let the others wait for the next one."""
        [link], sock = self.links, self._sock
        with self.changed:
            self._sock = None
            self._set_linked(self._next is not None)
        self.lose(link, WorkerDied("the engine process died while it had the request"))
        assert sock is not None
        sock.close()

    # -- the thread of ``watch`` ------------------------------------------------------------------------------------

    def _take_rung(self) -> None:
        try:
            os.eventfd_read(self._rung)
            self._take_turn()
        except Exception as error:
            log_failure("cannot read a message from the engine process", error)

    def _take_turn(self) -> None:
        """Deliver available answers for ``_TURN_SECONDS``; the thread of ``watch`` calls again for the rest."""
        for link in [*self.links]:
            if not self.take(link, _TURN_SECONDS):
                os.eventfd_write(self._rung, 1)

    def _take(self, link: Link, slot: int) -> None:
        reply = link.reply(slot)
        if reply.end - reply.start > LARGE_BYTES:
            link.reading.add(slot)
            take = partial(super()._take, link, slot)
            try:
                threading.Thread(target=take, name="torchpipe-large-answer", daemon=True).start()
            except RuntimeError:  # the thread limit is reached
                take()
        else:
            super()._take(link, slot)


def receive_fds(sock: socket.socket, count: int, kept: list[int]) -> list[int]:
    """Receive descriptors from the other process, and add them to ``kept``, whose owner closes them.

    Raises one of ``ENDED`` if it has ended, ``OSError`` if this process has no descriptors left.
    """
    _, descriptors, flags, _ = socket.recv_fds(sock, 64, count)
    kept += descriptors
    if flags & socket.MSG_CTRUNC:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    if len(descriptors) != count:
        raise EOFError
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return descriptors


def _is_readable(sock: socket.socket) -> bool:
    """Whether the socket becomes readable within ``SLEEP_SECONDS``."""
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    return bool(poller.poll(1000 * SLEEP_SECONDS))


class HandOverTimes:
    """Total times of calls since the start; threads that take answers add to them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals = dict.fromkeys(("requests", "slot_wait_ms", "there_ms", "in_engine_ms", "back_ms"), 0.0)
        self.recent = 0.0  # weighted mean of seconds from a call's start to its answer; recent calls count more

    def answered(self, call: Call, reply: Header) -> None:
        """Add the times of an answered call: slot wait, transfer there, time in the engine process, transfer back."""
        now = perf_counter()
        times = call.asked, call.sent, reply.first, reply.second, now
        with self._lock:
            self._totals["requests"] += 1
            for name, begin, end in zip([*self._totals][1:], times, times[1:], strict=False):
                self._totals[name] += 1000 * (end - begin)
            self.recent += _LAST_CALL_WEIGHT * (now - call.asked - self.recent)

    def as_dict(self) -> dict[str, float]:
        """Totals in milliseconds."""
        return {**self._totals, "requests": int(self._totals["requests"])}
