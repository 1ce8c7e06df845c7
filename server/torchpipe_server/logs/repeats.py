"""Limits repeated log lines, and reports how many were left out."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from time import monotonic
from typing import Any

from torchpipe_py.serving import counted
from torchpipe_server.logs.formats import message_of

BURST = 50  # lines at once from one place in the code
LINES_PER_SECOND = 2.0  # after that
TRACEBACK_LINES = 5  # what a line with a traceback counts as
MAX_PLACES = 1000

_SUMMARY_CHARACTERS = 500
_MOST_CAUSES = 8


@dataclass
class _Place:
    """A place in the code that logs: lines left out since the last summary, which is made from the first of them."""

    credit: float  # lines
    at: float  # when the credit was computed
    left_out: int = 0
    summary: logging.LogRecord | None = None


class RepeatFilter(logging.Filter):
    """Limits the lines from each place in the code, except at level DEBUG and from the logger ``unbounded``.

    A place is identified by code line and types of the exception and its causes, not by the message, which clients may
    influence. For any thread.
    """

    def __init__(self, unbounded: str = "", clock: Callable[[], float] = monotonic) -> None:
        super().__init__()
        self._unbounded, self._clock = unbounded, clock
        self._places: dict[Any, _Place] = {}
        # NOTE: re-entrant, because the garbage collector may run anywhere, and finalisers may log.
        self._lock = threading.RLock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to write the record; otherwise it is counted."""
        if record.levelno <= logging.DEBUG or record.name == self._unbounded:
            return True
        kinds = _kinds(record)
        cost = TRACEBACK_LINES if kinds else 1
        key: Any = (record.name, record.levelno, record.pathname, record.lineno, record.process, kinds)
        with self._lock:
            now = self._clock()
            if key not in self._places and len(self._places) >= MAX_PLACES:
                key = None  # shared by all places beyond the limit
            place = self._places.setdefault(key, _Place(BURST, now))
            place.credit = min(BURST, place.credit + (now - place.at) * LINES_PER_SECOND)
            place.at = now
            if place.credit >= cost:
                place.credit -= cost
                return True
            place.left_out += 1
            if place.summary is None:
                place.summary = copy(record)
                # Without arguments and frames, which it would keep alive.
                place.summary.msg, place.summary.args = message_of(record)[:_SUMMARY_CHARACTERS], None
                place.summary.exc_info = None
            return False

    def summaries(self) -> list[logging.LogRecord]:
        """Records that report the lines left out since the last call."""
        records = []
        with self._lock:
            for place in self._places.values():
                if place.summary is not None:
                    place.summary.msg += f" (repeated {counted(place.left_out, 'time')})"
                    records.append(place.summary)
                    place.left_out, place.summary = 0, None
            if len(self._places) >= MAX_PLACES:
                self._places.clear()
        return records


def _kinds(record: logging.LogRecord) -> tuple[type, ...]:
    """The types of the exception and its causes: a backend's exception is the cause of a ``BackendError``."""
    kinds: list[type] = []
    error = record.exc_info[1] if record.exc_info else None
    while error is not None and len(kinds) < _MOST_CAUSES:
        kinds.append(type(error))
        error = error.__cause__
    return tuple(kinds)
