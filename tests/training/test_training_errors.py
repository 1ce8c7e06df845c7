"""What is wrong, told at construction or in the loop, and never by a hang."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import encode, picture
from fakes import PROGRAM_WAIT
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset
from training_data import FORKS, OnTheCpu, same, taken, wrapped, write_images

from torchpipe_py import BackendUnavailable, ConfigError
from torchpipe_py.training import (
    BadSample,
    DistributedEvalSampler,
    ImageFiles,
    TensorToTensor,
    TrainingError,
    wrap_dataloader_torchpipe,
)

pytestmark = FORKS

NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


def test_an_unknown_option_names_the_call_and_the_nearest_option(dataset: ImageFiles, toml: str) -> None:
    with pytest.raises(TypeError, match=r"wrap_dataloader_torchpipe.*'prefech'; did you mean 'prefetch'\?"):
        wrapped(dataset, toml, prefech=1)


# -- bad samples ------------------------------------------------------------------------------------------------------

HOSTILE = {
    "animated PNG": bytes.fromhex("89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b55")
    + bytes.fromhex("000000086163544c0000000200000000f38d9370"),
    "a billion pixels": b"BM" + struct.pack("<IHHIIiiHHII", 54, 0, 0, 54, 40, 30_000, 30_000, 1, 8, 1, 0) + bytes(16),
    "another format": b"GIF89a" + struct.pack("<HHBBB", 32_767, 32_767, 0x80, 0, 0) + bytes(16),
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_hostile_pictures_are_bad_samples(tmp_path: Path, toml: str, workers: int, share: float) -> None:
    dataset = write_images(tmp_path / "images", 8)
    for index, content in zip((1, 4, 6), HOSTILE.values(), strict=True):
        (tmp_path / "images" / f"image_{index:03}.jpg").write_bytes(content)
    options: dict[str, Any] = {"transforms_cpu": OnTheCpu(), "cpu_percentage": share, "bad_samples": "skip"}
    with wrapped(dataset, toml, workers=workers, **options) as loader:
        assert [index for batch in loader for index in batch.indices.tolist()] == [0, 2, 3, 5, 7]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_raise_names_the_sample(tmp_path: Path, toml: str, workers: int, share: float) -> None:
    dataset = write_images(tmp_path / "images", 8, corrupt=[5])
    with wrapped(dataset, toml, workers=workers, transforms_cpu=OnTheCpu(), cpu_percentage=share) as loader:
        assert len(next(loader).images) == 4
        with pytest.raises(BadSample, match=r"sample 5 \(.*image_005\.jpg\): corrupt: 8 bytes are no image") as told:
            next(loader)
        assert (told.value.index, told.value.kind) == (5, "corrupt")
        with pytest.raises(BadSample):
            next(loader)
        loader.reset()
        next(loader)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_skip_drops_and_counts(tmp_path: Path, toml: str, share: float) -> None:
    dataset = write_images(tmp_path / "images", 11, corrupt=[1, 4, 5, 6, 7], missing=[10])
    (Path(dataset.samples[0][0])).write_bytes(b"")
    options: dict[str, Any] = {"transforms_cpu": OnTheCpu(), "cpu_percentage": share, "bad_samples": "skip"}
    with wrapped(dataset, toml, **options) as loader:
        batches = taken(loader)
        stats = loader.stats()
        assert loader.state_dict()["position"] == 3
    assert [entry[2] for entry in batches] == [[2, 3], [8, 9]]
    assert (stats["samples"], stats["skipped"], stats["batches"]) == (4, 7, 2)
    assert stats["bad"]["kinds"] == {"corrupt": 5, "unreadable": 2}
    named = {entry["index"]: (entry["kind"], entry["name"]) for entry in stats["bad"]["samples"]}
    assert named[10][0] == "unreadable"
    assert "image_010.jpg" in named[10][1]


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_mask_keeps_the_size(tmp_path: Path, toml: str, share: float) -> None:
    dataset = write_images(tmp_path / "images", 8, corrupt=[1, 4, 5, 6, 7])
    options: dict[str, Any] = {"transforms_cpu": OnTheCpu(), "cpu_percentage": share, "bad_samples": "mask"}
    with wrapped(dataset, toml, **options) as loader:
        first, second = list(loader)
        assert loader.stats()["masked"] == 5
    assert first.images.shape == second.images.shape == (4, 3, 24, 20)
    assert first.mask.tolist() == [True, False, True, True]
    assert first.labels.tolist() == [0, -100, 2, 0]
    assert not first.images[1].any()
    assert first.images[0].any()
    assert second.labels.tolist() == [-100] * 4
    assert not second.mask.any()
    assert torch.isfinite(torch.nn.functional.cross_entropy(torch.zeros(4, 3), first.labels))


def test_masks_for_other_labels(tmp_path: Path, toml: str) -> None:
    files = write_images(tmp_path / "images", 4, corrupt=[0])

    class Boxes:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Any:
            return files[index][0], torch.full((2,), float(index))

    with wrapped(Boxes(), toml, bad_samples="mask", ignore_index=-1) as loader:
        assert next(loader).labels.tolist() == [[-1, -1], [1, 1], [2, 2], [3, 3]]


def test_a_subset_is_named_by_its_own_path(tmp_path: Path, toml: str) -> None:
    dataset = Subset(write_images(tmp_path / "images", 8, corrupt=[6]), [2, 6])  # type: ignore[arg-type]
    with wrapped(dataset, toml) as loader, pytest.raises(BadSample, match=r"sample 1 \(.*image_006\.jpg\)"):
        next(loader)


def test_a_part_of_a_concatenation_is_named_by_its_own_path(tmp_path: Path, toml: str) -> None:
    first = write_images(tmp_path / "first", 3)
    second = write_images(tmp_path / "second", 8, corrupt=[6])
    dataset = ConcatDataset([first, Subset(second, [2, 6])])  # type: ignore[arg-type, list-item]
    with (
        wrapped(dataset, toml, batch_size=5) as loader,
        pytest.raises(BadSample, match=r"4 \(.*second.image_006\.jpg\)"),
    ):
        next(loader)


# -- mistakes ---------------------------------------------------------------------------------------------------------


class Items:
    def __init__(self, *items: Any) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        return self._items[index]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ((picture(4, 4), 0), r"sample 0: the dataset yields decoded images \(ndarray\), not encoded bytes"),
        ((torch.zeros(3, 4, 4), 0), r"decoded images \(Tensor\).*loader=cv2_loader"),
        ((picture(4, 4).ravel(), 0), r"yields ndarray of one dimension, not bytes; .*\.tobytes\(\)"),
        ((torch.zeros(9, dtype=torch.uint8), 0), r"Tensor of one dimension, not bytes; .*\.numpy\(\)\.tobytes\(\)"),
        ((b"x", 0, 1), r"yields \(encoded bytes, label\), got a tuple of 3"),
        (b"x", "got bytes"),
    ],
)
@pytest.mark.parametrize("policy", ["raise", "skip", "mask"])
def test_a_dataset_of_something_else(toml: str, item: Any, message: str, policy: str) -> None:
    with wrapped(Items(item), toml, bad_samples=policy) as loader, pytest.raises(TrainingError, match=message):
        next(loader)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cpu_percentage": 0.5}, "so transforms_cpu must be given"),
        ({"cpu_percentage": 10, "transforms_cpu": TensorToTensor()}, "a share from 0 to 1"),
        ({"cpu_percentage": -0.1}, "a share from 0 to 1"),
        ({"bad_samples": "skipp"}, "did you mean 'skip'"),
        ({"prefetch": -1}, "prefetch is a number of batches from 0 up"),
    ],
)
def test_options_out_of_range(dataset: ImageFiles, toml: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrapped(dataset, toml, **options)


def wrap(kind: str, dataset: Any, toml: Any, **options: Any) -> Any:
    return wrap_dataloader_torchpipe(kind, DataLoader(dataset, batch_size=4), toml, TensorToTensor(), **options)


def test_an_unknown_parallel_type(dataset: ImageFiles, toml: str) -> None:
    with pytest.raises(ValueError, match=r"'dddp' is not known; did you mean 'ddp'\?"):
        wrap("dddp", dataset, toml)


def test_ddp_needs_a_process_group(dataset: ImageFiles, toml: str) -> None:
    with pytest.raises(TrainingError, match="init_process_group"):
        wrap("ddp", dataset, toml, local_rank=0)
    with pytest.raises(TrainingError, match="or a process group"):
        DistributedEvalSampler(dataset)


@NO_CUDA
def test_a_gpu_that_is_not_there(dataset: ImageFiles, toml: str) -> None:
    with pytest.raises(TrainingError, match="no CUDA device"):
        wrap("single", dataset, toml, devices=0)
    with pytest.raises(TrainingError, match="no CUDA device"):
        wrap("dp", dataset, toml)
    with pytest.raises(TrainingError, match="takes several"):
        wrap("single", dataset, toml, devices=["cpu", "cpu"])
    with pytest.raises(BackendUnavailable, match="CUDA"):
        wrap("single", dataset, {"backend": "S[DecodeTensor,ResizeTensor]", "resize_h": 4, "resize_w": 4})
    with wrap("single", dataset, toml) as loader:
        assert loader.devices == [torch.device("cpu")]


def test_a_toml_that_is_wrong(dataset: ImageFiles) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        wrap("single", dataset, "missing.toml")
    with pytest.raises(TrainingError, match=r"result of the TOML is a ndarray, not a Tensor; end it with Mat2Tensor"):
        wrap("single", dataset, {"backend": "DecodeMat"})


@pytest.mark.parametrize(("transform", "dtype"), [(TensorToTensor(), "torch.float32"), (None, "torch.uint8")])
def test_images_of_different_sizes(dataset: ImageFiles, transform: Any, dtype: str) -> None:
    toml = {"backend": "S[DecodeMat,Mat2Tensor]", "device": "cpu"}
    message = (
        rf"the images of a batch differ: sample 0 \(.*\) is 3x30x40 of {dtype}, sample 1 \(.*\) is 3x31x41 .*resize_h"
    )
    with wrapped(dataset, toml, transforms_gpu=transform) as loader, pytest.raises(TrainingError, match=message):
        next(loader)


def test_transforms_that_give_no_tensor_or_raise(dataset: ImageFiles, toml: str) -> None:
    with pytest.raises(TrainingError, match="a small JPEG: the transforms must give a Tensor, got ndarray"):
        wrapped(dataset, toml, transforms_gpu=lambda image: image.numpy())
    with pytest.raises(TrainingError, match="a small JPEG: transforms_gpu raised ZeroDivisionError"):
        wrapped(dataset, toml, transforms_gpu=lambda image: 1 / 0)
    options: dict[str, Any] = {"cpu_percentage": 1.0, "bad_samples": "skip"}
    with (
        wrapped(dataset, toml, transforms_cpu=lambda image: image, **options) as loader,
        pytest.raises(TrainingError, match=r"sample 0 .*transforms_cpu must give a Tensor, got Image; end them with"),
    ):
        next(loader)


def test_dataloaders_that_cannot_be_wrapped(dataset: ImageFiles, toml: str) -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return iter(())

    for loader, message in (
        (DataLoader(Stream()), "no indices"),
        (DataLoader(dataset, batch_size=None), "forms no batches"),
        (DataLoader(dataset, collate_fn=list), "collate_labels="),
        ([1, 2], "expected a torch.utils.data.DataLoader, got list"),
    ):
        with pytest.raises(TrainingError, match=message):
            wrap_dataloader_torchpipe("single", loader, toml)


def test_a_backend_that_raises_is_no_bad_sample(dataset: ImageFiles, toml: str, register: Any) -> None:
    class Breaks:
        def forward(self, items: list[dict[str, Any]]) -> None:
            for item in items:
                if item["data"].shape[2] == 33:  # image 3 of this dataset
                    raise ArithmeticError("on this one")
                item["result"] = item["data"]

    name = register(Breaks)
    backend = f"S[DecodeMat,Mat2Tensor,{name}]"
    with (
        wrap("single", dataset, {"backend": backend, "device": "cpu"}, bad_samples="skip") as loader,
        pytest.raises(TrainingError, match=r"sample 3 .*the pipe raised \(backend_error\).*on this one"),
    ):
        next(loader)


# -- from workers to the training process -----------------------------------------------------------------------------


class Labelled:
    """``count`` times the same image, with the label that ``label(index)`` gives."""

    def __init__(self, label: Any, count: int = 1) -> None:
        self._label, self._count, self._jpeg = label, count, encode(picture(20, 20))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[bytes, Any]:
        return self._jpeg, self._label(index)


def by_a_worker(dataset: Any, toml: str, batch_size: int, **options: Any) -> Any:
    plain = DataLoader(dataset, batch_size, num_workers=1, timeout=20)
    return wrap_dataloader_torchpipe("single", plain, toml, **options)


def test_labels_that_are_tensors_take_no_file_descriptors(toml: str) -> None:
    dataset = Labelled(lambda index: {"row": torch.tensor([index, 2 * index])}, 600)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with by_a_worker(dataset, toml, 200) as loader:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 60, hard))
            rows = torch.cat([batch.labels["row"] for batch in loader])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert rows.tolist() == [[index, 2 * index] for index in range(600)]


@pytest.mark.parametrize(
    "label",
    [
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.tensor([1, 2]).to_sparse(),
        torch.nn.Parameter(torch.ones(2)).requires_grad_(),
        torch.arange(9)[::4],
        torch.zeros(0, 3),
        torch.tensor([True, False]),
    ],
)
def test_tensors_of_every_kind_are_labels(toml: str, label: Any) -> None:
    with by_a_worker(Labelled(lambda _: (label, 3)), toml, 1, collate_labels=list) as loader:
        ((taken, number),) = next(loader).labels
    assert number == 3
    assert torch.equal(taken.to_dense(), label.to_dense())
    assert (taken.dtype, taken.layout) == (label.dtype, label.layout)


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_label_that_cannot_be_sent_is_told(toml: str, policy: str) -> None:
    with (
        by_a_worker(Labelled(lambda _: threading.Lock()), toml, 1, bad_samples=policy) as loader,
        pytest.raises(TrainingError, match="batch 0 cannot be sent to the training process: TypeError"),
    ):
        next(loader)


def test_images_for_which_there_is_no_shared_memory(toml: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Any) -> None:
        raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")

    monkeypatch.setattr(torch.Tensor, "share_memory_", full)  # in the worker too, which is forked
    options = {"transforms_cpu": OnTheCpu(), "cpu_percentage": 1.0, "bad_samples": "skip"}
    with (
        by_a_worker(Labelled(int, 3), toml, 3, **options) as loader,
        pytest.raises(TrainingError, match=r"batch 0 cannot be sent to the training process: .*No space left"),
    ):
        next(loader)


def test_bad_samples_among_images_of_workers(tmp_path: Path, toml: str) -> None:
    dataset = write_images(tmp_path / "images", 5, corrupt=[1], missing=[3])
    options = {"transforms_cpu": OnTheCpu(), "cpu_percentage": 1.0, "bad_samples": "mask"}
    with wrapped(dataset, toml, batch_size=5, **options) as loader:
        (expected,) = taken(loader)
    with by_a_worker(dataset, toml, 5, **options) as loader:
        assert same(taken(loader), [expected])


# -- workers ----------------------------------------------------------------------------------------------------------


class KillsItsWorker:
    """The third sample takes its worker process along."""

    def __init__(self, jpeg: bytes) -> None:
        self._jpeg = jpeg

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        if index == 12:
            os.kill(os.getpid(), signal.SIGKILL)
        return self._jpeg, index


@pytest.mark.usefixtures("workers_may_die")
def test_a_killed_worker_is_an_error(toml: str) -> None:
    with (
        wrapped(KillsItsWorker(encode(picture(20, 20))), toml, workers=2) as loader,
        pytest.raises(RuntimeError, match=r"worker .*(exited|killed)"),
    ):
        for _ in loader:
            pass


def test_a_worker_of_spawn(dataset: ImageFiles, toml: str) -> None:
    plain = DataLoader(dataset, batch_size=4, num_workers=1, multiprocessing_context="spawn")  # type: ignore[arg-type]
    with wrap_dataloader_torchpipe("single", plain, toml, TensorToTensor(), OnTheCpu(), 0.5) as loader:
        assert [len(images) for images, _ in loader] == [4, 4, 3]


def test_nothing_is_left_of_a_loader_that_could_not_be_made(dataset: ImageFiles) -> None:
    before = set(multiprocessing.active_children())
    with pytest.raises(ConfigError):
        wrapped(dataset, "missing.toml", workers=2)
    assert set(multiprocessing.active_children()) <= before


def test_a_stop_iteration_is_no_end(dataset: ImageFiles, toml: str) -> None:
    calls: list[int] = []

    def stop(images: torch.Tensor) -> torch.Tensor:
        calls.append(len(images))
        if len(calls) == 2:
            raise StopIteration
        return images

    with wrapped(dataset, toml, transforms_batch=stop) as loader:
        next(loader)
        with pytest.raises(TrainingError, match="transforms_batch raised StopIteration"):
            next(loader)


EARLY_END = """
import sys
sys.path[:0] = {paths!r}
from training_data import wrapped, write_images, write_toml
from pathlib import Path

if __name__ == "__main__":
    folder = Path({folder!r})
    loader = wrapped(write_images(folder / "images", 40), write_toml(folder), workers=2, prefetch=1)
    for batch in loader:
        break
    print("left the loop")
"""


def test_a_program_that_ends_with_a_loader_open(tmp_path: Path) -> None:
    here = Path(__file__).resolve().parent
    script = tmp_path / "script.py"
    script.write_text(EARLY_END.format(paths=[str(here), str(here.parent)], folder=str(tmp_path)), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=PROGRAM_WAIT, check=False
    )
    assert (done.returncode, done.stdout) == (0, "left the loop\n"), done.stderr
