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
from conftest import encode, picture
from kit.training_data import FORKS, OnTheCpu, RandomOffset, same, taken, wrapped, write_images, write_toml
from kit.waits import WAIT, eventually
from torch.utils.data import DataLoader, RandomSampler

from torchpipe_py import ItemBackend, parse_toml, pipe
from torchpipe_py.training import ImageFiles, TensorToTensor, TorchpipeLoader, TrainingError, wrap_dataloader_torchpipe
from torchpipe_py.training import plan as training_plan
from torchpipe_py.training.batcher import LoaderStatistics
from torchpipe_py.training.options import choose_devices
from torchpipe_py.training.prefetch import SideStreams

pytestmark = FORKS

RANDOM: dict[str, Any] = {"transforms_gpu": RandomOffset(), "transforms_cpu": OnTheCpu(), "cpu_percentage": 0.5}


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


def test_batch_equals_outputs_of_pipe(dataset: ImageFiles, toml: str) -> None:
    with wrapped(dataset, toml, transforms_gpu=None) as loader, pipe(toml) as run:
        batches = list(loader)
        assert [tuple(batch.images.shape) for batch in batches] == [(4, 3, 24, 20)] * 2 + [(3, 3, 24, 20)]
        requests = run([{"data": dataset[index][0]} for index in range(11)])
    assert torch.equal(torch.cat([batch.images for batch in batches]), torch.cat([one["result"] for one in requests]))
    assert [label for batch in batches for label in batch.labels.tolist()] == [dataset[index][1] for index in range(11)]


def test_each_epoch_has_every_sample_in_another_order(dataset: ImageFiles, toml: str) -> None:
    with wrapped(dataset, toml, shuffle=True) as loader:
        assert (len(loader), len(loader.dataset)) == (3, 11)
        orders = []
        for _ in range(2):
            orders.append([int(index) for batch in loader for index in batch.indices])
            with pytest.raises(StopIteration):
                next(loader)
            with pytest.raises(TrainingError, match=rf"epoch {loader.epoch} is over: call reset\(\)"):
                list(loader)
            loader.reset()
        stats = loader.stats()
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(11))
    assert orders[0] != orders[1]
    assert (stats["epoch"], stats["samples"], stats["batches"], stats["skipped"], stats["masked"]) == (2, 22, 6, 0, 0)
    assert min(stats["wait_s"], stats["busy_s"], stats["samples_per_s"]) > 0
    assert 0 < stats["stall_share"] < 1
    assert all(stats["stages_s"][name] > 0 for name in ("read", "decode", "transform"))


# -- the same batches, whatever makes them ----------------------------------------------------------------------------


def test_batches_are_the_same_for_any_number_of_workers(dataset: ImageFiles, tmp_path: Path) -> None:
    epochs: list[list[Any]] = []
    for workers, prefetch, instances in ((0, 0, 1), (1, 1, 3), (3, 7, 2)):
        torch.manual_seed(workers)  # of no consequence
        toml = write_toml(tmp_path, instances)
        with wrapped(dataset, toml, workers=workers, prefetch=prefetch, shuffle=True, **RANDOM) as loader:
            epochs.append([])
            for _ in range(3):
                epochs[-1] += taken(loader)
                loader.reset()
            assert 0 < loader.stats()["cpu_batches"] < 9
    assert same(epochs[0], epochs[1])
    assert same(epochs[0], epochs[2])
    assert len({float(batch[0].sum()) for batch in epochs[0]}) == 9  # and every epoch differs


def test_a_sample_is_augmented_by_seed_epoch_and_index(dataset: ImageFiles, toml: str) -> None:
    def epoch(size: int, **options: Any) -> Any:
        with wrapped(dataset, toml, batch_size=size, transforms_gpu=RandomOffset(), **options) as loader:
            return torch.cat([images for images, _ in loader])

    drawn = epoch(3)
    assert torch.equal(drawn, epoch(5))
    assert len({round(float(offset), 4) for offset in drawn.reshape(11, -1).min(dim=1).values}) == 11
    assert not torch.equal(drawn, epoch(3, seed=1))
    shapes: list[Any] = []

    def noisy(images: Any) -> Any:
        shapes.append(tuple(images.shape))
        return images - torch.rand(1)

    assert torch.equal(epoch(4, transforms_batch=noisy), epoch(4, transforms_batch=noisy))
    assert shapes[:3] == [(4, 3, 24, 20), (4, 3, 24, 20), (3, 3, 24, 20)]


@pytest.mark.parametrize("options", [{"workers": 0}, {"workers": 2}, {"workers": 2, "cpu_percentage": 1.0}])
def test_sample_repeated_in_epoch_is_augmented_anew(dataset: ImageFiles, toml: str, options: dict[str, Any]) -> None:
    share = options.get("cpu_percentage", 0.0)

    def images(*indices: int) -> Any:
        plain = DataLoader(dataset, 3, sampler=indices, num_workers=options["workers"])  # type: ignore[arg-type]
        with wrap_dataloader_torchpipe("single", plain, toml, RandomOffset(), OnTheCpu(), share) as loader:
            return torch.cat([batch.images for batch in loader])

    drawn = images(3, 3, 5, 3)
    assert torch.equal(drawn, images(3, 3, 5, 3))
    assert torch.equal(drawn[[0, 2]], images(3, 5))  # as where nothing comes again
    assert len({float(image[0, 0, 0]) for image in drawn[[0, 1, 3]]}) == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_the_programs_generators_are_left_alone(dataset: ImageFiles, toml: str, workers: int) -> None:
    calls: list[Any] = []

    def fails_later(image: Any) -> Any:
        calls.append(random.random())
        return TensorToTensor()(image) / (len(calls) < 3 or 1 / 0)

    with generators_are_left_alone(), wrapped(dataset, toml, workers=workers, shuffle=True, **RANDOM) as loader:
        taken(loader)
        loader.reset()
        next(loader)
    with (
        generators_are_left_alone(),
        wrapped(dataset, toml, transforms_gpu=fails_later) as loader,
        pytest.raises(TrainingError, match="division by zero"),
    ):
        next(loader)
    orders = []
    for past in (0, 5):
        generator = torch.Generator().manual_seed(past)  # of no consequence
        before = generator.get_state()
        plain = DataLoader(dataset, batch_size=4, sampler=RandomSampler(dataset, generator=generator))  # type: ignore[arg-type]
        with wrap_dataloader_torchpipe("single", plain, toml) as loader:
            orders.append([batch.indices.tolist() for batch in loader])
        assert torch.equal(generator.get_state(), before)
    assert orders[0] == orders[1]


def unchanged(image: Any) -> Any:
    return image


@pytest.mark.parametrize("policy", ["skip", "mask"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_batches_stacked_ahead_equal_those_of_transforms(tmp_path: Path, toml: str, policy: str, prefetch: int) -> None:
    dataset = write_images(tmp_path / "images", 14, corrupt=[1, 4, 5, 6, 7], missing=[9])
    epochs, counts = [], []
    for transforms in (None, unchanged):
        options: dict[str, Any] = {"transforms_gpu": transforms, "bad_samples": policy, "prefetch": prefetch}
        with wrapped(dataset, toml, **options) as loader:
            epochs.append(taken(loader))
            stats = loader.stats()
        counts.append([stats[key] for key in ("samples", "batches", "skipped", "masked", "bad")])
        with wrapped(dataset, {"max_inflight": 3, **parse_toml(toml)}, **options) as loader:
            assert same(taken(loader), epochs[-1])  # in pieces that the pipe takes
    assert same(*epochs)
    assert counts[0] == counts[1]
    assert [len(batch[1]) for batch in epochs[0]] == ([3, 3, 2] if policy == "skip" else [4, 4, 4, 2])


@pytest.mark.parametrize("policy", ["skip", "mask"])
@pytest.mark.parametrize("transforms", [None, TensorToTensor()])
def test_dp_deals_the_batch_out(tmp_path: Path, toml: str, policy: str, transforms: Any) -> None:
    dataset = write_images(tmp_path / "images", 11, corrupt=[0, 1, 5])
    options: dict[str, Any] = {"bad_samples": policy, "transforms_gpu": transforms}
    with wrapped(dataset, toml, **options) as loader:
        expected = taken(loader)

    def opened(gather: bool) -> TorchpipeLoader:
        plain = DataLoader(dataset, batch_size=4)  # type: ignore[arg-type]
        return wrap_dataloader_torchpipe("DP", plain, toml, devices=["cpu"] * 3, gather=gather, **options)

    with opened(True) as loader:
        assert len(loader.devices) == 3
        assert same(taken(loader), expected)
    with opened(False) as loader:
        for batch, (images, labels, *_) in zip(loader, expected, strict=True):
            assert [len(part) for part in batch.images] == [len(part) for part in batch.labels]
            assert torch.equal(torch.cat(batch.images), images)
            assert torch.cat(batch.labels).tolist() == labels


def test_devices_may_be_one_text_with_commas() -> None:
    assert choose_devices("dp", None, "cpu, cpu") == [torch.device("cpu")] * 2
    with pytest.raises(TrainingError, match=r"device 'gpu' is not known; expected a number, 'cuda:1' or 'cpu'"):
        choose_devices("single", None, "gpu")
    if not torch.cuda.is_available():
        with pytest.raises(TrainingError, match="device 0: PyTorch finds no CUDA device here"):
            choose_devices("dp", None, "0,1")


# -- stopping and going on --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "stop_after"), [(0, 0), (0, 3), (2, 2)])
def test_resuming_gives_the_batches_that_were_left(
    dataset: ImageFiles, toml: str, workers: int, stop_after: int
) -> None:
    options: dict[str, Any] = {"transforms_gpu": RandomOffset(), "shuffle": True, "workers": workers}
    with wrapped(dataset, toml, **options) as loader:
        loader.reset(epoch=4)
        for _ in range(stop_after):
            next(loader)
        state = pickle.loads(pickle.dumps(loader.state_dict()))
        left = taken(loader)
        loader.reset()
        following = taken(loader)
    with wrapped(dataset, toml, **options) as resumed:
        for _ in range(2):
            resumed.load_state_dict(state)
            assert same(taken(resumed), left)
            resumed.reset()
            assert same(taken(resumed), following)
        for changed, message in (
            ({**state, "seed": 7}, "seed = 7, here it is 0"),
            ({**state, "batches": 9}, "batches = 9"),
            ({}, "version None"),
        ):
            with pytest.raises(TrainingError, match=message):
                resumed.load_state_dict(changed)
    assert len(left) == 3 - stop_after


class Shuffled:
    """A sampler with a generator of its own, which the loader cannot start anew."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __iter__(self) -> Iterator[int]:
        return iter(self.generator.permutation(11).tolist())


def test_a_sampler_that_gives_another_order_is_an_error(dataset: ImageFiles, toml: str) -> None:
    def shuffled() -> Any:
        return wrap_dataloader_torchpipe("single", DataLoader(dataset, 4, sampler=Shuffled()), toml)  # type: ignore[arg-type]

    with shuffled() as loader:
        loader.reset()
        next(loader)
        state = loader.state_dict()
    with shuffled() as resumed:
        next(resumed)
        resumed.load_state_dict(state)
        with pytest.raises(TrainingError, match="does not give epoch 1 in the order in which its first batches"):
            iter(resumed)
        resumed.reset(1)
        assert sorted(index for batch in resumed for index in batch.indices.tolist()) == list(range(11))
        resumed.load_state_dict({key: value for key, value in state.items() if key != "order"})  # an older version's
        assert [batch.number for batch in resumed] == [1, 2]


class Endless:
    """A sampler, and a dataset of no length."""

    def __init__(self, dataset: Any = None) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[int]:
        return itertools.cycle(range(11))

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]


def test_epochs_without_an_end_or_a_length(dataset: ImageFiles, toml: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with wrap_dataloader_torchpipe("single", DataLoader(Endless(dataset), 4, sampler=range(5)), toml) as loader:  # type: ignore[arg-type]
        assert [batch.indices.tolist() for batch in loader] == [[0, 1, 2, 3], [4]]
    monkeypatch.setattr(training_plan, "MOST_SAMPLES", 1000)
    with (
        wrap_dataloader_torchpipe("single", DataLoader(dataset, 4, sampler=Endless()), toml) as loader,  # type: ignore[arg-type]
        pytest.raises(TrainingError, match="more than 1110 samples for one epoch, and does not end"),
    ):
        next(loader)


@pytest.mark.parametrize("place", [(SideStreams, "hand_over"), (LoaderStatistics, "count")])
def test_batch_interrupted_by_ctrl_c_is_read_again(
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


@pytest.mark.parametrize("options", [{}, {"workers_decode": True}])
def test_workers_survive_ctrl_c(dataset: ImageFiles, toml: str, options: dict[str, Any]) -> None:
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
def test_a_loop_that_stops_early_goes_on(dataset: ImageFiles, toml: str, workers: int) -> None:
    with wrapped(dataset, toml, workers=workers, prefetch=1) as loader:
        for _ in loader:
            break
        assert [batch.number for batch in loader] == [1, 2]
        loader.reset()
        next(loader)
        loader.reset()  # drops the rest
        assert [batch.number for batch in loader] == [0, 1, 2]


@pytest.mark.parametrize("end", ["close", "error", "drop"])
def test_closed_loader_leaves_no_threads_or_processes(dataset: ImageFiles, toml: str, end: str) -> None:
    before, children = threads(), set(multiprocessing.active_children())
    loader = wrapped(dataset, toml, workers=2, prefetch=1)
    next(loader)
    workers = set(multiprocessing.active_children()) - children
    assert len(workers) == 2
    if end == "drop":
        gone = weakref.ref(loader)
        del loader
        gc.collect()
        assert gone() is None
    else:
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="a loader has threads and workers"):
                copied(loader)
        with pytest.raises(ZeroDivisionError), loader:
            raise ZeroDivisionError
        loader.close()
        for use in (loader.reset, loader.__next__):
            with pytest.raises(TrainingError, match="closed"):
                use()
    eventually(lambda: threads() <= before and not any(worker.is_alive() for worker in workers))


# -- batches on their way ---------------------------------------------------------------------------------------------


class Meeting(ItemBackend):
    """The first image of a batch of one waits for that of the next batch, in the other instance."""

    image = encode(picture(40, 40))
    together: threading.Barrier

    def forward_item(self, item: Any) -> None:
        if item["data"] == type(self).image:  # and not that of the loader's own trial
            type(self).together.wait(WAIT)
        item["result"] = torch.zeros(1, 3, 4, 4)


class Encoded:
    given = threading.Event()

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        assert index == 0 or Encoded.given.wait(WAIT)
        return Meeting.image, index


def test_two_batches_are_decoded_at_once(register: Any) -> None:
    """Also after epochs that were left early."""
    Encoded.given.set()
    Meeting.together = threading.Barrier(2)
    toml = {"max_inflight": 2, "node": {"backend": register(Meeting), "instance_num": 2}}
    with wrapped(Encoded(), toml, batch_size=1, transforms_gpu=None) as loader:
        for _ in range(3):
            assert [int(labels) for _, labels in loader] == list(range(6))
            loader.reset()


def test_a_batch_does_not_wait_for_the_next_one(toml: str) -> None:
    Encoded.given.clear()
    with wrapped(Encoded(), toml, batch_size=1, transforms_gpu=None) as loader:
        next(loader)
        Encoded.given.set()  # in time, or reading the next one fails
        assert len(list(loader)) == 5
