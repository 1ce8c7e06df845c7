"""Bad samples and mistakes: each is an error at construction or at its batch, never a hang."""

from __future__ import annotations

import multiprocessing
import os
import re
import resource
import signal
import struct
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import encode, picture
from kit.training_data import FORKS, OnTheCpu, same, taken, wrapped, write_images
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, dataloader

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

WAYS = pytest.mark.parametrize(
    "options",
    [{}, {"workers": 1}, {"cpu_percentage": 1.0}, {"cpu_percentage": 1.0, "workers": 1}],
    ids=["pipe", "pipe-workers", "cpu", "cpu-workers"],
)
"""A batch decoded by the pipe or by ``transforms_cpu``, read here or in a worker."""


# -- bad samples ------------------------------------------------------------------------------------------------------

HOSTILE = {
    1: bytes.fromhex("89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b55")  # animated PNG
    + bytes.fromhex("000000086163544c0000000200000000f38d9370"),
    4: b"BM" + struct.pack("<IHHIIiiHHII", 54, 0, 0, 54, 40, 30_000, 30_000, 1, 8, 1, 0) + bytes(16),  # 9e8 pixels
    6: b"GIF89a" + struct.pack("<HHBBB", 32_767, 32_767, 0x80, 0, 0) + bytes(16),  # another format
    8: b"",
}


@WAYS
def test_skip_drops_and_counts_bad_samples(tmp_path: Path, toml: str, options: dict[str, Any]) -> None:
    dataset = write_images(tmp_path / "images", 17, corrupt=[13, 14, 15], missing=[12])
    for index, content in HOSTILE.items():
        (tmp_path / "images" / f"image_{index:03}.jpg").write_bytes(content)
    with wrapped(dataset, toml, transforms_cpu=OnTheCpu(), bad_samples="skip", **options) as loader:
        assert [batch[2] for batch in taken(loader)] == [[0, 2, 3], [5, 7], [9, 10, 11], [16]]
        stats = loader.stats()
        assert loader.state_dict()["position"] == 5
    assert (stats["samples"], stats["skipped"], stats["batches"]) == (9, 8, 4)
    assert stats["bad"]["kinds"] == {"corrupt": 6, "unreadable": 2}
    named = {entry["index"]: (entry["kind"], entry["name"]) for entry in stats["bad"]["samples"]}
    assert named[12][0] == "unreadable"
    assert "image_012.jpg" in named[12][1]


@WAYS
def test_mask_keeps_the_place_of_a_bad_sample(tmp_path: Path, toml: str, options: dict[str, Any]) -> None:
    dataset = write_images(tmp_path / "images", 8, corrupt=[1, 4, 5, 6, 7])
    with wrapped(dataset, toml, transforms_cpu=OnTheCpu(), bad_samples="mask", **options) as loader:
        first, second = list(loader)
        assert loader.stats()["masked"] == 5
    assert first.images.shape == second.images.shape == (4, 3, 24, 20)
    assert first.mask.tolist() == [True, False, True, True]
    assert first.labels.tolist() == [0, -100, 2, 0]
    assert (bool(first.images[1].any()), bool(first.images[0].any())) == (False, True)
    assert (second.labels.tolist(), bool(second.mask.any())) == ([-100] * 4, False)
    assert (first.filler, second.filler) == (False, True)
    for batch in (first, second):
        outputs = torch.zeros(4, 3, requires_grad=True)
        loss = 0 * outputs.sum() if batch.filler else torch.nn.functional.cross_entropy(outputs, batch.labels)
        loss.backward()
        assert torch.isfinite(loss)
        assert bool(outputs.grad.any()) is not batch.filler


@WAYS
def test_raise_names_the_bad_sample(tmp_path: Path, toml: str, options: dict[str, Any]) -> None:
    dataset = write_images(tmp_path / "images", 8, corrupt=[5])
    with wrapped(dataset, toml, transforms_cpu=OnTheCpu(), **options) as loader:
        assert len(next(loader).images) == 4
        for _ in range(2):
            with pytest.raises(BadSample, match=r"sample 5 \(.*image_005\.jpg\): corrupt: 8 bytes: not a") as told:
                next(loader)
            assert (told.value.index, told.value.kind) == (5, "corrupt")
        loader.reset()
        next(loader)


def test_a_bad_sample_is_named_by_its_path_within_subsets(tmp_path: Path, toml: str) -> None:
    second = write_images(tmp_path / "second", 8, corrupt=[6])
    dataset = ConcatDataset([write_images(tmp_path / "first", 3), Subset(second, [2, 6])])  # type: ignore[arg-type, list-item]
    with (
        wrapped(dataset, toml, batch_size=5) as loader,
        pytest.raises(BadSample, match=r"4 \(.*second.image_006\.jpg\)"),
    ):
        next(loader)


class Items:
    """A dataset of ``count`` items that ``item(index)`` makes."""

    def __init__(self, item: Any, count: int = 1) -> None:
        self._item, self._count = item, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return self._item(index)


JPEG = encode(picture(20, 20))


@pytest.mark.parametrize(
    ("label", "ignored"),
    [
        (lambda index: torch.full((2,), float(index)), [[-1, -1], [1, 1]]),
        (float, [-1.0, 1.0]),
        (lambda index: torch.tensor([index]).numpy(), [[-1], [1]]),
    ],
)
def test_masks_take_labels_of_several_kinds(toml: str, label: Any, ignored: Any) -> None:
    dataset = Items(lambda index: (JPEG if index else b"no image", label(index)), 2)
    with wrapped(dataset, toml, bad_samples="mask", ignore_index=-1) as loader:
        assert next(loader).labels.tolist() == ignored
    with (
        wrapped(Items(lambda index: (b"no image", "text")), toml, bad_samples="mask") as loader,
        pytest.raises(TypeError, match="a label of type str cannot be ignored"),
    ):
        next(loader)


# -- mistakes ---------------------------------------------------------------------------------------------------------


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
@pytest.mark.parametrize("policy", ["raise", "mask"])
def test_refuses_datasets_of_other_samples(toml: str, item: Any, message: str, policy: str) -> None:
    dataset = Items(lambda index: item)
    with wrapped(dataset, toml, bad_samples=policy) as loader, pytest.raises(TrainingError, match=message):
        next(loader)


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(())


NO_CUDA = [] if torch.cuda.is_available() else [
    ({"devices": 0}, TrainingError, "no CUDA device"),
    ({"kind": "dp"}, TrainingError, "no CUDA device"),
    ({"toml": {"backend": "S[DecodeTensor,ResizeTensor]", "resize_h": 4, "resize_w": 4}}, BackendUnavailable, "CUDA"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"prefech": 1}, TypeError, r"wrap_dataloader_torchpipe.*'prefech'; did you mean 'prefetch'\?"),
        ({"cpu_percentage": 0.5, "transforms_cpu": None}, ValueError, "so transforms_cpu must be given"),
        ({"cpu_percentage": 10}, ValueError, "a share from 0 to 1"),
        ({"bad_samples": "skipp"}, ValueError, "did you mean 'skip'"),
        ({"prefetch": -1}, ValueError, "prefetch is a number of batches from 0 up"),
        ({"kind": "dddp"}, ValueError, r"'dddp' is not known; did you mean 'ddp'\?"),
        ({"kind": "ddp", "local_rank": 0}, TrainingError, "init_process_group"),
        ({"devices": ["cpu", "cpu"]}, TrainingError, "takes several"),
        ({"devices": []}, TrainingError, "devices is empty"),
        ({"devices": "meta"}, TrainingError, "works on CUDA devices and on the CPU"),
        ({"toml": "missing.toml", "num_workers": 2}, ConfigError, "no such file"),
        ({"toml": {"backend": "DecodeMat"}}, TrainingError, "is a ndarray, not a Tensor; end it with Mat2Tensor"),
        (
            {"transforms_gpu": lambda image: image.numpy()},
            TrainingError,
            "the transforms must give a Tensor, got ndarray",
        ),
        (
            {"transforms_gpu": lambda image: 1 / 0},
            TrainingError,
            "small image: transforms_gpu raised ZeroDivision",
        ),
        ({"dataset": Stream()}, TrainingError, "no indices"),
        ({"batch_size": None}, TrainingError, "forms no batches"),
        ({"collate_fn": list}, TrainingError, "collate_labels="),
        ({"loader": [1, 2]}, TrainingError, "expected a torch.utils.data.DataLoader, got list"),
        ({"workers_decode": True}, TrainingError, "workers_decode: the DataLoader has no workers"),
        (
            {"workers_decode": True, "num_workers": 1, "multiprocessing_context": "fork"},
            TrainingError,
            "use multiprocessing_context='spawn'",
        ),
        *NO_CUDA,
    ],
)
def test_refuses_loaders_that_cannot_be_wrapped(
    dataset: ImageFiles, toml: str, given: dict[str, Any], kind: type[Exception], message: str
) -> None:
    before = set(multiprocessing.active_children())
    given = {"transforms_gpu": TensorToTensor(), "transforms_cpu": TensorToTensor(), "batch_size": 4, **given}
    names = ("batch_size", "collate_fn", "num_workers", "multiprocessing_context")
    plain: dict[str, Any] = {name: given.pop(name) for name in names if name in given}
    loader = given.pop("loader", None) or DataLoader(given.pop("dataset", dataset), **plain)
    with pytest.raises(kind, match=message):
        wrap_dataloader_torchpipe(given.pop("kind", "single"), loader, given.pop("toml", toml), **given)
    assert set(multiprocessing.active_children()) <= before
    with pytest.raises(TrainingError, match="or a process group"):
        DistributedEvalSampler(dataset)


@pytest.mark.parametrize(("transform", "dtype"), [(TensorToTensor(), "torch.float32"), (None, "torch.uint8")])
def test_images_of_different_sizes_are_errors(dataset: ImageFiles, transform: Any, dtype: str) -> None:
    toml = {"backend": "S[DecodeMat,Mat2Tensor]", "device": "cpu"}
    message = (
        rf"the images of a batch differ: sample 0 \(.*\) is 3x30x40 of {dtype}, sample 1 \(.*\) is 3x31x41 .*resize_h"
    )
    with wrapped(dataset, toml, transforms_gpu=transform) as loader, pytest.raises(TrainingError, match=message):
        next(loader)


def test_failing_code_is_not_a_bad_sample(dataset: ImageFiles, toml: str, register: Any) -> None:
    class Breaks:
        def forward(self, items: list[dict[str, Any]]) -> None:
            for item in items:
                if item["data"].shape[2] == 33:  # image 3 of this dataset
                    raise ArithmeticError("on this one")
                item["result"] = item["data"]

    calls: list[int] = []

    def stop(images: torch.Tensor) -> torch.Tensor:
        calls.append(len(images))
        if len(calls) == 2:
            raise StopIteration
        return images

    backend = {"backend": f"S[DecodeMat,Mat2Tensor,{register(Breaks)}]", "device": "cpu"}
    no_tensor: dict[str, Any] = {"transforms_cpu": lambda image: image, "cpu_percentage": 1.0}
    of_three: dict[str, Any] = {"transforms_cpu": lambda image: torch.zeros(3, *image.size), "cpu_percentage": 1.0}
    fails: dict[str, Any] = {"transforms_cpu": lambda image: image / 0, "cpu_percentage": 1.0}
    gray = {"backend": "S[DecodeMat,Mat2Tensor]", "device": "cpu", "color": "gray"}
    for config, options, message in (
        (backend, {}, r"sample 3 .*the pipe raised \(backend_error\).*on this one"),
        (toml, no_tensor, r"sample 0 .*transforms_cpu must give a Tensor, got Image; end them with"),
        (gray, of_three, "sample 0 .*transforms_cpu gives 3 channels, the images of the pipe have 1 channel"),
        (gray, fails, "sample 0 .*transforms_cpu, for a PIL.Image of mode L, raised TypeError"),
        (toml, {"transforms_batch": stop}, "transforms_batch raised StopIteration"),
    ):
        with (
            wrapped(dataset, config, bad_samples="skip", **options) as loader,
            pytest.raises(TrainingError, match=message),
        ):
            list(loader)


# -- from workers to the training process -----------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"collate_labels": list, "workers_decode": True}])
def test_labels_that_are_tensors_take_no_file_descriptors(dataset: ImageFiles, toml: str, options: Any) -> None:
    labelled = Labelled(dataset.samples * 15)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with wrapped(labelled, toml, batch_size=160, workers=1, **options) as loader:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 60, hard))
            labels = [batch.labels for batch in loader]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    rows = [row for part in labels for row in (part["row"] if isinstance(part, dict) else [one["row"] for one in part])]
    assert torch.stack(rows).tolist() == [[index, 2 * index] for index in range(165)]


class Labelled(ImageFiles):
    """A dataset whose labels contain Tensors."""

    def __getitem__(self, index: int) -> tuple[bytes, Any]:
        return super().__getitem__(index)[0], {"row": torch.tensor([index, 2 * index])}


LABELS = (
    torch.tensor(1.5, dtype=torch.bfloat16),
    torch.tensor([1, 2]).to_sparse(),
    torch.nn.Parameter(torch.ones(2)).requires_grad_(),
    torch.arange(9)[::4],
    torch.arange(20_000)[::2],
    torch.zeros(0, 3),
    torch.tensor([True, False]),
)


def test_tensors_of_every_kind_are_labels(toml: str) -> None:
    dataset = Items(lambda index: (JPEG, (LABELS[index], 3)), len(LABELS))
    with wrapped(dataset, toml, batch_size=len(LABELS), workers=1, collate_labels=list) as loader:
        arrived = next(loader).labels
    for label, (tensor, number) in zip(LABELS, arrived, strict=True):
        assert number == 3
        assert torch.equal(tensor.to_dense(), label.to_dense())
        assert (tensor.dtype, tensor.layout) == (label.dtype, label.layout)


def test_unpicklable_sample_is_an_error(toml: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Any) -> None:
        raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")

    message = "batch 0 cannot be sent to the training process: "
    locks = Items(lambda index: (JPEG, threading.Lock()))
    with (
        wrapped(locks, toml, workers=1, bad_samples="skip") as loader,
        pytest.raises(TrainingError, match=f"{message}TypeError"),
    ):
        next(loader)
    monkeypatch.setattr(torch.Tensor, "share_memory_", full)  # in the worker too, which is forked
    images = Items(lambda index: (JPEG, index), 3)
    with (
        wrapped(images, toml, workers=1, transforms_cpu=OnTheCpu(), cpu_percentage=1.0) as loader,
        pytest.raises(TrainingError, match=rf"{message}.*No space left"),
    ):
        next(loader)


# -- workers ----------------------------------------------------------------------------------------------------------


class DiesLater:
    """The fifth batch of two takes its worker along."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        if index == 8:
            os.kill(os.getpid(), signal.SIGKILL)
        return JPEG, index


@pytest.mark.usefixtures("workers_may_die")
@pytest.mark.parametrize("prefetch", [0, 4])
def test_a_dead_worker_is_an_error_after_the_batches_before_it(
    toml: str, prefetch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # PyTorch looks every five seconds whether its workers live.
    monkeypatch.setattr(dataloader._MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.1,))
    # With a prefetch_factor of 1 the fifth batch is asked for once the fourth has come.
    plain = DataLoader(DiesLater(), batch_size=2, num_workers=1, prefetch_factor=1)  # type: ignore[arg-type]
    with wrap_dataloader_torchpipe("single", plain, toml, prefetch=prefetch) as loader:
        assert [next(loader).labels.tolist() for _ in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
        with pytest.raises(TrainingError, match=r"worker .*(exited|killed)"):
            next(loader)


@pytest.mark.slow
def test_loader_works_with_spawn(dataset: ImageFiles, toml: str) -> None:
    plain = DataLoader(dataset, batch_size=4, num_workers=1, multiprocessing_context="spawn")  # type: ignore[arg-type]
    with wrap_dataloader_torchpipe("single", plain, toml, TensorToTensor(), OnTheCpu(), 0.5) as loader:
        spawned = taken(loader)
    with wrapped(dataset, toml, transforms_cpu=OnTheCpu(), cpu_percentage=0.5) as loader:
        assert same(spawned, taken(loader))


@pytest.mark.parametrize("wrong", [["a.jpg"], ["ab"], [Path("a.jpg")], [("a.jpg",)], [("a.jpg", 1, 2)], [(1, "a.jpg")]])
def test_samples_that_are_not_pairs_are_refused_at_once(wrong: Any) -> None:
    with pytest.raises(TrainingError, match=rf"\(path, label\) pairs, got {re.escape(repr(wrong[0]))}$"):
        ImageFiles([("b.jpg", 0), *wrong])
    with pytest.raises(TrainingError, match="got 'images'; a folder: ImageFolder"):
        ImageFiles("images")  # type: ignore[arg-type]
    assert ImageFiles([("a.jpg", 0), ["b.jpg", 1], np.array(["c.jpg", "2"])]).samples  # type: ignore[list-item]
    assert ImageFiles([(1, 2)], loader=bytes)[0] == (b"\0", 2)
