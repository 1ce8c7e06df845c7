"""What the handlers of signals raise: Python runs them in the main thread, between any two bytecodes.

So the main thread runs no backend and wakes an instance by one call of C: it may be torn away anywhere.
"""

from __future__ import annotations

import signal
import threading


def is_main_thread() -> bool:
    """Whether the calling thread is the one in which handlers run."""
    return threading.get_ident() == threading.main_thread().ident


def is_interrupt(error: BaseException) -> bool:
    """Whether it is ``KeyboardInterrupt``, ``SystemExit`` or the like, and a handler may have raised it.

    None has where none is set, as in a worker of a service: then a filter did it, or a callback.
    """
    return not issubclass(type(error), Exception) and is_main_thread() and has_handlers()


def has_handlers() -> bool:
    """Whether a handler is set that may raise in the main thread: Ctrl-C's is, where nobody has changed that."""
    return any(callable(signal.getsignal(number)) for number in signal.valid_signals())
