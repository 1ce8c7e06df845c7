"""A node whose instances process batches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter

from torchpipe_py.backends.base import Data, explain_returned, run_padded
from torchpipe_py.errors import describe, logger
from torchpipe_py.keys import TASK_STATE_KEY
from torchpipe_py.runtime.admission import DEADLINE_MARGIN
from torchpipe_py.runtime.nodes.instance import Instance
from torchpipe_py.runtime.nodes.leadership import Leadership
from torchpipe_py.runtime.nodes.node import Node
from torchpipe_py.runtime.nodes.queues import BatchQueue
from torchpipe_py.runtime.nodes.wiring import Loaded, Wiring
from torchpipe_py.runtime.request import Request


class BatchingNode(Node):
    """A node with batches: one instance at a time collects the next batch, hands leadership over, and computes."""

    def __init__(self, name: str, instances: Sequence[Instance], timeout: float) -> None:
        super().__init__(name, instances)
        self._timeout = timeout
        self._batches = BatchQueue(timeout, lambda data: instances[0].backend.batch_key(data))
        self._has_warned = False

    def open(self, wiring: Wiring) -> None:
        super().open(wiring)
        source = wiring.source
        announce = bool if source is None else partial(source.announce, self)
        self._leadership = Leadership(self._queue, self._batches, announce)

    def put(self, request: Request) -> None:
        request.caller = None
        self._queue.put(request)
        self._leadership.wake()
        if self.is_closing:
            self._fail_queued()

    # -- an instance --------------------------------------------------------------------------------------------------

    def _serve(self, instance: Instance) -> None:
        while self._leadership.lead(instance):
            since = perf_counter()
            try:
                instance.taken = batch = self._collect(instance)
                instance.busy = len(batch)
            finally:
                self._leadership.hand_over()
            if not batch:
                continue
            self._run(instance, batch, since)
            batch = []
            # NOTE: reset busy only after delivery, so that a request always counts in some node's load.
            instance.rest()
            if self._waiting:
                self._wake_leaders()
        if self._leadership.lead_after_close(instance):
            for request in self._batches.clear():
                self._fail_closed(request)

    def _collect(self, leader: Instance) -> list[Request]:
        """Collect the next batch; empty if another instance took the requests, or the node closes."""
        while True:
            self._receive(leader)
            if self.is_closing:
                return self._batches.clear()
            if not self._batches:
                return []
            batch = self._schedule(leader, perf_counter())
            if batch:
                return batch
            self._wait_for_company(leader)

    def _receive(self, leader: Instance) -> None:
        """Move all requests from the source, and from the queue, to the buckets."""
        if self._wiring.source is not None:
            self._wiring.source.fetch(self)
        now = perf_counter()
        while (request := self._queue.take(now)) is not None:
            leader.taken = (request,)
            try:
                self._batches.put(request)
            except BaseException as error:
                self._fail(request, self._backend_error(error))

    def _schedule(self, leader: Instance, now: float) -> list[Request] | None:
        """The batch that closes now; ``None`` if its requests should wait for company."""
        quiet = self._timeout <= 0 or not self.is_awaiting()
        times = self.times if self._target.is_on or self._batches.low else None
        leader.taken = batch = self._batches.take(leader.max, now, quiet, self._lead_time(leader), times) or ()
        return batch or None

    def _wait_for_company(self, leader: Instance) -> None:
        """Sleep until a request comes, the next batch times out, or no request is under way."""
        self._waiting.add(self)
        try:
            # NOTE: check again after entering `waiting`, or the last wake-up could be missed.
            if self.is_awaiting():
                if self._wiring.both_ways:
                    self._wake_leaders()  # one of them may no longer need to wait
                close = self._batches.next_close(leader.max, self._lead_time(leader))
                if close is not None:
                    self._leadership.wait(leader, min(max(0.0, close - perf_counter()), threading.TIMEOUT_MAX))
        finally:
            self._waiting.discard(self)

    def _lead_time(self, instance: Instance) -> float:
        """Seconds before a deadline at which a batch must close to meet it."""
        return 1.5 * instance.last_compute + DEADLINE_MARGIN

    def _run(self, instance: Instance, batch: list[Request], collected: float) -> None:
        """Run a batch, in which some requests may already be over; deliver or fail each."""
        instance.started = start = perf_counter()
        requests = [request for request in batch if self._begin_or_complete(instance, request, start, len(batch))]
        if not requests:
            return
        errors = self._run_around(requests, start, partial(self._forward, instance, requests))
        now = perf_counter()
        instance.last_compute = now - start
        instance.record.batch(requests, collected, start, now)
        self.times.add(len(requests), now - start, now)
        with self._wiring.together():
            for request in requests:
                if errors and request in errors:
                    self._fail_defect(instance, request, errors[request])
                else:
                    self._deliver_result(instance, request)

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
                if self._order is not None:
                    request.data[TASK_STATE_KEY] = self._order.copied_state(request)
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

    def _end_instances(self) -> None:
        self._leadership.close()

    # -- load ---------------------------------------------------------------------------------------------------------

    def queued(self) -> int:
        return super().queued() + (0 if self.is_closing else len(self._batches))

    def _queued_requests(self) -> list[Request]:
        return [*super()._queued_requests(), *self._batches.requests()]

    def queued_low(self) -> int:
        return super().queued_low() + (0 if self.is_closing else self._batches.low)

    def idle(self) -> int:
        return self._leadership.idle_count()

    def _batch_wait(self) -> float:
        return self._timeout

    # -- the wait for company -----------------------------------------------------------------------------------------

    def is_awaiting(self) -> bool:
        """Whether a request in flight could still reach this node, or one is due before the batch times out."""
        for node in self._wiring.upstream:
            if node is not self:
                if node.load() and not (node in self._wiring.both_ways and self._closes_before(node)):
                    return True
            elif any(instance.busy for instance in self.instances):
                return True  # through a logical node, a request may visit twice
        if not self._wiring.expected:
            return False
        left = self._batches.oldest() + self._timeout - perf_counter()
        return any(is_due(-self._timeout, left) for is_due in list(self._wiring.expected))

    def _closes_before(self, other: Loaded) -> bool:
        """Whether all requests at the other node also wait, and for less time.

        Two nodes that can reach each other would wait for each other: the one with the oldest request closes first.
        """
        return (
            isinstance(other, BatchingNode)
            and other in self._waiting
            and other.load() == len(other._batches)
            and self._batches.oldest() <= other._batches.oldest()
        )

    def wake_leader(self) -> None:
        """Wake the leader that waits for company."""
        self._leadership.wake_leader()
