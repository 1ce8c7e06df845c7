"""Pure: what the clients recorded → the numbers of the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from torchpipe_py.loadtest.ledger import NO_REPLY, Ledger

PERCENTILES = {"p50": 50.0, "p90": 90.0, "p99": 99.0, "p99_9": 99.9}

_NS_PER_MS = 1e6
_NS_PER_S = 1_000_000_000


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


@dataclass(frozen=True)
class Tally:
    """All clients together. Counts are in images, but for ``calls`` and ``calls_answered``.

    Answered images are those of calls that had a reply, be it an error. The window, in seconds, runs from the release
    of the clients to the last reply. ``latency`` is of calls that brought a result, ``latency_failed`` of all others,
    in ms. ``per_second`` counts images with a result, by whole seconds since the release.
    """

    sent: int
    answered: int
    ok: int
    correct: int
    calls: int
    calls_answered: int
    window: float
    latency: dict[str, float] | None
    latency_failed: dict[str, float] | None
    per_second: list[int]


def tally(ledgers: Sequence[Ledger], released: int) -> Tally:
    """Adds up what the clients recorded since ``released``, in ns of ``perf_counter_ns``."""
    latency, end, ok = (list(chain.from_iterable(_column(ledger, name) for ledger in ledgers)) for name in _COLUMNS)
    replies = [at for at, images in zip(end, ok, strict=True) if images != NO_REPLY]
    return Tally(
        sent=sum(ledger.sent for ledger in ledgers),
        answered=sum(ledger.answered for ledger in ledgers),
        ok=sum(ledger.images_ok for ledger in ledgers),
        correct=sum(ledger.correct for ledger in ledgers),
        calls=len(end),
        calls_answered=len(replies),
        window=(max(replies or end, default=released) - released) / _NS_PER_S,
        latency=summarize([ns for ns, images in zip(latency, ok, strict=True) if images > 0]),
        latency_failed=summarize([ns for ns, images in zip(latency, ok, strict=True) if images <= 0]),
        per_second=_per_second([(at - released) // _NS_PER_S for at in end], ok),
    )


_COLUMNS = ("latency", "end", "ok")


def _column(ledger: Ledger, name: str) -> list[int]:
    column: memoryview = getattr(ledger, name)
    return column[: ledger.calls_done].tolist()


def _per_second(seconds: Sequence[int], ok: Sequence[int]) -> list[int]:
    series = [0] * (max(seconds, default=-1) + 1)
    for second, images in zip(seconds, ok, strict=True):
        series[second] += max(images, 0)
    return series
