"""A bounded buffer between threads that can fail, end and be closed from either side."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")

GRACE = 30.0
"""Seconds that whoever closes waits for a thread to end the item it works on."""


class Buffer(Generic[T]):
    """At most ``depth`` items on their way from any number of threads to any number of threads.

    ``put`` waits for room, ``take`` for an item. After ``finish`` those who take get what is left, then the error or
    ``StopIteration``, every one of them and every time. After ``close`` nobody waits any more: ``put`` says ``False``.
    """

    def __init__(self, depth: int) -> None:
        if depth < 1:
            raise ValueError(f"the depth is at least 1, got {depth}")
        self._depth = depth
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._finished = self._closed = False
        self._error: BaseException | None = None

    def put(self, item: T) -> bool:
        """Hand an item over; ``False`` if nobody will take it, because the buffer is closed."""
        with self._changed:
            while len(self._items) >= self._depth and not self._closed:
                self._changed.wait()
            if self._closed:
                return False
            self._items.append(item)
            self._changed.notify_all()
            return True

    def take(self) -> T:
        """The next item; ``StopIteration`` after the last one, or the error that came in its place."""
        with self._changed:
            while not (self._items or self._finished or self._closed):
                self._changed.wait()
            if self._items and not self._closed:
                item = self._items.popleft()
                self._changed.notify_all()
                return item
            if self._error is not None and not self._closed:
                raise self._error
            raise StopIteration

    def finish(self, error: BaseException | None = None) -> None:
        """No more items come; of several errors the first counts."""
        with self._changed:
            self._finished = True
            self._error = self._error or error
            self._changed.notify_all()

    def close(self) -> None:
        """Drop what is in it, and let everyone go who waits."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()

    @property
    def is_ready(self) -> bool:
        """Whether ``take`` would not wait."""
        return bool(self._items or self._finished or self._closed)
