"""A server in this process or in another one, and clients that share no code with it."""

from __future__ import annotations

import asyncio
import fcntl
import http.client
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from fakes import WAIT
from fakes import eventually as eventually
from thrift.protocol.TBinaryProtocol import TBinaryProtocol
from thrift.protocol.TCompactProtocol import TCompactProtocol
from thrift.Thrift import TApplicationException, TMessageType, TType
from thrift.transport.TSocket import TSocket
from thrift.transport.TTransport import TBufferedTransport, TFramedTransport
from torchpipe_server.front.journal import Journal
from torchpipe_server.front.loop import call_from_any_thread, every, new_loop
from torchpipe_server.front.server import Server
from torchpipe_server.front.services import Routes, Served, services_of
from torchpipe_server.options import Options
from torchpipe_server.supervisor.acceptor import Acceptor
from torchpipe_server.supervisor.slots import Slots, slots_for
from torchpipe_server.worker.worker import usual_service

from torchpipe_py import pipe
from torchpipe_py.idl import load_idl

ROOT = Path(__file__).parents[2]
DEMO = "configs/demo_nodes.toml"
LIGHT = str(ROOT / "tests" / "light")
"""In ``PYTHONPATH``, a service whose pipe needs neither PyTorch nor ONNX starts without them."""
IDL = load_idl()
FRAMINGS = [(framed, compact) for framed in (False, True) for compact in (False, True)]
BINARY_CALL = 0x80010001
BINARY = 18  # how thriftpy2's specs tell `binary` from `string`


# -- servers --------------------------------------------------------------------------------------------------------


class FakePipe:
    """What a handler asks of a pipe beside ``dispatch``."""

    def stats(self) -> dict[str, Any]:
        return {"max_inflight": 1000, "nodes": {"node": {"instances": 1, "max": 8}}}

    def limit_delays(self, target: float | None = None) -> None:
        """It has no queue."""

    def check_delay(self, seconds: float | None) -> None:
        """It is never late."""


class LocalServer:
    """A `Server` on a loopback socket and a thread of this process: what a worker does, with its own acceptor."""

    def __init__(
        self, run: Any, listener: Any = None, make_methods: Any = None, make_served: Any = None, **options: Any
    ) -> None:
        listener = listener or socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port: int = listener.getsockname()[1]
        settings = Options(**{"config": "test.toml", "host": "127.0.0.1", "port": 0, "drain_seconds": 10.0, **options})
        self.run = run
        self.loop = new_loop()
        self.loop.set_exception_handler(self._note)
        self.journal = Journal(slots_for(settings.max_connections))
        self.slots = Slots(settings.max_connections, settings.max_connections_per_address, lambda slots: None)
        self.acceptor = Acceptor(self.loop, listener, self._take, self.slots.make_room)
        if make_methods:
            served = Served(make_methods(self.loop), Routes(()))
        else:
            served = make_served(self.loop) if make_served else usual_service(settings, run or FakePipe())
        services = services_of(served, settings)
        self.server = Server(self.loop, services, settings, self._gone, served.names_with_pipe())
        self.error: BaseException | None = None
        self.is_over = False
        self.thread = threading.Thread(target=self._serve, daemon=True)

    def stop(self) -> None:
        self.call(self._stop)

    def call(self, function: Any) -> None:
        """Run it on the loop's thread."""
        call_from_any_thread(self.loop, function)

    def _note(self, loop: Any, context: Any) -> None:
        self.error = self.error or context.get("exception") or RuntimeError(context["message"])

    def _gone(self, slot: int, is_closed: bool) -> None:
        self.slots.release(slot)
        self._end_if_finished()

    def _take(self, sock: socket.socket, peer: str) -> None:
        place = self.slots.take(peer)
        if place is None:
            sock.close()
        else:
            slot, is_refused = place
            self.server.adopt(sock, slot, self.journal.entry(slot), is_refused)

    def _stop(self) -> None:
        self.acceptor.close()
        self.server.drain()
        every(self.loop, 0.05, self._end_if_finished)

    def _end_if_finished(self) -> None:
        if self.server.is_finished and not self.is_over:
            self.is_over = True
            self.loop.stop()

    def _serve(self) -> None:
        try:
            self.acceptor.start()
            self.loop.run_forever()
            self.acceptor.close()
            self.server.close()
            self.loop.run_until_complete(asyncio.sleep(0.01))  # in which transports close their sockets
        except BaseException as error:
            self.error = error
        finally:
            self.loop.close()
            self.journal.close()

    def __enter__(self) -> LocalServer:
        self.thread.start()
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self.stop()
        self.thread.join(WAIT)
        if error is None:
            assert not self.thread.is_alive(), "the server does not stop"
            assert self.error is None, f"the I/O thread died of {self.error!r}"


def turn(loop: Any, seconds: float = 0.01) -> None:
    """Let a loop that does not run do what is due."""
    loop.run_until_complete(asyncio.sleep(seconds))


@contextmanager
def serving(config: Any, **options: Any) -> Iterator[LocalServer]:
    """A pipe and its server; `config` is what `pipe` takes, or the name of one backend."""
    if isinstance(config, str) and config.endswith(".toml"):
        options["config"] = config
    elif isinstance(config, str):
        config = {"node": {"backend": config}}
    with pipe(config) as run, LocalServer(run, **options) as server:
        yield server


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port at which nobody listens, and which the system gives to nobody else; servers of a test may have it."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do, who may bind it beside this one
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


class Process:
    """`python -m torchpipe_server` in a process of its own.

    `stderr` is a descriptor that takes its log unread. `files`: how many it may open, as many as this process if 0.
    """

    def __init__(
        self,
        *args: str,
        config: str = DEMO,
        env: dict[str, str] | None = None,
        stderr: int = subprocess.PIPE,
        files: int = 0,
    ) -> None:
        if not any(arg.startswith("--workers") for arg in args):
            args = ("--workers", "1", *args)
        command = [sys.executable, "-m", "torchpipe_server", config, "--host", "127.0.0.1", "--port", "0", *args]
        if env and "PYTHONPATH" in env and "PYTHONPATH" in os.environ:
            env = {**env, "PYTHONPATH": f"{env['PYTHONPATH']}{os.pathsep}{os.environ['PYTHONPATH']}"}
        if files:
            command = ["bash", "-c", f'ulimit -n {files}; exec "$@"', "bash", *command]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        self.pid = self.process.pid
        self._stderr: list[str] = []
        self._reader = threading.Thread(target=self._read_stderr, daemon=True)
        self._reader.start()
        self.port = 0

    def _read_stderr(self) -> None:
        self._stderr.extend(self.process.stderr or ())

    def wait_started(self) -> Process:
        line = self.process.stdout.readline()
        match = re.search(r" on 127\.0\.0\.1:(\d+) \(pid (\d+)\)$", line.strip())
        assert match, f"{line!r} {self.stderr}"
        self.port = int(match[1])
        assert int(match[2]) == self.pid
        return self

    @property
    def workers(self) -> list[int]:
        """The processes of the workers, in the order of their starts; the fork server's children."""
        supervisor = psutil.Process(self.pid)
        while True:
            try:
                return sorted(worker.pid for server in supervisor.children() for worker in server.children())
            except psutil.NoSuchProcess:
                continue  # one has ended meanwhile

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float = WAIT) -> int:
        """The exit code."""
        code = self.process.wait(seconds)
        self._reader.join(WAIT)
        return code

    @property
    def stderr(self) -> str:
        return "".join(self._stderr)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: Any) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.wait()
        self.process.stdout.close()
        if self.process.stderr is not None:
            self.process.stderr.close()


def told_at(address: str) -> tuple[int, str]:
    """Status and text of ``http://HOST:PORT/path``, past every proxy.

    Asked again while the supervisor takes too long to say: the machine is busy, or stood still.
    """
    answers: list[tuple[int, str]] = []
    url = urlsplit(address)

    def is_told() -> bool:
        connection = http.client.HTTPConnection(url.netloc, timeout=WAIT)
        try:
            connection.request("GET", url.path)
            answer = connection.getresponse()
            answers.append((answer.status, answer.read().decode()))
        finally:
            connection.close()
        return answers[-1] != (503, "the supervisor does not answer\n")

    eventually(is_told, "the supervisor does not answer")
    return answers[-1]


# -- the Apache Thrift library, driven by the IDL -------------------------------------------------------------------


def _inner(spec: Any) -> tuple[int, Any]:
    ttype, inner = spec if isinstance(spec, tuple) else (spec, None)
    return ttype, inner


def write_value(protocol: Any, ttype: int, spec: Any, value: Any) -> None:
    if ttype == TType.STRUCT:
        write_struct(protocol, value)
    elif ttype == TType.LIST:
        inner, inner_spec = _inner(spec)
        protocol.writeListBegin(TType.STRING if inner == BINARY else inner, len(value))
        for item in value:
            write_value(protocol, inner, inner_spec, item)
        protocol.writeListEnd()
    elif ttype == TType.MAP:
        (key, key_spec), (held, held_spec) = _inner(spec[0]), _inner(spec[1])
        protocol.writeMapBegin(key, held, len(value))
        for name, item in value.items():
            write_value(protocol, key, key_spec, name)
            write_value(protocol, held, held_spec, item)
        protocol.writeMapEnd()
    else:
        kind = {BINARY: "Binary", TType.STRING: "String", TType.I32: "I32", TType.I64: "I64", TType.DOUBLE: "Double"}
        getattr(protocol, "write" + kind[ttype])(value)


def write_struct(protocol: Any, value: Any) -> None:
    protocol.writeStructBegin(type(value).__name__)
    for number, (ttype, name, *rest) in type(value).thrift_spec.items():
        field = getattr(value, name)
        if field is not None:
            protocol.writeFieldBegin(name, TType.STRING if ttype == BINARY else ttype, number)
            write_value(protocol, ttype, rest[0], field)
            protocol.writeFieldEnd()
    protocol.writeFieldStop()
    protocol.writeStructEnd()


def read_value(protocol: Any, ttype: int, spec: Any) -> Any:
    if ttype == TType.STRUCT:
        return read_struct(protocol, spec)
    if ttype == TType.LIST:
        _, size = protocol.readListBegin()
        items = [read_value(protocol, *_inner(spec)) for _ in range(size)]
        protocol.readListEnd()
        return items
    if ttype == TType.MAP:
        _, _, size = protocol.readMapBegin()
        pairs = {}
        for _ in range(size):
            key = read_value(protocol, *_inner(spec[0]))
            pairs[key] = read_value(protocol, *_inner(spec[1]))
        protocol.readMapEnd()
        return pairs
    kind = {BINARY: "Binary", TType.STRING: "String", TType.I32: "I32", TType.I64: "I64", TType.DOUBLE: "Double"}
    return getattr(protocol, "read" + kind[ttype])()


def read_struct(protocol: Any, cls: type) -> Any:
    made = cls()
    protocol.readStructBegin()
    while True:
        _, wire, number = protocol.readFieldBegin()
        if wire == TType.STOP:
            break
        ttype, name, *rest = cls.thrift_spec[number]
        assert wire == (TType.STRING if ttype == BINARY else ttype)
        setattr(made, name, read_value(protocol, ttype, rest[0]))
        protocol.readFieldEnd()
    protocol.readStructEnd()
    return made


class Client:
    """A client made of the Apache Thrift library; `send` and `receive` apart, so that calls can be pipelined."""

    def __init__(self, port: int, framed: bool = False, compact: bool = False, timeout: float = WAIT) -> None:
        self._socket = TSocket("127.0.0.1", port)
        self._socket.setTimeout(timeout * 1000)
        self._transport = TFramedTransport(self._socket) if framed else TBufferedTransport(self._socket)
        self._protocol = TCompactProtocol(self._transport) if compact else TBinaryProtocol(self._transport)
        self._seqid = 0
        self._transport.open()

    @property
    def sock(self) -> socket.socket:
        return self._socket.handle

    def send(self, method: str, **args: Any) -> int:
        self._seqid += 1
        self._protocol.writeMessageBegin(method, TMessageType.CALL, self._seqid)
        args_type = getattr(IDL.InferenceService, method + "_args", IDL.InferenceService.ping_args)
        write_struct(self._protocol, args_type(**args))
        self._protocol.writeMessageEnd()
        self._transport.flush()
        return self._seqid

    def receive(self, seqid: int | None = None) -> Any:
        """The next answer; an error that it carries is raised."""
        name, kind, answered = self._protocol.readMessageBegin()
        assert seqid is None or answered == seqid
        if kind == TMessageType.EXCEPTION:
            error = TApplicationException()
            error.read(self._protocol)
            self._protocol.readMessageEnd()
            raise error
        assert kind == TMessageType.REPLY
        result = read_struct(self._protocol, getattr(IDL.InferenceService, name + "_result"))
        self._protocol.readMessageEnd()
        if getattr(result, "error", None) is not None:
            raise result.error
        return getattr(result, "success", None)

    def call(self, method: str, **args: Any) -> Any:
        return self.receive(self.send(method, **args))

    def ping(self) -> None:
        assert self.call("ping") is None

    @staticmethod
    def pack(data: bytes, seqid: int = 1) -> bytes:
        """The bytes of ``send_batch``."""
        return pack_batch(data, seqid)

    def send_batch(self, data: bytes) -> int:
        return self.send("infer_batch", params=IDL.InferenceParams(uuid="test", data=data))

    def infer_batch(self, data: bytes) -> tuple[str, float]:
        result = self.receive(self.send_batch(data))
        return result.label, result.score

    def infer_many(self, items: list[bytes], deadline_ms: int | None = None) -> list[Any]:
        params = [IDL.InferenceParams(uuid="test", data=item) for item in items]
        return self.call("infer_many", params=params, deadline_ms=deadline_ms)

    def send_infer(self, inputs: dict[str, Any], **options: Any) -> int:
        return self.send("infer", request=IDL.InferRequest(uuid="test", inputs=inputs, **options))

    def infer(self, inputs: dict[str, Any], **options: Any) -> dict[str, Any]:
        answer = self.receive(self.send_infer(inputs, **options))
        assert answer.uuid == "test"
        return answer.outputs

    def error_of(self, method: str, **args: Any) -> Any:
        """The `InferenceError` that the call is answered with."""
        try:
            result = self.call(method, **args)
        except IDL.InferenceError as error:
            return error
        raise AssertionError(f"no error but {result!r}")

    def close(self) -> None:
        self._transport.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


# -- bytes by hand --------------------------------------------------------------------------------------------------


def pack_call(name: str, body: bytes = b"\0", seqid: int = 1) -> bytes:
    """A call in the binary protocol; `body` is the arguments struct."""
    encoded = name.encode()
    return struct.pack(">II", BINARY_CALL, len(encoded)) + encoded + struct.pack(">i", seqid) + body


def pack_string(number: int, value: bytes) -> bytes:
    return struct.pack(">bhI", 11, number, len(value)) + value


def pack_batch(data: bytes, seqid: int = 1) -> bytes:
    params = pack_string(1, b"raw") + pack_string(2, data) + b"\0"
    return pack_call("infer_batch", struct.pack(">bh", 12, 1) + params + b"\0", seqid)


def pack_infer(text: bytes, seqid: int = 1) -> bytes:
    value = pack_string(2, text) + b"\0"
    inputs = struct.pack(">bhbbi", 13, 2, 11, 12, 1) + struct.pack(">I", 4) + b"data" + value
    return pack_call("infer", struct.pack(">bh", 12, 1) + pack_string(1, b"u") + inputs + b"\0\0", seqid)


def framed(message: bytes) -> bytes:
    return struct.pack(">I", len(message)) + message


def connect(port: int, timeout: float = WAIT) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout)


def narrow(port: int) -> socket.socket:
    """A connection with a small receive buffer."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(WAIT)
    sock.connect(("127.0.0.1", port))
    return sock


def on_its_way(sock: socket.socket) -> int:
    """How many bytes of what was sent do not lie in the socket at the other end yet: a busy machine takes a while."""
    (count,) = struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))
    return int(count)


def read_all(sock: socket.socket) -> bytes:
    """Everything until the server closes; a reset counts as such, a timeout does not."""
    received = b""
    try:
        while piece := sock.recv(65536):
            received += piece
    except ConnectionError:
        pass
    return received


def send_what_goes(sock: socket.socket, data: bytes) -> None:
    """As much as the server takes before it closes."""
    try:
        sock.sendall(data)
    except OSError:
        pass
