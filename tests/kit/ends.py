"""Both ends of a link in one process: the test is the process that answers."""

from __future__ import annotations

import os
from math import inf
from typing import Any

from torchpipe_py.proc.codec import Packed, pack
from torchpipe_py.proc.link import DONE, Bell, Link, Room, create_memory, new_bell

ROOM = Room(8, 2**20, 2**20)


class Ends:
    """A link, and ``there``, its other side, each with a mapping of its own."""

    def __init__(self, room: Room = ROOM) -> None:
        fd = create_memory(room)
        self.link, self.there = Link(fd, room, [fd, new_bell(), new_bell()]), Link(os.dup(fd))
        self.there.fds = []
        self.link.bell = Bell(self.link.fds[1], self.link.asker_asleep)
        self.link.other = Bell(self.link.fds[2], self.link.answerer_asleep)
        self.asked: list[tuple[int, int]] = []

    def take(self) -> int:
        """Number of calls that are written and not answered."""
        self.asked += [(slot, number) for _, slot, number in self.there.take()[0]]
        return len(self.asked)

    def ask(self, message: Any) -> tuple[int, int]:
        """Slot and number of a call, as the other end has taken it."""
        slot, number = self.link.take_slot(object())
        self.link.ask(slot, number, Packed.of(message), 3, 1.5, inf)
        [(header, *taken)], _ = self.there.take()
        assert (header.kind, header.first, header.second, taken) == (3, 1.5, inf, [slot, number])
        return slot, number

    def used(self) -> int:
        """Bytes of memory in use."""
        return os.stat(self.link.fds[0]).st_blocks * 512

    def answer(self, kind: int = DONE, result: Any = None) -> None:
        """Answer the oldest call."""
        self.take()
        slot, number = self.asked.pop(0)
        self.there.answer(slot, number, pack({"result": result}, {}), kind, 1.0)
