"""What clients are told while no worker can: the same methods, each answered with an error that its IDL declares."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torchpipe_py.errors import TorchpipeError
from torchpipe_py.methods.routes import Done, Method, Route, Routes
from torchpipe_py.wire.errors import describe_error
from torchpipe_py.wire.http import HttpRequest
from torchpipe_server.front.loop import Loop
from torchpipe_server.front.services import HttpService, Services, ThriftService
from torchpipe_server.wire.thrift import Limits

ANSWER_SECONDS = 0.25  # a client that repeats at once must not keep the supervisor busy


class Unavailable(TorchpipeError):
    """No worker is there; one is being started."""

    code = "unavailable"
    retry_after_ms = 500


class _Unread:
    """Arguments nobody looks at."""

    thrift_spec: Mapping[int, Any] = {}


class Fallback:
    """A handler that refuses. ``idl`` is that of InferenceService, or ``None`` where a user's own is served."""

    def __init__(self, loop: Loop, idl: Any, limits: Limits, body_bytes: int) -> None:
        service = getattr(idl, "InferenceService", None)
        names = () if service is None else service.thrift_services
        self._loop, self._idl = loop, idl
        results = {name: getattr(service, f"{name}_result") for name in names}
        other = Method(_Unread, self._start, _raise)
        methods = {
            name: Method(_Unread, self._start, partial(self._fail, result), _code) for name, result in results.items()
        }
        self.services = Services(
            ThriftService(_Methods(methods, other), limits), HttpService(_AnyRoute(other), body_bytes, 2**20)
        )

    def _start(self, args: Any, done: Done) -> None:
        self._loop.call_later(ANSWER_SECONDS, lambda: done(Unavailable("no worker is running; one is being started")))

    def _fail(self, result: type, error: BaseException) -> Any:
        if not any(spec[1] == "error" for spec in result.thrift_spec.values()):  # type: ignore[attr-defined]
            raise error
        code = getattr(error, "code", "internal")
        retry = getattr(error, "retry_after_ms", None)
        return result(error=self._idl.InferenceError(code=code, message=describe_error(error), retry_after_ms=retry))


class _Methods(dict[str, Method]):
    """With a method for every name; ``in`` knows the service's own names."""

    def __init__(self, known: Mapping[str, Method], other: Method) -> None:
        super().__init__(known)
        self._other = other

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(name, self._other)


class _AnyRoute(Routes):
    """One route for every path."""

    def __init__(self, method: Method) -> None:
        super().__init__(())
        self._route = Route("", "http", method)

    def find(self, request: HttpRequest) -> tuple[Route, Mapping[str, str]]:
        return self._route, {}


def _code(result: Any) -> str:
    return str(result.error.code)


def _raise(error: BaseException) -> Any:
    raise error
