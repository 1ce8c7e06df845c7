"""Blocking connections, and the pool that threads take them from."""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any

from torchpipe_client.address import Address
from torchpipe_client.attempts import Attempts
from torchpipe_client.calls import Call
from torchpipe_client.contract import FrameReader, decode_reply, encode_call
from torchpipe_client.errors import (
    ClientClosed,
    ConnectionLost,
    InferenceError,
    TimedOut,
    ends_connection,
    not_connected,
)

IDLE_SECONDS = 60.0
"""A connection unused for longer is closed: what lies between may have forgotten it, without a word to either side."""

_PIECE = 256 * 1024


class Connection:
    """A connected socket. One call at a time; after one that has no whole answer it is closed."""

    def __init__(self, address: Address, tls: ssl.SSLContext | None, attempts: Attempts) -> None:
        """Connects; raises ``NotConnected`` or ``TimedOut``."""
        self._address, self._sequence = address, 0
        self._sock = _connect(address, tls, attempts)
        self.is_open = True
        self.idle_since = time.monotonic()

    def exchange(self, call: Call[Any], attempts: Attempts) -> Any:
        """Sends the call's next attempt and returns what the service answered.

        Raises ``InferenceError``, with which the connection stays open, ``ConnectionLost``, ``TimedOut``, ``BadReply``.
        """
        self._sequence = self._sequence % (2**31 - 1) + 1
        frame = encode_call(call.method, self._sequence, call.arguments(attempts.deadline_ms()))
        try:
            answer = decode_reply(call.method, self._sequence, self._transfer(frame, attempts))
        except InferenceError as error:
            if ends_connection(error):
                self.close()
            raise
        except BaseException:  # an interrupt as well: an answer that comes later must not be taken for the next call's
            self.close()
            raise
        self.idle_since = time.monotonic()
        return answer

    def is_usable(self) -> bool:
        """Whether the service has kept it, and sent nothing that nobody asked for."""
        if time.monotonic() - self.idle_since > IDLE_SECONDS:
            return False
        try:
            self._sock.settimeout(0)
            self._sock.recv(1)
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        except OSError:
            return False
        return False

    def close(self) -> None:
        """May be called again."""
        self.is_open = False
        self._sock.close()

    def _transfer(self, frame: bytes, attempts: Attempts) -> bytes:
        reader, cause = FrameReader(), None
        try:
            self._sock.settimeout(attempts.left())
            self._sock.sendall(frame)
        except TimeoutError:
            raise attempts.timed_out() from None
        except OSError as error:
            cause = error  # NOTE: read on, for the service may have said why before it closed
        try:
            while True:
                self._sock.settimeout(attempts.left())
                data = self._sock.recv(_PIECE)
                if not data:
                    raise ConnectionLost(f"{self._address} closed the connection before the answer") from cause
                if (message := reader.feed(data)) is not None:
                    return message
        except TimedOut:
            raise
        except TimeoutError:
            raise attempts.timed_out() from None
        except ConnectionLost:
            raise
        except OSError as error:
            raise ConnectionLost(f"the connection to {self._address} broke before the answer: {error}") from error


def _connect(address: Address, tls: ssl.SSLContext | None, attempts: Attempts) -> socket.socket:
    """To the first of the host's addresses that takes it, within the time for all of them."""
    until = time.monotonic() + min(attempts.connect_timeout, attempts.left())
    failure = OSError("it has no address")
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise not_connected(address, error) from error
    for family, kind, protocol, _, place in found:
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(max(0.001, until - time.monotonic()))
            sock.connect(place)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock if tls is None else tls.wrap_socket(sock, server_hostname=address.host)
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
    raise not_connected(address, failure) from failure


class Pool:
    """The connections of a client. A thread has one for the length of an attempt; those in no use are kept."""

    def __init__(self, address: Address, tls: ssl.SSLContext | None, most: int) -> None:
        self._address, self._tls, self._most = address, tls, most
        self._is_closed = False
        self._idle: list[Connection] = []
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        # NOTE: of C, no Semaphore: a handler of a signal may come here while its thread is anywhere in ``connection``.
        self._slots: SimpleQueue[None] = SimpleQueue()
        for _ in range(self._most):
            self._slots.put(None)
        for connection in self._idle:
            connection.close()
        self._idle = []

    @contextmanager
    def connection(self, attempts: Attempts) -> Iterator[Connection]:
        """One that nobody else has. Raises ``ClientClosed``, ``NotConnected``, ``TimedOut``."""
        if self._pid != os.getpid():
            self._reset()  # after a fork: the connections, and what arrives on them, are the parent's
        slots = self._slots
        try:
            slots.get(timeout=min(attempts.left(), threading.TIMEOUT_MAX))
        except Empty:
            problem = f"all {self._most} connections were in use for {attempts.timeout:g} s (max_connections)"
            raise TimedOut(problem) from None
        try:
            connection = self._take_idle() or Connection(self._address, self._tls, attempts)
            try:
                yield connection
            finally:
                self._put_back(connection)
        finally:
            slots.put(None)

    def close(self) -> None:
        """Closes idle connections now, the others when their calls have ended."""
        self._is_closed = True
        self._close_idle()

    # NOTE: these take no lock: the handler of a signal may close the client, or call it, while the thread that it
    # interrupts is anywhere in them.

    def _close_idle(self) -> None:
        while self._idle:
            with suppress(IndexError):
                self._idle.pop().close()

    def _take_idle(self) -> Connection | None:
        while not self._is_closed:
            try:
                connection = self._idle.pop()  # the one used last: the others grow old and are closed
            except IndexError:
                return None
            if connection.is_usable():
                return connection
            connection.close()
        raise ClientClosed("the client is closed")

    def _put_back(self, connection: Connection) -> None:
        if connection.is_open:
            self._idle.append(connection)
        if self._is_closed:
            self._close_idle()
