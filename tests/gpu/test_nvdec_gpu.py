"""Streams decoded by a GPU: the frames of the CPU, and of damaged files nothing of other streams."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from kit.gpu import needs_gpu
from kit.videos import TURNS, picture, turn_clip, write_clip, write_video

from torchpipe_py import ItemBackend, Registry, pipe
from torchpipe_py.streams import Frame, Streams

pytestmark = needs_gpu
pytest.importorskip("PyNvVideoCodec")

FRAMES = 30
SIZE = 640, 480


class Keep(ItemBackend):
    """The image itself."""

    def forward_item(self, item):
        item["result"] = item["data"]


def play(path: Path, **keys: object) -> list[Frame]:
    registry = Registry()
    registry.register_backend(Keep)
    tables = {"a": {"source": str(path), "keep": "all", "decoder": "pynvvideocodec", **keys}}
    with pipe({"backend": "Keep"}, registry=registry) as run, Streams(run, tables) as streams:
        return list(streams)


@pytest.mark.parametrize("name", ["a.mp4", "a.ts"])
@pytest.mark.parametrize("is_live", [False, True])
def test_frames_stay_on_the_gpu_in_order(tmp_path: Path, name: str, is_live: bool) -> None:
    path = write_video(tmp_path / name, range(20, 20 + 5 * FRAMES, 5), "libx264", SIZE)
    on_gpu, on_cpu = play(path, live=is_live), play(path, decoder="pyav")
    assert [frame.pts for frame in on_gpu] == pytest.approx([frame.pts for frame in on_cpu])
    for one, other in zip(on_gpu, on_cpu, strict=True):
        assert one.result.is_cuda
        mat = one.result[0].permute(1, 2, 0).cpu().numpy()[..., ::-1]
        assert np.abs(mat.astype(int) - other.result).max() <= 4


@pytest.mark.parametrize("name", TURNS)
def test_frames_are_upright(tmp_path: Path, name: str) -> None:
    path = turn_clip(write_clip(tmp_path / "a.mp4", picture(*SIZE), "libx264", frames=5), TURNS[name][0])
    on_gpu, on_cpu = play(path), play(path, decoder="pyav")
    assert len(on_gpu) == len(on_cpu) == 5
    for one, other in zip(on_gpu, on_cpu, strict=True):
        assert one.result.is_cuda
        assert one.result.is_contiguous()
        mat = one.result[0].permute(1, 2, 0).cpu().numpy()[..., ::-1]
        assert mat.shape == other.result.shape
        assert np.abs(mat.astype(int) - other.result).mean() < 4


def test_frames_of_a_damaged_file_do_not_depend_on_other_streams(tmp_path: Path) -> None:
    """The memory of decoders is used again: after a white stream and after a black one, the same pixels."""
    others = [write_video(tmp_path / f"{shade}.ts", [shade] * FRAMES, "libx264", SIZE) for shade in (250, 5)]
    whole = write_video(tmp_path / "a.ts", range(20, 20 + 5 * FRAMES, 5), "libx264", SIZE).read_bytes()
    rng = np.random.default_rng(0)
    for index in range(8):
        broken = bytearray(whole)
        for place in rng.integers(2000, len(whole), 3 + index):
            broken[place] = rng.integers(256)
        path = tmp_path / f"broken{index}.ts"
        path.write_bytes(broken)
        after = []
        for other in others:
            for _ in range(4):
                play(other)
            after.append([frame.result for frame in play(path)])
        assert len(after[0]) == len(after[1])
        assert all(torch.equal(one, two) for one, two in zip(*after, strict=True)), index
