"""Records in shared memory what a worker does with each connection, so that the record outlives the worker.

The supervisor keeps every client's socket. When a worker dies, the journal shows which of its connections were between
two messages (another worker serves those) and which requests were in work (the supervisor answers those with an error),
so that no client waits for an answer that cannot come. It also records which connections are idle, and since when, so
that the supervisor can close one without asking its worker.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop
from multiprocessing import reduction
from struct import Struct
from typing import Any

from torchpipe_py.serving import HttpRequest
from torchpipe_server.wire.thrift import Framing, Message

Request = Message | HttpRequest

SLOT_BYTES = 72
_NAME_BYTES = 56
_head = Struct(f"<BBi{_NAME_BYTES}s")  # protocol and whether it is oneway; length of the name, sequence number, name
_seqid, _SEQID_AT = Struct("<i"), 4
_time = Struct("d")
_TIME_BYTES = 64  # before the time, an aligned double: it is read while another process writes it
_NO_REQUEST = 255  # in place of the protocol, before the first request

CLEAN, TOUCHED = 0, 1  # the stream: at a boundary, or bytes were read of a request that has not begun
IDLE, BUSY, REPLYING = 0, 1, 2  # the request in work

_PROTOCOLS: list[Any] = [
    *(Framing(framed, name) for framed in (False, True) for name in ("binary", "binary_old", "compact")),
    HttpRequest.protocol,
]
_CODES = {protocol: index for index, protocol in enumerate(_PROTOCOLS)}


class SharedMemory:
    """An anonymous file of ``size`` zero bytes, shared with child processes that are started with it.

    The file is sealed, because shortening it would kill every process that reads it.
    """

    def __init__(self, name: str, size: int, fd: int | None = None) -> None:
        self._name, self._size = name, size
        if fd is None:
            fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self._fd = fd
        self.view = memoryview(mmap.mmap(fd, size))

    def __reduce__(self) -> Any:
        return _attach, (self._name, self._size, reduction.DupFd(self._fd))

    def close(self) -> None:
        """Close the descriptor, after which no further process can share the bytes; ``view`` remains valid."""
        os.close(self._fd)


def _attach(name: str, size: int, fd: Any) -> SharedMemory:
    return SharedMemory(name, size, fd.detach())


class Journal:
    """A record of ``count`` slots in shared memory, shared with child processes that are started with it."""

    def __init__(self, count: int, memory: SharedMemory | None = None) -> None:
        self.count = count
        self._memory = memory or SharedMemory("torchpipe-journal", count * SLOT_BYTES)
        self._view = self._memory.view
        self._times = self._view.cast("d")[_TIME_BYTES // 8 :: SLOT_BYTES // 8]

    def __reduce__(self) -> Any:
        return Journal, (self.count, self._memory)

    def close(self) -> None:
        """Close it for new processes; its content remains."""
        self._memory.close()

    def begin(self, index: int, now: float) -> None:
        """Give the slot to a new connection, at ``now`` of ``monotonic``; it has sent no request."""
        base = index * SLOT_BYTES
        self._view[base : base + 3] = bytes((CLEAN, IDLE, _NO_REQUEST))
        self._times[index] = now

    def entry(self, index: int) -> Entry:
        """The slot of a connection, for the process that serves it; clears what the last owner recorded."""
        return Entry(self._view, index * SLOT_BYTES)

    def idle(self, indexes: Iterable[int], has_asked: bool) -> Iterator[int]:
        """Idle slots, the longest idle first: those that have sent a request, or those that have not.

        Slots that are in use again when their turn comes are left out.
        """
        view, times = self._view, self._times.tolist()
        streams, works, requests = (bytes(view[at::SLOT_BYTES]) for at in range(3))
        idle = [
            (times[index], index)
            for index in indexes
            if streams[index] == CLEAN and works[index] == IDLE and (requests[index] != _NO_REQUEST) is has_asked
        ]
        heapify(idle)  # most callers take one, and a flood of new connections calls this often
        while idle:
            time, index = heappop(idle)
            now = self.is_idle(index), view[index * SLOT_BYTES + 2] != _NO_REQUEST, self._times[index]
            if now == (True, has_asked, time):
                yield index

    def is_idle(self, index: int) -> bool:
        """Whether nothing is in work or half read."""
        base = index * SLOT_BYTES
        # NOTE: in this order: a request is marked as in work before its stream is marked clean.
        return self._view[base] == CLEAN and self._view[base + 1] == IDLE

    def read(self, index: int) -> tuple[Request | None, bool]:
        """The request that a dead worker left unanswered, without its body, and whether the stream is lost.

        It is lost if the worker had read or written a part of a message.
        """
        base = index * SLOT_BYTES
        stream, work = self._view[base], self._view[base + 1]
        if work == IDLE:
            return None, stream != CLEAN
        code, size, seqid, name = _head.unpack_from(self._view, base + 2)
        protocol, is_oneway = divmod(code, 2)
        # NOTE: trust nothing here: a worker that crashed may have overwritten it.
        if work != BUSY or not 0 < size <= _NAME_BYTES or protocol >= len(_PROTOCOLS):
            return None, True
        called = name[:size].decode(errors="replace")
        message: Request
        if _PROTOCOLS[protocol] == HttpRequest.protocol:
            message = HttpRequest.named(called)
        else:
            message = Message(called, bool(is_oneway), seqid, _PROTOCOLS[protocol])
        return None if is_oneway else message, stream != CLEAN


class Entry:
    """One connection's slot, written by the process that serves it: the state of its stream, then of its work.

    A step is recorded before it is taken, because the process may be killed in between.
    """

    __slots__ = ("_base", "_name", "_protocol", "_view")

    def __init__(self, view: memoryview, base: int) -> None:
        self._view, self._base = view, base
        self._name = ""
        self._protocol: Any = None  # as the name, that of the last request
        view[base : base + 2] = bytes((CLEAN, IDLE))

    def touch(self) -> None:
        """Record that bytes are read."""
        self._view[self._base] = TOUCHED

    def clear(self) -> None:
        """Record that no bytes are left of a request that has not begun."""
        self._view[self._base] = CLEAN

    def reply(self) -> None:
        """Record that the reply is being written."""
        self._view[self._base + 1] = REPLYING

    def rest(self) -> None:
        """Record that no request is in work."""
        self._view[self._base + 1] = IDLE

    def remember(self, last_active: float) -> None:
        """Record when the client was last active, by ``monotonic``; called twice a second."""
        _time.pack_into(self._view, self._base + _TIME_BYTES, last_active)

    def begin(self, message: Request, is_more: bool) -> None:
        """Record the request that begins, and whether further bytes were read."""
        view, base = self._view, self._base
        if message.name == self._name and message.protocol == self._protocol and not message.is_oneway:
            _seqid.pack_into(view, base + _SEQID_AT, message.seqid)
        else:
            self._name, self._protocol = ("" if message.is_oneway else message.name), message.protocol
            name = message.name.encode()
            size = len(name) if len(name) <= _NAME_BYTES else 0
            _head.pack_into(view, base + 2, 2 * _CODES[message.protocol] + message.is_oneway, size, message.seqid, name)
        view[base + 1] = BUSY
        if not is_more:  # NOTE: in this order, or the connection would seem idle
            view[base] = CLEAN
