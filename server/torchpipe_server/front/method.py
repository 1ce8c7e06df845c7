"""What is served: methods, which any protocol may call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torchpipe_py.wire.errors import Bound

OK = "ok"

Done = Callable[[Any], None]
"""Takes the result, or the exception there is in its place; called exactly once, from any thread."""


class Cancellable(Protocol):
    """Work under way that can be ended; its ``deadline`` is in seconds of ``time.perf_counter``."""

    @property
    def deadline(self) -> float | None: ...

    def cancel(self, error: BaseException | None = None) -> object: ...


TraceFields = tuple["str | None", "str | None"]
"""``traceparent`` and ``tracestate``, as a client sent them."""


class Method(NamedTuple):
    """One method of the service.

    ``start`` calls ``done`` once, or raises. ``fail`` makes a result of an error, or raises it where the method
    declares none for it. ``outcome`` says what a result is counted as, ``request_id`` what the client calls a request.
    ``trace_fields`` is there for methods that run the pipe: what the client says of the request's trace.
    """

    args: type
    start: Callable[[Any, Done], Cancellable | None]
    fail: Callable[[BaseException], Any]
    outcome: Callable[[Any], str] = lambda result: OK
    request_id: Callable[[Any], str] = lambda args: ""
    trace_fields: Callable[[Any], TraceFields] | None = None


def trace_fields(args: Any) -> TraceFields:
    """Of arguments, or a struct among them, that have fields of these names."""
    return getattr(args, "traceparent", None), getattr(args, "tracestate", None)


def reply_bound(size: int) -> Bound:
    """The bound of a reply, under the name that users know."""
    return Bound(size, "--max-reply-bytes")


class Service(Protocol):
    """One protocol: what cuts its bytes into requests, what they call, and replies. ``reply`` is for any thread."""

    def reader(self) -> Any:
        """Of a new connection."""

    def decode(self, request: Any) -> tuple[Method, Any]:
        """What the request calls, and the arguments. Raises what is wrong with either."""

    def reply(self, request: Any, result: Any) -> tuple[bytes, str, str]:
        """The answer that carries a result, or the exception there is in its place; method and outcome to count."""
