"""Pure: a run's calls by second, by percentile and by latency; what the plots show."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from torchpipe_py.loadtest.measure.records import Records
from torchpipe_py.loadtest.measure.statistics import percentile

_NS_PER_S = 1_000_000_000
_NS_PER_MS = 1e6
_STEPS_PER_DECADE = 12
_BINS = 48


def per_second(records: Records, offered: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each second since the start, in images.

    `offered` were due in it, `sent` went out in it, `ok` and `failed` ended in it. `p50_ms` and `p99_ms` are of the
    calls with a result that were due in it, null where there were none.
    """
    sent, ok, failed = _Counts(), _Counts(), _Counts()
    latencies: defaultdict[int, list[int]] = defaultdict(list)
    for due, end, latency, late, size, images in zip(
        records.due, records.end, records.latency, records.late, records.size, records.ok, strict=True
    ):
        sent[(due + late) // _NS_PER_S] += size
        ok[end // _NS_PER_S] += max(0, images)
        failed[end // _NS_PER_S] += size - max(0, images)
        if images > 0:
            latencies[due // _NS_PER_S].append(latency)
    length = max([len(offered), *(second + 1 for second in (*ok, *sent))])
    return [
        {"second": second, "offered": due, "sent": sent[second], "ok": ok[second], "failed": failed[second]}
        | _percentiles(sorted(latencies[second]))
        for second, due in zip_longest(range(length), offered, fillvalue=0)
    ]


class _Counts(defaultdict[int, int]):
    def __init__(self) -> None:
        super().__init__(int)


def _percentiles(ordered: list[int]) -> dict[str, float | None]:
    if not ordered:
        return {"p50_ms": None, "p99_ms": None}
    return {f"p{percent}_ms": percentile(ordered, percent) / _NS_PER_MS for percent in (50, 99)}


def percentile_curve(latencies: Sequence[int]) -> list[tuple[float, float]]:
    """`(percent, ms)` with evenly spaced decades of 100 - percent, down to the one call that took longest."""
    if not latencies:
        return []
    ordered = sorted(latencies)
    steps = math.ceil(_STEPS_PER_DECADE * math.log10(len(ordered)))
    rest = [10 ** (-step / _STEPS_PER_DECADE) for step in range(steps)] + [1 / len(ordered)]
    return [(100 * (1 - share), percentile(ordered, 100 * (1 - share)) / _NS_PER_MS) for share in rest]


def histogram(latencies: Sequence[int]) -> list[tuple[float, float, int]]:
    """`(from_ms, to_ms, calls)`: bins whose bounds have the same ratio, from the shortest latency to the longest."""
    if not latencies:
        return []
    low = max(1, min(latencies))
    ratio = math.log(max(2.0, max(latencies) / low)) / _BINS
    counts = [0] * _BINS
    for latency in latencies:
        counts[min(_BINS - 1, int(math.log(max(latency, low) / low) / ratio))] += 1
    bounds = [low * math.exp(step * ratio) / _NS_PER_MS for step in range(_BINS + 1)]
    return list(zip(bounds, bounds[1:], counts, strict=False))
