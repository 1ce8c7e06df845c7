"""What clients are told while no worker can: the same methods, each answered with an error that its IDL declares."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping
from functools import partial
from time import monotonic
from typing import Any

from torchpipe_py.errors import TorchpipeError
from torchpipe_py.http.errors import describe_error
from torchpipe_server.serving.http import HttpService, Route, Routes
from torchpipe_server.serving.loop import LONGEST_WAIT, Loop
from torchpipe_server.serving.protocols import Protocols, Served
from torchpipe_server.serving.service import Done, Method, ThriftService
from torchpipe_server.wire.http import HttpRequest
from torchpipe_server.wire.scanner import Limits

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

    def __init__(self, loop: Loop, idl: Any) -> None:
        service = getattr(idl, "InferenceService", None)
        names = () if service is None else service.thrift_services
        self._idl = idl
        results = {name: getattr(service, f"{name}_result") for name in names}
        self.methods: Mapping[str, Method] = _Methods(
            {
                name: Method(_Unread, self._start, partial(self._fail, result), _code)
                for name, result in results.items()
            },
            Method(_Unread, self._start, _raise),
        )
        self.served = Served(self.methods, _AnyRoute(Method(_Unread, self._start, _raise)))
        self.protocols = Protocols(ThriftService(self.methods, Limits()), HttpService(self.served.routes, 0, 2**20))
        self._late: list[tuple[float, int, Done]] = []
        self._counter = itertools.count()
        loop.steps.append(self._step)

    def _start(self, args: Any, done: Done) -> None:
        heapq.heappush(self._late, (monotonic() + ANSWER_SECONDS, next(self._counter), done))

    def _step(self) -> float:
        while self._late and self._late[0][0] <= monotonic():
            _, _, done = heapq.heappop(self._late)
            done(Unavailable("no worker is running; one is being started"))
        return self._late[0][0] - monotonic() if self._late else LONGEST_WAIT

    def _fail(self, result: type, error: BaseException) -> Any:
        if not any(spec[1] == "error" for spec in result.thrift_spec.values()):  # type: ignore[attr-defined]
            raise error
        code = getattr(error, "code", "internal")
        retry = getattr(error, "retry_after_ms", None)
        return result(error=self._idl.InferenceError(code=code, message=describe_error(error), retry_after_ms=retry))


class _Methods(dict[str, Method]):
    """With an entry for every name."""

    def __init__(self, known: Mapping[str, Method], other: Method) -> None:
        super().__init__(known)
        self._other = other

    def __missing__(self, name: str) -> Method:
        return self._other

    def get(self, name: str, default: Any = None) -> Any:
        return self[name]


class _AnyRoute(Routes):
    """One route for every path."""

    def __init__(self, method: Method) -> None:
        super().__init__(())
        self._route = Route("", "http", method)

    def find(self, request: HttpRequest) -> Route:
        return self._route


def _code(result: Any) -> str:
    return str(result.error.code)


def _raise(error: BaseException) -> Any:
    raise error
