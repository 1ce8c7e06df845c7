"""How many replicas a queue time needs. Serve calls the policy in its controller, which has no pipe."""

from __future__ import annotations

from typing import Any

FIGURE = "request_ms"


def request_ms(stats: dict[str, Any]) -> float:
    """Milliseconds that one more request keeps the slowest node of a pipe busy, by its ``stats()``; 0.0 at first."""
    times = [
        node["compute_ms"] / node["requests"] / node["instances"]
        for node in stats["nodes"].values()
        if node["requests"]
    ]
    return max(times, default=0.0)


class QueueTime:
    """An autoscaling policy: as many replicas as keep the queue time at ``target_ms``.

    A request waits for those before it, in Serve and in the pipe: as many as there are for each replica, times
    ``request_ms``.
    """

    def __init__(self, target_ms: float) -> None:
        self._target_ms = target_ms

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        times = [value for value in (context.aggregated_metrics or {}).get(FIGURE, {}).values() if value > 0]
        if not times:
            return context.target_num_replicas, {}
        return context.total_num_requests * sum(times) / len(times) / self._target_ms, {}
