"""Pure: every call of a run as columns, in the order in which they were due."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchpipe_py.loadtest.ledger import Ledger
from torchpipe_py.loadtest.plans import Plan

_COLUMNS = ("latency", "end", "ok", "late", "lag")


@dataclass(frozen=True)
class Records:
    """Columns of equal length. `due` and `end` are in ns since the start of the run.

    `latency` runs from when a call was due, `actual` from when it was sent; in a closed loop that is one. `late` is
    the time between the two, `lag` the part of it that is the tester's own fault; all in ns. `size` is
    in images, and `ok` are those with a result, or `NO_REPLY`.
    """

    due: list[int]
    end: list[int]
    latency: list[int]
    actual: list[int]
    size: list[int]
    ok: list[int]
    late: list[int]
    lag: list[int]

    def good(self, column: str) -> list[int]:
        """A column, of the calls that brought a result."""
        values: list[int] = getattr(self, column)
        return [value for value, ok in zip(values, self.ok, strict=True) if ok > 0]


def collect(ledgers: Sequence[Ledger], plans: Sequence[Plan], start: int) -> Records:
    """All clients' calls; `start` in ns of `perf_counter_ns`."""
    rows = [row for ledger, plan in zip(ledgers, plans, strict=True) for row in _rows(ledger, plan)]
    rows.sort(key=lambda row: row[1] - row[0])
    latency, end, ok, late, lag, size = map(list, zip(*rows, strict=True)) if rows else ([] for _ in range(6))
    return Records(
        due=[at - ns - start for at, ns in zip(end, latency, strict=True)],
        end=[at - start for at in end],
        latency=latency,
        actual=[ns - wait for ns, wait in zip(latency, late, strict=True)],
        size=size,
        ok=ok,
        late=late,
        lag=lag,
    )


def _rows(ledger: Ledger, plan: Plan) -> zip[tuple[int, ...]]:
    done = ledger.calls_done
    columns = (getattr(ledger, name)[:done].tolist() for name in _COLUMNS)
    sizes = (min(plan.batch, plan.share - call * plan.batch) for call in range(done))
    return zip(*columns, sizes, strict=True)
