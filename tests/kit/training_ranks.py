"""The scenarios of two ranks, which ``test_training_ddp`` runs in separate processes."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from kit.training_data import RandomOffset, taken, write_images, write_toml
from torchpipe_py.training import DistributedEvalSampler, TensorToTensor, TorchpipeLoader, wrap_dataloader_torchpipe

RANKS = 2
TIMEOUT = 120
"""Seconds after which gloo gives a silent rank up; one that is only slow, as on a busy machine, is not."""


def main(rank: int, folder: str, names: list[str], have_started: Barrier) -> None:
    """Run the scenarios by name, once all ranks have started, and write down what each returned or raised.

    A rank has started when it has imported what it needs, which takes as long as the machine is busy.
    """
    place = Path(folder)
    have_started.wait()
    dist.init_process_group(
        "gloo", init_method=f"file://{place}/store", rank=rank, world_size=RANKS, timeout=timedelta(seconds=TIMEOUT)
    )
    told: dict[str, Any] = {}
    for name in names:
        home = place / f"{name}_{rank}"
        home.mkdir()
        try:
            told[name] = SCENARIOS[name](rank, home)
        except Exception as error:
            told[name] = (type(error).__name__, str(error))
        (place / f"told_{rank}.pickle").write_bytes(pickle.dumps(told))  # before the next one, which may be deadly
    dist.destroy_process_group()


Scenario = Callable[[int, Path], Any]
SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


def wrapped(
    rank: int, home: Path, dataset: Any, sampler: Any = None, workers: int = 0, toml: str = "", **options: Any
) -> TorchpipeLoader:
    sampler = sampler or DistributedEvalSampler(dataset)
    loader = DataLoader(dataset, batch_size=2, sampler=sampler, num_workers=workers)
    given = {"transforms_gpu": TensorToTensor(), "local_rank": rank, **options}
    return wrap_dataloader_torchpipe("ddp", loader, toml or write_toml(home), **given)


def steps(loader: TorchpipeLoader) -> list[tuple[list[int], list[bool], list[int]]]:
    """Indices, mask and labels of each step."""
    with loader:
        return [(batch.indices.tolist(), batch.mask.tolist(), batch.labels.tolist()) for batch in loader]


def some_bad(rank: int, home: Path, **options: Any) -> Any:
    """Rank 0 has 0, 2, 4, 6, 8: a whole batch of it, and one sample of another, are bad."""
    loader = wrapped(rank, home, write_images(home / "images", 9, corrupt=[4, 6, 8]), **options)
    return steps(loader), len(loader), loader.stats()["filler_batches"]


def takes_all_steps(count: int = 4, **options: Any) -> Scenario:
    """``options``, with their value for rank 0 and rank 1 where they are a list."""

    def run(rank: int, home: Path) -> Any:
        given = {name: value[rank] if isinstance(value, list) else value for name, value in options.items()}
        return steps(wrapped(rank, home, write_images(home / "images", count), **given))

    return run


SCENARIOS |= {
    "validate": lambda rank, home: steps(wrapped(rank, home, write_images(home / "images", 9))),
    "skip_on_one_rank": partial(some_bad, bad_samples="skip"),
    "workers_decode_and_skip_on_one_rank": partial(some_bad, workers=1, bad_samples="skip", workers_decode=True),
    "mask_on_one_rank": partial(some_bad, bad_samples="mask"),
    "fewer_samples_than_ranks": takes_all_steps(1),
    "a_toml_is_missing_on_one_rank": takes_all_steps(toml=["", "missing.toml"]),
    "no_local_rank": takes_all_steps(local_rank=None),
    "no_distributed_sampler": takes_all_steps(sampler=range(4)),
    "seeds_differ": takes_all_steps(seed=[0, 1]),
}


@scenario
def raise_on_one_rank(rank: int, home: Path) -> Any:
    with wrapped(rank, home, write_images(home / "images", 9, corrupt=[6])) as loader:
        assert next(loader).number == 0
        next(loader)


class BrokenOnRank1:
    """A sampler."""

    def __init__(self, rank: int) -> None:
        self.rank, self.num_replicas = rank, RANKS

    def __iter__(self) -> Iterator[int]:
        if self.rank == 1:
            raise ArithmeticError("no order")
        return iter(range(2))


@scenario
def a_sampler_raises_on_one_rank(rank: int, home: Path) -> Any:
    dataset = write_images(home / "images", 4)
    with wrapped(rank, home, dataset, BrokenOnRank1(rank)) as loader:
        try:
            next(iter(loader))
        except Exception:
            next(iter(loader))  # the same again, until reset


@scenario
def train_and_resume(rank: int, home: Path) -> Any:
    dataset = write_images(home / "images", 10)
    options: dict[str, Any] = {"transforms_gpu": RandomOffset()}
    sampler = DistributedSampler(dataset, shuffle=True)  # type: ignore[arg-type]
    with wrapped(rank, home, dataset, sampler, **options) as loader:
        orders = []
        for _ in range(2):
            orders.append([index for batch in loader for index in batch.indices.tolist()])
            loader.reset()
        next(loader)
        state = loader.state_dict()
        left = taken(loader)
    sampler = DistributedSampler(dataset, shuffle=True)  # type: ignore[arg-type]
    with wrapped(rank, home, dataset, sampler, **options) as loader:
        loader.load_state_dict(state)
        resumed = taken(loader)
    return orders, left, resumed


@scenario
def a_rank_dies(rank: int, home: Path) -> Any:
    """The other's error, and how many seconds it came after a batch."""
    with wrapped(rank, home, write_images(home / "images", 40)) as loader:
        try:
            for batch in loader:
                came = time.monotonic()
                if rank == 1 and batch.number == 3:
                    os._exit(9)
        except Exception as error:
            return type(error).__name__, time.monotonic() - came
    return "went on", 0.0
