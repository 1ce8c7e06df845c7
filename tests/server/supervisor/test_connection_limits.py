"""Which connection gets a slot, which one gives its slot up, and how many there are."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from torchpipe_server.supervisor.connection_limits import (
    FILES_OF_A_WORKER,
    RESERVED_FILES,
    ConnectionLimits,
    http_connections,
    most_connections,
    slots_for,
)

HOME, OTHER = "127.0.0.1", "198.51.100.7"


class Idle:
    """Which slots are idle, the longest first; those that were evicted."""

    def __init__(self, *slots: int) -> None:
        self.slots = list(slots)
        self.evicted: list[int] = []

    def __call__(self, candidates: Collection[int]) -> int | None:
        slot = next((slot for slot in self.slots if slot in candidates), None)
        if slot is not None:
            self.slots.remove(slot)
            self.evicted.append(slot)
        return slot


def test_newcomers_are_refused_where_none_is_idle_and_closed_where_none_is_left():
    limits = ConnectionLimits(2, 0, Idle())
    taken = [limits.take(HOME) for _ in range(slots_for(2) + 1)]
    assert [place and place[1] for place in taken] == [False, False, *[True] * (slots_for(2) - 2), None]
    assert (limits.open, limits.accepted, limits.refused) == (slots_for(2), slots_for(2), slots_for(2) - 1)
    limits.release(0)
    assert limits.take(HOME) == (0, False)


def test_idlest_connection_is_closed_once_and_frees_its_slot():
    idle = Idle(1)
    limits = ConnectionLimits(2, 0, idle)
    assert [limits.take(HOME), limits.take(HOME), limits.take(HOME)] == [(0, False), (1, False), (2, False)]
    assert idle.evicted == [1]
    assert limits.take(HOME) == (3, True), "the one that gives way was counted twice"
    limits.release(1)
    assert limits.take(HOME) == (1, True)
    limits.release(2)
    assert limits.take(HOME) == (2, False)


def test_address_beyond_its_share_loses_one_of_its_connections():
    idle = Idle(0, 2)
    limits = ConnectionLimits(8, 2, idle)
    assert [limits.take(peer) for peer in (HOME, OTHER, OTHER)] == [(0, False), (1, False), (2, False)]
    assert limits.take(OTHER) == (3, False)
    assert idle.evicted == [2], "not the idlest of all"
    assert limits.take(OTHER) == (4, True)
    assert limits.take(HOME) == (5, False)


@pytest.mark.parametrize(
    ("peer", "same", "other"),
    [
        ("2001:db8:0:1::1", "2001:db8:0:1:ffff::2", "2001:db8:0:2::1"),
        ("198.51.100.7", "::ffff:198.51.100.7", "198.51.100.8"),
        ("fe80::1%eth0", "fe80::2%eth0", "fe81::1"),
    ],
)
def test_addresses_that_share_a_limit(peer: str, same: str, other: str):
    limits = ConnectionLimits(8, 1, Idle())
    assert [limits.take(one) for one in (peer, same, other)] == [(0, False), (1, True), (2, False)]


@pytest.mark.parametrize(("peer", "served"), [(OTHER, 2), (HOME, 4), ("::1", 4), ("::ffff:127.0.0.1", 4)])
def test_by_default_half_is_for_one_address_and_all_for_this_machine(peer: str, served: int):
    limits = ConnectionLimits(4, 0, Idle())
    taken = [limits.take(peer) for _ in range(6)]
    assert [place and place[1] for place in taken] == [False] * served + [True] * (6 - served)


@pytest.mark.parametrize("files", [96, 256, 1024, 20_000, 10**9])
def test_descriptors_are_left_for_everything_else(files: int):
    for workers in (1, 2):
        count = most_connections(files, workers)
        left = files - slots_for(count) - http_connections(files)
        assert count > 0
        assert 0 <= left - RESERVED_FILES - FILES_OF_A_WORKER * workers <= 2
    assert most_connections(RESERVED_FILES, 1) == 0
