"""A pipe's statistics as metrics of Ray Serve, named as in ``torchpipe-serve``, and an autoscaling policy."""

from __future__ import annotations

from typing import Any

from torchpipe_py.runtime.record.statistics import NODE_COUNTERS, NODE_GAUGES, NODE_TIMES

FIGURE = "request_ms"

SIZE_BOUNDS = [2.0**power for power in range(9)]


class Metrics:
    """Metrics of ``library``, ``ray.serve.metrics``, that follow a pipe. For one thread."""

    def __init__(self, library: Any) -> None:
        tags = ("node",)
        counters = [(key, name, text, 1.0) for key, name, text in NODE_COUNTERS]
        counters += [(f"{key}_ms", name, text, 1e-3) for key, name, text in NODE_TIMES]
        self._counters = [
            (key, library.Counter(name, description=text, tag_keys=tags), factor)
            for key, name, text, factor in counters
        ]
        self._gauges = [(key, library.Gauge(name, description=text, tag_keys=tags)) for key, name, text in NODE_GAUGES]
        self._sizes = library.Histogram(
            "torchpipe_node_batch_size", description="Requests in a batch", boundaries=SIZE_BOUNDS, tag_keys=tags
        )
        self._pipe: Any = None
        self._before: dict[str, Any] = {}

    def update(self, run: Any) -> None:
        """Add what the pipe counted since the last call; a new pipe starts at zero."""
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


def request_ms(stats: dict[str, Any]) -> float:
    """Milliseconds that one more request keeps the slowest node of a pipe busy, by its ``stats()``; 0.0 at first."""
    nodes = [node for node in stats["nodes"].values() if node["requests"]]
    return max((node["compute_ms"] / node["requests"] / node["instances"] for node in nodes), default=0.0)


class QueueTime:
    """An autoscaling policy: enough replicas to keep the queue time at ``target_ms``.

    Serve calls it in its controller, which has no pipe. The queue time is estimated as the number of requests for
    each replica, in Serve and in the pipe, times ``request_ms``.
    """

    def __init__(self, target_ms: float) -> None:
        self._target_ms = target_ms

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        times = [value for value in (context.aggregated_metrics or {}).get(FIGURE, {}).values() if value > 0]
        if not times:
            return context.target_num_replicas, {}
        return context.total_num_requests * sum(times) / len(times) / self._target_ms, {}
