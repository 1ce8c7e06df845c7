"""Event loops: uvloop's where it is installed, asyncio's otherwise or with ``TORCHPIPE_LOOP=asyncio``."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress
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


def every(loop: Loop, seconds: float, function: Callable[[], object]) -> Callable[[], None]:
    """Call the function so often, the first time after ``seconds``; a call of what this returns ends that."""
    handle: asyncio.TimerHandle

    def again() -> None:
        nonlocal handle
        handle = loop.call_later(seconds, again)
        function()

    handle = loop.call_later(seconds, again)
    return lambda: handle.cancel()
