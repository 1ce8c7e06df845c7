"""Which instances of a node are idle, which one leads, and whom new work wakes.

The thread that worked last is woken first: its core is awake and its caches are warm, and the others sleep on.
"""

from __future__ import annotations

import threading
from _thread import allocate_lock
from collections.abc import Sized
from typing import Generic, TypeVar


class Sleeper:
    """A thread that can be woken: ``wake`` once for each ``sleep``, perhaps before it falls asleep."""

    def __init__(self) -> None:
        lock = allocate_lock()
        lock.acquire()
        self.sleep = lock.acquire
        self.wake = lock.release


S = TypeVar("S", bound=Sleeper)


class IdleStack(Generic[S]):
    """Idle sleepers who take requests from ``queue`` one at a time.

    Whoever adds to the queue calls ``wake_one`` if ``idle`` is not empty. A sleeper first enters ``idle`` and then
    looks for work, whoever adds work does it the other way round: so no work is left with everybody asleep.
    """

    def __init__(self, queue: Sized) -> None:
        self.idle: list[S] = []
        self._queue = queue
        self._closed = False

    def sleep(self, sleeper: S) -> bool:
        """Sleep until there is work; ``False`` once closed. There may be none left on waking up."""
        self.idle.append(sleeper)
        if self._queue or self._closed:
            try:
                self.idle.remove(sleeper)
            except ValueError:
                sleeper.sleep()  # somebody took it out to wake it
        else:
            sleeper.sleep()
        return not self._closed

    def borrow(self) -> S | None:
        """One that is idle and sleeps on, so that another thread can stand in for it; ``None`` if there is work."""
        if self._queue or self._closed:
            return None
        try:
            return self.idle.pop()
        except IndexError:
            return None

    def give_back(self, sleeper: S) -> None:
        """A borrowed one is idle again."""
        self.idle.append(sleeper)
        if self._queue or self._closed:
            self.wake_one()

    def wake_one(self) -> None:
        """Wake one that is idle, if any."""
        try:
            sleeper = self.idle.pop()
        except IndexError:
            return
        sleeper.wake()

    def close(self) -> None:
        """Wake everybody; nobody is idle any more."""
        self._closed = True
        while self.idle:
            self.wake_one()


class Leadership:
    """Idle sleepers of whom one at a time leads: it collects from ``queue``, and may have ``kept`` some of it."""

    def __init__(self, queue: Sized, kept: Sized) -> None:
        self.idle: list[Sleeper] = []
        self._queue, self._kept = queue, kept
        self._lock = threading.Lock()  # of all that follows, and of `idle`
        self._closed = False
        self._leads = False
        self._waiting: Sleeper | None = None  # the leader, while it waits; it is in `idle` then
        self._is_woken = False  # the leader was woken before it fell asleep

    def lead(self, sleeper: Sleeper) -> bool:
        """Sleep until there is work that nobody collects, and become the leader; ``False`` once closed."""
        with self._lock:
            if self._closed:
                return False
            self.idle.append(sleeper)
            if not self._leads and (self._queue or len(self._kept)):
                self.idle.pop()
                self._leads = True
                return True
        sleeper.sleep()  # whoever wakes it has made it the leader
        return not self._closed

    def lead_last(self) -> bool:
        """Once closed: whether the caller is the first to ask while nobody leads, and is to clear up what is kept."""
        with self._lock:
            is_last, self._leads = not self._leads, True
        return is_last

    def hand_over(self) -> None:
        """The leader stops leading; if work is left, another one that is idle becomes the leader."""
        with self._lock:
            self._leads = False
            if not self.idle or not (self._queue or len(self._kept)):
                return
            self._leads = True
            sleeper = self.idle.pop()
        sleeper.wake()

    def wait(self, leader: Sleeper, timeout: float) -> None:
        """The leader sleeps until work is added, ``wake_leader`` is called, or the time is over."""
        with self._lock:
            # NOTE: enters `idle` before it looks for work; who adds work does it the other way round, without the lock.
            self.idle.append(leader)
            if self._closed or self._queue or self._is_woken:
                self._is_woken = False
                self.idle.pop()
                return
            self._waiting = leader
        if leader.sleep(True, timeout):
            return
        with self._lock:
            if self._waiting is leader:
                self._stop_waiting()
                return
        leader.sleep()  # woken after all, in the last moment

    def wake_one(self) -> None:
        """Wake the leader if it waits, else make one that is idle the leader if nobody leads."""
        with self._lock:
            sleeper = self._stop_waiting()
            if sleeper is None:
                if self._leads or not self.idle:
                    return
                self._leads = True
                sleeper = self.idle.pop()
        sleeper.wake()

    def wake_leader(self) -> None:
        """Wake the leader if it waits; if it is about to, it will not."""
        with self._lock:
            sleeper = self._stop_waiting()
            if sleeper is None:
                self._is_woken = self._leads
                return
        sleeper.wake()

    def _stop_waiting(self) -> Sleeper | None:
        sleeper = self._waiting
        if sleeper is not None:
            self._waiting = None
            self.idle.remove(sleeper)
        return sleeper

    def close(self) -> None:
        """Wake everybody; nobody is idle any more."""
        with self._lock:
            self._closed = True
            sleepers, self.idle[:], self._waiting = list(self.idle), [], None
        for sleeper in sleepers:
            sleeper.wake()
