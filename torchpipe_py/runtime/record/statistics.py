"""Counts and times that instances record, and the plain dicts that ``pipe.stats`` builds from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torchpipe_py.runtime.request import Request

COUNTS = 28
"""Number of counters in a histogram of times: up to 2**27 µs (two minutes); the last one counts longer times."""

BOUNDS_MS = [2**power / 1000 for power in range(COUNTS - 1)]
"""Exclusive upper bounds of the counters in milliseconds; the last counter has no bound."""


PLACES = 64
"""Number of counters while recording, enough for any time. ``folded`` reduces them to ``COUNTS``."""


# For a node: the key in its statistics, the metric's name, its description.
NODE_COUNTERS = (
    ("requests", "torchpipe_node_requests", "Requests that a node's backend was run on"),
    ("batches", "torchpipe_node_batches", "Batches that a node has run"),
    ("failed", "torchpipe_node_failures", "Requests whose backend raised"),
    ("expired", "torchpipe_node_expired", "Requests whose deadline passed in a node's queue"),
    ("shed", "torchpipe_node_shed", "Requests refused in a node's queue, where they had waited too long"),
)
NODE_GAUGES = (
    ("queued", "torchpipe_node_pending", "Requests in a node's queue"),
    ("instances", "torchpipe_node_instances", "Instances of a node, of all workers"),
    ("alive", "torchpipe_node_instances_alive", "Instances of a node whose thread runs"),
    ("busy", "torchpipe_node_instances_busy", "Instances of a node that are computing"),
    ("oldest_batch_s", "torchpipe_node_oldest_batch_seconds", "For how long the oldest batch of a node runs"),
)
NODE_TIMES = (
    ("queue", "torchpipe_node_queue_seconds", "Time of a request from its arrival at a node until it was taken"),
    ("batch_wait", "torchpipe_node_batch_wait_seconds", "Time of a request from then until its batch was closed"),
    ("compute", "torchpipe_node_compute_seconds", "Time of a batch in a node's backend"),
)


def folded(places: Sequence[int]) -> list[int]:
    """Histogram from counters indexed by ``int(seconds * 1e6).bit_length()``: first below 1 µs, then below 2**n µs."""
    # Recording code inlines that expression, to avoid a function call for each time of each request.
    return [*places[: COUNTS - 1], sum(places[COUNTS - 1 :])]


Recorder = Callable[[str, int, Sequence[Request], float, float, float], object]
"""Receives each batch that has run, from any thread: node, instance, requests, and times of ``time.perf_counter``.

The times are when the batch was ``collected``, when it ``started``, and when it ``ended``.
"""


class Record:
    """Totals of one instance in seconds, and histograms of ``PLACES`` counters.

    One thread at a time writes: the instance's own, or that of a caller that acts for it. Each batch is passed to
    ``recorders``, which all instances of a pipe share and which may change.
    """

    def __init__(self, node: str, instance: int, recorders: Sequence[Recorder] = ()) -> None:
        self.traces = recorders
        self._node, self._instance = node, instance
        self.singles = 0  # requests in nodes without batches; the fields below count batches and their requests
        self.requests = self.batches = self.failed = self.expired = self.shed = 0
        self.queue_time = self.batch_wait = self.compute_time = 0.0
        self.batch_sizes: Counter[int] = Counter()
        self.queue_counts, self.wait_counts, self.compute_counts = ([0] * PLACES for _ in range(3))

    def single(self, request: Request, start: float, end: float) -> None:
        """Record a request that ran alone from ``start`` to ``end``."""
        queued, computed = start - request.arrived, end - start
        self.singles += 1
        self.queue_time += queued
        self.compute_time += computed
        self.queue_counts[int(queued * 1e6).bit_length()] += 1
        self.compute_counts[int(computed * 1e6).bit_length()] += 1
        if self.traces:
            self.traced((request,), start, start, end)

    def batch(self, requests: Sequence[Request], collected: float, start: float, end: float) -> None:
        """Record a batch, of which a leader took the first request at ``collected``."""
        size = len(requests)
        self.requests += size
        self.batches += 1
        self.batch_sizes[size] += 1
        queue_counts, wait_counts = self.queue_counts, self.wait_counts
        for request in requests:
            arrived = request.arrived
            # A request that arrives while the leader collects has no queue time.
            taken = arrived if arrived > collected else collected
            queued, waited = taken - arrived, start - taken
            self.queue_time += queued
            self.batch_wait += waited
            queue_counts[int(queued * 1e6).bit_length()] += 1
            wait_counts[int(waited * 1e6).bit_length()] += 1
        self.computed(end - start)
        if self.traces:
            self.traced(requests, collected, start, end)

    def queued(self, request: Request, start: float) -> None:
        """Record the start of a request that computes elsewhere; ``computed`` and ``traced`` follow."""
        self.singles += 1
        self.queue_time += start - request.arrived
        self.queue_counts[int((start - request.arrived) * 1e6).bit_length()] += 1

    def computed(self, seconds: float) -> None:
        """Record that the backend ran for ``seconds``."""
        self.compute_time += seconds
        self.compute_counts[int(seconds * 1e6).bit_length()] += 1

    def traced(self, requests: Sequence[Request], collected: float, start: float, end: float) -> None:
        """Add the batch to the traces, if there are any."""
        for trace in self.traces:
            trace(self._node, self._instance, requests, collected, start, end)


def summed(records: Sequence[Record]) -> dict[str, Any]:
    """Totals of one node since it started, from the records of its instances.

    ``queue_ms``, ``batch_wait_ms`` and ``compute_ms`` are totals in milliseconds: for requests, from arrival until a
    leader took them, and from then until their batch closed; for batches, while the backend ran.
    ``batch_sizes`` counts batches by size, ``failed`` requests whose backend raised, ``expired`` requests whose
    deadline passed in the queue, ``shed`` those without one that had waited too long there. ``instance_compute_ms`` is
    the compute time of each instance. ``histograms`` has the same times: ``queue`` and ``batch_wait`` of requests,
    ``compute`` of batches, each with ``COUNTS`` counters.
    """

    def total(name: str) -> Any:
        return sum(getattr(record, name) for record in records)

    def added(name: str) -> list[int]:
        return folded([sum(counts) for counts in zip(*(getattr(record, name) for record in records), strict=True)])

    sizes: Counter[int] = Counter()
    for record in records:
        sizes.update(dict(record.batch_sizes))
    if total("singles"):
        sizes[1] += total("singles")
    return {
        "requests": total("requests") + total("singles"),
        "batches": total("batches") + total("singles"),
        "failed": total("failed"),
        "expired": total("expired"),
        "shed": total("shed"),
        "batch_sizes": dict(sorted(sizes.items())),
        "queue_ms": 1000 * total("queue_time"),
        "batch_wait_ms": 1000 * total("batch_wait"),
        "compute_ms": 1000 * total("compute_time"),
        "instance_compute_ms": [1000 * record.compute_time for record in records],
        "histograms": {
            "queue": added("queue_counts"),
            "batch_wait": added("wait_counts"),
            "compute": added("compute_counts"),
        },
    }


TOTALS = ("requests", "batches", "failed", "expired", "shed", "queue_ms", "batch_wait_ms", "compute_ms")
SINCE_START = (*TOTALS, "batch_sizes", "histograms")
"""Keys of a node's statistics that are totals since the start."""


def add(one: Any, other: Any) -> Any:
    """Add numbers; lists element by element, dicts key by key."""
    if isinstance(one, dict):
        both = {key: add(one[key], other[key]) for key in one.keys() & other.keys()}
        return {**one, **other, **both}
    if isinstance(one, list):
        return [add(*pair) for pair in zip(one, other, strict=True)]
    return one + other
