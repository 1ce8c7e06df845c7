"""The committed example models, on the committed pictures, by ``onnxruntime``, ``cv2`` and ``postprocess.py`` alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnx
import pytest
from examples import drawing, measure, networks
from examples.make import LINE_AXES, export, export_reader, first_of_each_length, first_right, write_scenes
from examples.shared import postprocess

EXAMPLES = Path(__file__).resolve().parents[2] / "configs" / "examples"
BUDGET = 900_000  # bytes of the whole folder
MODEL_BUDGETS = {"detector": 150_000, "digits": 150_000, "textline": 200_000}
SCENES: dict[str, list[dict[str, Any]]] = json.loads((EXAMPLES / "scenes" / "truth.json").read_text(encoding="utf-8"))
LINES: dict[str, str] = json.loads((EXAMPLES / "lines" / "truth.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def runs() -> dict[str, measure.Run]:
    return {name: measure.runner(EXAMPLES / f"{name}.onnx") for name in MODEL_BUDGETS}


def random_digits(count: int = 50) -> drawing.Digits:
    """In the place of scikit-learn's."""
    rng = np.random.default_rng(0)
    return drawing.Digits(rng.random((count, 8, 8), dtype=np.float32), rng.integers(0, 10, count))


def detector_output(*boxes: tuple[float, float, float, float, float]) -> np.ndarray:
    """5×24×32 with a logit and a box (left, top, right, bottom) each, in the cell of its centre."""
    output = np.zeros((5, 24, 32), np.float32)
    output[0] = -10
    for logit, left, top, right, bottom in boxes:
        x, y = (left + right) / 2 / 8, (top + bottom) / 2 / 8
        sizes = np.log((right - left) / 32), np.log((bottom - top) / 32)
        output[:, int(y), int(x)] = logit, x - int(x) - 0.5, y - int(y) - 0.5, *sizes
    return output


# --- what is committed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCENES)
def test_a_scene_is_read_as_drawn(name: str, runs: dict[str, measure.Run]) -> None:
    mat = cv2.imread(str(EXAMPLES / "scenes" / name))
    assert mat.shape == (drawing.HEIGHT, drawing.WIDTH, 3)
    labels = (EXAMPLES / "digits.txt").read_text(encoding="utf-8").split()
    boxes, digits = measure.read_scene(runs["detector"], runs["digits"], mat)
    matched = measure.match(boxes, np.array([tile["box"] for tile in SCENES[name]]))
    assert len(boxes) == len(matched) == len(SCENES[name])
    named = sorted((index, labels[digits[place]]) for place, index, _ in matched)
    assert [label for _, label in named] == [tile["label"] for tile in SCENES[name]]


@pytest.mark.parametrize("name", LINES)
def test_a_line_is_read_as_drawn(name: str, runs: dict[str, measure.Run]) -> None:
    assert measure.read_line(runs["textline"], cv2.imread(str(EXAMPLES / "lines" / name))) == LINES[name]


def test_a_line_reads_the_same_in_a_batch_with_a_wider_one(runs: dict[str, measure.Run]) -> None:
    mats = [postprocess.fit_line(cv2.imread(str(EXAMPLES / "lines" / name))) for name in LINES]
    widest = max(mat.shape[1] for mat in mats)
    padded = [cv2.copyMakeBorder(mat, 0, 0, 0, widest - mat.shape[1], cv2.BORDER_REPLICATE) for mat in mats]
    logits = runs["textline"](np.concatenate([postprocess.to_input(mat) for mat in padded]))
    assert logits.shape == (len(mats), widest // 8, 11)
    assert [postprocess.ctc_text(steps) for steps in logits] == list(LINES.values())


def test_the_pictures_differ_in_what_matters() -> None:
    assert len(SCENES) == 8
    assert len({len(tiles) for tiles in SCENES.values()}) >= 3
    assert len(LINES) == 10
    shapes = [cv2.imread(str(EXAMPLES / "lines" / name)).shape for name in LINES]
    assert len({width for _, width, _ in shapes}) == len(LINES)
    assert len({height for height, _, _ in shapes}) >= 5
    assert all(24 <= height <= 48 for height, _, _ in shapes)


def test_the_folder_stays_small() -> None:
    files = [path for path in EXAMPLES.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) <= BUDGET
    for name, budget in MODEL_BUDGETS.items():
        assert (EXAMPLES / f"{name}.onnx").stat().st_size <= budget


@pytest.mark.parametrize(
    ("name", "inputs", "outputs"),
    [
        ("detector", ["batch", 3, 192, 256], ["batch", 5, 24, 32]),
        ("digits", ["batch", 3, 32, 32], ["batch", 10]),
        ("textline", ["batch", 3, 32, "width"], ["batch", "steps", 11]),
    ],
)
def test_the_graphs_name_their_free_dimensions(name: str, inputs: list[int | str], outputs: list[int | str]) -> None:
    graph = onnx.load(EXAMPLES / f"{name}.onnx").graph

    def dims(value: onnx.ValueInfoProto) -> list[int | str]:
        return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]

    assert [(value.name, dims(value)) for value in graph.input] == [("input", inputs)]
    assert [(value.name, dims(value)) for value in graph.output] == [("logits", outputs)]


# --- postprocess.py ----------------------------------------------------------------------------------------------


def test_decode_boxes_gives_the_best_first_and_one_of_those_that_overlap() -> None:
    drawn = (1.0, 10, 20, 50, 52), (3.0, 100, 100, 130, 140), (2.0, 108, 100, 138, 140), (-1.0, 200, 20, 230, 50)
    boxes = postprocess.decode_boxes(detector_output(*drawn))
    expected = [(100, 100, 130, 140, 1 / (1 + np.exp(-3))), (10, 20, 50, 52, 1 / (1 + np.exp(-1)))]
    np.testing.assert_allclose(boxes, expected, rtol=1e-5)
    assert len(postprocess.decode_boxes(detector_output(*drawn), iou=0.9)) == 3
    assert len(postprocess.decode_boxes(detector_output(*drawn)[None], threshold=0.2)) == 3


def test_decode_boxes_of_an_empty_scene() -> None:
    assert postprocess.decode_boxes(detector_output()).shape == (0, 5)


def test_the_targets_decode_to_the_boxes_they_were_made_of() -> None:
    scene = drawing.draw_scene(np.random.default_rng(5), random_digits())
    target = networks.detector_target(scene.boxes)
    boxes = postprocess.decode_boxes(np.concatenate([target[:1] * 20 - 10, target[1:5]]))[:, :4]
    assert sorted(boxes.round().astype(int).tolist()) == sorted(scene.boxes.tolist())


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


# --- the script's helpers ----------------------------------------------------------------------------------------


def test_drawings_depend_on_the_seed_alone() -> None:
    digits = random_digits()
    several = drawing.draw_set(drawing.draw_scene, digits, (0, drawing.TRAIN, drawing.SCENES), 3)
    fewer = drawing.draw_set(drawing.draw_scene, digits, (0, drawing.TRAIN, drawing.SCENES), 1)
    held_out = drawing.draw_set(drawing.draw_scene, digits, (0, drawing.HELD_OUT, drawing.SCENES), 1)
    assert several[0].jpeg == fewer[0].jpeg != held_out[0].jpeg


def test_tiles_keep_their_distance_and_size() -> None:
    for scene in drawing.draw_set(drawing.draw_scene, random_digits(), (3, 0, 0), 20):
        sides = scene.boxes[:, 2:] - scene.boxes[:, :2]
        assert 1 <= len(scene.boxes) == len(scene.classes) <= 6
        assert sides.min() >= drawing.TILE_SIDES[0]
        assert sides.max() <= drawing.TILE_SIDES[1]
        grown = scene.boxes + np.array([-1, -1, 1, 1]) * (drawing.MARGIN // 2)
        for place, box in enumerate(grown):
            assert not postprocess.overlaps(box, np.delete(grown, place, axis=0)).any()


def test_match_uses_each_box_once() -> None:
    truth = np.array([[0, 0, 10, 10], [50, 50, 60, 60]])
    boxes = np.array([[0, 0, 10, 8], [0, 0, 10, 10], [50, 50, 60, 90]], np.float32)
    assert measure.match(boxes, truth) == [(1, 0, 1.0)]
    assert measure.match(np.zeros((0, 5), np.float32), truth) == []


def test_only_what_is_right_is_chosen() -> None:
    results = [measure.SceneResult(tiles, tiles, tiles, named, 0.9) for tiles, named in ((2, 2), (2, 1), (2, 2))]
    more = [measure.SceneResult(tiles, tiles, tiles, tiles, 0.9) for tiles in (2, 1, 3)]
    assert first_right(results, 1) == [0]
    assert first_right(results + more, 9) == [0, 2, 4, 5]
    lines = [drawing.Line(np.zeros((24, 24), np.uint8), text) for text in ("12", "345", "67", "890", "1234")]
    assert first_of_each_length(lines, ["12", "3", "67", "890", "1234"], 2) == [0, 3]


def test_the_truth_is_written_with_the_pictures(tmp_path: Path) -> None:
    (tmp_path / "scene_07.jpg").write_bytes(b"of an earlier run")
    scene = drawing.draw_scene(np.random.default_rng(0), random_digits())
    write_scenes(tmp_path, [scene])
    truth = json.loads((tmp_path / "truth.json").read_text(encoding="utf-8"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scene_00.jpg", "truth.json"]
    assert [tile["box"] for tile in truth["scene_00.jpg"]] == scene.boxes.tolist()


def test_the_networks_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export(networks.build_detector(), tmp_path / "detector.onnx", (drawing.HEIGHT, drawing.WIDTH))
    export_reader(networks.LineReader(), tmp_path / "textline.onnx")
    assert set(LINE_AXES) == {"input", "logits"}
    assert capsys.readouterr().out.count("of PyTorch") == 2
