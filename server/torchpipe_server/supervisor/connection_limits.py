"""Bounds the connections: a slot for each, a share for each address, and idle ones evicted when all are taken."""

from __future__ import annotations

from collections.abc import Callable, Collection
from ipaddress import IPv6Address, ip_address, ip_network

REFUSED_AT_ONCE = 128  # connections over the limit that still get an answer
RESERVED_FILES, FILES_OF_A_WORKER = 32, 12  # that the supervisor opens besides connections, including a reload
HTTP_CONNECTIONS = 64

Evict = Callable[[Collection[int]], "int | None"]
"""Closes one idle connection of these slots, if there is one; its slot is released later."""


class ConnectionLimits:
    """Gives each connection a slot of the journal until ``release``.

    ``max_connections`` are served; a few more get 'overloaded'. At a limit, a new connection replaces an idle one: of
    its own address if that has used up its share. ``per_address`` 0 means half of the connections, without a bound for
    this machine.
    """

    def __init__(self, max_connections: int, per_address: int, evict: Evict) -> None:
        self._max, self._per_address, self._evict = max_connections, per_address, evict
        self._count = slots_for(max_connections)
        self._free = list(range(self._count))[::-1]
        self._served: dict[int, str] = {}  # slot: the address that it counts for
        self._shares: dict[str, set[int]] = {}
        self._refused: set[int] = set()
        self._evicted: set[int] = set()
        self.accepted = self.refused = self.evicted = 0  # since the start

    @property
    def open(self) -> int:
        """The number of used slots."""
        return self._count - len(self._free)

    @property
    def is_short(self) -> bool:
        """Whether no slot is free, but one will be soon."""
        return not self._free and bool(self._evicted)

    def is_refused(self, slot: int) -> bool:
        """Whether the connection is over the limit and gets only a refusal."""
        return slot in self._refused

    def take(self, peer: str) -> tuple[int, bool] | None:
        """A slot for a connection from ``peer``, and whether it is to be refused; ``None`` if all are taken."""
        if not self._free:
            self.refused += 1
            return None
        owner, is_local = _owner(peer)
        most = self._per_address or (self._max if is_local else max(1, self._max // 2))
        own = self._shares.get(owner, ())
        is_full = len(own) >= most or len(self._served) >= self._max
        is_served = not is_full or self._evict_one_of(own if len(own) >= most else self._served)
        slot = self._free.pop()
        self.accepted += 1
        if is_served:
            self._served[slot] = owner
            self._shares.setdefault(owner, set()).add(slot)
        else:
            self.refused += 1
            self._refused.add(slot)
            if not self._free:
                self._evict_one_of(self._refused)
        return slot, not is_served

    def release(self, slot: int) -> None:
        """Free the slot of a closed connection."""
        self._leave(slot)
        self._evicted.discard(slot)
        self._free.append(slot)

    def make_room(self) -> None:
        """Have one connection closed, if one is idle."""
        self._evict_one_of(self._served)

    def _evict_one_of(self, slots: Collection[int]) -> bool:
        slot = self._evict(slots)
        if slot is None:
            return False
        self._leave(slot)
        self._evicted.add(slot)
        self.evicted += 1
        return True

    def _leave(self, slot: int) -> None:
        self._refused.discard(slot)
        owner = self._served.pop(slot, None)
        if owner is not None:
            self._shares[owner].discard(slot)
            if not self._shares[owner]:
                del self._shares[owner]


def _owner(peer: str) -> tuple[str, bool]:
    """The IPv4 address or the IPv6 /64 network of a peer, and whether it is this machine."""
    address = ip_address(peer.partition("%")[0])
    if isinstance(address, IPv6Address):
        address = address.ipv4_mapped or address
    if isinstance(address, IPv6Address) and not address.is_loopback:
        return str(ip_network((address, 64), strict=False)), False
    return str(address), address.is_loopback


def slots_for(max_connections: int) -> int:
    """The number of slots, including those over the limit."""
    return max_connections + min(REFUSED_AT_ONCE, max_connections // 2 + 4)


def http_connections(files: int) -> int:
    """The most connections of the HTTP port, if ``files`` may be open."""
    return min(HTTP_CONNECTIONS, files // 8)


def most_connections(files: int, workers: int) -> int:
    """The most connections that a service can serve, if ``files`` may be open; 0 if there are too few."""
    left = files - RESERVED_FILES - FILES_OF_A_WORKER * workers - http_connections(files)
    return next((count for count in range(left, 0, -1) if slots_for(count) <= left), 0)
