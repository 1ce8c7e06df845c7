"""Toy servers whose answer is written in the image (`ok:<label>`, or a name in `steps`), and runs against them."""

from __future__ import annotations

import json
import os
import signal
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from kit.clients import IDL
from kit.peer import Call, ScriptedServer, Step, answer, fails, fails_undeclared, hang_up, reply, stall, trickle
from kit.waits import WAIT, run
from torchpipe_py.tools.load import judge
from torchpipe_py.tools.load.run import main

CLIENT_QPS = str(Path(__file__).resolve().parents[2] / "scripts" / "client_qps.py")

FRAMED = ("--transport", "framed")
Serve = Callable[..., "ToyServer"]
Images = Callable[..., Path]


class ToyServer(ScriptedServer):
    """Answers as the images say. ``before_answer`` gets the number of a single call."""

    def __init__(self, before_answer: Callable[[int], object] = lambda number: None) -> None:
        super().__init__(default=self._answer)
        self._before_answer = before_answer

    @property
    def images(self) -> list[list[Any]]:
        """The images of each call except pings."""
        params = [call.args.params for call in self.calls if call.method != "ping"]
        return [one if isinstance(one, list) else [one] for one in params]

    @property
    def uuids(self) -> list[str]:
        return [image.uuid for call in self.images for image in call]

    @property
    def call_sizes(self) -> list[int]:
        return [len(call) for call in self.images]

    def _answer(self, server: ScriptedServer, sock: socket.socket, call: Call) -> None:
        if call.method == "infer_many":
            results = [IDL.InferenceResult(label="", score=0.5) for one in call.args.params if one.data != b"lose"]
            sock.sendall(reply(call, success=[IDL.InferenceOutcome(result=result) for result in results]))
        elif call.method == "infer_batch":
            self._before_answer(len(self.call_sizes))
            word, _, label = call.args.params.data.decode().partition(":")
            result = IDL.InferenceResult(label=label, score=0.5)
            steps.get(word, lambda *_: sock.sendall(reply(call, success=result)))(server, sock, call)
        else:
            answer(server, sock, call)


def kill(server: ScriptedServer, sock: socket.socket, call: Call) -> None:
    """Kills the process that sent this."""
    peer = sock.getpeername()
    client = next(c.pid for c in psutil.net_connections("tcp") if tuple(c.laddr) == peer and c.pid)
    os.kill(client, signal.SIGKILL)


steps: dict[str, Step] = {
    **{"refuse": fails("overloaded", 5), "defect": fails_undeclared("a defect"), "close": hang_up, "stall": stall},
    **{"trickle": trickle, "kill": kill},
}


@contextmanager
def running(server: socketserver.BaseServer) -> Iterator[Any]:
    """Serves for as long as the context lasts."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def http_server(answer: Callable[[str, bytes], tuple[int, Any]]) -> Iterator[int]:
    """The port of a server that answers path and body with a status and JSON, in two pieces."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, value = answer(self.path, body)
            text = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-LENGTH", str(len(text)))
            self.end_headers()
            with suppress(ConnectionError):  # whoever has seen the status may hang up
                self.wfile.write(text[:1])
                self.wfile.write(text[1:])

        def do_GET(self) -> None:
            self.do_POST()

        def do_OPTIONS(self) -> None:
            self.do_POST()

        def log_message(self, *_: object) -> None: ...

    with running(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        yield server.server_port


PATIENT = """
import sys
from torchpipe_py.tools.load import arrivals
from torchpipe_py.tools.load.run import main

arrivals._LEAST_DELAY_S = float("inf")
sys.exit(main())
"""


def command(directory: Path, port: int, *more: object, is_patient: bool = False) -> list[str]:
    """A patient one sends its whole schedule, however late: a busy machine may be more than a second behind."""
    fixed = ["--img_dir", directory, "--port", port, "--request_client", 2, "--timeout", WAIT, "--warmup", 0, *FRAMED]
    program = ["-c", PATIENT] if is_patient else [CLIENT_QPS]
    return [sys.executable, *program, *map(str, [*fixed, *more])]


def load(
    directory: Path, port: int, *more: object, is_patient: bool = True
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Runs the load tester; its end and its JSON report."""
    path = directory.parent / "report.json"
    arguments = command(directory, port, "--json", path, *more, is_patient=is_patient)
    done = run(*arguments)
    assert path.exists(), done.stderr
    return done, json.loads(path.read_text())


def status_of(report: dict[str, Any], otherwise: int = 0) -> int:
    """The exit status: ``otherwise``, unless the machine held up the tester itself."""
    is_valid = all(each["valid"] for each in report.get("runs", [report]))
    return otherwise if is_valid else judge.EXIT_INVALID


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The error line of the load tester, in this process, for a run that cannot start; stdout stays empty."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        status = main([*map(str, arguments)])
    finally:
        signal.signal(signal.SIGTERM, handler)
    printed = capsys.readouterr()
    assert (status, printed.out, printed.err.count("\n")) == (1, "", 1)
    return printed.err
