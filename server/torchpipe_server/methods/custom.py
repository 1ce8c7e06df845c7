"""A service of one's own: any Thrift IDL, a class whose methods are coroutines, the pipe behind them."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from contextvars import ContextVar, copy_context
from functools import partial
from time import perf_counter
from typing import Any, ClassVar

from torchpipe_py import ConfigError, import_code, pipe
from torchpipe_py.errors import nearest
from torchpipe_py.wire import answers
from torchpipe_py.wire.errors import reason
from torchpipe_server.front.services import METHODS, OK, Done, Method, Route, json_answer, route, trace_fields
from torchpipe_server.wire.http import HttpAnswer, HttpRequest

Data = dict[str, Any]


class Handler:
    """Base class for ``--handler package.module:Class``::

        class Photos(Handler):
            service = thriftpy2.load("photos.thrift", "photos_thrift").Photos

            async def classify(self, image):
                label, score = (await self.run({"data": image}))["result"]
                return label

    ``service`` is the service that ``thriftpy2.load`` made of the IDL. For each of its methods the class has one of the
    same name, with the arguments in the IDL's order: ``async def``, or plain where it has nothing to wait for. What it
    returns is the answer. An exception that the IDL declares reaches the client as it is; any other one as a
    ``TApplicationException`` with its type and message. Methods run on the worker's event loop and must not block; they
    may await ``self.run`` and whatever else asyncio has.

    ``routes`` are the paths that answer HTTP on the same port, ``{"POST /photos": "upload"}``: the method of that name
    is given the request, with its ``body``, ``fields``, ``query`` and ``parameters``. A dict or a list that it returns
    is answered as JSON, a text and bytes as they are. Either ``service`` or ``routes`` may be left out.
    """

    service: ClassVar[Any] = None
    routes: ClassVar[Mapping[str, str]] = {}

    def __init__(self, run: Run) -> None:
        self.run = run


class Run:
    """The pipe, to be awaited: ``data = await self.run({"data": image})``."""

    def __init__(self, run: pipe) -> None:
        self._pipe = run

    async def __call__(self, data: Data, timeout: float | None = None) -> Data:
        """The finished dict, the one that was given. Raises what ends the request, and why it has no ``result``."""
        try:
            await self._pipe.acall(data, timeout)
        except asyncio.CancelledError:
            running = _RUNNING.get()
            if running is None or running.ended is None:
                raise
            raise running.ended from None
        if "result" not in data:
            raise reason(data, "result")
        return data


class RunningMethod:
    """A coroutine of the handler as a task of the worker's loop."""

    def __init__(self, coroutine: Any, finish: Callable[[Any, BaseException | None], None], seconds: float) -> None:
        self.deadline = perf_counter() + seconds if seconds > 0 else None
        self.ended: BaseException | None = None  # why it is to end
        self._finish = finish
        self._has_finished = False
        context = copy_context()  # what is current where the method is called, a span for one
        context.run(_RUNNING.set, self)
        self._task = context.run(asyncio.get_running_loop().create_task, self._run(coroutine))
        self._task.add_done_callback(lambda task: coroutine.close())
        self._task.add_done_callback(lambda task: self._tell(None, self.ended or CancelledError()))

    def cancel(self, error: BaseException | None = None) -> None:
        """End what it waits for, and so the coroutine, with ``error``."""
        self.ended = self.ended or error or CancelledError()
        self._task.cancel()

    async def _run(self, coroutine: Any) -> None:
        try:
            value = await coroutine
        except BaseException as error:  # also ``SystemExit``: requests of others are in this process
            self._tell(None, self.ended if isinstance(error, asyncio.CancelledError) and self.ended else error)
        else:
            self._tell(value, None)

    def _tell(self, value: Any, error: BaseException | None) -> None:
        if not self._has_finished:
            self._has_finished = True
            self._finish(value, error)


_RUNNING: ContextVar[RunningMethod | None] = ContextVar("torchpipe_running_method", default=None)


class CustomHandler:
    """A user's handler as the server's methods. Raises ``ConfigError`` for a class that does not fit its service."""

    def __init__(self, cls: type, run: pipe, deadline_ms: float = 0.0) -> None:
        name = f"{cls.__module__}:{cls.__qualname__}"
        service, paths = getattr(cls, "service", None), getattr(cls, "routes", {})
        names = getattr(service, "thrift_services", None)
        if names is None and (service is not None or not paths):
            raise ConfigError(f"--handler {name}: 'service' must be a service made by thriftpy2.load(...)")
        handler = cls(Run(run))
        self._seconds = deadline_ms / 1000
        self.methods: Mapping[str, Method] = {
            method: self._method(handler, service, method, name) for method in names or ()
        }
        self.routes: Sequence[Route] = [self._route(handler, path, function, name) for path, function in paths.items()]

    def _route(self, handler: Any, path: str, function: str, place: str) -> Route:
        verb, _, target = path.partition(" ")
        if verb not in METHODS or not target.startswith("/"):
            raise ConfigError(f"--handler {place}: the route {path!r}; expected a method and a path, as 'POST /photos'")
        if not callable(getattr(handler, function, None)):
            raise ConfigError(
                f"--handler {place}: no method {function!r} for {path!r}; {_nearest_method(function, handler)}"
            )
        return route(verb, target, partial(_start_route, getattr(handler, function), self._seconds), is_traced=True)

    def _method(self, handler: Any, service: Any, name: str, place: str) -> Method:
        args, result = getattr(service, f"{name}_args"), getattr(service, f"{name}_result")
        function = getattr(handler, name, None)
        if not callable(function):
            raise ConfigError(f"--handler {place}: no method {name!r} of its service; {_nearest_method(name, handler)}")
        order = [spec[1] for _, spec in sorted(args.thrift_spec.items())]
        try:
            inspect.signature(function).bind(*order)
        except TypeError as error:
            raise ConfigError(f"--handler {place}: {name}({', '.join(order)}): {error}") from None
        errors = {spec[2]: spec[1] for number, spec in result.thrift_spec.items() if number}
        start = partial(_start, function, order, result, self._seconds)
        return Method(args, start, partial(_fail, result, errors), _outcome, trace_fields=trace_fields)


def load_handler(reference: str) -> type:
    """The class of ``package.module:Class`` or ``file.py:Class``; ``ConfigError`` where there is none."""
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


def _nearest_method(name: str, handler: Any) -> str:
    others = ("routes", "run", "service")
    return nearest(name, [member for member in dir(handler) if not member.startswith("_") and member not in others])


def _start_route(function: Any, seconds: float, request: HttpRequest, done: Done) -> RunningMethod | None:
    def finish(value: Any, error: BaseException | None) -> None:
        try:
            answer = error if error is not None else _http_answer(value)
        except Exception as wrong:
            answer = wrong
        done(answer)

    return _call(function(request), finish, seconds)


def _http_answer(value: Any) -> HttpAnswer:
    """What a route's method returned as an answer."""
    if isinstance(value, HttpAnswer):
        return value
    if isinstance(value, (bytes, bytearray)):
        return HttpAnswer(200, "application/octet-stream", bytes(value))
    if isinstance(value, str):
        return HttpAnswer(200, "text/plain; charset=utf-8", answers.utf8_text(value))
    return json_answer(value)


def _call(value: Any, finish: Callable[[Any, BaseException | None], None], seconds: float) -> RunningMethod | None:
    """Finish with a method's value; with that of its coroutine, when there is one."""
    if not inspect.iscoroutine(value):
        finish(value, None)
        return None
    return RunningMethod(value, finish, seconds)


def _start(function: Any, order: list[str], result: type, seconds: float, args: Any, done: Done) -> Any:
    def finish(value: Any, error: BaseException | None) -> None:
        try:
            answer = error if error is not None else _answer(result, value)
        except Exception as wrong:
            answer = wrong
        done(answer)

    return _call(function(*(getattr(args, name) for name in order)), finish, seconds)


def _answer(result: type, value: Any) -> Any:
    """What the method returned as its result struct."""
    name = result.__name__.removesuffix("_result")
    is_void = all(spec[1] != "success" for spec in result.thrift_spec.values())  # type: ignore[attr-defined]
    if is_void and value is not None:
        raise TypeError(f"{name} returned a {type(value).__name__}; in the IDL it is void")
    if not is_void and value is None:
        raise TypeError(f"{name} returned None; in the IDL it has a result")
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
