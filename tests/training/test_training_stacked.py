"""Without transforms for each sample the background thread makes the batch; it is the one that the other way gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader
from training_data import FORKS, OnTheCpu, same, taken, wrapped, write_images, write_toml

from torchpipe_py.training import BadSample, TorchpipeLoader, wrap_dataloader_torchpipe

pytestmark = FORKS


def unchanged(image: Any) -> Any:
    return image


def both(**options: Any) -> list[list[tuple[Any, ...]]]:
    """An epoch of the fast way and of the slow one, and that their statistics are the same."""
    epochs, counts = [], []
    for transforms in (None, unchanged):
        with wrapped(transforms_gpu=transforms, **options) as loader:
            epochs.append(taken(loader))
            stats = loader.stats()
        counts.append([stats[key] for key in ("samples", "batches", "skipped", "masked", "cpu_batches", "bad")])
    assert counts[0] == counts[1]
    return epochs


@pytest.mark.parametrize("policy", ["skip", "mask"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_bad_samples(tmp_path: Path, policy: str, prefetch: int) -> None:
    dataset = write_images(tmp_path / "images", 14, corrupt=[1, 4, 5, 6, 7], missing=[9])
    toml = write_toml(tmp_path)
    fast, slow = both(dataset=dataset, toml=toml, bad_samples=policy, prefetch=prefetch)
    assert same(fast, slow)
    assert [len(batch[1]) for batch in fast] == ([3, 3, 2] if policy == "skip" else [4, 4, 4, 2])


def test_batches_on_the_cpu_in_between(tmp_path: Path) -> None:
    dataset = write_images(tmp_path / "images", 24)
    options: dict[str, Any] = {"transforms_cpu": OnTheCpu(), "cpu_percentage": 0.5, "shuffle": True, "workers": 1}
    fast, slow = both(dataset=dataset, toml=write_toml(tmp_path), **options)
    assert same(fast, slow)
    assert {batch[4] for batch in fast} == {True, False}


def test_a_bad_sample_is_raised_at_its_batch(tmp_path: Path) -> None:
    dataset = write_images(tmp_path / "images", 12, corrupt=[9])
    with wrapped(dataset, write_toml(tmp_path), transforms_gpu=None) as loader:
        assert [next(loader).indices.tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        with pytest.raises(BadSample, match="image_009"):
            next(loader)


@pytest.mark.parametrize("policy", ["skip", "mask"])
def test_shares(tmp_path: Path, policy: str) -> None:
    dataset = write_images(tmp_path / "images", 10, corrupt=[0, 1, 5])
    toml = write_toml(tmp_path)

    def opened(**options: Any) -> TorchpipeLoader:
        loader = DataLoader(dataset, batch_size=4)
        return wrap_dataloader_torchpipe("dp", loader, toml, devices=["cpu", "cpu"], bad_samples=policy, **options)

    with opened() as fast, opened(transforms_gpu=unchanged) as slow:
        assert same(taken(fast), taken(slow))
    with opened(gather=False) as apart, opened(gather=False, transforms_gpu=unchanged) as other:
        for left, right in zip(apart, other, strict=True):
            assert [images.tolist() for images in left.images] == [images.tolist() for images in right.images]
            assert [labels.tolist() for labels in left.labels] == [labels.tolist() for labels in right.labels]
