"""The confidence sequence: valid at every look, and as soon as can be."""

from __future__ import annotations

import numpy as np
import pytest

from torchpipe_py.tools.compare_models.sequence import ConfidenceSequence


def test_confidence_sequence_seldom_excludes_the_mean_at_any_look() -> None:
    rng = np.random.default_rng(0)
    runs, excluded = 120, 0
    for run in range(runs):
        mean = (0.001, 0.02, 0.5)[run % 3]
        # Shares as well as zeros and ones.
        values = rng.random(400) < mean if run % 2 else rng.beta(mean, 1 - mean, 400)
        sequence, is_excluded = ConfidenceSequence(), False
        for look in range(0, 400, 10):
            sequence.add(np.round(values[look : look + 10].astype(float), 2).tolist())
            is_excluded |= sequence.is_below(mean) or sequence.is_above(mean)
        excluded += is_excluded
    assert excluded <= 0.05 * runs


def test_interval_contains_all_means_that_are_not_excluded() -> None:
    assert ConfidenceSequence().interval() == (0, 1)
    for ones, zeros in ((0, 100), (1, 99), (50, 50), (100, 0)):
        sequence = ConfidenceSequence()
        sequence.add([1.0] * ones + [0.0] * zeros)
        low, high = sequence.interval()
        assert low <= ones / 100 <= high
        assert (low > 0, high < 1) == (ones > 0, zeros > 0)
        for mean in np.linspace(0, 1, 41)[1:-1]:
            assert sequence.is_below(mean) == (high <= mean)
            assert sequence.is_above(mean) == (low >= mean and low > 0)
    sequence = ConfidenceSequence()
    sequence.add([0.0] * 100)
    assert sequence.values_needed(0.01) == 420
    sequence.add([0.0] * 319)
    assert not sequence.is_below(0.01)
    sequence.add([0.0])
    assert sequence.is_below(0.01)
    with pytest.raises(ValueError, match="expected a value from 0 to 1"):
        sequence.add([1.5])
