"""``torchpipe watch``, and the boxes that it draws."""

from __future__ import annotations

import json

import numpy as np
import pytest
from kit.videos import write_video

from torchpipe_py import cli
from torchpipe_py.streams.boxes import COLOR, draw_boxes

pytest.importorskip("av")


@pytest.fixture
def files(tmp_path):
    """A configuration, and a file of streams with a video of five frames."""
    write_video(tmp_path / "a.mp4", [0] * 5)
    (tmp_path / "small.toml").write_text('backend = "ResizeMat"\nresize_h = 1\nresize_w = 2\n')
    (tmp_path / "wrong.toml").write_text('backend = "CropMat"\n')
    (tmp_path / "cameras.toml").write_text('[door]\nsource = "a.mp4"\nkeep = "all"\n')
    return tmp_path


def watch(files, config, *arguments):
    return cli.main(["watch", str(files / config), "--streams", str(files / "cameras.toml"), *arguments])


def test_writes_a_line_for_each_frame(files, capfd):
    assert watch(files, "small.toml", "--out", str(files / "out.ndjson")) == 0
    lines = [json.loads(line) for line in (files / "out.ndjson").read_text().splitlines()]
    assert [line["number"] for line in lines] == [0, 1, 2, 3, 4]
    assert {line["stream"] for line in lines} == {"door"}
    assert lines[0]["result"]["shape"] == [1, 2, 3]
    assert capfd.readouterr().err.splitlines()[-1].split()[2:5] == ["ended", "5", "5"]


def test_a_frame_without_a_result_says_why(files, capfd):
    assert watch(files, "wrong.toml") == 1
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert len(lines) == 5
    assert all("box" in line["error"] for line in lines)


@pytest.mark.parametrize(
    ("result", "pixels"),
    [
        ([{"box": [2, 3, 20, 30], "label": "7", "score": 0.5}], True),
        ([[2, 3, 20, 30]], True),
        (np.array([[2.0, 3.0, 20.0, 30.0, 0.9]]), True),
        ([{"box": [float("nan"), 0, 0, 0]}, {"box": None}, 3, {}], False),
        (("cat", 0.9), True),
        (None, False),
    ],
)
def test_draws_the_boxes_of_a_result(result, pixels):
    image = np.zeros((48, 64, 3), np.uint8)
    drawn = draw_boxes(image, result)
    assert not image.any()
    assert (drawn == COLOR).all(axis=2).any() == pixels
