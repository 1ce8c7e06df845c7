"""The wrapped DataLoader: parity with the pipe, determinism, epochs, resuming, closing."""

from __future__ import annotations

import copy
import gc
import itertools
import multiprocessing
import os
import pickle
import random
import signal
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import eventually
from torch.utils.data import DataLoader, RandomSampler
from training_data import FORKS, OnTheCpu, RandomOffset, same, taken, wrapped, write_toml

from torchpipe_py import pipe
from torchpipe_py.training import ImageFiles, TensorToTensor, TrainingError, wrap_dataloader_torchpipe
from torchpipe_py.training.batcher import LoaderStatistics
from torchpipe_py.training.prefetch import SideStreams

pytestmark = FORKS


def threads() -> set[threading.Thread]:
    """All but those with which PyTorch feeds its workers: they end a moment after those."""
    return {thread for thread in threading.enumerate() if thread.name != "QueueFeederThread"}


@contextmanager
def generators_are_left_alone() -> Iterator[None]:
    def states() -> bytes:
        return pickle.dumps((random.getstate(), np.random.get_state(), torch.get_rng_state().numpy()))

    before = states()
    yield
    assert states() == before


def test_a_batch_is_what_the_pipe_gives_for_each_image(dataset: ImageFiles, toml: str) -> None:
    with wrapped(dataset, toml, transforms_gpu=None) as loader, pipe(toml) as run:
        seen = []
        for images, labels in loader:
            for image, label in zip(images, labels, strict=True):
                encoded, expected = dataset[len(seen)]
                run(data := {"data": encoded})
                assert torch.equal(image[None], data["result"])
                assert int(label) == expected
                seen.append(label)
        assert len(seen) == 11


def test_the_usual_loop(dataset: ImageFiles, toml: str) -> None:
    with wrapped(dataset, toml, shuffle=True) as loader:
        assert len(loader) == 3
        assert len(loader.dataset) == 11
        orders = []
        for _ in range(2):
            batches = list(loader)
            assert [tuple(images.shape) for images, _ in batches] == [(4, 3, 24, 20)] * 2 + [(3, 3, 24, 20)]
            assert all(images.dtype == torch.float32 and images.max() <= 1 for images, _ in batches)
            orders.append([int(index) for batch in batches for index in batch.indices])
            loader.reset()
        assert sorted(orders[0]) == sorted(orders[1]) == list(range(11))
        assert orders[0] != orders[1]
        assert loader.epoch == 2


@pytest.mark.parametrize("place", [(SideStreams, "hand_over"), (LoaderStatistics, "count")])
def test_a_batch_at_which_ctrl_c_comes_is_read_again(
    dataset: ImageFiles, toml: str, place: tuple[type, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name = place
    work = getattr(owner, name)
    interrupts = iter([False, True])

    def interrupted(*args: Any, **numbers: int) -> None:
        work(*args, **numbers)
        if next(interrupts, False):
            raise KeyboardInterrupt

    with wrapped(dataset, toml) as loader:
        expected = taken(loader)
        loader.reset(0)
        monkeypatch.setattr(owner, name, interrupted)
        seen: list[Any] = []
        while len(seen) < len(expected):
            try:
                before = loader.state_dict()
                seen += [next(loader)]
            except KeyboardInterrupt:
                assert loader.state_dict() == before
        assert [batch.indices.tolist() for batch in seen] == [batch[2] for batch in expected]
        assert next(interrupts, None) is None


@pytest.mark.parametrize("workers", [1, 3])
def test_batches_are_the_same_for_any_number_of_workers(dataset: ImageFiles, tmp_path: Path, workers: int) -> None:
    options: dict[str, Any] = {
        "transforms_gpu": RandomOffset(),
        "transforms_cpu": OnTheCpu(),
        "cpu_percentage": 0.5,
        "shuffle": True,
    }
    epochs = []
    for count, prefetch, instances in ((0, 0, 1), (workers, 1, 3), (workers, 7, 2)):
        torch.manual_seed(count)  # of no consequence
        with wrapped(dataset, write_toml(tmp_path, instances), workers=count, prefetch=prefetch, **options) as loader:
            epochs.append([])
            for _ in range(3):
                epochs[-1] += taken(loader)
                loader.reset()
    assert same(epochs[0], epochs[1])
    assert same(epochs[0], epochs[2])
    assert {batch[4] for batch in epochs[0]} == {True, False}
    assert len({float(batch[0].sum()) for batch in epochs[0]}) == 9  # and every epoch differs


def test_a_sample_is_augmented_alike_in_any_batch(dataset: ImageFiles, toml: str) -> None:
    images_of_epochs = []
    for size in (3, 5):
        with wrapped(dataset, toml, batch_size=size, transforms_gpu=RandomOffset()) as loader:
            images_of_epochs.append(torch.cat([images for images, _ in loader]))
    assert torch.equal(images_of_epochs[0], images_of_epochs[1])
    drawn = images_of_epochs[0].reshape(11, -1).min(dim=1).values
    assert len({round(float(offset), 4) for offset in drawn}) == 11


@pytest.mark.parametrize("options", [{"workers": 0}, {"workers": 2}, {"workers": 2, "cpu_percentage": 1.0}])
def test_a_sample_that_comes_again_in_an_epoch_is_augmented_anew(
    dataset: ImageFiles, toml: str, options: dict[str, Any]
) -> None:
    workers = options.pop("workers")

    def images(*indices: int) -> Any:
        plain = DataLoader(dataset, 3, sampler=indices, num_workers=workers)  # type: ignore[arg-type]
        options["transforms_cpu"] = OnTheCpu()
        with wrap_dataloader_torchpipe("single", plain, toml, RandomOffset(), **options) as loader:
            return torch.cat([batch.images for batch in loader])

    drawn = images(3, 3, 5, 3)
    assert torch.equal(drawn, images(3, 3, 5, 3))
    assert torch.equal(drawn[[0, 2]], images(3, 5))  # as where nothing comes again
    assert len({float(image[0, 0, 0]) for image in drawn[[0, 1, 3]]}) == 3


def test_seeds_differ(dataset: ImageFiles, toml: str) -> None:
    epochs = []
    for seed in (0, 1):
        with wrapped(dataset, toml, transforms_gpu=RandomOffset(), seed=seed) as loader:
            epochs.append(taken(loader))
    assert not same(epochs[0], epochs[1])


@pytest.mark.parametrize("workers", [0, 2])
def test_the_programs_generators_are_left_alone(dataset: ImageFiles, toml: str, workers: int) -> None:
    with generators_are_left_alone():
        loader = wrapped(
            dataset,
            toml,
            workers=workers,
            shuffle=True,
            transforms_gpu=RandomOffset(),
            transforms_cpu=OnTheCpu(),
            cpu_percentage=0.5,
            transforms_batch=lambda images: images + torch.rand(1),
        )
        with loader:
            taken(loader)
            loader.reset()
            next(loader)
    with generators_are_left_alone(), wrapped(dataset, toml, transforms_gpu=TensorToTensor()) as loader:
        loader._options.__dict__["transforms_gpu"] = lambda image: [random.random(), 1 / 0]
        with pytest.raises(TrainingError, match="division by zero"):
            next(loader)


def test_the_order_does_not_depend_on_a_generators_past(dataset: ImageFiles, toml: str) -> None:
    orders = []
    for past in (0, 5):
        generator = torch.Generator()
        generator.manual_seed(past)
        sampler = RandomSampler(dataset, generator=generator)
        before = generator.get_state()
        plain = DataLoader(dataset, batch_size=4, sampler=sampler)
        with wrap_dataloader_torchpipe("single", plain, toml) as loader:
            orders.append([batch.indices.tolist() for batch in loader])
        assert torch.equal(generator.get_state(), before)
    assert orders[0] == orders[1]


def test_transforms_batch_sees_the_whole_batch_under_its_key(dataset: ImageFiles, toml: str) -> None:
    shapes: list[Any] = []

    def normalise(images: Any) -> Any:
        shapes.append(tuple(images.shape))
        return images - torch.rand(1)

    epochs = []
    for _ in range(2):
        with wrapped(dataset, toml, transforms_batch=normalise) as loader:
            epochs.append(taken(loader))
    assert same(epochs[0], epochs[1])
    assert shapes[:3] == [(4, 3, 24, 20), (4, 3, 24, 20), (3, 3, 24, 20)]


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0), (1.0, 3)])
def test_the_share_of_transforms_cpu(dataset: ImageFiles, toml: str, share: float, expected: int) -> None:
    with wrapped(dataset, toml, transforms_cpu=OnTheCpu(), cpu_percentage=share) as loader:
        assert sum(batch[4] for batch in taken(loader)) == expected == loader.stats()["cpu_batches"]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop_after", [0, 1, 2, 3])
def test_resuming_gives_the_batches_that_were_left(
    dataset: ImageFiles, toml: str, workers: int, stop_after: int
) -> None:
    options: dict[str, Any] = {"transforms_gpu": RandomOffset(), "shuffle": True, "workers": workers, "prefetch": 2}
    with wrapped(dataset, toml, **options) as loader:
        loader.reset(epoch=4)
        for _ in range(stop_after):
            next(loader)
        state = pickle.loads(pickle.dumps(loader.state_dict()))
        left = taken(loader)
        loader.reset()
        following = taken(loader)
    with wrapped(dataset, toml, **options) as resumed:
        resumed.load_state_dict(state)
        assert same(taken(resumed), left)
        resumed.reset()
        assert same(taken(resumed), following)
        resumed.load_state_dict(state)
        assert same(taken(resumed), left)
    assert len(left) == 3 - stop_after


def test_a_state_of_another_training_is_refused(dataset: ImageFiles, toml: str) -> None:
    with wrapped(dataset, toml) as loader:
        state = loader.state_dict()
        with pytest.raises(TrainingError, match="seed = 7, here it is 0"):
            loader.load_state_dict({**state, "seed": 7})
        with pytest.raises(TrainingError, match="batches = 9"):
            loader.load_state_dict({**state, "batches": 9})
        with pytest.raises(TrainingError, match="version None"):
            loader.load_state_dict({})


class Shuffled:
    """A sampler with a generator of its own, which the loader cannot start anew."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __iter__(self) -> Iterator[int]:
        return iter(self.generator.permutation(11).tolist())

    def __len__(self) -> int:
        return 11


def test_a_sampler_that_gives_another_order_is_told(dataset: ImageFiles, toml: str) -> None:
    def shuffled() -> Any:
        plain = DataLoader(dataset, 4, sampler=Shuffled())  # type: ignore[arg-type]
        return wrap_dataloader_torchpipe("single", plain, toml)

    with shuffled() as loader:
        assert sorted(index for batch in loader for index in batch.indices.tolist()) == list(range(11))
        loader.reset()
        next(loader)
        state = loader.state_dict()
    with shuffled() as resumed:
        resumed.load_state_dict(state)
        with pytest.raises(TrainingError, match="does not give epoch 1 in the order in which its first batches"):
            iter(resumed)
        resumed.reset(1)
        assert sum(len(batch.indices) for batch in resumed) == 11
        resumed.load_state_dict({key: value for key, value in state.items() if key != "order"})  # an older version's
        assert [batch.number for batch in resumed] == [1, 2]


class Endless:
    """A sampler."""

    def __iter__(self) -> Iterator[int]:
        return itertools.cycle(range(11))


def test_a_sampler_without_an_end_is_told(dataset: ImageFiles, toml: str) -> None:
    plain = DataLoader(dataset, 4, sampler=Endless())  # type: ignore[arg-type]
    with (
        wrap_dataloader_torchpipe("single", plain, toml) as loader,
        pytest.raises(TrainingError, match="more than 1000110 samples for one epoch, and does not end"),
    ):
        next(loader)


class Unsized:
    """A dataset."""

    def __init__(self, dataset: ImageFiles) -> None:
        self._dataset = dataset

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]


def test_a_dataset_without_a_length(dataset: ImageFiles, toml: str) -> None:
    plain = DataLoader(Unsized(dataset), 4, sampler=range(5))  # type: ignore[arg-type]
    with wrap_dataloader_torchpipe("single", plain, toml) as loader:
        assert [batch.indices.tolist() for batch in loader] == [[0, 1, 2, 3], [4]]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_loader_cannot_be_copied(dataset: ImageFiles, toml: str, copied: Any) -> None:
    with wrapped(dataset, toml) as loader, pytest.raises(TypeError, match="a loader has threads and workers"):
        copied(loader)


@pytest.mark.parametrize("options", [{}, {"workers_decode": True}])
def test_workers_stay_when_ctrl_c_comes(dataset: ImageFiles, toml: str, options: dict[str, Any]) -> None:
    before = set(multiprocessing.active_children())
    with wrapped(dataset, toml, batch_size=1, workers=2, **options) as loader:
        for _ in range(2):  # of each worker, so that both have begun
            next(loader)
        for worker in set(multiprocessing.active_children()) - before:
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGINT)
        assert [batch.number for batch in loader] == list(range(2, 11))
        loader.reset()
        assert len(taken(loader)) == 11


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_that_stops_early(dataset: ImageFiles, toml: str, workers: int) -> None:
    with wrapped(dataset, toml, workers=workers, prefetch=1) as loader:
        for _ in loader:
            break
        assert [batch.number for batch in loader] == [1, 2]  # goes on
        loader.reset()
        for _ in loader:
            break
        loader.reset()  # drops the rest
        assert [batch.number for batch in loader] == [0, 1, 2]


def test_an_epoch_that_is_over_is_not_an_empty_one(dataset: ImageFiles, toml: str) -> None:
    with wrapped(dataset, toml) as loader:
        list(loader)
        with pytest.raises(TrainingError, match=r"epoch 0 is over: call reset\(\)"):
            list(loader)
        with pytest.raises(StopIteration):
            next(loader)


def test_closing_ends_all_threads_and_workers(dataset: ImageFiles, toml: str) -> None:
    before, children = threads(), set(multiprocessing.active_children())
    loader = wrapped(dataset, toml, workers=2, prefetch=1)
    next(loader)
    workers = set(multiprocessing.active_children()) - children
    assert len(workers) == 2
    loader.close()
    loader.close()
    assert threads() <= before
    assert not any(worker.is_alive() for worker in workers)
    with pytest.raises(TrainingError, match="closed"):
        next(loader)
    with pytest.raises(TrainingError, match="closed"):
        loader.reset()


def test_an_exception_in_the_loop_ends_all_threads(dataset: ImageFiles, toml: str) -> None:
    before = threads()

    def train() -> None:
        with wrapped(dataset, toml, workers=1, prefetch=1) as loader:
            for _ in loader:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert threads() <= before


def test_a_loader_that_is_dropped_ends_its_threads(dataset: ImageFiles, toml: str) -> None:
    before = threads()
    loader = wrapped(dataset, toml, workers=1, prefetch=1)
    next(loader)
    gone = weakref.ref(loader)
    del loader
    gc.collect()
    assert gone() is None
    eventually(lambda: threads() <= before)  # where a thread of the loader had the pipe last, another one ends that


def test_statistics(dataset: ImageFiles, toml: str) -> None:
    with wrapped(dataset, toml) as loader:
        list(loader)
        stats = loader.stats()
    assert (stats["samples"], stats["batches"], stats["skipped"], stats["masked"]) == (11, 3, 0, 0)
    assert stats["wait_s"] > 0
    assert stats["busy_s"] > 0
    assert 0 < stats["stall_share"] < 1
    assert stats["samples_per_s"] > 0
    assert all(stats["stages_s"][name] > 0 for name in ("read", "decode", "transform"))


@pytest.mark.parametrize("gather", [True, False])
def test_dp_deals_the_batch_out(dataset: ImageFiles, toml: str, gather: bool) -> None:
    plain = DataLoader(dataset, batch_size=4)
    with wrapped(dataset, toml) as loader:
        expected = taken(loader)
    with wrap_dataloader_torchpipe(
        "DP", plain, toml, TensorToTensor(), devices=["cpu", "cpu", "cpu"], gather=gather
    ) as loader:
        assert len(loader.devices) == 3
        if gather:
            assert same(taken(loader), expected)
            return
        for batch, (images, labels, *_) in zip(loader, expected, strict=True):
            assert [len(part) for part in batch.images] == [len(part) for part in batch.labels]
            assert len(batch.images) == (2 if len(images) == 4 else 3)
            assert torch.equal(torch.cat(batch.images), images)
            assert torch.cat(batch.labels).tolist() == labels


def test_a_batch_larger_than_the_pipe_admits(dataset: ImageFiles, toml: str) -> None:
    small = Path(toml).read_text(encoding="utf-8")
    Path(toml).write_text("max_inflight = 3\n" + small, encoding="utf-8")
    with wrapped(dataset, toml, batch_size=11) as loader:
        assert len(next(loader).images) == 11
