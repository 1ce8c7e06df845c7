"""Opens a listening socket, and takes its connections as long as there are descriptors for them."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import sys
from collections.abc import Callable
from errno import EAGAIN, EMFILE, ENFILE, ENOBUFS, ENOMEM

from torchpipe_py.errors import nearest
from torchpipe_server.front.loop import Loop

logger = logging.getLogger("torchpipe_server")

EXHAUSTED = frozenset((EMFILE, ENFILE, ENOBUFS, ENOMEM, EAGAIN))  # no descriptor, memory or process is left for now
LISTEN_BACKLOG = 1024
ACCEPTS_AT_ONCE = 64
RETRY_SECONDS = 0.5
# The system completes a short address: of 0 it makes 0.0.0.0, which is every interface.
_NUMERIC = re.compile(r"(?:.*\.)?(?:[0-9]+|0[xX][0-9a-fA-F]*)")
_USUAL = ("127.0.0.1", "0.0.0.0", "localhost", "::1", "::")

# A peer that is gone without a word is noticed, both while nothing is sent and while it takes nothing.
PROBE_AFTER_SECONDS, PROBE_EVERY_SECONDS, PROBES = 60, 10, 6
UNANSWERED_SECONDS = 120

Take = Callable[[socket.socket, str], object]
"""Takes a connected socket that does not block, and the address it is connected to."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at a full IP address, or that of a name: an IPv4 one, if it has any. ``::`` is IPv4 too.

    ``OSError`` says what would be an address.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM) if host else []
    except (UnicodeError, socket.gaierror):
        addresses = []
    if not addresses:
        raise OSError(f"neither an address nor a name that has one; {nearest(host, _USUAL)}")
    family, _, _, _, address = min(addresses, key=lambda found: found[0] != socket.AF_INET)
    if _NUMERIC.fullmatch(host) and host != address[0]:
        raise OSError(f"not a full address; did you mean {address[0]!r}?")
    is_dual = address[0] == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(address, family=family, backlog=LISTEN_BACKLOG, dualstack_ipv6=is_dual)


class Acceptor:
    """Gives each connection to ``take``. Where no descriptor is left it calls ``make_room`` and tries again later."""

    def __init__(self, loop: Loop, listener: socket.socket, take: Take, make_room: Callable[[], object]) -> None:
        self._loop, self._listener, self._take, self._make_room = loop, listener, take, make_room
        self._is_open = False
        self._resumes: asyncio.TimerHandle | None = None  # while it is paused
        listener.setblocking(False)
        # What is set of a listener holds for each connection that it accepts.
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
        """Accept from now on."""
        self._is_open = True
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Take what the system has accepted already, then close the port."""
        if self._listener.fileno() < 0:
            return
        if self._is_open:
            self.resume()
            self._accept(at_once=sys.maxsize)
        self._is_open = False
        self.pause()
        self._listener.close()

    def pause(self) -> None:
        """Leave connections to the system's queue until ``resume``, or for a moment."""
        # NOTE: level-triggered, the listener would report ready without end.
        self._loop.remove_reader(self._listener.fileno())
        if self._resumes is None:
            self._resumes = self._loop.call_later(RETRY_SECONDS, self.resume)

    def resume(self) -> None:
        """Go on before the pause is over."""
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
