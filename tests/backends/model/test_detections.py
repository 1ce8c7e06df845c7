"""Postprocessors of detectors by formulas: layouts, bounds of a request's settings, errors, and models around them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from conftest import encode, picture
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.detectors import FORWARD, SIZES, constant_model, detector_file, letterboxed, made, yolo_output
from onnx import TensorProto, helper, numpy_helper

from torchpipe_py import BackendError, ConfigError, Detections, InvalidRequest, Registry, TensorSpec, pipe
from torchpipe_py.backends.model.postprocess.nms import suppress
from torchpipe_py.encryption.model_file import ModelFile

INPUT = (320, 416)
NAMES = {0: "cat", 1: "dog", 2: "fox"}


def iou(one: np.ndarray, other: np.ndarray) -> float:
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    common = max(width, 0) * max(height, 0)
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)]
    return float(common / (sum(areas) - common)) if common else 0.0


def by_loop(boxes: np.ndarray, classes: np.ndarray, most_iou: float, most: int) -> list[int]:
    """Greedy suppression, a box at a time."""
    kept: list[int] = []
    for index in range(len(boxes)):
        same = [other for other in kept if classes[other] == classes[index]]
        if len(kept) < most and all(iou(boxes[other], boxes[index]) <= most_iou for other in same):
            kept.append(index)
    return kept


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 90), st.integers(1, 4), st.integers(1, 40), st.integers(0, 10**6))
def test_suppression_is_greedy(count: int, classes: int, most: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    corners = rng.integers(0, 12, (count, 2))
    boxes = np.concatenate([corners, corners + rng.integers(0, 8, (count, 2))], 1).astype(np.float32)
    labels = rng.integers(0, classes, count)
    wanted = by_loop(boxes, labels, 0.4, most)
    assert suppress(boxes, labels, 0.4, most).tolist() == wanted
    start = count // 3
    first = suppress(boxes[:start], labels[:start], 0.4, most)
    assert suppress(boxes, labels, 0.4, most, first, start).tolist() == wanted


@pytest.mark.parametrize("classes", [1, 5])
def test_suppression_of_many_boxes_is_greedy(classes: int) -> None:
    """More than are compared at once."""
    rng = np.random.default_rng(0)
    middles = rng.uniform(0, 600, (100, 2))[rng.integers(0, 100, 1500)] + rng.normal(0, 5, (1500, 2))
    boxes = np.concatenate([middles - 20, middles + 20], 1).astype(np.float32)
    labels = rng.integers(0, classes, 1500)
    assert suppress(boxes, labels, 0.5, 1500).tolist() == by_loop(boxes, labels, 0.5, 1500)


# -- layouts ----------------------------------------------------------------------------------------------------------


def expected(rows: np.ndarray, size: tuple[int, int], most_iou: float | None = 0.7) -> Detections:
    """Of rows K×6 of corners, score and class in the model's input: what is above 0.25, on an image of this size."""
    rows = rows[np.argsort(-rows[:, 4], kind="stable")]
    rows = rows[rows[:, 4] > 0.25]
    if most_iou is not None:
        rows = rows[by_loop(rows[:, :4], rows[:, 5], most_iou, 300)]
    gain = min(INPUT[0] / size[0], INPUT[1] / size[1])
    new = [max(round(side * gain), 1) for side in size]
    pads = [(INPUT[1] - new[1]) // 2, (INPUT[0] - new[0]) // 2] * 2
    boxes = (rows[:, :4].astype(np.float64) - pads) / ([new[1] / size[1], new[0] / size[0]] * 2)
    return Detections(np.clip(boxes, 0, [*size[::-1]] * 2), rows[:, 4], rows[:, 5])


def same(found: Any, wanted: Detections) -> None:
    assert isinstance(found, Detections)
    assert found.classes.tolist() == wanted.classes.tolist()
    assert np.abs(found.scores - wanted.scores).max(initial=0) <= 1e-4
    assert np.abs(found.boxes - wanted.boxes).max(initial=0) <= 0.02


def corner_rows(output: np.ndarray) -> np.ndarray:
    """K×6 of a YOLO output 1×(4+C)×A."""
    boxes, scores = output[0, :4].T, output[0, 4:].T
    half = boxes[:, 2:] / 2
    corners = [boxes[:, :2] - half, boxes[:, :2] + half]
    return np.concatenate([*corners, scores.max(1)[:, None], scores.argmax(1)[:, None]], 1).astype(np.float32)


@pytest.fixture(params=FORWARD)
def forward(request: pytest.FixtureRequest) -> Any:
    return FORWARD[request.param]


@pytest.mark.parametrize("name", ["YoloBoxes", "Boxes"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_yolo_boxes(forward: Any, name: str, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    post = made(name)
    outputs = [yolo_output(rng, 3, INPUT, 40) for _ in SIZES]
    batch = torch.from_numpy(np.concatenate(outputs)).to(dtype)
    results = forward(post, [batch], [letterboxed(size, INPUT) for size in SIZES])
    for result, output, size in zip(results, batch.float().numpy(), SIZES, strict=True):
        assert len(result) > 3
        same(result, expected(corner_rows(output[None]), size))


@pytest.mark.parametrize("name", ["YoloBoxes", "Boxes"])
def test_yolo_boxes_in_rows_are_those_in_channels(forward: Any, name: str, tmp_path: Path) -> None:
    labels = tmp_path / "labels.txt"
    labels.write_text("a\nb\nc\n")
    output = torch.from_numpy(yolo_output(np.random.default_rng(0), 3, INPUT, 1200))
    (wanted,) = forward(made("YoloBoxes", labels=str(labels)), [output], [letterboxed(SIZES[1], INPUT)])
    for specs in ([], [TensorSpec("rows", (None, 1200, 7), "float32")]):
        post = made(name, specs, labels=str(labels))
        (result,) = forward(post, [output.transpose(1, 2).contiguous()], [letterboxed(SIZES[1], INPUT)])
        assert len(result) > 3
        same(result, wanted)
    with pytest.raises(
        ConfigError, match=r", or rows NxAx.4.C. with labels only, .* from YOLOv5's .Yolo5Boxes.: set labels"
    ):
        made("YoloBoxes", [TensorSpec("rows", (None, 1200, 7), "float32")])
    with pytest.raises(ConfigError, match=r"reads 4 classes from the outputs, and .*labels.txt has 3 labels"):
        made("YoloBoxes", [TensorSpec("rows", (None, 1200, 8), "float32")], labels=str(labels))


@pytest.mark.parametrize("name", ["Yolo5Boxes", "Boxes"])
def test_yolo5_boxes(forward: Any, name: str) -> None:
    rng = np.random.default_rng(1)
    output = yolo_output(rng, 3, INPUT, 40)
    objectness = rng.uniform(0, 1, (1, 1, output.shape[2])).astype(np.float32)
    rows = torch.from_numpy(np.concatenate([output[:, :4], objectness, output[:, 4:]], 1)).transpose(1, 2)
    (result,) = forward(made(name), [rows], [letterboxed(SIZES[1], INPUT)])
    output[:, 4:] *= objectness
    same(result, expected(corner_rows(output), SIZES[1]))


@pytest.mark.parametrize("name", ["EndToEndBoxes", "Boxes"])
def test_end_to_end_boxes_are_not_suppressed(forward: Any, name: str) -> None:
    rows = np.array([[10, 20, 50, 60, 0.3, 2], [10, 20, 50, 60, 0.9, 2], [0, 0, 9, 9, 0.25, 1]], np.float32)
    (result,) = forward(made(name), [torch.from_numpy(rows)[None]], [letterboxed(SIZES[0], INPUT)])
    same(result, expected(rows, SIZES[0], None))
    assert len(result) == 2


@pytest.mark.parametrize("name", ["DetrBoxes", "Boxes"])
@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_detr_boxes(forward: Any, name: str, activation: str, tmp_path: Path) -> None:
    labels = tmp_path / "labels.txt"
    labels.write_text("a\nb\nc\n")
    boxes = torch.tensor([[[0.5, 0.5, 0.25, 0.5], [0.1, 0.1, 0.4, 0.4]]])
    logits = [[0.0, 2.0, 1.0, 0.0], [0.0, 0.0, 0.0, 5.0]] if activation == "softmax" else [[-3.0, 2.0, 1.0], [-9.0] * 3]
    specs = [TensorSpec("logits", (None, 2, len(logits[0]))), TensorSpec("pred_boxes", (None, 2, 4))]
    (result,) = forward(
        made(name, specs, labels=str(labels)), [torch.tensor([logits]), boxes], [letterboxed(INPUT, INPUT)]
    )
    box = [156, 80, 260, 240]
    if activation == "softmax":
        wanted = Detections(np.array([box]), np.exp([2.0]) / (2 + np.exp(2.0) + np.exp(1.0)), np.array([1]))
    else:
        wanted = Detections(np.array([box, box]), 1 / (1 + np.exp(-np.array([2.0, 1.0]))), np.array([1, 2]))
    same(result, wanted)
    assert result.labels == (["b"] if activation == "softmax" else ["b", "c"])


def test_rtdetr_of_ultralytics(forward: Any, tmp_path: Path) -> None:
    rows = torch.zeros(1, 300, 6)
    rows[0, :2] = torch.tensor([[0.1, 0.1, 0.4, 0.4, 0.3, 0], [0.5, 0.5, 0.25, 0.5, 0.9, 1]])
    scores = torch.zeros(1, 300, 7)
    scores[..., :4] = rows[..., :4]
    scores[0, [0, 1], [4, 5]] = rows[0, [0, 1], [4, 4]]
    wanted = Detections(np.array([[156, 80, 260, 240], [0, 0, 124.8, 96]]), np.array([0.9, 0.3]), np.array([1, 0]))
    newer = {"head": "RTDETRDecoder", "task": "detect", "names": "['a', 'b']"}
    older = {"description": "Ultralytics rtdetr-l model", "task": "detect", "names": "['a', 'b', 'c']"}
    for output, metadata in ((rows, newer), (scores, older), (scores[..., :6], {**older, "names": "['a', 'b']"})):
        path = constant_model(tmp_path / "rtdetr.onnx", {"output0": output.numpy()}, metadata)
        specs = [TensorSpec("output0", tuple(output.shape))]
        for name in ("DetrBoxes", "Boxes"):
            (result,) = forward(made(name, specs, ModelFile(path)), [output], [letterboxed(INPUT, INPUT)])
            same(result, wanted)
        if output.shape[2] == 6:
            with pytest.raises(ConfigError, match="RT-DETR: DetrBoxes reads it"):
                made("EndToEndBoxes", specs, ModelFile(path))
    path = constant_model(tmp_path / "yolo.onnx", {"output0": rows.numpy()}, {"head": "Detect", "task": "detect"})
    with pytest.raises(ConfigError, match="names another model: EndToEndBoxes reads it"):
        made("DetrBoxes", [TensorSpec("output0", (1, 300, 6))], ModelFile(path))


def specs_of(names: Any, outputs: list[torch.Tensor]) -> list[TensorSpec]:
    pairs = zip(names, outputs, strict=True)
    return [TensorSpec(name, tuple(output.shape), str(output.dtype)[6:]) for name, output in pairs]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize("batch", [True, False])
@pytest.mark.parametrize("names", [("boxes", "scores", "labels"), ("", "", "")])
def test_boxes_scores_labels_in_any_order(forward: Any, order: Any, batch: bool, names: Any) -> None:
    outputs = [torch.tensor([[1.0, 2, 30, 40], [5, 6, 7, 8]]), torch.tensor([0.2, 0.8]), torch.tensor([4, 7])]
    outputs = [output[None] for output in outputs] if batch else outputs
    specs = [
        TensorSpec(name, tuple(each.shape), str(each.dtype)[6:]) for name, each in zip(names, outputs, strict=True)
    ]
    post = made("BoxesScoresLabels", [specs[index] for index in order], most=4 if batch else 1)
    (result,) = forward(post, [outputs[index] for index in order], [letterboxed(INPUT, INPUT)])
    same(result, Detections(np.array([[5, 6, 7, 8]]), np.array([0.8]), np.array([7])))


def test_outputs_without_names_are_told_apart_by_their_types_when_the_model_is_loaded(tmp_path: Path) -> None:
    """``torchpipe check`` reads shapes alone."""
    rows = {"1": ([[1.0, 2, 3, 4]], "float32"), "2": ([7], "int64"), "3": ([0.9], "float32")}
    arrays = {name: np.array(value, dtype) for name, (value, dtype) in rows.items()}
    nodes = [helper.make_node("Identity", [f"{name}_value"], [name]) for name in arrays]
    values = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in arrays.items()
    ]
    images = [helper.make_tensor_value_info("images", TensorProto.FLOAT, [1, 3, 64, 64])]
    weights = [numpy_helper.from_array(array, f"{name}_value") for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "listed", images, values, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, tmp_path / "listed.onnx")
    config = {"backend": "OnnxTensor", "model": str(tmp_path / "listed.onnx"), "postprocessor": "BoxesScoresLabels"}
    with pipe(config) as run:
        run(item := {"data": torch.zeros(1, 3, 64, 64)})
    assert item["result"] == Detections(arrays["1"], arrays["3"], arrays["2"])


def test_listed_boxes_up_to_a_count_and_as_parts_of_the_sides(forward: Any) -> None:
    boxes = torch.tensor([[[0.5, 0.25, 1, 1], [0, 0, 1, 1]]])
    outputs = [torch.tensor([[1]], dtype=torch.int32), boxes, torch.tensor([[0.9, 0.8]]), torch.tensor([[3, 4]])]
    names = ("num_dets", "boxes", "scores", "classes")
    specs = [
        TensorSpec(name, tuple(each.shape), str(each.dtype)[6:]) for name, each in zip(names, outputs, strict=True)
    ]
    (result,) = forward(made("Boxes", specs, normalised=True), outputs, [letterboxed(INPUT, INPUT)])
    same(result, Detections(np.array([[208, 80, 416, 320]]), np.array([0.9]), np.array([3])))


def test_none_found_is_an_empty_result(forward: Any) -> None:
    output = torch.zeros(2, 7, 2100)
    for result in forward(made("YoloBoxes"), [output], [letterboxed(INPUT, INPUT)] * 2):
        assert result == Detections(np.empty((0, 4)), np.empty(0), np.empty(0))


# -- which layout -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shapes", "layout"),
    [
        ([(1, 84, 8400)], "Yolo"),
        ([(None, 7, None)], "Yolo"),
        ([(1, 25200, 85)], "Yolo5"),
        ([(None, None, 7)], "Yolo5"),
        ([(1, 300, 6)], "EndToEnd"),
        ([(1, 100, 92), (1, 100, 4)], "Detr"),
        ([(1, 300, 4), (1, 300, 80)], "Detr"),
        ([(None, 4), (None,), (None,)], "Listed"),
        ([(None, 10, 4), (None, 10), (None, 10)], "Listed"),
    ],
)
def test_layout_is_found_by_the_shapes(shapes: Any, layout: str) -> None:
    names = ("labels", "scores") if len(shapes) == 3 else ("", "")
    specs = [TensorSpec(name, dims) for name, dims in zip(("boxes", *names), shapes, strict=False)]
    most = 4 if len(shapes[0]) == 3 else 1
    assert type(made("Boxes", specs, most=most).layout).__name__ == layout


MAP = (None, 3, 96, 128)
"""The output of a segmenter."""
EVERY = (
    *("YoloBoxes", "Yolo5Boxes", "EndToEndBoxes", "DetrBoxes", "BoxesScoresLabels", "Boxes"),
    *("YoloSegments", "YoloPose"),
)


@pytest.mark.parametrize(
    ("name", "shapes", "problem"),
    [
        ("Boxes", [(None, None, 6)], "can be read in more than one way: name Yolo5Boxes or EndToEndBoxes"),
        ("Boxes", [(1, 1000)], "Boxes takes an output Nx.4.C.xA.*, or an output Nx.*; the model has y0 1x1000;"),
        ("Boxes", [(1, 100, 50), (1, 100, 4)], 'there are no labels: set activation = "softmax" or "sigmoid"'),
        ("YoloBoxes", [(1, 25200, 85)], "YoloBoxes takes an output Nx.*, or rows .*Yolo5.*; the model has y0 1x25200"),
        ("YoloBoxes", [], ""),
        ("YoloBoxes", [(None, None, None)], ""),
        ("Boxes", [(None, None, None)], ""),
        ("Yolo5Boxes", [(1, 84, 8400)], "Yolo5Boxes takes an output NxAx"),
        ("EndToEndBoxes", [(1, 300, 7)], "EndToEndBoxes takes an output NxKx6"),
        ("DetrBoxes", [(1, 8400, 84)], "DetrBoxes takes two outputs.*, or an output NxQx6"),
        ("BoxesScoresLabels", [(1, 300, 4), (1, 300)], "BoxesScoresLabels takes three outputs"),
        ("BoxesScoresLabels", [(1, 300, 4), (1, 100), (1, 100)], "BoxesScoresLabels takes three outputs"),
        ("BoxesScoresLabels", [(1, None, None), (1, None), (1, None)], ""),
        ("DetrBoxes", [(1, 300, None), (1, 300, None)], ""),
        *[(name, [MAP], rf"{name} takes .*; the model has y0 \?x3x96x128") for name in EVERY],
        *[(name, [(None, 3, None, None)], rf"{name} takes .*; the model has y0 \?x3x\?x\?") for name in EVERY],
        *[(name, [(None, 1000)], rf"{name} takes .*; the model has y0 \?x1000") for name in EVERY],
        ("Boxes", [MAP, (None, 5)], "Boxes takes two outputs.*, or three outputs"),
        ("YoloSegments", [MAP, (None, 5)], "YoloSegments takes boxes with coefficients"),
        ("YoloSegments", [(None, None, None), (None, None, None, None)], ""),
        ("YoloBoxes", [(None, 3, None)], "YoloBoxes takes .* has y0 .x3x."),
        ("Yolo5Boxes", [(None, None, 3)], "Yolo5Boxes takes .* has y0 .x.x3"),
        ("EndToEndBoxes", [(None, None, 5)], "EndToEndBoxes takes .* has y0 .x.x5"),
        ("EndToEndBoxes", [(None, None, None)], ""),
        ("YoloPose", [(None, None, None)], ""),
    ],
)  # fmt: skip
def test_refuses_outputs_of_another_layout(name: str, shapes: Any, problem: str) -> None:
    specs = [TensorSpec(f"y{index}", dims) for index, dims in enumerate(shapes)]
    if not problem:
        made(name, specs)  # of an unknown model; the first batch tells
        return
    with pytest.raises(ConfigError, match=problem):
        made(name, specs)


@pytest.mark.parametrize(
    ("name", "declared", "shapes"),
    [
        ("YoloBoxes", [(None, 7, None)], [(2, 3, 96, 128)]),
        ("YoloBoxes", [(None, 7, None)], [(2, 5, 40)]),
        ("Yolo5Boxes", [(None, None, 7)], [(2, 40, 5)]),
        ("EndToEndBoxes", [(None, None, 6)], [(2, 40, 4)]),
        ("DetrBoxes", [(None, None, 4), (None, None, 92)], [(2, 10, 4), (2, 5, 92)]),
        ("DetrBoxes", [(None, None, 6)], [(2, 10, 4)]),
        ("DetrBoxes", [(None, None, 4), (None, None, 92)], [(2, 10, 4)]),
        ("BoxesScoresLabels", [(None, None, 4), (None, None), (None, None)], [(2, 9, 4), (2, 5), (2, 9)]),
        ("YoloSegments", [(None, 9, None), (None, 3, None, None)], [(2, 9, 84), (2, 2, 8, 8)]),
        ("YoloSegments", [(None, 9, None), (None, 3, None, None)], [(2, 9, 84), (2, 3, 0, 8)]),
        ("YoloPose", [(None, 17, None)], [(2, 14, 84)]),
    ],
)
def test_a_batch_of_other_shapes_is_an_error_that_names_them(
    forward: Any, name: str, declared: Any, shapes: Any
) -> None:
    """As of a file whose declaration is wrong, or TorchScript, which declares nothing."""
    names = ("boxes", "scores", "labels")
    post = made(name, [TensorSpec(each, dims) for each, dims in zip(names, declared, strict=False)])
    outputs = [torch.zeros(shape) for shape in shapes]
    given = ", ".join("x".join(map(str, shape)) for shape in shapes)
    with pytest.raises(BackendError, match=f"model model: {name} reads N.*, and the model gave {given}$"):
        forward(post, outputs, [letterboxed(INPUT, INPUT)] * 2)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("shape", [(2, 3, 96, 128), (2, 3), (2,), ()])
def test_outputs_of_a_model_that_declares_none_are_checked(forward: Any, name: str, shape: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} takes .*; the model has "):
        forward(made(name), [torch.zeros(shape)], [letterboxed(INPUT, INPUT)] * 2)


# -- settings ---------------------------------------------------------------------------------------------------------


def rows_of(*scores: float) -> torch.Tensor:
    """End-to-end boxes with these scores, of the classes 0, 1, 2 in turn."""
    rows = [[10 * index, 10, 10 * index + 8, 20, score, index % 3] for index, score in enumerate(scores)]
    return torch.tensor([rows])


def asked(post: Any, parameters: Any) -> Any:
    item = {**letterboxed(INPUT, INPUT), "parameters": parameters}
    return post.forward([rows_of(0.9, 0.8, 0.7, 0.6, 0.3)], [item])[0]


@pytest.mark.parametrize(
    ("parameters", "scores"),
    [
        ({}, [0.9, 0.8, 0.7, 0.6]),
        ({"threshold": 0.65}, [0.9, 0.8, 0.7]),
        ({"threshold": "0.65"}, [0.9, 0.8, 0.7]),
        ({"threshold": 1}, []),
        ({"threshold": 0.2}, [0.9, 0.8, 0.7, 0.6]),
        ({"max_det": 2}, [0.9, 0.8]),
        ({"max_det": 2.0}, [0.9, 0.8]),
        ({"classes": [0]}, [0.9, 0.6]),
        ({"classes": "cat,fox"}, [0.9, 0.7, 0.6]),
        ({"classes": ["fox", 1]}, [0.8, 0.7]),
        ({"classes": 1}, [0.8]),
        ({"classes": []}, [0.9, 0.8, 0.7, 0.6]),
        ({"iou": 0.1, "class_agnostic": True, "of_another_backend": 1}, [0.9, 0.8, 0.7, 0.6]),
        (7, [0.9, 0.8, 0.7, 0.6]),
    ],
)
def test_request_sets_what_it_may(parameters: Any, scores: list[float], tmp_path: Path) -> None:
    labels = tmp_path / "labels.txt"
    labels.write_text("cat\ndog\nfox\n")
    post = made("EndToEndBoxes", labels=str(labels), least_threshold=0.1, threshold=0.5, max_det=4)
    assert asked(post, parameters).scores.tolist() == pytest.approx(scores)


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        ({"threshold": 0.4}, "parameter 'threshold': must be from 0.5 to 1, got 0.4; key least_threshold of"),
        ({"threshold": 1.5}, "parameter 'threshold': must be from 0.5 to 1, got 1.5"),
        ({"threshold": "high"}, "parameter 'threshold': expected a finite number, got 'high'"),
        ({"threshold": float("nan")}, "parameter 'threshold': expected a finite number"),
        ({"threshold": True}, "parameter 'threshold': expected a finite number"),
        ({"threshold": [0.5]}, "parameter 'threshold': expected a finite number"),
        ({"iou": -1}, "parameter 'iou': must be from 0 to 1, got -1"),
        ({"max_det": 0}, "parameter 'max_det': must be from 1 to 4, got 0"),
        ({"max_det": 5}, "parameter 'max_det': must be from 1 to 4, got 5; key max_det of the model's node"),
        ({"max_det": 1.5}, "parameter 'max_det': expected an integer"),
        ({"max_det": 10**400}, "parameter 'max_det': must be from 1 to 4, got 1000"),
        ({"classes": "0," * 5000}, "parameter 'classes': 5000 labels and indices; the limit is 4096"),
        ({"classes": [2]}, "parameter 'classes': only classes 0, 1 are answered here, not 2"),
        ({"classes": "cow"}, "parameter 'classes': no class 'cow'"),
        ({"classes": [-1]}, "parameter 'classes': no class -1; there are 3"),
        ({"classes": {"a": 1}}, "parameter 'classes': expected a list of labels or indices, got a dict"),
        ({"classes": [[1]]}, "parameter 'classes': no class"),
        ({"class_agnostic": "perhaps"}, "parameter 'class_agnostic': expected true or false"),
    ],
)
def test_refuses_parameters_out_of_bounds(parameters: Any, problem: str, tmp_path: Path) -> None:
    labels = tmp_path / "labels.txt"
    labels.write_text("cat\ndog\nfox\n")
    post = made("EndToEndBoxes", labels=str(labels), threshold=0.5, max_det=4, classes=("cat", "1"))
    result = asked(post, parameters)
    assert isinstance(result, InvalidRequest)
    assert problem in str(result)


def test_refuses_unknown_classes_and_bounds_of_a_configuration() -> None:
    with pytest.raises(ConfigError, match="classes: no class 'cat'; without labels, give indices"):
        made("YoloBoxes", classes=("cat",))
    with pytest.raises(ConfigError, match=r"least_threshold = 0\.4 is larger than threshold = 0\.25"):
        made("YoloBoxes", least_threshold=0.4)


def test_agnostic_suppression_is_between_classes() -> None:
    output = torch.zeros(1, 6, 2100)
    output[0, :4, :2] = torch.tensor([[50.0, 50, 20, 20], [51, 50, 20, 20]]).T
    output[0, 4, 0], output[0, 5, 1] = 0.9, 0.8
    item = letterboxed(INPUT, INPUT)
    assert len(made("YoloBoxes").forward([output], [item])[0]) == 2
    assert len(made("YoloBoxes", class_agnostic=True).forward([output], [item])[0]) == 1
    assert len(made("YoloBoxes").forward([output], [{**item, "parameters": {"class_agnostic": True}}])[0]) == 1


# -- errors of an item ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("row", "what"), [(0, "boxes"), (2, "boxes"), (5, "scores")])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_an_error_of_their_item(
    forward: Any, row: int, what: str, value: float
) -> None:
    batch = torch.from_numpy(np.repeat(yolo_output(np.random.default_rng(0), 3, INPUT, 30), 2, 0))
    place = int(batch[1, 4:].max(0)[0].argmax())
    batch[1, row, place] = value
    post = made("YoloBoxes", [TensorSpec("output0", (None, 7, 2100))])
    good, bad = forward(post, [batch], [letterboxed(INPUT, INPUT)] * 2)
    assert len(good) > 3
    if what == "scores" and value == float("inf"):
        return  # a score of its own
    assert isinstance(bad, BackendError)
    assert str(bad) == f"model model: output 'output0' has {what} that are not finite numbers"


def test_unknown_way_back_is_an_error_of_its_item(forward: Any) -> None:
    batch = torch.zeros(3, 7, 2100)
    items = [letterboxed(INPUT, INPUT), {"data": torch.empty(1, 3, *INPUT), "image_size": (10, 10)}]
    items.append({**letterboxed(INPUT, INPUT), "to_original": "x"})
    good, unknown, invalid = forward(made("YoloBoxes"), [batch], items)
    assert len(good) == 0
    assert str(unknown).startswith("model model: the image of ")
    assert "nothing says how" in str(unknown)
    assert isinstance(invalid, InvalidRequest)


@pytest.mark.parametrize(
    "data",
    [
        np.empty((32, 48, 3), np.uint8),
        np.empty((32, 48), np.uint8),
        np.empty((1, 3, 32, 48), np.float32),
        np.empty((3, 32, 48), np.float32),
        torch.empty(1, 3, 32, 48),
        torch.empty(3, 32, 48),
        torch.empty(1, 32, 48, 3),
        {"threshold": torch.tensor([0.5]), "image": torch.empty(1, 3, 32, 48)},
        [torch.empty(1, 3, 32, 48), torch.tensor([1, 2])],
    ],
    ids=lambda data: f"{type(data).__name__} {getattr(data, 'shape', '')}",
)
def test_without_a_decoder_boxes_are_in_pixels_of_the_input(data: Any) -> None:
    rows = torch.tensor([[[-5.0, 2, 100, 100, 0.9, 0]]])
    (result,) = made("EndToEndBoxes").forward([rows], [{"data": data}])
    assert result.boxes.tolist() == [[0, 2, 48, 32]]


def test_input_without_an_image_is_named() -> None:
    (result,) = made("EndToEndBoxes").forward([rows_of(0.9)], [{"data": torch.empty(1, 7)}])
    assert "none of the model's inputs is one" in str(result)


# -- models -----------------------------------------------------------------------------------------------------------


def detector(path: str, **keys: Any) -> dict[str, Any]:
    decode = {"backend": "S[DecodeMat,LetterBoxMat,cvtColorMat,Mat2Tensor]", "max_h": 64, "max_w": 64, "color": "rgb"}
    model = {"backend": "OnnxTensor", "model": path, "postprocessor": "Boxes", "max": 4, **keys}
    return {"decode": {**decode, "next": "model"}, "model": model}


@pytest.mark.parametrize("most", [1, 4])
def test_boxes_of_a_model_are_on_the_decoded_image(tmp_path: Path, most: int) -> None:
    path = detector_file(tmp_path, names=NAMES)
    with pipe(detector(path, max=most)) as run:
        items = [{"data": encode(picture(40, 80))}, {"data": b"broken"}, {"data": encode(picture(80, 40))}]
        run(items)
        assert [spec.name for spec in run.signature().outputs][:3] == ["boxes", "scores", "classes"]
        assert {"parameters", "image_size", "to_original"} <= (run.keys_read() or set())
    wide, broken, tall = items
    assert wide["result"].labels == tall["result"].labels == ["fox", "cat"]
    # (16, 24, 48, 40) of the input; the image is in its rows, or columns, 16 to 48
    assert wide["result"].boxes[0].tolist() == [20, 10, 60, 30]
    assert tall["result"].boxes[0].tolist() == [0, 30, 40, 50]
    assert wide["result"].boxes[1].tolist() == [0, 0, 80, 40]  # clipped
    assert "result" not in broken


def test_labels_of_the_file_come_before_those_of_the_model(tmp_path: Path) -> None:
    labels = tmp_path / "labels.txt"
    labels.write_text("eins\nzwei\ndrei\n")
    with pipe(detector(detector_file(tmp_path, names=NAMES), labels=str(labels))) as run:
        item: dict[str, Any] = {"data": encode(picture(64, 64))}
        run(item)
    assert item["result"].labels == ["drei", "eins"]


@pytest.mark.parametrize("names", ["__import__('os').abort()", "{'a': 1}", "[" * 500, "{", "{-1: 'a'}", "{10**9: 'a'}"])
def test_names_in_the_metadata_are_read_only_as_a_literal(tmp_path: Path, names: str) -> None:
    with pipe(detector(detector_file(tmp_path, names=names))) as run:
        item: dict[str, Any] = {"data": encode(picture(64, 64))}
        run(item)
    assert item["result"].labels == [2, 0]


@pytest.mark.parametrize("key", ["threshold", "least_threshold", "iou", "max_det"])
def test_settings_are_keys_of_the_node(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=f"'{key}': expected at (most|least)"):
        pipe(detector(detector_file(tmp_path, names=NAMES), **{key: 0 if key == "max_det" else 2}))


def test_check_and_pipe_refuse_what_does_not_fit_the_model(tmp_path: Path) -> None:
    from torchpipe_py.plan.build import plan_pipeline

    path = detector_file(tmp_path, names=NAMES)
    labels = tmp_path / "labels.txt"
    labels.write_text("one\ntwo\n")
    for keys, problem in (
        ({"postprocessor": "Yolo5Boxes"}, "Yolo5Boxes takes an output NxAx"),
        ({"labels": str(labels)}, "reads 3 classes from the outputs, and .*labels.txt has 2 labels$"),
        ({"classes": ["cow"]}, "classes: no class 'cow'"),
    ):
        for build in (plan_pipeline, pipe):
            with pytest.raises(ConfigError, match=problem):
                build(detector(path, **keys))


@pytest.mark.parametrize("name", EVERY)
def test_check_and_pipe_refuse_a_segmenter_with_a_detectors_postprocessor(name: str, tmp_path: Path) -> None:
    from torchpipe_py.plan.build import plan_pipeline

    path = constant_model(tmp_path / "segmenter.onnx", {"logits": np.zeros((1, 3, 96, 128))})
    for build in (plan_pipeline, pipe):
        with pytest.raises(ConfigError, match=f"{name} takes .*; the model has logits .x3x96x128"):
            build(detector(path, postprocessor=name))


def test_postprocessor_gets_the_dicts_if_it_asks_for_them(tmp_path: Path, restored: Registry) -> None:
    class Sizes:
        takes_items = True

        def forward(self, outputs: list[Any], items: list[dict[str, Any]]) -> list[Any]:
            return [item.get("own", ValueError("no own")) for item in items]

    restored.register_postprocessor(Sizes)
    with pipe(detector(detector_file(tmp_path, names=NAMES), postprocessor="Sizes")) as run:
        items: list[dict[str, Any]] = [{"data": encode(picture(64, 64)), "own": 3}, {"data": encode(picture(64, 64))}]
        run(items)
        assert run.keys_read() is None
    assert items[0]["result"] == 3
    assert str(items[1]["error"]) == "no own"


def test_model_file_is_valid(tmp_path: Path) -> None:
    onnx.checker.check_model(detector_file(tmp_path, names=NAMES))
