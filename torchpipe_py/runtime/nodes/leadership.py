"""Which instance of a node collects the next batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sized
from enum import Enum

from torchpipe_py.runtime.nodes.idle import Sleeper
from torchpipe_py.runtime.nodes.queues import RequestQueue


class LeaderState(Enum):
    """The state of a node's leader. Every other instance computes a batch, or follows: it sleeps until it leads."""

    VACANT = "no instance leads: all compute"
    COLLECTING = "the leader collects the next batch"
    CALLED = "the same, and the leader must look again before it sleeps"
    ASLEEP = "the leader sleeps until work comes, or no request could join its batch any more"


VACANT, COLLECTING, CALLED, ASLEEP = LeaderState


class Leadership:
    """Lets one instance at a time collect requests, so that those that could share a batch are not split among two.

    ::

        VACANT ──────────── lead ───────────► COLLECTING ──────── wait ────────► ASLEEP
        ASLEEP ── lead, by another instance ► COLLECTING    CALLED ── wait ────► COLLECTING
        ASLEEP ──── wake, the time is over ─► COLLECTING ── wake_leader ───────► CALLED
        COLLECTING, CALLED ──── hand_over ──► ASLEEP if an instance follows, else VACANT

    ``lead``: an instance that has finished a batch leads at once if no other does, or if the leader sleeps and has
    collected nothing. It is awake already and its caches are warm; the sleeping leader becomes a follower. Otherwise
    it follows. ``hand_over``: the leader has its batch, and the instance that followed last leads, asleep. It is woken
    at once if something is left to collect, else by the next request. So a batch wakes one thread.

    ``queue`` has the requests that no leader has taken, ``collected`` those that a leader took from it.
    ``has_more()`` is asked when the leader falls asleep: whether there is work that is not in the queue yet. From then
    on another thread must add such work to the queue.
    """

    def __init__(self, queue: RequestQueue, collected: Sized, has_more: Callable[[], bool] = bool) -> None:
        self._queue, self._collected, self._has_more = queue, collected, has_more
        self._lock = threading.Lock()  # for all below, and for looking at the queue before falling asleep
        self._state = VACANT
        self._leader: Sleeper | None = None
        self._followers: list[Sleeper] = []
        self._is_closed = False

    @property
    def state(self) -> LeaderState:
        """The state of the leader at this moment."""
        return self._state

    def idle_count(self) -> int:
        """Number of instances that sleep."""
        return len(self._followers) + (self._state is ASLEEP)

    def lead(self, instance: Sleeper) -> bool:
        """Sleep until the instance leads and there may be work; ``False`` once closed."""
        with self._lock:
            if self._is_closed:
                return False
            leads = self._state is VACANT or (self._state is ASLEEP and not self._collected)
            if leads:
                if self._leader is not None:
                    self._followers.append(self._leader)
                self._leader, self._state = instance, COLLECTING
            else:
                self._followers.append(instance)
        if not leads:
            instance.sleep()
        elif not self._collected:
            self.wait(instance)
        return not self._is_closed

    def wait(self, leader: Sleeper, timeout: float = -1) -> None:
        """Let the leader sleep until there is work, ``wake_leader`` is called, or the time is over (in seconds)."""
        with self._lock:
            if self._state is CALLED or self._has_work():
                self._state = COLLECTING
                return
            self._state = ASLEEP
        # NOTE: not under the lock, since a thread that has such work holds a lock of its own and calls `wake`.
        if self._has_more():
            self.wake()
        if leader.sleep(True, timeout):
            return
        with self._lock:
            is_woken = self._state is not ASLEEP
            self._state = COLLECTING
        if is_woken:
            leader.sleep()  # at the last moment

    def wake(self) -> None:
        """Wake the leader if it sleeps: a request was added to the queue."""
        with self._lock:
            if self._state is not ASLEEP or self._leader is None:
                return
            self._state = COLLECTING
            leader = self._leader
        leader.wake()

    def wake_leader(self) -> None:
        """Wake the leader if it sleeps, else have it look again before it does: fewer requests may join its batch."""
        with self._lock:
            if self._state is COLLECTING:
                self._state = CALLED
        self.wake()

    def hand_over(self) -> None:
        """Let the instance that followed last lead, and wake it if work is left."""
        with self._lock:
            if not self._followers:
                self._leader, self._state = None, VACANT
                return
            self._leader, self._state = self._followers.pop(), ASLEEP
            has_work = self._has_work() or bool(self._collected)
        if has_work or self._has_more():
            self.wake()

    def close(self) -> None:
        """Wake all instances; from now on ``lead`` returns ``False``."""
        with self._lock:
            self._is_closed = True
            followers, self._followers = self._followers, []
        self.wake()
        for follower in followers:
            follower.wake()

    def lead_after_close(self, instance: Sleeper) -> bool:
        """Once closed: lead for good, unless another instance leads; the leader fails the collected requests."""
        with self._lock:
            if self._leader is None:
                self._leader, self._state = instance, COLLECTING
            return self._leader is instance

    def _has_work(self) -> bool:
        return bool(self._queue.normal or self._queue.low or self._is_closed)
