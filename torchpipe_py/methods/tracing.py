"""OpenTelemetry's server spans: one for each request that runs the pipe, below that of its ``traceparent``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from random import random
from typing import Any

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from torchpipe_py.methods.routes import OK, Cancellable, Done, Method, Served, protocol_of
from torchpipe_py.methods.rpc.wire import status_of
from torchpipe_py.wire import answers
from torchpipe_py.wire.errors import code_of
from torchpipe_py.wire.http import HttpAnswer

_FIELD_CHARACTERS = 512
_REQUEST_ID_CHARACTERS = 200
_PROPAGATOR = TraceContextTextMapPropagator()
_LOGGERS = ("opentelemetry.trace.span", "opentelemetry.trace.propagation.tracecontext")


Start = Callable[[Any, Done], "Cancellable | None"]


def keep_fields_out_of_the_log() -> None:
    """Silence OpenTelemetry's warnings of an invalid ``tracestate``: they quote a client's text."""
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


def traced(served: Served, provider: trace.TracerProvider, ratio: float, tracer_name: str) -> Served:
    """Add a span around each method that runs the pipe.

    A request with a parent is traced if the parent is sampled; of the others a share of ``ratio``.
    """
    tracer = provider.get_tracer(tracer_name)

    def change(name: str, method: Method) -> Method:
        fields, start = method.trace_fields, method.start
        if fields is None:
            return method
        attributes, ended = _attributes_of(name), _ENDED[protocol_of(name)]

        def end(span: trace.Span, args: Any, result: Any) -> None:
            model, _, version = method.model_of(args).rpartition("/")
            if model:
                span.set_attributes({"torchpipe.model": model, "torchpipe.model_version": version})
            outcome = code_of(result) if isinstance(result, BaseException) else method.outcome(result)
            span.set_attributes(ended(outcome, result))
            if outcome != OK:
                span.set_attribute("error.type", outcome)
                span.set_status(trace.StatusCode.ERROR, outcome)
            span.end()

        def start_traced(args: Any, done: Done) -> Cancellable | None:
            parent, state = fields(args)
            # This is the whole cost of a request that is not traced.
            context = None if parent is None else context_of(parent, state)
            if context is not None:
                if not trace.get_current_span(context).get_span_context().trace_flags.sampled:
                    return _within(context, start, args, done)
            elif random() >= ratio:
                return start(args, done)
            span = tracer.start_span(name, context or contexts.Context(), trace.SpanKind.SERVER, attributes)
            if request_id := method.request_id(args):
                span.set_attribute("torchpipe.request_id", request_id[:_REQUEST_ID_CHARACTERS])

            def answer(result: Any) -> None:
                try:
                    done(result)
                finally:
                    end(span, args, result)

            try:
                return _within(trace.set_span_in_context(span, contexts.Context()), start, args, answer)
            except BaseException as error:
                end(span, args, error)
                raise

        return method._replace(start=start_traced)

    return served.changed(change)


def context_of(parent: str, state: str | None) -> contexts.Context | None:
    """The context of the span that a ``traceparent`` names, with its ``tracestate`` (W3C Trace Context, level 2).

    ``None`` for what the standard does not allow; a ``tracestate`` that it does not allow is ignored.
    """
    if not isinstance(parent, str) or len(parent) > _FIELD_CHARACTERS:
        return None
    carrier = {"traceparent": parent}
    if isinstance(state, str) and len(state) <= _FIELD_CHARACTERS:
        carrier["tracestate"] = state
    return _PROPAGATOR.extract(carrier, contexts.Context()) or None


def _within(context: contexts.Context, start: Start, args: Any, done: Done) -> Cancellable | None:
    token = contexts.attach(context)
    try:
        return start(args, done)
    finally:
        contexts.detach(token)


def _attributes_of(label: str) -> dict[str, str]:
    """Attributes of the method of this label, by OpenTelemetry's conventions."""
    protocol = protocol_of(label)
    if protocol == "http":
        verb, _, path = label.partition(" ")
        return {"http.request.method": verb, "http.route": path}
    return {"rpc.system.name": protocol, "rpc.method": label.rpartition(" ")[2]}


def _http_status(outcome: str, result: Any) -> dict[str, int]:
    status = result.status if isinstance(result, HttpAnswer) else answers.STATUSES.get(outcome, 400)
    return {"http.response.status_code": status}


def _rpc_status(outcome: str, result: Any) -> dict[str, str]:
    return {"rpc.response.status_code": status_of(outcome) if isinstance(result, BaseException) else "OK"}


_ENDED: Mapping[str, Callable[[str, Any], Mapping[str, Any]]] = {
    "http": _http_status,
    "grpc": _rpc_status,
    "thrift": lambda outcome, result: {},  # it has no status
}
"""The attributes of an outcome and its result, or the exception in its place, by protocol."""
