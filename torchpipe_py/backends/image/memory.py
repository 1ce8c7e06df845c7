"""Limits the memory that decoding uses in a process."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from torchpipe_py.backends.current import CURRENT, waiting
from torchpipe_py.errors import DeadlineExceeded, logger

SMALL = 2**22
"""Bytes up to which an image is not counted, since only decoding threads hold such images."""

LONG = 1.0
"""Seconds after which a wait is logged."""


class DecodingMemory:
    """Counts the bytes in use by decoders of a process; a decoder that would exceed the limit waits for the others.

    Large images may use the limit, and the others half of it in addition, so that they never wait for a large one; if
    no large one is requested, the others may use all of it. Each kind is served in order of arrival. No thread requests
    more while it holds some, so none waits forever; and if none of its kind is in use, any size is admitted.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset the counts, in a process that was just forked and lacks the threads that decoded."""
        self._lock = threading.Lock()
        self._under_way: set[_Reservation] = set()
        self._waiting_large: deque[_Reservation] = deque()
        self._waiting: deque[_Reservation] = deque()  # small images

    @contextmanager
    def reserved(self, size: int, limit: int, is_large: bool = False) -> Iterator[None]:
        """Wait until ``size`` bytes and those in use are within ``limit``, and count them until the end.

        Raises ``DeadlineExceeded`` if the deadline of ``CURRENT.instance`` comes first.
        """
        if size <= SMALL:
            yield
            return
        reservation = _Reservation(size, limit, is_large)
        queue = self._waiting_large if is_large else self._waiting
        # NOTE: Ctrl-C may interrupt a caller that decodes its own image anywhere here, even while it waits.
        try:
            with self._lock:
                queue.append(reservation)
                self._admit()
            if not reservation.admitted.acquire(blocking=False):
                _wait(reservation)
            yield
        finally:
            with self._lock:
                self._under_way.discard(reservation)
                if reservation in queue:
                    queue.remove(reservation)
                self._admit()

    def _admit(self) -> None:
        for queue in (self._waiting_large, self._waiting):
            while queue and self._has_room(queue[0]):
                self._under_way.add(queue[0])
                queue.popleft().admitted.release()

    def _has_room(self, next_: _Reservation) -> bool:
        large = sum([used.size for used in self._under_way if used.is_large])
        small = sum([used.size for used in self._under_way if not used.is_large])
        if next_.is_large:
            return 2 * small <= next_.limit and (not large or large + next_.size <= next_.limit)
        if not small or 2 * (small + next_.size) <= next_.limit:
            return True
        return not self._waiting_large and large + small + next_.size <= next_.limit


class _Reservation:
    """Some bytes; ``admitted`` can be acquired once they are counted."""

    def __init__(self, size: int, limit: int, is_large: bool) -> None:
        self.size, self.limit, self.is_large = size, limit, is_large
        self.admitted = threading.Lock()
        self.admitted.acquire()


def _wait(reservation: _Reservation) -> None:
    instance, since = CURRENT.instance, perf_counter()
    deadline = None if instance is None else instance.deadline
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


# One for the process, like its memory.
DECODING = DecodingMemory()
os.register_at_fork(after_in_child=DECODING.reset)
