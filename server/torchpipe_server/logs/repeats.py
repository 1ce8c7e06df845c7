"""Of log lines that come again and again some are written; the rest is counted and reported."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from time import monotonic
from typing import Any

from torchpipe_py.errors import counted
from torchpipe_server.logs.formats import message_of

BURST = 50  # lines at once from one place in the code
LINES_PER_SECOND = 2.0  # after that
TRACEBACK_LINES = 5  # what a line with a traceback counts as
MAX_PLACES = 1000

_SUMMARY_CHARACTERS = 500
_MOST_CAUSES = 8


@dataclass
class _Place:
    """Where lines come from. ``held`` lines were not written; ``summary`` is made of the first."""

    credit: float
    at: float
    held: int = 0
    summary: logging.LogRecord | None = None


class Repeats(logging.Filter):
    """Bounds the lines from each place in the code, except those of level DEBUG and of the logger ``unbounded``.

    What counts is the place, and the types of the exception and its causes, not the message: a client may have a part
    in that. For any thread.
    """

    def __init__(self, unbounded: str = "", clock: Callable[[], float] = monotonic) -> None:
        super().__init__()
        self._unbounded, self._clock = unbounded, clock
        self._places: dict[Any, _Place] = {}
        # NOTE: the garbage collector may run in the middle of it, and what it ends may log.
        self._lock = threading.RLock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is to be written; otherwise it is counted."""
        if record.levelno <= logging.DEBUG or record.name == self._unbounded:
            return True
        kinds = _kinds(record)
        cost = TRACEBACK_LINES if kinds else 1
        key: Any = (record.name, record.levelno, record.pathname, record.lineno, record.process, kinds)
        with self._lock:
            now = self._clock()
            if key not in self._places and len(self._places) >= MAX_PLACES:
                key = None  # shared by all that find no room
            place = self._places.setdefault(key, _Place(BURST, now))
            place.credit = min(BURST, place.credit + (now - place.at) * LINES_PER_SECOND)
            place.at = now
            if place.credit >= cost:
                place.credit -= cost
                return True
            place.held += 1
            if place.summary is None:
                place.summary = copy(record)
                # Not what it keeps alive: arguments and frames.
                place.summary.msg, place.summary.args = message_of(record)[:_SUMMARY_CHARACTERS], None
                place.summary.exc_info = None
            return False

    def summaries(self) -> list[logging.LogRecord]:
        """Records that report what was held back since the last call."""
        records = []
        with self._lock:
            for place in self._places.values():
                if place.summary is not None:
                    place.summary.msg += f" (repeated {counted(place.held, 'time')})"
                    records.append(place.summary)
                    place.held, place.summary = 0, None
            if len(self._places) >= MAX_PLACES:
                self._places.clear()
        return records


def _kinds(record: logging.LogRecord) -> tuple[type, ...]:
    """The types of what was raised and of its causes: a backend's exception is the cause of a ``BackendError``."""
    kinds: list[type] = []
    error = record.exc_info[1] if record.exc_info else None
    while error is not None and len(kinds) < _MOST_CAUSES:
        kinds.append(type(error))
        error = error.__cause__
    return tuple(kinds)
