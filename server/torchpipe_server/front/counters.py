"""What came of the requests: counted by method and outcome, those of the pipe timed, and logged if that is wanted."""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter, deque
from collections.abc import Set as AbstractSet
from time import time
from typing import Any

from torchpipe_py.runtime.statistics import PLACES, folded
from torchpipe_server.front.method import OK
from torchpipe_server.logs.handler import REQUESTS

logger = logging.getLogger(REQUESTS)

NAME_CHARACTERS = 200  # of a client's name for its request, in a log line
_DUE = 256  # what is noted is worked through, so that no round of the loop has more to do


class RequestCounters:
    """``add`` is for any thread and costs next to nothing: what it notes is worked through in ``settle``.

    ``logged`` is ``"none"``, ``"failed"`` or ``"all"``: of which requests a line is written. ``is_logging``: whether
    somebody wants to know the requests' names. ``timed`` names the methods whose time is in the histogram: a probe is
    answered in no time.
    """

    def __init__(self, logged: str, timed: AbstractSet[str] = frozenset()) -> None:
        self.is_logging = logged != "none"
        self._logged, self._timed = logged, timed
        self._noted: deque[tuple[str, str, float, str, float]] = deque()
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()  # by method and outcome
        self._latency = [0] * PLACES
        self._seconds = 0.0

    def add(self, method: str, outcome: str, seconds: float, request_id: str) -> None:
        """A request was answered ``seconds`` after its message was complete."""
        if self.is_logging:
            self._noted.append((method, outcome, seconds, request_id[:NAME_CHARACTERS], time()))
        else:
            self._noted.append((method, outcome, seconds, "", 0.0))

    @property
    def is_due(self) -> bool:
        """Whether so much is noted that it should not wait for the next tick."""
        return len(self._noted) >= _DUE

    def settle(self) -> None:
        """Count and log what was noted."""
        with self._lock:
            noted = self._noted
            for _ in range(len(noted)):
                method, outcome, seconds, name, at = noted.popleft()
                self._counts[method, outcome] += 1
                if method in self._timed:
                    self._latency[int(seconds * 1e6).bit_length()] += 1
                    self._seconds += seconds
                if self.is_logging:
                    self._log(method, outcome, seconds, name, at)

    def summary(self) -> dict[str, Any]:
        """Counts by method and outcome, and the latency's histogram (``torchpipe_py.runtime.statistics``)."""
        self.settle()
        by_method: dict[str, dict[str, int]] = {}
        for (method, outcome), count in list(self._counts.items()):
            by_method.setdefault(method, {})[outcome] = count
        return {
            "by_method": by_method,
            "latency": {"counts": folded(self._latency), "sum_ms": 1000 * self._seconds},
        }

    def _log(self, method: str, outcome: str, seconds: float, name: str, at: float) -> None:
        if self._logged == "all" or (self._logged == "failed" and outcome != OK):
            fields = {"request": name, "method": method, "outcome": outcome, "ms": round(1000 * seconds, 3)}
            said = json.dumps(name, ensure_ascii=False)  # in quotes, so that it looks like nothing else on the line
            text = "%s %s %s %.3f ms"
            record = logger.makeRecord(
                logger.name, logging.INFO, "", 0, text, (said, method, outcome, 1000 * seconds), None, None,
                {"fields": fields},
            )  # fmt: skip
            record.created = at  # when it was answered: lines are written a little later
            record.msecs = 1000 * (at % 1)
            logger.handle(record)
