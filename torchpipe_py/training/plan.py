"""Plans the batches of an epoch, and the random keys of its samples: functions of (seed, epoch, sample)."""

from __future__ import annotations

import operator
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from torchpipe_py.training.errors import TrainingError

MOST_SAMPLES = 1_000_000  # in an epoch, in addition to ten times the samples of the dataset

# Purposes of a key; the same numbers with different purposes give unrelated keys.
ORDER, CPU_BATCH, SAMPLE, BATCH, WORKERS = range(5)


def key_of(*parts: int) -> int:
    """A 63-bit hash of all parts and their order, the same on every machine and version."""
    packed = b"".join(part.to_bytes(16, "little", signed=True) for part in parts)
    return int.from_bytes(blake2b(packed, digest_size=8).digest(), "little") >> 1


@contextmanager
def forked(devices: Sequence[Any] = ()) -> Iterator[Callable[[int], None]]:
    """A context that yields a function to seed the global generators of Python, NumPy and PyTorch from a key.

    It includes those of CUDA ``devices``. At the end all states are restored.

    Inside, PyTorch uses one CPU thread, as in a DataLoader's workers: sums are the same in both places, and small
    images are not split among threads that compete with the pipe.

    NOTE: generators belong to the process, not to a thread. Use it only on the training thread or in a worker process:
    elsewhere, a dropout running at the same time would draw the wrong numbers.
    """
    # NOTE: do not use torch.manual_seed, which reseeds every CUDA device.
    generators = [torch.default_generator]
    for device in devices:
        if device.type == "cuda":
            torch.cuda.init()
            generators.append(torch.cuda.default_generators[device.index])
    states = [generator.get_state() for generator in generators]
    python, numpy = random.getstate(), np.random.get_state()
    threads = torch.get_num_threads()

    def seed(key: int) -> None:
        random.seed(key)
        np.random.seed(key & 0xFFFFFFFF)
        for generator in generators:
            generator.manual_seed(key)

    torch.set_num_threads(1)
    try:
        yield seed
    finally:
        torch.set_num_threads(threads)
        random.setstate(python)
        np.random.set_state(numpy)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


@dataclass(frozen=True)
class PlannedBatch:
    """Batch ``number`` of its epoch; ``on_cpu``: use ``transforms_cpu``.

    ``repeats``: how often each sample occurred earlier in the epoch.
    """

    number: int
    indices: tuple[int, ...]
    on_cpu: bool
    repeats: tuple[int, ...] = ()


class Planner:
    """Draws the order of each epoch from the DataLoader's own sampler, seeded by (seed, epoch).

    A generator inside a sampler is seeded, too, so that the order never depends on earlier draws. It calls
    ``set_epoch`` of samplers, and notices when the program does.
    """

    def __init__(self, dataloader: Any, seed: int, cpu_percentage: float) -> None:
        self._batches = dataloader.batch_sampler
        self._samplers = list({id(sampler): sampler for sampler in samplers_of(dataloader)}.values())
        self._epochs = [SamplerEpoch(sampler) for sampler in self._samplers if hasattr(sampler, "set_epoch")]
        self._most = 10 * (length_of(dataloader.dataset) or 0) + MOST_SAMPLES
        self._seed, self._cpu_percentage = seed, cpu_percentage

    def plan(self, epoch: int) -> list[PlannedBatch]:
        """All batches of this rank. ``TrainingError`` for an endless sampler."""
        for each in self._epochs:
            each.set(epoch)
        attributes = [getattr(sampler, "generator", None) for sampler in self._samplers]
        generators = [each for each in attributes if isinstance(each, torch.Generator)]
        states = [generator.get_state() for generator in generators]
        key = key_of(ORDER, self._seed, epoch)
        try:
            for generator in generators:
                generator.manual_seed(key)
            with forked() as seed:
                seed(key)
                return self._drawn(epoch)
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)

    def take_chosen_epoch(self) -> int | None:
        """The epoch that the program has set in a sampler since the last call or plan, if any."""
        chosen = [each.take_chosen() for each in self._epochs]
        return next((epoch for epoch in chosen if epoch is not None), None)

    def close(self) -> None:
        """Leave the samplers as they were. Idempotent."""
        for each in self._epochs:
            each.restore()

    def _drawn(self, epoch: int) -> list[PlannedBatch]:
        plan: list[PlannedBatch] = []
        counts: Counter[int] = Counter()
        total = 0
        for number, drawn in enumerate(self._batches):
            indices = tuple(map(operator.index, drawn))
            repeats: list[int] = []
            for index in indices:
                repeats.append(counts[index])
                counts[index] += 1
            total += len(indices)
            if total > self._most:
                problem = f"the sampler gave more than {self._most} samples for one epoch, and does not end"
                raise TrainingError(f"{problem}; epochs are planned before they begin: let it end, and call reset()")
            # The same on every rank: ranks wait for each other, so all should be slow at the same step.
            share = random.Random(key_of(CPU_BATCH, self._seed, epoch, number)).random()
            plan.append(PlannedBatch(number, indices, share < self._cpu_percentage, tuple(repeats)))
        return plan


class SamplerEpoch:
    """The epoch of a sampler with ``set_epoch``: the one that is planned, and the one that the program has set.

    It takes the place of the sampler's ``set_epoch``, since the call of a program that sets the same number again is
    a choice, too. An ``epoch`` other than 0 that the sampler has at the beginning is one.
    """

    def __init__(self, sampler: Any) -> None:
        known = sampler.set_epoch
        self._other = known if isinstance(known, SamplerEpoch) else None  # of a loader with the same sampler
        self._set: Callable[[int], object] = known if self._other is None else self._other._set
        self._sampler, self._first = sampler, getattr(sampler, "epoch", None)
        self._is_restored = False
        self._chosen = self._first if isinstance(self._first, int) and self._first else None
        with suppress(AttributeError):  # one with slots: its epochs are always the loader's
            sampler.set_epoch = self

    def __call__(self, epoch: int) -> None:
        """As the program calls it."""
        (self._other or self._set)(epoch)
        self._chosen = operator.index(epoch)

    def set(self, epoch: int) -> None:
        """Set the epoch that is planned."""
        self._set(epoch)
        self._chosen = None

    def take_chosen(self) -> int | None:
        """The epoch that the program has set since the last ``set`` or ``take_chosen``."""
        chosen, self._chosen = self._chosen, None
        return chosen

    def restore(self) -> None:
        """Give the sampler its own ``set_epoch`` and its first ``epoch`` back. Idempotent."""
        self._is_restored = True
        if getattr(self._sampler, "__dict__", {}).get("set_epoch") is not self:
            return
        del self._sampler.set_epoch
        other = self._other
        while other is not None and other._is_restored:
            other = other._other
        if other is not None:
            self._sampler.set_epoch = other
        elif self._first is not None:
            self._sampler.set_epoch(self._first)


def samplers_of(dataloader: Any) -> list[Any]:
    """The DataLoader's sampler, its batch sampler, and the batch sampler's own sampler."""
    batches = dataloader.batch_sampler
    return [dataloader.sampler, batches, getattr(batches, "sampler", None)]


def digest_of(plan: Sequence[PlannedBatch]) -> str:
    """A digest of a plan, equal for equal batches."""
    digest = blake2b(digest_size=8)
    for planned in plan:
        digest.update(repr(planned.indices).encode())
    return digest.hexdigest()


def length_of(sized: Any) -> int | None:
    """``len(sized)``, or ``None`` if it has no length."""
    try:
        return len(sized)
    except TypeError:
        return None


class DistributedEvalSampler:
    """Assigns each sample to exactly one rank: rank r has r, r + ranks, r + 2·ranks, …

    ``DistributedSampler`` repeats some samples so that all ranks have the same number, and a validation would count
    these twice. Here some ranks have one sample less; ``wrap_dataloader_torchpipe`` equalises the steps with batches
    that are masked as a whole. ``num_replicas`` and ``rank`` default to those of the process group.
    """

    def __init__(self, dataset: Sized, num_replicas: int | None = None, rank: int | None = None) -> None:
        if num_replicas is None or rank is None:
            if not (dist.is_available() and dist.is_initialized()):
                raise TrainingError("DistributedEvalSampler needs num_replicas and rank, or a process group")
            num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
            rank = dist.get_rank() if rank is None else rank
        if not 0 <= rank < num_replicas:
            raise ValueError(f"rank {rank} is not in 0..{num_replicas - 1}")
        self.num_replicas, self.rank = num_replicas, rank
        self._indices = range(rank, len(dataset), num_replicas)

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices)

    def __len__(self) -> int:
        return len(self._indices)
