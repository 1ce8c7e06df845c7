"""Which instances of a node are idle, which one leads, and whom new work wakes.

The thread that worked last is woken first: its core is awake and its caches are warm, and the others sleep on.
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
    """Whether the calling thread is the one in which handlers of signals run: they may raise between two bytecodes."""
    return threading.get_ident() == threading.main_thread().ident


def has_handlers() -> bool:
    """Whether a handler is set that may raise in the main thread: Ctrl-C's is, unless somebody changed that."""
    return any(callable(signal.getsignal(number)) for number in signal.valid_signals())


class Sleeper:
    """A thread that can be woken: ``wake`` once for each ``sleep``, perhaps before it falls asleep."""

    def __init__(self) -> None:
        lock = allocate_lock()
        lock.acquire()
        self.sleep = lock.acquire
        self.wake = lock.release


S = TypeVar("S", bound=Sleeper)


class Idle:
    """Sleepers ``to_wake`` when work is added to a queue: ``normal``, or ``low``.

    A sleeper first enters ``to_wake`` and then looks for work. Who adds work does it the other way round, and calls
    ``wake_one`` if anybody is ``to_wake``. So no work is left while everybody sleeps.
    """

    def __init__(self, normal: Sized, low: Sized = ()) -> None:
        self.to_wake: list[Any] = []
        self._wake_last = waker(self.to_wake)
        self._normal, self._low = normal, low
        self._closed = False

    def wake_one(self) -> None:
        """Wake one that is idle, if any."""
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
    """What removes the last one of ``sleepers`` and wakes it; it raises ``IndexError`` if there is none.

    NOTE: all of that is one call of C. A handler of a signal may raise in the main thread between any two bytecodes:
    a sleeper that was removed and not woken would sleep for ever.
    """
    return partial(next, map(methodcaller("wake"), iter(sleepers.pop, None)))


class IdleStack(Idle):
    """Idle sleepers that take requests from the queues one at a time."""

    def sleep(self, sleeper: Sleeper) -> bool:
        """Sleep until there is work; ``False`` once closed. There may be none left on waking up."""
        self.to_wake.append(sleeper)
        if self._normal or self._low or self._closed:
            try:
                self.to_wake.remove(sleeper)
            except ValueError:
                sleeper.sleep()  # somebody removed it to wake it
        else:
            sleeper.sleep()
        return not self._closed

    def borrow(self) -> Any:
        """One that is idle and sleeps on, so that another thread can stand in for it; ``None`` if there is work."""
        if self._normal or self._low or self._closed:
            return None
        try:
            return self.to_wake.pop()
        except IndexError:
            return None

    def give_back(self, sleeper: Sleeper) -> None:
        """A borrowed one is idle again."""
        self.to_wake.append(sleeper)
        if self._normal or self._low or self._closed:
            self.wake_one()


class Leadership(Idle):
    """Idle sleepers of which one leads: it collects from the queues, and may have ``kept`` some of it.

    Only the leader, while it sleeps, is ``to_wake``: when work comes, and when nothing is under way any more that could
    join what it has kept. It stays the leader while it collects. Then it hands over to one that is idle, which is woken
    only if work is left. ``has_more()`` is asked when the leader is about to sleep: whether there is work that is not
    in a queue yet; from then on somebody else adds it, until the leader has collected.
    """

    def __init__(self, normal: Sized, low: Sized, kept: Sized) -> None:
        super().__init__(normal, low)
        self.has_more: Callable[[], bool] = bool
        self._followers: list[Sleeper] = []
        self._wake_follower = waker(self._followers)
        self._kept = kept
        self._lock = threading.RLock()  # of who leads and who follows; a handler of a signal may close the pipe
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
            sleeper.sleep()  # whoever wakes it has made it the leader before
        return not self._closed

    def _takes_over(self) -> bool:
        """Whether nobody leads, or the leader was asleep with nothing to do: one that has just worked does better."""
        if self._leader is None or not self._kept:
            try:
                self._followers.append(self.to_wake.pop())
            except IndexError:
                return self._leader is None
            return True
        return False

    def lead_last(self, sleeper: Sleeper) -> bool:
        """Once closed: whether nobody else leads, so that the sleeper, which leads for good, clears up what is kept."""
        with self._lock:
            is_last = self._leader is None or self._leader is sleeper
            if is_last:
                self._leader = sleeper
        return is_last

    def hand_over(self) -> None:
        """The leader stops leading; another one that is idle leads, and is woken if work is left."""
        with self._lock:
            self._leader = None
            if not self._followers:
                return
            self.to_wake.append(successor := self._followers.pop())
            self._leader = successor
        if self._normal or self._low or self._kept or self._closed or self.has_more():
            self.wake_one()

    def wait(self, leader: Sleeper, timeout: float) -> None:
        """The leader sleeps until work is added, ``wake_leader`` is called, or the time is over."""
        self._rest(leader, False, timeout)

    def _rest(self, leader: Sleeper, has_work: bool, timeout: float = -1) -> None:
        self.to_wake.append(leader)
        stays = has_work or self._normal or self._low or self._is_woken or self._closed or self.has_more()
        is_woken = not stays and leader.sleep(True, timeout)
        if not is_woken:
            try:
                self.to_wake.remove(leader)
            except ValueError:
                leader.sleep()  # woken after all, in the last moment
        self._is_woken = False

    def wake_leader(self) -> None:
        """Wake the leader if it sleeps; if it is about to, it will not."""
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
