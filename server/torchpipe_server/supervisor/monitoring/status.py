"""The monitoring port: health checks, statistics, and a page for people."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.parse import unquote

from torchpipe_py.serving import (
    Cancellable,
    Done,
    HttpAnswer,
    HttpRequest,
    RouteError,
    Routes,
    answers,
    json_answer,
    nearest,
    route,
)
from torchpipe_server.front.cors import cross_origin
from torchpipe_server.front.hosts import HostGuard
from torchpipe_server.front.journal import SLOT_BYTES, Entry
from torchpipe_server.front.loop import Loop
from torchpipe_server.front.server import Server
from torchpipe_server.front.services import HttpService, Services, code_of
from torchpipe_server.options import Options
from torchpipe_server.supervisor.acceptor import Acceptor
from torchpipe_server.supervisor.monitoring.metrics import CONTENT_TYPE, render
from torchpipe_server.supervisor.repository import Repository
from torchpipe_server.supervisor.supervisor import Supervisor

logger = logging.getLogger("torchpipe_server")

REQUEST_SECONDS = 10.0  # for a client to send its request, including a pause before it, and to read the answer
ASK_PAUSE_SECONDS = 0.05  # between two requests to the workers, however many clients ask
REPLY_BYTES = 2**26
METHODS = frozenset({"GET", "HEAD"})
EVENTS = "text/event-stream"
CONTROL_BYTES = 2**16  # of a request to load or unload a model; its body is ignored

_PAGE = Path(__file__).resolve().parent / "page"
_HEADERS = {
    "Cache-Control": "no-store",
    # The drawing has inline styles.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_PROBES = frozenset({"/live", "/ready"})
_EVENTS = "/streams/{name}/events"
_INDEX = "/v2/repository/index"
_INFERENCE = ("/infer", "/openapi.json", "/v2")


class StatusServer:
    """Serves up to ``most`` clients on the loop; beyond, it closes the connection that has waited longest.

    ``images_port`` is the port that takes images.
    """

    def __init__(
        self, loop: Loop, listener: socket.socket, service: Supervisor, images_port: int, options: Options, most: int
    ) -> None:
        self._service, self._most = service, most
        self._elsewhere = f"this port is for monitoring, images go to --port {images_port}"
        host, self.port = listener.getsockname()[:2]
        self._figures: dict[str, Any] = {}
        self._made: dict[str, HttpAnswer] = {}  # from these figures
        self._fresh_until = 0.0
        self._paths: Mapping[str, Callable[[HttpRequest, Done], Any]] = {
            "/": _constant(_file("index.html", "text/html")),
            "/page.js": _constant(_file("page.js", "text/javascript")),
            "/page.css": _constant(_file("page.css", "text/css")),
            "/graph.svg": lambda _, done: done(self._graph()),
            "/live": _constant(_text(200, "live")),
            "/ready": lambda _, done: done(_text(200, "ready") if service.is_ready else _text(503, "not ready")),
            "/stats": partial(self._answer_figures, "stats"),
            "/metrics": partial(self._answer_figures, "metrics"),
            "/streams": partial(self._answer_figures, "streams"),
            _EVENTS: self._follow,
            "/streams/{name}/snapshot.jpg": self._snapshot,
        }
        routes = [route("GET", path, start, is_streamed=path == _EVENTS) for path, start in self._paths.items()]
        self._cors = cross_origin(options.cors_origin)
        self._methods, body_bytes = METHODS if self._cors is None else METHODS | {"OPTIONS"}, 0
        if service.repository is not None:
            self._methods, body_bytes = self._methods | {"POST"}, CONTROL_BYTES
            paths = _repository_paths(service.repository)
            routes += [route("POST", path, start, changes_service=path != _INDEX) for path, start in paths.items()]
        guard = HostGuard(host, options.allowed_hosts, _PROBES)
        http = HttpService(
            Routes(routes),
            body_bytes,
            REPLY_BYTES,
            self._methods,
            _HEADERS,
            self._failure,
            guard=guard,
            cors=self._cors,
        )
        limits = replace(options, message_seconds=REQUEST_SECONDS, idle_seconds=REQUEST_SECONDS, log_requests="none")
        self._server = Server(loop, Services(http, http), limits, lambda slot, is_closed: None)
        self._acceptor = Acceptor(loop, listener, self._take, self._server.close_slowest)
        self._acceptor.start()

    def close(self) -> None:
        """Close the port and its connections."""
        self._acceptor.close()
        self._server.close()

    def _take(self, sock: socket.socket, peer: str) -> None:
        if self._server.connections >= self._most and not self._server.close_slowest():
            sock.close()
        else:
            self._server.adopt(sock, 0, Entry(memoryview(bytearray(SLOT_BYTES)), 0))

    def _graph(self) -> HttpAnswer:
        drawing = self._service.graph
        if not drawing:
            return _text(503, "no worker has drawn the graph yet")
        return HttpAnswer(200, "image/svg+xml", drawing.encode())

    def _follow(self, request: HttpRequest, done: Done) -> Cancellable | None:
        if request.method == "HEAD":
            done(HttpAnswer(200, EVENTS, b""))
            return None
        headers = {**_HEADERS, **(self._cors.fields(request, {}) if self._cors is not None else {})}
        return self._service.streams.subscribe(_name(request), request.head_of_parts(EVENTS, headers))

    def _snapshot(self, request: HttpRequest, done: Done) -> None:
        def answer(made: Any) -> None:
            done(HttpAnswer(200, "image/jpeg", made) if isinstance(made, bytes) else made)

        self._service.streams.snapshot(_name(request), answer)

    def _answer_figures(self, name: str, request: HttpRequest, done: Done) -> None:
        """Ask the workers once per ``ASK_PAUSE_SECONDS``, and make each answer once for all clients."""

        def answer(figures: dict[str, Any] | Exception) -> None:
            try:
                if isinstance(figures, Exception):
                    raise figures
                if figures is not self._figures:
                    self._figures, self._made, self._fresh_until = figures, {}, monotonic() + ASK_PAUSE_SECONDS
                if name not in self._made:
                    self._made[name] = _FORMS[name](figures)
                done(self._made[name])
            except Exception as error:
                done(error)

        if monotonic() < self._fresh_until:
            answer(self._figures)
        else:
            self._service.ask(answer)

    def _failure(self, request: HttpRequest, error: BaseException) -> HttpAnswer:
        """An error as plain text, since the port is for people and probes."""
        path = request.path[:80]
        if isinstance(error, RouteError) and not error.allowed:
            hint = self._elsewhere if path.startswith(_INFERENCE) else nearest(path, self._paths)
            return _text(404, f"no {path}; {hint}")
        if code_of(error) == "internal":
            logger.error("internal error in %s", path, exc_info=error)
            return _text(500, "internal error; see the log")
        hint = "" if request.method in ("", *self._methods) else f"; {self._elsewhere}"
        status = getattr(error, "status", answers.STATUSES.get(code_of(error), 400))
        return _text(status, f"{getattr(error, 'detail', error)}{hint}")


_FORMS: Mapping[str, Callable[[dict[str, Any]], HttpAnswer]] = {
    "stats": json_answer,
    "streams": lambda figures: json_answer({"streams": figures["streams"]}),
    "metrics": lambda figures: HttpAnswer(200, CONTENT_TYPE, render(figures)),
}
"""Answers that show statistics."""


def _repository_paths(repository: Repository) -> Mapping[str, Callable[[HttpRequest, Done], Any]]:
    def control(action: str, request: HttpRequest, done: Done) -> None:
        name = unquote(request.parameters["model"])
        repository.control(action, name, lambda status, body: done(json_answer(body, status)))

    def index(request: HttpRequest, done: Done) -> None:
        def answer(rows: Any) -> None:
            if isinstance(rows, Exception):  # as JSON, like the answers to load and unload
                failed = answers.failure(rows)
                done(json_answer(failed.body, failed.status, failed.headers))
            else:
                done(json_answer(rows))

        repository.index(answer)

    return {
        _INDEX: index,
        "/v2/repository/models/{model}/load": partial(control, "load"),
        "/v2/repository/models/{model}/unload": partial(control, "unload"),
    }


def _constant(answer: HttpAnswer) -> Callable[[HttpRequest, Done], object]:
    return lambda _, done: done(answer)


def _name(request: HttpRequest) -> str:
    """The name of the stream, which may have any characters."""
    return unquote(request.parameters["name"], errors="replace")


def _file(name: str, kind: str) -> HttpAnswer:
    return HttpAnswer(200, f"{kind}; charset=utf-8", (_PAGE / name).read_bytes())


def _text(status: int, text: str) -> HttpAnswer:
    return HttpAnswer(status, "text/plain; charset=utf-8", text.encode() + b"\n")
