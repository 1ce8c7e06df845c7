"""Keys, and generators that are put back."""

from __future__ import annotations

import random

import numpy as np
import torch

from torchpipe_py.training.plan import forked, key_of


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(1))


def test_keys_depend_on_every_part() -> None:
    keys = {key_of(*parts) for parts in ((0, 0), (0, 1), (1, 0), (0, 0, 0), (-1, 0), (0,), (2**62, 5))}
    assert len(keys) == 7
    assert all(0 <= key < 2**63 for key in keys)
    assert key_of(1, 2, 3) == 6839638155163434425


def test_generators_come_back_as_they_were() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    expected = drawn()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    threads = torch.get_num_threads()
    with forked() as seed:
        seed(7)
        first = drawn()
        seed(7)
        assert drawn() == first
        seed(8)
        assert drawn() != first
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == threads
    assert drawn() == expected
