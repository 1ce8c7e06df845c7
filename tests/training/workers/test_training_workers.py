"""Batches made by the DataLoader's workers: the same as those made in the training process, whatever goes wrong."""

from __future__ import annotations

import multiprocessing
import os
import platform
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.training_data import FORKS, OnTheCpu, RandomOffset, same, taken, wrapped, write_images
from kit.waits import eventually, run
from torch.utils.data import DataLoader

from torchpipe_py import ConfigError, ItemBackend, register_backend
from torchpipe_py.errors import Failure
from torchpipe_py.training import (
    BadSample,
    Compose,
    CutOut,
    GridMask,
    ImageFiles,
    RandomResizedCrop,
    TrainingError,
    wrap_dataloader_torchpipe,
)
from torchpipe_py.training.workers.transfer import Slots

pytestmark = FORKS


class BatchOffset:
    """A ``transforms_batch`` with randomness and a parameter, so that its result requires a gradient."""

    def __init__(self) -> None:
        self.layer = torch.nn.Conv2d(3, 3, 1)

    def __call__(self, images: Any) -> Any:
        return self.layer(images) + torch.rand(len(images), 1, 1, 1) + float(np.random.random())


class Labels:
    """A ``collate_labels`` that returns floats."""

    def __call__(self, labels: list[Any]) -> Any:
        return torch.tensor(labels, dtype=torch.float64) * 0.5


class Keys:
    """A ``collate_labels`` whose result cannot be pickled."""

    def __call__(self, labels: list[Any]) -> Any:
        return dict.fromkeys(labels).keys()


class Vectors(ImageFiles):
    """Labels are two floats of a Tensor that the dataset holds."""

    def __init__(self, samples: Any) -> None:
        super().__init__(samples)
        self.labels = [torch.tensor([number, 0.5]) for number in range(400)]

    def __getitem__(self, index: int) -> tuple[bytes, Any]:
        return super().__getitem__(index)[0], self.labels[index]


def decoded_by(workers: int, dataset: Any, toml: Any, **options: Any) -> Any:
    """A loader whose batches are decoded by ``workers`` workers; with 0, in the training process."""
    return wrapped(dataset, toml, workers=workers, workers_decode=bool(workers), **options)


def epochs(workers: int, dataset: Any, toml: str, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    """Two epochs and their counts; the second is resumed in its middle."""
    with decoded_by(workers, dataset, toml, shuffle=True, seed=5, **options) as loader:
        first = taken(loader)
        loader.reset()
        next(loader)
        state = loader.state_dict()
        loader.reset(7)
        next(loader)
        loader.load_state_dict(state)
        batches = [*first, *taken(loader)]
        stats = loader.stats()
    return [(batch[0].detach(), *batch[1:]) for batch in batches], stats


@pytest.mark.parametrize(
    ("workers", "options"),
    [
        (2, {"bad_samples": "mask", "collate_labels": Labels()}),
        (2, {"bad_samples": "skip"}),
        (1, {"bad_samples": "mask", "prefetch": 0}),
        (2, {"bad_samples": "mask", "transforms_batch": Compose([RandomResizedCrop(16), CutOut(), GridMask(4)])}),
    ],
)
def test_batches_equal_those_made_in_the_training_process(
    tmp_path: Path, toml: str, workers: int, options: dict[str, Any]
) -> None:
    dataset = write_images(tmp_path / "images", 22, corrupt=[3, 17], missing=[4, 5])
    options = {"transforms_batch": BatchOffset(), **options}
    options |= {"transforms_gpu": RandomOffset(), "transforms_cpu": OnTheCpu()}
    expected, counted = epochs(0, dataset, toml, cpu_percentage=0.4, **options)
    batches, stats = epochs(workers, dataset, toml, cpu_percentage=0.4, **options)
    assert same(batches, expected)
    assert {on_cpu for *_, on_cpu in batches} == {True, False}
    for name in ("samples", "batches", "cpu_batches", "skipped", "masked", "bad"):
        assert stats[name] == counted[name]
    assert all(stats["stages_s"][name] > 0 for name in ("read", "decode", "transform"))


def test_large_batches_and_shares_equal_those_made_in_process(tmp_path: Path, toml: str) -> None:
    dataset = write_images(tmp_path / "images", 50, corrupt=[20, 49])
    config = {"backend": "S[DecodeMat,ResizeMat,Mat2Tensor]", "resize_h": 8, "resize_w": 8, "device": "cpu"}
    both = []
    for most, workers in ((10000, 0), (24, 1)):  # pieces are started one after the other
        options: dict[str, Any] = {"batch_size": 41, "transforms_gpu": None, "bad_samples": "mask"}
        with decoded_by(workers, dataset, {"max_inflight": most, "decode": config}, **options) as loader:
            both.append(taken(loader))
    assert same(*both)
    shares = []
    for workers in (0, 2):
        plain = DataLoader(ImageFiles(dataset.samples[:11]), 4, num_workers=workers)  # type: ignore[arg-type]
        options = {"devices": ["cpu"] * 3, "gather": False, "workers_decode": bool(workers)}
        with wrap_dataloader_torchpipe("dp", plain, toml, **options) as loader:
            shares.append([(batch.images, batch.labels) for batch in loader])
    for (images, labels), (expected_images, expected_labels) in zip(*shares, strict=True):
        assert all(map(torch.equal, images, expected_images))
        assert all(map(torch.equal, labels, expected_labels))


def test_ignored_labels_look_like_others_of_other_workers(tmp_path: Path, toml: str) -> None:
    dataset = Vectors(write_images(tmp_path / "images", 12, missing=[4, 5, 6, 7]).samples)
    both = []
    for workers in (0, 2):
        with decoded_by(workers, dataset, toml, bad_samples="mask") as loader:
            both.append([labels for _, labels in loader])
    assert all(map(torch.equal, *both))
    assert (both[1][1].dtype, both[1][1].tolist()) == (torch.float32, [[-100.0, -100.0]] * 4)


class Batches:
    """A batch sampler with nothing in the middle."""

    def __iter__(self) -> Any:
        return iter([[0, 1], [], [2]])


@pytest.mark.parametrize("workers", [0, 1])
def test_skips_batch_without_samples(tmp_path: Path, toml: str, workers: int) -> None:
    dataset = write_images(tmp_path / "images", 3)
    context = "spawn" if workers else None
    plain = DataLoader(dataset, batch_sampler=Batches(), num_workers=workers, multiprocessing_context=context)  # type: ignore[arg-type]
    with wrap_dataloader_torchpipe("single", plain, toml, workers_decode=bool(workers)) as loader:
        assert [batch.indices.tolist() for batch in loader] == [[0, 1], [2]]


# -- errors, starts and ends ------------------------------------------------------------------------------------------


class FailsInWorkers:
    """A ``transforms_gpu`` that raises at its third call in a worker."""

    def __init__(self) -> None:
        self.home, self.calls = os.getpid(), 0

    def __call__(self, image: Any) -> Any:
        self.calls += os.getpid() != self.home
        if self.calls == 3:  # the trial is the first
            raise Unsendable(threading.Lock())
        return image


class Unsendable(Exception):
    pass


class Unreadable(Exception):
    """Another one after a way through a pickle: it would wrap its message once more."""

    def __init__(self, path: str) -> None:
        super().__init__(f"cannot read {path}")


def test_worker_error_is_raised_at_its_batch(tmp_path: Path, toml: str) -> None:
    dataset = write_images(tmp_path / "images", 12, corrupt=[6])
    with decoded_by(2, dataset, toml, transforms_gpu=None) as loader:
        assert next(loader).number == 0
        for _ in range(2):
            with pytest.raises(BadSample, match=r"sample 6 \(.*image_006.jpg\): corrupt") as raised:
                next(loader)
            assert (raised.value.index, raised.value.kind) == (6, "corrupt")
        assert loader.stats()["bad"]["count"] == 1
        loader.reset()
        assert next(loader).number == 0
    with decoded_by(1, dataset, toml, transforms_gpu=FailsInWorkers()) as loader:
        with pytest.raises(TrainingError, match=r"sample 1 .*transforms_gpu raised Unsendable"):
            next(loader)
        loader.reset()
        assert next(loader).number == 0
    with (
        decoded_by(1, dataset, toml, collate_labels=Keys()) as loader,
        pytest.raises(TrainingError, match=r"batch 0 cannot be sent to the training process: TypeError.*dict_keys"),
    ):
        next(loader)


@pytest.mark.parametrize(
    ("error", "arrives"),
    [
        (BadSample(3, "sample 3", "corrupt", "no JPEG"), "sample 3: corrupt: no JPEG (bad_samples="),
        (ValueError("a", 1), "('a', 1)"),
        (Unsendable(threading.Lock()), "Unsendable: <unlocked"),
        (Unreadable("a.jpg"), "Unreadable: cannot read a.jpg"),
    ],
)
def test_errors_keep_their_class_or_become_training_errors(error: Exception, arrives: str) -> None:
    arrived = Failure.of(error).error(TrainingError)
    assert str(arrived).startswith(arrives)
    assert type(arrived) is (TrainingError if isinstance(error, (Unsendable, Unreadable)) else type(error))


class NowhereElse(ItemBackend):
    """A backend that worker processes have not registered."""

    def forward_item(self, item: Any) -> None:
        item["result"] = torch.zeros(1, 3, 4, 4)


if multiprocessing.parent_process() is None:
    register_backend(NowhereElse, "NowhereElse")


def test_reports_pipe_that_workers_cannot_build(dataset: ImageFiles) -> None:
    with (
        decoded_by(1, dataset, {"backend": "NowhereElse"}) as loader,
        pytest.raises(ConfigError, match=r"no backend 'NowhereElse'.*register your own first"),
    ):
        next(loader)


def test_names_objects_that_cannot_be_sent_to_workers(dataset: ImageFiles, toml: str) -> None:
    for name in ("transforms_gpu", "transforms_batch", "collate_labels"):
        with pytest.raises(TrainingError, match=f"{name} cannot be sent to the workers .*top of a module"):
            decoded_by(1, dataset, toml, **{name: lambda value: value})
    with pytest.raises(TrainingError, match="the dataset cannot be sent to the workers"):
        decoded_by(1, ImageFiles(dataset.samples, loader=lambda path: b""), toml)


class Refused:
    """A ``worker_init_fn`` that raises."""

    def __call__(self, worker_id: int) -> None:
        raise ConnectionRefusedError("nobody listens")


@pytest.mark.parametrize("decode", [False, True])
def test_failed_worker_start_is_reported_as_such(dataset: ImageFiles, toml: str, decode: bool) -> None:
    plain = DataLoader(dataset, batch_size=4, num_workers=1, worker_init_fn=Refused())  # type: ignore[arg-type]
    with (
        wrap_dataloader_torchpipe("single", plain, toml, workers_decode=decode) as loader,
        pytest.raises(ConnectionRefusedError, match="nobody listens"),
    ):
        next(loader)


class Started:
    """A ``worker_init_fn`` that leaves a file for each worker."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, worker_id: int) -> None:
        (self.folder / str(worker_id)).touch()


@pytest.mark.usefixtures("workers_may_die")
def test_workers_are_started_and_ended_and_may_die(tmp_path: Path, toml: str) -> None:
    (tmp_path / "started").mkdir()
    dataset = write_images(tmp_path / "images", 40)
    plain = DataLoader(dataset, batch_size=1, num_workers=2, worker_init_fn=Started(tmp_path / "started"))  # type: ignore[arg-type]
    before = set(multiprocessing.active_children())
    with wrap_dataloader_torchpipe("single", plain, toml, workers_decode=True) as loader:
        for _ in range(2):  # of each worker, so that both have begun
            next(loader)
        workers = set(multiprocessing.active_children()) - before
        victim, _ = workers
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        with pytest.raises(TrainingError, match=r"exited unexpectedly.*; it was killed"):
            list(loader)
    eventually(lambda: not any(worker.is_alive() for worker in workers))
    assert sorted(path.name for path in (tmp_path / "started").iterdir()) == ["0", "1"]


class Faults(ImageFiles):
    """Labels are how many pages of memory the system had to give for what had been freed just before."""

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        encoded, _ = super().__getitem__(index)
        for _ in range(3):
            before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt  # others of its process decode
            blocks = [bytes(60_000) for _ in range(300)]
            faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
            del blocks
        return encoded, faults


def test_closing_workers_is_not_a_failure(dataset: ImageFiles, toml: str) -> None:
    """After a DataLoader of its own, a program has PyTorch's handler, which raises for each worker that failed."""
    before = multiprocessing.active_children()
    with wrapped(dataset, toml, workers=2) as loader:
        next(iter(loader))
        workers = [child for child in multiprocessing.active_children() if child not in before]
    assert [worker.exitcode for worker in workers] == [0, 0]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_workers_keep_the_memory_of_one_batchs_files_for_the_next(dataset: ImageFiles, toml: str) -> None:
    pages = 300 * 60_000 / resource.getpagesize()
    with decoded_by(1, Faults(dataset.samples[:4]), toml) as loader:
        assert all(label < pages / 10 for _, labels in loader for label in labels.tolist())


SCRIPT = """
import multiprocessing, os, sys
from torch.utils.data import DataLoader
from torchpipe_py.training import ImageFiles, wrap_dataloader_torchpipe

def train(transform=None, end=lambda: None, decode=True, **options):
    files = ImageFiles([(path, 0) for path in sys.argv[2:]])
    plain = DataLoader(files, 2, num_workers=1, **options)
    global batches
    batches = wrap_dataloader_torchpipe("single", plain, sys.argv[1], transform, workers_decode=decode)
    next(batches)
    end()
    return batches

def killed():
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    os.kill(os.getpid(), 9)

"""
GUARD = 'if __name__ == "__main__":'
INSIDE_THE_GUARD = f"""{GUARD}
    def transform(image):
        return image

    first = train(decode=False)
    try:
        train(transform)
    except Exception as error:
        print(error, file=sys.stderr)
    train()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "status", "message"),
    [
        (f"{GUARD}\n    train(end=killed)", -signal.SIGKILL, ""),  # and leaves nothing that holds its output
        (INSIDE_THE_GUARD, 0, "cannot be made in a worker (AttributeError: "),  # ends with its loaders open
        ("train()", 1, f"workers of its own; put what the script does under: {GUARD}"),
        ("train(decode=False, multiprocessing_context='spawn')", 1, f"; a script does what it does under: {GUARD}"),
    ],
)
def test_scripts_that_end_early_or_that_workers_cannot_import(
    dataset: ImageFiles, tmp_path: Path, toml: str, call: str, status: int, message: str
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT + call, encoding="utf-8")
    done = run(sys.executable, tmp_path / "script.py", toml, *(path for path, _ in dataset.samples))
    assert (done.returncode, len(done.stdout.split())) == (status, 1 if status < 0 else 0)
    assert message in done.stderr


def test_slots_are_written_in_turn_and_replaced_where_they_do_not_fit() -> None:
    slots = Slots(2)
    first, second = (slots.write(torch.full((4, 2), float(number))) for number in range(2))
    third = slots.write(torch.full((3, 2), 2.0))
    assert (third.data_ptr(), third.tolist()) == (first.data_ptr(), [[2.0, 2.0]] * 3)
    assert second.tolist() == [[1.0, 1.0]] * 4
    for size in (3, 5):
        gray = torch.full((2, 1, size), 3.0)
        written = slots.write(gray.expand(-1, 4, -1))  # without memory of its own
        gray.zero_()
        assert bool((written == 3).all())
