"""Custom handlers: any Thrift IDL, routes over HTTP, and a class whose coroutines use the pipe."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from functools import partial
from time import perf_counter
from typing import Any, ClassVar

from torchpipe_py import ConfigError, import_code, pipe
from torchpipe_py.serving import (
    JSON,
    OK,
    Cancellable,
    Done,
    HttpAnswer,
    Method,
    Route,
    answers,
    encode_json,
    nearest,
    reason,
    route,
    trace_fields,
)
from torchpipe_server.front.services import METHODS

Data = dict[str, Any]


class Handler:
    """Base class for ``--handler package.module:Class``::

        class Photos(Handler):
            service = thriftpy2.load("photos.thrift", "photos_thrift").Photos

            async def classify(self, image):
                label, score = (await self.run({"data": image}))["result"]
                return label

    ``service`` is the service that ``thriftpy2.load`` made from the IDL. The class defines each of its methods by name,
    with the arguments in the IDL's order, as ``async def`` or, if it awaits nothing, as a plain method. The returned
    value is the answer. Exceptions that the IDL declares reach the client as they are; others become a
    ``TApplicationException`` with type and message. Methods run on the worker's event loop and must not block; they
    may await ``self.run`` and anything of asyncio.

    ``routes`` maps paths for HTTP on the same port to methods, ``{"POST /photos": "upload"}``. Such a method gets the
    request, with its ``body``, ``fields``, ``query`` and ``parameters``. A returned dict or list is sent as JSON, text
    and bytes as they are, an ``HttpAnswer`` with its own status, type and headers. Either ``service`` or ``routes`` may
    be left out.

    ``service`` replaces ``InferenceService``. ``routes`` are added to the standard ones, and replace those with the
    same method and path. With ``standard_routes = False`` there are no standard routes, and no gRPC.
    """

    service: ClassVar[Any] = None
    routes: ClassVar[Mapping[str, str]] = {}
    standard_routes: ClassVar[bool] = True

    def __init__(self, run: Run) -> None:
        self.run = run


class Run:
    """An awaitable pipe: ``data = await self.run({"data": image})``."""

    def __init__(self, run: pipe) -> None:
        self._pipe = run

    async def __call__(self, data: Data, timeout: float | None = None) -> Data:
        """Run ``data`` and return it. Raises the error of the request, or the reason why it has no ``result``."""
        await self._pipe.acall(data, timeout)
        if "result" not in data:
            raise reason(data, "result")
        return data


class RunningMethod(Cancellable):
    """A coroutine of the handler, run as a task of the worker's loop."""

    deadline: float | None = None

    def __init__(self, coroutine: Any, finish: Callable[[Any, BaseException | None], None], seconds: float) -> None:
        self.deadline = perf_counter() + seconds if seconds > 0 else None
        self.ended: BaseException | None = None  # the reason why it was cancelled
        self._coroutine, self._finish = coroutine, finish
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(self._end)

    def cancel(self, error: BaseException | None = None) -> None:
        """Cancel the coroutine; its outcome is ``error``."""
        self.ended = self.ended or error or CancelledError()
        self._task.cancel()

    async def _run(self) -> None:
        try:
            value = await self._coroutine
        except BaseException as error:  # also ``SystemExit``: this process has other requests
            self._finish(None, self.ended if isinstance(error, asyncio.CancelledError) and self.ended else error)
        else:
            self._finish(value, None)

    def _end(self, task: asyncio.Task) -> None:
        if task.cancelled():  # before it began; otherwise `_run` handles it
            self._coroutine.close()
            self._finish(None, self.ended or CancelledError())


class CustomHandler:
    """Turns a custom handler into methods and routes. Raises ``ConfigError`` if the class does not fit its service."""

    def __init__(self, cls: type, run: pipe, deadline_ms: float = 0.0) -> None:
        self._place = f"--handler {cls.__module__}:{cls.__qualname__}"
        service, paths = getattr(cls, "service", None), getattr(cls, "routes", {})
        names = getattr(service, "thrift_services", None)
        if names is None and (service is not None or not paths):
            raise ConfigError(f"{self._place}: 'service' must be a service made by thriftpy2.load(...)")
        self._handler, self._seconds = cls(Run(run)), deadline_ms / 1000
        self.methods: Mapping[str, Method] = {name: self._method(service, name) for name in names or ()}
        self.routes: Sequence[Route] = [self._route(path, name) for path, name in paths.items()]
        self.is_alone = not getattr(cls, "standard_routes", True)
        """Whether the service has nothing but this handler."""

    def _function(self, name: str, what: str) -> Callable[..., Any]:
        function = getattr(self._handler, name, None)
        if not callable(function):
            members = set(dir(self._handler)) - {"routes", "run", "service", "standard_routes"}
            hint = nearest(name, sorted(member for member in members if not member.startswith("_")))
            raise ConfigError(f"{self._place}: no method {name!r} {what}; {hint}")
        return function  # type: ignore[no-any-return]

    def _route(self, path: str, name: str) -> Route:
        verb, _, target = path.partition(" ")
        if verb not in METHODS or not target.startswith("/"):
            raise ConfigError(f"{self._place}: the route {path!r}; expected a method and a path, as 'POST /photos'")
        function, seconds = self._function(name, f"for {path!r}"), self._seconds
        start = lambda request, done: _call(function, [request], seconds, _http_answer, done)  # noqa: E731
        return route(verb, target, start, is_traced=True)

    def _method(self, service: Any, name: str) -> Method:
        args, result = getattr(service, f"{name}_args"), getattr(service, f"{name}_result")
        function, seconds = self._function(name, "of its service"), self._seconds
        order = [spec[1] for _, spec in sorted(args.thrift_spec.items())]
        try:
            inspect.signature(function).bind(*order)
        except TypeError as error:
            raise ConfigError(f"{self._place}: {name}({', '.join(order)}): {error}") from None
        errors = {spec[2]: spec[1] for number, spec in result.thrift_spec.items() if number}

        def start(args: Any, done: Done) -> RunningMethod | None:
            return _call(function, [getattr(args, name) for name in order], seconds, partial(_answer, result), done)

        return Method(args, start, partial(_fail, result, errors), _outcome, trace_fields=trace_fields)


def load_handler(reference: str) -> type:
    """The class named by ``package.module:Class`` or ``file.py:Class``. Raises ``ConfigError``."""
    module_name, _, class_name = reference.partition(":")
    if not module_name or not class_name:
        raise ConfigError(f"--handler {reference}: expected package.module:Class or file.py:Class")
    try:
        module = import_code(module_name)
    except ConfigError as error:
        cause = error.__cause__
        raise ConfigError(f"--handler {reference}: {cause if isinstance(cause, ImportError) else error}") from cause
    cls = getattr(module, class_name, None)
    if not isinstance(cls, type):
        classes = [name for name, value in vars(module).items() if isinstance(value, type)]
        raise ConfigError(f"--handler {reference}: no such class; {nearest(class_name, classes)}")
    return cls


def _call(
    function: Callable[..., Any], args: list[Any], seconds: float, answer: Callable[[Any], Any], done: Done
) -> RunningMethod | None:
    """Start a method; ``done`` gets the ``answer`` made from its value or its coroutine's, or the error."""

    def finish(value: Any, error: BaseException | None) -> None:
        try:
            result = answer(value) if error is None else error
        except BaseException as wrong:  # also ``SystemExit`` of a value's own methods
            result = wrong
        done(result)

    value = function(*args)
    if inspect.iscoroutine(value):
        return RunningMethod(value, finish, seconds)
    finish(value, None)
    return None


def _http_answer(value: Any) -> HttpAnswer:
    """The returned value of a route's method as an answer."""
    if isinstance(value, HttpAnswer):
        return value
    if isinstance(value, (bytes, bytearray)):
        return HttpAnswer(200, "application/octet-stream", bytes(value))
    if isinstance(value, str):
        return HttpAnswer(200, "text/plain; charset=utf-8", answers.utf8_text(value))
    return HttpAnswer(200, JSON, answers.utf8_json(f"{encode_json(value)}\n"))


def _answer(result: type, value: Any) -> Any:
    """The returned value of a method as its result struct."""
    name = result.__name__.removesuffix("_result")
    is_void = all(spec[1] != "success" for spec in result.thrift_spec.values())  # type: ignore[attr-defined]
    if is_void and value is not None:
        raise TypeError(f"{name} returned a {type(value).__name__}; the IDL declares it void")
    if not is_void and value is None:
        raise TypeError(f"{name} returned None; the IDL declares a result")
    return result() if is_void else result(success=value)


def _fail(result: type, errors: dict[type, str], error: BaseException) -> Any:
    for kind, name in errors.items():
        if isinstance(error, kind):
            return result(**{name: error})
    raise error


def _outcome(result: Any) -> str:
    for number, spec in result.thrift_spec.items():
        error = getattr(result, spec[1]) if number else None
        if error is not None:
            return str(getattr(error, "code", type(error).__name__))
    return OK
