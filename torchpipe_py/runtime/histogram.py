"""Histograms of times that cost next to nothing to fill: the bounds are powers of two of a microsecond."""

from __future__ import annotations

COUNTS = 28  # up to 2**27 µs, two minutes; the last one is of everything beyond

BOUNDS_MS = [2**power / 1000 for power in range(COUNTS - 1)]
"""Upper bounds, exclusive, of the counters in milliseconds; the last counter has none."""


def bucket(seconds: float) -> int:
    """The place of a time in a list of ``COUNTS`` counters: 0 below 1 µs, ``n`` below 2**n µs."""
    return min(COUNTS - 1, int(seconds * 1e6).bit_length())
