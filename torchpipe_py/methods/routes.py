"""Methods and the routes that lead to them, whichever server reads the requests: ``torchpipe-serve`` or Ray Serve."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, Protocol

from torchpipe_py.errors import nearest
from torchpipe_py.wire import answers
from torchpipe_py.wire.errors import RouteError
from torchpipe_py.wire.http import HttpAnswer, HttpRequest

OK = "ok"
JSON = "application/json"

_PARAMETER = re.compile(r"\{(\w+)\}")

Done = Callable[[Any], None]
"""Takes the result, or the exception instead of it; called exactly once, from any thread."""


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
    """Which route a request takes; ``elsewhere`` has hints for paths, perhaps with ``*``, of another port."""

    def __init__(self, routes: Sequence[Route], elsewhere: Mapping[str, str] | None = None) -> None:
        self._routes, self._elsewhere = routes, elsewhere or {}
        self._fixed = {(route.verb, route.path): route for route in routes if "{" not in route.path}
        self._patterns = [
            (re.compile(_PARAMETER.sub(r"(?P<\1>[^/]+)", route.path)), route) for route in routes if "{" in route.path
        ]
        self._paths = sorted({route.path for route in routes})

    def changed(self, change: Callable[[Route], Route]) -> Routes:
        """What ``change`` makes of each route."""
        return Routes(list(map(change, self._routes)), self._elsewhere)

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
            elsewhere = next((hint for known, hint in self._elsewhere.items() if fnmatchcase(path, known)), "")
            raise RouteError(f"no {path}; {elsewhere}{elsewhere and '; '}{nearest(path, self._near(path))}")
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
    """A message that came over gRPC, the call's metadata, its deadline in milliseconds from now, and whether the
    service is ending."""

    message: Any
    fields: Mapping[str, str]
    deadline_ms: float | None = None
    is_ending: bool = False


class RpcAnswer(NamedTuple):
    """A message, or its bytes; ``headers`` are the trailing metadata, ``outcome`` is the label it is counted under."""

    message: Any
    headers: Mapping[str, str] = {}
    outcome: str = OK


class Rpc(NamedTuple):
    """A method over gRPC. It takes a ``RpcRequest`` with a message of ``method.args``, its result is a ``RpcAnswer``.

    ``is_stream``: each message of a call is a request, and is answered by one message. ``is_watch``: the answer to a
    call's one message is sent again when it is another one, until the service ends.
    """

    path: str
    method: Method
    is_stream: bool = False
    is_watch: bool = False

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


def route(
    verb: str, path: str, start: Callable[[HttpRequest, Done], Cancellable | None], is_traced: bool | None = None
) -> Route:
    """One whose ``start`` calls ``done`` with an ``HttpAnswer``, or with an exception.

    ``is_traced``: whether it runs the pipe; by default all but those of GET.
    """

    fields = trace_headers if is_traced or (is_traced is None and verb != "GET") else None
    name = lambda request: request.fields.get("x-request-id", "")  # noqa: E731
    return Route(verb, path, Method(HttpRequest, start, request_id=name, trace_fields=fields))


def json_answer(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> HttpAnswer:
    """``value`` as a line of JSON. ``ValueError`` for NaN and infinity, which JSON cannot represent."""
    return HttpAnswer(status, JSON, answers.to_line(value), headers or {})
