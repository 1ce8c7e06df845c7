"""Assigns calls of any thread to other processes: a call waits until a link has a free place."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import suppress
from itertools import chain
from math import inf
from time import perf_counter
from typing import Any

from torchpipe_py.aging import Aging
from torchpipe_py.errors import DeadlineExceeded, PipeClosed, WorkerDied, first_line, log_failure
from torchpipe_py.proc.codec import Packed
from torchpipe_py.proc.link import FAILED, NOT_RUN, GarbledError, Header, Link

LOSSES = 3
"""A call fails after so many child processes died, or failed to start, before they began it."""

CLOSED = "the pipe was closed while the request waited for another process"

Place = tuple[Link, int, int]
"""A link, one of its slots, and the number of the call in that slot."""


class Call:
    """Items on their way to another process. ``done(error, outcome)`` is called once, on any thread.

    ``kind`` is the number of items, or the index of the section to run them. Before ``done`` is called for an answer,
    ``reply`` is set to its header and ``link`` to its link. ``until`` is when the call fails if there is no link. Calls
    of low ``priority`` (1) get a link when no others wait.
    """

    __slots__ = ("_done", "asked", "deadline", "is_large", "kind", "link", "losses", "packed", "place", "priority",
                 "reply", "sent", "until")  # fmt: skip

    def __init__(
        self,
        packed: Packed,
        kind: int,
        done: Callable[[BaseException | None, Any], object],
        deadline: float | None = None,
        is_large: bool = False,
        priority: int = 0,
    ) -> None:
        self.packed, self.kind, self.is_large, self.priority = packed, kind, is_large, priority
        self.deadline = inf if deadline is None else deadline
        self._done = [done]
        self.asked = self.sent = perf_counter()
        self.until = inf
        self.losses = 0
        self.place: Place | None = None
        self.link: Link | None = None
        self.reply: Header | None = None

    @property
    def is_over(self) -> bool:
        """Whether ``done`` was called, or is about to be."""
        return not self._done

    def end(self, error: BaseException | None, outcome: Any = None) -> None:
        """Call ``done``, unless it was called. NOTE: its exceptions must not end the thread that takes answers."""
        try:
            done = self._done.pop()
        except IndexError:
            return
        try:
            done(error, outcome)
        except BaseException as failure:
            if not isinstance(failure, Exception) and threading.current_thread() is threading.main_thread():
                raise  # such as Ctrl-C's
            log_failure("cannot deliver a worker process's answer", failure)


class Pool:
    """Assigns each call to the least busy link; at most ``most`` calls are under way over each.

    If the other process dies, the calls that it has not begun wait for another link; with ``loses`` they fail, too. If
    there are several links, large calls leave one of them to the others. ``read`` reads answers that are not pickled.
    """

    def __init__(
        self, most: int = 1, loses: bool = False, read: Callable[[Link, int, Header], Any] | None = None
    ) -> None:
        self.most, self._loses, self._reader = most, loses, read
        self._lock = threading.RLock()  # the garbage collector may close a pipe anywhere
        self.changed = threading.Condition(self._lock)
        self._waiting: deque[Call] = deque()
        self._large: deque[Call] = deque()
        self._low: deque[Call] = deque()
        self._aging = Aging()
        self._queues = self._large, self._waiting, self._low  # in order of precedence
        self.links: list[Link] = []
        self.is_closed = False

    # -- calls, from any thread -----------------------------------------------------------------------------------

    def ask(self, call: Call) -> None:
        """Run a call. Its error is ``PipeClosed`` if it has no link at ``close``, ``DeadlineExceeded`` if it has not
        begun before its deadline, ``WorkerDied`` if the other process has died or none can be started, or an exception
        from writing it.
        """
        assigned: list[tuple[Call, Place]] = []
        with self._lock:
            is_closed = self.is_closed
            if not is_closed:
                self._queue_of(call).append(call)
                assigned = self._assign()
                if not self.links:
                    call.until = call.asked + self.hold_seconds()
                    self.changed.notify_all()
        if is_closed:
            call.end(PipeClosed(CLOSED))
        self._write(assigned)

    def abandon(self, call: Call, unless_begun: bool = False) -> None:
        """Abandon a call: it ends here at once, with ``CancelledError``. Its slot becomes free when it has ended in the
        other process, too. With ``unless_begun`` one that the other process has is left to it.
        """
        if unless_begun:
            with self._lock:
                queue = self._queue_of(call)
                if call not in queue:
                    return
                queue.remove(call)
        call.end(CancelledError())  # NOTE: before the lock is taken: it runs code of others
        with self._lock:
            place = call.place
            with suppress(ValueError):
                self._queue_of(call).remove(call)  # NOTE: or abandoned calls would pile up while no slot becomes free
        if place is not None:
            link, slot, number = place
            link.abandon(slot, number)
            link.other.ring()

    def has_begun(self, call: Call) -> bool:
        """Whether another process works on the call, or has it in its own queue; a momentary answer."""
        with self._lock:
            return call not in self._queue_of(call)

    def is_waiting(self) -> bool:
        """Whether a call waits for a link."""
        return any(self._queues)

    def pending(self) -> int:
        """Number of calls that wait or have a slot; a momentary estimate."""
        return sum(map(len, self._queues)) + sum([link.under_way for link in self.links])

    def close(self) -> None:
        """Fail calls that wait for a link, and all later calls, with ``PipeClosed``."""
        with self._lock:
            self.is_closed = True
            waiting = self._remove_waiting()
            for link in self.links:
                link.bell.wake()
            self.changed.notify_all()
        for call in waiting:
            call.end(PipeClosed(CLOSED))

    # -- links, each used by one thread -----------------------------------------------------------------------------

    def add(self, link: Link) -> None:
        """Add a link, which takes calls from now on."""
        with self._lock:
            self.links.append(link)
            assigned = self._assign()
        self._write(assigned)

    def remove(self, link: Link) -> None:
        """Remove a link, which must have no calls."""
        with self._lock:
            self.links.remove(link)

    def take(self, link: Link, seconds: float = inf) -> bool:
        """Deliver available answers, for about ``seconds``; returns whether that were all.

        Raises ``GarbledError`` if the other side has written invalid data.
        """
        with link.taking:
            end = perf_counter() + seconds
            link.answered += link.take_answered()
            while link.answered:
                self._take(link, link.answered.popleft())
                if perf_counter() >= end:
                    break
            return not link.answered

    def lose(self, link: Link, error: WorkerDied, is_at_fault: bool = False) -> None:
        """Handle the death of the other process: fail the calls it had begun, and assign the others to other links.

        ``is_at_fault``: its call caused the death, begun or not.
        """
        with self._lock:
            if link not in self.links:
                return
            self.links.remove(link)
        with suppress(GarbledError):
            self.take(link)
        ended: list[tuple[Call, Exception]] = []
        with self._lock:
            for call in link.calls:
                if call is None or call.place is None or call.place[0] is not link or call.place[1] in link.reading:
                    continue
                _, slot, number = call.place
                call.place = None
                call.losses += 1
                if self._loses or is_at_fault or link.has_begun(slot, number) or call.losses >= LOSSES:
                    ended.append((call, error))
                elif self.is_closed:
                    ended.append((call, PipeClosed(CLOSED)))
                else:
                    self._queue_of(call).appendleft(call)
            until = perf_counter() + self.hold_seconds()
            for call in chain(*self._queues):
                call.until = until
            assigned = self._assign()
            self.changed.notify_all()
        self._write(assigned)
        for call, reason in ended:
            call.end(reason)

    def fail_waiting(self, error: BaseException, now: float = inf) -> None:
        """Fail the calls whose time to wait for a link ended by ``now``."""
        with self._lock:
            calls = self._remove_waiting()
            late = [call for call in calls if call.until <= now]
            for call in calls:
                if call.until > now:
                    self._queue_of(call).append(call)
        for call in late:
            call.end(error)

    def hold_seconds(self) -> float:
        """Seconds that a call waits while there is no link."""
        return inf

    def answered(self, call: Call, reply: Header) -> None:
        """Called for each answered call."""

    # -- which call gets which link; with the lock held -------------------------------------------------------------

    def _assign(self) -> list[tuple[Call, Place]]:
        """Give waiting calls free slots, queue by queue; the caller must then write them.

        There are three cases for the first call of a queue. It has ended: it is removed. A link has room for it: it
        gets a slot of that link. No link has: the queue waits.
        """
        assigned: list[tuple[Call, Place]] = []
        queues = self._queues
        if self._low and self._aging.count_turn(self._low[0].asked, perf_counter()):
            queues = self._large, self._low, self._waiting
        for queue in queues:
            while queue:
                call = queue[0]
                if call.is_over:
                    queue.popleft()
                    continue
                link = self._link_for(call)
                if link is None:
                    break
                queue.popleft()
                slot, number = link.take_slot(call)
                call.place = link, slot, number
                assigned.append((call, call.place))
        return assigned

    def _link_for(self, call: Call) -> Link | None:
        """The least busy link with room for the call; a large call leaves one link to the others."""
        if call.is_large:
            with_large = sum(any(other and other.is_large for other in link.calls) for link in self.links)
            if with_large >= max(1, len(self.links) - 1):
                return None
        link = min(self.links, key=lambda link: link.under_way, default=None)
        return link if link is not None and link.under_way < self.most else None

    def _queue_of(self, call: Call) -> deque[Call]:
        return self._large if call.is_large else self._low if call.priority else self._waiting

    def _release_slot(self, call: Call, link: Link, slot: int) -> bool:
        """Free the slot of an ended call; returns whether the call still had it."""
        link.free_slot(slot)
        has_it = call.place is not None and call.place[:2] == (link, slot)
        if has_it:
            call.place = None
        return has_it

    def _remove_waiting(self) -> list[Call]:
        waiting = [*chain(*self._queues)]
        for queue in self._queues:
            queue.clear()
        return waiting

    # -- without the lock -----------------------------------------------------------------------------------------

    def _write(self, assigned: list[tuple[Call, Place]]) -> None:
        """Write calls into their slots. A call that cannot be written ends with the error, and another one gets its
        slot.
        """
        while assigned:
            call, (link, slot, number) = assigned.pop(0)
            call.sent = perf_counter()
            try:
                # NOTE: if the link is lost, another one may have the call by now; this copy is then never read.
                link.ask(slot, number, call.packed, call.kind, call.sent, call.deadline)
            except Exception as error:
                with self._lock:
                    has_slot = call.place == (link, slot, number) and self._release_slot(call, link, slot)
                    assigned += self._assign()
                if has_slot:
                    call.end(error)
            else:
                link.other.ring()

    def _take(self, link: Link, slot: int) -> None:
        """Take an answer; send the other process its next call before delivering the answer."""
        call: Call = link.answered_call(slot)
        reply = link.reply(slot)
        outcome, error = self._read(call, link, slot, reply)
        with self._lock:
            has_slot = self._release_slot(call, link, slot)  # else its link was lost, and it has another one
            assigned = self._assign()
        self._write(assigned)
        if has_slot:
            if reply.kind != NOT_RUN:
                call.link, call.reply = link, reply
                self.answered(call, reply)
            call.end(error, outcome)

    def _read(self, call: Call, link: Link, slot: int, reply: Header) -> tuple[Any, BaseException | None]:
        """The outcome of a call and its error; ``GarbledError`` for an answer that does not fit the call."""
        if reply.kind == NOT_RUN:
            if not call.is_over and perf_counter() < call.deadline:
                raise GarbledError("an answer without having run the call")
            return None, DeadlineExceeded("deadline passed")
        try:
            if self._reader is not None:
                return self._reader(link, slot, reply), None
            if reply.kind == FAILED:
                return None, link.read(slot, reply, copies=True).error()
            return link.read(slot, reply, copies=True), None
        except GarbledError:
            raise
        except BaseException as failure:
            if not isinstance(failure, Exception) and threading.current_thread() is threading.main_thread():
                raise
            error = TypeError(f"the answer of its worker process: {first_line(failure)}")
            error.__cause__ = failure.with_traceback(None)  # NOTE: its frames would keep the memory alive
            return None, error
