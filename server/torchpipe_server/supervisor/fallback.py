"""The answers while no worker is there: the same methods, each answered with an error that its IDL declares."""

from __future__ import annotations

from functools import partial
from typing import Any

from torchpipe_py.errors import TorchpipeError
from torchpipe_py.methods.routes import Done, Method, Routes
from torchpipe_server.front.loop import Loop
from torchpipe_server.front.services import HttpService, Services, ThriftService
from torchpipe_server.options import Options

ANSWER_SECONDS = 0.25  # a client that repeats at once must not keep the supervisor busy


class Unavailable(TorchpipeError):
    """No worker is there; one is being started."""

    code = "unavailable"
    retry_after_ms = 500


class Fallback:
    """A handler that refuses. ``idl`` is that of InferenceService, or ``None`` where a custom one is served."""

    def __init__(self, loop: Loop, idl: Any, options: Options) -> None:
        service = getattr(idl, "InferenceService", None)
        self._loop, self._idl = loop, idl
        unread: Any = None
        other = Method(unread, self._start)
        methods = {}
        for name in getattr(service, "thrift_services", ()):
            fail = partial(self._fail, getattr(service, f"{name}_result"))
            methods[name] = Method(unread, self._start, fail, lambda result: result.error.code)
        self.services = Services(
            ThriftService(methods, options, other),
            HttpService(Routes(()), options.max_message_bytes, options.max_reply_bytes, other=other),
        )

    def _start(self, args: Any, done: Done) -> None:
        self._loop.call_later(ANSWER_SECONDS, lambda: done(Unavailable("no worker is running; one is being started")))

    def _fail(self, result: type, error: Any) -> Any:
        if not any(spec[1] == "error" for spec in result.thrift_spec.values()):  # type: ignore[attr-defined]
            raise error
        retry = getattr(error, "retry_after_ms", None)
        return result(error=self._idl.InferenceError(code=error.code, message=str(error), retry_after_ms=retry))
