"""``configs/examples/postprocess.py``: what the example pipelines make of the outputs of their models."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "configs" / "examples"
SPEC = importlib.util.spec_from_file_location("postprocess_of_the_examples", EXAMPLES / "postprocess.py")
postprocess = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(postprocess)


def detector_output(*boxes: tuple[float, float, float, float, float]) -> np.ndarray:
    """5×24×32 with a logit and a box (left, top, right, bottom) each, in the cell of its centre."""
    output = np.zeros((5, 24, 32), np.float32)
    output[0] = -10
    for logit, left, top, right, bottom in boxes:
        x, y = (left + right) / 2 / 8, (top + bottom) / 2 / 8
        sizes = np.log((right - left) / 32), np.log((bottom - top) / 32)
        output[:, int(y), int(x)] = logit, x - int(x) - 0.5, y - int(y) - 0.5, *sizes
    return output


def test_decode_boxes_gives_the_best_first_and_one_of_those_that_overlap() -> None:
    drawn = (1.0, 10, 20, 50, 52), (3.0, 100, 100, 130, 140), (2.0, 108, 100, 138, 140), (-1.0, 200, 20, 230, 50)
    boxes = postprocess.decode_boxes(detector_output(*drawn))
    expected = [(100, 100, 130, 140, 1 / (1 + np.exp(-3))), (10, 20, 50, 52, 1 / (1 + np.exp(-1)))]
    np.testing.assert_allclose(boxes, expected, rtol=1e-5)
    assert len(postprocess.decode_boxes(detector_output(*drawn), iou=0.9)) == 3
    assert len(postprocess.decode_boxes(detector_output(*drawn)[None], threshold=0.2)) == 3


def test_decode_boxes_of_an_empty_scene() -> None:
    assert postprocess.decode_boxes(detector_output()).shape == (0, 5)


@pytest.mark.parametrize(
    ("box", "shape"),
    [
        ((2.4, 3.6, 7.5, 9), (5, 6, 3)),
        ((-5, -5, 4, 4), (4, 4, 3)),
        ((15, 8, 99, 99), (2, 5, 3)),
        ((30, 30, 40, 40), (1, 1, 3)),
        ((-9, -9, -3, -3), (1, 1, 3)),
    ],
)
def test_crop_stays_inside_and_is_never_empty(box: tuple[float, ...], shape: tuple[int, ...]) -> None:
    assert postprocess.crop(np.zeros((10, 20, 3), np.uint8), np.array(box)).shape == shape


@pytest.mark.parametrize(
    ("steps", "text"),
    [([0, 3, 3, 0, 3, 1, 1, 0, 0], "220"), ([10, 10, 0, 10], "99"), ([1], "0"), ([0, 0], ""), ([5, 6, 5], "454")],
)
def test_ctc_text_merges_repeats_and_drops_blanks(steps: list[int], text: str) -> None:
    assert postprocess.ctc_text(np.eye(11, dtype=np.float32)[steps]) == text


@pytest.mark.parametrize(("height", "width", "fitted"), [(24, 100, 160), (32, 64, 64), (48, 97, 96), (48, 1, 32)])
def test_fit_line_keeps_the_height_and_the_step(height: int, width: int, fitted: int) -> None:
    assert postprocess.fit_line(np.zeros((height, width, 3), np.uint8)).shape == (32, fitted, 3)
