"""Runs requests from an iterable, a limited number at once, with results in order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any

from torchpipe_py.backends.base import Data
from torchpipe_py.keys import TASK_ERROR_KEY, TASK_RESULT_KEY

Start = Callable[[Data, "Future[Data]"], object]
"""Starts a request that settles the future; cancelling the future drops the request."""

_END: Any = object()
_NOT_YET: Any = object()


def in_order(start: Start, items: Iterable[Data], ahead: int, newest: bool, return_errors: bool) -> Iterator[Data]:
    """Yield the finished dict of each item; if the caller stops early, cancel the requests still in the pipe.

    A finished result is yielded before the next item is requested; with ``newest``, also while waiting for an item.
    """
    waiting: deque[tuple[Data, Future[Data]]] = deque()
    reader = Newest(items) if newest else None
    each = iter(()) if newest else iter(items)
    try:
        while True:
            while waiting and (len(waiting) >= ahead or waiting[0][1].done()):
                yield _taken(waiting, return_errors)
            item = next(each, _END) if reader is None else reader.take(waiting[0][1] if waiting else None)
            if item is _END:
                break
            if item is not _NOT_YET:
                waiting.append((item, Future()))  # NOTE: before it starts, so that an interrupt drops it
                _start_last(start, waiting)
        while waiting:
            yield _taken(waiting, return_errors)
    finally:
        for _, future in waiting:
            future.cancel()
        if reader is not None:
            reader.close()


def _start_last(start: Start, waiting: deque[tuple[Data, Future[Data]]]) -> None:
    """Start the request that was added last; if that raises, drop it and leave a future that holds the error."""
    item, future = waiting[-1]
    try:
        start(item, future)
    except Exception as error:
        future.cancel()
        refused: Future[Data] = Future()
        refused.set_exception(error)
        waiting[-1] = item, refused


def _taken(waiting: deque[tuple[Data, Future[Data]]], return_errors: bool) -> Data:
    """Finish the first request, then remove it, so that an interrupt cancels it too."""
    finished = _finished(*waiting[0], return_errors)
    waiting.popleft()
    return finished


def _finished(item: Data, future: Future[Data], return_errors: bool) -> Data:
    try:
        return future.result()
    except Exception as error:
        if not return_errors:
            raise
        item.pop(TASK_RESULT_KEY, None)
        item[TASK_ERROR_KEY] = error
        return item


class Newest:
    """Reads an iterable on its own thread and keeps only the latest item; older ones are dropped.

    ``take`` raises any exception of the iterable. ``close`` ends it: the thread reads one more item.
    """

    def __init__(self, items: Iterable[Data]) -> None:
        self._changed = threading.Condition()
        self._waiting: list[Data] = []
        self._error: BaseException | None = None
        self._is_over = False
        threading.Thread(target=self._read, args=(items,), name="torchpipe-newest", daemon=True).start()

    def take(self, future: Future[Any] | None) -> Any:
        """The waiting item, ``_END`` after the last, or ``_NOT_YET`` if the future is done and no item waits."""
        if future is not None:
            future.add_done_callback(self._wake)
        with self._changed:
            while not self._waiting:
                if self._is_over:
                    if self._error is not None:
                        raise self._error
                    return _END
                if future is not None and future.done():
                    return _NOT_YET
                self._changed.wait()
            return self._waiting.pop()

    def close(self) -> None:
        """Stop reading items."""
        with self._changed:
            self._is_over = True
            self._waiting.clear()

    def _wake(self, future: Future[Any]) -> None:
        with self._changed:
            self._changed.notify()

    def _read(self, items: Iterable[Data]) -> None:
        try:
            for item in items:
                with self._changed:
                    if self._is_over:
                        return
                    self._waiting[:] = [item]
                    self._changed.notify()
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify()
