"""BackgroundIterator, BatchFeeder, CudaPrefetcher, and the generators that a block may reseed."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from kit.waits import WAIT, eventually
from torch.utils.data import DataLoader

from torchpipe_py.training import BackgroundIterator, BatchFeeder, CudaPrefetcher
from torchpipe_py.training.batcher import LoaderStatistics
from torchpipe_py.training.loader import Source as BatchSource
from torchpipe_py.training.plan import PlannedBatch, forked, key_of
from torchpipe_py.training.prefetch import SideStreams
from torchpipe_py.training.workers.transfer import ReadResult


class Source:
    """Counts up to ``count``, remembers how far it came, and may end with an error."""

    def __init__(self, count: int, error: Exception | None = None) -> None:
        self.count, self.error = count, error
        self.given = 0

    def __iter__(self) -> Iterator[int]:
        for number in range(self.count):
            self.given = number + 1
            yield number
        if self.error is not None:
            raise self.error


def consume(items: Iterator[int], consumers: int) -> tuple[list[int], list[str]]:
    """The items that ``consumers`` threads took, and the errors that ended them, at most one each."""
    taken: list[int] = []
    errors: list[str] = []

    def run() -> None:
        try:
            taken.extend(items)
        except ArithmeticError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=run) for _ in range(consumers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    return taken, errors


def test_background_iterator_keeps_the_order_and_runs_ahead_only_so_far() -> None:
    source = Source(100)
    with BackgroundIterator(source, depth=3) as items:
        eventually(lambda: source.given == 4)  # three ready, one in hand
        assert next(items) == 0
        eventually(lambda: source.given == 5)
        assert items.is_ready
        assert [*items, *items] == list(range(1, 100))


def test_error_is_raised_after_earlier_items_and_again() -> None:
    with BackgroundIterator(Source(2, ArithmeticError("here"))) as items:
        assert [next(items), next(items)] == [0, 1]
        for _ in range(2):
            with pytest.raises(ArithmeticError, match="here"):
                next(items)


@pytest.mark.parametrize("drops", [True, False])
def test_closing_or_dropping_ends_thread_and_generator(drops: bool) -> None:
    ended = threading.Event()

    def source() -> Iterator[int]:
        try:
            yield from range(1000)
        finally:
            ended.set()

    items = BackgroundIterator(source(), depth=1, name="torchpipe-test")
    assert next(items) == 0
    if drops:
        del items
        gc.collect()
    else:
        items.close()
        items.close()
        assert list(items) == []
    assert ended.is_set()
    assert not [thread for thread in threading.enumerate() if thread.name == "torchpipe-test"]


def test_a_feeder_gives_each_result_to_one_consumer() -> None:
    inside = threading.Semaphore(1)

    def source() -> Iterator[int]:
        for number in range(300):
            assert inside.acquire(blocking=False)
            inside.release()
            yield number

    with BatchFeeder(source(), lambda number: -number, threads=4, depth=3) as feeder:
        taken, _ = consume(feeder, 3)
    assert sorted(taken) == list(range(-299, 1))


@pytest.mark.parametrize("in_source", [True, False])
def test_an_error_in_a_feeder_reaches_every_consumer(in_source: bool) -> None:
    def work(number: int) -> int:
        if number == 5 and not in_source:
            raise ArithmeticError("here")
        return number

    source = Source(8, ArithmeticError("here") if in_source else None)
    with BatchFeeder(source, work, threads=2, depth=2) as feeder:
        _, errors = consume(feeder, 3)
    assert errors == ["here"] * 3


@pytest.mark.parametrize("counts", [{"threads": 0}, {"depth": 0}])
def test_a_feeder_needs_threads_and_room(counts: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1 thread"):
        BatchFeeder([], print, **counts)


class Pair(NamedTuple):
    images: Any
    names: list[str]


def test_reading_thread_ends_if_decoding_fails() -> None:
    """It then waits for room to start one batch more."""
    has_read_on, before = threading.Event(), set(threading.enumerate())

    def read(epoch: int, plan: list[PlannedBatch]) -> Iterator[ReadResult]:
        for planned in plan:
            if planned.number == 2:
                has_read_on.set()
            yield ReadResult(samples=[])

    def fail() -> list[Any]:
        assert has_read_on.wait(WAIT)
        raise ArithmeticError("a bug")

    batcher = SimpleNamespace(statistics=LoaderStatistics(), aside=SideStreams([]))
    parts: tuple[Any, ...] = SimpleNamespace(read=read), SimpleNamespace(start=lambda samples: fail), batcher, 1
    batches = BatchSource(*parts).ahead(0, [PlannedBatch(number, (), False) for number in range(4)], 1)
    with pytest.raises(ArithmeticError, match="a bug"):
        next(batches)
    assert not [each for each in threading.enumerate() if each.name == "torchpipe-read" and each not in before]


def test_the_prefetcher_is_plain_iteration_on_the_cpu() -> None:
    loader: Any = DataLoader(list(torch.arange(6.0)), batch_size=2)  # type: ignore[arg-type]
    prefetcher = CudaPrefetcher(loader, device="cpu", transform=lambda batch: batch * 2)
    assert len(prefetcher) == 3
    for _ in range(2):
        assert [batch.tolist() for batch in prefetcher] == [[0, 2], [4, 6], [8, 10]]
    batch = {"pair": Pair(torch.ones(2), ["a"]), "list": [torch.zeros(1), 5], "tuple": (1, "x")}
    (moved,) = CudaPrefetcher([batch], device="cpu")
    assert isinstance(moved["pair"], Pair)
    assert (moved["pair"].names, moved["list"][1], moved["tuple"]) == (["a"], 5, (1, "x"))
    failing = iter(CudaPrefetcher(Source(1, ArithmeticError("here")), device="cpu"))
    assert next(failing) == 0
    with pytest.raises(ArithmeticError):
        next(failing)


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(1))


def test_generators_come_back_as_they_were() -> None:
    for start in (random.seed, np.random.seed, torch.manual_seed):
        start(1)
    expected = drawn()
    for start in (random.seed, np.random.seed, torch.manual_seed):
        start(1)
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
    assert key_of(1, 2, 3) == 6839638155163434425  # on every machine and version
    assert len({key_of(*parts) for parts in ((0, 0), (0, 1), (1, 0), (0, 0, 0), (-1, 0), (0,), (2**62, 5))}) == 7
