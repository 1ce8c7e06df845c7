"""Takes connections from a listening socket, as many as there are slots for."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Callable
from time import monotonic

from torchpipe_server.serving.loop import READ, Loop

logger = logging.getLogger("torchpipe_server")

ACCEPTS_AT_ONCE = 64
REFUSED_AT_ONCE = 128  # connections over the limit that are still told so
RETRY_SECONDS = 0.5

Take = Callable[[socket.socket, int, bool], object]
"""Takes a connected socket, its slot, and whether it is over the limit: its first request is to be refused."""


class Acceptor:
    """Gives each connection a slot of its own until ``release``; ``served`` of them may be under the limit."""

    def __init__(self, loop: Loop, listener: socket.socket, max_connections: int, take: Take) -> None:
        self._loop, self._listener, self._take = loop, listener, take
        self._max = max_connections
        self._free = list(range(slots_for(max_connections)))[::-1]
        self._refused: set[int] = set()
        self.accepted = self.refused = 0  # since the start
        self._is_open = False
        self._retry_at = 0.0
        listener.setblocking(False)

    @property
    def open(self) -> int:
        """Connections that hold a slot."""
        return slots_for(self._max) - len(self._free)

    def start(self) -> None:
        """Accept from now on."""
        self._is_open = True
        self._loop.steps.append(self._step)
        self._loop.watch(self._listener, READ, self._accept)

    def close(self) -> None:
        """Take what the system has accepted already, then close the port."""
        if self._listener.fileno() < 0:
            return
        if self._is_open:
            self._accept(at_once=sys.maxsize)
        self._is_open, self._retry_at = False, 0.0
        self._loop.watch(self._listener, 0, self._accept)
        self._listener.close()

    def release(self, slot: int) -> None:
        """The connection is closed."""
        self._refused.discard(slot)
        self._free.append(slot)

    def _accept(self, events: int = READ, at_once: int = ACCEPTS_AT_ONCE) -> None:
        for _ in range(at_once):
            if not self._is_open:
                return  # closed while this event was on its way
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue  # gone before it was accepted
            except OSError as error:
                # Level-triggered, the listener could report ready without end: look again a little later.
                logger.error("cannot accept: %s", error)
                self._loop.watch(self._listener, 0, self._accept)
                self._retry_at = monotonic() + RETRY_SECONDS
                return
            self._add(sock)

    def _add(self, sock: socket.socket) -> None:
        is_refused = self.open - len(self._refused) >= self._max
        if not self._free:
            self.refused += 1
            sock.close()
            return
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        except OSError:
            sock.close()  # gone before it was looked at
            return
        slot = self._free.pop()
        self.accepted += 1
        if is_refused:
            self.refused += 1
            self._refused.add(slot)
        self._take(sock, slot, is_refused)

    def _step(self) -> float:
        if not self._retry_at:
            return RETRY_SECONDS
        left = self._retry_at - monotonic()
        if left <= 0 and self._is_open:
            self._retry_at = 0.0
            self._loop.watch(self._listener, READ, self._accept)
        return max(left, 0.01)


def slots_for(max_connections: int) -> int:
    """How many slots connections take, those over the limit included."""
    return max_connections + REFUSED_AT_ONCE
