"""OpenTelemetry's server spans: one for each request that runs the pipe, below the span that its ``traceparent`` names.

Exporters are OpenTelemetry's own, as ``OTEL_TRACES_EXPORTER`` and its like say.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Sequence
from functools import partial
from random import random
from typing import Any

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.sdk._configuration import _OTelSDKConfigurator  # what distributions of OpenTelemetry are to use
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased

from torchpipe_py.errors import ConfigError
from torchpipe_server.front.http import code_of
from torchpipe_server.front.method import OK, Cancellable, Done, Method
from torchpipe_server.front.server import Served

_PARENT = re.compile("(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_PARENT_CHARACTERS = 512
_KNOWN_FLAGS = 0b11
_STATE_CHARACTERS = 512
_STATE_MEMBERS = 32
_WORD = "[-_0-9a-z*/]"
_KEY = f"[a-z]{_WORD}{{0,255}}|[a-z0-9]{_WORD}{{0,240}}@[a-z]{_WORD}{{0,13}}"
_MEMBER = re.compile(f"({_KEY})=" r"([ -+\--<>-~]{0,255}[!-+\--<>-~])")
_REQUEST_ID_CHARACTERS = 200

Start = Callable[[Any, Done], "Cancellable | None"]


def set_up() -> trace.TracerProvider:
    """The process's provider, which takes every span: what is traced is decided before.

    It starts the exporters' threads, which a fork would not take along. ``ConfigError`` for what OpenTelemetry's
    variables name and is not there.
    """
    environment = os.environ
    if "service.name=" not in environment.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        environment.setdefault("OTEL_SERVICE_NAME", "torchpipe-serve")
    environment.setdefault("OTEL_TRACES_EXPORTER", "otlp")
    environment.setdefault("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    try:
        configurator: Any = _OTelSDKConfigurator
        configurator().configure(sampler=ParentBased(ALWAYS_ON))
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


def traced(served: Served, provider: trace.TracerProvider, ratio: float) -> Served:
    """The same with a span around each method that runs the pipe.

    A request with a parent has one if the parent's sampled flag says so, of the others a share of ``ratio``.
    """
    change = _Change(provider.get_tracer("torchpipe_server"), ratio)
    methods = {name: change(name, method) for name, method in served.methods.items()}
    return Served(methods, served.routes.changed(lambda route: route._replace(method=change(route.name, route.method))))


class _Change:
    """Makes of a method one with spans."""

    def __init__(self, tracer: trace.Tracer, ratio: float) -> None:
        self._tracer, self._ratio = tracer, ratio

    def __call__(self, name: str, method: Method) -> Method:
        fields, start, ratio = method.trace_fields, method.start, self._ratio
        if fields is None:
            return method

        def start_traced(args: Any, done: Done) -> Cancellable | None:
            named, state = fields(args)
            # NOTE: this is all that a request pays which is not traced.
            parent = None if named is None else parent_of(named, state)
            if parent is None and random() >= ratio:
                return start(args, done)
            return self._start(name, method, parent, args, done)

        return method._replace(start=start_traced)

    def _start(
        self, name: str, method: Method, parent: trace.SpanContext | None, args: Any, done: Done
    ) -> Cancellable | None:
        context = contexts.Context()
        if parent is not None:
            context = trace.set_span_in_context(trace.NonRecordingSpan(parent), context)
            if not parent.trace_flags.sampled:
                return _within(context, method.start, args, done)
        span = self._tracer.start_span(name, context, trace.SpanKind.SERVER)
        request_id = method.request_id(args)
        if request_id:
            span.set_attribute("torchpipe.request_id", request_id[:_REQUEST_ID_CHARACTERS])
        done = partial(_finish, span, method, done)
        try:
            return _within(trace.set_span_in_context(span, context), method.start, args, done)
        except BaseException as error:
            _end(span, code_of(error))
            raise


def _within(context: contexts.Context, start: Start, args: Any, done: Done) -> Cancellable | None:
    token = contexts.attach(context)
    try:
        return start(args, done)
    finally:
        contexts.detach(token)


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


def parent_of(parent: str | None, state: str | None) -> trace.SpanContext | None:
    """The span that a ``traceparent`` names, with its ``tracestate`` (W3C Trace Context, level 2).

    What is not as the standard has it is ignored, and told to nobody: it is a client's.
    """
    match = _PARENT.fullmatch(parent) if isinstance(parent, str) and len(parent) <= _PARENT_CHARACTERS else None
    if match is None or (match[1] == "00" and match[5]):
        return None
    flags = trace.TraceFlags(int(match[4], 16) & _KNOWN_FLAGS)
    return trace.SpanContext(int(match[2], 16), int(match[3], 16), True, flags, trace.TraceState(_members(state)))


def _members(state: str | None) -> Sequence[tuple[str, str]]:
    """Of a ``tracestate``; none where any of them is wrong. NOTE: TraceState would log what it does not take."""
    if not isinstance(state, str) or not 0 < len(state) <= _STATE_CHARACTERS:
        return ()
    members = [_MEMBER.fullmatch(part.strip(" \t")) for part in state.split(",") if part.strip(" \t")]
    pairs = [(member[1], member[2]) for member in members if member is not None]
    is_right = len(dict(pairs)) == len(members) <= _STATE_MEMBERS
    return pairs if is_right else ()
