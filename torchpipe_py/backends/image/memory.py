"""Limits the memory that decoding uses in a process."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import Protocol

from torchpipe_py.errors import DeadlineExceeded, logger

SMALL = 2**22
"""Bytes. Smaller amounts are not counted: there are no more of them than decoding threads."""

LONG = 1.0
"""Seconds after which a wait is logged."""


class Waiter(Protocol):
    """The instance that decodes: its deadline (``time.perf_counter``), and its wake-up."""

    deadline: float | None

    def waiting(self) -> AbstractContextManager[None]: ...


class _CurrentThread(threading.local):
    waiter: Waiter | None = None


CURRENT = _CurrentThread()
"""``waiter``: for whom the calling thread decodes, if it is a pipe's."""


def waiting() -> AbstractContextManager[None]:
    """Meanwhile the calling thread runs no backend, but waits for what comes within a bounded time."""
    return nullcontext() if CURRENT.waiter is None else CURRENT.waiter.waiting()


class DecodingMemory:
    """Counts the bytes in use by decoders of a process; a decoder that would exceed the limit waits for the others.

    Large images may use the limit, and the others half of it in addition, so that they never wait for a large one; if
    no large one is requested, the others may use all of it. Each kind is served in order of arrival. No thread requests
    more while it holds some, so none waits forever; and if none of its kind is in use, any size is admitted.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Nothing is under way, as in a process that was just forked: the threads that decoded are not there."""
        self._lock = threading.Lock()
        self._under_way: set[_Reservation] = set()
        self._waiting_large: deque[_Reservation] = deque()
        self._waiting: deque[_Reservation] = deque()  # the others

    @contextmanager
    def reserved(self, size: int, limit: int, is_large: bool = False) -> Iterator[None]:
        """Wait until ``size`` bytes beside those under way are within ``limit``, and count them meanwhile.

        ``DeadlineExceeded`` where the deadline of ``CURRENT.waiter`` comes first.
        """
        if size <= SMALL:
            yield
            return
        reservation = _Reservation(size, limit, is_large)
        waiting = self._waiting_large if is_large else self._waiting
        # NOTE: Ctrl-C can meet a caller that decodes its own image anywhere here, even while it waits.
        try:
            with self._lock:
                waiting.append(reservation)
                self._admit()
            if not reservation.admitted.acquire(blocking=False):
                _wait(reservation)
            yield
        finally:
            with self._lock:
                self._under_way.discard(reservation)
                if reservation in waiting:
                    waiting.remove(reservation)
                self._admit()

    def _admit(self) -> None:
        for waiting in (self._waiting_large, self._waiting):
            while waiting and self._has_room(waiting[0]):
                self._under_way.add(waiting[0])
                waiting.popleft().admitted.release()

    def _has_room(self, wanted: _Reservation) -> bool:
        large = sum([other.size for other in self._under_way if other.is_large])
        others = sum([other.size for other in self._under_way if not other.is_large])
        if wanted.is_large:
            return 2 * others <= wanted.limit and (not large or large + wanted.size <= wanted.limit)
        if not others or 2 * (others + wanted.size) <= wanted.limit:
            return True
        return not self._waiting_large and large + others + wanted.size <= wanted.limit


class _Reservation:
    """Some bytes; ``admitted`` can be acquired once they are counted."""

    def __init__(self, size: int, limit: int, is_large: bool) -> None:
        self.size, self.limit, self.is_large = size, limit, is_large
        self.admitted = threading.Lock()
        self.admitted.acquire()


def _wait(reservation: _Reservation) -> None:
    waiter, since = CURRENT.waiter, perf_counter()
    deadline = None if waiter is None else waiter.deadline
    timeout = -1 if deadline is None else min(max(0.0, deadline - since), threading.TIMEOUT_MAX)
    with waiting():
        is_admitted = reservation.admitted.acquire(timeout=timeout)
    seconds = perf_counter() - since
    if not is_admitted:
        raise DeadlineExceeded(f"deadline passed while an image waited {seconds:.1f} s for memory to be decoded in")
    if seconds > LONG:
        logger.warning(
            "an image waited %.1f s for memory to be decoded in, %.0f MiB", seconds, reservation.size / 2**20
        )


# Process-wide, as the memory is.
DECODING = DecodingMemory()
os.register_at_fork(after_in_child=DECODING.forget)
