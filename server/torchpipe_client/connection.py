"""Connections and pools: the base classes of both clients, and those of the client for threads."""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from torchpipe_client.contract import FrameReader, decode_reply, encode_call
from torchpipe_client.core import Address, Attempts, Call
from torchpipe_client.errors import ClientClosed, ClientError, ConnectionLost, InferenceError, not_connected

IDLE_SECONDS = 60.0
"""A connection unused for longer is closed: a firewall or NAT in between may have dropped it silently."""

_PIECE = 256 * 1024


class BaseConnection:
    """Serves one call at a time; closed after a call without a complete and valid answer."""

    def __init__(self, address: Address) -> None:
        self._address, self._sequence = address, 0
        self.is_open = True
        self.idle_since = time.monotonic()

    def close(self) -> None:
        """Close it; may be called again."""
        raise NotImplementedError

    def is_usable(self) -> bool:
        """Whether it can serve another call, as far as is known."""
        return self.is_open and time.monotonic() - self.idle_since <= IDLE_SECONDS

    def _encode(self, call: Call[Any]) -> bytes:
        """The frame of the call's next attempt."""
        self._sequence = self._sequence % (2**31 - 1) + 1
        return encode_call(call.method, self._sequence, call.arguments())

    @contextmanager
    def _exchanging(self) -> Iterator[None]:
        """Close the connection after a bad or incomplete answer, or an error after which the service closes it."""
        try:
            yield
        except BaseException as error:  # also an interrupt: a late answer must not reach the next call
            # The service closes it if it could not read the message; such errors are plain InferenceErrors.
            if not isinstance(error, InferenceError) or type(error) is InferenceError:
                self.close()
            raise
        self.idle_since = time.monotonic()


C = TypeVar("C", bound=BaseConnection)


class BasePool(Generic[C]):
    """The connections of a client. Each attempt of a call uses one; unused ones are kept."""

    def __init__(self, address: Address, tls: ssl.SSLContext | None, most: int) -> None:
        self._address, self._tls, self._most = address, tls, most
        self._is_closed = False
        self._idle: list[C] = []

    def close(self) -> None:
        """Close idle connections now, and the others when their calls have ended."""
        self._is_closed = True
        self._close_idle()

    # NOTE: lock-free, because a signal handler may close or use the client while it interrupts any of these.

    def _close_idle(self) -> None:
        while self._idle:
            with suppress(IndexError):
                self._idle.pop().close()

    def _take_idle(self) -> C | None:
        while not self._is_closed:
            try:
                connection = self._idle.pop()  # the last used one, so that the others expire
            except IndexError:
                return None
            if connection.is_usable():
                return connection
            connection.close()
        raise ClientClosed("the client is closed")

    def _put_back(self, connection: C) -> None:
        if connection.is_open:
            self._idle.append(connection)
        if self._is_closed:
            self._close_idle()


class Connection(BaseConnection):
    """A connected socket."""

    def __init__(self, address: Address, tls: ssl.SSLContext | None, attempts: Attempts) -> None:
        """Connect. Raises ``NotConnected`` or ``TimedOut``."""
        super().__init__(address)
        self._sock = _connect(address, tls, attempts)

    def exchange(self, call: Call[Any]) -> ClientError | None:
        """Send the call's next attempt and have it take the answer; returns what ``Call.take`` does.

        Raises ``InferenceError``, after which the connection may stay open, ``ConnectionLost``, ``TimedOut``,
        ``BadReply``.
        """
        frame = self._encode(call)
        with self._exchanging():
            return call.take(decode_reply(call.method, self._sequence, self._transfer(frame, call.attempts)))

    def is_usable(self) -> bool:
        """Whether it is still open and has no unexpected data."""
        if not super().is_usable():
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
        self.is_open = False
        self._sock.close()

    def _transfer(self, frame: bytes, attempts: Attempts) -> bytes:
        reader, cause = FrameReader(), None
        try:
            unsent = memoryview(frame)
            while unsent:  # NOTE: ``sendall`` of TLS gives each record the whole timeout
                self._sock.settimeout(attempts.left())
                unsent = unsent[self._sock.send(unsent) :]
        except TimeoutError:
            raise attempts.timed_out() from None
        except OSError as error:
            cause = error  # NOTE: still read, because the service may have sent a reason before it closed
        try:
            while True:
                self._sock.settimeout(attempts.left())
                data = self._sock.recv(_PIECE)
                if not data:
                    break
                if (message := reader.feed(data)) is not None:
                    return message
        except TimeoutError:  # ``TimedOut`` is one
            raise attempts.timed_out() from None
        except OSError as error:
            raise ConnectionLost(f"the connection to {self._address} broke before the answer: {error}") from error
        raise ConnectionLost(f"{self._address} closed the connection before the answer") from cause


def _connect(address: Address, tls: ssl.SSLContext | None, attempts: Attempts) -> socket.socket:
    """Connect to the first of the host's addresses that accepts, within the time for all of them."""
    until = time.monotonic() + min(attempts.limits.connect_timeout, attempts.left())
    failure = OSError("the host has no address")
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise not_connected(address, error) from error
    for family, kind, protocol, _, place in found:
        sock = None
        try:
            sock = socket.socket(family, kind, protocol)
            sock.settimeout(max(0.001, until - time.monotonic()))
            sock.connect(place)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(max(0.001, until - time.monotonic()))
            return sock if tls is None else tls.wrap_socket(sock, server_hostname=address.host)
        except BaseException as error:
            if sock is not None:
                sock.close()
            if not isinstance(error, OSError):
                raise
            failure = error
    raise not_connected(address, failure) from failure


class Pool(BasePool[Connection]):
    """Connections for threads."""

    def __init__(self, address: Address, tls: ssl.SSLContext | None, most: int) -> None:
        super().__init__(address, tls, most)
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        # NOTE: in C, unlike Semaphore, so that a signal handler may interrupt ``connection`` anywhere.
        self._slots: SimpleQueue[None] = SimpleQueue()
        for _ in range(self._most):
            self._slots.put(None)
        self._close_idle()

    @contextmanager
    def connection(self, attempts: Attempts) -> Iterator[Connection]:
        """A connection for one call. Raises ``ClientClosed``, ``NotConnected``, ``TimedOut``."""
        if self._pid != os.getpid():
            self._reset()  # after a fork: the connections belong to the parent
        slots = self._slots
        try:
            slots.get(timeout=min(attempts.left(), threading.TIMEOUT_MAX))
        except Empty:
            raise attempts.no_connection() from None
        try:
            connection = self._take_idle() or Connection(self._address, self._tls, attempts)
            try:
                yield connection
            finally:
                self._put_back(connection)
        finally:
            slots.put(None)
