"""Of log lines that come again and again some are written; the rest is counted, and told."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any

from torchpipe_py.errors import counted
from torchpipe_server.logs.formats import message_of

BURST = 50  # lines at once from one place in the code
LINES_PER_SECOND = 2.0  # after that
TRACEBACK_LINES = 5  # what a line with a traceback counts as
TELL_SECONDS = 10.0  # after which it is told how many were held back
MAX_PLACES = 1000

_TOLD_CHARACTERS = 500
_MOST_CAUSES = 8


@dataclass
class _Place:
    """Where lines come from. ``held`` lines were not written since ``held_since``; ``first`` is the first of them."""

    credit: float
    at: float
    held: int = 0
    held_since: float = 0.0
    first: logging.LogRecord | None = None

    def is_idle(self, now: float) -> bool:
        """Whether it is as if nothing had ever come from it."""
        return not self.held and now - self.at >= BURST / LINES_PER_SECOND


class Repeats:
    """Bounds the lines from each place in the code, but for level DEBUG, which is the operator's own wish.

    It goes by the place, and by the types of the exception and its causes, not by the message: a client may have a part
    in that. For any thread. ``on_hold()`` is called when there begins to be something to tell.
    """

    def __init__(self, on_hold: Callable[[], object], clock: Callable[[], float] = monotonic) -> None:
        self._on_hold, self._clock = on_hold, clock
        self._places: dict[Any, _Place] = {}
        self._forget_at = 0.0
        self.is_holding = False
        # NOTE: the garbage collector may run in the middle of it, and what it ends may log.
        self._lock = threading.RLock()

    def admits(self, record: logging.LogRecord) -> bool:
        """Whether the record is to be written; otherwise it is counted."""
        if record.levelno <= logging.DEBUG:
            return True
        kinds = _kinds(record)
        cost = TRACEBACK_LINES if kinds else 1
        key = (record.name, record.levelno, record.pathname, record.lineno, record.process, kinds)
        with self._lock:
            now = self._clock()
            place = self._place(key, now)
            place.credit = min(BURST, place.credit + (now - place.at) * LINES_PER_SECOND)
            place.at = now
            if place.credit >= cost:
                place.credit -= cost
                return True
            self._hold(place, record, now)
            return False

    def told(self, at_once: bool = False) -> list[logging.LogRecord]:
        """Records that say what was held back, once that is ``TELL_SECONDS`` ago."""
        if not self.is_holding:
            return []
        with self._lock:
            before = self._clock() - (0 if at_once else TELL_SECONDS)
            due = [place for place in self._places.values() if place.held and place.held_since <= before]
            records = [_summary(place) for place in due]
            self.is_holding = any(place.held for place in self._places.values())
            return records

    def _place(self, key: Any, now: float) -> _Place:
        if key not in self._places and len(self._places) >= MAX_PLACES:
            self._forget_idle(now)
            if len(self._places) >= MAX_PLACES:
                key = None  # shared by all that find no room
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = _Place(BURST, now)
        return place

    def _forget_idle(self, now: float) -> None:
        if now >= self._forget_at:
            self._forget_at = now + TELL_SECONDS
            self._places = {key: place for key, place in self._places.items() if not place.is_idle(now)}

    def _hold(self, place: _Place, record: logging.LogRecord, now: float) -> None:
        if place.first is None:
            place.held_since, place.first = now, _copy(record)
        place.held += 1
        if not self.is_holding:
            self.is_holding = True
            self._on_hold()


def _kinds(record: logging.LogRecord) -> tuple[type, ...]:
    """The types of what was raised and of its causes: a backend's exception is the cause of a ``BackendError``."""
    kinds: list[type] = []
    error = record.exc_info[1] if record.exc_info else None
    while error is not None and len(kinds) < _MOST_CAUSES:
        kinds.append(type(error))
        error = error.__cause__
    return tuple(kinds)


def _copy(record: logging.LogRecord) -> logging.LogRecord:
    """Its message, without what a record keeps alive: arguments and frames."""
    text = message_of(record)[:_TOLD_CHARACTERS]
    made = logging.LogRecord(record.name, record.levelno, record.pathname, record.lineno, text, None, None)
    made.process = record.process
    return made


def _summary(place: _Place) -> logging.LogRecord:
    record, held = place.first, place.held
    assert record is not None
    place.first, place.held = None, 0
    record.msg = f"{record.msg} (repeated {counted(held, 'time')})"
    return record
