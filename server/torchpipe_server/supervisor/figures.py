"""Pure: the figures of several workers as those of one service."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torchpipe_py.runtime.statistics import COUNTS

Figures = dict[str, Any]

# Of a node.
TOTALS = ("requests", "batches", "failed", "expired", "queue_ms", "batch_wait_ms", "compute_ms")
HISTOGRAMS = ("queue", "batch_wait", "compute")
NOW = ("instances", "alive", "queued", "busy")
# Of a worker's requests to engine processes.
HAND_OVER = ("requests", "slot_wait_ms", "there_ms", "in_engine_ms", "back_ms")


def service_figures(alive: Iterable[Figures], past: Figures) -> Figures:
    """What the workers that are there have told last, with the totals of those that were (``add_past``)."""
    alive = list(alive)
    gpus = {gpu["index"]: gpu for worker in alive for gpu in worker.get("gpus", ())}
    return {
        "requests": {"inflight": sum(worker["inflight"] for worker in alive), **_requests([*alive, past])},
        "nodes": _nodes(alive, past),
        "hand_over": _hand_over([*alive, past]),
        "log_lines_dropped": _dropped([*alive, past]),
        "gpus": [gpus[index] for index in sorted(gpus)],
    }


def add_past(past: Figures, ended: Figures) -> Figures:
    """The totals of all workers that have ended, one more of them."""
    nodes = {}
    for name in {**past.get("nodes", {}), **ended.get("nodes", {})}:
        parts = [part["nodes"][name] for part in (past, ended) if name in part.get("nodes", {})]
        nodes[name] = _node_totals(parts)
    return {
        "requests": _requests([past, ended]),
        "nodes": nodes,
        "hand_over": _hand_over([past, ended]),
        "log_lines_dropped": _dropped([past, ended]),
    }


def add_requests(*parts: Figures) -> Figures:
    """Several summaries of a ``RequestCounters`` as one."""
    by_method: dict[str, dict[str, int]] = {}
    for part in parts:
        for method, outcomes in part["by_method"].items():
            counted = by_method.setdefault(method, {})
            for outcome, count in outcomes.items():
                counted[outcome] = counted.get(outcome, 0) + count
    latencies = [part["latency"] for part in parts]
    latency = {
        "counts": add_lists([[0] * COUNTS, *(latency["counts"] for latency in latencies)]),
        "sum_ms": sum(latency["sum_ms"] for latency in latencies),
    }
    return {"by_method": by_method, "latency": latency}


def add_lists(lists: Iterable[list[int]]) -> list[int]:
    """Element by element; empty ones, of those who have told nothing yet, do not count."""
    return [sum(values) for values in zip(*filter(None, lists), strict=True)]


def _requests(parts: Iterable[Figures]) -> Figures:
    return add_requests(*(part["requests"] for part in parts if "requests" in part))


def _hand_over(parts: Iterable[Figures]) -> Figures:
    """Of requests to engine processes, by those who have any."""
    told = [part["hand_over"] for part in parts if "hand_over" in part]
    return {key: sum(part[key] for part in told) for key in HAND_OVER}


def _dropped(parts: Iterable[Figures]) -> int:
    return sum(part.get("log_lines_dropped", 0) for part in parts)


def _nodes(workers: list[Figures], past: Figures) -> Figures:
    """Of the nodes that there are now: those of an earlier configuration are forgotten."""
    nodes = {}
    for name in dict.fromkeys(name for worker in workers for name in worker["nodes"]):
        alive = [worker["nodes"][name] for worker in workers if name in worker["nodes"]]
        before = past.get("nodes", {}).get(name)
        nodes[name] = {
            **{key: sum(node[key] for node in alive) for key in NOW},
            "oldest_batch_s": max(node["oldest_batch_s"] for node in alive),
            "min": alive[0]["min"],
            "max": alive[0]["max"],
            "instance_compute_ms": [spent for node in alive for spent in node["instance_compute_ms"]],
            **_node_totals([*alive, before] if before else alive),
        }
    return nodes


def _node_totals(parts: list[Figures]) -> Figures:
    sizes: dict[str, int] = {}
    for part in parts:
        for size, count in part["batch_sizes"].items():
            sizes[str(size)] = sizes.get(str(size), 0) + count
    return {
        **{key: sum(part[key] for part in parts) for key in TOTALS},
        "batch_sizes": dict(sorted(sizes.items(), key=lambda item: int(item[0]))),
        "histograms": {name: add_lists(part["histograms"][name] for part in parts) for name in HISTOGRAMS},
    }
