"""Batches made by the DataLoader's workers: the same as those made in the training process, whatever goes wrong."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from training_data import OnTheCpu, RandomOffset, same, taken, wrapped, write_images, write_toml

from torchpipe_py import ConfigError, ItemBackend, register_backend
from torchpipe_py.training import BadSample, ImageFiles, TensorToTensor, TrainingError, wrap_dataloader_torchpipe

DECODE = {"backend": "S[DecodeMat,ResizeMat,Mat2Tensor]", "resize_h": 8, "resize_w": 8, "device": "cpu"}


class BatchOffset:
    """For ``transforms_batch``."""

    def __call__(self, images: Any) -> Any:
        return images + torch.rand(len(images), 1, 1, 1) + float(np.random.random())


class FailsInWorkers:
    """For ``transforms_gpu``: raises what cannot be pickled, at one image that is brighter than the others' trial."""

    def __init__(self) -> None:
        self.home = os.getpid()
        self.calls = 0

    def __call__(self, image: Any) -> Any:
        self.calls += os.getpid() != self.home
        if self.calls == 3:  # the trial is the first
            raise Unsendable(threading.Lock())
        return TensorToTensor()(image)


class Unsendable(Exception):
    pass


class Labels:
    """For ``collate_labels``: floats."""

    def __call__(self, labels: list[Any]) -> Any:
        return torch.tensor(labels, dtype=torch.float64) * 0.5


class Started:
    """For ``worker_init_fn``: leaves a file for each worker."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, worker_id: int) -> None:
        (self.folder / str(worker_id)).touch()


@pytest.fixture
def toml(tmp_path: Path) -> str:
    return write_toml(tmp_path)


ALL: dict[str, Any] = {
    "transforms_gpu": RandomOffset(),
    "transforms_cpu": OnTheCpu(),
    "transforms_batch": BatchOffset(),
    "cpu_percentage": 0.4,
    "shuffle": True,
    "seed": 5,
}


def epochs(dataset: Any, toml: str, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    """Two epochs and what was bad; the second is resumed in its middle."""
    with wrapped(dataset, toml, **{**ALL, **options}) as loader:
        first = taken(loader)
        loader.reset()
        next(loader)
        state = loader.state_dict()
        loader.reset(7)
        next(loader)
        loader.load_state_dict(state)
        found = [*first, *taken(loader)]
        stats = loader.stats()
    return found, stats


@pytest.mark.parametrize("policy", ["mask", "skip"])
def test_batches_are_those_of_the_training_process(tmp_path: Path, toml: str, policy: str) -> None:
    dataset = write_images(tmp_path / "images", 22, corrupt=[3, 17], missing=[4, 5])
    expected, counted = epochs(dataset, toml, bad_samples=policy, collate_labels=Labels())
    found, stats = epochs(dataset, toml, bad_samples=policy, collate_labels=Labels(), workers=2, workers_decode=True)
    assert same(found, expected)
    assert {on_cpu for *_, on_cpu in found} == {True, False}
    for name in ("samples", "batches", "cpu_batches", "skipped", "masked", "bad"):
        assert stats[name] == counted[name]
    assert all(stats["stages_s"][name] > 0 for name in ("read", "decode", "transform"))


def test_without_the_background_thread_and_with_one_worker(tmp_path: Path, toml: str) -> None:
    dataset = write_images(tmp_path / "images", 9)
    expected, _ = epochs(dataset, toml)
    found, _ = epochs(dataset, toml, workers=1, workers_decode=True, prefetch=0)
    assert same(found, expected)


def test_in_shares(tmp_path: Path, toml: str) -> None:
    dataset = write_images(tmp_path / "images", 11)
    found = []
    for workers in (0, 2):
        plain = DataLoader(dataset, batch_size=4, num_workers=workers)
        with wrap_dataloader_torchpipe(
            "dp", plain, toml, devices=["cpu"] * 3, gather=False, workers_decode=bool(workers)
        ) as loader:
            found.append([(batch.images, batch.labels) for batch in loader])
    for (images, labels), (expected_images, expected_labels) in zip(*found, strict=True):
        assert all(map(torch.equal, images, expected_images))
        assert all(map(torch.equal, labels, expected_labels))


def test_a_bad_sample_is_raised_at_its_batch(tmp_path: Path, toml: str) -> None:
    dataset = write_images(tmp_path / "images", 12, corrupt=[6])
    with wrapped(dataset, toml, workers=2, workers_decode=True) as loader:
        assert next(loader).number == 0
        for _ in range(2):
            with pytest.raises(BadSample, match=r"sample 6 \(.*image_006.jpg\): corrupt") as raised:
                next(loader)
            assert (raised.value.index, raised.value.kind) == (6, "corrupt")
        assert loader.stats()["bad"]["count"] == 1
        loader.reset()
        assert next(loader).number == 0


def test_what_a_worker_raises_arrives(tmp_path: Path, toml: str) -> None:
    dataset = write_images(tmp_path / "images", 8)
    with wrapped(dataset, toml, workers=1, workers_decode=True, transforms_gpu=FailsInWorkers()) as loader:
        with pytest.raises(TrainingError, match=r"sample 1 .*transforms_gpu raised Unsendable"):
            next(loader)
        loader.reset()
        assert [batch.number for batch in loader] == [0, 1]


class OnlyHere:
    """A dataset whose bytes cannot be read anywhere but in the process that made it."""

    def __init__(self) -> None:
        self.home = os.getpid()

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        raise OSError(f"asked elsewhere: {os.getpid() != self.home}")


def test_the_dataset_is_read_in_the_workers(toml: str) -> None:
    with (
        wrapped(OnlyHere(), toml, workers=1, workers_decode=True) as loader,
        pytest.raises(BadSample, match="unreadable: OSError: asked elsewhere: True"),
    ):
        next(loader)


def test_workers_are_told_and_ended(tmp_path: Path, toml: str) -> None:
    dataset = write_images(tmp_path / "images", 12)
    (tmp_path / "started").mkdir()
    plain = DataLoader(dataset, batch_size=4, num_workers=2, worker_init_fn=Started(tmp_path / "started"))
    before = set(multiprocessing.active_children())
    with wrap_dataloader_torchpipe("single", plain, toml, workers_decode=True) as loader:
        next(loader)
        workers = set(multiprocessing.active_children()) - before
        assert len(workers) == 2
    assert not any(one.is_alive() for one in workers)
    assert sorted(path.name for path in (tmp_path / "started").iterdir()) == ["0", "1"]


def test_a_worker_that_is_killed(tmp_path: Path, toml: str) -> None:
    dataset = write_images(tmp_path / "images", 40)
    before = set(multiprocessing.active_children())
    with wrapped(dataset, toml, workers=2, workers_decode=True) as loader:
        next(loader)
        victim, _ = set(multiprocessing.active_children()) - before
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        end = time.monotonic() + 30
        with pytest.raises(RuntimeError, match="exited unexpectedly"):
            list(loader)
        assert time.monotonic() < end


# -- mistakes ---------------------------------------------------------------------------------------------------------


def test_what_cannot_be_sent(tmp_path: Path, toml: str) -> None:
    dataset = write_images(tmp_path / "images", 4)
    for name in ("transforms_gpu", "transforms_batch", "collate_labels"):
        with pytest.raises(TrainingError, match=f"{name} cannot be sent to the workers .*top of a module"):
            wrapped(dataset, toml, workers=1, workers_decode=True, **{name: lambda value: value})
    dataset = ImageFiles(dataset.samples, loader=lambda path: b"")
    with pytest.raises(TrainingError, match="the dataset cannot be sent to the workers"):
        wrapped(dataset, toml, workers=1, workers_decode=True)


def test_workers_that_cannot_decode(tmp_path: Path, toml: str) -> None:
    dataset = write_images(tmp_path / "images", 4)
    with pytest.raises(TrainingError, match="workers_decode: the DataLoader has no workers"):
        wrapped(dataset, toml, workers_decode=True)
    forked = DataLoader(dataset, batch_size=4, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(TrainingError, match="use multiprocessing_context='spawn'"):
        wrap_dataloader_torchpipe("single", forked, toml, workers_decode=True)


class NowhereElse(ItemBackend):
    """A backend that worker processes have not registered."""

    def forward_item(self, item: Any) -> None:
        item["result"] = torch.zeros(1, 3, 4, 4)


if multiprocessing.parent_process() is None:
    register_backend(NowhereElse, "NowhereElse")


def test_a_pipe_that_workers_cannot_build(tmp_path: Path) -> None:
    dataset = write_images(tmp_path / "images", 4)
    toml = {"backend": "NowhereElse"}
    with (
        wrapped(dataset, toml, workers=1, workers_decode=True) as loader,
        pytest.raises(ConfigError, match=r"no backend 'NowhereElse'.*registered before"),
    ):
        next(loader)


def test_a_batch_in_pieces_larger_than_the_pipe_admits(tmp_path: Path) -> None:
    """Pieces are started one after the other, and the pipe lets in but one and a half."""
    dataset = write_images(tmp_path / "images", 50, corrupt=[20, 49])
    found = []
    for most, workers in ((10000, 0), (24, 1)):
        toml = {"max_inflight": most, "decode": DECODE}
        with wrapped(
            dataset,
            toml,
            batch_size=41,
            workers=workers,
            workers_decode=bool(workers),
            transforms_gpu=None,
            bad_samples="mask",
        ) as loader:
            found.append(taken(loader))
    assert same(*found)
    assert [len(labels) for _, labels, *_ in found[0]] == [41, 9]
