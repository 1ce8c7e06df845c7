"""When a batch closes. Pure: the clock is an argument, all times are seconds of ``time.perf_counter``."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import suppress
from itertools import islice
from typing import Any

from torchpipe_py.runtime.request import Request


class BatchQueue:
    """Requests that wait for company at one node, in a bucket for each key (the shape of their tensors).

    Not thread-safe: the node's leader owns it.
    """

    def __init__(self, timeout: float, key: Callable[[dict[str, Any]], Hashable]) -> None:
        """``timeout`` is the longest a request waits for company, counted from its arrival."""
        self.timeout = timeout
        self._key = key
        self._buckets: dict[Hashable, deque[Request]] = {}

    def __bool__(self) -> bool:
        return bool(self._buckets)

    def __len__(self) -> int:
        return sum(map(len, list(self._buckets.values())))

    def oldest(self) -> float:
        """When the oldest request arrived; infinity without any. A moment's estimate, for other threads."""
        with suppress(IndexError):  # the leader may empty a bucket meanwhile
            return min((bucket[0].arrived for bucket in list(self._buckets.values())), default=math.inf)
        return math.inf

    def add(self, request: Request) -> None:
        key = self._key(request.data)
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = deque()
        bucket.append(request)

    def take(
        self,
        limit: int,
        now: float,
        quiet: bool,
        lead_time: float = 0.0,
        fitting: Callable[[int, float, float], int] | None = None,
    ) -> list[Request] | None:
        """The batch that closes now, at most ``limit`` long, or ``None``.

        ``fitting(size, seconds, now)`` is the largest batch of at most ``size`` that takes no longer than ``seconds``:
        a batch is no larger than its tightest deadline allows.

        A bucket closes when it holds ``limit`` requests, when its oldest has waited ``timeout``, when a deadline is
        no further than ``lead_time`` (the expected compute time) away, or when it is ``quiet``: no request that
        could join is under way. Of several that close, the one with the oldest request goes first.
        """
        closing = [
            (bucket[0].arrived, index, key)
            for index, (key, bucket) in enumerate(self._buckets.items())
            if quiet or len(bucket) >= limit or self._closes_at(bucket, limit, lead_time) <= now
        ]
        if not closing:
            return None
        key = min(closing)[2]
        if fitting is not None:
            batch = islice(self._buckets[key], limit)
            deadline = min((request.deadline for request in batch if request.deadline is not None), default=None)
            if deadline is not None:
                limit = fitting(min(limit, len(self._buckets[key])), deadline - now, now)
        return self._cut(key, limit)

    def next_close(self, limit: int, lead_time: float = 0.0) -> float | None:
        """When the next bucket closes if nothing else arrives; ``None`` if there is none."""
        if not self._buckets:
            return None
        return min(self._closes_at(bucket, limit, lead_time) for bucket in self._buckets.values())

    def clear(self) -> list[Request]:
        """Everything that waits, removed."""
        requests = [request for bucket in self._buckets.values() for request in bucket]
        self._buckets.clear()
        return requests

    def _closes_at(self, bucket: deque[Request], limit: int, lead_time: float) -> float:
        """The earliest of the oldest request's timeout and the deadlines of those that would be in the batch."""
        close = bucket[0].arrived + self.timeout
        for index, request in enumerate(bucket):
            if index == limit:
                break
            if request.deadline is not None:
                close = min(close, request.deadline - lead_time)
        return close

    def _cut(self, key: Hashable, limit: int) -> list[Request]:
        bucket = self._buckets[key]
        batch = list(islice(bucket, limit))
        if len(batch) == len(bucket):
            del self._buckets[key]
        else:
            for _ in batch:
                bucket.popleft()
        return batch
