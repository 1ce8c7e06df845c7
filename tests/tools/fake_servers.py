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
from pathlib import Path
from typing import Any

import psutil
import pytest
from fakes import WAIT
from thriftpy2.protocol.cybin import TCyBinaryProtocol
from thriftpy2.thrift import TApplicationException, TMessageType, TProcessor
from thriftpy2.transport import TSocket
from thriftpy2.transport.buffered import TCyBufferedTransport
from thriftpy2.transport.framed import TCyFramedTransport
from thriftpy2.transport.memory import TCyMemoryBuffer

from torchpipe_py.idl import load_idl
from torchpipe_py.tools.load.run import main

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"

IDL = load_idl()

Serve = Callable[..., "ToyServer"]
Images = Callable[..., Path]


class HangUpError(Exception):
    """The toy server ends the connection, with a reset if `reset`."""

    def __init__(self, reset: bool = False) -> None:
        super().__init__()
        self.reset = reset


class ToyServer(socketserver.ThreadingTCPServer):
    """Answers as the images say; remembers every image's uuid and the size of every call."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(
        self,
        framed: bool = False,
        deaf: bool = False,
        on_stall: Callable[[], None] | None = None,
        before_answer: Callable[[], object] | None = None,
        freeze_at: int | None = None,
    ) -> None:
        super().__init__(("127.0.0.1", 0), ToyConnection)
        self.framed = framed
        self.deaf = deaf  # after the first ping, it reads nothing more
        self.pings = 0
        self.freeze_at = freeze_at  # at this call, it answers nobody for a second
        self.whole = threading.Lock()
        self.is_paused = False
        self.delay_s = 0.0  # of each single answer
        self.on_stall = on_stall or (lambda: None)
        self.before_answer = before_answer or (lambda: None)  # of each single one
        self.ended = threading.Event()
        self.uuids: list[str] = []
        self.call_sizes: list[int] = []

    @property
    def port(self) -> int:
        return self.server_address[1]


class ToyConnection(socketserver.BaseRequestHandler):
    server: ToyServer

    def handle(self) -> None:
        transport = (TCyFramedTransport if self.server.framed else TCyBufferedTransport)(TSocket(sock=self.request))
        self._protocol = TCyBinaryProtocol(transport)
        self._processor = TProcessor(IDL.InferenceService, self)
        if self.server.deaf and self.server.pings:
            self.server.ended.wait()
            return
        try:
            while True:
                self._answer()
        except HangUpError as hangup:
            if hangup.reset:
                self.request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.request.close()
        except Exception:  # the client went away
            pass

    def _answer(self) -> None:
        name, sequence, result, call = self._processor.process_in(self._protocol)
        try:
            result.success = call()
        except IDL.InferenceError as error:
            result.error = error
        except TApplicationException as error:
            self._processor.send_exception(self._protocol, name, error, sequence)
            return
        self._processor.send_result(self._protocol, name, result, sequence)

    def ping(self) -> None:
        self.server.pings += 1

    def infer_batch(self, params: Any) -> Any:
        self.server.uuids.append(params.uuid)
        self.server.call_sizes.append(1)
        self.server.ended.wait(self.server.delay_s)
        self.server.before_answer()
        with self.server.whole:
            if len(self.server.call_sizes) == self.server.freeze_at:
                self.server.freeze_at = None
                self.server.ended.wait(1.0)
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
        word, _, label = data.partition(b":")
        if word == b"ok":
            return IDL.InferenceResult(label=label.decode(), score=0.5)
        return getattr(self, f"_{word.decode()}")()

    def _refuse(self) -> None:
        raise IDL.InferenceError(code="overloaded", message="try later", retry_after_ms=5)

    def _defect(self) -> None:
        raise TApplicationException(TApplicationException.INTERNAL_ERROR, "a defect")

    def _close(self) -> None:
        raise HangUpError

    def _reset(self) -> None:
        raise HangUpError(reset=True)

    def _stall(self) -> None:
        self.server.on_stall()
        self.server.ended.wait()

    def _half(self) -> None:
        """A part of a reply, and no more of it."""
        self.request.sendall(struct.pack(">I", 0x80010000 | TMessageType.REPLY))
        self.server.ended.wait()

    def _trickle(self) -> None:
        """A good reply that takes seconds: byte by byte, none of them late."""
        buffer = TCyMemoryBuffer()
        success = IDL.InferenceResult(label="late", score=0.5)
        protocol = TCyBinaryProtocol(buffer)
        protocol.write_message_begin("infer_batch", TMessageType.REPLY, int(self.server.uuids[-1][5:13], 16))
        IDL.InferenceService.infer_batch_result(success=success).write(protocol)
        for byte in bytes(buffer.getvalue()):
            self.request.sendall(bytes([byte]))
            self.server.ended.wait(0.1)
        raise HangUpError

    def _kill(self) -> None:
        """Kills the client process that sent this."""
        os.kill(self._client(), signal.SIGKILL)

    def _pause(self) -> Any:
        """A good answer; the client process that got the first one is stopped soon after, for two seconds."""
        if not self.server.is_paused:
            self.server.is_paused = True
            threading.Thread(target=self._stop_for_a_while, args=(self._client(),)).start()
        return IDL.InferenceResult(label="pause", score=0.5)

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
def toy_servers() -> Iterator[Serve]:
    """Starts servers, which live as long as the context."""
    servers: list[tuple[ToyServer, threading.Thread]] = []

    def start(**options: Any) -> ToyServer:
        server = ToyServer(**options)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        servers.append((server, thread))
        return server

    try:
        yield start
    finally:
        for server, thread in servers:
            server.ended.set()
            server.shutdown()
            thread.join()
            server.server_close()


PATIENT = """
import sys
from torchpipe_py.tools.load import arrivals
from torchpipe_py.tools.load.run import main

arrivals._LEAST_DELAY_S = float("inf")
sys.exit(main())
"""


def command(directory: Path, port: int, *more: object, is_patient: bool = False) -> list[str]:
    """A patient one sends its whole schedule, however late: a busy machine may be more than a second behind."""
    fixed = ["--img_dir", directory, "--port", port, "--request_client", 2, "--timeout", WAIT]
    program = ["-c", PATIENT] if is_patient else [str(SCRIPTS / "client_qps.py")]
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
