"""Compressed bodies, for tests of what happens while they are inflated."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from kit.waits import WAIT
from torchpipe_py.wire import compression

PIECES = random.Random(1).randbytes(6 * 2**20).translate(bytes(number & 1 for number in range(256)))
"""Inflated in six pieces; it shrinks to a sixth."""


@contextmanager
def inflating_held_back() -> Iterator[tuple[threading.Semaphore, threading.Event]]:
    """Long bodies are inflated once the event is set; the semaphore counts their pieces that have begun."""
    begun, may_go_on = threading.Semaphore(0), threading.Event()
    step = compression.Inflater.step

    def step_slowly(self: compression.Inflater, *size: int) -> bool:
        if not size:
            begun.release()
            assert may_go_on.wait(WAIT)
        return step(self, *size)

    with mock.patch.object(compression.Inflater, "step", step_slowly):
        yield begun, may_go_on
        may_go_on.set()
