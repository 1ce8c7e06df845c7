"""OpenTelemetry's server spans: one for each request that runs the pipe, below the span that its ``traceparent`` names.

Exporters are OpenTelemetry's own, as ``OTEL_TRACES_EXPORTER`` and its like say.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.sdk._configuration import _OTelSDKConfigurator  # what distributions of OpenTelemetry are to use
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from torchpipe_py.errors import ConfigError
from torchpipe_server.serving.http import Route, code_of
from torchpipe_server.serving.protocols import Served
from torchpipe_server.serving.service import OK, Cancellable, Done, Method, TraceFields

_PARENT = re.compile("(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_PARENT_CHARACTERS = 512
_KNOWN_FLAGS = 0b11
_STATE_CHARACTERS = 512
_STATE_MEMBERS = 32
_WORD = "[-_0-9a-z*/]"
_KEY = f"[a-z]{_WORD}{{0,255}}|[a-z0-9]{_WORD}{{0,240}}@[a-z]{_WORD}{{0,13}}"
_MEMBER = re.compile(f"({_KEY})=" r"([ -+\--<>-~]{0,255}[!-+\--<>-~])")
_REQUEST_ID_CHARACTERS = 200


def set_up(ratio: float) -> trace.TracerProvider:
    """The process's provider, which samples ``ratio`` of the requests that come without a parent.

    For a process that forks no more: it starts the exporters' threads. ``ConfigError`` for what OpenTelemetry's
    variables name and is not there.
    """
    environment = os.environ
    if "service.name=" not in environment.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        environment.setdefault("OTEL_SERVICE_NAME", "torchpipe-serve")
    environment.setdefault("OTEL_TRACES_EXPORTER", "otlp")
    environment.setdefault("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    try:
        configurator: Any = _OTelSDKConfigurator
        configurator().configure(sampler=ParentBased(TraceIdRatioBased(ratio)))
    except Exception as error:
        hint = "torchpipe_py[otel] brings otlp, and console is always there"
        exporter = environment["OTEL_TRACES_EXPORTER"]
        raise ConfigError(
            f"--trace-ratio: OpenTelemetry cannot be set up (OTEL_TRACES_EXPORTER={exporter}; {hint}): {error}"
        ) from error
    return trace.get_tracer_provider()


def shut_down(provider: Any, seconds: float) -> bool:
    """Export what is left, for so long at most; whether that was enough."""
    thread = threading.Thread(target=provider.shutdown, name="torchpipe-flush", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def traced(served: Served, provider: trace.TracerProvider) -> Served:
    """The same with a span around each method that runs the pipe."""
    tracer = provider.get_tracer("torchpipe_server")
    methods = {name: _traced(tracer, name, method) for name, method in served.methods.items()}
    return Served(methods, served.routes.changed(partial(_traced_route, tracer)))


def _traced_route(tracer: trace.Tracer, route: Route) -> Route:
    return route._replace(method=_traced(tracer, route.name, route.method))


def _traced(tracer: trace.Tracer, name: str, method: Method) -> Method:
    fields_of = method.trace_fields
    if fields_of is None:
        return method

    def start(args: Any, done: Done) -> Cancellable | None:
        above = context_of(fields_of(args))
        span = tracer.start_span(name, above, trace.SpanKind.SERVER)
        if span.is_recording():
            done = partial(_finish, span, method, done)
            request_id = method.request_id(args)
            if request_id:
                span.set_attribute("torchpipe.request_id", request_id[:_REQUEST_ID_CHARACTERS])
        token = contexts.attach(trace.set_span_in_context(span, above))
        try:
            return method.start(args, done)
        except BaseException as error:
            _end(span, code_of(error))
            raise
        finally:
            contexts.detach(token)

    return method._replace(start=start)


def _finish(span: trace.Span, method: Method, done: Done, result: Any) -> None:
    """Answer first."""
    try:
        done(result)
    finally:
        _end(span, code_of(result) if isinstance(result, BaseException) else method.outcome(result))


def _end(span: trace.Span, outcome: str) -> None:
    if outcome != OK:
        span.set_attribute("error.type", outcome)
        span.set_status(trace.StatusCode.ERROR, outcome)
    span.end()


def context_of(fields: TraceFields) -> contexts.Context:
    """The context of a request's ``traceparent`` and ``tracestate`` (W3C Trace Context, level 2).

    What is not as the standard has it is ignored, and told to nobody: it is a client's.
    """
    parent, state = fields
    match = _PARENT.fullmatch(parent) if isinstance(parent, str) and len(parent) <= _PARENT_CHARACTERS else None
    if match is None or (match[1] == "00" and match[5]):
        return contexts.Context()
    flags = trace.TraceFlags(int(match[4], 16) & _KNOWN_FLAGS)
    span = trace.SpanContext(int(match[2], 16), int(match[3], 16), True, flags, trace.TraceState(_members(state)))
    return trace.set_span_in_context(trace.NonRecordingSpan(span), contexts.Context())


def _members(state: str | None) -> Sequence[tuple[str, str]]:
    """Of a ``tracestate``; none where any of them is wrong. NOTE: TraceState would log what it does not take."""
    if not isinstance(state, str) or not 0 < len(state) <= _STATE_CHARACTERS:
        return ()
    members = [_MEMBER.fullmatch(part.strip(" \t")) for part in state.split(",") if part.strip(" \t")]
    pairs = [(member[1], member[2]) for member in members if member is not None]
    is_right = len(dict(pairs)) == len(members) <= _STATE_MEMBERS
    return pairs if is_right else ()
