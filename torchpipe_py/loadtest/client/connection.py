"""One blocking connection to the server, on which no call outlives its time limit."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchpipe_py.loadtest.client.wire import Wire, error_name
from torchpipe_py.loadtest.errors import CannotRunError, ConnectionClosed

_FIRST_DELAY_S = 0.01
_LONGEST_DELAY_S = 0.5
_MAX_BUFFERS = os.sysconf("SC_IOV_MAX")


@dataclass(frozen=True)
class Endpoint:
    """Where the server is; `timeout` in seconds, for a call and for a connection."""

    host: str
    port: int
    timeout: float

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Connection:
    """A connected socket and the decoder of its replies. One call at a time; after an error only `close` is left.

    The kernel keeps the time limit (SO_RCVTIMEO, SO_SNDTIMEO): a Python timeout would cost a poll() each time.
    """

    def __init__(self, wire: Wire, endpoint: Endpoint) -> None:
        """Connects; raises `OSError`."""
        self._timeout = endpoint.timeout
        self._sock = socket.create_connection((endpoint.host, endpoint.port), timeout=endpoint.timeout)
        self._sock.settimeout(None)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._limit(socket.SO_SNDTIMEO, endpoint.timeout)
        self._limit(socket.SO_RCVTIMEO, endpoint.timeout)
        self._reader = wire.reader(self)
        self._deadline = 0.0
        self._in_pieces = False

    def call(self, sequence: int, count: int, buffers: Sequence[bytes | bytearray]) -> list[Any]:
        """Sends one call and returns one result or one exception for each of its `count` images.

        Raises `TimeoutError` after the endpoint's timeout, `OSError` and what the wire's reader raises.
        """
        self._deadline = time.perf_counter() + self._timeout
        try:
            self._send(buffers)
            self._in_pieces = False
            return self._reader.read(sequence, count)
        except BlockingIOError:
            raise TimeoutError(f"no answer within {self._timeout:g} s") from None

    def read(self, size: int) -> bytes:
        """Some bytes of a reply, at most `size`: the wire's reader reads from here."""
        if self._in_pieces:  # a reply that trickles in must not renew the limit with each piece
            self._limit(socket.SO_RCVTIMEO, self._left())
        chunk = self._sock.recv(size)
        if self._in_pieces:
            self._limit(socket.SO_RCVTIMEO, self._timeout)
        self._in_pieces = True
        if not chunk:
            raise ConnectionClosed("closed by the server")
        return chunk

    def peek(self, size: int) -> bytes:
        """What `read` returns next; empty when the server has closed."""
        return self._sock.recv(size, socket.MSG_PEEK)

    def close(self) -> None:
        """Closes the socket; may be called again."""
        self._sock.close()

    def _send(self, buffers: Sequence[bytes | bytearray]) -> None:
        """One system call, unless the kernel takes only a part."""
        if len(buffers) > _MAX_BUFFERS:
            buffers = [b"".join(buffers)]
        sent = self._sock.sendmsg(buffers)
        if sent < sum(map(len, buffers)):
            self._send_rest(memoryview(b"".join(buffers))[sent:])

    def _send_rest(self, rest: memoryview) -> None:
        while rest:
            self._limit(socket.SO_SNDTIMEO, self._left())
            rest = rest[self._sock.send(rest) :]
        self._limit(socket.SO_SNDTIMEO, self._timeout)

    def _left(self) -> float:
        left = self._deadline - time.perf_counter()
        if left <= 0:
            raise TimeoutError(f"no answer within {self._timeout:g} s")
        return left

    def _limit(self, option: int, seconds: float) -> None:
        microseconds = max(1, round(seconds * 1e6))  # NOTE: 0 would mean no limit
        self._sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", *divmod(microseconds, 1_000_000)))


def connect_with_retries(wire: Wire, endpoint: Endpoint) -> Connection:
    """A new connection, tried for the endpoint's timeout with growing delays; raises the last `OSError`."""
    deadline = time.monotonic() + endpoint.timeout
    delay = _FIRST_DELAY_S
    while True:
        try:
            return Connection(wire, endpoint)
        except OSError:
            if time.monotonic() + delay > deadline:
                raise
        time.sleep(delay)
        delay = min(2 * delay, _LONGEST_DELAY_S)


def probe(wire: Wire, endpoint: Endpoint) -> None:
    """Connects and sends the wire's probe; `CannotRunError` says in one line why the server cannot be tested."""
    try:
        connection = Connection(wire, endpoint)
    except OSError as error:
        hint = "start the service first, or say with --host and --port where it is"
        raise CannotRunError(f"cannot connect to {endpoint}: {error.strerror or error}; {hint}") from error
    try:
        connection.call(0, 0, wire.probe())
    except Exception as error:
        raise CannotRunError(f"{endpoint} does not answer {wire}: {error_name(error)}: {error}") from error
    finally:
        connection.close()
