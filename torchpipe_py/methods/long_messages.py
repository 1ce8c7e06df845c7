"""Reads long messages on threads of their own, not on the event loop's; a ``Job`` also encodes a long answer."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from threading import Lock
from time import perf_counter
from typing import Any

from torchpipe_py.errors import Overloaded
from torchpipe_py.runtime.admission import QueueTarget

SHORT_BYTES = 2**20
"""Longer messages have a thread of their own, so that those of this size wait for others of this size at most."""
SECONDS_PER_BYTE = 2e-8
"""Expected until a message was read: the time of JSON of small numbers, which take longest."""
FASTEST = 1e-9
"""Seconds per byte of base64, which is read fastest."""
_WEIGHT = 0.5  # of the message that was read last


class Job(Future[Any]):
    """A message of ``size`` bytes that waits for a thread, or is being read or written there.

    ``cancel`` drops one that waits, with all that it keeps in memory.
    """

    def __init__(self, size: int, work: Callable[[], Any]) -> None:
        super().__init__()
        self.size = size
        self._work: Callable[[], Any] | None = work

    def cancel(self) -> bool:
        """Drop it; returns ``False`` if its work has begun."""
        if not super().cancel():
            return False
        self._work = None
        return True

    def run(self) -> None:
        """Do the work, unless it was dropped."""
        if self.set_running_or_notify_cancel():
            work, self._work = self._work, None
            assert work is not None
            try:
                result = work()
            except BaseException as error:  # others' messages wait
                self.set_exception(error)
            else:
                self.set_result(result)


class _Lane:
    """A thread that reads messages in the order in which they came, and how long that takes."""

    def __init__(self, name: str) -> None:
        self.thread = ThreadPoolExecutor(1, name)  # starts with the first message
        self._lock = Lock()
        self._bytes = 0  # of messages that wait or are being read
        self._pace = SECONDS_PER_BYTE

    def expected(self, size: int) -> tuple[float, float]:
        """Seconds that a message of ``size`` would wait, and be read."""
        return self._bytes * self._pace, size * self._pace

    def submit(self, reading: Job) -> None:
        with self._lock:
            self._bytes += reading.size
        reading.add_done_callback(self._leave)
        with suppress(RuntimeError):  # after ``close``, when another process answers
            self.thread.submit(self._run, reading)

    def close(self) -> None:
        self.thread.shutdown(wait=False, cancel_futures=True)

    def _run(self, reading: Job) -> None:
        start = perf_counter()
        reading.run()
        if not reading.cancelled():
            pace = (perf_counter() - start) / max(1, reading.size)
            # NOTE: a message that is refused or malformed ends early, and says nothing of those that are read whole.
            self._pace += _WEIGHT * (max(pace, FASTEST) - self._pace)

    def _leave(self, reading: Any) -> None:
        with self._lock:
            self._bytes -= reading.size


class LongMessages:
    """Reads long messages, on a thread for the shorter ones and on one for the others.

    Two threads: further ones would only take turns, and each costs the loop a turn. ``target`` limits how long a
    message may wait. For the loop's thread.
    """

    def __init__(self, target: QueueTarget) -> None:
        self._target = target
        self._short, self._long = _Lane("torchpipe-reader"), _Lane("torchpipe-reader-long")

    @property
    def executor(self) -> Executor:
        """The thread of the shorter messages, for other work in steps of milliseconds."""
        return self._short.thread

    def check(self, size: int) -> None:
        """Raise ``Overloaded`` if a message of ``size`` bytes would wait beyond the target."""
        wait, seconds = self._lane(size).expected(size)
        most = self._target.seconds(seconds)
        if wait > most:
            text = f"a message of {size} bytes waits {1000 * wait:.0f} ms to be read, and may wait {1000 * most:.0f} ms"
            raise Overloaded(text, max(1, math.ceil(1000 * wait)))

    def submit(self, size: int, read: Callable[..., Any], *args: Any) -> Job:
        """Have ``read(*args)`` called for a message of ``size`` bytes."""
        reading = Job(size, lambda: read(*args))
        self._lane(size).submit(reading)
        return reading

    def close(self) -> None:
        """Drop what waits; the threads end once they have read what they have."""
        for lane in (self._short, self._long):
            lane.close()

    def _lane(self, size: int) -> _Lane:
        return self._short if size <= SHORT_BYTES else self._long
