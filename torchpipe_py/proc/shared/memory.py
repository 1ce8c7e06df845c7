"""Memory without a name that two processes share: slots for requests and their answers, and bells for who sleeps.

One side asks, the other answers: a worker and an engine process, or the process of a pipe and one of ``Process``.
"""

from __future__ import annotations

import mmap
import os
import platform
import select
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from torchpipe_py.errors import Failure, InvalidRequest
from torchpipe_py.proc.process.transport import Packed, padded
from torchpipe_py.proc.shared import codec

SLOTS = 128
"""Requests that a worker has in an engine process at most; further ones wait in the worker."""

SLOT_BYTES = 2**28
"""What a request and its answer may take together. It is address space: memory is taken as it is written."""

KEPT_BYTES = 2**19
"""Of memory that a slot keeps for its next request; what a larger one took is given back."""

FAILURE_BYTES = 2**16
"""Of a slot, kept for the answer that there is no room for another."""

DONE, FAILED, NOT_RUN = range(3)
"""The kinds of an answer. ``NOT_RUN``: the call was given up, or its deadline had passed, before it began."""

SLEEP_SECONDS = 0.1
"""After which a sleeper looks for work by itself."""

_MACHINE = platform.machine()
_HEADER = struct.Struct("<IIIIQQdd")
_SMALL = 2**20
_WORDS = 4 * SLOTS
_HEADERS = -(-_HEADER.size * SLOTS // mmap.PAGESIZE) * mmap.PAGESIZE
_ASLEEP = mmap.PAGESIZE  # a word of who asks, and in another cache line one of who answers
_REQUESTS = 2 * mmap.PAGESIZE
_ANSWERS = _REQUESTS + _HEADERS
_CONTENT = _ANSWERS + _HEADERS


class Header(NamedTuple):
    """What is said of a message: its ``kind``, the sizes of what it is made of, and from where to where it stands.

    What ``kind`` means of a request the two sides agree on: which section is to run it, or how many items it has; of
    an answer it is ``DONE``, ``FAILED`` or ``NOT_RUN``. The times are seconds of
    ``perf_counter``, which is one clock for all processes: of a request, when it was sent, and its deadline (infinity:
    none); of an answer, when the request was taken, and when it was answered.
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

    ``asleep`` is a word of shared memory, which the process of the sleeper alone writes; ``fd`` is an eventfd.
    """

    def __init__(self, asleep: memoryview, fd: int) -> None:
        self._asleep, self.fd = asleep, fd

    def ring(self) -> None:
        """Wake the sleeper, from any thread; the work for it is written before."""
        # Either the sleeper sees the work, or it is seen here that it sleeps.
        barrier()
        if self._asleep[0]:
            os.eventfd_write(self.fd, 1)

    def sleep(self, poller: select.poll, has_work: Callable[[], bool], seconds: float = SLEEP_SECONDS) -> list[int]:
        """Sleep until somebody rings, or ``seconds``; the other descriptors of ``poller`` that are ready."""
        return sleep_by((self,), poller, has_work, seconds)

    def await_ring(self, is_asleep: bool) -> None:
        """Whether whoever rings has to wake somebody; after a ``barrier`` what came before is seen."""
        self._asleep[0] = is_asleep


def sleep_by(bells: Sequence[Bell], poller: select.poll, has_work: Callable[[], bool], seconds: float) -> list[int]:
    """``Bell.sleep`` of a thread that several bells wake."""
    for bell in bells:
        bell.await_ring(True)
    try:
        barrier()
        return [] if has_work() else wait_for(bells, poller, seconds)
    finally:
        for bell in bells:
            bell.await_ring(False)


def wait_for(bells: Sequence[Bell], poller: select.poll, seconds: float) -> list[int]:
    """Until one of them is rung, or ``seconds``; the other descriptors of ``poller`` that are ready."""
    ready = [fd for fd, _ in poller.poll(1000 * seconds)]
    for bell in bells:
        if bell.fd in ready:
            ready.remove(bell.fd)
            os.eventfd_read(bell.fd)
    return ready


class BellMemory:
    """A bell with a word of its own, and behind it what those who ring it are told: a socket takes only a little."""

    def __init__(self, told: bytes = b"") -> None:
        self.memory_fd = os.memfd_create("torchpipe-bell")
        os.ftruncate(self.memory_fd, mmap.PAGESIZE + len(told))
        os.pwrite(self.memory_fd, told, mmap.PAGESIZE)
        self.bell = attach_bell(self.memory_fd, os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))

    def __del__(self) -> None:
        os.close(self.memory_fd)
        os.close(self.bell.fd)


def attach_bell(memory_fd: int, fd: int) -> Bell:
    """The same bell in another process."""
    return Bell(memoryview(mmap.mmap(memory_fd, mmap.PAGESIZE))[:4].cast("I"), fd)


def told_with(memory_fd: int) -> bytes:
    """What a bell's memory has behind its word."""
    return os.pread(memory_fd, os.fstat(memory_fd).st_size - mmap.PAGESIZE, mmap.PAGESIZE)


def changed(before: bytes, after: bytes) -> list[int]:
    """The indexes of the words that differ."""
    found: list[int] = (np.frombuffer(before, np.uint32) != np.frombuffer(after, np.uint32)).nonzero()[0].tolist()
    return found


class LinkMemory:
    """The slots of two processes of which one asks and one answers. The sizes are those of a worker's engine process.

    Each word has one writer: who asks writes the number of a request into ``asked`` and, where nobody waits for it any
    more, into ``given_up``; who answers writes it into ``answered``. Then the slot is free again. Who takes requests
    one after the other may write it into ``begun`` before that.

    What is read behind the words of the other side is at least as new as they are.
    """

    slots = SLOTS
    slot_bytes = SLOT_BYTES
    kept_bytes = KEPT_BYTES

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, self._size())
        self._bytes = np.frombuffer(self._map, np.uint8)
        words = memoryview(self._map)[: 4 * _WORDS].cast("I")
        self._asked, self._given_up, self._answered, self._begun = (
            words[at * SLOTS : (at + 1) * SLOTS] for at in range(4)
        )
        self.asker_asleep, self.answerer_asleep = (
            memoryview(self._map)[start : start + 4].cast("I") for start in (_ASLEEP, _ASLEEP + 64)
        )
        self.before_main: Callable[[], object] | None = None

    @classmethod
    def create(cls) -> LinkMemory:
        """Nothing is in it; the other process maps a copy of its ``fd``."""
        fd = os.memfd_create("torchpipe-slots")
        try:
            os.ftruncate(fd, cls._size())
            return cls(fd)
        except BaseException:
            os.close(fd)
            raise

    def close(self) -> None:
        """Unmap, where nobody can be about to read or write; otherwise it goes with the last who has it."""
        del self._bytes, self._asked, self._given_up, self._answered, self._begun
        del self.asker_asleep, self.answerer_asleep
        with suppress(BufferError):  # a bell has a word of it
            self._map.close()

    @classmethod
    def _size(cls) -> int:
        return _CONTENT + cls.slots * cls.slot_bytes

    def from_asker(self) -> bytes:
        """The words ``asked``, then ``given_up``, one for each slot."""
        words = self._map[: 2 * _WORDS]
        fence()
        return words

    def from_answerer(self) -> bytes:
        """The words ``answered``."""
        words = self._map[2 * _WORDS : 3 * _WORDS]
        fence()
        return words

    def ask(self, slot: int, number: int, packed: Packed, kind: int, sent: float, deadline: float) -> None:
        """Write a request; ``TooLargeError`` where there is no room for it."""
        self._write(_REQUESTS, slot, packed, kind, 0, sent, deadline)
        fence()
        self._asked[slot] = number

    def is_asked(self, slot: int, number: int) -> bool:
        """Whether the request is written."""
        return self._asked[slot] == number

    def give_up(self, slot: int, number: int) -> None:
        """Tell that nobody waits for the request any more; it is answered nevertheless."""
        self._given_up[slot] = number

    def is_given_up(self, slot: int, number: int) -> bool:
        """Whether that was told."""
        return self._given_up[slot] == number

    def begin(self, slot: int, number: int) -> None:
        """Tell that the request is run now."""
        self._begun[slot] = number

    def has_begun(self, slot: int, number: int) -> bool:
        """Whether that was told."""
        return self._begun[slot] == number

    def answer(self, slot: int, number: int, packed: Packed, kind: int, taken: float, now: float) -> None:
        """Write an answer behind its request; ``TooLargeError`` where there is no room for it."""
        self._write(_ANSWERS, slot, packed, kind, self.request(slot).end, taken, now)
        fence()
        self._answered[slot] = number

    def fail(self, slot: int, number: int, failure: Failure, taken: float) -> None:
        """Write a failure for an answer; one that is too large without where and with what it was raised."""
        try:
            self.answer(slot, number, Packed.of(failure), FAILED, taken, perf_counter())
        except TooLargeError:
            # NOTE: for this one there is always room: nothing of what led to it is in it.
            small = Packed.of(replace(failure, trace="", pickled=b""))
            self.answer(slot, number, small, FAILED, taken, perf_counter())

    def request(self, slot: int) -> Header:
        """What is said of the request in a slot."""
        return Header._make(_HEADER.unpack_from(self._map, _REQUESTS + slot * _HEADER.size))

    def reply(self, slot: int) -> Header:
        """What is said of the answer in a slot."""
        return Header._make(_HEADER.unpack_from(self._map, _ANSWERS + slot * _HEADER.size))

    def read(self, slot: int, header: Header, copies: bool) -> Any:
        """The message; raises whatever unpickling raises. Its arrays lie in the slot, unless it ``copies`` them."""
        return self._read(slot, header, self._map, self._start_of(slot) + header.start, copies)

    def read_in_place(self, slot: int, header: Header) -> tuple[Any, np.ndarray]:
        """The message, and an array that lives as long as any of its arrays, which lie in the slot."""
        start = self._start_of(slot) + header.start
        # NOTE: an array of its own, since it is the ``base`` of all views of it.
        content = np.frombuffer(self._map, np.uint8, header.end - header.start, start)
        return self._read(slot, header, content, 0, copies=False), content

    def _read(self, slot: int, header: Header, buffer: Any, offset: int, copies: bool) -> Any:
        start = self._start_of(slot) + header.start
        middle = start + header.head
        head, pickled = self._map[start:middle], self._map[middle : middle + header.pickled]
        offset += padded(header.head + header.pickled)
        return codec.unpack(head, pickled, header.arrays, buffer, offset, copies, self.before_main)

    def release(self, slot: int, reply: Header) -> None:
        """Give back the memory that a large request and its answer took; the slot is free."""
        if reply.end > self.kept_bytes:
            with suppress(OSError):  # gVisor cannot: what was taken stays taken
                start = self._start_of(slot) + self.kept_bytes
                self._map.madvise(mmap.MADV_REMOVE, start, _whole_pages(reply.end - self.kept_bytes))

    def _start_of(self, slot: int) -> int:
        return _CONTENT + slot * self.slot_bytes

    def _write(self, at: int, slot: int, packed: Packed, kind: int, start: int, first: float, second: float) -> None:
        head, pickled, parts, arrays = packed
        small = len(head) + len(pickled)
        size = padded(small)
        for part in parts:
            size += padded(part.nbytes)
        left = self.slot_bytes - (start if at == _ANSWERS else FAILURE_BYTES)
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


def _whole_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
