"""Slots and the calls in them, as the side that asks sees them; the link of a worker to an engine process."""

from __future__ import annotations

import errno
import os
import pickle
import select
import socket
import weakref
from collections import deque
from collections.abc import Callable
from math import inf
from time import perf_counter
from typing import Any, Generic, Protocol, TypeVar

from torchpipe_py.backends.signature import Signature
from torchpipe_py.proc.process.transport import Packed
from torchpipe_py.proc.shared.memory import (
    SLEEP_SECONDS,
    Bell,
    LinkMemory,
    attach_bell,
    changed,
    told_with,
    wait_for,
)

LARGE_BYTES = 2**22
"""An answer of more takes milliseconds to copy: only the thread that sleeps in ``Link.is_gone`` does that."""

ENDED = (EOFError, BrokenPipeError, ConnectionResetError)
"""What a link fails with where the other process has ended."""

Done = Callable[[Any, BaseException | None], object]
"""Gets the answer or an error, once."""


class EngineCall:
    """A request on its way to an engine process.

    ``done(answer, error)`` is called once. ``is_over`` says that ``done`` was called, or is about to be.
    """

    __slots__ = ("asked", "deadline", "done", "is_over", "number", "packed", "section", "sent", "slot", "until")

    def __init__(self, section: int, packed: Packed, deadline: float | None, done: Done) -> None:
        self.section, self.packed, self.done = section, packed, done
        self.deadline = inf if deadline is None else deadline
        self.asked = self.sent = perf_counter()
        self.until = inf  # when it fails, where no engine process is there
        self.slot, self.number = -1, 0
        self.is_over = False


C = TypeVar("C", bound="Numbered")


class Numbered(Protocol):
    """What is under way in a slot."""

    slot: int
    number: int


class Slots(Generic[C]):
    """The slots of a memory as the side that asks sees them, and the calls in them."""

    def __init__(self, memory: LinkMemory) -> None:
        self.memory = memory
        self.free = deque(range(memory.slots))
        self.calls: list[C | None] = [None] * memory.slots
        self._seen = memory.from_answerer()
        self._numbers = [0] * memory.slots

    def take_slot(self, call: C) -> None:
        """Give a call a free slot, and a number that the slot's last one had not."""
        # NOTE: the one that was free last is warm.
        slot = call.slot = self.free.pop()
        call.number = self._numbers[slot] = self._numbers[slot] % (2**32 - 1) + 1
        self.calls[slot] = call

    def free_slot(self, slot: int) -> None:
        """Nothing is in the slot any more."""
        self.calls[slot] = None
        self.free.append(slot)

    def has_answers(self) -> bool:
        """Whether an answer is there that was not taken."""
        return self.memory.from_answerer() != self._seen

    def take_answered(self) -> list[int]:
        """The slots with answers that were not taken before."""
        before, self._seen = self._seen, self.memory.from_answerer()
        return changed(before, self._seen)


# Process-wide, since a fork is.
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def keep_from_forks(sock: socket.socket) -> None:
    """A process that a backend forks does not hold it open: the other end hears when this process has ended."""
    _sockets.add(sock)


def _after_fork() -> None:
    for sock in list(_sockets):
        sock.close()


os.register_at_fork(after_in_child=_after_fork)


def received_pair(sock: socket.socket, kept: list[int]) -> tuple[int, int]:
    """The two descriptors that the other process has sent, which whoever closes ``kept`` closes.

    One of ``ENDED`` where it has ended, ``OSError`` where this process has no descriptors left.
    """
    _, descriptors, flags, _ = socket.recv_fds(sock, 64, 2)
    kept += descriptors
    if flags & socket.MSG_CTRUNC:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    if len(descriptors) != 2:
        raise EOFError
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return descriptors[0], descriptors[1]


class Link(Slots[EngineCall]):
    """The slots that a worker has in one engine process, which makes ``rung`` readable when it has answered.

    Waits until that has told what it runs. Raises one of ``ENDED`` where it ends before that, ``EOFError`` where
    ``meets()``, asked every ``SLEEP_SECONDS``, says not to wait any longer, and another ``OSError`` where descriptors
    or memory are missing.
    """

    def __init__(self, sock: socket.socket, meets: Callable[[], bool]) -> None:
        keep_from_forks(sock)
        self._sock = sock
        self._fds: list[int] = []
        super().__init__(LinkMemory.create())
        self._fds.append(self.memory.fd)
        for _ in range(2):
            self._fds.append(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        _, self.rung, wakes = self._fds
        Bell(self.memory.asker_asleep, self.rung).await_ring(True)  # always; whoever waits for it, waits for more
        self._waker = Bell(memoryview(bytearray(4)).cast("I"), wakes)
        self.answered: deque[int] = deque()  # slots whose answers are not taken yet
        self.large: deque[int] = deque()  # those that are left to the thread of ``is_gone``
        self._poller = select.poll()
        self._poller.register(sock, select.POLLIN)
        sock.setblocking(False)
        socket.send_fds(sock, [b"slots"], [self.memory.fd, self.rung])
        while not self._poller.poll(1000 * SLEEP_SECONDS):
            if not meets():
                raise EOFError
        memory_fd, bell_fd = received_pair(sock, self._fds)
        self.sections: dict[str, tuple[int, Signature]] = pickle.loads(told_with(memory_fd))
        self.bell = attach_bell(memory_fd, bell_fd)
        self._poller.register(wakes, select.POLLIN)

    def has_answers(self) -> bool:
        return bool(self.answered) or super().has_answers()

    def is_large(self, slot: int) -> bool:
        """Whether the answer in a slot is."""
        reply = self.memory.reply(slot)
        return reply.end - reply.start > LARGE_BYTES

    def leave_large(self, slot: int) -> None:
        """Leave the answer in a slot to the thread of ``is_gone``, from any thread."""
        self.large.append(slot)
        self._waker.ring()

    def is_gone(self) -> bool:
        """Sleep until a large answer is left; whether the engine process has ended."""
        return bool(self._waker.sleep(self._poller, lambda: bool(self.large), SLEEP_SECONDS))

    def has_ended(self) -> bool:
        """Whether the engine process has."""
        return bool(wait_for((self._waker,), self._poller, 0))

    def heed_bell(self) -> None:
        """The bell was rung, and is heard; the answers are looked for after that."""
        os.eventfd_read(self.rung)

    def ring_again(self) -> None:
        """Have the thread that has the bell come again."""
        os.eventfd_write(self.rung, 1)

    def wake(self) -> None:
        """Have ``is_gone`` return."""
        os.eventfd_write(self._waker.fd, 1)

    def close(self) -> None:
        """Tell the engine process that nobody takes its answers any more."""
        self._sock.close()

    def __del__(self) -> None:
        # NOTE: not before: a thread that has just written a request is about to ring.
        self._sock.close()
        for fd in self._fds:
            os.close(fd)
