"""Batches made by several threads for several threads."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from torchpipe_py.training.ahead.buffer import GRACE, Buffer

T = TypeVar("T")


class BatchFeeder(Generic[T]):
    """``threads`` threads take items of ``source`` in turn and put ``work(item)`` where any thread may take it.

    Each result goes to exactly one consumer, in the order in which they are done; at most ``depth`` wait. Only one
    thread at a time is inside ``source``, which may so be a generator. The first exception of ``source`` or ``work``
    ends the feeding, and every consumer gets it. ``close`` ends the threads; also when the feeder is dropped, and at
    exit.
    """

    def __init__(
        self, source: Iterable[Any], work: Callable[[Any], T], threads: int = 4, depth: int = 8, name: str = ""
    ) -> None:
        if threads < 1:
            raise ValueError(f"at least 1 thread works, got {threads}")
        buffer: Buffer[T] = Buffer(depth)
        self._buffer = buffer
        kitchen = _Kitchen(iter(source), work, buffer, threads)
        self._threads = [
            threading.Thread(target=kitchen.run, name=name or f"torchpipe-feeder-{number}", daemon=True)
            for number in range(threads)
        ]
        self._finalizer = weakref.finalize(self, _stop, buffer, self._threads)
        for thread in self._threads:
            thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        return self._buffer.take()

    def close(self) -> None:
        """End the threads; ``next`` raises ``StopIteration`` from now on. Idempotent."""
        self._finalizer()

    def __enter__(self) -> BatchFeeder[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Kitchen(Generic[T]):
    """What the threads of a feeder share."""

    def __init__(self, source: Iterator[Any], work: Callable[[Any], T], buffer: Buffer[T], threads: int) -> None:
        self._source, self._work, self._buffer = source, work, buffer
        self._lock = threading.Lock()
        self._at_work = threads
        self._over = False

    def run(self) -> None:
        error: BaseException | None = None
        try:
            while not self._over and self._cook():
                pass
        except BaseException as raised:
            error = raised
        with self._lock:
            self._over = True
            self._at_work -= 1
            is_last = not self._at_work
        if error is not None or is_last:
            self._buffer.finish(error)

    def _cook(self) -> bool:
        """One item; ``False`` when there is none, or nobody wants it."""
        with self._lock:
            if self._over:
                return False
            try:
                item = next(self._source)
            except StopIteration:
                return False
        return self._buffer.put(self._work(item))


def _stop(buffer: Buffer[Any], threads: list[threading.Thread]) -> None:
    buffer.close()
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(GRACE)
