"""The backends of a node's instances, made from its plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torchpipe_py.backends.base import Backend, BackendConfig, Graphs, Shared
from torchpipe_py.backends.control.ranges import Composed
from torchpipe_py.plan.build import NodePlan


def creators(plan: NodePlan, graphs: Graphs) -> list[Callable[[int], Backend]]:
    """One function for each instance, from its index to its backend: several parts of an ``&`` are one backend."""
    counts = plan.spec.instance_num
    shared = [Shared() for _ in plan.backends]

    def create(instance: int) -> Backend:
        config = BackendConfig(
            label=plan.label,
            device_id=plan.spec.device_id,
            instance=instance,
            instance_num=max(counts),
            reaches_caller=plan.reaches_caller,
            graphs=graphs,
        )
        parts = [
            backend.create(replace(config, shared=own, instance_num=count))
            for backend, count, own in zip(plan.backends, counts, shared, strict=True)
            if instance < count
        ]
        return parts[0] if len(parts) == 1 else Composed(replace(config, children=tuple(parts)))

    return [create] * max(counts)
