"""A replica's resources and request limits, computed from the plan without building a pipe."""

from __future__ import annotations

from typing import Any, NamedTuple

from torchpipe_py.cores import usable_cores
from torchpipe_py.plan.build import Pipeline, plan_pipeline

UNKNOWN_BATCH = 32
"""Largest batch assumed for a custom backend, whose ``max`` is known only after its ``setup``."""
ROUNDS = 2
"""While one batch is computed the next one waits, complete: for it there must be as many requests again."""
SPARE = 10_000
"""Serve lets a replica have so many requests more than its pipe takes, so that it is the pipe that refuses them.

TRAP: requests that Serve itself holds back come to a replica by two in half a second, however fast it is.
"""


class Resources(NamedTuple):
    """The resources requested from Ray, and the bounds for Serve."""

    num_cpus: float
    num_gpus: float
    max_ongoing_requests: int
    max_queued_requests: int
    busy_requests: int


def plan_replica(config: Any) -> Pipeline:
    """The plan of a replica. Ray counts its CPUs: a node without ``instance_num`` has one instance."""
    return plan_pipeline(config, processes=usable_cores())


def resources_of(pipeline: Pipeline) -> Resources:
    """The resources and limits of one replica.

    ``num_cpus``: the most threads of a node that does not need CUDA. ``num_gpus``: the devices that ``device_id`` names
    in nodes that need CUDA. ``max_ongoing_requests``: more than ``max_inflight``, beyond which the pipe refuses
    requests. ``max_queued_requests``: requests that may wait in Serve while no replica runs. ``busy_requests``:
    requests that fill two batches for every instance.
    """
    cpus, gpus, requests, most = 1, 0, 0, pipeline.spec.max_inflight
    for name, plan in pipeline.plans.items():
        if plan.spec.owner != name:
            continue
        instances, limits = max(plan.spec.instance_num), plan.batch_range()
        requests += ROUNDS * instances * (UNKNOWN_BATCH if limits is None else limits[1])
        if plan.requires_cuda():
            gpus = max(gpus, plan.spec.device_id + 1)
        else:
            threads = [int(part.params.get("threads", 1)) for part in plan.parts()]
            cpus = max([cpus, *(instances * max(1, each) for each in threads)])
    return Resources(
        num_cpus=float(cpus),
        num_gpus=float(gpus),
        max_ongoing_requests=most + SPARE,
        max_queued_requests=most,
        busy_requests=min(requests, most),
    )
