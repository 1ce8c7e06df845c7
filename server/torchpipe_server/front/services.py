"""What a port answers: methods, and what makes calls of them from messages of Thrift and requests over HTTP."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from thriftpy2.thrift import TApplicationException

from torchpipe_py.errors import InvalidRequest, Overloaded, TorchpipeError, nearest
from torchpipe_py.wire import answers, errors
from torchpipe_py.wire.errors import Bound, ReplyTooLargeError, RouteError, describe_error, report
from torchpipe_server.options import MONITORING_PATHS, Options
from torchpipe_server.wire.errors import ProtocolError
from torchpipe_server.wire.http import HttpAnswer, HttpError, HttpReader, HttpRequest
from torchpipe_server.wire.thrift import BadArgumentsError, Limits, Message
from torchpipe_server.wire.thrift_reader import ThriftReader

logger = logging.getLogger("torchpipe_server")

OK = "ok"
METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
JSON = "application/json"

_ROUTE = "route"  # what a head is known to take, and the parameters
_PARAMETER = re.compile(r"\{(\w+)\}")

Done = Callable[[Any], None]
"""Takes the result, or the exception there is in its place; called exactly once, from any thread."""


class Cancellable(Protocol):
    """Work under way that can be ended; its ``deadline`` is in seconds of ``time.perf_counter``."""

    @property
    def deadline(self) -> float | None: ...

    def cancel(self, error: BaseException | None = None) -> object: ...


TraceFields = tuple["str | None", "str | None"]
"""``traceparent`` and ``tracestate``, as a client sent them."""


def _raise(error: BaseException) -> Any:
    raise error


class Method(NamedTuple):
    """One method of the service.

    ``start`` calls ``done`` once, or raises. ``fail`` makes a result of an error, or raises it where the method
    declares none for it. ``outcome`` is what a result is counted as, ``request_id`` the client's name of a request.
    ``trace_fields`` gives the request's trace; it is None for methods that do not run the pipe.
    """

    args: type
    start: Callable[[Any, Done], Cancellable | None]
    fail: Callable[[BaseException], Any] = _raise
    outcome: Callable[[Any], str] = lambda result: OK
    request_id: Callable[[Any], str] = lambda args: ""
    trace_fields: Callable[[Any], TraceFields] | None = None


def trace_fields(args: Any) -> TraceFields:
    """Of arguments, or a struct among them, that have fields of these names."""
    return getattr(args, "traceparent", None), getattr(args, "tracestate", None)


def trace_headers(request: Any) -> TraceFields:
    """Of a request over HTTP or gRPC."""
    return request.fields.get("traceparent"), request.fields.get("tracestate")


def reply_bound(size: int) -> Bound:
    """The bound of a reply, under the name that users know."""
    return Bound(size, "--max-reply-bytes")


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
    """Which route a request takes; ``monitoring`` is a hint for ``MONITORING_PATHS``, which another port serves."""

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


class RpcRequest(NamedTuple):
    """A message that came over gRPC, the call's metadata, and its deadline in milliseconds from now."""

    message: Any
    fields: Mapping[str, str]
    deadline_ms: float | None = None


class RpcAnswer(NamedTuple):
    """A message, or its bytes; ``headers`` are the metadata behind it, ``outcome`` is what it is counted as."""

    message: Any
    headers: Mapping[str, str] = {}
    outcome: str = OK


class Rpc(NamedTuple):
    """A method over gRPC. It takes a ``RpcRequest`` with a message of ``method.args``, its result is a ``RpcAnswer``.

    ``is_stream``: each message of a call is a request, and is answered by one message.
    """

    path: str
    method: Method
    is_stream: bool = False

    @property
    def name(self) -> str:
        """What its requests are counted as."""
        return f"gRPC {self.path.rpartition('/')[2]}"


class Served(NamedTuple):
    """What a port answers: Thrift's methods, HTTP's routes; and what gRPC's port does."""

    methods: Mapping[str, Method]
    routes: Routes
    rpcs: Sequence[Rpc] = ()

    def changed(self, change: Callable[[str, Method], Method]) -> Served:
        """What ``change`` makes of each method, of which it is given the name."""
        methods = {name: change(name, method) for name, method in self.methods.items()}
        routes = self.routes.changed(lambda route: route._replace(method=change(route.name, route.method)))
        return Served(methods, routes, [rpc._replace(method=change(rpc.name, rpc.method)) for rpc in self.rpcs])

    def names_with_pipe(self) -> frozenset[str]:
        """What calls that run the pipe are counted as."""
        named = [*self.methods.items(), *self.routes.methods(), *((rpc.name, rpc.method) for rpc in self.rpcs)]
        return frozenset(name for name, method in named if method.trace_fields is not None)


# -- protocols ------------------------------------------------------------------------------------------------------


class Service(Protocol):
    """One protocol: what cuts its bytes into requests, what they call, and replies. ``reply`` is for any thread."""

    def reader(self) -> Any:
        """Of a new connection."""

    def decode(self, request: Any) -> tuple[Method, Any]:
        """What the request calls, and the arguments. Raises what is wrong with either."""

    def reply(self, request: Any, result: Any) -> tuple[bytes, str, str]:
        """The answer that carries a result, or the exception there is in its place; method and outcome to count."""


class UnknownMethodError(Exception):
    """A message for a method that the service does not have."""


_UNDECLARED: Mapping[type, tuple[int, str]] = {
    UnknownMethodError: (TApplicationException.UNKNOWN_METHOD, "unknown_method"),
    BadArgumentsError: (TApplicationException.PROTOCOL_ERROR, "bad_arguments"),
}


class ThriftService:
    """One for all connections; ``reply`` is for any thread, the rest for one."""

    def __init__(self, methods: Mapping[str, Method], limits: Limits, reply_bytes: int = 64 * 2**20) -> None:
        self._methods, self._limits, self._reply = methods, limits, reply_bound(reply_bytes)

    def reader(self) -> ThriftReader:
        """What cuts the bytes of a new connection into messages."""
        return ThriftReader(self._limits, self._args_of)

    def _args_of(self, name: str) -> type | None:
        method = self._methods.get(name)
        return None if method is None else method.args

    def decode(self, message: Message) -> tuple[Method, Any]:
        """What the message calls, and the arguments. Raises what is wrong with either."""
        error = message.error
        if isinstance(error, ProtocolError):
            failure: TorchpipeError = InvalidRequest(str(error))
            if error.kind == Overloaded.code:
                failure = Overloaded(error.detail, retry_after_ms=1000)
            failure.code = error.kind
            raise failure
        method = self._methods.get(message.name)
        if method is None:
            raise UnknownMethodError(f"no method {message.name!r}")
        if error is not None:
            raise error
        args, message.args = message.args, None
        return method, args

    def reply(self, message: Message, result: Any) -> tuple[bytes, str, str]:
        """The answer that carries a result struct, or the exception there is in its place."""
        method = self._methods.get(message.name)
        if isinstance(result, BaseException):
            try:
                if method is None or type(result) in _UNDECLARED:
                    raise result
                result = method.fail(result)
            except BaseException as error:  # what the method does not declare becomes what every client understands
                kind, outcome = _UNDECLARED.get(type(error), (TApplicationException.INTERNAL_ERROR, ""))
                if outcome:
                    text = str(error)
                else:  # NOTE: whatever its own methods do, which may leave the loop
                    outcome, text = report(error)
                    text = f"{type(error).__name__}: {text}"
                return self._exception(message, kind, text, outcome)
        assert method is not None
        try:
            data = b"" if message.is_oneway else message.reply(result)
            if len(data) <= self._reply.bytes:
                return data, message.name, method.outcome(result)
        except Exception as error:
            logger.exception("a result of %s cannot be encoded", message.name)
            return self._exception(message, TApplicationException.INTERNAL_ERROR, describe_error(error), "internal")
        return self.reply(message, ReplyTooLargeError(len(data), self._reply))

    def _exception(self, message: Message, kind: int, text: str, outcome: str) -> tuple[bytes, str, str]:
        data = b"" if message.is_oneway else message.reply(TApplicationException(kind, text))
        # NOTE: what a client makes up must not become a name among the counters.
        return data, message.name if message.name in self._methods else "unknown", outcome


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
        self._methods, self._headers, self._failure = methods, headers, failure

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
        name = "http" if found is None else found[0].name  # NOTE: a client's own path must not become a counter
        try:
            if isinstance(result, BaseException):
                raise result
            if len(result.body) > self._reply.bytes:
                raise ReplyTooLargeError(len(result.body), self._reply)
            return request.answer(result, self._headers), name, OK
        except BaseException as error:  # a header that cannot be sent, too
            answer = self._failure(request, error) if self._failure else error_answer(error)
            return request.answer(answer, self._headers), name, code_of(error)


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

    fields = trace_headers if is_traced or (is_traced is None and verb != "GET") else None
    name = lambda request: request.fields.get("x-request-id", "")  # noqa: E731
    return Route(verb, path, Method(HttpRequest, start, request_id=name, trace_fields=fields))


def json_answer(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> HttpAnswer:
    """``value`` as a line of JSON. ``ValueError`` for NaN and infinity, which JSON cannot represent."""
    return HttpAnswer(status, JSON, answers.to_line(value), headers or {})


TELLING_BYTES = 5  # no request of any protocol is shorter
_TEXT = frozenset(b"\t\r\n" + bytes(range(0x20, 0x7F)))


class Services(NamedTuple):
    """A port's protocols."""

    thrift: Service
    http: Service

    def of(self, data: bytes) -> Service | None:
        """That in which a stream begins so; ``None`` while it may be either."""
        start = data[:TELLING_BYTES]
        if not _TEXT.issuperset(start):
            return self.thrift
        # Text is HTTP: for Thrift it would be a name of 150 MB and more, or a frame, whose fifth byte is not text.
        return self.http if len(start) == TELLING_BYTES else None


def limits_of(options: Options) -> Limits:
    """What a Thrift message may hold."""
    return Limits(
        message_bytes=options.max_message_bytes,
        string_bytes=options.max_message_bytes,
        text_bytes=options.max_text_bytes,
        items=options.max_items,
        depth=options.max_depth,
    )


def services_of(served: Served, options: Options) -> Services:
    """What answers, within the limits of the options."""
    return Services(
        ThriftService(served.methods, limits_of(options), options.max_reply_bytes),
        HttpService(served.routes, options.max_message_bytes, options.max_reply_bytes),
    )
