"""Requests out of an iterable: so many in the pipe at once, results in order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any

from torchpipe_py.backends.base import Data
from torchpipe_py.keys import TASK_ERROR_KEY, TASK_RESULT_KEY

Submit = Callable[[Data], "Future[Data]"]


def in_order(submit: Submit, items: Iterable[Data], ahead: int, return_errors: bool) -> Iterator[Data]:
    """The finished dict of each item; what is left in the pipe is cancelled where nobody takes any more."""
    waiting: deque[tuple[Data, Future[Data]]] = deque()
    try:
        for item in items:
            if len(waiting) >= ahead:
                yield _finished(*waiting.popleft(), return_errors)
            waiting.append((item, submit(item)))
        while waiting:
            yield _finished(*waiting.popleft(), return_errors)
    finally:
        for _, future in waiting:
            future.cancel()
        if isinstance(items, Newest):
            items.close()


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
    """Reads an iterable on a thread of its own, and gives the item that came last: older ones are dropped.

    What the iterable raises is raised where it is iterated over. ``close`` ends it: the thread takes one more item.
    """

    def __init__(self, items: Iterable[Data]) -> None:
        self._changed = threading.Condition()
        self._waiting: list[Data] = []
        self._error: BaseException | None = None
        self._is_over = False
        threading.Thread(target=self._read, args=(items,), name="torchpipe-newest", daemon=True).start()

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

    def close(self) -> None:
        """Take no further item."""
        with self._changed:
            self._is_over = True
            self._waiting.clear()
            self._changed.notify()

    def __iter__(self) -> Iterator[Data]:
        return self

    def __next__(self) -> Any:
        with self._changed:
            while not self._waiting:
                if self._is_over:
                    if self._error is not None:
                        raise self._error
                    raise StopIteration
                self._changed.wait()
            return self._waiting.pop()
