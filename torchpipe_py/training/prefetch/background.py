"""Threads that work ahead of whoever consumes, through a bounded buffer."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")

GRACE = 30.0
"""Seconds that whoever closes waits for a thread to end the item it works on."""


class Buffer(Generic[T]):
    """At most ``depth`` items between any number of threads that put and any number that take.

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


class BatchFeeder(Generic[T]):
    """``threads`` threads take items of ``source`` in turn and put ``work(item)`` where any thread may take it.

    Each result goes to exactly one consumer, in the order in which they are done; at most ``depth`` wait. Only one
    thread at a time is inside ``source``, which may so be a generator. The first exception of ``source`` or ``work``
    ends the feeding, and every consumer gets it after the results before it, and at every ``next``. ``close`` ends the
    threads as soon as the items they work on are done; also when the feeder is dropped, and at exit. A generator is
    closed after its last item.
    """

    def __init__(
        self, source: Iterable[Any], work: Callable[[Any], T], threads: int = 4, depth: int = 8, name: str = ""
    ) -> None:
        if threads < 1:
            raise ValueError(f"at least 1 thread works, got {threads}")
        self._buffer: Buffer[T] = Buffer(depth)
        # NOTE: the threads do not know the feeder; they would keep it alive otherwise.
        feed = _Feed(iter(source), work, self._buffer, threads)
        self._threads = [
            threading.Thread(target=feed.run, name=name or f"torchpipe-feeder-{number}", daemon=True)
            for number in range(threads)
        ]
        self._finalizer = weakref.finalize(self, _stop, self._buffer, self._threads)
        for thread in self._threads:
            thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        return self._buffer.take()

    @property
    def is_ready(self) -> bool:
        """Whether ``next`` would not wait."""
        return self._buffer.is_ready

    def close(self) -> None:
        """End the threads; ``next`` raises ``StopIteration`` from now on. Idempotent."""
        self._finalizer()

    def __enter__(self) -> BatchFeeder[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class BackgroundIterator(BatchFeeder[T]):
    """The items of ``source`` in their order, made by one thread, at most ``depth`` of them ahead."""

    def __init__(self, source: Iterable[T], depth: int = 2, name: str = "torchpipe-background") -> None:
        super().__init__(source, _as_it_is, 1, depth, name)


class _Feed(Generic[T]):
    """What the threads of a feeder share."""

    def __init__(self, source: Iterator[Any], work: Callable[[Any], T], buffer: Buffer[T], threads: int) -> None:
        self._source, self._work, self._buffer = source, work, buffer
        self._lock = threading.Lock()
        self._running = threads
        self._over = False

    def run(self) -> None:
        error: BaseException | None = None
        try:
            while self._feed_one():
                pass
        except BaseException as raised:
            error = raised
        with self._lock:
            self._over = True
            self._running -= 1
            is_last = not self._running
        if is_last:
            try:
                getattr(self._source, "close", _nothing)()
            except BaseException as raised:
                error = error or raised
        if error is not None or is_last:
            self._buffer.finish(error)

    def _feed_one(self) -> bool:
        """Put one result; ``False`` when there is no item, or nobody wants it."""
        with self._lock:
            if self._over:
                return False
            try:
                item = next(self._source)
            except StopIteration:
                return False
        return self._buffer.put(self._work(item))


def _as_it_is(item: T) -> T:
    return item


def _nothing() -> None:
    pass


def _stop(buffer: Buffer[Any], threads: list[threading.Thread]) -> None:
    buffer.close()
    for thread in threads:
        if thread is not threading.current_thread() and thread.is_alive():  # Ctrl-C may come before it is started
            thread.join(GRACE)


def run_aside(function: Callable[[], object], timeout: float | None = None) -> None:
    """``function()`` on a thread that is not the caller's; what it raises is raised here.

    It is waited for, but not for longer than ``timeout`` seconds.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="torchpipe-aside", daemon=True)
    thread.start()
    thread.join(timeout)
    if errors:
        raise errors[0]
