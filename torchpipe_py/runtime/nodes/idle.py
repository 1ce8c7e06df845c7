"""Tracks which instances of a node are idle, which one leads, and which one new work wakes.

The thread that worked last is woken first: its core is awake and its caches are warm. The others keep sleeping.
"""

from __future__ import annotations

import signal
import threading
from _thread import allocate_lock
from collections.abc import Callable, Sized
from contextlib import suppress
from functools import partial
from operator import methodcaller
from typing import Any, TypeVar


def is_main_thread() -> bool:
    """Whether signal handlers run in the calling thread: they may raise between two bytecodes."""
    return threading.get_ident() == threading.main_thread().ident


def has_handlers() -> bool:
    """Whether a signal handler that may raise is set in the main thread; by default Ctrl-C has one."""
    return any(callable(signal.getsignal(number)) for number in signal.valid_signals())


class Sleeper:
    """A thread that can be woken: call ``wake`` once for each ``sleep``, perhaps before it falls asleep."""

    def __init__(self) -> None:
        lock = allocate_lock()
        lock.acquire()
        self.sleep = lock.acquire
        self.wake = lock.release


S = TypeVar("S", bound=Sleeper)


class Idle:
    """Sleepers ``to_wake`` when work is added to a queue: ``normal``, or ``low``.

    A sleeper first enters ``to_wake`` and then looks for work. A thread that adds work does the reverse: it adds, then
    calls ``wake_one`` if ``to_wake`` is not empty. So no work is left while all sleep.
    """

    def __init__(self, normal: Sized, low: Sized = ()) -> None:
        self.to_wake: list[Any] = []
        self._wake_last = waker(self.to_wake)
        self._normal, self._low = normal, low
        self._closed = False

    def wake_one(self) -> None:
        """Wake one idle sleeper, if any."""
        try:
            self._wake_last()
        except IndexError:
            return

    def close(self) -> None:
        """Wake everybody; nobody is idle any more."""
        self._closed = True
        while self.to_wake:
            self.wake_one()


def waker(sleepers: list[S]) -> Callable[[], Any]:
    """A function that pops the last of ``sleepers`` and wakes it; raises ``IndexError`` if there is none.

    NOTE: this is a single C call. A signal handler may raise in the main thread between any two bytecodes: a sleeper
    popped but not woken would sleep forever.
    """
    return partial(next, map(methodcaller("wake"), iter(sleepers.pop, None)))


class IdleStack(Idle):
    """Idle sleepers that take requests from the queues one at a time."""

    def sleep(self, sleeper: Sleeper) -> bool:
        """Sleep until there is work; ``False`` once closed. Another thread may have taken the work by then."""
        self.to_wake.append(sleeper)
        if self._normal or self._low or self._closed:
            try:
                self.to_wake.remove(sleeper)
            except ValueError:
                sleeper.sleep()  # another thread popped it and will wake it
        else:
            sleeper.sleep()
        return not self._closed

    def borrow(self) -> Any:
        """Take an idle sleeper, which sleeps on while another thread works for it; ``None`` if there is work.

        Work of low priority may wait for that thread's.
        """
        if self._normal or self._closed:
            return None
        try:
            return self.to_wake.pop()
        except IndexError:
            return None

    def give_back(self, sleeper: Sleeper) -> None:
        """Mark a borrowed sleeper as idle again."""
        self.to_wake.append(sleeper)
        if self._normal or self._low or self._closed:
            self.wake_one()


class Leadership(Idle):
    """Idle sleepers, one of which leads: it collects requests from the queues, and may have ``kept`` some of them.

    Only the leader, while it sleeps, is ``to_wake``: when work comes, and when no request under way could still join
    those it has kept. It leads while it collects. Then it hands over to an idle sleeper, which is woken only if work
    is left. Before the leader sleeps it calls ``has_more()``: whether there is work that is not in a queue yet; from
    then on another thread adds such work, until the leader has collected.
    """

    def __init__(self, normal: Sized, low: Sized, kept: Sized) -> None:
        super().__init__(normal, low)
        self.has_more: Callable[[], bool] = bool
        self._followers: list[Sleeper] = []
        self._wake_follower = waker(self._followers)
        self._kept = kept
        self._lock = threading.RLock()  # for leader and followers; a signal handler may close the pipe
        self._leader: Sleeper | None = None
        self._is_woken = False  # the leader was woken before it fell asleep

    def lead(self, sleeper: Sleeper) -> bool:
        """Sleep until the sleeper leads and there may be work; ``False`` once closed."""
        with self._lock:
            if self._closed:
                return False
            leads = self._takes_over()
            if leads:
                self._leader = sleeper
            else:
                self._followers.append(sleeper)
        if leads:
            self._rest(sleeper, bool(self._kept))
        else:
            sleeper.sleep()  # the waking thread has already made it the leader
        return not self._closed

    def _takes_over(self) -> bool:
        """Whether to lead: there is no leader, or it sleeps without work. A thread that just worked is faster."""
        if self._leader is None or not self._kept:
            try:
                self._followers.append(self.to_wake.pop())
            except IndexError:
                return self._leader is None
            return True
        return False

    def lead_last(self, sleeper: Sleeper) -> bool:
        """Once closed: lead if there is no other leader; the sleeper then stays leader and cleans up kept requests."""
        with self._lock:
            is_last = self._leader is None or self._leader is sleeper
            if is_last:
                self._leader = sleeper
        return is_last

    def hand_over(self) -> None:
        """Pass leadership from the caller to another idle sleeper, which is woken if work is left."""
        with self._lock:
            self._leader = None
            if not self._followers:
                return
            self.to_wake.append(successor := self._followers.pop())
            self._leader = successor
        if self._normal or self._low or self._kept or self._closed or self.has_more():
            self.wake_one()

    def wait(self, leader: Sleeper, timeout: float) -> None:
        """Let the leader sleep until work is added, ``wake_leader`` is called, or the time is over."""
        self._rest(leader, False, timeout)

    def _rest(self, leader: Sleeper, has_work: bool, timeout: float = -1) -> None:
        self.to_wake.append(leader)
        stays = has_work or self._normal or self._low or self._is_woken or self._closed or self.has_more()
        is_woken = not stays and leader.sleep(True, timeout)
        if not is_woken:
            try:
                self.to_wake.remove(leader)
            except ValueError:
                leader.sleep()  # it was woken at the last moment
        self._is_woken = False

    def wake_leader(self) -> None:
        """Wake the leader if it sleeps, or prevent it from falling asleep."""
        self._is_woken = True
        self.wake_one()

    def close(self) -> None:
        """Wake everybody; nobody is idle any more."""
        with self._lock:
            self._closed = True
        self.wake_one()
        while self._followers:
            with suppress(IndexError):
                self._wake_follower()
