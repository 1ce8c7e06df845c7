"""The lane of nodes whose instances take batches."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any

from torchpipe_py.backends.base import Data, run_padded
from torchpipe_py.runtime.idle import Leadership
from torchpipe_py.runtime.instance import Instance
from torchpipe_py.runtime.lanes.batch_queue import BatchQueue
from torchpipe_py.runtime.lanes.lane import Fail, Lane, Led, Source
from torchpipe_py.runtime.request import Request

_DEADLINE_MARGIN = 0.002  # seconds for waking up, routing and the way back


class BatchingLane(Lane):
    """One idle instance at a time leads: it collects the next batch, and hands leadership over before it computes."""

    def __init__(self, name: str, instances: Sequence[Instance], fail: Fail, waiting: set[Led], timeout: float) -> None:
        super().__init__(name, instances, fail, waiting)
        self._timeout = timeout
        self._batches = BatchQueue(timeout, self._batch_key)
        self.idle: Leadership = Leadership(self._queue, self._batches)
        self._source: Source | None = None

    def draw_from(self, source: Source) -> None:
        """Before the first request: have the leader fetch what waits there."""
        self.idle.has_more = partial(source.announce, self)
        self._source = source
        source.announce(self)  # NOTE: the first leader may have fallen asleep before it could say so

    def queued(self) -> int:
        return 0 if self.is_closing else len(self._queue) + len(self._batches)

    def is_awaiting(self) -> bool:
        """Whether some request in flight could still reach this node."""
        for lane in self.upstream:
            if lane is not self:
                if lane.load() and not (lane in self.both_ways and self._closes_before(lane)):
                    return True
            elif any(instance.busy for instance in self.instances):
                return True  # through a logical node, a request comes by a second time
        return False

    def _closes_before(self, other: Lane) -> bool:
        """Whether all that the other lane holds waits too, and has waited less long.

        Where each is reached from the other they would wait for each other: the one with the oldest request closes.
        """
        return (
            isinstance(other, BatchingLane)
            and other in self._waiting
            and other.load() == len(other._batches)
            and self._batches.oldest() <= other._batches.oldest()
        )

    def _serve(self, instance: Instance) -> None:
        while self.idle.lead(instance):
            since = perf_counter()
            instance.taken = batch = self._collect(instance)
            instance.busy = len(batch)
            self.idle.hand_over()
            if not batch:
                continue
            self.run(instance, batch, since)
            instance.taken = batch = []  # an idle instance keeps nothing of its last request
            # NOTE: busy ends only after delivery, so that a request is always visible in some node's load.
            instance.started = instance.busy = 0
            if self._waiting:
                self._wake_leaders()
        if self.idle.lead_last(instance):
            for request in self._batches.clear():
                self._fail_closed(request)

    def _recover(self, instance: Instance, error: BaseException) -> None:
        if self.idle.is_leader(instance):
            instance.taken = [*instance.taken, *self._batches.clear()]
        super()._recover(instance, error)

    def _collect(self, instance: Instance) -> list[Request]:
        """As leader, the next batch; empty where another instance has taken what there was, or the node closes."""
        batches, queue = self._batches, self._queue
        while True:
            if self._source is not None:
                self._source.fetch(self)
            while queue:
                try:
                    instance.taken = (queue.popleft(),)
                except IndexError:  # close() empties the queue too
                    break
                try:
                    batches.add(instance.taken[0])
                except BaseException as error:
                    self.fail(instance.taken[0], self._backend_error(error))
            if self.is_closing:
                return batches.clear()
            if not batches:
                return []
            quiet = self._timeout <= 0 or not self.is_awaiting()
            now = perf_counter()
            instance.taken = batch = batches.take(instance.max, now, quiet, self._lead_time(instance), self._fits) or []
            if batch:
                return batch
            self._wait(instance)

    def _wait(self, leader: Instance) -> None:
        """Sleep until a request comes, the next batch closes by the clock, or nothing is under way any more."""
        self._waiting.add(self)
        try:
            # NOTE: looked at again after the entry in `waiting`, or the last wake-up could be missed.
            if self.is_awaiting():
                if self.both_ways:
                    self._wake_leaders()  # one of them may wait for nothing else any more
                close = self._batches.next_close(leader.max, self._lead_time(leader))
                if close is not None:
                    self.idle.wait(leader, min(max(0.0, close - perf_counter()), threading.TIMEOUT_MAX))
        finally:
            self._waiting.discard(self)

    def _fits(self, size: int, seconds: float, now: float) -> int:
        """The largest batch of at most ``size`` that takes no longer than ``seconds``; ``size`` without ``delay``."""
        return size if self.delay is None else self.times.fitting(size, seconds, now)

    def _lead_time(self, instance: Instance) -> float:
        """How long before a deadline a batch must close to meet it, seconds."""
        return 1.5 * instance.last_compute + _DEADLINE_MARGIN

    def _batch_key(self, data: Data) -> Any:
        return self.instances[0].backend.batch_key(data)

    def run(self, instance: Instance, batch: list[Request], collected: float) -> None:
        """Run a batch of which some may be over already; deliver or fail each."""
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
        """Run the backend; the errors of the requests that it failed for."""
        items = [request.data for request in requests]
        instance.deadline = _last_deadline(requests)
        saved: list[Data] = []
        try:
            if len(items) > 1:
                saved = [dict(item) for item in items]
            if len(items) < instance.min:
                run_padded(instance.backend, items)
            else:
                instance.backend.forward(items)
            return {}
        except BaseException as error:
            if len(requests) == 1:
                return {requests[0]: error}
        # After a batch raised: each item alone, from the dict as it was, so that only the bad ones fail.
        errors = {}
        for index, request in enumerate(requests):
            instance.started, instance.deadline = perf_counter(), request.deadline
            try:
                if saved:
                    request.data.clear()
                    request.data.update(saved[index])
                run_padded(instance.backend, [request.data])
            except BaseException as error:
                errors[request] = error
        return errors


def _last_deadline(requests: Sequence[Request]) -> float | None:
    """When the last of them need not be run any more; ``None`` where one has no deadline."""
    last = 0.0
    for request in requests:
        if request.deadline is None:
            return None
        last = max(last, request.deadline)
    return last
