"""Counts requests by model, method and outcome, times those of the pipe, and logs them if enabled."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from torchpipe_py.serving import OK, PLACES, folded
from torchpipe_server.logs.handler import REQUESTS

logger = logging.getLogger(REQUESTS)

REQUEST_ID_CHARACTERS = 200  # in a log line


class _Times:
    """The sum and the histogram of times."""

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.counts, self.seconds = [0] * PLACES, 0.0


class RequestCounters:
    """Counters of requests, for one thread. ``logged`` is ``--log-requests``; slow requests are logged elsewhere.

    ``is_logging``: whether the ids of requests are used. ``timed`` names the methods whose times enter the histogram:
    probes would distort it.
    """

    def __init__(self, logged: str, timed: AbstractSet[str] = frozenset()) -> None:
        self.is_logging = logged in ("failed", "all")
        self._logged, self._timed = logged, timed
        self._counts: defaultdict[tuple[str, str, str], int] = defaultdict(int)  # by model, method and outcome
        self._times: defaultdict[tuple[str, str], _Times] = defaultdict(_Times)  # by model and method

    def add(self, method: str, outcome: str, seconds: float, request_id: str, model: str = "") -> None:
        """Count a request that was answered ``seconds`` after its message was complete.

        ``model`` is ``NAME/VERSION`` of the one that it asked, if it is known.
        """
        self._counts[model, method, outcome] += 1
        if method in self._timed:
            times = self._times[model, method]
            times.counts[int(seconds * 1e6).bit_length()] += 1
            times.seconds += seconds
        if self.is_logging and (self._logged == "all" or outcome != OK):
            log_request(method, outcome, seconds, request_id)

    def summary(self) -> dict[str, Any]:
        """By model and method: counts by outcome, and for calls that run the pipe the sum and histogram of their times.

        See ``torchpipe_py.runtime.record.statistics`` for the histogram.
        """
        by_model: dict[str, dict[str, Any]] = {}
        for (model, method, outcome), count in self._counts.items():
            by_method = by_model.setdefault(model, {})
            by_method.setdefault(method, {"outcomes": {}})["outcomes"][outcome] = count
        for (model, method), times in self._times.items():
            by_model[model][method].update(latency_ms=1000 * times.seconds, latency=folded(times.counts))
        return {"by_model": by_model}


def log_request(
    method: str, outcome: str, seconds: float, request_id: str, times: Mapping[str, Mapping[str, float]] | None = None
) -> None:
    """Write the line of a request, from any thread; ``times`` are milliseconds by node and phase."""
    name, ms = request_id[:REQUEST_ID_CHARACTERS], 1000 * seconds
    fields: dict[str, Any] = {"request": name, "method": method, "outcome": outcome, "ms": round(ms, 3)}
    parts = []
    if times is not None:
        fields["nodes"] = times
        parts = [f" {node}: {', '.join(f'{phase} {ms:g}' for phase, ms in of.items())};" for node, of in times.items()]
    # The id is quoted, so that it cannot imitate another part of the line.
    args = json.dumps(name, ensure_ascii=False), method, outcome, ms, "".join(parts).rstrip(";")
    text, more = "%s %s %s %.3f ms%s", {"fields": fields}
    # Bypasses --log-level: --log-requests alone decides.
    logger.handle(logger.makeRecord(logger.name, logging.INFO, "", 0, text, args, None, extra=more))
