"""A server that does to each call what its script says, and both clients behind one face."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from time import monotonic
from types import SimpleNamespace
from typing import Any, NamedTuple

from thriftpy2.protocol import TBinaryProtocol
from thriftpy2.thrift import TApplicationException, TMessageType
from thriftpy2.transport import TMemoryBuffer
from torchpipe_client import AsyncClient, Client

from kit.clients import IDL
from kit.waits import WAIT


class Call(NamedTuple):
    """What arrived, on which connection, and when."""

    method: str
    sequence: int
    args: Any
    connection: int
    at: float


Step = Callable[["ScriptedServer", socket.socket, Call], object]


class HangUpError(Exception):
    """The server ends the connection."""


class ScriptedServer:
    """Does the next step of ``script`` for each call, then ``default``, or ``answer``; framed, binary protocol."""

    def __init__(self, *script: Step, tls: Any = None, port: int = 0, default: Step | None = None) -> None:
        self.script, self._default = list(script), default or answer
        self.calls: list[Call] = []
        self.connections = 0
        self.connections_ended = threading.Semaphore(0)
        self.has_stalled = threading.Event()
        self.ended = threading.Event()
        self._tls = tls
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            thread = threading.Thread(target=self._serve, args=(sock, self.connections), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, sock: socket.socket, connection: int) -> None:
        try:
            sock = sock if self._tls is None else self._tls.wrap_socket(sock, server_side=True)
            with sock:
                while (call := self._read(sock, connection)) is not None:
                    with self._lock:
                        self.calls.append(call)
                        step = self.script.pop(0) if self.script else self._default
                    step(self, sock, call)
        except (HangUpError, OSError):
            pass
        finally:
            sock.close()
            self.connections_ended.release()

    def _read(self, sock: socket.socket, connection: int) -> Call | None:
        head = sock.recv(4, socket.MSG_WAITALL) if self._tls is None else sock.recv(4)
        if len(head) < 4:
            return None
        message = b""
        while len(message) < struct.unpack(">i", head)[0]:
            message += sock.recv(1 << 20)
        protocol = TBinaryProtocol(TMemoryBuffer(message))
        name, kind, sequence = protocol.read_message_begin()
        assert kind == TMessageType.CALL
        args = getattr(IDL.InferenceService, f"{name}_args")()
        protocol.read_struct(args)
        return Call(name, sequence, args, connection, monotonic())

    def __enter__(self) -> ScriptedServer:
        self._threads[0].start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()

    def stop(self) -> None:
        """May be called again."""
        self.ended.set()
        if self._listener.fileno() >= 0:
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes what accepts
            self._listener.close()
        for thread in self._threads:
            thread.join(WAIT)


# -- steps ----------------------------------------------------------------------------------------------------------


def _frame(method: str, kind: int, sequence: int, struct_: Any) -> bytes:
    buffer = TMemoryBuffer()
    protocol = TBinaryProtocol(buffer)
    protocol.write_message_begin(method, kind, sequence)
    protocol.write_struct(struct_)
    return struct.pack(">i", len(buffer.getvalue())) + bytes(buffer.getvalue())


def reply(call: Call, **fields: Any) -> bytes:
    result = getattr(IDL.InferenceService, f"{call.method}_result")(**fields)
    return _frame(call.method, TMessageType.REPLY, call.sequence, result)


def _label(params: Any) -> Any:
    return IDL.InferenceResult(label=params.data.decode(), score=0.5)


def _answer(call: Call) -> bytes:
    if call.method == "ping":
        return reply(call)
    if call.method == "infer_batch":
        return reply(call, success=_label(call.args.params))
    if call.method == "infer_many":
        return reply(call, success=[IDL.InferenceOutcome(result=_label(one)) for one in call.args.params])
    request = call.args.request
    outputs = {key if key != "data" else "result": value for key, value in request.inputs.items()}
    return reply(call, success=IDL.InferResponse(uuid=request.uuid, outputs=outputs))


def answer(server: ScriptedServer, sock: socket.socket, call: Call) -> None:
    """The label is the image's text; ``infer`` gives its inputs back, ``data`` as the result."""
    sock.sendall(_answer(call))


def fails(code: str, retry_after_ms: int | None = None) -> Step:
    """An error that the method declares."""
    error = IDL.InferenceError(code=code, message="on purpose", retry_after_ms=retry_after_ms)
    return lambda server, sock, call: sock.sendall(reply(call, error=error))


def fails_items(*codes: str | None) -> Step:
    """An outcome for each image: its label, or an error."""

    def step(server: ScriptedServer, sock: socket.socket, call: Call) -> None:
        outcomes = [
            IDL.InferenceOutcome(result=_label(one))
            if code is None
            else IDL.InferenceOutcome(error=IDL.InferenceError(code=code, message="on purpose"))
            for one, code in zip(call.args.params, codes, strict=True)
        ]
        sock.sendall(reply(call, success=outcomes))

    return step


def fails_undeclared(text: str) -> Step:
    error = TApplicationException(TApplicationException.INTERNAL_ERROR, text)
    return lambda server, sock, call: sock.sendall(_frame(call.method, TMessageType.EXCEPTION, call.sequence, error))


def sends(data: bytes) -> Step:
    return lambda server, sock, call: sock.sendall(data)


def hang_up(server: ScriptedServer, sock: socket.socket, call: Call) -> None:
    raise HangUpError


def reset(server: ScriptedServer, sock: socket.socket, call: Call) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raise HangUpError


def answer_and_hang_up(server: ScriptedServer, sock: socket.socket, call: Call) -> None:
    answer(server, sock, call)
    raise HangUpError


def half(server: ScriptedServer, sock: socket.socket, call: Call) -> None:
    """A part of the answer, then the end of the connection."""
    sock.sendall(_answer(call)[:-3])
    raise HangUpError


def trickle(server: ScriptedServer, sock: socket.socket, call: Call) -> None:
    """Each byte of the answer comes soon after the one before it."""
    for byte in _answer(call):
        sock.sendall(bytes([byte]))
        if server.ended.wait(0.01):
            return


def other(server: ScriptedServer, sock: socket.socket, call: Call) -> None:
    """The answer to another call."""
    sock.sendall(_answer(call._replace(sequence=call.sequence + 1)))


def stall(server: ScriptedServer, sock: socket.socket, call: Call) -> None:
    """No answer, but a late one when the server ends."""
    server.has_stalled.set()
    server.ended.wait(WAIT)
    answer(server, sock, call)


# -- clients --------------------------------------------------------------------------------------------------------


class BlockingClient:
    """An ``AsyncClient`` on an event loop of its own, called from threads."""

    def __init__(self, address: str, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._client = AsyncClient(address, **options)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)
        return lambda *args, **options: self.run(method(*args, **options))

    def __repr__(self) -> str:
        return repr(self._client)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(WAIT)

    def __enter__(self) -> BlockingClient:
        return self

    def __exit__(self, *_: Any) -> None:
        self.run(self._client.close())
        self.run(asyncio.sleep(0))  # what closed connections have to do
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT)
        self._loop.close()


def label(client: Any, text: str = "a", **options: Any) -> str:
    """What ``infer_batch`` answers."""
    return str(client.infer_batch(text.encode(), **options).label)


CLIENTS = {"threads": Client, "asyncio": BlockingClient}


@contextmanager
def pauses(monkeypatch: Any, work: Callable[[], object] = lambda: None) -> Iterator[list[float]]:
    """Clients do not wait between two attempts: they do ``work``. The list is how long they would have waited."""
    delays: list[float] = []
    sleep = asyncio.sleep

    def pause(seconds: float) -> None:
        delays.append(seconds)
        work()

    async def async_pause(seconds: float) -> None:
        if seconds:
            await asyncio.get_running_loop().run_in_executor(None, pause, seconds)
        else:
            await sleep(0)

    with monkeypatch.context() as patch:
        patch.setattr("torchpipe_client.client.time", SimpleNamespace(sleep=pause))
        patch.setattr("torchpipe_client.aio.asyncio.sleep", async_pause)
        yield delays
