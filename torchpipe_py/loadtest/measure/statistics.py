"""Pure: calls as numbers: percentiles, a row for each second, and what the plots show."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from torchpipe_py.loadtest.records import Records

PERCENTILES = {"p50": 50.0, "p90": 90.0, "p99": 99.0, "p99_9": 99.9}

_NS_PER_MS = 1e6
_NS_PER_S = 1_000_000_000
_STEPS_PER_DECADE = 12
_BINS = 48


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The ``percent``-th percentile of ascending values, linearly interpolated between the two nearest ranks.

    That is NumPy's default: rank ``percent / 100 * (n - 1)``. Raises ``ValueError`` for no values.
    """
    if not ordered:
        raise ValueError("no values have no percentile")
    rank = percent / 100 * (len(ordered) - 1)
    below = int(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def summarize(latencies: Sequence[int]) -> dict[str, float] | None:
    """Mean, percentiles, extremes and ``count`` of latencies in ns; all but the count in ms. None for no latency."""
    if not latencies:
        return None
    ordered = sorted(latencies)
    summary = {"count": len(ordered), "mean": sum(ordered) / len(ordered) / _NS_PER_MS}
    summary |= {name: percentile(ordered, percent) / _NS_PER_MS for name, percent in PERCENTILES.items()}
    return summary | {"max": ordered[-1] / _NS_PER_MS, "min": ordered[0] / _NS_PER_MS}


def ok_per_second(records: Records) -> list[int]:
    """Images with a result by the whole second since the start in which they came."""
    series = [0] * (max(records.end, default=-1) // _NS_PER_S + 1)
    for end, images in zip(records.end, records.ok, strict=True):
        series[end // _NS_PER_S] += max(images, 0)
    return series


def per_second(records: Records, offered: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each second since the start, in images.

    ``offered`` were due in it, ``sent`` went out in it, ``ok`` and ``failed`` ended in it. ``p50_ms`` and ``p99_ms``
    are of the calls with a result that were due in it, null where there were none.
    """
    sent, ok, failed = (Counter[int]() for _ in range(3))
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
    rows = []
    for second, due in zip_longest(range(length), offered, fillvalue=0):
        ordered = sorted(latencies[second])
        row: dict[str, Any] = {
            "second": second,
            "offered": due,
            "sent": sent[second],
            "ok": ok[second],
            "failed": failed[second],
        }
        for percent in (50, 99):
            row[f"p{percent}_ms"] = percentile(ordered, percent) / _NS_PER_MS if ordered else None
        rows.append(row)
    return rows


def percentile_curve(latencies: Sequence[int]) -> list[tuple[float, float]]:
    """``(percent, ms)`` with evenly spaced decades of 100 - percent, down to the one call that took longest."""
    if not latencies:
        return []
    ordered = sorted(latencies)
    steps = math.ceil(_STEPS_PER_DECADE * math.log10(len(ordered)))
    rest = [10 ** (-step / _STEPS_PER_DECADE) for step in range(steps)] + [1 / len(ordered)]
    return [(100 * (1 - share), percentile(ordered, 100 * (1 - share)) / _NS_PER_MS) for share in rest]


def histogram(latencies: Sequence[int]) -> list[tuple[float, float, int]]:
    """``(from_ms, to_ms, calls)``: bins whose bounds have the same ratio, from the shortest latency to the longest."""
    if not latencies:
        return []
    low = max(1, min(latencies))
    ratio = math.log(max(2.0, max(latencies) / low)) / _BINS
    counts = [0] * _BINS
    for latency in latencies:
        counts[min(_BINS - 1, int(math.log(max(latency, low) / low) / ratio))] += 1
    bounds = [low * math.exp(step * ratio) / _NS_PER_MS for step in range(_BINS + 1)]
    return list(zip(bounds, bounds[1:], counts, strict=False))
