"""The connections of gRPC clients, by what the kernel knows of them: grpc itself shows neither them nor their input."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from struct import Struct
from urllib.parse import unquote

from torchpipe_py.serving import counted

logger = logging.getLogger("torchpipe_server")

NOTABLE_BYTES = 2**14  # less of a message that is not whole may be the frames around other messages
FRAME_BYTES, FRAMED_BYTES, OVERHEAD_BYTES = 9, 2**14, 128  # of HTTP/2: a frame's head, its content, heads of a call
_received = Struct("<52xI72xQ")  # of the kernel's `struct tcp_info`: milliseconds since data came, and bytes in all


@dataclass(eq=False, slots=True)
class Peer:
    """One client's connection.

    ``partial_bytes`` estimates what grpc holds of messages that were not read, as they are not whole or wait for their
    turn; ``partial_since`` is when that became notable, 0 if it is not. ``paced_until`` belongs to `RefusalPacing`.
    ``calls`` counts those that take room, ``room`` is for requests of its streams.
    """

    address: tuple[str, int]
    room: asyncio.Semaphore
    calls: int = 0
    paced_until: float = 0.0
    partial_bytes: int = 0
    partial_since: float = 0.0
    inode: int = 0  # of its socket
    received: int = 0  # bytes until the last look
    delivered: int = 0  # bytes of whole messages since then

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that its unread input takes: the C library needs about a quarter more."""
        return self.partial_bytes * 5 // 4

    def deliver(self, size: int) -> None:
        """Record that a whole message of ``size`` bytes was read."""
        self.delivered += size + OVERHEAD_BYTES + FRAME_BYTES * (1 + size // FRAMED_BYTES)

    def see(self, seen: Seen, most: int, now: float) -> None:
        """Renew the estimate, which is at most ``most``: what was received and is not part of a whole message."""
        if seen.inode != self.inode:
            self.inode, self.received, self.partial_bytes = seen.inode, 0, 0
        grown = seen.received - self.received - self.delivered
        self.partial_bytes = min(max(0, self.partial_bytes + grown), most)
        self.received, self.delivered = seen.received, 0
        self.partial_since = (self.partial_since or now) if self.partial_bytes >= NOTABLE_BYTES else 0.0


@dataclass(frozen=True, slots=True)
class Seen:
    """A connection as the kernel sees it: the bytes that it received, and the milliseconds since the last."""

    address: tuple[str, int]
    inode: int
    received: int
    silent_ms: int


class Peers:
    """The clients that have called ``port``; for the loop's thread. ``most`` bounds the streams' requests of each."""

    def __init__(self, port: int, most: int) -> None:
        self._port, self._most = port, most
        self.connections = 0  # at the last look
        self._by_name: dict[str, Peer] = {}
        self._sockets: dict[int, tuple[int, int, tuple[str, int] | None]] = {}  # by descriptor: inode, family, address

    def of(self, name: str) -> Peer:
        """The client of this name, in grpc's notation."""
        peer = self._by_name.get(name)
        if peer is None:
            peer = self._by_name[name] = Peer(_address_of(name), asyncio.Semaphore(self._most))
        return peer

    def look(self, calls: Iterable[Peer], message_bytes: int, now: float) -> list[Seen]:
        """Renew all estimates. Returns the connections without a call: those that never called, then the others, the
        longest silent first.

        ``calls`` has the peer of each call, which is sent messages of at most ``message_bytes``.
        """
        seen = {connection.address: connection for connection in self._connections()}
        busy = Counter(calls)
        for name, peer in list(self._by_name.items()):
            connection = seen.get(peer.address)
            if connection is not None:
                peer.see(connection, busy[peer] * message_bytes, now)
            elif peer in busy:
                peer.partial_bytes, peer.partial_since = 0, 0.0
            elif peer.paced_until < now:
                del self._by_name[name]
        called = {peer.address for peer in self._by_name.values()}
        taken = {peer.address for peer in busy}
        idle = [connection for connection in seen.values() if connection.address not in taken]
        self.connections = len(seen)
        return sorted(idle, key=lambda each: (each.address in called, -each.silent_ms))

    def partial(self) -> list[Peer]:
        """The clients with unread input, those with most of it first."""
        found = [peer for peer in self._by_name.values() if peer.partial_bytes]
        return sorted(found, key=lambda peer: peer.partial_bytes, reverse=True)

    def disconnect(self, clients: Collection[Peer | Seen], why: str) -> None:
        """Close these connections, which cancels their calls; ``why`` is for the log."""
        if not clients:
            return
        logger.warning("gRPC: %s %s: disconnected", counted(len(clients), "client"), why)
        addresses = {client.address for client in clients}
        for fd, (inode, _, address) in list(self._sockets_now()):
            if address not in addresses:
                continue
            with suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
                if os.fstat(sock.fileno()).st_ino == inode:  # grpc may have closed it meanwhile
                    sock.shutdown(socket.SHUT_RDWR)

    def _connections(self) -> Iterator[Seen]:
        for fd, (inode, family, address) in self._sockets_now():
            if address is None:
                continue
            try:
                sock = socket.socket(family, socket.SOCK_STREAM, 0, fd)
                try:
                    told = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                finally:
                    sock.detach()  # it is grpc's
            except OSError:  # grpc has closed it meanwhile
                continue
            silent_ms, received = _received.unpack_from(told)
            yield Seen(address, inode, received, silent_ms)

    def _sockets_now(self) -> Iterable[tuple[int, tuple[int, int, tuple[str, int] | None]]]:
        """This process's sockets, with the client's address for connections to the port."""
        before, self._sockets = self._sockets, {}
        for name in os.listdir("/proc/self/fd"):
            fd = int(name)
            with suppress(OSError):
                status = os.stat(f"/proc/self/fd/{name}")
                if stat.S_ISSOCK(status.st_mode):
                    known = before.get(fd)
                    if known is None or known[0] != status.st_ino:
                        known = status.st_ino, *_client_of(fd, self._port)
                    self._sockets[fd] = known
        return self._sockets.items()


def _client_of(fd: int, port: int) -> tuple[int, tuple[str, int] | None]:
    """The family of a socket, and its client's address if it is a connection to the port."""
    with socket.socket(fileno=os.dup(fd)) as sock:
        if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
            with suppress(OSError):  # it listens
                if sock.getsockname()[1] == port:
                    host, from_port = sock.getpeername()[:2]
                    return sock.family, (host.removeprefix("::ffff:"), from_port)
        return sock.family, None


def _address_of(name: str) -> tuple[str, int]:
    """Of "ipv4:127.0.0.1:5000", "ipv6:%5B::1%5D:5000"."""
    host, _, port = unquote(name).partition(":")[2].rpartition(":")
    return host.strip("[]").removeprefix("::ffff:"), int(port or 0)
