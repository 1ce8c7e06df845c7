"""Memory without a name that two processes share: slots for calls and their answers, and a bell for each side.

One side asks, the other answers: a pipe and one of its child processes, or a worker and an engine process.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import select
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from torchpipe_py.errors import Failure, InvalidRequest
from torchpipe_py.proc import codec
from torchpipe_py.proc.codec import Packed, padded

FAILURE_BYTES = 2**16
"""Of a slot, kept for the answer that there is no room for another."""

DONE, FAILED, NOT_RUN = range(3)
"""The kinds of an answer. ``NOT_RUN``: the call was given up, or its deadline had passed, before it began."""

SET_UP, CLOSE, FORK, STATUS = range(2**32 - 4, 2**32)
"""Kinds of calls. Others have a number: of items, or of the section that is to run them."""

SLEEP_SECONDS = 0.1
"""After which a sleeper looks for work by itself."""

MOST_SLOTS = 128

_MACHINE = platform.machine()
_HEADER = struct.Struct("<IIIIQQdd")
_ROOM = struct.Struct("<QQQ")
_SMALL = 2**20
_WORDS = 4 * MOST_SLOTS
_HEADERS = -(-_HEADER.size * MOST_SLOTS // mmap.PAGESIZE) * mmap.PAGESIZE
_ASKER_ASLEEP = mmap.PAGESIZE  # each in a cache line of its own
_ANSWERER_ASLEEP = _ASKER_ASLEEP + 64
_ROOM_AT = _ANSWERER_ASLEEP + 64
_REQUESTS = 2 * mmap.PAGESIZE
_ANSWERS = _REQUESTS + _HEADERS
_CONTENT = _ANSWERS + _HEADERS


class Room(NamedTuple):
    """How many slots a link has, what a call and its answer may take together, and what a slot keeps of it.

    ``slot_bytes`` is address space: memory is taken as it is written. What is beyond ``kept_bytes`` is given back when
    the slot is free.
    """

    slots: int
    slot_bytes: int
    kept_bytes: int


class Header(NamedTuple):
    """What is said of a message: its ``kind``, the sizes of its parts, and where it starts and ends in the slot.

    The kind of an answer is ``DONE``, ``FAILED`` or ``NOT_RUN``; both sides agree on those of calls. The times are
    seconds of ``perf_counter``, which is one clock for all processes: of a call, when it was sent, and its deadline
    (infinity: none); of an answer, when the call was begun, and when it was answered.
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


class GarbledError(ValueError):
    """The other side has written what cannot be."""


def barrier() -> None:
    """What this thread has written before is seen elsewhere before it reads on."""
    # NOTE: on x86-64 taking a lock is a full fence. On ARMv8 what stands before a lock and what stands behind it may
    # both move in between, and so pass each other. Neither passes the release of one followed by the taking of another.
    lock = threading.Lock()
    with lock:
        pass
    if _MACHINE != "x86_64":
        with lock:
            pass


def fence() -> None:
    """Whoever sees what this thread writes after it sees what it wrote before; the same of what it reads."""
    # NOTE: x86-64 keeps all that in order but a read behind a write, which takes a ``barrier``.
    if _MACHINE != "x86_64":
        barrier()


class Bell:
    """Wakes one thread of another process, and costs nothing while nobody sleeps there.

    ``fd`` is an eventfd. ``asleep`` are words of shared memory, which only the sleeper's process writes: one for each
    process that rings.
    """

    def __init__(self, fd: int, *asleep: memoryview) -> None:
        self.fd, self._asleep = fd, [*asleep]
        self._is_awaited = False

    def ring(self) -> None:
        """Wake the sleeper, from any thread; the work for it is written before."""
        # Either the sleeper sees the work, or it is seen here that it sleeps.
        barrier()
        if self._asleep[0][0]:
            self.wake()

    def wake(self) -> None:
        """Wake the sleeper, asleep or not."""
        try:
            os.eventfd_write(self.fd, 1)
        except BlockingIOError:  # the other side has rung it as often as it can be
            pass

    def sleep(self, poller: select.poll, has_work: Callable[[], bool], seconds: float = SLEEP_SECONDS) -> list[int]:
        """Sleep until somebody rings, or ``seconds``; the other descriptors of ``poller`` that are ready."""
        self.await_ring(True)
        try:
            barrier()
            return [] if has_work() else self.wait(poller, seconds)
        finally:
            self.await_ring(False)

    def wait(self, poller: select.poll, seconds: float) -> list[int]:
        """The same for a sleeper that has said already whether it sleeps."""
        ready = [fd for fd, _ in poller.poll(1000 * seconds)]
        if self.fd in ready:
            ready.remove(self.fd)
            self.hear()
        return ready

    def hear(self) -> None:
        """It was rung, and the next ring is another one."""
        os.eventfd_read(self.fd)

    def await_ring(self, is_asleep: bool) -> None:
        """Whether whoever rings has to wake somebody; after a ``barrier`` what came before is seen."""
        self._is_awaited = is_asleep
        for word in self._asleep:
            word[0] = is_asleep

    def add(self, asleep: memoryview) -> None:
        """One more process rings it, and sees this word."""
        asleep[0] = self._is_awaited
        self._asleep.append(asleep)

    def remove(self, asleep: memoryview) -> None:
        """The process that sees this word rings no more."""
        self._asleep = [word for word in self._asleep if word is not asleep]


def changed(before: bytes, after: bytes) -> list[int]:
    """The indexes of the words that differ."""
    if before == after:
        return []
    found: list[int] = (np.frombuffer(before, np.uint32) != np.frombuffer(after, np.uint32)).nonzero()[0].tolist()
    return found


class Link:
    """The slots of two processes, as either of them sees them.

    Each word has one writer: who asks writes the number of a call into ``asked`` and, where nobody waits for it any
    more, into ``given_up``; who answers writes it into ``answered``. Then the slot is free again. Who runs calls one
    after the other may write it into ``begun`` before that.

    What is read behind the words of the other side is at least as new as they are. ``bell`` is this side's, ``other``
    the one of the other side. The side that asks has ``calls`` in its slots, of which ``under_way`` are not answered;
    ``since`` is when the other side began the one that it is at, as seen from here, and ``taking`` the lock of whoever
    reads answers.
    """

    bell: Bell
    other: Bell

    def __init__(self, fd: int, room: Room | None = None, fds: Sequence[int] = ()) -> None:
        """Map a descriptor of ``create_memory``; who cannot trust the other side says what ``room`` there is.

        ``fds`` are closed when nobody has the link any more. NOTE: not before: a thread that has just written a call or
        an answer is about to ring.
        """
        self.fds = [*fds]
        self.room = room or Room._make(_ROOM.unpack(os.pread(fd, _ROOM.size, _ROOM_AT)))
        self._map = mmap.mmap(fd, _CONTENT + self.room.slots * self.room.slot_bytes)
        self._bytes = np.frombuffer(self._map, np.uint8)
        words = memoryview(self._map)[: 4 * _WORDS].cast("I")
        self._asked, self._given_up, self._answered, self._begun = (
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
        self.has_large = False
        self.taking = threading.Lock()
        self.answered: deque[int] = deque()  # slots whose answers were seen and not read yet
        self.reading: set[int] = set()  # those whose answers another thread reads
        self._numbers = [0] * self.room.slots
        self._free = deque(range(self.room.slots))
        self._read_in_place: dict[int, weakref.ref[np.ndarray]] = {}
        self._dropped: deque[int] = deque()  # slots whose answers nobody reads any more

    def __del__(self) -> None:
        for fd in self.fds:
            os.close(fd)

    # -- the side that asks ---------------------------------------------------------------------------------------

    def take_slot(self, call: Any) -> tuple[int, int]:
        """Give a call a free slot, and a number that the slot's last one had not."""
        while self._dropped:
            slot = self._dropped.popleft()
            del self._read_in_place[slot]
            self._clear(slot)
        slot = self._free.pop()  # NOTE: the one that was free last is warm
        number = self._numbers[slot] = self._numbers[slot] % (2**32 - 1) + 1
        self.calls[slot] = call
        self.under_way += 1
        return slot, number

    def free_slot(self, slot: int) -> None:
        """The call in the slot has ended; the slot is free, once its answer is not read in place any more."""
        self.calls[slot] = None
        self.reading.discard(slot)
        self.under_way -= 1
        if slot not in self._read_in_place:
            self._clear(slot)

    def _clear(self, slot: int) -> None:
        """Give back the memory that a large call and its answer took."""
        kept, size = self.room.kept_bytes, min(self.reply(slot).end, self.room.slot_bytes)
        if size > kept:
            with suppress(OSError):  # gVisor cannot: what was taken stays taken
                pages = -(-(size - kept) // mmap.PAGESIZE) * mmap.PAGESIZE
                self._map.madvise(mmap.MADV_REMOVE, self._start_of(slot) + kept, pages)
        self._free.append(slot)

    def ask(self, slot: int, number: int, packed: Packed, kind: int, sent: float, deadline: float) -> None:
        """Write a call; ``TooLargeError`` where there is no room for it."""
        self._write(_REQUESTS, slot, packed, kind, 0, sent, deadline)
        fence()
        self._asked[slot] = number

    def is_asked(self, slot: int, number: int) -> bool:
        """Whether the call is written."""
        return self._asked[slot] == number

    def give_up(self, slot: int, number: int) -> None:
        """Tell that nobody waits for the call any more; it is answered nevertheless."""
        self._given_up[slot] = number

    def has_begun(self, slot: int, number: int) -> bool:
        """Whether the other side runs the call, or has run it."""
        return self._begun[slot] == number

    def has_answers(self) -> bool:
        """Whether an answer is there that was not taken."""
        return self._from_answerer() != self._seen_answered

    def take_answered(self) -> list[int]:
        """The slots with answers that were not taken before."""
        before, self._seen_answered = self._seen_answered, self._from_answerer()
        return changed(before, self._seen_answered)

    def answered_call(self, slot: int) -> Any:
        """The call that an answer is for; ``GarbledError`` where there is none."""
        is_known = slot < len(self.calls) and self._answered[slot] == self._numbers[slot]
        call = self.calls[slot] if is_known else None
        if call is None:
            raise GarbledError("an answer that nobody has asked for")
        return call

    def reply(self, slot: int) -> Header:
        """What is said of the answer in a slot."""
        return Header._make(_HEADER.unpack_from(self._map, _ANSWERS + slot * _HEADER.size))

    # -- the side that answers ------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        """Whether there is a call that was not taken, or one that was given up."""
        return self._from_asker() != self._seen_asked

    def take(self) -> tuple[list[tuple[Header, int, int]], list[tuple[int, int]]]:
        """Slot and number of each new call, the first first, and of each that nobody waits for any more."""
        before, self._seen_asked = self._seen_asked, self._from_asker()
        numbers = memoryview(self._seen_asked).cast("I")
        asked, given_up = [], []
        for index in changed(before, self._seen_asked):
            if index < MOST_SLOTS:
                asked.append((self.request(index), index, numbers[index]))
            else:
                given_up.append((index - MOST_SLOTS, numbers[index]))
        if len(asked) > 1:
            asked.sort(key=lambda call: call[0].first)
        return asked, given_up

    def request(self, slot: int) -> Header:
        """What is said of the call in a slot."""
        return Header._make(_HEADER.unpack_from(self._map, _REQUESTS + slot * _HEADER.size))

    def is_given_up(self, slot: int, number: int) -> bool:
        """Whether nobody waits for the call any more."""
        return self._given_up[slot] == number

    def begin(self, slot: int, number: int) -> None:
        """Tell that the call is run now."""
        self._begun[slot] = number

    def answer(self, slot: int, number: int, packed: Packed, kind: int, begun: float) -> None:
        """Write an answer behind its call; ``TooLargeError`` where there is no room for it."""
        self._write(_ANSWERS, slot, packed, kind, self.request(slot).end, begun, perf_counter())
        fence()
        self._answered[slot] = number

    def fail(self, slot: int, number: int, failure: Failure, begun: float) -> None:
        """Write a failure for an answer; one that is too large without where and with what it was raised."""
        try:
            self.answer(slot, number, Packed.of(failure), FAILED, begun)
        except TooLargeError:
            # NOTE: for this one there is always room: nothing of what led to it is in it.
            self.answer(slot, number, Packed.of(replace(failure, trace="", pickled=b"")), FAILED, begun)

    # -- both -------------------------------------------------------------------------------------------------------

    def read(self, slot: int, header: Header, copies: bool) -> Any:
        """The message; raises whatever unpickling raises. Its arrays lie in the slot, unless it ``copies`` them."""
        return self._read(slot, header, self._map, self._start_of(slot) + header.start, copies)

    def read_in_place(self, slot: int, header: Header, most: int) -> tuple[Any, np.ndarray | None]:
        """An answer whose arrays lie in the slot, which is kept as long as any of them lives; at ``most`` so many are.

        NOTE: the slot may be used again once nobody has the second object, so it is to live until ``free_slot``.
        """
        if len(self._read_in_place) >= most:
            return self.read(slot, header, copies=True), None
        # NOTE: an array of its own, since it is the ``base`` of all views of it.
        start = self._start_of(slot) + header.start
        content = np.frombuffer(self._map, np.uint8, header.end - header.start, start)
        answer = self._read(slot, header, content, 0, copies=False)
        dropped = self._dropped
        self._read_in_place[slot] = weakref.ref(content, lambda _: dropped.append(slot))
        return answer, content

    def content(self, slot: int, start: int, size: int) -> np.ndarray:
        """Bytes of a slot, where they lie; ``GarbledError`` where they are not in it."""
        if not 0 <= start <= start + size <= self.room.slot_bytes:
            raise GarbledError(f"{size} bytes at {start}, which are not in their slot")
        at = self._start_of(slot) + start
        return self._bytes[at : at + size]

    def _read(self, slot: int, header: Header, buffer: Any, offset: int, copies: bool) -> Any:
        start = self._start_of(slot) + header.start
        middle = start + header.head
        head, pickled = self._map[start:middle], self._map[middle : middle + header.pickled]
        offset += padded(header.head + header.pickled)
        return codec.unpack(head, pickled, header.arrays, buffer, offset, copies, self.before_main)

    def _from_asker(self) -> bytes:
        """The words ``asked``, then ``given_up``, one for each slot."""
        words = self._map[: 2 * _WORDS]
        fence()
        return words

    def _from_answerer(self) -> bytes:
        words = self._map[2 * _WORDS : 3 * _WORDS]
        fence()
        return words

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
            # NOTE: NumPy lets other threads run meanwhile: for what takes microseconds, waiting for them takes longer.
            if part.nbytes <= _SMALL:
                self._map[offset:end] = part
            else:
                self._bytes[offset:end] = np.frombuffer(part, np.uint8)
            offset += padded(part.nbytes)
        header = kind, len(head), len(pickled), arrays, start, start + size, first, second
        _HEADER.pack_into(self._map, at + slot * _HEADER.size, *header)


def create_memory(room: Room) -> int:
    """A descriptor of the memory of a ``Link``, which takes pages as they are written.

    Its size is sealed: whoever made it smaller would have the other process killed as it reads.
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
