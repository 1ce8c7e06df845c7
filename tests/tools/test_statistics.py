"""Quantiles and intervals against those computed by hand, or printed in the literature."""

from __future__ import annotations

import math
import statistics

import pytest

from torchpipe_py.tools.statistics import (
    crossing,
    mean_interval,
    paired_interval,
    quantile,
    ratio_interval,
    wilson_interval,
)


def test_quantile_is_a_measured_value() -> None:
    assert [quantile(range(1, 1 + count), 0.99) for count in (1, 50, 100, 200)] == [1, 50, 99, 198]
    assert quantile([3, 1, 2], 0.5) == 2


@pytest.mark.parametrize("values", [[], [1.0, math.inf], [math.inf]])
def test_quantile_without_enough_answers_is_infinite(values: list[float]) -> None:
    assert quantile(values, 0.99) == math.inf


def test_mean_interval_is_students() -> None:
    """For three values: t = 4.30 for two degrees of freedom, times the standard error."""
    low, high = mean_interval([1.0, 2.0, 3.0])
    assert (low, high) == (
        pytest.approx(2 - 4.303 / math.sqrt(3), abs=0.01),
        pytest.approx(2 + 4.303 / math.sqrt(3), abs=0.01),
    )


@pytest.mark.parametrize("values", [[], [1.0]])
def test_mean_interval_of_too_few_values_is_infinite(values: list[float]) -> None:
    assert mean_interval(values) == (-math.inf, math.inf)


def test_mean_interval_of_many_values_is_too_wide_rather_than_too_narrow() -> None:
    values = [float(each) for each in range(50)]
    low, high = mean_interval(values)
    normal = 1.96 * statistics.stdev(values) / math.sqrt(50)
    assert normal < (high - low) / 2 < 1.2 * normal


def test_ratio_interval_contains_the_ratio_and_depends_on_the_seed_only() -> None:
    a, b = [100.0, 110.0, 90.0, 105.0, 95.0], [200.0, 190.0, 210.0, 205.0, 195.0]
    low, high = ratio_interval(a, b) or (0.0, 0.0)
    assert 1.8 < low < 2.0 < high < 2.2
    assert ratio_interval(a, b) == (low, high) != ratio_interval(a, b, seed=1)


def test_ratio_interval_of_equal_values_is_a_point() -> None:
    assert ratio_interval([2.0] * 5, [3.0] * 5) == (1.5, 1.5)


def test_ratio_interval_is_unbounded_if_the_first_is_mostly_zero() -> None:
    assert (ratio_interval([0, 0, 0, 0, 1], [1] * 5) or (0, 0))[1] == math.inf


@pytest.mark.parametrize(("a", "b"), [([], [1]), ([1], []), ([0, 0], [1, 1])])
def test_ratio_interval_without_a_ratio_is_none(a: list[float], b: list[float]) -> None:
    assert ratio_interval(a, b) is None


@pytest.mark.parametrize(
    ("hits", "total", "interval"),
    [(81, 263, (0.2553, 0.3662)), (15, 148, (0.0624, 0.1605)), (0, 20, (0, 0.1611)), (29, 29, (0.883, 1))],
)
def test_wilson_intervals_equal_newcombes(hits: int, total: int, interval: tuple[float, float]) -> None:
    """Newcombe 1998, table I."""
    assert wilson_interval(hits, total) == pytest.approx(interval, abs=1e-4)


def test_paired_interval_is_that_of_newcombe() -> None:
    """Newcombe 1998, table II."""
    assert paired_interval(36, 12, 2, 0) == pytest.approx((0.0569, 0.3404), abs=1e-4)


@pytest.mark.parametrize(
    ("ys", "x"),
    [
        ((-2, -1, 1), 105),
        ((-3, -2, -1), 1.15 * 110),
        ((1, 2, 3), 90 / 1.15),
        ((0.5, -1, 2), 100 + 10 / 3),  # the first one contradicts least
    ],
)
def test_crossing_has_the_fewest_contradictions(ys: tuple[float, ...], x: float) -> None:
    assert crossing((90, 100, 110), ys, 1.15) == pytest.approx(x)
