"""What the load tester tells of a service's nodes and engine processes."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from fake_servers import Serve, load, refused, toy_servers

from torchpipe_py.tools.load.measure import hand_over_figures, service_figures, service_rows

Images = Callable[..., Path]


@pytest.fixture
def serve() -> Iterator[Serve]:
    with toy_servers() as start:
        yield start


def told(number: int) -> dict[str, Any]:
    """The answer of ``/stats`` when it is asked for the ``number``th time."""
    node = dict.fromkeys(("requests", "queue_ms", "batch_wait_ms"), 100 * number)
    node |= {"instances": 2, "min": 1, "max": 8, "batches": 25 * number, "failed": 0, "expired": 0}
    node |= {"compute_ms": 1500 * number, "batch_sizes": {"4": 25 * number}}
    times = {"slot_wait_ms": 10, "there_ms": 50, "in_engine_ms": 500, "back_ms": 20}
    return {
        "time": float(number),
        "nodes": {"model": node},
        "engines": [{"index": 0, "pid": os.getpid(), "cpu_s": 0.5 * number}],
        "hand_over": {key: value * number for key, value in {"requests": 100, **times}.items()},
    }


@contextmanager
def stats_server(answer: Callable[[int], Any] = told, status: int = 200) -> Iterator[int]:
    """A port where ``/stats`` is answered."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            body = json.dumps(answer(len(asked))).encode()
            self.send_response(status if self.path == "/stats" else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def test_figures_are_of_one_request_and_of_the_run_alone() -> None:
    figures = service_figures(told(1), told(3))
    assert figures["nodes"]["model"]["mean_batch"] == 4
    assert figures["nodes"]["model"]["busy"] == 0.75
    hand_over = {"slot_wait_ms": 0.1, "there_ms": 0.5, "in_engine_ms": 5.0, "back_ms": 0.2}
    assert figures["hand_over"] == {"requests": 200, **hand_over}
    assert figures["engines"] == [{"index": 0, "cpu_percent": 50.0}]
    assert service_rows(figures)[1:] == [
        ("hand-over", "200 requests; slot wait 0.10  there 0.50  in engine 5.00  back 0.20  ms each"),
        ("engine process 0", "50 % of a core"),
    ]


def test_what_is_new_or_not_known_is_left_out() -> None:
    before, after = told(1), told(2)
    before["nodes"] = {}
    before["engines"][0]["pid"] += 1
    assert service_figures(before, after)["nodes"] == {}
    assert service_figures(before, after)["engines"] == []
    after["engines"][0]["cpu_s"] = None
    assert service_rows(service_figures(told(1), after))[-1] == ("engine process 0", "n/a")


def test_without_engine_processes_there_is_no_hand_over() -> None:
    nothing = dict.fromkeys(told(1)["hand_over"], 0)
    assert hand_over_figures(nothing, nothing) is None
    assert service_rows(None) == []


def test_the_report_the_page_and_the_table_have_them(serve: Serve, images: Images, tmp_path: Path) -> None:
    path = tmp_path / "run.html"
    with stats_server() as port:
        done, report = load(images(a="ok:a"), serve().port, "--total_number", 4, "--http-port", port, "--html", path)
    assert report["service"]["hand_over"]["in_engine_ms"] == 5.0
    assert report["service"]["engines"][0]["cpu_percent"] >= 0
    for text in (done.stdout, path.read_text(encoding="utf-8")):
        for part in ("node model", "engine process 0", "in engine 5.00"):
            assert part in text
    done, report = load(path.parent / "images", serve().port, "--total_number", 4)
    assert report["service"] is None
    assert "hand-over" not in done.stdout


@pytest.mark.parametrize(
    ("answer", "status", "why"),
    [
        *((answer, 200, "it is not a torchpipe-serve of this version\n") for answer in ({}, [], {"nodes": {}})),
        (
            {},
            404,
            "it answers 404, as the port that takes images does (torchpipe-serve --port); "
            "give the port of torchpipe-serve --http-port\n",
        ),
        (None, 0, "Connection refused>\n"),
    ],
)
def test_refuses_another_server(
    answer: Any, status: int, why: str, serve: Serve, images: Images, capsys: pytest.CaptureFixture[str]
) -> None:
    with stats_server(lambda _: answer, status) as port, socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = port if status else bound.getsockname()[1]
        said = refused(capsys, "--img_dir", images(a="ok:a"), "--port", serve().port, "--http-port", port)
    assert f"--http-port: http://127.0.0.1:{port}/stats does not report what the service does: " in said
    assert said.endswith(why)


def test_no_proxy_is_asked(serve: Serve, images: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with stats_server() as port:
        _, report = load(images(a="ok:a"), serve().port, "--total_number", 4, "--http-port", port)
    assert report["service"]["hand_over"]["requests"] == 100
