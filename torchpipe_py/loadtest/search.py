"""Pure: the highest rate that holds, found with few runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

TOLERANCE = 0.03  # the rate that was found and the next one tried that fails differ by no more
MOST_PROBES = 20

_FIRST = 0.8  # of the estimate
_UP = 1.25
_DOWN = 0.5
_LOWEST = 1 / 256  # of the estimate: below it nothing is looked for


@dataclass
class Found:
    """`best` is the highest rate that held, None where none did; `too_much` the lowest that did not.

    `probes` are all rates tried, in their order, and whether they held.
    """

    best: float | None = None
    too_much: float | None = None
    probes: list[tuple[float, bool]] = field(default_factory=list)

    @property
    def is_close(self) -> bool:
        """Whether the two bounds are so near that another probe would say nothing."""
        return self.best is not None and self.too_much is not None and self.too_much <= self.best * (1 + TOLERANCE)


def search_rate(holds: Callable[[float], bool], estimate: float) -> Found:
    """Brackets the limit from `estimate`, in images per second, then halves the bracket until it is `TOLERANCE` wide.

    `holds(rate)` runs a probe. It is noisy near the limit: the highest rate that held is the answer, and no rate is
    tried twice.
    """
    found = Found()
    rate = estimate * _FIRST
    while len(found.probes) < MOST_PROBES and not found.is_close and rate >= estimate * _LOWEST:
        held = holds(rate)
        found.probes.append((rate, held))
        if held:
            found.best = rate
        else:
            found.too_much = rate
        rate = _next_rate(found, rate)
    return found


def _next_rate(found: Found, rate: float) -> float:
    if found.best is None:
        return rate * _DOWN
    if found.too_much is None:
        return rate * _UP
    return (found.best + found.too_much) / 2
