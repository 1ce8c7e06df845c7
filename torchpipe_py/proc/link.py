"""Anonymous memory shared by two processes: slots for calls and their answers, and a bell for each side.

One side, the asker, makes calls and the other, the answerer, answers them: a pipe and one of its child processes, or a
worker and an engine process.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import select
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from torchpipe_py.errors import BackendUnavailable, Failure, InvalidRequest
from torchpipe_py.proc import codec
from torchpipe_py.proc.codec import Packed, padded

FAILURE_BYTES = 2**16
"""Part of a slot that is reserved for an error answer if the real answer does not fit."""

DONE, FAILED, NOT_RUN = range(3)
"""The kinds of an answer. ``NOT_RUN``: the call was abandoned, or its deadline passed, before it began."""

SET_UP, CLOSE, FORK, STATUS = range(2**32 - 4, 2**32)
"""Special kinds of calls. For others the kind is the number of items, or the index of the section to run."""

SLEEP_SECONDS = 0.1
"""Seconds after which a sleeper checks for work without a ring."""

MOST_SLOTS = 128

_HEADER = struct.Struct("<IIIIQQdd")
_ROOM = struct.Struct("<QQQ")
_SMALL = 2**20
_WORDS = 4 * MOST_SLOTS
_HEADERS = -(-_HEADER.size * MOST_SLOTS // mmap.PAGESIZE) * mmap.PAGESIZE
_ASKER_ASLEEP = mmap.PAGESIZE  # each flag in a separate cache line
_ANSWERER_ASLEEP = _ASKER_ASLEEP + 64
_ROOM_AT = _ANSWERER_ASLEEP + 64
_REQUESTS = 2 * mmap.PAGESIZE
_ANSWERS = _REQUESTS + _HEADERS
_CONTENT = _ANSWERS + _HEADERS


class Room(NamedTuple):
    """The number of slots of a link, the maximum size of a call with its answer, and the memory that a free slot keeps.

    ``slot_bytes`` is address space: memory is allocated as it is written. Memory above ``kept_bytes`` is released when
    the slot becomes free.
    """

    slots: int
    slot_bytes: int
    kept_bytes: int


class Header(NamedTuple):
    """Describes a message: its ``kind``, the sizes of its parts, and its start and end in the slot.

    The kind of an answer is ``DONE``, ``FAILED`` or ``NOT_RUN``; both sides agree on the kinds of calls. The times are
    seconds of ``perf_counter``, which is the same clock in all processes: for a call, when it was sent, and its
    deadline (infinity: none); for an answer, when the call began, and when it was answered.
    """

    kind: int
    head: int
    pickled: int
    arrays: int
    start: int
    end: int
    first: float
    second: float


class TooLargeError(InvalidRequest):
    """A message that does not fit into a slot."""

    code = "too_large"


class GarbledError(ValueError):
    """The other side has written invalid data."""


def require_machine(label: str) -> None:
    """Raise ``BackendUnavailable`` where links do not work: they rely on Linux and the memory order of x86-64.

    That order keeps everything but a read after a write; only there a ``barrier`` is needed.
    """
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ("x86_64", "AMD64"):
        raise BackendUnavailable(f"{label} needs Linux on x86-64, not {sys.platform} on {machine}")


def barrier() -> None:
    """Full memory barrier on x86-64: this thread's earlier writes become visible before its later reads."""
    with threading.Lock():  # taking a lock is an atomic exchange
        pass


class Bell:
    """Wakes one thread of another process; costs nothing while that thread is awake.

    ``fd`` is an eventfd. ``asleep`` are words of shared memory, which only the sleeper's process writes: one for each
    ringing process.
    """

    def __init__(self, fd: int, *asleep: memoryview) -> None:
        self.fd, self._asleep = fd, [*asleep]
        self._is_awaited = False

    def ring(self) -> None:
        """Wake the sleeper, from any thread; write the work for it first."""
        # Either the sleeper sees the work, or this thread sees that it sleeps.
        barrier()
        if self._asleep[0][0]:
            self.wake()

    def wake(self) -> None:
        """Wake the sleeper, asleep or not."""
        try:
            os.eventfd_write(self.fd, 1)
        except BlockingIOError:  # the other side has filled up its counter
            pass

    def sleep(self, poller: select.poll, has_work: Callable[[], bool], seconds: float = SLEEP_SECONDS) -> list[int]:
        """Sleep until a ring, or for ``seconds``; returns the other descriptors of ``poller`` that are ready."""
        self.await_ring(True)
        try:
            barrier()
            return [] if has_work() else self.wait(poller, seconds)
        finally:
            self.await_ring(False)

    def wait(self, poller: select.poll, seconds: float) -> list[int]:
        """The same, for a sleeper that has already called ``await_ring``."""
        ready = [fd for fd, _ in poller.poll(1000 * seconds)]
        if self.fd in ready:
            ready.remove(self.fd)
            self.hear()
        return ready

    def hear(self) -> None:
        """Reset the bell after a ring, so that the next ring is noticed."""
        os.eventfd_read(self.fd)

    def await_ring(self, is_asleep: bool) -> None:
        """Set whether ringing processes must wake the sleeper; after a ``barrier`` earlier work is visible."""
        self._is_awaited = is_asleep
        for word in self._asleep:
            word[0] = is_asleep

    def add(self, asleep: memoryview) -> None:
        """Add a ringing process, which reads this word."""
        asleep[0] = self._is_awaited
        self._asleep.append(asleep)

    def remove(self, asleep: memoryview) -> None:
        """Remove the ringing process that reads this word."""
        self._asleep = [word for word in self._asleep if word is not asleep]


def changed(before: bytes, after: bytes) -> list[int]:
    """Indexes of the words that differ."""
    if before == after:
        return []
    indexes: list[int] = (np.frombuffer(before, np.uint32) != np.frombuffer(after, np.uint32)).nonzero()[0].tolist()
    return indexes


class Link:
    """One side of the slots shared by two processes.

    Each word has one writer: the asker writes the number of a call into ``asked`` and, if it abandons the call, into
    ``abandoned``; the answerer writes it into ``answered``, and then the slot is free again. An answerer that runs
    calls one after the other may first write it into ``begun``.

    Data read after the words of the other side is at least as new as these words. ``bell`` is this side's bell,
    ``other`` the other side's. The asker has ``calls`` in its slots, of which ``under_way`` are not answered; ``since``
    is when the other side, as seen from here, began its current call, and ``taking`` the lock for reading answers.
    """

    bell: Bell
    other: Bell

    def __init__(self, fd: int, room: Room | None = None, fds: Sequence[int] = ()) -> None:
        """Map a descriptor of ``create_memory``; pass ``room`` if the other side is not trusted to set it.

        ``fds`` are closed when the link is freed. NOTE: not earlier: a thread that has just written a call or an answer
        is about to ring.
        """
        self.fds = [*fds]
        self.room = room or Room._make(_ROOM.unpack(os.pread(fd, _ROOM.size, _ROOM_AT)))
        self._map = mmap.mmap(fd, _CONTENT + self.room.slots * self.room.slot_bytes)
        self._bytes = np.frombuffer(self._map, np.uint8)
        words = memoryview(self._map)[: 4 * _WORDS].cast("I")
        self._asked, self._abandoned, self._answered, self._begun = (
            words[at * MOST_SLOTS : (at + 1) * MOST_SLOTS] for at in range(4)
        )
        self.asker_asleep, self.answerer_asleep = (
            memoryview(self._map)[start : start + 4].cast("I") for start in (_ASKER_ASLEEP, _ANSWERER_ASLEEP)
        )
        self.before_main: Callable[[], object] | None = None
        self._seen_asked = bytes(2 * _WORDS)
        self._seen_answered = bytes(_WORDS)
        self.calls: list[Any] = [None] * self.room.slots
        self.under_way = 0
        self.since = 0.0
        self.instance = 0
        self.taking = threading.Lock()
        self.answered: deque[int] = deque()  # slots whose answers were seen but not read yet
        self.reading: set[int] = set()  # slots whose answers another thread reads
        self._numbers = [0] * self.room.slots
        self._free = deque(range(self.room.slots))

    def __del__(self) -> None:
        for fd in self.fds:
            os.close(fd)

    # -- the asker ------------------------------------------------------------------------------------------------

    def take_slot(self, call: Any) -> tuple[int, int]:
        """Give a call a free slot, and a number different from the slot's last one."""
        slot = self._free.pop()  # the last freed slot, which is still cached
        number = self._numbers[slot] = self._numbers[slot] % (2**32 - 1) + 1
        self.calls[slot] = call
        self.under_way += 1
        if self.under_way == 1:
            self.since = perf_counter()
        return slot, number

    def free_slot(self, slot: int) -> None:
        """Free the slot of an ended call, and release the memory of a large call and its answer."""
        self.calls[slot] = None
        self.reading.discard(slot)
        self.under_way -= 1
        self.since = perf_counter() if self.under_way else 0.0
        kept, size = self.room.kept_bytes, min(self.reply(slot).end, self.room.slot_bytes)
        if size > kept:
            with suppress(OSError):  # gVisor does not support it: the memory stays allocated
                pages = -(-(size - kept) // mmap.PAGESIZE) * mmap.PAGESIZE
                self._map.madvise(mmap.MADV_REMOVE, self._start_of(slot) + kept, pages)
        self._free.append(slot)

    def ask(self, slot: int, number: int, packed: Packed, kind: int, sent: float, deadline: float) -> None:
        """Write a call; ``TooLargeError`` if it does not fit."""
        self._write(_REQUESTS, slot, packed, kind, 0, sent, deadline)
        self._asked[slot] = number

    def abandon(self, slot: int, number: int) -> None:
        """Mark the call as abandoned; it is answered nevertheless."""
        self._abandoned[slot] = number

    def has_begun(self, slot: int, number: int) -> bool:
        """Whether the other side runs the call, or has run it."""
        return self._begun[slot] == number

    def has_answers(self) -> bool:
        """Whether there are untaken answers."""
        return self._from_answerer() != self._seen_answered

    def take_answered(self) -> list[int]:
        """Take the slots with new answers."""
        before, self._seen_answered = self._seen_answered, self._from_answerer()
        return changed(before, self._seen_answered)

    def answered_call(self, slot: int) -> Any:
        """The call that an answer belongs to; ``GarbledError`` if there is none."""
        is_known = slot < len(self.calls) and self._answered[slot] == self._numbers[slot]
        call = self.calls[slot] if is_known else None
        if call is None:
            raise GarbledError("an answer without a request")
        return call

    def reply(self, slot: int) -> Header:
        """The header of the answer in a slot."""
        return Header._make(_HEADER.unpack_from(self._map, _ANSWERS + slot * _HEADER.size))

    # -- the answerer ---------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        """Whether there are untaken calls, or newly abandoned ones."""
        return self._from_asker() != self._seen_asked

    def take(self) -> tuple[list[tuple[Header, int, int]], list[tuple[int, int]]]:
        """Header, slot and number of each new call in order; slot and number of each newly abandoned call."""
        before, self._seen_asked = self._seen_asked, self._from_asker()
        numbers = memoryview(self._seen_asked).cast("I")
        asked, abandoned = [], []
        for index in changed(before, self._seen_asked):
            if index < MOST_SLOTS:
                asked.append((self.request(index), index, numbers[index]))
            else:
                abandoned.append((index - MOST_SLOTS, numbers[index]))
        if len(asked) > 1:
            asked.sort(key=lambda call: call[0].first)
        return asked, abandoned

    def request(self, slot: int) -> Header:
        """The header of the call in a slot."""
        return Header._make(_HEADER.unpack_from(self._map, _REQUESTS + slot * _HEADER.size))

    def is_abandoned(self, slot: int, number: int) -> bool:
        """Whether the asker has abandoned the call."""
        return self._abandoned[slot] == number

    def begin(self, slot: int, number: int) -> None:
        """Mark the call as running."""
        self._begun[slot] = number

    def answer(self, slot: int, number: int, packed: Packed, kind: int, begun: float) -> None:
        """Write an answer after its call in the slot; ``TooLargeError`` if it does not fit."""
        self._write(_ANSWERS, slot, packed, kind, self.request(slot).end, begun, perf_counter())
        self._answered[slot] = number

    def fail(self, slot: int, number: int, failure: Failure, begun: float) -> None:
        """Write a failure as the answer, without traceback and pickled exception if they do not fit."""
        try:
            self.answer(slot, number, Packed.of(failure), FAILED, begun)
        except TooLargeError:
            # This answer always fits, since it has no traceback and no pickled exception.
            self.answer(slot, number, Packed.of(replace(failure, trace="", pickled=b"")), FAILED, begun)

    # -- both -------------------------------------------------------------------------------------------------------

    def read(self, slot: int, header: Header, copies: bool) -> Any:
        """Read a message; raises any exception of unpickling. Its arrays refer to the slot unless it copies them."""
        start = self._start_of(slot) + header.start
        middle = start + header.head
        head, pickled = self._map[start:middle], self._map[middle : middle + header.pickled]
        start += padded(header.head + header.pickled)
        return codec.unpack(head, pickled, header.arrays, self._map, start, copies, self.before_main)

    def content(self, slot: int, start: int, size: int) -> np.ndarray:
        """A view of bytes in a slot; ``GarbledError`` if they are outside it."""
        if not 0 <= start <= start + size <= self.room.slot_bytes:
            raise GarbledError(f"{size} bytes at {start}, which are not in their slot")
        at = self._start_of(slot) + start
        return self._bytes[at : at + size]

    def _from_asker(self) -> bytes:
        """The words ``asked``, then ``abandoned``, one for each slot."""
        return self._map[: 2 * _WORDS]

    def _from_answerer(self) -> bytes:
        return self._map[2 * _WORDS : 3 * _WORDS]

    def _start_of(self, slot: int) -> int:
        return _CONTENT + slot * self.room.slot_bytes

    def _write(self, at: int, slot: int, packed: Packed, kind: int, start: int, first: float, second: float) -> None:
        head, pickled, parts, arrays = packed
        small = len(head) + len(pickled)
        size = padded(small)
        for part in parts:
            size += padded(part.nbytes)
        left = self.room.slot_bytes - (start if at == _ANSWERS else FAILURE_BYTES)
        if size > left:
            what = "an answer" if at == _ANSWERS else "a request"
            raise TooLargeError(
                f"{what} of {size} bytes is too large for another process: {left} bytes are left for it"
            )
        offset = self._start_of(slot) + start
        self._map[offset : offset + len(head)] = head
        self._map[offset + len(head) : offset + small] = pickled
        offset += padded(small)
        for part in parts:
            end = offset + part.nbytes
            # NumPy releases the GIL to copy: for a few microseconds' copy, getting it back would take longer.
            if part.nbytes <= _SMALL:
                self._map[offset:end] = part
            else:
                self._bytes[offset:end] = np.frombuffer(part, np.uint8)
            offset += padded(part.nbytes)
        header = kind, len(head), len(pickled), arrays, start, start + size, first, second
        _HEADER.pack_into(self._map, at + slot * _HEADER.size, *header)


def create_memory(room: Room) -> int:
    """A descriptor for the memory of a ``Link``, whose pages are allocated as they are written.

    Its size is sealed: if one process could shrink it, the other would be killed when it reads.
    """
    fd = os.memfd_create("torchpipe-slots", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, _CONTENT + room.slots * room.slot_bytes)
        os.pwrite(fd, _ROOM.pack(*room), _ROOM_AT)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def new_bell() -> int:
    """A descriptor for a ``Bell``."""
    return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
