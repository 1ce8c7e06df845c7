"""Pure: what the nodes of a pipe did during a run, from its ``stats()`` before and after."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torchpipe_py.errors import counted

_TOTALS = ("requests", "batches", "failed", "expired")
_TIMES = ("queue_ms", "batch_wait_ms", "compute_ms")


def node_figures(before: dict[str, Any], after: dict[str, Any], seconds: float) -> dict[str, dict[str, Any]]:
    """For each node counts, mean batch, and milliseconds per request: null where nothing ran.

    ``compute_ms`` is the backend's time divided by the requests: a batch of 4 in 8 ms is 2 ms. ``busy`` is that time as
    a share of the instances' time in the run's ``seconds``; it may be above 1 for backends that wait for other nodes
    (``Jump``, ``MapReduce``), whose requests overlap.
    """
    return {name: _figures(before["nodes"][name], node, seconds) for name, node in after["nodes"].items()}


def _figures(before: dict[str, Any], after: dict[str, Any], seconds: float) -> dict[str, Any]:
    spent = {key: after[key] - before[key] for key in (*_TOTALS, *_TIMES)}
    requests, batches = spent["requests"], spent["batches"]
    sizes = Counter(after["batch_sizes"])
    sizes.subtract(before["batch_sizes"])
    return {
        "instances": after["instances"],
        "min": after["min"],
        "max": after["max"],
        **{key: spent[key] for key in _TOTALS},
        "mean_batch": requests / batches if batches else None,
        "batch_sizes": {size: count for size, count in sizes.items() if count},
        **{key: spent[key] / requests if requests else None for key in _TIMES},
        "busy": spent["compute_ms"] / 1000 / (seconds * after["instances"]),
    }


def node_rows(nodes: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    """The table's part about nodes, a line for each."""
    return [(f"node {name}", _line(node)) for name, node in nodes.items()]


def _line(node: dict[str, Any]) -> str:
    failures = "".join(f", {node[key]} {key}" for key in ("failed", "expired") if node[key])
    if not node["requests"]:
        return f"0 requests{failures}"
    times = "  ".join(f"{key.removesuffix('_ms').replace('_', ' ')} {node[key]:.2f}" for key in _TIMES)
    instances = f"{counted(node['instances'], 'instance')}, {node['busy']:.0%} busy"
    return f"{node['requests']} requests, mean batch {node['mean_batch']:.2f}{failures}; {times}  ms each; {instances}"
