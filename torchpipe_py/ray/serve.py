"""A pipe as a deployment of Ray Serve: ``serve run torchpipe_py.ray:app config=configs/demo.toml``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import grpc
from ray import serve
from ray.serve import metrics
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, BackpressureConfig
from starlette.requests import Request
from starlette.responses import Response

from torchpipe_py import parse_toml
from torchpipe_py.methods.rpc.messages import OIP, methods
from torchpipe_py.ray.arguments import Arguments, overridden, read_arguments
from torchpipe_py.ray.metrics import FIGURE, Metrics, QueueTime, request_ms
from torchpipe_py.ray.resources import Resources, plan_replica, resources_of
from torchpipe_py.ray.service import PipeReplica
from torchpipe_py.serving import HttpRequest, Tables, import_all, joined_fields

RETRY_AFTER_SECONDS = 1.0
HEALTH_SECONDS = 5.0
"""Seconds between health checks. Serve replaces a replica that fails three in a row."""
TARGET_QUEUE_MS = 50.0


class PipeDeployment(PipeReplica):
    """The methods of a replica that Serve calls.

    Over HTTP it answers ``POST /infer`` and the Open Inference Protocol; a handle calls ``remote`` with the bytes of an
    image, or whatever else ``data`` may be, for its result, or with a dict for the dict.
    """

    def __init__(self, arguments: Arguments, tables: Tables, folder: str) -> None:
        super().__init__(arguments, tables, folder)
        self._metrics = Metrics(metrics)

    async def __call__(self, given: Any, deadline_ms: float | None = None) -> Any:
        """Answer an HTTP request from Serve's proxy, or a call of a handle."""
        if not isinstance(given, Request):
            return await self.infer(given, deadline_ms)
        prefix = given.scope.get("root_path", "").rstrip("/")
        request = HttpRequest(given.method, given.scope["raw_path"].decode("latin-1").removeprefix(prefix))
        request.query = given.scope["query_string"].decode("latin-1")
        request.fields = joined_fields(given.headers.items())
        answer = await self.answer(request, given.stream())
        return Response(answer.body, answer.status, answer.headers, answer.kind)

    async def check_health(self) -> None:
        """Serve calls it again and again; each time the figures are reported as well."""
        self._metrics.update(self._served.pipe)
        self.check()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Figures for the policy of ``scale_on=queue_time``."""
        return {FIGURE: request_ms(self._served.pipe.stats())}

    async def __del__(self) -> None:
        """Serve calls it once no request is left."""
        await self.end()


class Message(bytes):
    """A message that is already serialised."""

    def SerializeToString(self) -> bytes:  # noqa: N802
        return bytes(self)


def _rpc(path: str) -> Any:
    """The method that Serve calls for a gRPC message."""

    async def answer(self: PipeDeployment, message: bytes, grpc_context: Any) -> Message:
        answer = await self.rpc(path, message, joined_fields(grpc_context.invocation_metadata()))
        if answer.code is not None:
            from grpc import StatusCode

            grpc_context.set_code(StatusCode[answer.code])
            grpc_context.set_details(answer.text)
        grpc_context.set_trailing_metadata([(name.lower(), value) for name, value in answer.headers.items()])
        return Message(answer.data)

    return answer


_UNARY = [method for method in methods() if method.containing_service.full_name == OIP and not method.client_streaming]
for _method in _UNARY:
    setattr(PipeDeployment, _method.name, _rpc(f"/{OIP}/{_method.name}"))


def add_inference(servicer: Any, server: Any) -> None:
    """Make Serve's proxies pass gRPC messages unchanged to ``PipeDeployment``; for ``grpc_servicer_functions``."""
    handlers = {method.name: grpc.unary_unary_rpc_method_handler(None) for method in _UNARY}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(OIP, handlers),))


def app(args: Mapping[str, Any]) -> serve.Application:
    """An application of one deployment; ``args`` are ``torchpipe_py.ray.arguments.Arguments``, as words or values.

    Raises ``ConfigError`` that names the argument, or the place in the configuration, and the nearest valid name.
    """
    arguments = read_arguments(args)
    import_all(arguments.import_code)
    tables = overridden(parse_toml(arguments.config), arguments.overrides)
    options = deployment_options(arguments, resources_of(plan_replica(tables)))
    deployment = serve.deployment(PipeDeployment).options(**options)
    return deployment.bind(arguments, tables, os.getcwd())


def deployment_options(arguments: Arguments, needed: Resources) -> dict[str, Any]:
    """Options of ``serve.deployment``: values of the plan, unless the arguments set them."""
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
