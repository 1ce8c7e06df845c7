"""A confidence sequence: an interval of a mean that may be looked at after every value."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np

from torchpipe_py.tools.statistics import CONFIDENCE

_STEPS = 40
"""Halvings of an interval: 2**-40 of it is left."""

# A bet of c expects a mean (1 - c) times the tested one, or, on the lower side, one that is larger by c of the rest.
_BETS_BELOW = np.array([1.0, 0.9, 0.75, 0.5, 0.35, 0.25, 0.125, 0.0625])
_WEIGHTS_BELOW = np.array([0.5, *[0.5 / 7] * 7])  # half on no disagreement at all, the usual case
_BETS_ABOVE = 0.5 ** np.arange(14)
_WEIGHTS_ABOVE = np.full(14, 1 / 14)


class ConfidenceSequence:
    """The mean of values from 0 to 1, with an interval that is valid at every look.

    If values are drawn at random, the probability that the interval ever fails to contain the mean is at most 5 %,
    however often it is asked for and whenever that ends. Waudby-Smith and Ramdas 2024, "Estimating means of bounded
    random variables by betting", Journal of the Royal Statistical Society B 86: for each possible mean, someone bets
    that it is too high, and someone that it is too low. While it is the true one, no bet is favourable, so that neither
    wealth ever exceeds 40 with a probability of more than 2.5 % (Ville 1939); the interval has those means at which
    both are below 40. A wealth is shared among fixed bets, as in the diversified Kelly betting there; it depends on
    the values, not on their order.
    """

    def __init__(self) -> None:
        self._counts: Counter[float] = Counter()
        self._last: tuple[np.ndarray, np.ndarray] | None = None  # the counts as arrays, until values come

    def add(self, values: Iterable[float]) -> None:
        """Take further values; ``ValueError`` for one outside 0..1."""
        for value in values:
            if not 0 <= value <= 1:
                raise ValueError(f"expected a value from 0 to 1, got {value}")
            self._counts[float(value)] += 1
            self._last = None

    @property
    def count(self) -> int:
        return self._counts.total()

    @property
    def mean(self) -> float:
        """NaN without values."""
        return sum(value * count for value, count in self._counts.items()) / self.count if self.count else math.nan

    def interval(self) -> tuple[float, float]:
        """Lower and upper bound of the mean; 0 and 1 without values."""
        if not self.count:
            return 0.0, 1.0
        return self._bound(self._log_wealth_above, 0.0, self.mean), self._bound(self._log_wealth_below, 1.0, self.mean)

    def is_below(self, mean: float) -> bool:
        """Whether the interval lies below ``mean``."""
        return bool(self._counts) and self._log_wealth_below(mean) >= _LOG_LIMIT

    def is_above(self, mean: float) -> bool:
        """Whether the interval lies above ``mean``."""
        return bool(self._counts) and self._log_wealth_above(mean) >= _LOG_LIMIT

    def values_needed(self, mean: float) -> int | None:
        """About how many values like those so far would exclude ``mean``; ``None`` if they never would."""
        if not self.count or not 0 < mean < 1:
            return None
        sides = (self._log_bets_below, _WEIGHTS_BELOW), (self._log_bets_above, _WEIGHTS_ABOVE)
        log_bets, weights = sides[self.mean > mean]
        growth = log_bets(mean) / self.count
        most = _LOG_LIMIT - np.log(weights[growth > 0])
        if not most.size:
            return None
        few, enough = (
            0,
            math.ceil(float((most / growth[growth > 0]).min())),
        )  # so many suffice for one of the bets alone
        while enough - few > 1:
            middle = (few + enough) // 2
            few, enough = (few, middle) if _log_mixture(growth * middle, weights) >= _LOG_LIMIT else (middle, enough)
        return enough

    def _bound(self, log_wealth: Callable[[float], float], excluded: float, possible: float) -> float:
        """The mean nearest to ``excluded`` that the bets have not excluded; wealth grows towards ``excluded``."""
        if log_wealth(excluded) < _LOG_LIMIT:
            return excluded
        for _ in range(_STEPS):
            middle = (excluded + possible) / 2
            if log_wealth(middle) < _LOG_LIMIT:
                possible = middle
            else:
                excluded = middle
        return excluded

    def _log_bets_below(self, mean: float) -> np.ndarray:
        """The logarithm of the wealth of each bet that the mean is below ``mean``."""
        values, counts = self._arrays()
        with np.errstate(divide="ignore"):
            factors = 1 - _BETS_BELOW[:, None] * (values - mean) / (1 - mean)
            logs: np.ndarray = np.log(np.maximum(factors, 0)) @ counts
        return logs

    def _log_bets_above(self, mean: float) -> np.ndarray:
        """The logarithm of the wealth of each bet that the mean is above ``mean``."""
        values, counts = self._arrays()
        with np.errstate(divide="ignore"):
            factors = 1 + _BETS_ABOVE[:, None] * (values - mean) / mean
            logs: np.ndarray = np.log(np.maximum(factors, 0)) @ counts
        return logs

    def _log_wealth_below(self, mean: float) -> float:
        # NOTE: at the ends only a value that is not there excludes a mean: any value below 1 excludes a mean of 1.
        if mean >= 1:
            return math.inf if min(self._counts) < 1 else -math.inf
        return _log_mixture(self._log_bets_below(mean), _WEIGHTS_BELOW)

    def _log_wealth_above(self, mean: float) -> float:
        if mean <= 0:
            return math.inf if max(self._counts) > 0 else -math.inf
        return _log_mixture(self._log_bets_above(mean), _WEIGHTS_ABOVE)

    def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
        if self._last is None:
            self._last = np.array(list(self._counts)), np.array(list(self._counts.values()), float)
        return self._last


_LOG_LIMIT = math.log(2 / (1 - CONFIDENCE))


def _log_mixture(logs: np.ndarray, weights: np.ndarray) -> float:
    """The logarithm of the weighted sum of wealths."""
    largest = logs.max()
    return float(largest + np.log(weights @ np.exp(logs - largest))) if np.isfinite(largest) else float(largest)
