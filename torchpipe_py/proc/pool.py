"""Distributes calls of any thread over links; moves calls if a child process dies or another one is idle."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import suppress
from itertools import chain, count
from math import inf
from operator import attrgetter
from time import perf_counter
from typing import Any

from torchpipe_py.errors import DeadlineExceeded, PipeClosed, WorkerDied, first_line, log_failure
from torchpipe_py.proc.codec import Packed
from torchpipe_py.proc.link import FAILED, NOT_RUN, GarbledError, Header, Link, barrier

AHEAD = 2
"""Calls that a child process has at once. It runs one of them, and need not wait for its parent after it."""

LOSSES = 3
"""A call fails after so many child processes died, or failed to start, before they began it."""

_Given = tuple["Call", Link, int, int]  # a call, and its link, slot and number


AGING = 1.0
"""Seconds after which waiting low-priority calls get a turn after every ``AGED`` turns of others."""

AGED = 3


class Call:
    """Items on their way to another process. ``done(error, outcome)`` is called once, on any thread.

    ``kind`` is the number of items, or the index of the section to run them. Before ``done`` is called for an answer,
    ``reply`` is set to its header and ``link`` to its link. ``until`` is when the call fails if there is no link. Calls
    of low ``priority`` (1) get a link when no others wait.
    """

    __slots__ = ("_done", "asked", "deadline", "is_large", "kind", "link", "losses", "order", "packed", "place",
                 "priority", "reply", "sent", "until")  # fmt: skip

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
        self.order = self.losses = 0
        self.place: tuple[Link, int, int] | None = None
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
            log_failure("the answer of another process cannot be told", failure)


class Pool:
    """Sends each call over the least busy link; at most ``ahead`` are under way over each.

    A call that a child process has not begun is taken back if another one is idle, or if the process dies; with
    ``loses`` it fails if the process dies. If there are several links, one gets no large calls, and no call is queued
    after a large one. ``in_place``: arrays of answers are not copied, and their slot stays in use while they live.
    ``read`` reads answers that are not pickled.
    """

    def __init__(
        self,
        ahead: int = AHEAD,
        in_place: bool = False,
        loses: bool = False,
        read: Callable[[Link, int, Header], Any] | None = None,
    ) -> None:
        self._ahead, self._in_place, self._loses, self._reader = ahead, in_place, loses, read
        self._lock = threading.RLock()  # the garbage collector may close a pipe anywhere
        self.changed = threading.Condition(self._lock)
        self._waiting: deque[Call] = deque()
        self._large: deque[Call] = deque()
        self._low: deque[Call] = deque()
        self._since_aged = 0
        self._queues = self._large, self._waiting, self._low  # in order of precedence
        self._order = count()
        self.links: list[Link] = []
        self.is_closed = False

    # -- calls, from any thread -----------------------------------------------------------------------------------

    def ask(self, call: Call) -> None:
        """Run a call. Its error is ``PipeClosed`` if it has not begun before ``close``, ``DeadlineExceeded`` if not
        before its deadline, ``WorkerDied`` if the other process has died or none can be started, or an exception from
        writing it.
        """
        given: list[_Given] = []
        with self._lock:
            is_closed = self.is_closed
            if not is_closed:
                self._queue_of(call).append(call)
                given = self._give()
                if not self.links:
                    call.until = call.asked + self.hold_seconds()
                    self.changed.notify_all()
        if is_closed:
            call.end(PipeClosed("closed"))
        self._write(given)

    def give_up(self, call: Call) -> None:
        """Abandon a call: it ends here at once, with ``CancelledError``. Its slot becomes free when it has ended in the
        other process, too.
        """
        call.end(CancelledError())  # NOTE: before the lock is taken: it runs code of others
        with self._lock:
            place = call.place
            with suppress(ValueError):
                self._queue_of(call).remove(call)  # NOTE: or abandoned calls would pile up while no slot becomes free
        if place is not None:
            link, slot, number = place
            link.give_up(slot, number)
            link.other.ring()

    def is_waiting(self) -> bool:
        """Whether a call waits for a link."""
        return any(self._queues)

    def pending(self) -> int:
        """Number of calls that wait or have a slot; a momentary estimate."""
        return sum(map(len, self._queues)) + sum([link.under_way for link in self.links])

    def close(self) -> None:
        """Fail calls that have not begun, and all later calls, with ``PipeClosed``."""
        with self._lock:
            self.is_closed = True
            left = self._drop_waiting()
            for link in self.links:
                left += [call for call in filter(None, link.calls) if self._takes_back(link, call)]
                link.bell.wake()
            self.changed.notify_all()
        for call in left:
            call.end(PipeClosed("closed"))

    # -- links, each used by one thread -----------------------------------------------------------------------------

    def add(self, link: Link) -> None:
        """Add a link, which takes calls from now on."""
        with self._lock:
            self.links.append(link)
            given = self._share()
        self._write(given)

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
        """Handle the death of the other process: fail the calls it had begun, and run the others elsewhere.

        ``is_at_fault``: its first call caused the death, begun or not.
        """
        with self._lock:
            if link not in self.links:
                return
            self.links.remove(link)
        with suppress(GarbledError):
            self.take(link)
        with self._lock:
            calls = [call for call in link.calls if call is not None and call.place and call.place[0] is link]
            calls = [call for call in sorted(calls, key=attrgetter("order")) if call.place[1] not in link.reading]
            begun = [call for call in calls if self._loses or link.has_begun(*call.place[1:])]
            begun = begun or calls[:is_at_fault]
            ended: list[tuple[Call, Exception]] = []
            for call in reversed(calls):
                self._end(call, link, call.place[1])
                call.losses += 1
                if call in begun or call.losses >= LOSSES:
                    ended.append((call, error))
                elif self.is_closed:
                    ended.append((call, PipeClosed("closed")))
                else:
                    self._queue_of(call).appendleft(call)
            until = perf_counter() + self.hold_seconds()
            for call in chain(*self._queues):
                call.until = until
            given = self._give()
            self.changed.notify_all()
        self._write(given)
        for call, reason in reversed(ended):
            call.end(reason)

    def fail_waiting(self, error: BaseException, now: float = inf) -> None:
        """Fail the calls whose time to wait for a link ended by ``now``."""
        with self._lock:
            calls = self._drop_waiting()
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

    # -- assignment of calls to links; with the lock held -----------------------------------------------------------

    def _give(self) -> list[_Given]:
        """Assign waiting calls to links, as far as there is room; the caller must then write them."""
        given: list[_Given] = []
        queues = self._queues
        if self._low and self._low[0].asked + AGING <= perf_counter():
            self._since_aged += 1
            if self._since_aged > AGED:
                self._since_aged = 0
                queues = self._large, self._low, self._waiting
        for queue in queues:
            while queue:
                link = self._freest(queue is self._large)
                if link is None:
                    break
                try:
                    call = queue.popleft()
                except IndexError:  # it was abandoned
                    break
                if call.is_over:
                    continue
                slot, number = link.take_slot(call)
                call.place, call.order = (link, slot, number), next(self._order)
                if call.is_over:
                    link.give_up(slot, number)
                if link.under_way == 1:
                    link.since = perf_counter()
                link.has_large = call.is_large
                given.append((call, link, slot, number))
        return given

    def _freest(self, is_large: bool) -> Link | None:
        if is_large and sum(link.has_large for link in self.links) >= max(1, len(self.links) - 1):
            return None
        best, least = None, self._ahead
        for link in self.links:
            if link.under_way < least and not link.has_large:
                best, least = link, link.under_way
        return best

    def _queue_of(self, call: Call) -> deque[Call]:
        return self._large if call.is_large else self._low if call.priority else self._waiting

    def _share(self) -> list[_Given]:
        """Like ``_give``; if no call waits, an idle link gets a call of another link."""
        given = self._give() if self.is_waiting() else []
        if given or len(self.links) < 2 or all(link.under_way for link in self.links):
            return given
        for link in self.links:
            calls = sorted(filter(None, link.calls), key=attrgetter("order")) if link.under_way > 1 else []
            for call in calls[1:]:
                if self._takes_back(link, call):
                    self._queue_of(call).append(call)
                    return self._give()
        return []

    def _takes_back(self, link: Link, call: Call) -> bool:
        """Take a call back from its link; whether it worked: the other process has not begun it, and will not."""
        place = call.place
        if place is None or place[0] is not link or not link.is_asked(*place[1:]):
            return False  # NOTE: a call that is not written yet would never be answered there
        link.give_up(*place[1:])
        # Either this side sees that it has begun, or the other side sees that it was abandoned, or both; then the
        # answer is ``NOT_RUN``.
        barrier()
        return not link.has_begun(*place[1:]) and self._end(call, link, place[1])

    def _end(self, call: Call, link: Link, slot: int) -> bool:
        """Remove the call from that slot; returns whether it was there."""
        if call.place is None or call.place[0] is not link or call.place[1] != slot:
            return False
        call.place = None
        if call.is_large:
            link.has_large = False
        return True

    def _drop_waiting(self) -> list[Call]:
        dropped = [*chain(*self._queues)]
        for queue in self._queues:
            queue.clear()
        return dropped

    # -- without the lock -----------------------------------------------------------------------------------------

    def _write(self, given: list[_Given]) -> None:
        """Write calls into their slots; a call that cannot be written ends with the error."""
        for call, link, slot, number in given:
            call.sent = perf_counter()
            try:
                # NOTE: if the link is lost, another one may have the call by now; this copy is then never read.
                link.ask(slot, number, call.packed, call.kind, call.sent, call.deadline)
            except Exception as error:
                with self._lock:
                    is_its = self._end(call, link, slot)
                    if is_its:
                        link.free_slot(slot)
                if is_its:
                    call.end(error)
            else:
                link.other.ring()
                if link.under_way < 2 or len(self.links) < 2:
                    continue
            # Another link may have become idle, and could not take this call before it was written.
            with self._lock:
                more = self._share()
            self._write(more)

    def _take(self, link: Link, slot: int) -> None:
        """Take an answer; send the other process its next call before delivering the answer."""
        call: Call = link.answered_call(slot)
        reply = link.reply(slot)
        outcome, error, held = (None, None, None) if reply.kind == NOT_RUN else self._read(link, slot, reply)
        with self._lock:
            link.free_slot(slot)
            is_its = self._end(call, link, slot)  # else it was taken back
            link.since = perf_counter() if link.under_way else 0.0
            if is_its and reply.kind == NOT_RUN:
                error = self._not_run(call)
                if error is None:
                    is_its = False
                    self._queue_of(call).appendleft(call)
            given = self._share()
        del held
        self._write(given)
        if is_its:
            if reply.kind != NOT_RUN:
                call.link, call.reply = link, reply
                self.answered(call, reply)
            call.end(error, outcome)

    def _not_run(self, call: Call) -> Exception | None:
        """The error of a call that the other process has not run, or ``None`` if it should run elsewhere."""
        call.losses += 1  # NOTE: counted, or a process that always answers this would get the call forever
        if call.is_over or perf_counter() >= call.deadline:
            return DeadlineExceeded("deadline passed")
        if self.is_closed:
            return PipeClosed("closed")
        return WorkerDied("no worker process has begun it") if call.losses >= LOSSES else None

    def _read(self, link: Link, slot: int, reply: Header) -> tuple[Any, BaseException | None, Any]:
        """The outcome of a call, its error, and an object that keeps the slot in use."""
        try:
            if self._reader is not None:
                return self._reader(link, slot, reply), None, None
            if reply.kind == FAILED:
                return None, link.read(slot, reply, copies=True).error(), None
            if self._in_place:
                outcome, held = link.read_in_place(slot, reply, link.room.slots - self._ahead)
                return outcome, None, held
            return link.read(slot, reply, copies=True), None, None
        except GarbledError:
            raise
        except BaseException as failure:
            if not isinstance(failure, Exception) and threading.current_thread() is threading.main_thread():
                raise
            error = TypeError(f"the answer of its worker process: {first_line(failure)}")
            error.__cause__ = failure.with_traceback(None)  # NOTE: its frames would keep the memory alive
            return None, error, None
