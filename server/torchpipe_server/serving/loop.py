"""An event loop for one thread: sockets, functions called from other threads, and steps by the clock."""

from __future__ import annotations

import selectors
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE

LONGEST_WAIT = 0.5
AFTER_ERROR = 0.05  # a defect that repeats itself must not keep the processor

Step = Callable[[], float]
"""Called in every round; returns the seconds after which it wants to be called again at the latest."""


class Loop:
    """``call`` and ``stop`` are for any thread and for signal handlers, all else is for the thread of ``run``.

    ``on_error(error)`` gets what a handler, a step or a called function raises; without it, that ends ``run``.
    ``progress`` counts what was begun: where it stands still for longer than ``LONGEST_WAIT``, one thing takes so long.
    """

    def __init__(self, on_error: Callable[[Exception], object] | None = None) -> None:
        self._on_error = on_error
        self.steps: list[Step] = []
        self.progress = 0
        self._selector = selectors.DefaultSelector()
        self._watched: set[Any] = set()  # the selector's own mapping describes the socket at length to say no
        self._urgent: set[Any] = set()
        self._calls: deque[Callable[[], object]] = deque()
        self._is_stopped = False
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.setblocking(False)
        self._wake_in.setblocking(False)
        self._selector.register(self._wake_out, READ, self._woken)

    def call(self, function: Callable[[], object]) -> None:
        """Run ``function`` on the loop's thread; never, once the loop has ended."""
        self._calls.append(function)
        try:
            self._wake_in.send(b"\0")
        except (BlockingIOError, OSError):
            pass  # full: it wakes anyway; closed: the loop is gone

    def stop(self) -> None:
        """Let ``run`` return after this round."""
        self._is_stopped = True
        self.call(lambda: None)

    def watch(self, source: Any, events: int, handler: Callable[[int], object], is_urgent: bool = False) -> None:
        """Call ``handler(events)`` when ``source`` is ready; replaces what was said of it before, 0 ends it.

        Of what is ready in a round, urgent sources come first.
        """
        if is_urgent and events:
            self._urgent.add(source)
        else:
            self._urgent.discard(source)
        if not events:
            if source in self._watched:
                self._watched.discard(source)
                self._selector.unregister(source)
        elif source in self._watched:
            self._selector.modify(source, events, handler)
        else:
            self._selector.register(source, events, handler)
            self._watched.add(source)

    def run(self) -> None:
        """Until ``stop``."""
        wait = 0.0
        while not self._is_stopped:
            try:
                wait = self._round(wait)
            except Exception as error:
                if self._on_error is None:
                    raise
                self._on_error(error)
                wait = AFTER_ERROR

    def _round(self, wait: float) -> float:
        ready = self._selector.select(wait)
        if len(ready) > 1 and self._urgent:
            ready.sort(key=lambda one: one[0].fileobj not in self._urgent)
        for key, events in ready:
            self.progress += 1
            key.data(events)
        wait = LONGEST_WAIT
        for step in self.steps:
            self.progress += 1
            wait = min(wait, step())
        return max(0.0, wait)

    def close(self) -> None:
        """Give the descriptors back."""
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()

    def _woken(self, events: int) -> None:
        try:
            self._wake_out.recv(4096)
        except BlockingIOError:
            pass
        try:
            # Those that come meanwhile wake it again: sockets have their turn between.
            for _ in range(len(self._calls)):
                self.progress += 1
                self._calls.popleft()()
        except Exception:
            self.call(lambda: None)  # those behind it have been woken for
            raise
