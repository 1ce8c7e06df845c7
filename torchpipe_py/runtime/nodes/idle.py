"""Instances without work, and which of them new work wakes."""

from __future__ import annotations

import threading
from _thread import allocate_lock
from typing import Generic, TypeVar

from torchpipe_py.runtime.nodes.queues import RequestQueue


class Sleeper:
    """A thread that can be woken: call ``wake`` once for each ``sleep``, perhaps before it falls asleep."""

    def __init__(self) -> None:
        lock = allocate_lock()
        lock.acquire()
        self.sleep = lock.acquire
        """``sleep(True, timeout)`` returns whether it was woken in time, in seconds."""
        self.wake = lock.release


S = TypeVar("S", bound=Sleeper)


class IdleStack(Generic[S]):
    """Idle instances that take requests from the queue one at a time.

    The thread that worked last is woken first: its core is awake and its caches are warm. A thread that adds a request
    to the queue calls ``wake_one`` afterwards.
    """

    def __init__(self, queue: RequestQueue) -> None:
        self._queue = queue
        self._sleepers: list[S] = []
        self._is_closed = False
        self._lock = threading.Lock()  # for a look at the queue and what depends on it

    def idle_count(self) -> int:
        """Number of instances that sleep, without those that are borrowed."""
        return len(self._sleepers)

    def sleep(self, sleeper: S) -> bool:
        """Sleep until there is work; ``False`` once closed. Another thread may have taken the work by then."""
        with self._lock:
            if self._is_closed:
                return False
            self._sleepers.append(sleeper)  # NOTE: before the look at the queue, see `wake_one`
            if (self._queue.normal or self._queue.low) and self._remove(sleeper):
                return True
        sleeper.sleep()
        return not self._is_closed

    def _remove(self, sleeper: S) -> bool:
        """Remove the instance from the list; ``False`` if it was borrowed this moment."""
        try:
            self._sleepers.remove(sleeper)
        except ValueError:
            return False
        return True

    def wake_one(self) -> None:
        """Wake the instance that worked last, if any is idle."""
        if not self._sleepers:
            return  # NOTE: an instance that enters the list only now will see the request
        with self._lock:
            try:
                sleeper = self._sleepers.pop()
            except IndexError:
                return
        sleeper.wake()

    def borrow(self) -> S | None:
        """Take an idle instance, which sleeps on while another thread works for it; ``None`` if normal requests wait.

        Requests of low priority may wait for that thread's.
        """
        if self._queue.normal or self._is_closed:
            return None
        try:
            return self._sleepers.pop()
        except IndexError:
            return None

    def give_back(self, sleeper: S) -> None:
        """Mark a borrowed instance as idle again."""
        queue = self._queue
        with self._lock:
            if not (queue.normal or queue.low or self._is_closed):
                self._sleepers.append(sleeper)
                return
        sleeper.wake()

    def close(self) -> None:
        """Wake all instances; none is idle any more."""
        with self._lock:
            self._is_closed = True
        while self._sleepers:
            self.wake_one()
