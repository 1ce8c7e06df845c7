"""BackgroundIterator, BatchFeeder, CudaPrefetcher: bounded, honest about errors, gone when closed."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from fakes import WAIT, eventually
from torch.utils.data import DataLoader

from torchpipe_py.training import BackgroundIterator, BatchFeeder, CudaPrefetcher


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
    """What so many threads took of them, and the errors that ended it, one for each thread at most."""
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


def test_a_thread_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("no thread is left")

    monkeypatch.setattr(threading.Thread, "start", start)
    feeder = BackgroundIterator.__new__(BackgroundIterator)
    with pytest.raises(RuntimeError, match="no thread is left"):
        feeder.__init__(Source(1))
    feeder.close()


def test_items_come_in_order() -> None:
    with BackgroundIterator(Source(100), depth=3) as items:
        assert list(items) == list(range(100))
        assert list(items) == []


def test_it_runs_ahead_only_so_far() -> None:
    source = Source(100)
    with BackgroundIterator(source, depth=3) as items:
        eventually(lambda: source.given == 4)  # three ready, one in hand
        assert next(items) == 0
        eventually(lambda: source.given == 5)
        assert items.is_ready
    assert source.given <= 6


def test_an_error_comes_after_the_items_before_it_and_stays() -> None:
    with BackgroundIterator(Source(2, ArithmeticError("here"))) as items:
        assert [next(items), next(items)] == [0, 1]
        for _ in range(2):
            with pytest.raises(ArithmeticError, match="here"):
                next(items)


def test_closing_ends_the_thread_and_the_generator() -> None:
    ended = threading.Event()

    def source() -> Iterator[int]:
        try:
            yield from range(1000)
        finally:
            ended.set()

    items = BackgroundIterator(source(), depth=1, name="torchpipe-test")
    assert next(items) == 0
    items.close()
    items.close()
    assert ended.is_set()
    assert list(items) == []


def test_dropping_it_ends_the_thread() -> None:
    items = BackgroundIterator(Source(1000), depth=1, name="torchpipe-test")
    next(items)
    del items
    gc.collect()
    assert not [thread for thread in threading.enumerate() if thread.name == "torchpipe-test"]


def test_several_consumers_share_the_items() -> None:
    with BackgroundIterator(Source(200), depth=4) as items:
        taken, _ = consume(items, 4)
    assert sorted(taken) == list(range(200))


def test_a_depth_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BackgroundIterator([], depth=0)


def test_a_feeder_gives_each_result_to_one_consumer() -> None:
    at_once, most = 0, 0
    lock = threading.Lock()

    def source() -> Iterator[int]:
        nonlocal at_once, most
        for number in range(300):
            with lock:
                at_once += 1
                most = max(most, at_once)
            with lock:
                at_once -= 1
            yield number

    with BatchFeeder(source(), lambda number: -number, threads=4, depth=3) as feeder:
        taken, _ = consume(feeder, 3)
    assert sorted(taken) == list(range(-299, 1))
    assert most == 1


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


def test_closing_a_feeder_ends_its_threads() -> None:
    feeder = BatchFeeder(Source(1000), lambda number: number, threads=3, depth=2)
    next(feeder)
    threads = feeder._threads
    feeder.close()
    feeder.close()
    assert not any(thread.is_alive() for thread in threads)
    with pytest.raises(ValueError, match="at least 1 thread"):
        BatchFeeder([], print, threads=0)


class Pair(NamedTuple):
    images: Any
    names: list[str]


def test_the_prefetcher_is_plain_iteration_on_the_cpu() -> None:
    values = list(torch.arange(6.0))
    prefetcher = CudaPrefetcher(DataLoader(values, batch_size=2), device="cpu", transform=lambda batch: batch * 2)  # type: ignore[arg-type]
    assert len(prefetcher) == 3
    for _ in range(2):
        assert [batch.tolist() for batch in prefetcher] == [[0, 2], [4, 6], [8, 10]]


def test_the_prefetcher_keeps_the_structure_of_a_batch() -> None:
    batch = {"pair": Pair(torch.ones(2), ["a"]), "list": [torch.zeros(1), 5], "tuple": (1, "x")}
    (moved,) = CudaPrefetcher([batch], device="cpu")
    assert isinstance(moved["pair"], Pair)
    assert moved["pair"].names == ["a"]
    assert moved["list"][1] == 5
    assert moved["tuple"] == (1, "x")


def test_the_prefetcher_passes_errors_on() -> None:
    prefetcher = iter(CudaPrefetcher(Source(1, ArithmeticError("here")), device="cpu"))
    assert next(prefetcher) == 0
    with pytest.raises(ArithmeticError):
        next(prefetcher)
