"""A worker as an engine process sees it: the end of a link that answers."""

from __future__ import annotations

import os
import socket
import threading
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager
from time import perf_counter
from typing import Protocol

from torchpipe_py.errors import Failure, describe, logger
from torchpipe_py.proc.process.outcome import ItemOutcome
from torchpipe_py.proc.shared.codec import pack_outcomes
from torchpipe_py.proc.shared.link import ENDED, keep_from_forks, received_pair
from torchpipe_py.proc.shared.memory import DONE, SLOTS, Bell, BellMemory, Header, LinkMemory, changed


class Ticket(Protocol):
    """A request that the pipe has."""

    @property
    def is_over(self) -> bool: ...

    @property
    def is_running(self) -> bool: ...

    def cancel(self, error: BaseException | None = None) -> bool: ...


class Answered(threading.local, AbstractContextManager[None]):
    """The worker that a thread has answered and not rung yet. To wake another process may take as long as an answer."""

    _waits = False
    _last: EngineLink | None = None

    def __enter__(self) -> None:
        self._waits = True

    def __exit__(self, *error: object) -> None:
        self._waits = False
        self.ring(None)

    def ring(self, link: EngineLink | None) -> None:
        """That one has an answer: ring the one before, and it too unless more may come."""
        # NOTE: a batch holds the requests of a worker in a row, as they are taken from it at once.
        last, self._last = self._last, link
        if last is not None and last is not link:
            last.ring()
        if link is not None and not self._waits:
            self._last = None
            link.ring()


class GivenUpError(CancelledError):
    """Ends a request that the worker has given up."""


class EngineLink:
    """A worker as an engine process sees it: a socket, and slots once the two have met."""

    memory: LinkMemory
    _bell: Bell

    def __init__(self, sock: socket.socket, answered: Answered) -> None:
        keep_from_forks(sock)
        self._sock, self._answered = sock, answered
        self._descriptors: list[int] = []
        sock.setblocking(False)
        self._has_met = self._is_over = False
        self._words = b""
        self._tickets: list[tuple[int, Ticket] | None] = [None] * SLOTS
        self._given_up: list[tuple[int, int, Ticket]] = []

    def fileno(self) -> int:
        """Readable when the worker has said something, or is gone."""
        return self._sock.fileno()

    def meet(self, bell: BellMemory) -> bool:
        """Take the worker's memory, and tell it where to ring; ``False`` where it is gone, or cannot be linked."""
        try:
            memory_fd, bell_fd = received_pair(self._sock, self._descriptors)
            if self._has_met:
                return False
            self.memory = LinkMemory(memory_fd)
            self._bell = Bell(self.memory.asker_asleep, bell_fd)
            self._words = self.memory.from_asker()
            socket.send_fds(self._sock, [b"bell"], [bell.memory_fd, bell.bell.fd])
        except ENDED:
            return False
        except (OSError, ValueError) as error:
            logger.error("a worker cannot be linked: %s", describe(error))
            return False
        self._has_met = True
        return True

    def has_work(self) -> bool:
        """Whether the worker asks for anything new."""
        return self._has_met and self.memory.from_asker() != self._words

    def take(self) -> tuple[list[tuple[Header, int, int]], list[tuple[int, int]]]:
        """Slot and number of each new request, the first first, and of each that nobody waits for any more."""
        before, self._words = self._words, self.memory.from_asker()
        numbers = memoryview(self._words).cast("I")
        asked, given_up = [], []
        for index in changed(before, self._words):
            if index < SLOTS:
                asked.append((self.memory.request(index), index, numbers[index]))
            else:
                given_up.append((index - SLOTS, numbers[index]))
        if len(asked) > 1:
            asked.sort(key=lambda request: request[0].first)
        return asked, given_up

    def keep(self, slot: int, number: int, ticket: Ticket) -> None:
        """The request of a slot runs; it may be over already."""
        self._tickets[slot] = number, ticket
        if ticket.is_over:
            self._tickets[slot] = None

    def give_up(self, slot: int, number: int) -> None:
        """Nobody waits for that request: drop it; it is answered by ``answer_given_up``."""
        kept = self._tickets[slot]
        if kept is not None and kept[0] == number and kept[1].cancel(GivenUpError()):
            self._given_up.append((slot, number, kept[1]))

    def answer_given_up(self) -> None:
        """Answer the requests that were dropped and that no backend has."""
        # NOTE: the worker writes its next request into the slot then, and a backend that still runs on the arrays of
        # this one, and perhaps changes them in place, would run on those of the next one. A lane first notes what it
        # takes and then looks whether that is over: what is over and not taken now will not run.
        if self._given_up:
            dropped, self._given_up = self._given_up, []
            for slot, number, ticket in dropped:
                if ticket.is_running:
                    self._given_up.append((slot, number, ticket))
                else:
                    self.answer(slot, number, Failure.of(GivenUpError()), perf_counter())

    def answer(self, slot: int, number: int, message: ItemOutcome | Failure, taken: float) -> None:
        """Tell the worker what came of a request."""
        self._tickets[slot] = None
        if self._is_over:
            return
        if isinstance(message, ItemOutcome):
            try:
                self.memory.answer(slot, number, pack_outcomes([message]), DONE, taken, perf_counter())
            except Exception as error:
                message = Failure.of(error)
        if isinstance(message, Failure):
            self.memory.fail(slot, number, message, taken)
        self._answered.ring(self)

    def ring(self) -> None:
        """Tell the worker that there are answers."""
        self._bell.ring()

    def end(self) -> None:
        """The worker is gone: drop what it still has."""
        self._is_over = True
        for kept in [*self._tickets]:
            if kept is not None:
                kept[1].cancel()
        self._sock.close()

    def __del__(self) -> None:
        # NOTE: not before: a thread that has just finished a request may be about to ring.
        for descriptor in self._descriptors:
            os.close(descriptor)
