"""Opens a listening socket and accepts connections while descriptors are available."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import sys
from collections.abc import Callable
from errno import EAGAIN, EMFILE, ENFILE, ENOBUFS, ENOMEM

from torchpipe_py.serving import nearest
from torchpipe_server.front.loop import Loop

logger = logging.getLogger("torchpipe_server")

EXHAUSTED = frozenset((EMFILE, ENFILE, ENOBUFS, ENOMEM, EAGAIN))  # out of descriptors, memory or processes
LISTEN_BACKLOG = 1024
ACCEPTS_AT_ONCE = 64
RETRY_SECONDS = 0.5
# The system completes a short address: 0 becomes 0.0.0.0, which is every interface.
_NUMERIC = re.compile(r"(?:.*\.)?(?:[0-9]+|0[xX][0-9a-fA-F]*)")
_USUAL = ("127.0.0.1", "0.0.0.0", "localhost", "::1", "::")

# Detect a peer that has vanished, both while the connection is idle and while it does not read.
PROBE_AFTER_SECONDS, PROBE_EVERY_SECONDS, PROBES = 60, 10, 6
UNANSWERED_SECONDS = 120

Take = Callable[[socket.socket, str], object]
"""Takes a connected non-blocking socket and the address of its peer."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at an IP address or a name's, IPv4 preferred; ``::`` accepts IPv4 as well.

    Raises ``OSError`` with a suggestion for anything else.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM) if host else []
    except (UnicodeError, socket.gaierror):
        addresses = []
    if not addresses:
        raise OSError(f"neither an address nor a name that has one; {nearest(host, _USUAL)}")
    family, _, _, _, address = min(addresses, key=lambda each: each[0] != socket.AF_INET)
    if _NUMERIC.fullmatch(host) and host != address[0]:
        raise OSError(f"not a full address; did you mean {address[0]!r}?")
    is_dual = address[0] == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(address, family=family, backlog=LISTEN_BACKLOG, dualstack_ipv6=is_dual)


class Acceptor:
    """Gives each connection to ``take``. Out of descriptors, it calls ``make_room`` and retries later."""

    def __init__(self, loop: Loop, listener: socket.socket, take: Take, make_room: Callable[[], object]) -> None:
        self._loop, self._listener, self._take, self._make_room = loop, listener, take, make_room
        self._is_open = False
        self._resumes: asyncio.TimerHandle | None = None  # while it is paused
        listener.setblocking(False)
        # Accepted connections inherit the options of the listener.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_NODELAY, 1),
            (socket.TCP_KEEPIDLE, PROBE_AFTER_SECONDS),
            (socket.TCP_KEEPINTVL, PROBE_EVERY_SECONDS),
            (socket.TCP_KEEPCNT, PROBES),
            (socket.TCP_USER_TIMEOUT, UNANSWERED_SECONDS * 1000),
        ):
            listener.setsockopt(socket.IPPROTO_TCP, option, value)

    def start(self) -> None:
        """Start to accept."""
        self._is_open = True
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Take the connections that the system has already accepted, then close the port."""
        if self._listener.fileno() < 0:
            return
        if self._is_open:
            self.resume()
            self._accept(at_once=sys.maxsize)
        self._is_open = False
        self.pause()
        self._listener.close()

    def pause(self) -> None:
        """Leave connections in the system's queue until ``resume``, or for ``RETRY_SECONDS``."""
        # NOTE: the loop would report the listener as ready all the time.
        self._loop.remove_reader(self._listener.fileno())
        if self._resumes is None:
            self._resumes = self._loop.call_later(RETRY_SECONDS, self.resume)

    def resume(self) -> None:
        """End the pause."""
        if self._resumes is not None:
            self._resumes.cancel()
            self._resumes = None
            if self._is_open:
                self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self, at_once: int = ACCEPTS_AT_ONCE) -> None:
        for _ in range(at_once):
            if not self._is_open or self._resumes is not None:
                return  # closed or paused while this event was on its way, or by the last connection
            try:
                sock, (peer, *_) = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue  # gone before it was accepted
            except OSError as error:
                logger.error("cannot accept: %s", error)
                self.pause()
                if error.errno in EXHAUSTED:
                    self._make_room()
                return
            sock.setblocking(False)
            self._take(sock, peer)
