"""Combines the statistics of workers into those of the service."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from torchpipe_py.serving import COUNTS, SINCE_START, add, metrics
from torchpipe_server.supervisor.messages import HAND_OVER, NOW, Figures

NOTHING: Figures = {
    "requests": {"by_model": {}},
    "nodes": {},
    "hand_over": dict.fromkeys(HAND_OVER, 0),
    "streams": {},
    "models": {},
    "metrics": {},
    "log_lines_dropped": 0,
}
"""The totals before any worker has reported."""


def add_past(past: Figures, ended: Figures) -> Figures:
    """Add a worker that has ended to the totals of those before it."""
    nodes = {name: {key: node[key] for key in SINCE_START} for name, node in ended["nodes"].items()}
    streams = {name: {**stream, "now": {}} for name, stream in ended["streams"].items()}
    totals: Figures = add(
        past, {**{key: ended[key] for key in NOTHING}, "nodes": nodes, "streams": streams, "metrics": {}}
    )
    totals["metrics"] = metrics.summed([past["metrics"], metrics.totals(ended["metrics"])])
    for key, counts in totals["models"].items():
        counts["last_ms"] = max(each["models"][key]["last_ms"] for each in (past, ended) if key in each["models"])
    return totals


def service_figures(alive: Sequence[Figures], past: Figures) -> Figures:
    """The last statistics of running workers, with the totals of those that ended (``add_past``).

    Only nodes and metrics of the running workers are included, not those of an earlier configuration.
    """
    totals = reduce(add_past, alive, past)
    nodes: dict[str, list[Figures]] = {}
    for worker in alive:
        for name, node in worker["nodes"].items():
            nodes.setdefault(name, []).append(node)
    measured = metrics.summed([past["metrics"], *(worker["metrics"] for worker in alive)])
    declared = {name for worker in alive for name in worker["metrics"]}
    gpus = {gpu["index"]: gpu for worker in alive for gpu in worker["gpus"]}
    return {
        **totals,
        "requests": {"inflight": sum(worker["inflight"] for worker in alive), **totals["requests"]},
        "nodes": {name: {**_now(each), **totals["nodes"][name]} for name, each in nodes.items()},
        "metrics": {name: family for name, family in measured.items() if name in declared},
        "gpus": [gpus[index] for index in sorted(gpus)],
    }


def request_figures(requests: Figures) -> Figures:
    """The statistics of requests by model and method, with their sums over models and over all."""
    by_method: Figures = {}
    latency_ms, latency = 0.0, [0] * COUNTS
    for methods in requests["by_model"].values():
        for method, each in methods.items():
            by_method[method] = add(by_method.get(method, {}), each.get("outcomes", {}))
            latency_ms += each.get("latency_ms", 0.0)
            latency = add(latency, each.get("latency", [0] * COUNTS))
    return {**requests, "by_method": by_method, "latency_ms": latency_ms, "histograms": {"latency": latency}}


def _now(nodes: list[Figures]) -> Figures:
    return {
        **{key: sum(node[key] for node in nodes) for key in NOW},
        "oldest_batch_s": max(node["oldest_batch_s"] for node in nodes),
        "min": nodes[0]["min"],
        "max": nodes[0]["max"],
        "instance_compute_ms": [spent for node in nodes for spent in node["instance_compute_ms"]],
    }
