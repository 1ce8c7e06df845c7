"""What an epoch will read, batch by batch: a function of (seed, epoch), known before it begins."""

from __future__ import annotations

import operator
import random
from dataclasses import dataclass
from typing import Any

from torchpipe_py.training.data.randomness import CPU_BATCH, ORDER, forked, key_of
from torchpipe_py.training.errors import TrainingError


@dataclass(frozen=True)
class PlannedBatch:
    """Batch ``number`` of its epoch; ``on_cpu``: through ``transforms_cpu``."""

    number: int
    indices: tuple[int, ...]
    on_cpu: bool


class Planner:
    """Draws the order of each epoch from the DataLoader's own sampler, under a key of (seed, epoch).

    A generator that a sampler holds is started from the key as well, so that the order never depends on what was
    drawn before. Samplers with ``set_epoch`` are told the epoch.
    """

    def __init__(self, dataloader: Any, seed: int, cpu_percentage: float) -> None:
        self._batches, self._samplers = dataloader.batch_sampler, samplers_of(dataloader)
        self._seed, self._cpu_percentage = seed, cpu_percentage

    def plan(self, epoch: int) -> list[PlannedBatch]:
        """All batches of this rank."""
        for sampler in {id(sampler): sampler for sampler in self._samplers}.values():
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        generators = [generator for sampler in self._samplers if (generator := getattr(sampler, "generator", None))]
        states = [generator.get_state() for generator in generators]
        key = key_of(ORDER, self._seed, epoch)
        try:
            for generator in generators:
                generator.manual_seed(key)
            with forked() as fork:
                fork.seed(key)
                order = [tuple(map(_index, batch)) for batch in self._batches]
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
        return [PlannedBatch(number, indices, self._on_cpu(epoch, number)) for number, indices in enumerate(order)]

    def _on_cpu(self, epoch: int, number: int) -> bool:
        # The same on every rank: those that wait for each other are slow at the same step.
        drawn = random.Random(key_of(CPU_BATCH, self._seed, epoch, number)).random()
        return drawn < self._cpu_percentage


def samplers_of(dataloader: Any) -> list[Any]:
    """The DataLoader's sampler, its batch sampler, and that one's sampler."""
    batches = dataloader.batch_sampler
    return [dataloader.sampler, batches, getattr(batches, "sampler", None)]


def _index(value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TrainingError(f"the sampler gave {value!r}; samples are found by their index, an integer") from None
