"""Pure: what is wrong with what was measured, as sentences; none is passed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from chaos.tally import Tally, percentile

TYPED = {"ok", "overloaded", "unavailable", "worker_died"}


def answered(tally: Tally, within: float, codes: Iterable[str] = ("ok",)) -> list[str]:
    """Every request has one answer, its own, of these codes and in time."""
    allowed, problems = set(codes), []
    counted = sum(tally.codes.values()) + len(tally.closed) + tally.abandoned + tally.lost + tally.crossed
    if not tally.ok:
        problems.append("no request was served")
    if counted != tally.sent:
        problems.append(f"{tally.sent} requests sent, the fate of {counted} known")
    if tally.lost:
        problems.append(f"{tally.lost} requests without an answer")
    if tally.crossed:
        problems.append(f"{tally.crossed} answers that are another request's, or a second one")
    if tally.refused:
        problems.append(f"{tally.refused} connections refused")
    strange = {code: count for code, count in tally.codes.items() if code not in allowed}
    if strange:
        problems.append(f"answers {strange}")
    if tally.longest > within:
        problems.append(f"an answer after {tally.longest:.2f} s, {within:g} s are allowed")
    return problems


def closed_by_kills(closed: Sequence[tuple[float, float]], kills: Sequence[tuple[float, float]]) -> list[str]:
    """A connection may be closed where a worker had it that was killed, and nowhere else.

    kills: when, and by when another worker was there. What is sent later is not sent to the killed one.
    """
    lost = [when for when in closed if not any(kill <= when[1] and when[0] <= back for kill, back in kills)]
    return [f"{len(lost)} connections closed though nothing was killed"] if lost else []


def overloaded(
    peak: float, goodput: float, tally: Tally, p99: float, hints: Sequence[int | None], share: float = 0.9
) -> list[str]:
    """peak, goodput: answers a second at capacity and beyond it. p99: what a rejection may take, seconds."""
    problems = []
    if goodput < share * peak:
        problems.append(f"{goodput:.0f} answers a second under overload, {peak:.0f} at capacity")
    if not tally.codes["overloaded"]:
        problems.append("nothing was rejected")
    spent = percentile(tally.seconds.get("overloaded", []), 0.99)
    if spent > p99:
        problems.append(f"p99 of rejections is {1000 * spent:.1f} ms, {1000 * p99:g} are allowed")
    if any(hint is None or hint <= 0 for hint in hints):
        problems.append("a rejection that does not say when to come back")
    return problems


def grew(samples: Sequence[int], most: int, what: str = "memory") -> list[str]:
    """From the median of the second half's first quarter to that of its last: a leak, not a warm-up."""
    half = samples[len(samples) // 2 :]
    if len(half) < 4:
        return [f"too few samples of {what}"]
    quarter = len(half) // 4
    growth = _median(half[-quarter:]) - _median(half[:quarter])
    return [f"{what} grew by {growth} in the second half, {most} are allowed"] if growth >= most else []


def above(what: str, value: float, most: float) -> list[str]:
    return [f"{what} is {value:g}, {most:g} are allowed"] if value > most else []


def differs(what: str, value: object, expected: object) -> list[str]:
    return [f"{what} is {value!r} in place of {expected!r}"] if value != expected else []


def _median(values: Sequence[int]) -> int:
    return sorted(values)[len(values) // 2]
