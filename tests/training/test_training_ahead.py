"""Batches on their way: the next one is read and started while one is decoded, and nothing is lost or left over."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import encode, picture
from torch.utils.data import DataLoader, dataloader
from training_data import FORKS, same, taken, wrapped, write_images

from torchpipe_py import ItemBackend, register_backend
from torchpipe_py.training import ImageFiles, TrainingError, wrap_dataloader_torchpipe

pytestmark = FORKS

DECODE = {"backend": "S[DecodeMat,ResizeMat,Mat2Tensor]", "resize_h": 8, "resize_w": 8, "device": "cpu"}
WAIT = 60.0


class Meeting(ItemBackend):
    """The first image of a batch of one waits for that of the next batch, in the other instance."""

    image: bytes
    together: threading.Barrier

    def forward_item(self, item: Any) -> None:
        if item["data"] == type(self).image:  # and not that of the loader's own trial
            type(self).together.wait(WAIT)
        item["result"] = torch.zeros(1, 3, 4, 4)


register_backend(Meeting, "Meeting")


class Encoded:
    def __getitem__(self, index: int) -> tuple[bytes, int]:
        return Meeting.image, index

    def __len__(self) -> int:
        return 6


def test_two_batches_are_decoded_at_once() -> None:
    """Also after epochs that were left early."""
    Meeting.image, Meeting.together = encode(picture(40, 40)), threading.Barrier(2)
    toml = {"max_inflight": 2, "node": {"backend": "Meeting", "instance_num": 2}}
    with wrapped(Encoded(), toml, batch_size=1, transforms_gpu=None) as loader:
        for _ in range(3):
            assert [int(labels) for _, labels in loader] == list(range(6))
            loader.reset()


@pytest.mark.parametrize("limit", [3, 4, 6, 8, 12])
@pytest.mark.parametrize("policy", ["skip", "mask"])
def test_the_pipes_limit_is_kept(tmp_path: Path, limit: int, policy: str) -> None:
    """Batches that are larger, smaller, and smaller together than the pipe lets in."""
    dataset = write_images(tmp_path / "images", 22, corrupt=[3], missing=[4, 5, 6, 7, 8, 9, 21])
    epochs = []
    for most in (10000, limit):
        with wrapped(
            dataset, {"max_inflight": most, "decode": DECODE}, batch_size=5, transforms_gpu=None, bad_samples=policy
        ) as loader:
            next(loader)
            loader.reset(0)
            epochs.append(taken(loader))
    assert same(*epochs)
    assert sum(len(labels) for _, labels, *_ in epochs[0]) == (14 if policy == "skip" else 22)


def test_the_limit_of_shares_is_kept(tmp_path: Path) -> None:
    dataset = write_images(tmp_path / "images", 16)
    epochs = []
    for most in (10000, 6):
        toml = {"max_inflight": most, "decode": DECODE}
        plain = DataLoader(dataset, batch_size=10)
        with wrap_dataloader_torchpipe("dp", plain, toml, devices=["cpu", "cpu"]) as loader:
            epochs.append(taken(loader))
    assert same(*epochs)


class DiesLater:
    """The fifth batch of two takes its worker along."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        if index == 8:
            os.kill(os.getpid(), signal.SIGKILL)
        return encode(picture(20, 20)), index


@pytest.mark.usefixtures("workers_may_die")
@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_an_error_comes_after_the_batches_before_it(prefetch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # PyTorch looks every five seconds whether its workers live.
    monkeypatch.setattr(dataloader._MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.1,))
    # With a prefetch_factor of 1 the fifth batch is asked for once the fourth has come.
    plain = DataLoader(DiesLater(), batch_size=2, num_workers=1, prefetch_factor=1)
    toml = {"decode": DECODE}
    with wrap_dataloader_torchpipe("single", plain, toml, prefetch=prefetch, transforms_gpu=None) as loader:
        assert [next(loader).labels.tolist() for _ in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
        with pytest.raises(RuntimeError, match=r"worker .*(exited|killed)"):
            next(loader)


class SlowAfterTheFirst:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        if index:
            assert SlowAfterTheFirst.given.wait(WAIT)
        return encode(picture(20, 20)), index

    given = threading.Event()


def test_a_batch_does_not_wait_for_the_next_one() -> None:
    SlowAfterTheFirst.given.clear()
    with wrapped(SlowAfterTheFirst(), {"decode": DECODE}, batch_size=1, transforms_gpu=None) as loader:
        next(loader)
        SlowAfterTheFirst.given.set()  # in time, or reading the next one fails
        assert len(list(loader)) == 3


def test_what_is_no_image_is_told_before_sizes_that_differ(tmp_path: Path) -> None:
    class Odd(ImageFiles):
        def __getitem__(self, index: int) -> Any:
            return ("text", 0) if index == 1 else super().__getitem__(index)

    dataset = Odd(write_images(tmp_path / "images", 4).samples)
    toml = {"decode": {"backend": "S[DecodeMat,Mat2Tensor]", "device": "cpu"}}
    with (
        wrapped(dataset, toml, transforms_gpu=None, bad_samples="mask") as loader,
        pytest.raises(TrainingError, match=r"sample 1 .*decoded images"),
    ):
        next(loader)
