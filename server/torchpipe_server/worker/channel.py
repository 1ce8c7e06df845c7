"""Messages between the supervisor and a worker: one JSON object per line, some with a descriptor."""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
from array import array
from collections import deque
from collections.abc import Callable
from math import inf
from time import monotonic
from typing import Any

from torchpipe_server.front.loop import Loop

logger = logging.getLogger("torchpipe_server")

_PASSING = (errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM)  # no room at the moment; try again
_RECEIVE_BYTES = 2**14  # in one round of the loop, so that it stays short
_DESCRIPTORS = 64  # at most in one receive from a trusted side
_LAST_RECEIVES = 256  # more than the system buffers for a process that has ended
LINE_BYTES = 8 * 2**20  # limit of a message from an untrusted side
WITH_DESCRIPTOR = b"+"  # the prefix of a message with a descriptor


class Channel:
    """One end of a pair of Unix sockets on a loop. ``send`` is for the loop's thread and never blocks.

    ``on_message(line, descriptor)`` owns the descriptor, which is -1 if there is none or no free number was left.
    An exception that it raises is logged, and the next messages are handled.
    ``on_end()`` is called once, when the other side is gone. Unless it ``is_trusted`` (the supervisor trusts no
    worker), the other side cannot pass descriptors, and a line of more than ``LINE_BYTES`` ends the channel.
    """

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        on_message: Callable[[bytes, int], object],
        on_end: Callable[[], object],
        is_trusted: bool = True,
    ) -> None:
        self._loop, self._sock = loop, sock
        self._most_descriptors = _DESCRIPTORS if is_trusted else 0
        self._most_bytes: float = inf if is_trusted else LINE_BYTES
        self._on_message, self._on_end = on_message, on_end
        self._received = b""  # an incomplete line
        self._descriptors: deque[int] = deque()
        self._unsent: deque[tuple[memoryview, int]] = deque()
        self.is_closed = False
        sock.setblocking(False)
        loop.add_reader(sock.fileno(), self._receive)

    def send(self, message: dict[str, Any], descriptor: int = -1) -> None:
        """Send a message, with a copy of ``descriptor``, which the caller may close afterwards.

        Raises ``OSError`` if the message must wait and no descriptor is left for the copy.
        """
        if self.is_closed:
            return
        prefix = WITH_DESCRIPTOR if descriptor >= 0 else b""
        data = memoryview(prefix + json.dumps(message).encode() + b"\n")
        sent = 0 if self._unsent else self._write(data, descriptor)
        if sent < len(data):
            is_left = descriptor >= 0 and not sent  # it goes with the first byte
            self._unsent.append((data[sent:], os.dup(descriptor) if is_left else -1))
            self._loop.add_writer(self._sock.fileno(), self._flush)

    @property
    def unsent(self) -> int:
        """The number of messages that wait to be sent."""
        return len(self._unsent)

    def finish(self, seconds: float) -> None:
        """Wait for at most ``seconds`` until everything is sent, once the loop no longer runs."""
        until = monotonic() + seconds
        while self._unsent and not self.is_closed and (left := until - monotonic()) > 0:
            self._sock.settimeout(left)
            if not self._send_first():
                return

    def drain(self) -> None:
        """Read what is left from a process that has ended, then end the channel."""
        for _ in range(_LAST_RECEIVES):  # a process that it started may go on sending
            if not self._receive():
                break
        self._end()

    def close(self) -> None:
        """Close the channel without calling ``on_end``."""
        if self.is_closed:
            return
        self.is_closed = True
        # NOTE: breaks the reference cycle of channel and owner.
        self._on_message = lambda line, descriptor: None
        self._on_end = lambda: None
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        for descriptor in [*self._descriptors, *(descriptor for _, descriptor in self._unsent)]:
            if descriptor >= 0:
                os.close(descriptor)

    def _flush(self) -> None:
        while self._unsent and not self.is_closed:
            if not self._send_first():
                return
        self._loop.remove_writer(self._sock.fileno())

    def _send_first(self) -> bool:
        """Send the first message that waits, or a part of it; ``False`` if there is no room."""
        data, descriptor = self._unsent[0]
        sent = self._write(data, descriptor)
        if not sent:
            return False
        if descriptor >= 0:
            os.close(descriptor)  # it went with the first byte
        self._unsent[0] = data[sent:], -1
        if sent == len(data):
            self._unsent.popleft()
        return True

    def _write(self, data: memoryview, descriptor: int) -> int:
        """The number of bytes sent; all of them if the other side is gone."""
        extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [descriptor]))] if descriptor >= 0 else []
        try:
            return self._sock.sendmsg([data], extra)
        except (BlockingIOError, TimeoutError):
            return 0
        except OSError as error:
            if error.errno in _PASSING:
                return 0
            # NOTE: later, after what it sent before its end was read.
            self._loop.call_soon(self.drain)
            return len(data)

    def _receive(self) -> bool:
        """Read once; returns whether there was data."""
        if self.is_closed:
            return False
        try:
            # The system closes descriptors that do not fit.
            data, descriptors, flags, _ = socket.recv_fds(
                self._sock, _RECEIVE_BYTES, self._most_descriptors, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return False
        except OSError:
            data, descriptors, flags = b"", [], 0
        if self._most_descriptors:
            # NOTE: a receive returns at most one message's descriptor, and ends with it.
            self._descriptors.extend([-1] if flags & socket.MSG_CTRUNC else descriptors)
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            has_descriptor = line.startswith(WITH_DESCRIPTOR) and self._descriptors
            descriptor = self._descriptors.popleft() if has_descriptor else -1
            try:
                self._on_message(line.removeprefix(WITH_DESCRIPTOR), descriptor)
            except Exception:  # NOTE: later messages, and descriptors, must not be lost with it
                logger.exception("internal error while a message was handled")
        if not data:
            self._end()
        elif len(self._received) > self._most_bytes:
            logger.error("a process sent more than %d bytes without a newline", LINE_BYTES)
            self._end()
        return bool(data)

    def _end(self) -> None:
        if not self.is_closed:
            on_end = self._on_end
            self.close()
            on_end()
