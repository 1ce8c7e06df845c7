"""The queues of a node: they decide which requests are next, and get the time as an argument.

Times are seconds of ``time.perf_counter``. ``put`` adds a request, ``take`` removes what is next, or returns ``None``;
``clear`` removes all.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import suppress
from itertools import islice
from typing import Any

from torchpipe_py.aging import Aging
from torchpipe_py.runtime.admission import ComputeTimes
from torchpipe_py.runtime.request import Request

LOW_SECONDS = 0.01
"""As long as batches of low priority may take, or twice as long as one request alone, while normal requests come."""

FILLED = 1.25
"""How many times as long a batch of normal requests may take if requests of low priority fill it up, until they age."""


class RequestQueue:
    """``normal`` requests in order, and ``low`` priority requests, taken by ``Aging`` or while no normal ones wait.

    Thread-safe.
    """

    __slots__ = ("_aging", "_lock", "low", "normal")

    def __init__(self) -> None:
        self.normal: deque[Request] = deque()
        self.low: deque[Request] = deque()
        self._aging = Aging()
        self._lock = threading.Lock()  # for taking a request while some have low priority

    def __len__(self) -> int:
        return len(self.normal) + len(self.low)

    def requests(self) -> list[Request]:
        """A copy of all requests."""
        return [*self.normal.copy(), *self.low.copy()]

    def put(self, request: Request) -> None:
        """Add a request after all others of its priority."""
        (self.low if request.priority else self.normal).append(request)

    def put_back(self, request: Request) -> None:
        """Add a request before all others of its priority."""
        (self.low if request.priority else self.normal).appendleft(request)

    def take(self, now: float) -> Request | None:
        """Remove and return the next request; ``None`` if there is none."""
        if self.low:
            return self._take_by_priority(now)
        try:
            return self.normal.popleft()
        except IndexError:
            return None

    def _take_by_priority(self, now: float) -> Request | None:
        with self._lock:
            is_low = bool(self.low) and self._aging.count_turn(self.low[0].arrived, now)
            for queue in (self.low, self.normal) if is_low else (self.normal, self.low):
                with suppress(IndexError):  # a normal request may be taken without the lock
                    return queue.popleft()
        return None

    def clear(self) -> list[Request]:
        """Remove and return all requests."""
        requests = []
        for queue in (self.normal, self.low):
            with suppress(IndexError):
                while True:
                    requests.append(queue.popleft())
        return requests


class BatchQueue:
    """Requests that wait for a batch at one node, in a bucket for each key (the shape of their tensors).

    Not thread-safe: only the node's leader uses it. ``len``, ``low`` and ``oldest`` are estimates for other threads.
    """

    def __init__(self, timeout: float, key: Callable[[dict[str, Any]], Hashable]) -> None:
        """``timeout`` is the longest batch wait of a request, counted from its arrival."""
        self.timeout = timeout
        self._key = key
        self._buckets: dict[Hashable, deque[Request]] = {}
        self.low = 0
        """Number of waiting requests with low priority."""
        self._normal_at = -math.inf  # when the last normal request came
        self._aging = Aging()

    def __bool__(self) -> bool:
        return bool(self._buckets)

    def __len__(self) -> int:
        return sum(map(len, list(self._buckets.values())))

    def requests(self) -> list[Request]:
        """A copy of all requests."""
        return [request for bucket in list(self._buckets.values()) for request in bucket.copy()]

    def oldest(self) -> float:
        """When the oldest request arrived; infinity if there is none."""
        with suppress(IndexError):  # the leader may empty a bucket meanwhile
            return min((bucket[0].arrived for bucket in list(self._buckets.values())), default=math.inf)
        return math.inf

    def put(self, request: Request) -> None:
        """Add a request: after all others, or before those of low priority."""
        bucket = self._buckets.setdefault(self._key(request.data), deque())
        if request.priority:
            self.low += 1
        else:
            self._normal_at = request.arrived
            if bucket and bucket[-1].priority:
                bucket.insert(_count_normal(bucket, len(bucket)), request)
                return
        bucket.append(request)

    def take(
        self,
        limit: int,
        now: float,
        quiet: bool,
        lead_time: float = 0.0,
        times: ComputeTimes | None = None,
    ) -> list[Request] | None:
        """The batch that closes now, at most ``limit`` long, or ``None``.

        A bucket closes when it holds ``limit`` requests, when its oldest has waited ``timeout``, when a deadline is
        at most ``lead_time`` (the expected compute time) away, or when it is ``quiet``: no request that could join
        is under way. If several can close, the one with the oldest request is first.

        ``times`` limits the batch to what its tightest deadline allows. While normal requests come, low-priority
        requests may make the batch's time ``FILLED`` times as long, aged ones twice; a batch of low priority only takes
        no longer than ``LOW_SECONDS``, since the next normal request has to wait for it.
        """
        key = self._closing_bucket(limit, now, quiet, lead_time)
        if key is _NO_BUCKET:
            return None
        bucket = self._buckets[key]
        self._promote_aged(bucket, limit, now)
        size = self._size(bucket, limit, now, times)
        batch = list(self._buckets.pop(key)) if size == len(bucket) else [bucket.popleft() for _ in range(size)]
        if self.low:
            self.low -= sum(request.priority for request in batch)
        return batch

    def next_close(self, limit: int, lead_time: float = 0.0) -> float | None:
        """When the next bucket closes if nothing else arrives; ``None`` if nothing waits."""
        return min((self._closes_at(bucket, limit, lead_time) for bucket in self._buckets.values()), default=None)

    def clear(self) -> list[Request]:
        """Remove and return all waiting requests."""
        requests = [request for bucket in self._buckets.values() for request in bucket]
        self._buckets.clear()
        self.low = 0
        return requests

    # -- which bucket closes ------------------------------------------------------------------------------------------

    def _closing_bucket(self, limit: int, now: float, quiet: bool, lead_time: float) -> Hashable:
        """The key of the bucket that closes now, or ``_NO_BUCKET``."""
        first, chosen = math.inf, _NO_BUCKET
        for key, bucket in self._buckets.items():
            closes = quiet or len(bucket) >= limit or self._closes_at(bucket, limit, lead_time) <= now
            if closes and bucket[0].arrived < first:
                first, chosen = bucket[0].arrived, key
        return chosen

    def _closes_at(self, bucket: deque[Request], limit: int, lead_time: float) -> float:
        """The earlier of the oldest request's timeout and the first deadline in the batch, less ``lead_time``."""
        return min(bucket[0].arrived + self.timeout, _first_deadline(bucket, limit) - lead_time)

    # -- how many of its requests make the batch ----------------------------------------------------------------------

    def _promote_aged(self, bucket: deque[Request], limit: int, now: float) -> None:
        """If normal requests alone fill the batch, move the oldest low-priority one to the front when it has a turn."""
        if not self.low or len(bucket) <= limit:
            return
        place = _count_normal(bucket, len(bucket))
        if limit <= place < len(bucket) and self._aging.count_turn(bucket[place].arrived, now):
            aged = bucket[place]
            del bucket[place]
            bucket.appendleft(aged)

    def _size(self, bucket: deque[Request], limit: int, now: float, times: ComputeTimes | None) -> int:
        """The number of requests of the bucket that make the next batch: the least of three bounds."""
        full = min(limit, len(bucket))
        if times is None:
            return full
        by_deadline = _size_by_deadline(bucket, full, now, times)
        by_low_priority = self._size_by_low_priority(bucket, full, now, times) if self.low else full
        return min(full, by_deadline, by_low_priority)

    def _size_by_low_priority(self, bucket: deque[Request], full: int, now: float, times: ComputeTimes) -> int:
        """The size up to which low-priority requests delay normal ones little enough."""
        if not bucket[full - 1].priority or now - self._normal_at >= Aging.SECONDS:
            return full
        normal = _count_normal(bucket, full)
        # NOTE: a batch of unknown time is not filled up: by larger batches alone each would stay as large.
        alone = times.known(max(1, normal), now) or 0.0
        if not normal:
            seconds = max(LOW_SECONDS, 2 * alone)
        else:
            seconds = (2 if Aging.is_aged(bucket[normal].arrived, now) else FILLED) * alone
        return max(1, normal, times.fitting(full, seconds, now))


_NO_BUCKET: Hashable = object()


def _size_by_deadline(bucket: deque[Request], full: int, now: float, times: ComputeTimes) -> int:
    """The size whose compute time the tightest deadline allows."""
    deadline = _first_deadline(bucket, full)
    return full if deadline == math.inf else times.fitting(full, deadline - now, now)


def _count_normal(bucket: deque[Request], size: int) -> int:
    """How many of the first ``size`` requests come before the first one of low priority."""
    return next((place for place, request in enumerate(islice(bucket, size)) if request.priority), size)


def _first_deadline(bucket: deque[Request], size: int) -> float:
    """The earliest deadline of the first ``size`` requests; infinity if they have no deadline."""
    first = math.inf
    for request in islice(bucket, size):
        if request.deadline is not None and request.deadline < first:
            first = request.deadline
    return first
