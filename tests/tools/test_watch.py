"""``torchpipe watch``, and the boxes that it draws."""

from __future__ import annotations

import json

import numpy as np
import pytest
from kit.services import reserved_port
from kit.videos import write_video
from kit.waits import eventually

from torchpipe_py import cli, pipe
from torchpipe_py.streams import Streams
from torchpipe_py.streams.boxes import COLOR, draw_boxes
from torchpipe_py.tools.watch import summary

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
    assert capfd.readouterr().err.splitlines()[-1].split()[2:6] == ["ended", "5", "0", "5"]


def test_failed_start_keeps_file_of_results(files):
    (files / "out.ndjson").write_text("{}\n")
    (files / "cameras.toml").write_text('[gate]\nsource = "gone.mp4"\n')
    assert watch(files, "small.toml", "--out", str(files / "out.ndjson")) == 1
    assert (files / "out.ndjson").read_text() == "{}\n"


def test_counts_the_frames_that_fps_skips(files, capfd):
    (files / "cameras.toml").write_text('fps = 5\n[door]\nsource = "a.mp4"\nkeep = "all"\n')
    assert watch(files, "small.toml") == 0
    heads, door = (line.split() for line in capfd.readouterr().err.splitlines()[-2:])
    assert dict(zip(heads, door, strict=False)).items() >= {"decoded": "5", "skipped": "4", "results": "1"}.items()


@pytest.mark.parametrize(("reconnect", "state"), [(True, "never reached"), (False, "failed")])
def test_unreachable_camera_reports_reason(reconnect, state):
    with reserved_port() as port, pipe({"backend": "Identity"}) as run:
        source = f"rtsp://viewer:secret@127.0.0.1:{port}/live"
        with Streams(run, {"door": {"source": source, "reconnect": reconnect}}) as streams:
            eventually(lambda: "last_error" in streams.stats()["door"])
            streams.close()
            table = summary(streams, 1.0)
    assert state in table
    assert streams.stats()["door"]["state"] == state
    assert "refused" in table
    assert "secret" not in table


def test_frame_without_result_reports_reason(files, capfd):
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
