"""Methods and the routes that lead to them, whichever server reads the requests: ``torchpipe-serve`` or Ray Serve."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

from torchpipe_py.errors import nearest
from torchpipe_py.wire import answers
from torchpipe_py.wire.errors import RouteError
from torchpipe_py.wire.http import UNROUTED, HttpAnswer, HttpRequest

OK = "ok"
JSON = "application/json"
_GRPC = "gRPC "  # before the names of methods, as labels
_INFER = "/infer"

_PARAMETER = re.compile(r"\{(\w+)\}")

Done = Callable[[Any], None]
"""Takes the result, or the exception instead of it; called exactly once, from any thread."""


class Cancellable(Protocol):
    """Work under way that can be ended; its ``deadline`` is in seconds of ``time.perf_counter``."""

    @property
    def deadline(self) -> float | None:
        """None, unless the work has to end by then."""
        return None

    @property
    def is_queued(self) -> bool:
        """Whether nothing works on it yet, so that no work is lost if it is cancelled."""
        return False

    def cancel(self, error: BaseException | None = None) -> object:
        """End it with ``error``; by default because its client left."""


class AnswerStream(Protocol):
    """An answer in parts, which ends with its connection; for the loop's thread."""

    def begin(self, head: bytes) -> None:
        """Write the head of the answer."""

    def write(self, data: bytes) -> bool:
        """Write a part; returns whether there is room for more. ``StreamSource.write_more`` reports new room."""

    def end(self, label: str) -> None:
        """Count the request under ``label``, and close the connection once all is written."""


class StreamSource(Cancellable, Protocol):
    """A request that is answered in parts."""

    def attach(self, stream: AnswerStream) -> None:
        """Begin the answer."""

    def write_more(self) -> None:
        """Write what waits: there is room again."""


TraceFields = tuple["str | None", "str | None"]
"""The values of ``traceparent`` and ``tracestate`` that a client sent."""


def _raise(error: BaseException) -> Any:
    raise error


class Method(NamedTuple):
    """One method of the service.

    ``start`` calls ``done`` once, or raises. ``fail`` makes a result of an error, or raises it where the method
    declares none for it. ``outcome`` gives the label of a result among the counters, ``request_id`` the client's name
    of a request. ``trace_fields`` gives the request's trace; it is None for methods that do not run the pipe.
    ``is_streamed``: ``start`` returns a ``StreamSource``, or calls ``done``. ``takes_long`` says of arguments whether
    ``start`` takes long to read them, so that it should run on another thread than the event loop's. ``model_of`` gives
    ``NAME/VERSION`` of the model that arguments ask, once ``start`` has read them; empty if that is unknown.
    """

    args: type
    start: Callable[[Any, Done], Cancellable | None]
    fail: Callable[[BaseException], Any] = _raise
    outcome: Callable[[Any], str] = lambda result: OK
    request_id: Callable[[Any], str] = lambda args: ""
    trace_fields: Callable[[Any], TraceFields] | None = None
    is_streamed: bool = False
    takes_long: Callable[[Any], bool] | None = None
    model_of: Callable[[Any], str] = lambda args: ""


def trace_fields(args: Any) -> TraceFields:
    """Read the trace from arguments, or a struct among them, with fields of these names."""
    return getattr(args, "traceparent", None), getattr(args, "tracestate", None)


model_in: Callable[[Any], str] = attrgetter("model")
"""``NAME/VERSION`` of the model that a request over HTTP or gRPC asks."""


def trace_headers(request: Any) -> TraceFields:
    """Read the trace of a request over HTTP or gRPC."""
    return request.fields.get("traceparent"), request.fields.get("tracestate")


@dataclass(frozen=True)
class Route:
    """A path and its method, which takes an ``HttpRequest`` and answers with an ``HttpAnswer``.

    ``path`` may have parts in braces, ``/models/{name}``. ``changes_service``: other requests are answered differently
    after it, so it is never answered under a host name that is not allowed.
    """

    verb: str
    path: str
    method: Method
    changes_service: bool = False

    @cached_property
    def label(self) -> str:
        """The name of its requests among the counters."""
        return f"{self.verb} {self.path}"


class Routes:
    """Routes by path; ``elsewhere`` has hints for paths, perhaps with ``*``, of another port."""

    def __init__(self, routes: Sequence[Route], elsewhere: Mapping[str, str] | None = None) -> None:
        self._routes, self._elsewhere = routes, elsewhere or {}
        self._fixed = {(route.verb, route.path): route for route in routes if "{" not in route.path}
        self._patterns: dict[str, list[tuple[Callable[[str], re.Match[str] | None], Route]]] = {}
        for route in routes:
            if "{" in route.path:
                pattern = re.compile(_PARAMETER.sub(r"(?P<\1>[^/]+)", route.path))
                self._patterns.setdefault(route.verb, []).append((pattern.fullmatch, route))
        self._paths = sorted({route.path for route in routes})

    def changed(self, change: Callable[[Route], Route]) -> Routes:
        """The routes with ``change`` applied to each."""
        return Routes(list(map(change, self._routes)), self._elsewhere)

    def with_own(self, own: Sequence[Route]) -> Routes:
        """These and ``own``, which come first, and in place of those of the same method and path."""
        taken = {(route.verb, route.path) for route in own}
        others = [route for route in self._routes if (route.verb, route.path) not in taken]
        return Routes([*own, *others], self._elsewhere)

    def methods(self) -> list[tuple[str, Method]]:
        """Methods, and the labels of their requests among the counters."""
        return [(route.label, route.method) for route in self._routes]

    def find(self, request: HttpRequest) -> tuple[Route, Mapping[str, str]]:
        """The route, and what the path has in place of the parts in braces. Raises ``RouteError``."""
        verb, path = "GET" if request.method == "HEAD" else request.method, request.path
        route = self._fixed.get((verb, path))
        if route is not None:
            return route, {}
        for match_path, route in self._patterns.get(verb, ()):
            match = match_path(path)
            if match is not None:
                return route, match.groupdict()
        raise self._refusal(request)

    def _refusal(self, request: HttpRequest) -> RouteError:
        allowed = {verb for verb, path in self._fixed if path == request.path}
        allowed |= {
            verb for verb, patterns in self._patterns.items() if any(match(request.path) for match, _ in patterns)
        }
        path = request.path[:80]
        if not allowed:
            elsewhere = next((hint for known, hint in self._elsewhere.items() if fnmatchcase(path, known)), "")
            near, (begin, _, name) = nearest(path, self._near(path)), path.rpartition("/")
            if begin == _INFER and name and ("POST", _INFER) in self._fixed:
                near = f"a model is named in the query: {_INFER}?node_name={name}"
            return RouteError(f"no {path}; {elsewhere}{elsewhere and '; '}{near}")
        verbs = sorted(allowed | {"HEAD"} if "GET" in allowed else allowed)
        return RouteError(f"{path} takes {', '.join(verbs)}, not {request.method}", verbs)

    def _near(self, path: str) -> set[str]:
        """Known continuations of the part of the path that exists: few names, since each costs a comparison."""
        parts = path.split("/")
        ways = [known.split("/") for known in self._paths]
        depth = 1
        while depth < len(parts):
            on = [way for way in ways if len(way) > depth and (way[depth] == parts[depth] or way[depth][:1] == "{")]
            if not on:
                break
            ways, depth = on, depth + 1
        return {"/".join(way[: depth + 1]) + ("/…" if len(way) > depth + 1 else "") for way in ways}


class RpcRequest:
    """A message that came over gRPC, the call's metadata, its deadline in milliseconds, and whether the service is
    ending. ``arrived``: from when the deadline counts, in seconds of ``perf_counter``, if not from now. ``model`` is
    ``NAME/VERSION`` of the one that it asks, once that is known."""

    __slots__ = ("arrived", "deadline_ms", "fields", "is_ending", "message", "model")

    query = ""  # only a request over HTTP has one

    def __init__(
        self, message: Any, fields: Mapping[str, str], deadline_ms: float | None = None, is_ending: bool = False,
        arrived: float | None = None,
    ) -> None:  # fmt: skip
        self.message, self.fields, self.deadline_ms, self.is_ending = message, fields, deadline_ms, is_ending
        self.arrived, self.model = arrived, ""


class RpcAnswer(NamedTuple):
    """A message; ``headers`` are the trailing metadata, ``outcome`` is the label it is counted under."""

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
    def label(self) -> str:
        """The name of its requests among the counters."""
        return f"{_GRPC}{self.path.rpartition('/')[2]}"


def protocol_of(label: str) -> str:
    """The protocol of requests that are counted under this label: ``thrift``, ``http`` or ``grpc``."""
    if label.startswith(_GRPC):
        return "grpc"
    return "http" if label == UNROUTED or " /" in label else "thrift"


class Served(NamedTuple):
    """The methods of Thrift, the routes of HTTP and the methods of gRPC that a service has.

    ``figures`` returns the totals of its models, by ``NAME/VERSION``.
    """

    methods: Mapping[str, Method]
    routes: Routes
    rpcs: Sequence[Rpc] = ()
    figures: Callable[[], Mapping[str, Mapping[str, int]]] = dict

    def changed(self, change: Callable[[str, Method], Method]) -> Served:
        """The same with ``change(name, method)`` in place of each method."""
        methods = {name: change(name, method) for name, method in self.methods.items()}
        routes = self.routes.changed(lambda route: replace(route, method=change(route.label, route.method)))
        rpcs = [rpc._replace(method=change(rpc.label, rpc.method)) for rpc in self.rpcs]
        return Served(methods, routes, rpcs, self.figures)

    def names_with_pipe(self) -> frozenset[str]:
        """The labels of calls that run the pipe."""
        named = [*self.methods.items(), *self.routes.methods(), *((rpc.label, rpc.method) for rpc in self.rpcs)]
        return frozenset(name for name, method in named if method.trace_fields is not None)


def route(
    verb: str, path: str, start: Callable[[HttpRequest, Done], Cancellable | None], is_traced: bool | None = None,
    is_streamed: bool = False, changes_service: bool = False,
    takes_long: Callable[[HttpRequest], bool] | None = None,
) -> Route:  # fmt: skip
    """A route whose ``start`` calls ``done`` with an ``HttpAnswer``, or with an exception.

    ``is_traced``: whether it runs the pipe; by default all routes but those of GET. ``is_streamed``, ``takes_long``:
    see ``Method``, ``changes_service``: see ``Route``.
    """

    fields = trace_headers if is_traced or (is_traced is None and verb != "GET") else None
    name = lambda request: request.fields.get("x-request-id", "")  # noqa: E731
    method = Method(HttpRequest, start, request_id=name, trace_fields=fields, is_streamed=is_streamed)
    return Route(verb, path, method._replace(takes_long=takes_long, model_of=model_in), changes_service)


def json_answer(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> HttpAnswer:
    """Answer with a line of JSON. Raises ``ValueError`` for NaN and infinity, which JSON cannot represent."""
    return HttpAnswer(status, JSON, answers.to_line(value), headers or {})
