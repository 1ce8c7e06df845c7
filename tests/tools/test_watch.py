"""``torchpipe watch``, and the boxes that it draws."""

from __future__ import annotations

import json
from typing import Any

import cv2
import numpy as np
import pytest
from kit.backends import returns
from kit.services import reserved_port
from kit.videos import write_video
from kit.waits import eventually

from torchpipe_py import Detections, cli, pipe
from torchpipe_py.streams import Streams
from torchpipe_py.streams.boxes import COLORS, draw_boxes
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


def test_writes_detections_as_infer_does(files, register, capfd):
    found = Detections([[0.1, 2, 3, 4]], [0.9], [0], ("cat",))
    (files / "detector.toml").write_text(f'backend = "{register(returns(found))}"\n')
    assert watch(files, "detector.toml") == 0
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [line["result"] for line in lines] == [
        [{"box": [0.1, 2, 3, 4], "score": 0.9, "class": 0, "label": "cat"}]
    ] * 5


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
    assert (drawn == COLORS[0]).all(axis=2).any() == pixels


def disc() -> np.ndarray:
    y, x = np.mgrid[:48, :64]
    return (x - 40) ** 2 + (y - 24) ** 2 <= 144


COCO = "hZ11[18J4M2N2N2N2O0O2O00000O20N1000001N101N2N2N2N3L6Hl?"
"""What pycocotools makes of it."""
RUNS = np.flatnonzero(np.diff(disc().T.ravel(), prepend=False, append=True))
MASKS: dict[str, Any] = {
    "array": disc(),
    "file": cv2.imencode(".png", disc() * np.uint8(255))[1].tobytes(),
    "run lengths": {"size": [48, 64], "counts": np.diff(RUNS, prepend=0).tolist()},
    "text": {"size": [48, 64], "counts": COCO},
    "polygons": [[[28, 12], [52.0, 12], [52, 36], [28, 36]]],
}


@pytest.mark.parametrize("kind", MASKS)
def test_draws_masks_and_keypoints_of_detections(kind: str) -> None:
    points = [[[40, 24, 0.9], [10, 40, 0.1]]]
    found = Detections([[2, 3, 20, 30]], [0.5], [1], ("cat", "dog"), points, (MASKS[kind],))
    image = np.full((48, 64, 3), 100, np.uint8)
    drawn = draw_boxes(image, found)
    assert (drawn[3, 2] == COLORS[1]).all()
    assert (drawn[24, 40] == COLORS[1]).all(), "the keypoint"
    assert (drawn[40, 10] == 100).all(), "one of a low score"
    inside = disc() if kind != "polygons" else np.pad(np.ones((25, 25), bool), ((12, 11), (28, 11)))
    away = ~cv2.circle(np.zeros((48, 64), np.uint8), (40, 24), 4, 1, -1).astype(bool)  # of the keypoint
    away[:, :24] = False
    tinted = (0.55 * 100 + 0.45 * np.array(COLORS[1])).astype(np.uint8)
    assert np.array_equal((drawn == tinted).all(axis=2)[away], inside[away])
    assert np.array_equal(draw_boxes(image, found.to_list(plain=False)), drawn)


def test_mask_of_another_size_is_resized_and_an_unreadable_one_left_out() -> None:
    image = np.full((48, 64, 3), 100, np.uint8)
    unreadable: list[Any] = [
        b"no file",
        {"size": [2, 2], "counts": [1]},
        {"size": [2, 2]},
        7,
        [["a"]],
        {"size": 1, "counts": "!"},
    ]
    rows = [{"box": [0, 0, 0, 0], "class": 3, "mask": mask} for mask in [*unreadable, np.ones((4, 4), bool)]]
    assert (draw_boxes(image, rows[:-1])[20:] == 100).all()
    assert (draw_boxes(image, rows)[20:] != 100).any(axis=2).all()
