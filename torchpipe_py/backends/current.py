"""The instance for which a thread runs a backend."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Waiter(Protocol):
    """An instance that may wait: its deadline (``time.perf_counter``), and its wake-up."""

    deadline: float | None

    def waiting(self) -> AbstractContextManager[None]: ...


class _CurrentThread(threading.local):
    instance: Waiter | None = None


CURRENT = _CurrentThread()
"""``instance``: that for which the calling thread runs a backend, or ``None`` outside a pipe."""


def waiting() -> AbstractContextManager[None]:
    """A context in which the calling thread runs no backend, but waits for a bounded time."""
    return nullcontext() if CURRENT.instance is None else CURRENT.instance.waiting()
