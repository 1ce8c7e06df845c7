"""An iterator that a thread of its own runs ahead of whoever consumes it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from torchpipe_py.training.ahead.buffer import GRACE, Buffer

T = TypeVar("T")


class BackgroundIterator(Generic[T]):
    """The items of ``source`` in their order, at most ``depth`` of them ahead.

    An exception in ``source`` is raised by ``next`` after the items before it, and by every ``next`` that follows.
    Any number of threads may call ``next``; each item goes to one of them. ``close`` ends the thread as soon as the
    item it works on is done, and closes a generator; it also happens when the iterator is dropped, and at exit.
    """

    def __init__(self, source: Iterable[T], depth: int = 2, name: str = "torchpipe-background") -> None:
        self._buffer: Buffer[T] = Buffer(depth)
        # NOTE: the thread knows the buffer only; it would keep the iterator alive otherwise.
        self._thread = threading.Thread(target=_run, args=(iter(source), self._buffer), name=name, daemon=True)
        self._finalizer = weakref.finalize(self, _stop, self._buffer, self._thread)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        return self._buffer.take()

    @property
    def is_ready(self) -> bool:
        """Whether ``next`` would not wait."""
        return self._buffer.is_ready

    def close(self) -> None:
        """End the thread; ``next`` raises ``StopIteration`` from now on. Idempotent."""
        self._finalizer()

    def __enter__(self) -> BackgroundIterator[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _stop(buffer: Buffer[T], thread: threading.Thread) -> None:
    buffer.close()
    if thread is not threading.current_thread():
        thread.join(GRACE)


def _run(source: Iterator[T], buffer: Buffer[T]) -> None:
    error: BaseException | None = None
    try:
        for item in source:
            if not buffer.put(item):
                break
            del item  # not kept while the next one is made
    except BaseException as raised:
        error = raised
    finally:
        try:
            close = getattr(source, "close", None)
            if close is not None:
                close()
        except BaseException as raised:
            error = error or raised
        buffer.finish(error)


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
