"""The trace that a call is part of, in the form that goes over the wire (W3C Trace Context)."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple


class Trace(NamedTuple):
    """``parent`` is the ``traceparent``, ``state`` the ``tracestate``; ``None`` where there is none."""

    parent: str | None
    state: str | None = None


def trace_of(traceparent: str | None) -> Trace:
    """What the caller names, else OpenTelemetry's current span where the program uses that; nothing is imported."""
    if traceparent is not None:
        return Trace(traceparent or None)
    api: Any = sys.modules.get("opentelemetry.trace")
    if api is None:
        return Trace(None)
    context = api.get_current_span().get_span_context()
    if not context.is_valid:
        return Trace(None)
    parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    return Trace(parent, context.trace_state.to_header() or None)
