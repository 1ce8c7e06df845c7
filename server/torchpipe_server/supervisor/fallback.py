"""Answers clients while no worker does: the service is live, and not ready; all else is refused."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torchpipe_py import TorchpipeError
from torchpipe_py.serving import Done, Method, Routes, Rpc, RpcAnswer, compression, json_answer, route
from torchpipe_server.front.cors import cross_origin
from torchpipe_server.front.counters import RequestCounters
from torchpipe_server.front.loop import Loop
from torchpipe_server.front.pacing import RefusalPacing
from torchpipe_server.front.services import HttpService, Services, ThriftService
from torchpipe_server.options import Options

if TYPE_CHECKING:
    from torchpipe_server.front.rpc import RpcServer

logger = logging.getLogger("torchpipe_server")

ANSWER_SECONDS = 0.25  # delay of a refusal: clients that retry at once must not keep the supervisor busy
STOP_SECONDS = 1.0  # for calls over gRPC to be answered once a worker takes others


class Unavailable(TorchpipeError):
    """No worker is running; one is being started."""

    code = "unavailable"
    retry_after_ms = 500


_NOT_READY = json_answer({"ready": False}, 503, {"Retry-After": "1"})
_HEALTH = (
    route("GET", "/v2/health/live", lambda request, done: done(json_answer({"live": True}))),
    route("GET", "/v2/health/ready", lambda request, done: done(_NOT_READY)),
)


class Fallback:
    """Refuses every request but health checks: the service is live, and not ready.

    ``idl`` is that of InferenceService, or ``None`` if a custom handler may have another.
    """

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
            HttpService(
                Routes(_HEALTH),
                options.max_message_bytes,
                options.max_reply_bytes,
                other=other,
                cors=cross_origin(options.cors_origin),
            ),
        )

    def _start(self, args: Any, done: Done) -> None:
        _refuse(self._loop, done)

    def _fail(self, result: type, error: Any) -> Any:
        if not any(spec[1] == "error" for spec in result.thrift_spec.values()):  # type: ignore[attr-defined]
            raise error
        retry = getattr(error, "retry_after_ms", None)
        return result(error=self._idl.InferenceError(code=error.code, message=str(error), retry_after_ms=retry))


def _refuse(loop: Loop, done: Done) -> None:
    loop.call_later(ANSWER_SECONDS, lambda: done(Unavailable("no worker is ready yet; one is starting")))


_RPC_HEALTH: Mapping[str, Mapping[str, Any]] = {
    "ServerLive": {"live": True},
    "ServerReady": {"ready": False},
    "ModelReady": {"ready": False},
    "Check": {"status": "NOT_SERVING"},
    "Watch": {"status": "NOT_SERVING"},
}
"""The fields of the answers to health checks over gRPC."""


class RpcFallback:
    """The same over gRPC, on its port and the supervisor's loop, from ``open`` to ``close``.

    NOTE: while workers listen as well, the system gives some of their clients to this process. So it is open only while
    none does. grpc is imported when it is first opened.
    """

    def __init__(self, loop: Loop, options: Options) -> None:
        self._loop, self._options = loop, replace(options, drain_seconds=STOP_SECONDS)
        self._counters = RequestCounters(options.log_requests)
        self.figures = self._counters.summary
        """The statistics of the requests that it answered."""
        self._executor = ThreadPoolExecutor(1, "torchpipe-reader")  # its thread starts with the first long message
        self._inflating = compression.InflateQueue(self._executor)
        self._server: RpcServer | None = None
        self._closing: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """Listen, if it does not."""
        if self._server is None:
            from torchpipe_server.front.rpc import RpcServer

            pacing = RefusalPacing(STOP_SECONDS)
            self._server = RpcServer(self._loop, self._rpcs(), self._options, self._counters, pacing, self._inflating)
            self._server.listen(lambda: None, lambda problem: logger.error("while no worker listens: %s", problem))

    def close(self, done: Callable[[], object] = lambda: None) -> None:
        """Close the port, and call ``done`` once the calls in work are answered; at once if it is not open."""
        server, self._server = self._server, None
        if server is None:
            done()
            return
        closing = server.drain()
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        closing.add_done_callback(lambda _: done())

    def end(self) -> None:
        """Close it, once the loop no longer runs."""
        self.close()
        for closing in list(self._closing):
            self._loop.run_until_complete(closing)
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _rpcs(self) -> list[Rpc]:
        from torchpipe_py.methods.rpc.messages import message, methods

        def refuse(request: Any, done: Done) -> None:
            _refuse(self._loop, done)

        def start_of(method: Any) -> Callable[[Any, Done], None]:
            fields = _RPC_HEALTH.get(method.name)
            if fields is None:
                return refuse
            answer = RpcAnswer(message(method.output_type.full_name)(**fields))
            return lambda request, done: done(answer)

        return [
            Rpc(
                f"/{method.containing_service.full_name}/{method.name}",
                Method(message(method.input_type.full_name), start_of(method)),
                is_stream=method.client_streaming,
                is_watch=method.name == "Watch",
            )
            for method in methods()
        ]
