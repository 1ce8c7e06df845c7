"""The routes that are served over HTTP, and what requests make of them."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from email.utils import formatdate
from typing import Any, NamedTuple

from torchpipe_py.errors import InvalidRequest, TorchpipeError, nearest
from torchpipe_server.serving.service import (
    OK,
    Cancellable,
    Done,
    Method,
    Reply,
    ReplyTooLargeError,
    describe_error,
)
from torchpipe_server.wire.codec import TEXT_BYTES
from torchpipe_server.wire.http import HttpAnswer, HttpError, HttpReader, HttpRequest
from torchpipe_server.wire.protocol import ProtocolError

logger = logging.getLogger("torchpipe_server")

METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
JSON = "application/json"

STATUSES = {
    "not_found": 404,
    "unknown_node": 404,
    "method_not_allowed": 405,
    "too_slow": 408,
    "too_large": 413,
    "no_result": 422,
    "overloaded": 429,
    "cancelled": 503,
    "closed": 503,
    "unavailable": 503,
    "worker_died": 503,
    "deadline_exceeded": 504,
    "backend_error": 500,
    "backend_unavailable": 500,
    "config": 500,
    "internal": 500,
}
"""Of an error's code. The rest, what is wrong with a request, is 400."""

_PARAMETER = re.compile(r"\{(\w+)\}")


class RouteError(TorchpipeError):
    """A request that no route takes; ``allowed`` are the methods that the path has."""

    code = "not_found"

    def __init__(self, text: str, allowed: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.allowed = allowed
        if allowed:
            self.code = "method_not_allowed"


class RequestTooLargeError(InvalidRequest):
    """A part of a request that is larger than it may be."""

    code = "too_large"


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
    """Which route a request takes."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._fixed = {(route.verb, route.path): route for route in routes if "{" not in route.path}
        self._patterns = [
            (re.compile(_PARAMETER.sub(r"(?P<\1>[^/]+)", route.path)), route) for route in routes if "{" in route.path
        ]
        self._paths = sorted({route.path for route in routes})

    def find(self, request: HttpRequest) -> Route:
        """The route; ``request.parameters`` are then what stands for the parts in braces. Raises ``RouteError``."""
        verb = "GET" if request.method == "HEAD" else request.method
        route = self._fixed.get((verb, request.path))
        if route is not None:
            return route
        allowed = {other for other, path in self._fixed if path == request.path}
        for pattern, route in self._patterns:
            match = pattern.fullmatch(request.path)
            if match and route.verb == verb:
                request.parameters = match.groupdict()
                return route
            if match:
                allowed.add(route.verb)
        path = request.path[:80]
        if not allowed:
            raise RouteError(f"no {path}; {nearest(path, self._paths)}")
        verbs = sorted(allowed | {"HEAD"} if "GET" in allowed else allowed)
        raise RouteError(f"{path} takes {', '.join(verbs)}, not {request.method}", verbs)


class HttpService:
    """Routes, called by HTTP requests. One for all connections; ``reply`` is for any thread, the rest for one."""

    def __init__(self, routes: Routes, body_bytes: int, reply_bytes: int) -> None:
        self._routes, self._body_bytes, self._reply_bytes = routes, body_bytes, reply_bytes
        self.decoded_bytes = 0  # that what is made of the request decoded last takes beyond it, about

    def reader(self) -> HttpReader:
        """What cuts the bytes of a new connection into requests."""
        return HttpReader(METHODS, self._body_bytes)

    def method(self, request: HttpRequest) -> Method:
        """What the request calls. Raises what is wrong with it."""
        if request.error is not None:
            raise request.error
        return self._routes.find(request).method

    def decode(self, request: HttpRequest) -> tuple[Method, HttpRequest]:
        """What the request calls, and the request. Raises what is wrong with it."""
        self.decoded_bytes = TEXT_BYTES * request.size if request.is_json else 0
        return self.method(request), request

    def reply(self, request: HttpRequest, result: Any) -> Reply:
        """The answer that carries an ``HttpAnswer``, or the exception there is in its place."""
        try:
            name = self._routes.find(request).name
        except RouteError:
            name = "http"  # NOTE: what a client makes up must not become a name among the counters.
        outcome = OK
        if isinstance(result, HttpAnswer) and len(result.body) > self._reply_bytes:
            result = ReplyTooLargeError(len(result.body), self._reply_bytes)
        if isinstance(result, BaseException):
            outcome, result = code_of(result), error_answer(result)
        return request.answer(result, {"Date": formatdate(usegmt=True)}), name, outcome


def code_of(error: BaseException) -> str:
    """What the error is counted as."""
    if isinstance(error, CancelledError):
        return "cancelled"
    return str(error.kind if isinstance(error, ProtocolError) else getattr(error, "code", "internal"))


def error_answer(error: BaseException) -> HttpAnswer:
    """``{"error": …, "code": …, "retry_after_ms": …}`` under the status that belongs to the code."""
    code = code_of(error)
    status = error.status if isinstance(error, HttpError) else STATUSES.get(code, 400)
    if isinstance(error, ReplyTooLargeError):
        status = 500
    text = error.detail if isinstance(error, ProtocolError) else describe_error(error)
    if isinstance(error, RouteError):
        text = str(error)  # in which a path is no folder of this machine
    if code == "internal":
        logger.error("a request failed", exc_info=error)
        text = f"{type(error).__name__}: {text}"
    body: dict[str, Any] = {"error": text, "code": code}
    headers = {}
    retry_after_ms = getattr(error, "retry_after_ms", None)
    if retry_after_ms is None and status in (429, 503):
        retry_after_ms = 1000
    if retry_after_ms is not None:
        body["retry_after_ms"] = retry_after_ms
        headers["Retry-After"] = str(math.ceil(retry_after_ms / 1000))
    if isinstance(error, RouteError) and error.allowed:
        headers["Allow"] = ", ".join(error.allowed)
    return json_answer(body, status, headers)


def route(verb: str, path: str, start: Callable[[HttpRequest, Done], Cancellable | None]) -> Route:
    """One whose ``start`` calls ``done`` with an ``HttpAnswer``, or with the exception there is in its place."""
    return Route(verb, path, Method(HttpRequest, start, _raise, request_id=_request_id))


def _raise(error: BaseException) -> Any:
    """``HttpService`` makes an answer of it."""
    raise error


def _request_id(request: HttpRequest) -> str:
    return request.fields.get("x-request-id", "")


def json_answer(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> HttpAnswer:
    """``value`` as a line of JSON. ``ValueError`` for numbers that JSON has not: not a number, infinite."""
    return HttpAnswer(status, JSON, f"{json.dumps(value, allow_nan=False)}\n".encode(), headers or {})
