"""Epochs that the program sets in its sampler, and the random numbers of each sample."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from kit.training_data import FORKS, wrapped
from torch.utils.data import DataLoader, DistributedSampler

from torchpipe_py.training import ImageFiles, TorchpipeLoader, TrainingError, wrap_dataloader_torchpipe

pytestmark = FORKS


class Rotated:
    """A sampler that does not show its epoch."""

    def __init__(self) -> None:
        self._number = 0

    def __iter__(self) -> Iterator[int]:
        return iter([(index + self._number) % 11 for index in range(11)])

    def __len__(self) -> int:
        return 11

    def set_epoch(self, epoch: int) -> None:
        self._number = epoch


def shuffled(dataset: Any) -> Any:
    return DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=True)


def loader_of(dataset: Any, toml: str, sampler: Any) -> TorchpipeLoader:
    return wrap_dataloader_torchpipe("single", DataLoader(dataset, 4, sampler=sampler), toml)


def indices(loader: TorchpipeLoader) -> list[int]:
    return [int(index) for batch in loader for index in batch.indices]


# What a program does, and the epochs that it gets. A number is a call of ``set_epoch``.
PROGRAMS: dict[str, tuple[list[Any], list[int]]] = {
    "never sets it": (["for", "reset", "for", "reset", "for"], [0, 1, 2]),
    "sets it first": ([0, "for", "reset", 1, "for", "reset", 2, "for"], [0, 1, 2]),
    "sets it after reset": (["reset", 0, "for", "reset", 1, "for"], [0, 1]),
    "sets it before reset": ([0, "reset", "for", 1, "reset", "for"], [0, 1]),
    "sets it in place of reset": ([0, "for", 1, "for", 2, "for"], [0, 1, 2]),
    "begins later": ([7, "for", "reset", "for", "reset", 3, "for"], [7, 8, 3]),
    "keeps one order": ([0, "for", "reset", 0, "for", 0, "reset", "for", 0, "for"], [0, 0, 0, 0]),
}


@pytest.mark.parametrize("make", [shuffled, lambda _: Rotated()], ids=["DistributedSampler", "Rotated"])
def test_epoch_that_the_program_sets_is_the_one_that_it_gets(dataset: ImageFiles, toml: str, make: Any) -> None:
    def expected(epoch: int) -> list[int]:
        sampler = make(dataset)
        sampler.set_epoch(epoch)
        return list(sampler)

    wrong = []
    for name, (steps, epochs) in PROGRAMS.items():
        sampler, found = make(dataset), []
        with loader_of(dataset, toml, sampler) as loader:
            for step in steps:
                if step == "for":
                    found.append((indices(loader), loader.epoch))
                elif step == "reset":
                    loader.reset()
                else:
                    sampler.set_epoch(step)
        if found != [(expected(epoch), epoch) for epoch in epochs]:
            wrong.append((name, found))
    assert wrong == []


def test_epoch_set_before_or_within_one(dataset: ImageFiles, toml: str) -> None:
    sampler = shuffled(dataset)
    sampler.set_epoch(5)
    with loader_of(dataset, toml, sampler) as loader:
        assert loader.state_dict()["epoch"] == 5
        next(loader)
        sampler.set_epoch(5)
        rest = indices(loader)
        loader.reset()
        next(loader)
        sampler.set_epoch(7)
        with pytest.raises(TrainingError, match=r"set to epoch 7 within epoch 6; reset\(7\) begins it"):
            iter(loader)
        loader.reset(2)  # which is asked for
        assert (len(rest), loader.epoch) == (7, 2)
    assert (sampler.epoch, "set_epoch" in vars(sampler)) == (5, False)  # as before


class Draws:
    """A number of each global generator, as the three channels of an image."""

    def __call__(self, _: Any) -> Any:
        return torch.tensor([random.random(), np.random.random(), float(torch.rand(()))]).view(3, 1, 1)


def test_each_global_generator_is_seeded_for_each_sample(dataset: ImageFiles, toml: str) -> None:
    def drawn(**options: Any) -> Any:
        given = {"transforms_gpu": Draws(), "transforms_cpu": Draws(), "transforms_batch": None, **options}
        with wrapped(dataset, toml, **given) as loader:
            epochs = []
            for _ in range(2):
                epochs.append(torch.cat([images for images, _ in loader]).view(11, 3))
                loader.reset()
        return torch.stack(epochs)

    numbers = drawn()
    for column in range(3):
        assert len(set(numbers[:, :, column].flatten().tolist())) == 22
    for options in ({"batch_size": 3}, {"cpu_percentage": 1.0}, {"workers": 1, "cpu_percentage": 1.0, "batch_size": 5}):
        assert torch.equal(drawn(**options), numbers), options
    assert not (drawn(seed=1) == numbers).any()


def test_state_of_an_epochs_end_goes_on_with_the_epoch_that_is_set(dataset: Any, toml: str) -> None:
    with loader_of(dataset, toml, shuffled(dataset)) as loader:
        indices(loader)
        state = loader.state_dict()
        loader.reset()
        following = indices(loader)
    for chosen in (1, 0):
        sampler = shuffled(dataset)
        with loader_of(dataset, toml, sampler) as loader:
            loader.load_state_dict(state)
            sampler.set_epoch(chosen)
            found = indices(loader)
            assert (loader.epoch, found == following) == (chosen, chosen == 1)


def test_loaders_of_one_sampler_both_follow_it(dataset: Any, toml: str) -> None:
    sampler = shuffled(dataset)
    with loader_of(dataset, toml, sampler) as one:
        with loader_of(dataset, toml, sampler) as other:
            sampler.set_epoch(5)
            for loader in (one, other):
                indices(loader)
                assert loader.epoch == 5
        sampler.set_epoch(7)
        indices(one)
        assert one.epoch == 7
    assert "set_epoch" not in vars(sampler)


def test_cpu_share_does_not_go_with_at_least(dataset: Any) -> None:
    toml = {"backend": "S[DecodeMat,ResizeMat,Mat2Tensor]", "at_least": "1x", "resize_h": 9, "resize_w": 9}
    with pytest.raises(TrainingError, match="leave at_least out of the TOML, or cpu_percentage"):
        wrap_dataloader_torchpipe(
            "single", DataLoader(dataset, 4), {**toml, "device": "cpu"}, None, lambda image: image, 0.5
        )
