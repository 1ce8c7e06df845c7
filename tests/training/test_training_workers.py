"""Batches made by the DataLoader's workers: the same as those made in the training process, whatever goes wrong."""

from __future__ import annotations

import multiprocessing
import os
import platform
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import PROGRAM_WAIT
from torch.utils.data import DataLoader
from training_data import FORKS, OnTheCpu, RandomOffset, same, taken, wrapped, write_images, write_toml

from torchpipe_py import ConfigError, ItemBackend, register_backend
from torchpipe_py.errors import Failure
from torchpipe_py.training import (
    BadSample,
    ImageFiles,
    TensorToTensor,
    TorchpipeLoader,
    TrainingError,
    wrap_dataloader_torchpipe,
)
from torchpipe_py.training.transfer import Slots

pytestmark = FORKS

DECODE = {"backend": "S[DecodeMat,ResizeMat,Mat2Tensor]", "resize_h": 8, "resize_w": 8, "device": "cpu"}


class BatchOffset:
    """For ``transforms_batch``."""

    def __call__(self, images: Any) -> Any:
        return images + torch.rand(len(images), 1, 1, 1) + float(np.random.random())


class FailsInWorkers:
    """For ``transforms_gpu``: raises at its third call in a worker."""

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


class Unreadable(Exception):
    """Another one after a way through a pickle: it would wrap its message once more."""

    def __init__(self, path: str) -> None:
        super().__init__(f"cannot read {path}")


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


def by_workers(dataset: Any, toml: Any, workers: int = 1, **options: Any) -> TorchpipeLoader:
    """With so many workers that decode; with none, decoded in the training process."""
    return wrapped(dataset, toml, workers=workers, workers_decode=bool(workers), **options)


def epochs(dataset: Any, toml: str, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    """Two epochs and what was bad; the second is resumed in its middle."""
    with by_workers(dataset, toml, **{"workers": 0, **ALL, **options}) as loader:
        first = taken(loader)
        loader.reset()
        next(loader)
        state = loader.state_dict()
        loader.reset(7)
        next(loader)
        loader.load_state_dict(state)
        batches = [*first, *taken(loader)]
        stats = loader.stats()
    return batches, stats


@pytest.mark.parametrize("policy", ["mask", "skip"])
def test_batches_are_those_of_the_training_process(tmp_path: Path, toml: str, policy: str) -> None:
    dataset = write_images(tmp_path / "images", 22, corrupt=[3, 17], missing=[4, 5])
    expected, counted = epochs(dataset, toml, bad_samples=policy, collate_labels=Labels())
    batches, stats = epochs(dataset, toml, bad_samples=policy, collate_labels=Labels(), workers=2)
    assert same(batches, expected)
    assert {on_cpu for *_, on_cpu in batches} == {True, False}
    for name in ("samples", "batches", "cpu_batches", "skipped", "masked", "bad"):
        assert stats[name] == counted[name]
    assert all(stats["stages_s"][name] > 0 for name in ("read", "decode", "transform"))


def test_without_the_background_thread_and_with_one_worker(tmp_path: Path, toml: str) -> None:
    dataset = write_images(tmp_path / "images", 9)
    expected, _ = epochs(dataset, toml)
    batches, _ = epochs(dataset, toml, workers=1, prefetch=0)
    assert same(batches, expected)


def test_in_shares(tmp_path: Path, toml: str) -> None:
    dataset = write_images(tmp_path / "images", 11)
    both = []
    for workers in (0, 2):
        plain = DataLoader(dataset, batch_size=4, num_workers=workers)
        with wrap_dataloader_torchpipe(
            "dp", plain, toml, devices=["cpu"] * 3, gather=False, workers_decode=bool(workers)
        ) as loader:
            both.append([(batch.images, batch.labels) for batch in loader])
    for (images, labels), (expected_images, expected_labels) in zip(*both, strict=True):
        assert all(map(torch.equal, images, expected_images))
        assert all(map(torch.equal, labels, expected_labels))


def test_a_bad_sample_is_raised_at_its_batch(tmp_path: Path, toml: str) -> None:
    dataset = write_images(tmp_path / "images", 12, corrupt=[6])
    with by_workers(dataset, toml, 2) as loader:
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
    with by_workers(dataset, toml, transforms_gpu=FailsInWorkers()) as loader:
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
        by_workers(OnlyHere(), toml) as loader,
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
    assert not any(worker.is_alive() for worker in workers)
    assert sorted(path.name for path in (tmp_path / "started").iterdir()) == ["0", "1"]


@pytest.mark.usefixtures("workers_may_die")
def test_a_worker_that_is_killed(tmp_path: Path, toml: str) -> None:
    dataset = write_images(tmp_path / "images", 40)
    before = set(multiprocessing.active_children())
    with by_workers(dataset, toml, 2) as loader:
        next(loader)
        victim, _ = set(multiprocessing.active_children()) - before
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        with pytest.raises(TrainingError, match=r"exited unexpectedly.*; it was killed"):
            list(loader)


# -- mistakes ---------------------------------------------------------------------------------------------------------


def test_what_cannot_be_sent(tmp_path: Path, toml: str) -> None:
    dataset = write_images(tmp_path / "images", 4)
    for name in ("transforms_gpu", "transforms_batch", "collate_labels"):
        with pytest.raises(TrainingError, match=f"{name} cannot be sent to the workers .*top of a module"):
            by_workers(dataset, toml, **{name: lambda value: value})
    dataset = ImageFiles(dataset.samples, loader=lambda path: b"")
    with pytest.raises(TrainingError, match="the dataset cannot be sent to the workers"):
        by_workers(dataset, toml)


def test_workers_that_cannot_decode(tmp_path: Path, toml: str) -> None:
    dataset = write_images(tmp_path / "images", 4)
    with pytest.raises(TrainingError, match="workers_decode: the DataLoader has no workers"):
        wrapped(dataset, toml, workers_decode=True)
    forked = DataLoader(dataset, batch_size=4, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(TrainingError, match="use multiprocessing_context='spawn'"):
        wrap_dataloader_torchpipe("single", forked, toml, workers_decode=True)


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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_workers_keep_the_memory_of_one_batchs_files_for_the_next(tmp_path: Path, toml: str) -> None:
    dataset = Faults(write_images(tmp_path / "images", 4).samples)
    pages = 300 * 60_000 / resource.getpagesize()
    with by_workers(dataset, toml) as loader:
        assert all(label < pages / 10 for _, labels in loader for label in labels.tolist())


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
        by_workers(dataset, toml) as loader,
        pytest.raises(ConfigError, match=r"no backend 'NowhereElse'.*registered before"),
    ):
        next(loader)


def test_a_batch_in_pieces_larger_than_the_pipe_admits(tmp_path: Path) -> None:
    """Pieces are started one after the other, and the pipe lets in but one and a half."""
    dataset = write_images(tmp_path / "images", 50, corrupt=[20, 49])
    both = []
    for most, workers in ((10000, 0), (24, 1)):
        toml = {"max_inflight": most, "decode": DECODE}
        with by_workers(dataset, toml, workers, batch_size=41, transforms_gpu=None, bad_samples="mask") as loader:
            both.append(taken(loader))
    assert same(*both)
    assert [len(labels) for _, labels, *_ in both[0]] == [41, 9]


class Learned:
    """For ``transforms_batch``: by a parameter, so that what it gives has a gradient to carry."""

    def __init__(self) -> None:
        self.layer = torch.nn.Conv2d(3, 3, 1)

    def __call__(self, images: Any) -> Any:
        return self.layer(images)


class Keys:
    """For ``collate_labels``: what cannot be pickled."""

    def __call__(self, labels: list[Any]) -> Any:
        return dict.fromkeys(labels).keys()


def test_what_a_transform_has_learned_goes_along(tmp_path: Path, toml: str) -> None:
    dataset = write_images(tmp_path / "images", 8)
    transform = Learned()
    with wrapped(dataset, toml, transforms_batch=transform) as loader:
        expected = [images.detach() for images, _ in loader]
    with by_workers(dataset, toml, transforms_batch=transform) as loader:
        batches = [images for images, _ in loader]
    assert not any(images.requires_grad for images in batches)
    assert all(map(torch.equal, batches, expected))


def test_a_batch_that_cannot_be_sent_is_an_error(tmp_path: Path, toml: str) -> None:
    dataset = write_images(tmp_path / "images", 8)
    with (
        by_workers(dataset, toml, collate_labels=Keys()) as loader,
        pytest.raises(TrainingError, match=r"batch 0 cannot be sent to the training process: TypeError.*dict_keys"),
    ):
        next(loader)


class Vectors:
    """Labels are two floats; the second batch cannot be read."""

    def __init__(self, dataset: ImageFiles) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index][0], torch.tensor([index, 0.5])


def test_ignored_labels_look_like_others_of_other_workers(tmp_path: Path, toml: str) -> None:
    dataset = Vectors(write_images(tmp_path / "images", 12, missing=[4, 5, 6, 7]))
    both = []
    for workers in (0, 2):
        with by_workers(dataset, toml, workers, bad_samples="mask") as loader:
            both.append([labels for _, labels in loader])
    assert all(map(torch.equal, *both))
    assert both[1][1].dtype == torch.float32
    assert both[1][1].tolist() == [[-100.0, -100.0]] * 4


class Tagged(ImageFiles):
    """Holds many Tensors."""

    def __init__(self, samples: Any) -> None:
        super().__init__(samples)
        self.tags = [torch.tensor(number) for number in range(400)]

    def __getitem__(self, index: int) -> tuple[bytes, Any]:
        return super().__getitem__(index)[0], self.tags[index]


def test_a_dataset_of_many_tensors(tmp_path: Path, toml: str) -> None:
    dataset = Tagged(write_images(tmp_path / "images", 6).samples)
    with by_workers(dataset, toml) as loader:
        assert [labels.tolist() for _, labels in loader] == [[0, 1, 2, 3], [4, 5]]


class Boxed(ImageFiles):
    """Each label is of several Tensors."""

    def __getitem__(self, index: int) -> tuple[bytes, Any]:
        return super().__getitem__(index)[0], {"boxes": torch.full((2, 4), index), "classes": torch.tensor(index)}


def test_labels_that_stay_a_list_take_no_file_descriptors(tmp_path: Path, toml: str) -> None:
    dataset = Boxed(write_images(tmp_path / "images", 4).samples * 15)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with by_workers(dataset, toml, batch_size=60, collate_labels=list) as loader:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, hard))
            (batch,) = loader
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [int(label["classes"]) for label in batch.labels] == list(range(60))
    assert all(torch.equal(label["boxes"], label["classes"].expand(2, 4)) for label in batch.labels)


class Batches:
    """A batch sampler with nothing in the middle."""

    def __iter__(self) -> Any:
        return iter([[0, 1], [], [2]])

    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_of_nothing_is_left_out(tmp_path: Path, toml: str, workers: int) -> None:
    dataset = write_images(tmp_path / "images", 3)
    plain = DataLoader(
        dataset, batch_sampler=Batches(), num_workers=workers, multiprocessing_context="spawn" if workers else None
    )
    with wrap_dataloader_torchpipe("single", plain, toml, workers_decode=bool(workers)) as loader:
        assert [batch.indices.tolist() for batch in loader] == [[0, 1], [2]]


class Refused:
    """For ``worker_init_fn``."""

    def __call__(self, worker_id: int) -> None:
        raise ConnectionRefusedError("nobody listens")


@pytest.mark.parametrize("decode", [False, True])
def test_a_worker_that_cannot_start_is_not_a_dead_one(tmp_path: Path, toml: str, decode: bool) -> None:
    dataset = write_images(tmp_path / "images", 4)
    plain = DataLoader(dataset, batch_size=4, num_workers=1, worker_init_fn=Refused())
    with (
        wrap_dataloader_torchpipe("single", plain, toml, workers_decode=decode) as loader,
        pytest.raises(ConnectionRefusedError, match="nobody listens"),
    ):
        next(loader)


def run_script(folder: Path, script: str, toml: str) -> subprocess.CompletedProcess[str]:
    """Waits for all that have the other end of its output: its workers too."""
    paths = [path for path, _ in write_images(folder / "images", 8).samples]
    (folder / "script.py").write_text(script, encoding="utf-8")
    command = [sys.executable, folder / "script.py", toml, *paths]
    return subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_WAIT)


TRAINING = """
import multiprocessing, os, sys
from torch.utils.data import DataLoader
from torchpipe_py.training import ImageFiles, wrap_dataloader_torchpipe

if __name__ == "__main__":
    loader = DataLoader(ImageFiles([(path, 0) for path in sys.argv[2:]]), 2, num_workers=2)
    batches = wrap_dataloader_torchpipe("single", loader, sys.argv[1], workers_decode=True)
    next(batches)
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    os.kill(os.getpid(), 9)
"""


def test_a_training_that_is_killed_leaves_nothing(tmp_path: Path, toml: str) -> None:
    done = run_script(tmp_path, TRAINING, toml)
    assert done.returncode == -signal.SIGKILL
    assert len(done.stdout.split()) == 2


WITHOUT_A_GUARD = """
import sys
from torch.utils.data import DataLoader
from torchpipe_py.training import ImageFiles, wrap_dataloader_torchpipe

loader = DataLoader(ImageFiles([(path, 0) for path in sys.argv[2:]]), 2, num_workers=1)
next(wrap_dataloader_torchpipe("single", loader, sys.argv[1], workers_decode=True))
"""

READ_BY_WORKERS_OF_SPAWN = WITHOUT_A_GUARD.replace(", workers_decode=True", "").replace(
    "num_workers=1", 'num_workers=1, multiprocessing_context="spawn"'
)

INSIDE_THE_GUARD = """
import sys
from torch.utils.data import DataLoader
from torchpipe_py.training import ImageFiles, wrap_dataloader_torchpipe

if __name__ == "__main__":
    def transform(image):
        return image

    loader = DataLoader(ImageFiles([(path, 0) for path in sys.argv[2:]]), 2, num_workers=1)
    next(wrap_dataloader_torchpipe("single", loader, sys.argv[1], transform, workers_decode=True))
"""


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (WITHOUT_A_GUARD, "workers of its own; put what the script does under: if __name__ == "),
        (READ_BY_WORKERS_OF_SPAWN, '; a script does what it does under: if __name__ == "__main__":'),
        (INSIDE_THE_GUARD, "cannot be made in a worker (AttributeError: Can't get attribute 'transform'"),
    ],
)
def test_scripts_that_workers_cannot_import(tmp_path: Path, toml: str, script: str, told: str) -> None:
    done = run_script(tmp_path, script, toml)
    assert done.returncode == 1
    assert told in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert told in last or 'under: if __name__ == "__main__":' in last


# -- on the way -------------------------------------------------------------------------------------------------------


def test_slots_are_written_in_turn_and_replaced_where_they_do_not_fit() -> None:
    slots = Slots(2)
    first, second = (slots.write(torch.full((4, 2), float(number))) for number in range(2))
    third = slots.write(torch.full((3, 2), 2.0))
    assert (third.data_ptr(), third.tolist()) == (first.data_ptr(), [[2.0, 2.0]] * 3)
    for size in (3, 5):
        gray = torch.full((2, 1, size), 3.0)
        written = slots.write(gray.expand(-1, 4, -1))  # without memory of its own
        gray.zero_()
        assert bool((written == 3).all())
    assert second.tolist() == [[1.0, 1.0]] * 4


@pytest.mark.parametrize(
    ("error", "arrives"),
    [
        (BadSample(3, "sample 3", "corrupt", "no JPEG"), "sample 3: corrupt: no JPEG (bad_samples="),
        (ValueError("a", 1), "('a', 1)"),
        (Unsendable(threading.Lock()), "Unsendable: <unlocked"),
        (Unreadable("a.jpg"), "Unreadable: cannot read a.jpg"),
    ],
)
def test_errors_arrive_as_they_are_or_as_ours(error: Exception, arrives: str) -> None:
    arrived = Failure.of(error).error(TrainingError)
    assert str(arrived).startswith(arrives)
    assert type(arrived) is (TrainingError if isinstance(error, (Unsendable, Unreadable)) else type(error))
