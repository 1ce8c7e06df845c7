"""Messages between the supervisor and a worker: JSON objects, one a line, some with a descriptor."""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any

from torchpipe_server.front.loop import Loop

logger = logging.getLogger("torchpipe_server")

_PASSING = (errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM)  # no room at the moment, but the other side is there
_GONE = (errno.EPIPE, errno.ECONNRESET)
_RECEIVE_BYTES = 2**18
_DESCRIPTORS = 64  # at most in one receive
_LAST_RECEIVES = 16  # more than the system keeps of a process that has ended
LINE_BYTES = 8 * 2**20  # of a message of the side that is not trusted

Said = dict[str, Any]


class Channel:
    """One end of a pair of Unix sockets on a loop. ``send`` is for the loop's thread and never blocks.

    ``on_message(message, descriptor)`` owns the descriptor, -1 where there is none, or there was no room for it;
    ``on_end()`` is called once, when the other side is gone, or sends what is no message. The supervisor trusts no
    worker: to a side that ``is_trusted`` not, no descriptor can be given, and no line beyond ``LINE_BYTES``.
    """

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        on_message: Callable[[Said, int], object],
        on_end: Callable[[], object],
        is_trusted: bool = True,
    ) -> None:
        self._loop, self._sock, self._is_trusted = loop, sock, is_trusted
        self._on_message, self._on_end = on_message, on_end
        self._received = bytearray()
        self._descriptors: deque[int] = deque()
        self._unsent: deque[tuple[memoryview, int]] = deque()
        self._is_closed = False
        sock.setblocking(False)
        loop.add_reader(sock.fileno(), self._receive)

    def send(self, message: Said, descriptor: int = -1) -> None:
        """Send a message; the other side gets a copy of ``descriptor``, which the caller may close afterwards."""
        if self._is_closed:
            return
        if descriptor >= 0:
            message = {**message, "descriptor": True}
        data = memoryview(json.dumps(message).encode() + b"\n")
        sent = 0 if self._unsent else self._write(data, descriptor)
        if sent < len(data) and not self._is_closed:
            is_left = descriptor >= 0 and not sent  # it goes with the first byte
            self._unsent.append((data[sent:], os.dup(descriptor) if is_left else -1))
            self._loop.add_writer(self._sock.fileno(), self._flush)

    def finish(self, seconds: float) -> None:
        """Wait, for so long at most, until the system has taken all that was sent: the loop goes round no more."""
        if not self._is_closed:
            self._sock.settimeout(seconds)
            self._flush()

    def hear_out(self) -> None:
        """The other side is gone: what it has said is all there is, whoever else holds its socket."""
        for _ in range(_LAST_RECEIVES):  # a process that it has left behind may send without end
            if self._is_closed or not self._receive():
                break
        self._end()

    def close(self) -> None:
        """Without ``on_end``."""
        if self._is_closed:
            return
        self._is_closed = True
        # NOTE: who has the channel is had by it: its descriptors would stay open until the garbage is collected.
        self._on_message, self._on_end = _ignore, _ignore
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        for descriptor in [*self._descriptors, *(descriptor for _, descriptor in self._unsent)]:
            if descriptor >= 0:
                os.close(descriptor)

    def _flush(self) -> None:
        while self._unsent and not self._is_closed:
            data, descriptor = self._unsent[0]
            sent = self._write(data, descriptor)
            if not sent:
                return
            if descriptor >= 0:
                os.close(descriptor)  # it went with the first byte
            if sent < len(data):
                self._unsent[0] = data[sent:], -1
            else:
                self._unsent.popleft()
        self._loop.remove_writer(self._sock.fileno())

    def _write(self, data: memoryview, descriptor: int) -> int:
        """How many bytes the system has taken, or nobody ever will."""
        extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [descriptor]))] if descriptor >= 0 else []
        try:
            return self._sock.sendmsg([data], extra)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            if error.errno in _GONE:
                # NOTE: later, since what it has said before its end is still to be heard.
                self._loop.call_soon(self.hear_out)
                return len(data)
            if error.errno not in _PASSING:
                self._end()
            return 0

    def _receive(self) -> bool:
        """Whether there was anything."""
        if self._is_closed:
            return False
        try:
            if self._is_trusted:
                data, descriptors, flags, _ = socket.recv_fds(self._sock, _RECEIVE_BYTES, _DESCRIPTORS)
            else:
                data, descriptors, flags = self._sock.recv(_RECEIVE_BYTES), [], 0  # the system closes any descriptors
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            data, descriptors, flags = b"", [], 0
        # NOTE: a receive brings one message's descriptor at most, and ends with it.
        self._descriptors.extend([-1] if flags & socket.MSG_CTRUNC else descriptors)
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)  # a program that a backend starts has no business with it
        if not data:
            self._end()
            return True
        self._received += data
        *lines, rest = self._received.split(b"\n")
        self._received = bytearray(rest)
        try:
            messages = [_parse(line) for line in lines]
            if not self._is_trusted and len(rest) > LINE_BYTES:
                raise ValueError(f"a line of more than {LINE_BYTES} bytes")
        except (ValueError, RecursionError) as error:
            logger.error("what comes from the other process is no message: %s", str(error)[:200])
            self._end()
            return True
        for message in messages:
            descriptor = self._descriptors.popleft() if message.pop("descriptor", False) and self._descriptors else -1
            self._on_message(message, descriptor)
        return True

    def _end(self) -> None:
        if not self._is_closed:
            on_end = self._on_end
            self.close()
            on_end()


def _ignore(*message: object) -> None:
    pass


def _parse(line: bytes | bytearray) -> Said:
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError(f"expected an object, got {type(message).__name__}")
    return message
