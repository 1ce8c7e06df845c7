"""The HTTP port: health for an orchestrator, figures for a monitor, a page for a person."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any, NamedTuple, Protocol

from torchpipe_py.errors import nearest
from torchpipe_server.supervisor.metrics import CONTENT_TYPE, render

logger = logging.getLogger("torchpipe_server")

ANSWER_SECONDS = 3.0
REQUEST_SECONDS = 10.0  # for a client to send its request, and to take the answer

_PAGE = Path(__file__).resolve().parent / "page"


class Service(Protocol):
    """What is asked; everything from any thread."""

    @property
    def is_ready(self) -> bool: ...

    @property
    def graph(self) -> str: ...

    def ping(self, answer: Callable[[], object]) -> None: ...

    def ask(self, answer: Callable[[dict[str, Any]], object]) -> None: ...


class Answer(NamedTuple):
    status: int
    kind: str
    body: bytes


class StatusServer:
    """Answers on a port of its own, from threads of its own, until the end of a ``with`` block. ``OSError``."""

    def __init__(self, host: str, port: int, service: Service) -> None:
        self._service = service
        self._paths: Mapping[str, Callable[[], Answer]] = {
            "/": lambda: _file("index.html", "text/html"),
            "/page.js": lambda: _file("page.js", "text/javascript"),
            "/page.css": lambda: _file("page.css", "text/css"),
            "/graph.svg": self._graph,
            "/live": self._live,
            "/ready": self._ready,
            "/stats": self._stats,
            "/metrics": lambda: self._with_figures(lambda figures: Answer(200, CONTENT_TYPE, render(figures))),
        }
        self._server = _HttpServer((host, port), self.answer)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="torchpipe-http", daemon=True)

    def __enter__(self) -> StatusServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def answer(self, path: str) -> Answer:
        """What a GET of ``path``, of whatever query, gets."""
        path = path.partition("?")[0]
        respond = self._paths.get(path)
        if respond is None:
            return _text(404, f"no {path[:80]}; {nearest(path[:80], self._paths)}")
        return respond()

    def _live(self) -> Answer:
        """The supervisor's loop goes round."""
        # NOTE: without the workers' figures; one that hangs must not have a probe run out of time.
        is_heard = threading.Event()
        self._service.ping(is_heard.set)
        return _text(200, "live") if is_heard.wait(ANSWER_SECONDS) else _SILENT

    def _ready(self) -> Answer:
        return _text(200, "ready") if self._service.is_ready else _text(503, "not ready")

    def _graph(self) -> Answer:
        drawing = self._service.graph
        return Answer(200, "image/svg+xml", drawing.encode()) if drawing else _text(503, "no worker has drawn it yet")

    def _stats(self) -> Answer:
        return self._with_figures(lambda figures: Answer(200, "application/json", json.dumps(figures).encode()))

    def _with_figures(self, respond: Callable[[dict[str, Any]], Answer]) -> Answer:
        answered: Future[dict[str, Any]] = Future()
        self._service.ask(answered.set_result)
        try:
            return respond(answered.result(ANSWER_SECONDS))
        except FutureTimeout:
            return _SILENT


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128  # of the library's 5, a handful of clients at once wait for a second

    def __init__(self, address: tuple[str, int], answer: Callable[[str], Answer]) -> None:
        self.answer = answer
        super().__init__(address, _Request)

    def server_bind(self) -> None:
        """As the library's, but for the host's name: asking for that can take seconds, and nobody needs it."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error of the service."""


class _Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "torchpipe"
    timeout = REQUEST_SECONDS
    disable_nagle_algorithm = True
    server: _HttpServer

    def do_GET(self) -> None:
        """One request."""
        try:
            status, kind, body = self.server.answer(self.path)
        except Exception:
            logger.exception("%s cannot be answered", self.path[:80])
            status, kind, body = _text(500, "a defect; the log says which")
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815 - the library's name

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: probes come every few seconds."""


def _file(name: str, kind: str) -> Answer:
    return Answer(200, f"{kind}; charset=utf-8", (_PAGE / name).read_bytes())


def _text(status: int, text: str) -> Answer:
    return Answer(status, "text/plain; charset=utf-8", text.encode() + b"\n")


_SILENT = _text(503, "the supervisor does not answer")
