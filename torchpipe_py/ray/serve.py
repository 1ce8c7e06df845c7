"""A pipe as a deployment of Ray Serve: ``serve run torchpipe_py.ray:app config=configs/demo.toml``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from ray import serve
from ray.serve import metrics
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, BackpressureConfig
from starlette.requests import Request
from starlette.responses import Response

from torchpipe_py.plan.build import plan_pipeline
from torchpipe_py.plan.config import Tables, parse_toml
from torchpipe_py.ray import scaling
from torchpipe_py.ray.arguments import Arguments, found_folder, overridden, read_arguments, read_user_config
from torchpipe_py.ray.metrics import Metrics
from torchpipe_py.ray.resources import Resources, resources_of
from torchpipe_py.ray.service import Service
from torchpipe_py.registry import import_code
from torchpipe_py.runtime.pipe import pipe

RETRY_AFTER_SECONDS = 1.0
HEALTH_SECONDS = 5.0
"""From one health check to the next. Serve replaces a replica that fails three in a row."""
TARGET_QUEUE_MS = 50.0


class PipeDeployment:
    """A replica: one pipe, which forms the batches. ``serve.batch`` would form them twice.

    ``tables`` are what ``app`` read in ``folder``. Over HTTP it answers ``POST /infer``; a handle calls ``remote`` with
    the bytes of an image, or whatever else ``data`` may be, for its result, or with a dict for the dict.
    """

    def __init__(self, arguments: Arguments, tables: Tables, folder: str) -> None:
        self._arguments, self._tables, self._folder = arguments, tables, folder
        self._enter(arguments.config)
        _import(arguments)
        self._service = Service(partial(pipe, self._tables), arguments)
        self._metrics = Metrics(metrics)

    async def __call__(self, given: Any, deadline_ms: float | None = None) -> Any:
        """An HTTP request from Serve's proxy, or what a handle was given."""
        if not isinstance(given, Request):
            return await self._service.infer(given, deadline_ms)
        path = given.scope["path"].removeprefix(given.scope.get("root_path", "").rstrip("/"))
        query = given.scope["query_string"].decode("latin-1")
        answer = await self._service.answer(given.method, path, query, given.headers, given.stream())
        return Response(answer.body, answer.status, answer.headers, "application/json")

    async def infer(self, given: Any, deadline_ms: float | None = None) -> Any:
        """What ``remote`` of a handle calls, by name."""
        return await self._service.infer(given, deadline_ms)

    async def stats(self) -> dict[str, Any]:
        """``pipe.stats()`` of this replica."""
        return self._service.current.stats()

    async def check_health(self) -> None:
        """Serve asks again and again; each time it is told the figures as well."""
        self._metrics.tell(self._service.current)
        self._service.check()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """For the policy of ``scale_on=queue_time``."""
        return {scaling.FIGURE: scaling.request_ms(self._service.current.stats())}

    async def reconfigure(self, user_config: Any) -> None:
        """Exchange the pipe for that of another file, or of other values; no request is lost.

        What cannot be built is raised at the start of a replica; later it is logged, and the pipe before stays.
        """
        await self._service.exchange(partial(self._pipe_for, user_config))

    async def __del__(self) -> None:
        """Serve calls it once no request is left."""
        await self._service.end()

    def _pipe_for(self, user_config: Any) -> pipe | None:
        """Another pipe, or none where that is what there is."""
        config, overrides = read_user_config(user_config, self._arguments)
        before = os.getcwd()
        try:
            self._enter(config)
            tables = overridden(parse_toml(config), overrides)
            if tables == self._tables:
                return None
            run = pipe(tables)
        except BaseException:
            os.chdir(before)  # the pipe before stays
            raise
        self._tables = tables
        return run

    def _enter(self, config: str) -> None:
        """Work where relative files are found."""
        os.chdir(found_folder(config, self._folder))


def app(args: Mapping[str, Any]) -> serve.Application:
    """An application of one deployment; ``args`` are ``torchpipe_py.ray.arguments.Arguments``, as words or values.

    Raises ``ConfigError`` that names the argument, or the place in the configuration, and the nearest valid name.
    """
    arguments = read_arguments(args)
    _import(arguments)
    tables = arguments.tables()
    options = deployment_options(arguments, resources_of(plan_pipeline(tables)))
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
        policy = f"{scaling.__name__}:{scaling.QueueTime.__name__}"
        scale["policy"] = AutoscalingPolicy(policy_function=policy, policy_kwargs=target)
    else:
        scale["target_ongoing_requests"] = arguments.target or float(chosen.busy_requests)
    return {**options, "autoscaling_config": AutoscalingConfig(**scale)}


def _import(arguments: Arguments) -> None:
    for name in arguments.import_code.split(","):
        if name.strip():
            import_code(name.strip())
