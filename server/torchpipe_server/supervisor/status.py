"""The HTTP port: health for an orchestrator, figures for a monitor, a page for a person."""

from __future__ import annotations

import json
import logging
import re
import socket
from collections import deque
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from ipaddress import ip_address
from pathlib import Path
from time import monotonic
from typing import Any, Generic, Protocol, TypeVar

from torchpipe_py.errors import nearest
from torchpipe_py.http import answers
from torchpipe_server.serving.loop import LONGEST_WAIT, Loop
from torchpipe_server.supervisor.http import HttpServer, Reply
from torchpipe_server.supervisor.metrics import CONTENT_TYPE, render
from torchpipe_server.supervisor.slots import HTTP_CONNECTIONS
from torchpipe_server.wire.http import HttpAnswer, HttpRequest

logger = logging.getLogger("torchpipe_server")

ANSWER_SECONDS = 3.0
REQUEST_SECONDS = 10.0  # for a client to send its request, and to take the answer
ASK_PAUSE_SECONDS = 0.05  # between two questions for the workers' figures, however many clients ask

_PAGE = Path(__file__).resolve().parent / "page"
_HEADERS = {
    "Cache-Control": "no-store",
    # The drawing has styles of its own.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_PROBES = ("/live", "/ready")
_INFERENCE = ("/infer", "/openapi.json", "/v2")

T = TypeVar("T")
_Finish = Callable[[Callable[[], HttpAnswer]], object]
"""Replies with what the function makes."""


class Service(Protocol):
    """What is asked; everything from any thread."""

    @property
    def is_ready(self) -> bool: ...

    @property
    def graph(self) -> str: ...

    def ping(self, answer: Callable[[], object]) -> None: ...

    def ask(self, answer: Callable[[dict[str, Any]], object]) -> None: ...


class StatusServer:
    """Answers ``most`` clients at once, from a thread of its own, until the end of a ``with`` block.

    ``images_port`` is the one that takes images.
    """

    def __init__(
        self, listener: socket.socket, service: Service, images_port: int, most: int = HTTP_CONNECTIONS
    ) -> None:
        self.listener, self._service = listener, service
        self._elsewhere = f"this port is for monitoring, images go to --port {images_port}"
        host, self.port = listener.getsockname()[:2]
        self._is_local = ip_address(host.partition("%")[0]).is_loopback
        loop = Loop(lambda error: logger.error("a defect of the HTTP port", exc_info=error))
        self._pings: _Shared[None] = _Shared(loop, lambda told: service.ping(lambda: told(None)), 0.0)
        self._figures: _Shared[_StatusAnswers] = _Shared(
            loop, lambda told: service.ask(lambda figures: told(_StatusAnswers(figures))), ASK_PAUSE_SECONDS
        )
        self._paths: Mapping[str, Callable[[_Finish], object]] = {
            "/": _file("index.html", "text/html"),
            "/page.js": _file("page.js", "text/javascript"),
            "/page.css": _file("page.css", "text/css"),
            "/graph.svg": lambda finish: finish(self._graph),
            "/live": lambda finish: self._pings.get(lambda _: finish(lambda: _text(200, "live"))),
            "/ready": lambda finish: finish(self._ready),
            "/stats": lambda finish: self._figures.get(lambda figures: finish(lambda: figures.stats)),
            "/metrics": lambda finish: self._figures.get(lambda figures: finish(lambda: figures.metrics)),
        }
        self._server = HttpServer(
            loop, listener, self._ask, _SILENT, _HEADERS, most, REQUEST_SECONDS, ANSWER_SECONDS, self._elsewhere
        )

    def __enter__(self) -> StatusServer:
        self._server.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.__exit__()

    def _ask(self, request: HttpRequest, reply: Reply) -> None:
        path = request.path
        if self._is_local and path not in _PROBES and _is_foreign(request.host):
            reply(_text(421, "only this machine is answered here, under its own name; --http-host opens the port"))
            return
        respond = self._paths.get(path)
        if respond is None:
            hint = self._elsewhere if path.startswith(_INFERENCE) else nearest(path[:80], self._paths)
            reply(_text(404, f"no {path[:80]}; {hint}"))
        else:
            respond(partial(_finish, path, reply))

    def _ready(self) -> HttpAnswer:
        return _text(200, "ready") if self._service.is_ready else _text(503, "not ready")

    def _graph(self) -> HttpAnswer:
        drawing = self._service.graph
        if not drawing:
            return _text(503, "no worker has drawn it yet")
        return HttpAnswer(200, "image/svg+xml", drawing.encode())


class _Shared(Generic[T]):
    """One question for all who ask it at a time, and the next one after ``pause`` seconds, for who came meanwhile.

    ``ask(told)`` may call ``told(answer)`` on any thread, or never: the next question is not kept by that for longer
    than ``ANSWER_SECONDS``. All else is for the thread of the loop.
    """

    def __init__(self, loop: Loop, ask: Callable[[Callable[[T], object]], object], pause: float) -> None:
        self._loop, self._ask, self._pause = loop, ask, pause
        # NOTE: bounded, since no answer may ever come. Those that fall out were answered otherwise long ago.
        self._waiting: deque[Callable[[T], object]] = deque(maxlen=2 * HTTP_CONNECTIONS)
        self._asked: list[Callable[[T], object]] = []
        self._next_at = 0.0
        loop.steps.append(self._step)

    def get(self, then: Callable[[T], object]) -> None:
        """Call ``then(answer)``, unless none comes."""
        self._waiting.append(then)
        self._step()

    def _step(self) -> float:
        now = monotonic()
        if not self._waiting:
            return LONGEST_WAIT
        if now < self._next_at:
            return self._next_at - now
        self._asked = list(self._waiting)
        self._waiting.clear()
        self._next_at = now + ANSWER_SECONDS
        self._ask(lambda answer: self._loop.call(partial(self._told, answer, now)))
        return LONGEST_WAIT

    def _told(self, answer: T, asked_at: float) -> None:
        self._next_at = min(self._next_at, asked_at + self._pause)
        asked, self._asked = self._asked, []
        for then in asked:
            then(answer)


class _StatusAnswers:
    """What ``/stats`` and ``/metrics`` answer of the same figures, each made once for all who ask."""

    def __init__(self, figures: dict[str, Any]) -> None:
        self._figures = figures

    @cached_property
    def stats(self) -> HttpAnswer:
        return HttpAnswer(200, "application/json", answers.utf8_json(json.dumps(self._figures, ensure_ascii=False)))

    @cached_property
    def metrics(self) -> HttpAnswer:
        return HttpAnswer(200, CONTENT_TYPE, render(self._figures))


def _finish(path: str, reply: Reply, make: Callable[[], HttpAnswer]) -> None:
    try:
        answer = make()
    except Exception:
        logger.exception("%s cannot be answered", path)
        answer = _text(500, "a defect; the log says which")
    reply(answer)


def _file(name: str, kind: str) -> Callable[[_Finish], object]:
    answer = HttpAnswer(200, f"{kind}; charset=utf-8", (_PAGE / name).read_bytes())
    return lambda finish: finish(lambda: answer)


def _is_foreign(host: str) -> bool:
    """Whether the name was looked up in the DNS: a page of that name may lead its reader's browser here."""
    name = re.sub(r":\d*$", "", host).lower().rstrip(".")
    if "." not in name or name.startswith("[") or name.endswith(".localhost"):
        return False
    try:
        ip_address(name)
    except ValueError:
        return True
    return False


def _text(status: int, text: str) -> HttpAnswer:
    return HttpAnswer(status, "text/plain; charset=utf-8", text.encode() + b"\n")


_SILENT = _text(503, "the supervisor does not answer")
