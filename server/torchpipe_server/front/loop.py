"""Event loops: uvloop's where it is installed, asyncio's otherwise or with ``TORCHPIPE_LOOP=asyncio``."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from threading import get_ident
from typing import Any

logger = logging.getLogger("torchpipe_server")

Loop = asyncio.AbstractEventLoop


def new_loop(is_fast: bool = True) -> Loop:
    """A loop of its own for this thread; what its callbacks raise is logged, and it goes on."""
    make: Callable[[], Loop] = asyncio.SelectorEventLoop
    if is_fast and os.environ.get("TORCHPIPE_LOOP") != "asyncio":
        with suppress(ImportError):
            import uvloop

            make = uvloop.new_event_loop
    loop = make()
    loop.set_exception_handler(_log)
    return loop


def _log(loop: Loop, context: dict[str, Any]) -> None:
    error = context.get("exception")
    if isinstance(error, (OSError, asyncio.CancelledError)):
        logger.debug("%s: %s", context.get("message"), error)  # a client that is gone
    else:
        logger.error("a defect: %s", context.get("message"), exc_info=error)


def call_from_any_thread(loop: Loop, function: Callable[..., object], *args: Any) -> None:
    """Call the function on the loop's thread; never, once the loop is closed."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        pass  # closed


class Inbox:
    """What any thread puts in is taken on the loop's thread, in its order.

    The loop is woken once for all that comes until it is there; the oldest of more than ``most`` are lost.
    """

    def __init__(self, loop: Loop, take: Callable[..., object], most: int | None = None) -> None:
        self._loop, self._take = loop, take
        self._items: deque[tuple[Any, ...]] = deque(maxlen=most)
        self._is_awake = False
        self._thread = 0  # of the loop, once it was there

    def put(self, *item: Any) -> None:
        """Have ``take(*item)`` called, in the loop's next round."""
        self._items.append(item)
        if not self._is_awake:
            self._is_awake = True
            if get_ident() == self._thread:
                self._loop.call_soon(self._take_all)
            else:
                call_from_any_thread(self._loop, self._take_all)

    def _take_all(self) -> None:
        self._is_awake, self._thread = False, get_ident()
        for _ in range(len(self._items)):  # NOTE: what is put in meanwhile comes in the next round
            self._take(*self._items.popleft())


def every(loop: Loop, seconds: float, function: Callable[[], object]) -> Callable[[], None]:
    """Call the function so often, the first time after ``seconds``; a call of what this returns ends that."""
    handle: asyncio.TimerHandle

    def again() -> None:
        nonlocal handle
        handle = loop.call_later(seconds, again)
        function()

    handle = loop.call_later(seconds, again)
    return lambda: handle.cancel()
