"""The routes that are served over HTTP, and what requests make of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torchpipe_py.errors import nearest
from torchpipe_py.wire import answers, errors
from torchpipe_py.wire.errors import ReplyTooLargeError, RouteError
from torchpipe_server.front.method import OK, Cancellable, Done, Method, TraceFields, reply_bound
from torchpipe_server.options import MONITORING_PATHS
from torchpipe_server.wire.errors import ProtocolError
from torchpipe_server.wire.http import HttpAnswer, HttpError, HttpReader, HttpRequest

METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
JSON = "application/json"

_ROUTE = "route"  # what a head is known to take, and the parameters
_PARAMETER = re.compile(r"\{(\w+)\}")


class Route(NamedTuple):
    """``path`` may have parts in braces, ``/models/{name}``. The method takes a ``HttpRequest``, its result is an
    ``HttpAnswer``."""

    verb: str
    path: str
    method: Method

    @property
    def name(self) -> str:
        """What its requests are counted as."""
        return f"{self.verb} {self.path}".lstrip()


class Routes:
    """Which route a request takes; ``monitoring`` says where those of ``MONITORING_PATHS`` are that are none here."""

    def __init__(self, routes: Sequence[Route], monitoring: str = "") -> None:
        self._routes, self._monitoring = routes, monitoring
        self._fixed = {(route.verb, route.path): route for route in routes if "{" not in route.path}
        self._patterns = [
            (re.compile(_PARAMETER.sub(r"(?P<\1>[^/]+)", route.path)), route) for route in routes if "{" in route.path
        ]
        self._paths = sorted({route.path for route in routes})

    def changed(self, change: Callable[[Route], Route]) -> Routes:
        """What ``change`` makes of each route."""
        return Routes(list(map(change, self._routes)), self._monitoring)

    def methods(self) -> list[tuple[str, Method]]:
        """Each with what its requests are counted as."""
        return [(route.name, route.method) for route in self._routes]

    def find(self, request: HttpRequest) -> tuple[Route, Mapping[str, str]]:
        """The route, and what the path has in place of the parts in braces. Raises ``RouteError``."""
        verb = "GET" if request.method == "HEAD" else request.method
        route = self._fixed.get((verb, request.path))
        if route is not None:
            return route, {}
        allowed = {other for other, path in self._fixed if path == request.path}
        for pattern, route in self._patterns:
            match = pattern.fullmatch(request.path)
            if match and route.verb == verb:
                return route, match.groupdict()
            if match:
                allowed.add(route.verb)
        path = request.path[:80]
        if not allowed:
            elsewhere = f"{self._monitoring}; " if self._monitoring and path in MONITORING_PATHS else ""
            raise RouteError(f"no {path}; {elsewhere}{nearest(path, self._near(path))}")
        verbs = sorted(allowed | {"HEAD"} if "GET" in allowed else allowed)
        raise RouteError(f"{path} takes {', '.join(verbs)}, not {request.method}", verbs)

    def _near(self, path: str) -> set[str]:
        """Where the way of the path, as far as there is one, may go on: few names, since each costs a comparison."""
        parts = path.split("/")
        ways = [known.split("/") for known in self._paths]
        depth = 1
        while depth < len(parts):
            on = [way for way in ways if len(way) > depth and (way[depth] == parts[depth] or way[depth][:1] == "{")]
            if not on:
                break
            ways, depth = on, depth + 1
        return {"/".join(way[: depth + 1]) + ("/…" if len(way) > depth + 1 else "") for way in ways}


class HttpService:
    """Routes, called by HTTP requests. One for all connections; ``reply`` is for any thread, the rest for one.

    ``headers`` are those of each answer besides its own; ``failure`` makes an answer of an error.
    """

    def __init__(
        self, routes: Routes, body_bytes: int, reply_bytes: int, methods: frozenset[str] = METHODS,
        headers: Mapping[str, str] | None = None,
        failure: Callable[[HttpRequest, BaseException], HttpAnswer] | None = None,
    ) -> None:  # fmt: skip
        self._routes, self._body_bytes, self._reply = routes, body_bytes, reply_bound(reply_bytes)
        self._methods, self._headers, self._failure = methods, headers, failure or _failure

    def reader(self) -> HttpReader:
        """What cuts the bytes of a new connection into requests."""
        return HttpReader(self._methods, self._body_bytes)

    def decode(self, request: HttpRequest) -> tuple[Method, HttpRequest]:
        """What the request calls, and the request. Raises what is wrong with it."""
        found = request.known.get(_ROUTE)
        if found is None:
            try:
                found = self._routes.find(request)
            except RouteError as error:
                raise request.error or error from None
            request.known[_ROUTE] = found
        route, request.parameters = found
        if request.error is not None:
            raise request.error
        return route.method, request

    def reply(self, request: HttpRequest, result: Any) -> tuple[bytes, str, str]:
        """The answer that carries an ``HttpAnswer``, or the exception there is in its place."""
        found = request.known.get(_ROUTE)
        name = "http" if found is None else found[0].name  # NOTE: what a client makes up is no name to count under
        try:
            if isinstance(result, BaseException):
                raise result
            if len(result.body) > self._reply.bytes:
                raise ReplyTooLargeError(len(result.body), self._reply)
            return request.answer(result, self._headers), name, OK
        except BaseException as error:  # a header that cannot be sent, too
            return request.answer(self._failure(request, error), self._headers), name, code_of(error)


def _failure(request: HttpRequest, error: BaseException) -> HttpAnswer:
    return error_answer(error)


def code_of(error: BaseException) -> str:
    """What the error is counted as."""
    return error.kind if isinstance(error, ProtocolError) else errors.code_of(error)


def error_answer(error: BaseException) -> HttpAnswer:
    """``{"error": …, "code": …, "retry_after_ms": …}`` under the status that belongs to the code."""
    if isinstance(error, HttpError):
        failure = answers.failure_of(error.status, error.kind, error.detail)
    elif isinstance(error, ProtocolError):
        failure = answers.failure_of(answers.STATUSES.get(error.kind, 400), error.kind, error.detail)
    else:
        failure = answers.failure(error)
    return json_answer(failure.body, failure.status, failure.headers)


def route(
    verb: str, path: str, start: Callable[[HttpRequest, Done], Cancellable | None], is_traced: bool | None = None
) -> Route:
    """One whose ``start`` calls ``done`` with an ``HttpAnswer``, or with the exception there is in its place.

    ``is_traced``: whether it runs the pipe; by default all but those of GET.
    """
    fields = _trace_fields if is_traced or (is_traced is None and verb != "GET") else None
    return Route(verb, path, Method(HttpRequest, start, _raise, request_id=_request_id, trace_fields=fields))


def _raise(error: BaseException) -> Any:
    """``HttpService`` makes an answer of it."""
    raise error


def _request_id(request: HttpRequest) -> str:
    return request.fields.get("x-request-id", "")


def _trace_fields(request: HttpRequest) -> TraceFields:
    return request.fields.get("traceparent"), request.fields.get("tracestate")


def json_answer(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> HttpAnswer:
    """``value`` as a line of JSON. ``ValueError`` for numbers that JSON has not: not a number, infinite."""
    return HttpAnswer(status, JSON, answers.to_line(value), headers or {})
