"""The random numbers of a sample: each of the three global generators is seeded by seed, epoch and sample."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.training_data import wrapped, write_images, write_toml

DRAWS: dict[str, Callable[[], float]] = {
    "python": random.random,
    "numpy": lambda: float(np.random.random()),
    "torch": lambda: float(torch.rand(1)),
}
STATES: dict[str, Callable[[], Any]] = {
    "python": random.getstate,
    "numpy": lambda: np.random.get_state()[1].tolist(),
    "torch": lambda: torch.get_rng_state().tolist(),
}


@pytest.mark.parametrize("generator", DRAWS)
def test_draws_differ_by_sample_and_epoch_and_repeat_by_seed(tmp_path: Path, generator: str) -> None:
    dataset, toml = write_images(tmp_path / "images", 5), write_toml(tmp_path)

    def drawn(seed: int) -> list[float]:
        def transform(image: Any) -> Any:
            return torch.full((1, 1, 1), DRAWS[generator](), dtype=torch.float64)

        numbers: list[float] = []
        with wrapped(dataset, toml, transforms_gpu=transform, seed=seed) as loader:
            for _ in range(2):
                numbers += [float(number) for images, _ in loader for number in images.flatten()]
                loader.reset()
        return numbers

    first = drawn(0)
    assert len(set(first)) == len(first) == 10
    assert drawn(0) == first
    assert not set(drawn(1)) & set(first)


@pytest.mark.parametrize("generator", STATES)
def test_restores_the_state_of_the_generator_after_an_epoch(tmp_path: Path, generator: str) -> None:
    before = STATES[generator]()
    with wrapped(write_images(tmp_path / "images", 3), write_toml(tmp_path)) as loader:
        assert len(list(loader)) == 1
    assert STATES[generator]() == before
