"""A pipe's figures as metrics of Ray Serve, under the names that ``torchpipe-serve`` has in ``/metrics``."""

from __future__ import annotations

from typing import Any

_COUNTERS = (
    ("requests", "torchpipe_node_requests", "Requests that a node's backend was run on", 1.0),
    ("batches", "torchpipe_node_batches", "Batches that a node has run", 1.0),
    ("failed", "torchpipe_node_failures", "Requests whose backend raised", 1.0),
    ("expired", "torchpipe_node_expired", "Requests whose deadline passed in a node's queue", 1.0),
    ("queue_ms", "torchpipe_node_queue_seconds", "Time of requests in a node's queue", 1e-3),
    (
        "batch_wait_ms",
        "torchpipe_node_batch_wait_seconds",
        "Time of requests after that until their batch closed",
        1e-3,
    ),
    ("compute_ms", "torchpipe_node_compute_seconds", "Time of batches in a node's backend", 1e-3),
)
_GAUGES = (
    ("queued", "torchpipe_node_pending", "Requests in a node's queue"),
    ("busy", "torchpipe_node_instances_busy", "Instances of a node that are computing"),
    ("oldest_batch_s", "torchpipe_node_oldest_batch_seconds", "For how long the oldest batch of a node runs"),
)
_SIZES = ("torchpipe_node_batch_size", "Requests in a batch")
SIZE_BOUNDS = [2.0**power for power in range(9)]


class Metrics:
    """Tells ``library`` (``ray.serve.metrics``) what a pipe did since it was told last. For one thread."""

    def __init__(self, library: Any) -> None:
        tags = ("node",)
        self._counters = [
            (key, library.Counter(name, description=text, tag_keys=tags), factor)
            for key, name, text, factor in _COUNTERS
        ]
        self._gauges = [(key, library.Gauge(name, description=text, tag_keys=tags)) for key, name, text in _GAUGES]
        name, text = _SIZES
        self._sizes = library.Histogram(name, description=text, boundaries=SIZE_BOUNDS, tag_keys=tags)
        self._pipe: Any = None
        self._before: dict[str, Any] = {}

    def tell(self, run: Any) -> None:
        """``run`` is the pipe; another one than before starts from nothing."""
        before = self._before if run is self._pipe else {}
        self._pipe, self._before = run, run.stats()["nodes"]
        for node, figures in self._before.items():
            tags, last = {"node": node}, before.get(node, {})
            for key, counter, factor in self._counters:
                more = figures[key] - last.get(key, 0)
                if more > 0:
                    counter.inc(factor * more, tags=tags)
            for key, gauge in self._gauges:
                gauge.set(figures[key], tags=tags)
            sizes = last.get("batch_sizes", {})
            for size, count in figures["batch_sizes"].items():
                for _ in range(count - sizes.get(size, 0)):
                    self._sizes.observe(size, tags=tags)
