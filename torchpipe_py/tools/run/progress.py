"""How far a run is, on the standard error: the files done, their rate, and the time left."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import monotonic

from torchpipe_py.errors import counted

LINE_SECONDS = 1.0, 30.0
"""Seconds between two lines, on a terminal and elsewhere."""

_WINDOW = 20  # samples that the rate is taken over, a second or more apart


class Progress:
    """Shows progress. ``count`` is called on another thread, and returns the number of all items, if it can be known.

    ``done`` items were there before.
    """

    def __init__(self, is_wanted: bool, count: Callable[[], int | None], done: int) -> None:
        self._is_wanted = is_wanted and sys.stderr is not None
        self._is_terminal = self._is_wanted and sys.stderr.isatty()
        self._every = LINE_SECONDS[0 if self._is_terminal else 1]
        self._total: int | None = None
        self._count = count
        self.began = self._shown_at = monotonic()
        self._samples = deque([(self.began, done)], _WINDOW)
        if self._is_wanted:
            threading.Thread(target=self._find_total, name="run-count", daemon=True).start()

    def show(self, done: int, errors: int) -> None:
        """Show a line if it is time."""
        now = monotonic()
        if now - self._samples[-1][0] >= 1.0:
            self._samples.append((now, done))
        if not self._is_wanted or now - self._shown_at < self._every:
            return
        self._shown_at = now
        text = progress_line(done, errors, self._rate(now, done), self._total)
        self._write(f"\r{text}\x1b[K" if self._is_terminal else f"{text}\n")

    def close(self) -> None:
        """Remove the line from a terminal."""
        if self._is_terminal:
            self._write("\r\x1b[K")

    def _rate(self, now: float, done: int) -> float:
        since, before = self._samples[0]
        return (done - before) / (now - since) if now > since else 0.0

    def _find_total(self) -> None:
        with suppress(Exception):  # which the run itself reports
            self._total = self._count()

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # nobody reads it any more
            print(text, end="", file=sys.stderr, flush=True)


def progress_line(done: int, errors: int, rate: float, total: int | None) -> str:
    """``120 of 1,000 files, 3 errors, 41.5/s, 21 s left``."""
    of = f" of {total:,}" if total is not None and total >= done else ""
    parts = [f"{done:,}{of} files", *([counted(errors, "error")] if errors else []), f"{rate:,.1f}/s"]
    if total is not None and total >= done and rate > 0:
        parts.append(f"{_duration((total - done) / rate)} left")
    return ", ".join(parts)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
