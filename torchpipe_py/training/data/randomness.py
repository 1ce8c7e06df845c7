"""Randomness that depends on (seed, epoch, sample) and on nothing else."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

# What a key is for; the same numbers for different purposes give unrelated keys.
ORDER, CPU_BATCH, SAMPLE, BATCH, WORKERS = range(5)


def key_of(*parts: int) -> int:
    """63 bits that depend on every part and their order, the same on every machine and version."""
    packed = b"".join(part.to_bytes(16, "little", signed=True) for part in parts)
    return int.from_bytes(blake2b(packed, digest_size=8).digest(), "little") >> 1


class Fork:
    """The global generators of Python, NumPy and PyTorch while a block reseeds them."""

    def __init__(self, generators: Sequence[Any]) -> None:
        self._generators = generators

    def seed(self, key: int) -> None:
        """Start all of them from ``key``."""
        random.seed(key)
        np.random.seed(key & 0xFFFFFFFF)
        for generator in self._generators:
            generator.manual_seed(key)


@contextmanager
def forked(devices: Sequence[Any] = ()) -> Iterator[Fork]:
    """Let a block reseed the global generators, with those of CUDA ``devices``; afterwards they are as they were.

    PyTorch meanwhile works on one thread of the CPU, as it does in a DataLoader's workers: a sum is the same here and
    there, and small images are not handed to threads that the pipe keeps busy.

    NOTE: generators belong to the process, not to a thread. Only the thread that trains may do this, or a worker
    process: elsewhere a dropout in between would draw from the wrong numbers.
    """
    # NOTE: not torch.manual_seed, which reseeds every CUDA device.
    generators = [torch.default_generator, *(_of_device(device) for device in devices if device.type == "cuda")]
    states = [generator.get_state() for generator in generators]
    python, numpy = random.getstate(), np.random.get_state()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield Fork(generators)
    finally:
        torch.set_num_threads(threads)
        random.setstate(python)
        np.random.set_state(numpy)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _of_device(device: Any) -> Any:
    torch.cuda.init()
    return torch.cuda.default_generators[device.index]
