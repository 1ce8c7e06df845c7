"""Quantiles and 95 % intervals of measurements, of shares, and of ratios."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np

CONFIDENCE = 0.95
"""Probability of all intervals here."""

RESAMPLES = 2000
"""Draws of a bootstrap."""

_Z = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
_T = (math.inf, 12.71, 4.31, 3.19, 2.78, 2.58, 2.45, 2.37, 2.31, 2.27)
"""Quantiles of Student's t by degrees of freedom, rounded up; for more the last one is used, which is too wide."""


def quantile(values: Sequence[float] | np.ndarray, share: float) -> float:
    """The least value that at least ``share`` of them do not exceed; infinite without any, or among infinite ones."""
    return float(np.quantile(values, share, method="inverted_cdf")) if len(values) else math.inf


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Student's interval of the mean; infinite for fewer than two values."""
    if len(values) < 2:
        return -math.inf, math.inf
    mean, error = statistics.mean(values), statistics.stdev(values) / math.sqrt(len(values))
    half = _T[min(len(values), len(_T)) - 1] * error
    return mean - half, mean + half


def ratio_interval(a: Sequence[float], b: Sequence[float], seed: int = 0) -> tuple[float, float] | None:
    """A percentile bootstrap of mean(b) / mean(a), which are 0 or more; None if either is empty, or ``a`` is all 0."""
    if not len(a) or not len(b) or not any(a):
        return None
    draw, ratios = np.random.default_rng(seed).choice, np.full(RESAMPLES, np.inf)
    means_a, means_b = (draw(np.asarray(run), (RESAMPLES, len(run))).mean(1) for run in (a, b))
    np.divide(means_b, means_a, out=ratios, where=means_a > 0)
    return quantile(ratios, (1 - CONFIDENCE) / 2), quantile(ratios, (1 + CONFIDENCE) / 2)


def wilson_interval(hits: int, total: int) -> tuple[float, float]:
    """Wilson's score interval of a share, within 0..1 and not empty even if ``hits == total``."""
    share, ratio = hits / total, _Z * _Z / total
    middle = (share + ratio / 2) / (1 + ratio)
    half = _Z / (1 + ratio) * math.sqrt(share * (1 - share) / total + ratio / (4 * total))
    low = 0.0 if hits == 0 else max(0.0, middle - half)
    return low, 1.0 if hits == total else min(1.0, middle + half)


def paired_interval(both: int, only_a: int, only_b: int, neither: int) -> tuple[float, float]:
    """The interval of A's share of hits less B's over the same items, within -1..1.

    Newcombe 1998, "Improved confidence intervals for the difference between binomial proportions based on paired
    data", method 10 without the correction of continuity.
    """
    total = both + only_a + only_b + neither
    a, b = (both + only_a) / total, (both + only_b) / total
    (a_low, a_high), (b_low, b_high) = (wilson_interval(both + only, total) for only in (only_a, only_b))
    margins = (both + only_a) * (only_b + neither) * (both + only_b) * (only_a + neither)
    phi = (both * neither - only_a * only_b) / math.sqrt(margins) if margins else 0.0

    def margin(down: float, up: float) -> float:
        return math.sqrt(down * down - 2 * phi * down * up + up * up)

    return a - b - margin(a - a_low, b_high - b), a - b + margin(b - b_low, a_high - a)


def crossing(xs: Sequence[float], ys: Sequence[float], step: float) -> float:
    """The x at which noisy values that rise with x cross 0, interpolated; beyond all xs by a factor of ``step``.

    The points that contradict the crossing are as few and as near to 0 as can be.
    """
    ordered = sorted(zip(xs, ys, strict=True))

    def contradiction(cut: int) -> float:
        return sum(max(0.0, y) for _, y in ordered[:cut]) - sum(min(0.0, y) for _, y in ordered[cut:])

    cut = min(range(len(ordered) + 1), key=contradiction)
    if cut in (0, len(ordered)):
        return step * ordered[-1][0] if cut else ordered[0][0] / step
    (low, below), (high, above) = ordered[cut - 1 : cut + 1]
    return low + below / (below - above) * (high - low)
