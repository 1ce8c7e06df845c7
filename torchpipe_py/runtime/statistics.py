"""What a pipe tells of itself: counters as plain dicts, the graph as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from torchpipe_py.runtime.node import Node
from torchpipe_py.runtime.runtime import Engine


def node_stats(node: Node) -> dict[str, Any]:
    """One node since it started.

    ``queue_ms``, ``batch_wait_ms`` and ``compute_ms`` are totals in milliseconds: over requests from their arrival
    until a leader took them, from then until their batch closed; over batches while the backend ran.
    ``batch_sizes`` counts batches by size, ``failed`` the requests whose backend raised, ``expired`` those whose
    deadline passed in the queue. ``instance_compute_ms`` has each instance's share. ``histograms`` has the same times:
    ``queue`` and ``batch_wait`` of requests, ``compute`` of batches, counted as ``histogram`` says.
    """
    instances = node.instances
    sizes: Counter[int] = Counter()
    for instance in instances:
        sizes.update(dict(instance.batch_sizes))
        if instance.singles:
            sizes[1] += instance.singles
    return {
        "instances": len(instances),
        "min": node.min,
        "max": node.max,
        "queued": node.queued(),
        "busy": sum(1 for instance in instances if instance.busy),
        "requests": sum(instance.requests + instance.singles for instance in instances),
        "batches": sum(instance.batches + instance.singles for instance in instances),
        "failed": sum(instance.failed for instance in instances),
        "expired": sum(instance.expired for instance in instances),
        "batch_sizes": dict(sorted(sizes.items())),
        "queue_ms": 1000 * sum(instance.queue_time for instance in instances),
        "batch_wait_ms": 1000 * sum(instance.batch_wait for instance in instances),
        "compute_ms": 1000 * sum(instance.compute_time for instance in instances),
        "instance_compute_ms": [1000 * instance.compute_time for instance in instances],
        "histograms": {
            "queue": _added(instance.queue_counts for instance in instances),
            "batch_wait": _added(instance.wait_counts for instance in instances),
            "compute": _added(instance.compute_counts for instance in instances),
        },
    }


def _added(histograms: Iterable[list[int]]) -> list[int]:
    return [sum(counts) for counts in zip(*histograms, strict=True)]


def describe(engine: Engine) -> str:
    """The graph, a line for each node."""
    state = "closed" if engine.is_closed else f"{engine.inflight} in flight"
    lines = [f"pipe({engine.name}, {state})"]
    for name in engine.graph.order:
        plan = engine.plans[name]
        node = engine.nodes[plan.spec.owner]
        after = engine.graph.successors[name]
        arrow = f" -> {', '.join(after)}" if after else ""
        lines.append(f"  {name}: {plan.label} x{len(node.instances)} [{node.min}..{node.max}]{arrow}")
    return "\n".join(lines)
