"""What people see of a clip: windows of ``watch`` and drawn boxes, upright and in their colours."""

from __future__ import annotations

import json

import numpy as np
import pytest
from kit.videos import TURNS, picture, turn_clip, write_clip

from torchpipe_py import cli
from torchpipe_py.streams.boxes import draw_boxes

cv2 = pytest.importorskip("cv2")

BOXES = [[0, 0, 10, 10]]


@pytest.mark.parametrize("decoder", ["pyav", "opencv"])
@pytest.mark.parametrize("name", TURNS)
def test_watch_shows_frames_upright_with_boxes_in_their_pixels(tmp_path, monkeypatch, name, decoder):
    matrix, upright = TURNS[name]
    turn_clip(write_clip(tmp_path / "a.mp4", picture(64, 48)), matrix)
    (tmp_path / "cameras.toml").write_text(f'[phone]\nsource = "a.mp4"\nkeep = "all"\ndecoder = "{decoder}"\n')
    (tmp_path / "small.toml").write_text('backend = "Identity"\n')
    shown = []
    monkeypatch.setattr("torchpipe_py.tools.watch.draw_boxes", lambda image, _: draw_boxes(image, BOXES))
    for function in ("namedWindow", "destroyAllWindows", "waitKey"):
        monkeypatch.setattr(cv2, function, lambda *_: None, raising=False)
    monkeypatch.setattr(cv2, "imshow", lambda _, image: shown.append(image), raising=False)
    files = [str(tmp_path / file) for file in ("small.toml", "cameras.toml", "out.ndjson")]
    assert cli.main(["watch", files[0], "--streams", files[1], "--out", files[2], "--show"]) == 0
    expected = draw_boxes(upright(picture(64, 48)), BOXES)
    assert shown[0].shape == expected.shape
    assert np.abs(shown[0].astype(int) - expected).mean() < 4
    (line,) = (tmp_path / "out.ndjson").read_text().splitlines()
    assert json.loads(line)["result"]["shape"] == list(expected.shape)


def test_draws_on_a_tensor_in_its_colours():
    torch = pytest.importorskip("torch")
    image = picture(64, 48)
    tensor = torch.from_numpy(image[..., ::-1].copy()).permute(2, 0, 1)[None]
    assert np.array_equal(draw_boxes(tensor, BOXES), draw_boxes(image, BOXES))


@pytest.mark.parametrize("box", [[-1e30, 3, 1e30, 30], [2, 3, 20, 30, 0.9, "cat"]])
def test_draws_boxes_beyond_the_image_and_with_more_columns(box):
    assert draw_boxes(np.zeros((48, 64, 3), np.uint8), [box]).any()


def test_draws_thicker_lines_on_larger_images():
    rows = [draw_boxes(np.zeros((side, side, 3), np.uint8), [[10, 10, 40, side]])[side // 2] for side in (96, 1800)]
    small, large = (row.any(axis=1).sum() for row in rows)
    assert large > 2 * small
