"""Which of a node's instances sleep, which one collects the next batch, and whom new work wakes.

The thread that worked last is woken first: its core is awake and its caches are warm, and the others sleep on.
"""

from __future__ import annotations

import threading
from _thread import allocate_lock
from collections.abc import Sized


class Sleeper:
    """A thread that can be woken: ``wake`` once for each ``sleep``, perhaps before it falls asleep."""

    def __init__(self) -> None:
        bell = allocate_lock()
        bell.acquire()
        self.sleep = bell.acquire
        self.wake = bell.release


class Roster:
    """Sleepers who take work from ``queue`` one piece at a time.

    Whoever adds to the queue calls ``rouse`` if ``resting`` is not empty. A sleeper first enters ``resting`` and then
    looks for work, whoever adds work does it the other way round: so no work is left with everybody asleep.
    """

    def __init__(self, queue: Sized) -> None:
        self.resting: list[Sleeper] = []
        self._queue = queue
        self._closed = False

    def rest(self, sleeper: Sleeper) -> bool:
        """Sleep until there is work; ``False`` when the roster is closed. There may be none left on waking up."""
        self.resting.append(sleeper)
        if self._queue or self._closed:
            try:
                self.resting.remove(sleeper)
            except ValueError:
                sleeper.sleep()  # somebody took it out to wake it
        else:
            sleeper.sleep()
        return not self._closed

    def borrow(self) -> Sleeper | None:
        """One that rests and sleeps on, so that another thread can stand in for it; ``None`` if there is work."""
        if self._queue or self._closed:
            return None
        try:
            return self.resting.pop()
        except IndexError:
            return None

    def give_back(self, sleeper: Sleeper) -> None:
        """A borrowed one rests again."""
        self.resting.append(sleeper)
        if self._queue or self._closed:
            self.rouse()

    def rouse(self) -> None:
        """Wake one that rests."""
        try:
            sleeper = self.resting.pop()
        except IndexError:
            return
        sleeper.wake()

    def close(self) -> None:
        """Wake everybody; nobody rests any more."""
        self._closed = True
        while self.resting:
            self.rouse()


class LeaderRoster(Roster):
    """Sleepers of whom one at a time is the leader, who collects from ``queue`` and may have ``kept`` some of it."""

    def __init__(self, queue: Sized, kept: Sized) -> None:
        super().__init__(queue)
        self._kept = kept
        self._lock = threading.Lock()  # of all that follows, and of `resting`
        self._leads = False
        self._napping: Sleeper | None = None
        self._is_rung = False  # the leader was roused before it fell asleep

    def lead(self, sleeper: Sleeper) -> bool:
        """Sleep until there is work that nobody collects, and become the one who does; ``False`` when closed."""
        with self._lock:
            if self._closed:
                return False
            self.resting.append(sleeper)
            if not self._leads and (self._queue or len(self._kept)):
                self.resting.pop()
                self._leads = True
                return True
        sleeper.sleep()  # whoever wakes it has made it the leader
        return not self._closed

    def retire(self) -> bool:
        """After the roster is closed: whether the caller, as the leader for good, is to clear up what is kept."""
        with self._lock:
            retires, self._leads = not self._leads, True
        return retires

    def hand_on(self) -> None:
        """The leader stops leading; if work is left, another one that sleeps becomes the leader."""
        with self._lock:
            self._leads = False
            if not self.resting or not (self._queue or len(self._kept)):
                return
            self._leads = True
            sleeper = self.resting.pop()
        sleeper.wake()

    def nap(self, leader: Sleeper, timeout: float) -> None:
        """The leader sleeps until work is added, somebody rouses it, or the time is over."""
        with self._lock:
            self.resting.append(leader)
            if self._closed or self._queue or self._is_rung:
                self._is_rung = False
                self.resting.pop()
                return
            self._napping = leader
        if leader.sleep(True, timeout):
            return
        with self._lock:
            if self._napping is leader:
                self._napping = None
                self.resting.remove(leader)
                return
        leader.sleep()  # woken after all, in the last moment

    def rouse(self) -> None:
        """Wake the leader if it naps, else one that rests if nobody leads."""
        with self._lock:
            sleeper = self._napping
            if sleeper is not None:
                self._napping = None
                self.resting.remove(sleeper)
            elif self._leads or not self.resting:
                return
            else:
                self._leads = True
                sleeper = self.resting.pop()
        sleeper.wake()

    def rouse_leader(self) -> None:
        """Wake the leader if it naps; if it is about to, it will not."""
        with self._lock:
            sleeper = self._napping
            if sleeper is None:
                self._is_rung = self._leads
                return
            self._napping = None
            self.resting.remove(sleeper)
        sleeper.wake()

    def close(self) -> None:
        """Wake everybody; nobody rests any more."""
        with self._lock:
            self._closed = True
            sleepers, self.resting[:], self._napping = list(self.resting), [], None
        for sleeper in sleepers:
            sleeper.wake()
