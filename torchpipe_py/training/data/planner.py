"""What an epoch will read, batch by batch: a function of (seed, epoch), known before it begins."""

from __future__ import annotations

import operator
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from typing import Any

import torch

from torchpipe_py.training.data.randomness import CPU_BATCH, ORDER, forked, key_of
from torchpipe_py.training.errors import TrainingError

MOST = 1_000_000  # samples of an epoch, beside ten times those of the dataset


@dataclass(frozen=True)
class PlannedBatch:
    """Batch ``number`` of its epoch; ``on_cpu``: through ``transforms_cpu``.

    ``repeats``: how often the epoch has had each sample before.
    """

    number: int
    indices: tuple[int, ...]
    on_cpu: bool
    repeats: tuple[int, ...] = ()


class Planner:
    """Draws the order of each epoch from the DataLoader's own sampler, under a key of (seed, epoch).

    A generator that a sampler holds is started from the key as well, so that the order never depends on what was
    drawn before. Samplers with ``set_epoch`` are told the epoch.
    """

    def __init__(self, dataloader: Any, seed: int, cpu_percentage: float) -> None:
        self._batches, self._samplers = dataloader.batch_sampler, samplers_of(dataloader)
        self._most = 10 * (length_of(dataloader.dataset) or 0) + MOST
        self._seed, self._cpu_percentage = seed, cpu_percentage

    def plan(self, epoch: int) -> list[PlannedBatch]:
        """All batches of this rank. ``TrainingError`` for a sampler without an end."""
        for sampler in {id(sampler): sampler for sampler in self._samplers}.values():
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        held = [getattr(sampler, "generator", None) for sampler in self._samplers]
        generators = [generator for generator in held if isinstance(generator, torch.Generator)]
        states = [generator.get_state() for generator in generators]
        key = key_of(ORDER, self._seed, epoch)
        try:
            for generator in generators:
                generator.manual_seed(key)
            with forked() as fork:
                fork.seed(key)
                order = self._drawn()
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
        repeats = _repeats(order)
        return [
            PlannedBatch(number, indices, self._on_cpu(epoch, number), repeats[number])
            for number, indices in enumerate(order)
        ]

    def _drawn(self) -> list[tuple[int, ...]]:
        order, count = [], 0
        for batch in self._batches:
            order.append(tuple(map(_index, batch)))
            count += len(order[-1])
            if count > self._most:
                problem = f"the sampler gave more than {self._most} samples for one epoch, and does not end"
                raise TrainingError(f"{problem}; epochs are planned before they begin: let it end, and call reset()")
        return order

    def _on_cpu(self, epoch: int, number: int) -> bool:
        # The same on every rank: those that wait for each other are slow at the same step.
        drawn = random.Random(key_of(CPU_BATCH, self._seed, epoch, number)).random()
        return drawn < self._cpu_percentage


def samplers_of(dataloader: Any) -> list[Any]:
    """The DataLoader's sampler, its batch sampler, and that one's sampler."""
    batches = dataloader.batch_sampler
    return [dataloader.sampler, batches, getattr(batches, "sampler", None)]


def digest_of(plan: Sequence[PlannedBatch]) -> str:
    """What is the same for the same batches."""
    digest = blake2b(digest_size=8)
    for planned in plan:
        digest.update(repr(planned.indices).encode())
    return digest.hexdigest()


def length_of(sized: Any) -> int | None:
    """``len(sized)``, or ``None`` where it has none."""
    try:
        return len(sized)
    except TypeError:
        return None


def _repeats(order: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """For each sample how often it came before."""
    if len(set(chain.from_iterable(order))) == sum(map(len, order)):
        return [(0,) * len(batch) for batch in order]
    counts: Counter[int] = Counter()
    repeats = []
    for batch in order:
        row = []
        for index in batch:
            row.append(counts[index])
            counts[index] += 1
        repeats.append(tuple(row))
    return repeats


def _index(value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TrainingError(f"the sampler gave {value!r}; samples are found by their index, an integer") from None
