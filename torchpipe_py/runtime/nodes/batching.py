"""Decides when a batch closes, and implements nodes whose instances process batches."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from time import perf_counter
from typing import Any

from torchpipe_py.backends.base import Data, explain_returned, run_padded
from torchpipe_py.errors import describe, logger
from torchpipe_py.keys import TASK_STATE_KEY
from torchpipe_py.runtime.admission import ComputeTimes
from torchpipe_py.runtime.nodes.idle import Leadership
from torchpipe_py.runtime.nodes.instance import Instance
from torchpipe_py.runtime.nodes.node import Fail, Node, RequestQueue, Source
from torchpipe_py.runtime.request import Request

Due = Callable[[float, float], bool]
"""``is_due(since, until)``: whether a request that has not arrived is due in that time, in seconds from now."""

LOW_SECONDS = 0.01
"""As long as batches of low priority may take, or twice as long as one request alone, while normal requests come."""

FILLED = 1.25
"""How many times as long a batch of normal requests may take if requests of low priority fill it up, until they age."""

_DEADLINE_MARGIN = 0.002  # seconds for waking up, routing and the way back


class BatchQueue:
    """Requests that wait for a batch at one node, in a bucket for each key (the shape of their tensors).

    Pure: the clock is an argument, all times are seconds of ``time.perf_counter``. Not thread-safe: only the node's
    leader uses it.
    """

    def __init__(self, timeout: float, key: Callable[[dict[str, Any]], Hashable]) -> None:
        """``timeout`` is the longest batch wait of a request, counted from its arrival."""
        self.timeout = timeout
        self._key = key
        self._buckets: dict[Hashable, deque[Request]] = {}
        self.low = 0
        """Number of waiting requests with low priority."""
        self._normal_at = -math.inf  # when the last normal request came
        self._since_aged = 0

    def __bool__(self) -> bool:
        return bool(self._buckets)

    def __len__(self) -> int:
        return sum(map(len, list(self._buckets.values())))

    def oldest(self) -> float:
        """When the oldest request arrived; infinity if there is none. A momentary estimate for other threads."""
        with suppress(IndexError):  # the leader may empty a bucket meanwhile
            return min((bucket[0].arrived for bucket in list(self._buckets.values())), default=math.inf)
        return math.inf

    def add(self, request: Request) -> None:
        """Add a request: after all others, or before those of low priority."""
        bucket = self._buckets.setdefault(self._key(request.data), deque())
        if request.priority:
            self.low += 1
        else:
            self._normal_at = request.arrived
            if bucket and bucket[-1].priority:
                bucket.insert(_normal(bucket, len(bucket)), request)
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

        ``times`` limits the batch to what its tightest deadline allows. While normal requests come, low-priority
        requests may make the batch's time ``FILLED`` times as long, aged ones twice; a batch of low priority only takes
        no longer than ``LOW_SECONDS``, since the next normal request has to wait for it.

        A bucket closes when it holds ``limit`` requests, when its oldest has waited ``timeout``, when a deadline is
        at most ``lead_time`` (the expected compute time) away, or when it is ``quiet``: no request that could join
        is under way. If several can close, the one with the oldest request is first.
        """
        closing = [
            (bucket[0].arrived, index, key)
            for index, (key, bucket) in enumerate(self._buckets.items())
            if quiet or len(bucket) >= limit or self._closes_at(bucket, limit, lead_time) <= now
        ]
        if not closing:
            return None
        key = min(closing)[2]
        bucket = self._buckets[key]
        size = min(limit, len(bucket))
        if self.low and size < len(bucket):
            self._let_in_aged(bucket, size, now)
        if times is not None:
            deadline = _first_deadline(bucket, size)
            if deadline < math.inf:
                size = times.fitting(size, deadline - now, now)
            if bucket[size - 1].priority:
                normal = _normal(bucket, size)
                if now - self._normal_at < RequestQueue.AGING:
                    # NOTE: unknown is not filled up: by larger batches alone each would stay as large.
                    is_aged = bucket[normal].arrived + RequestQueue.AGING <= now
                    factor = 2 if is_aged or not normal else FILLED
                    seconds = factor * (times.known(max(1, normal), now) or 0.0)
                    if not normal:
                        seconds = max(LOW_SECONDS, seconds)
                    size = max(1, normal, times.fitting(size, seconds, now))
        batch = list(self._buckets.pop(key)) if size == len(bucket) else [bucket.popleft() for _ in range(size)]
        if self.low:
            self.low -= sum(request.priority for request in batch)
        return batch

    def _let_in_aged(self, bucket: deque[Request], size: int, now: float) -> None:
        """If a batch is full of normal requests, add the oldest aged low-priority one to every fourth batch."""
        place = _normal(bucket, len(bucket))
        if size <= place < len(bucket) and bucket[place].arrived + RequestQueue.AGING <= now:
            self._since_aged += 1
            if self._since_aged > RequestQueue.AGED:
                self._since_aged = 0
                aged = bucket[place]
                del bucket[place]
                bucket.appendleft(aged)

    def next_close(self, limit: int, lead_time: float = 0.0) -> float | None:
        """When the next bucket closes if nothing else arrives; ``None`` if nothing waits."""
        return min((self._closes_at(bucket, limit, lead_time) for bucket in self._buckets.values()), default=None)

    def clear(self) -> list[Request]:
        """Remove and return all waiting requests."""
        requests = [request for bucket in self._buckets.values() for request in bucket]
        self._buckets.clear()
        self.low = 0
        return requests

    def _closes_at(self, bucket: deque[Request], limit: int, lead_time: float) -> float:
        """The earlier of the oldest request's timeout and the first deadline in the batch, less ``lead_time``."""
        return min(bucket[0].arrived + self.timeout, _first_deadline(bucket, limit) - lead_time)


def _normal(bucket: deque[Request], size: int) -> int:
    """How many of the first ``size`` requests come before the first one of low priority."""
    return next((place for place, request in enumerate(islice(bucket, size)) if request.priority), size)


def _first_deadline(bucket: deque[Request], size: int) -> float:
    """The earliest deadline of the first ``size`` requests; infinity if they have no deadline."""
    first = math.inf
    for request in islice(bucket, size):
        if request.deadline is not None and request.deadline < first:
            first = request.deadline
    return first


class BatchingNode(Node):
    """One idle instance leads at a time: it collects the next batch and hands leadership over before it computes."""

    def __init__(self, name: str, instances: Sequence[Instance], fail: Fail, waiting: set[Any], timeout: float) -> None:
        super().__init__(name, instances, fail, waiting)
        self._timeout = timeout
        self._batches = BatchQueue(timeout, lambda data: instances[0].backend.batch_key(data))
        self.idle: Leadership = Leadership(self._queue.normal, self._queue.low, self._batches)
        self._source: Source | None = None
        self._has_warned = False
        self.dues: Sequence[Due] = ()

    def draw_from(self, source: Source) -> None:
        """Have the leader fetch requests from ``source``; to be called before the first request."""
        self.idle.has_more = partial(source.announce, self)
        self._source = source
        source.announce(self)  # NOTE: the first leader may have fallen asleep before it could say so

    def queued(self) -> int:
        return super().queued() + (0 if self.is_closing else len(self._batches))

    def queued_before(self, priority: int) -> int:
        return super().queued_before(priority) - (0 if priority else self._batches.low)

    def is_awaiting(self) -> bool:
        """Whether a request in flight could still reach this node, or one is due before the batch times out."""
        for node in self.upstream:
            if node is not self:
                if node.load() and not (node in self.both_ways and self._closes_before(node)):
                    return True
            elif any(instance.busy for instance in self.instances):
                return True  # through a logical node, a request may visit twice
        if not self.dues:
            return False
        left = self._batches.oldest() + self._timeout - perf_counter()
        return any(is_due(-self._timeout, left) for is_due in list(self.dues))

    def _closes_before(self, other: Node) -> bool:
        """Whether all requests at the other node also wait, and for less time.

        Two nodes that can reach each other would wait for each other: the one with the oldest request closes first.
        """
        return (
            isinstance(other, BatchingNode)
            and other in self._waiting
            and other.load() == len(other._batches)
            and self._batches.oldest() <= other._batches.oldest()
        )

    def _serve(self, instance: Instance) -> None:
        while self.idle.lead(instance):
            since = perf_counter()
            try:
                instance.taken = batch = self._collect(instance)
                instance.busy = len(batch)
            finally:
                self.idle.hand_over()
            if not batch:
                continue
            self._run(instance, batch, since)
            batch = []
            # NOTE: reset busy only after delivery, so that a request always counts in some node's load.
            instance.rest()
            if self._waiting:
                self._wake_leaders()
        if self.idle.lead_last(instance):
            for request in self._batches.clear():
                self._fail_closed(request)

    def _collect(self, instance: Instance) -> list[Request]:
        """Collect the next batch as leader; empty if another instance took the requests, or the node closes."""
        while True:
            if self._source is not None:
                self._source.fetch(self)
            batch = self.closing(instance, perf_counter())
            if batch is not None:
                return batch
            self._wait(instance)

    def closing(self, instance: Instance, now: float) -> list[Request] | None:
        """For the leader, the batch that closes now: empty if nothing waits, ``None`` if no batch can close yet.

        It neither reads a clock nor sleeps, so it also runs in virtual time.
        """
        batches, queue = self._batches, self._queue
        while queue.normal or queue.low:
            instance.taken = (request := queue.take(),)
            try:
                batches.add(request)
            except BaseException as error:
                self.fail(request, self._backend_error(error))
        if self.is_closing:
            return batches.clear()
        if not batches:
            return []
        quiet = self._timeout <= 0 or not self.is_awaiting()
        times = self.times if self.delay is not None or batches.low else None
        instance.taken = batch = batches.take(instance.max, now, quiet, self._lead_time(instance), times) or []
        return batch or None

    def next_close(self, leader: Instance) -> float | None:
        """When the next batch closes if nothing else comes; ``None`` if nothing waits."""
        return self._batches.next_close(leader.max, self._lead_time(leader))

    def _wait(self, leader: Instance) -> None:
        """Sleep until a request comes, the next batch times out, or no request is under way."""
        self._waiting.add(self)
        try:
            # NOTE: check again after entering `waiting`, or the last wake-up could be missed.
            if self.is_awaiting():
                if self.both_ways:
                    self._wake_leaders()  # one of them may no longer need to wait
                close = self.next_close(leader)
                if close is not None:
                    self.idle.wait(leader, min(max(0.0, close - perf_counter()), threading.TIMEOUT_MAX))
        finally:
            self._waiting.discard(self)

    def _lead_time(self, instance: Instance) -> float:
        """Seconds before a deadline at which a batch must close to meet it."""
        return 1.5 * instance.last_compute + _DEADLINE_MARGIN

    def _run(self, instance: Instance, batch: list[Request], collected: float) -> None:
        """Run a batch, in which some requests may already be over; deliver or fail each."""
        instance.started = start = perf_counter()
        requests = [request for request in batch if self._starts(instance, request, start, len(batch))]
        if not requests:
            return
        if self.around is None:
            errors = self._forward(instance, requests)
        else:
            errors = self.around(requests, start, partial(self._forward, instance, requests))
        now = perf_counter()
        instance.last_compute = now - start
        instance.record.batch(requests, collected, start, now)
        self.times.add(len(requests), now - start, now)
        with self.together():
            for request in requests:
                if errors and request in errors:
                    self._fail_defect(instance, request, errors[request])
                else:
                    self._go_on(instance, request)

    def _forward(self, instance: Instance, requests: list[Request]) -> Mapping[Request, BaseException]:
        """Run the backend; returns the errors of the requests that failed."""
        items = [request.data for request in requests]
        saved: list[Data] = [dict(item) for item in items] if len(items) > 1 else []
        deadlines = [request.deadline for request in requests if request.deadline is not None]
        instance.deadline = max(deadlines) if len(deadlines) == len(requests) else None
        try:
            if len(items) < instance.min:
                run_padded(instance.backend, items)
            else:
                forward: Callable[[list[Data]], object] = instance.backend.forward
                explain_returned(instance.backend, items, forward(items))
            return {}
        except BaseException as error:
            if len(requests) == 1:
                return {requests[0]: error}
            problem = describe(error)
        # If a batch raised, run each item alone from its original dict, so that only the bad ones fail.
        errors = {}
        for request, before in zip(requests, saved, strict=True):
            instance.started, instance.deadline = perf_counter(), request.deadline
            try:
                request.data.clear()
                request.data.update(before)
                if self.order is not None:
                    request.data[TASK_STATE_KEY] = self.order.copied_state(request)
                run_padded(instance.backend, [request.data])
            except BaseException as error:
                errors[request] = error
        if not errors and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "node %r: %s: a batch of %d failed, and each of its items ran alone: %s (logged once; a backend that "
                "takes no batches needs max = 1)",
                *(self.name, self.label, len(requests), problem),
            )
        return errors
