"""Locks that report who waits for them."""

from __future__ import annotations

import threading
from collections.abc import Callable


class WatchedLock:
    """A lock that calls ``on_wait`` before a thread waits for it."""

    def __init__(self, on_wait: Callable[[], object]) -> None:
        self._on_wait, self._lock = on_wait, threading.Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._on_wait()
            self._lock.acquire()

    def __exit__(self, *raised: object) -> None:
        self._lock.release()
