"""Toy servers whose answer is written in the image (`ok:<label>`, `refuse`, `stall`, ...), and runs against them."""

from __future__ import annotations

import json
import os
import signal
import socket
import socketserver
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
from kit.waits import WAIT
from thriftpy2.protocol.cybin import TCyBinaryProtocol
from thriftpy2.thrift import TApplicationException, TMessageType, TProcessor
from thriftpy2.transport import TSocket
from thriftpy2.transport.buffered import TCyBufferedTransport
from thriftpy2.transport.framed import TCyFramedTransport

from torchpipe_py.idl import load_idl
from torchpipe_py.tools.load.run import main

CLIENT_QPS = str(Path(__file__).resolve().parents[2] / "scripts" / "client_qps.py")
IDL = load_idl()

Serve = Callable[..., "ToyServer"]
Images = Callable[..., Path]


class HangUpError(Exception):
    """The toy server ends the connection."""


class ToyServer(socketserver.ThreadingTCPServer):
    """Answers as the images say; remembers every image's uuid and the size of every call."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(
        self, framed: bool = False, deaf: bool = False, before_answer: Callable[[int], object] = lambda number: None
    ) -> None:
        """``deaf``: reads nothing after the first connection. ``before_answer`` gets the number of a single call."""
        super().__init__(("127.0.0.1", 0), ToyConnection)
        self.framed, self.deaf, self.before_answer = framed, deaf, before_answer
        self.pings = 0
        self.ended, self.stalled, self.paused = threading.Event(), threading.Event(), threading.Event()
        self.uuids: list[str] = []
        self.call_sizes: list[int] = []

    @property
    def port(self) -> int:
        return self.server_address[1]


class ToyConnection(socketserver.BaseRequestHandler):
    server: ToyServer

    def handle(self) -> None:
        transport = (TCyFramedTransport if self.server.framed else TCyBufferedTransport)(TSocket(sock=self.request))
        protocol, processor = TCyBinaryProtocol(transport), TProcessor(IDL.InferenceService, self)
        if self.server.deaf and self.server.pings:
            self.server.ended.wait()
        try:
            while True:
                name, self._sequence, result, call = processor.process_in(protocol)
                try:
                    result.success = call()
                except IDL.InferenceError as error:
                    result.error = error
                except TApplicationException as error:
                    processor.send_exception(protocol, name, error, self._sequence)
                    continue
                processor.send_result(protocol, name, result, self._sequence)
        except Exception:  # HangUpError, or the client went away
            pass

    def ping(self) -> None:
        self.server.pings += 1

    def infer_batch(self, params: Any) -> Any:
        self.server.uuids.append(params.uuid)
        self.server.call_sizes.append(1)
        self.server.before_answer(len(self.server.call_sizes))
        return self._result(params.data)

    def infer_many(self, params: list[Any], deadline_ms: int | None, *trace: str | None) -> list[Any]:
        self.server.uuids.extend(image.uuid for image in params)
        self.server.call_sizes.append(len(params))
        return [self._outcome(image.data) for image in params if image.data != b"lose"]

    def _outcome(self, data: bytes) -> Any:
        try:
            return IDL.InferenceOutcome(result=self._result(data))
        except IDL.InferenceError as error:
            return IDL.InferenceOutcome(error=error)

    def _result(self, data: bytes) -> Any:
        word, _, label = data.decode().partition(":")
        if word == "refuse":
            raise IDL.InferenceError(code="overloaded", message="try later", retry_after_ms=5)
        if word == "defect":
            raise TApplicationException(TApplicationException.INTERNAL_ERROR, "a defect")
        if word != "ok":
            getattr(self, f"_{word}")()
        return IDL.InferenceResult(label=label, score=0.5)

    def _close(self) -> None:
        raise HangUpError

    def _reset(self) -> None:
        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.request.close()
        raise HangUpError

    def _stall(self) -> None:
        self.server.stalled.set()
        self.server.ended.wait()

    def _trickle(self) -> None:
        """A good reply that takes seconds: byte by byte, none of them late."""
        name = b"infer_batch"
        head = struct.pack(">II", 0x80010000 | TMessageType.REPLY, len(name)) + name
        for byte in head + struct.pack(">i", self._sequence) + b"\x0c\x00\x00\x00\x00":
            self.request.sendall(bytes([byte]))
            self.server.ended.wait(0.1)
        raise HangUpError

    def _kill(self) -> None:
        os.kill(self._client(), signal.SIGKILL)

    def _pause(self) -> None:
        """The client process that got the first such answer is stopped soon after, for two seconds."""
        if not self.server.paused.is_set():
            self.server.paused.set()
            threading.Thread(target=self._stop_for_a_while, args=(self._client(),)).start()

    def _stop_for_a_while(self, client: int) -> None:
        self.server.ended.wait(0.2)  # it has the answer by then, and nothing to do
        os.kill(client, signal.SIGSTOP)
        self.server.ended.wait(2.0)
        os.kill(client, signal.SIGCONT)

    def _client(self) -> int:
        """The process that sent this."""
        peer = self.request.getpeername()
        return next(c.pid for c in psutil.net_connections("tcp") if tuple(c.laddr) == peer and c.pid)


@contextmanager
def running(server: socketserver.BaseServer) -> Iterator[Any]:
    """Serves for as long as the context lasts."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        getattr(server, "ended", threading.Event()).set()
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
    fixed = ["--img_dir", directory, "--port", port, "--request_client", 2, "--timeout", WAIT, "--warmup", 0]
    program = ["-c", PATIENT] if is_patient else [CLIENT_QPS]
    return [sys.executable, *program, *map(str, [*fixed, *more])]


def load(
    directory: Path, port: int, *more: object, is_patient: bool = True
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Runs the load tester; its end and its JSON report."""
    path = directory.parent / "report.json"
    arguments = command(directory, port, "--json", path, *more, is_patient=is_patient)
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=4 * WAIT)
    assert path.exists(), done.stderr
    return done, json.loads(path.read_text())


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What the load tester, in this process, says of a run that cannot start: one line, and nothing on stdout."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        status = main([*map(str, arguments)])
    finally:
        signal.signal(signal.SIGTERM, handler)
    printed = capsys.readouterr()
    assert (status, printed.out, printed.err.count("\n")) == (1, "", 1)
    return printed.err
