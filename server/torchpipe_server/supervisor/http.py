"""An HTTP server on one thread: a bounded number of connections, a bounded time for each request and each answer."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from email.utils import formatdate
from enum import Enum, auto
from functools import partial
from time import monotonic

from torchpipe_server.serving.loop import LONGEST_WAIT, READ, WRITE, Loop
from torchpipe_server.supervisor.acceptor import Acceptor
from torchpipe_server.wire.http import HttpAnswer, HttpError, HttpRequest
from torchpipe_server.wire.http_reader import MAX_HEAD_BYTES, HttpReader

logger = logging.getLogger("torchpipe_server")

LINGER_SECONDS = 2.0
METHODS = frozenset({"GET", "HEAD"})

Reply = Callable[[HttpAnswer], object]
Ask = Callable[[HttpRequest, Reply], object]
"""Answers a request by calling the reply, at once or later, on the server's thread; a second answer is ignored."""


class State(Enum):
    """Of a connection."""

    READING = auto()  # a request is awaited, or half there
    ANSWERING = auto()  # its answer is being made
    SENDING = auto()  # a part of the answer is still to be written
    LINGERING = auto()  # all is said; what the client still sends is discarded, so that it reads the answer
    CLOSED = auto()


READING, ANSWERING, SENDING, LINGERING, CLOSED = State


class _Connection:
    """One client's. ``until`` is when its state must have changed."""

    def __init__(self, sock: socket.socket, until: float) -> None:
        self.sock, self.until = sock, until
        self.state = READING
        self.reader = HttpReader(METHODS, body_bytes=0)
        self.requests: Iterator[HttpRequest] = iter(())  # those in what was read
        self.request = HttpRequest()  # the one that is being answered
        self.unsent = memoryview(b"")
        self.serial = 0  # of the request that is being answered
        self.is_last = False  # the answer that is written is the last one


class HttpServer:
    """Serves ``listener`` from a thread of its own until the end of a ``with`` block; ``ask`` is called on that thread.

    A request, a pause before it included, has ``request_seconds``, and so has the client to take the answer; the answer
    has to be there after ``answer_seconds``, or it is ``late``. Of more than ``most`` connections the one that is read
    or written longest is closed. ``elsewhere`` says where methods go that are not served.
    """

    def __init__(
        self, loop: Loop, listener: socket.socket, ask: Ask, late: HttpAnswer, headers: Mapping[str, str],
        most: int, request_seconds: float, answer_seconds: float, elsewhere: str,
    ) -> None:  # fmt: skip
        self._loop, self._ask, self._late, self._headers = loop, ask, late, headers
        self._most, self._request_seconds, self._answer_seconds = most, request_seconds, answer_seconds
        self._elsewhere = elsewhere
        self._acceptor = Acceptor(loop, listener, self._take, self._make_room)
        self._connections: set[_Connection] = set()
        self._thread = threading.Thread(target=self._serve, name="torchpipe-http", daemon=True)
        loop.steps.append(self._step)

    def __enter__(self) -> HttpServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.stop()
        self._thread.join()

    def _serve(self) -> None:
        self._acceptor.start()
        try:
            self._loop.run()
        finally:
            self._acceptor.close()
            for connection in list(self._connections):
                self._close(connection)
            self._loop.close()

    # -- connections --------------------------------------------------------------------------------------------

    def _take(self, sock: socket.socket, peer: str) -> None:
        if len(self._connections) >= self._most and not self._make_room():
            sock.close()
            return
        connection = _Connection(sock, monotonic() + self._request_seconds)
        self._connections.add(connection)
        self._watch(connection, READ)

    def _make_room(self) -> bool:
        """Close the connection whose client takes longest; none of those that wait for an answer."""
        waiting = [connection for connection in self._connections if connection.state is not ANSWERING]
        if not waiting:
            return False
        self._close(min(waiting, key=lambda connection: connection.until))
        return True

    def _watch(self, connection: _Connection, events: int) -> None:
        step = self._send if events & WRITE else self._read
        self._loop.watch(connection.sock, events, lambda _: self._guard(connection, step))

    def _close(self, connection: _Connection) -> None:
        if connection.state is not CLOSED:
            connection.state = CLOSED
            self._connections.discard(connection)
            self._watch(connection, 0)
            connection.sock.close()

    def _step(self) -> float:
        now = monotonic()
        for connection in [one for one in self._connections if one.until <= now]:
            if connection.state is ANSWERING:
                self._reply(connection, connection.serial, self._late)
            elif connection.state is READING and connection.reader.pending_bytes:
                self._refuse(connection, HttpError(408, f"a request has {self._request_seconds:g} seconds"))
            else:
                self._close(connection)
        return min([LONGEST_WAIT, *(connection.until - now for connection in self._connections)])

    def _guard(self, connection: _Connection, step: Callable[[_Connection], None]) -> None:
        """Go on with a connection, if it is still there; a defect ends that connection and nothing else."""
        if connection.state is CLOSED:
            return
        try:
            step(connection)
        except Exception:
            logger.exception("a defect; closing the HTTP connection")
            self._close(connection)

    # -- requests and answers -----------------------------------------------------------------------------------

    def _read(self, connection: _Connection) -> None:
        try:
            data = connection.sock.recv(MAX_HEAD_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._close(connection)
        elif connection.state is READING:
            connection.requests = connection.reader.feed(data)
            self._next(connection)

    def _next(self, connection: _Connection) -> None:
        """Begin the next request, if it is whole."""
        if connection.state is not READING:
            return
        try:
            request = next(connection.requests, None)
        except HttpError as error:
            self._refuse(connection, error)
            return
        if request is None:
            self._watch(connection, READ)
            return
        connection.serial += 1
        connection.request = request
        connection.state, connection.until = ANSWERING, monotonic() + self._answer_seconds
        self._watch(connection, 0)
        self._ask(request, partial(self._reply, connection, connection.serial))

    def _refuse(self, connection: _Connection, error: HttpError) -> None:
        """The stream cannot be read any further."""
        connection.request = connection.reader.request or HttpRequest()
        hint = "" if connection.request.method in ("", *METHODS) else f"; {self._elsewhere}"
        answer = HttpAnswer(error.status, "text/plain; charset=utf-8", f"{error}{hint}\n".encode())
        self._write(connection, answer, is_last=True)

    def _reply(self, connection: _Connection, serial: int, answer: HttpAnswer) -> None:
        if connection.state is not ANSWERING or connection.serial != serial:
            return  # too late
        self._write(connection, answer)

    def _write(self, connection: _Connection, answer: HttpAnswer, is_last: bool = False) -> None:
        headers = {"Date": formatdate(usegmt=True), **self._headers}
        connection.unsent = memoryview(connection.request.answer(answer, headers, is_last))
        connection.is_last = is_last or connection.request.is_last
        connection.state, connection.until = SENDING, monotonic() + self._request_seconds
        self._send(connection)

    def _send(self, connection: _Connection) -> None:
        try:
            connection.unsent = connection.unsent[connection.sock.send(connection.unsent) :]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._close(connection)
            return
        if connection.unsent:
            self._watch(connection, WRITE)
        elif not connection.is_last:
            connection.state, connection.until = READING, monotonic() + self._request_seconds
            self._watch(connection, 0)
            self._loop.call(partial(self._guard, connection, self._next))  # others are served in between
        else:
            self._linger(connection)

    def _linger(self, connection: _Connection) -> None:
        connection.state, connection.until = LINGERING, monotonic() + LINGER_SECONDS
        try:
            connection.sock.shutdown(socket.SHUT_WR)
        except OSError:
            self._close(connection)
        else:
            self._watch(connection, READ)
