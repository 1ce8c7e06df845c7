"""The engine process as a worker sees it, whichever process that is now."""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
from collections.abc import Callable
from functools import partial
from itertools import chain
from math import inf
from time import perf_counter
from typing import Protocol

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
)
from torchpipe_py.proc.pool import Call, Pool

ROOM = Room(MOST_SLOTS, slot_bytes=2**28, kept_bytes=2**19)
"""Further requests than there are slots wait in the worker."""

HOLD_SECONDS = 0.4
"""How long a request waits for the next engine process when one has died."""

START_SECONDS = 60.0  # for an engine process that is ready to tell what it runs
LARGE_BYTES = 2**22  # an answer of more takes milliseconds to copy
_TURN_SECONDS = 0.02  # for answers; the thread of ``watch`` waits for other things as well
_DIED = "the engine process has died, and the next one is not ready yet"
_WEIGHT = 1 / 16  # of the last call in what a call takes

ENDED = (EOFError, BrokenPipeError, ConnectionResetError)
"""What a link fails with where the other process has ended."""


class Watch(Protocol):
    """Has ``take()`` called on one thread, whenever the descriptor can be read, from now on; ``None`` ends that.

    It may be called from any thread, and it keeps ``take`` until it has ended that.
    """

    def __call__(self, fd: int, take: Callable[[], object] | None) -> object: ...


class EngineClient(Pool):
    """Takes calls from any thread; the thread of ``watch``, which waits for other things as well, tells the answers.

    A thread of its own makes links, hears when the engine process ends, and takes what the other has left every
    ``SLEEP_SECONDS``; a large answer is copied by one more. ``attach(sock)`` gives it the way to an engine process: the
    first one, or the next when one has died. ``tell_linked(is_linked)`` hears from any thread that there is a link or
    one is being made, and that there is none: then it takes another ``attach``, to the next engine process or to the
    same one if that lives.
    """

    def __init__(self, watch: Watch, tell_linked: Callable[[bool], object] = lambda is_linked: None) -> None:
        super().__init__(ROOM.slots, loses=True)
        self._watch, self._tell_linked = watch, tell_linked
        self._sock: socket.socket | None = None
        self._next: socket.socket | None = None
        self._is_meeting = False
        self._missing = _DIED  # why there is no link
        self._thread: threading.Thread | None = None
        self._rung = new_bell()
        self.sections: dict[str, tuple[int, Signature]] = {}
        self.figures = HandOverTimes()

    def attach(self, sock: socket.socket) -> None:
        """The engine process at the other end serves from now on, or as soon as the one before is gone."""
        with self.changed:
            before, self._next = self._next, sock
            self._is_meeting = True
            self._tell_linked(True)
            if before is not None:
                before.close()
            if self._thread is None:
                self._watch(self._rung, self._take_rung)
                self._thread = threading.Thread(target=self._run, name="torchpipe-engine", daemon=True)
                self._thread.start()
            self.changed.notify_all()

    def meet(self, sock: socket.socket) -> bool:
        """Attach, and wait until the engine process has told what it runs; ``False`` where no link can be made."""
        self.attach(sock)
        with self.changed:
            self.changed.wait_for(lambda: self.sections or not self._is_meeting)
            return bool(self.sections)

    def section(self, head: str) -> tuple[int, Signature]:
        """The number of a section, and what its data and results hold; waits for the engine process to tell."""
        with self.changed:
            if not self.changed.wait_for(lambda: self.sections, START_SECONDS):
                raise EngineUnavailable(f"no engine process has told what it runs within {START_SECONDS:g} s")
            return self.sections[head]

    def expected_wait(self) -> float:
        """How long a call will take that is made now: as long as the last ones, seconds; 0 where none is under way."""
        return self.figures.recent if self.pending() else 0.0

    def close(self) -> None:
        """End the thread. Calls that are left are not answered any more."""
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
        os.close(self._rung)  # NOTE: not before: the thread of ``watch`` may not have heard of the end

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
                log_failure("what comes from the engine process cannot be taken", error)

    def _connect(self) -> None:
        """Wait for an engine process, and meanwhile fail the calls that have waited for too long."""
        self._fail_late()
        with self.changed:
            sock, self._next = self._next, None
            if sock is None:
                first = min((call.until for call in chain(*self._queues)), default=inf)
                if not self.is_closed:
                    self.changed.wait(None if first == inf else max(0.0, first - perf_counter()))
                return
        try:
            link, told = self._link(sock)
        except Exception as error:
            sock.close()
            if not isinstance(error, ENDED):
                self._missing = f"there is no link to the engine process: {describe(error)}"
                logger.error("%s", self._missing)
            with self.changed:
                self._is_meeting = self._next is not None
                self._tell_linked(self._is_meeting)
                self.changed.notify_all()
            return
        self.add(link)
        with self.changed:
            self._sock, self._missing, self.sections = sock, _DIED, told
            self._tell_linked(True)
            self.changed.notify_all()

    def _link(self, sock: socket.socket) -> tuple[Link, dict[str, tuple[int, Signature]]]:
        """A link to the engine process at the other end, once that has told what it runs, and what it told.

        One of ``ENDED`` where it ends before that, another ``OSError`` where descriptors or memory are missing.
        """
        keep_from_forks(sock)
        sock.setblocking(False)
        memory = create_memory(ROOM)
        link = Link(memory, ROOM, [memory])
        link.bell = Bell(self._rung, link.asker_asleep)
        link.bell.await_ring(True)  # always; whoever waits for it, waits for more
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
        told = link.read(slot, link.reply(slot), copies=True)
        link.free_slot(slot)
        return link, told

    def _fail_late(self) -> None:
        self.fail_waiting(EngineUnavailable(self._missing), perf_counter())

    def _lose(self) -> None:
        """The engine process has died: fail what it had, and let the rest wait for the next one."""
        [link], sock = self.links, self._sock
        with self.changed:
            self._sock = None
            self._tell_linked(self._next is not None)
        self.lose(link, WorkerDied("the engine process died while it had the request"))
        assert sock is not None
        sock.close()

    # -- the thread of ``watch`` ------------------------------------------------------------------------------------

    def _take_rung(self) -> None:
        try:
            os.eventfd_read(self._rung)
            self._take_turn()
        except Exception as error:
            log_failure("what comes from the engine process cannot be taken", error)

    def _take_turn(self) -> None:
        """Tell the answers that are there, for as long as a turn; the thread of ``watch`` comes for the rest."""
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
            except RuntimeError:  # there are as many threads as may be
                take()
        else:
            super()._take(link, slot)


def receive_fds(sock: socket.socket, count: int, kept: list[int]) -> list[int]:
    """The descriptors that the other process has sent, which whoever closes ``kept`` closes.

    One of ``ENDED`` where it has ended, ``OSError`` where this process has no descriptors left.
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
    """Whether it is within ``SLEEP_SECONDS``."""
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    return bool(poller.poll(1000 * SLEEP_SECONDS))


class HandOverTimes:
    """Times of calls since the start; threads that take answers add to them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals = dict.fromkeys(("requests", "slot_wait_ms", "there_ms", "in_engine_ms", "back_ms"), 0.0)
        self.recent = 0.0  # seconds of one call from its start to its answer, the last ones more than those before

    def answered(self, call: Call, reply: Header) -> None:
        """A call was answered: it waited for a slot, went there, was in the engine process, and came back."""
        now = perf_counter()
        times = call.asked, call.sent, reply.first, reply.second, now
        with self._lock:
            self._totals["requests"] += 1
            for name, begin, end in zip([*self._totals][1:], times, times[1:], strict=False):
                self._totals[name] += 1000 * (end - begin)
            self.recent += _WEIGHT * (now - call.asked - self.recent)

    def as_dict(self) -> dict[str, float]:
        """Totals, in milliseconds."""
        return {**self._totals, "requests": int(self._totals["requests"])}
