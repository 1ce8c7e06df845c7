"""Event loops: uvloop's where it is installed, asyncio's otherwise or with ``TORCHPIPE_LOOP=asyncio``."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from threading import get_ident
from typing import Any, TypeVar

from torchpipe_py.serving import call_from_any_thread, describe

logger = logging.getLogger("torchpipe_server")

Loop = asyncio.AbstractEventLoop
Item = TypeVar("Item")


def new_loop(is_fast: bool = True) -> Loop:
    """A new loop; exceptions in its callbacks are logged and do not stop it."""
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
        logger.error("internal error: %s", context.get("message"), exc_info=error)


def take_each(items: Iterable[Item], take: Callable[[Item], object], failed: Callable[[Item], object]) -> None:
    """Call ``take`` for each item, and ``failed`` in an ``except`` clause for one that it raises for.

    ``KeyboardInterrupt`` and ``SystemExit``, which end the loop's run, are raised after the last item.
    """
    interrupt: BaseException | None = None
    for item in items:
        try:
            take(item)
        except BaseException as error:  # also CancelledError
            failed(item)
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                interrupt = error
    if interrupt is not None:
        raise interrupt


class Inbox:
    """A queue from any thread to the loop's thread.

    The loop is woken once for everything that is put before it runs; beyond ``most`` the oldest items are lost. An item
    that ``take`` raises for is logged, and the others are taken: see ``take_each``.
    """

    def __init__(self, loop: Loop, take: Callable[..., object], most: int | None = None) -> None:
        self._loop = loop
        self._take: Callable[[tuple[Any, ...]], object] = lambda item: take(*item)
        self._items: deque[tuple[Any, ...]] = deque(maxlen=most)
        self._is_awake = False
        self._loop_thread = 0  # once known

    def put(self, *item: Any) -> None:
        """Have the loop call ``take(*item)`` in its next round."""
        self._items.append(item)
        if not self._is_awake:
            self._is_awake = True
            if get_ident() == self._loop_thread:
                self._loop.call_soon(self._take_all)
            else:
                call_from_any_thread(self._loop, self._take_all)

    def _take_all(self) -> None:
        self._is_awake, self._loop_thread = False, get_ident()
        # NOTE: what is put meanwhile is taken in the next round.
        items = (self._items.popleft() for _ in range(len(self._items)))
        take_each(items, self._take, lambda item: logger.exception("internal error while a queued item was handled"))


def call_on_thread(loop: Loop, name: str, work: Callable[[], Item], done: Callable[[Item | Exception], object]) -> None:
    """Call ``work`` on a thread of this name, then ``done`` on the loop with what it returned or raised.

    For what may wait, such as reading files: their storage may not answer for long.
    """

    def run() -> None:
        outcome: Item | Exception
        try:
            outcome = work()
        except Exception as error:
            outcome = error
        except BaseException as error:  # SystemExit, say, which the loop must not take for its own
            outcome = RuntimeError(describe(error))
        call_from_any_thread(loop, done, outcome)

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError as error:  # the system has no thread left
        loop.call_soon(done, OSError(errno.EAGAIN, str(error)))


def every(loop: Loop, seconds: float, function: Callable[[], object]) -> Callable[[], None]:
    """Call the function every ``seconds``, first after ``seconds``; calling what this returns ends it."""
    handle: asyncio.TimerHandle

    def again() -> None:
        nonlocal handle
        handle = loop.call_later(seconds, again)
        function()

    handle = loop.call_later(seconds, again)
    return lambda: handle.cancel()
