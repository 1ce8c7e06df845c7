"""A pipe as a deployment of Ray Serve: ``serve run torchpipe_py.ray:app config=configs/demo.toml``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import metrics
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, BackpressureConfig
from starlette.requests import Request
from starlette.responses import Response

from torchpipe_py.plan.config import Tables, parse_toml
from torchpipe_py.ray.arguments import Arguments, overridden, read_arguments
from torchpipe_py.ray.metrics import FIGURE, Metrics, QueueTime, request_ms
from torchpipe_py.ray.resources import Resources, plan_replica, resources_of
from torchpipe_py.ray.service import PipeReplica, import_modules

RETRY_AFTER_SECONDS = 1.0
HEALTH_SECONDS = 5.0
"""From one health check to the next. Serve replaces a replica that fails three in a row."""
TARGET_QUEUE_MS = 50.0


class PipeDeployment(PipeReplica):
    """What Serve calls of a replica.

    Over HTTP it answers ``POST /infer``; a handle calls ``remote`` with the bytes of an image, or whatever else
    ``data`` may be, for its result, or with a dict for the dict.
    """

    def __init__(self, arguments: Arguments, tables: Tables, folder: str) -> None:
        super().__init__(arguments, tables, folder)
        self._metrics = Metrics(metrics)

    async def __call__(self, given: Any, deadline_ms: float | None = None) -> Any:
        """An HTTP request from Serve's proxy, or what a handle was given."""
        if not isinstance(given, Request):
            return await self.infer(given, deadline_ms)
        path = given.scope["path"].removeprefix(given.scope.get("root_path", "").rstrip("/"))
        query = given.scope["query_string"].decode("latin-1")
        answer = await self.answer(given.method, path, query, given.headers, given.stream())
        return Response(answer.body, answer.status, answer.headers, "application/json")

    async def check_health(self) -> None:
        """Serve calls it again and again; each time the figures are passed on as well."""
        self._metrics.update(self._served.pipe)
        self.check()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """For the policy of ``scale_on=queue_time``."""
        return {FIGURE: request_ms(self._served.pipe.stats())}

    async def __del__(self) -> None:
        """Serve calls it once no request is left."""
        await self.end()


def app(args: Mapping[str, Any]) -> serve.Application:
    """An application of one deployment; ``args`` are ``torchpipe_py.ray.arguments.Arguments``, as words or values.

    Raises ``ConfigError`` that names the argument, or the place in the configuration, and the nearest valid name.
    """
    arguments = read_arguments(args)
    import_modules(arguments)
    tables = overridden(parse_toml(arguments.config), arguments.overrides)
    options = deployment_options(arguments, resources_of(plan_replica(tables)))
    deployment = serve.deployment(PipeDeployment).options(**options)
    return deployment.bind(arguments, tables, os.getcwd())


def deployment_options(arguments: Arguments, needed: Resources) -> dict[str, Any]:
    """For ``serve.deployment``: what the plan says, where the arguments do not say otherwise."""
    given = {name: getattr(arguments, name, None) for name in Resources._fields}
    chosen = needed._replace(**{name: value for name, value in given.items() if value is not None})
    options = {
        "max_ongoing_requests": chosen.max_ongoing_requests,
        "max_queued_requests": chosen.max_queued_requests,
        "ray_actor_options": {"num_cpus": chosen.num_cpus, "num_gpus": chosen.num_gpus},
        "backpressure_config": BackpressureConfig(status_code=429, retry_after_s=RETRY_AFTER_SECONDS),
        "health_check_period_s": HEALTH_SECONDS,
        "graceful_shutdown_timeout_s": arguments.drain_seconds,
        "graceful_shutdown_wait_loop_s": 0.5,
    }
    if arguments.max_replicas is None:
        return {**options, "num_replicas": arguments.replicas}
    scale: dict[str, Any] = {"min_replicas": arguments.replicas, "max_replicas": arguments.max_replicas}
    if arguments.scale_on == "queue_time":
        target = {"target_ms": arguments.target or TARGET_QUEUE_MS}
        policy = f"{QueueTime.__module__}:{QueueTime.__name__}"
        scale["policy"] = AutoscalingPolicy(policy_function=policy, policy_kwargs=target)
    else:
        scale["target_ongoing_requests"] = arguments.target or float(chosen.busy_requests)
    return {**options, "autoscaling_config": AutoscalingConfig(**scale)}
