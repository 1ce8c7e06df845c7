"""Masks, keypoints, maps of classes and embeddings, by formulas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from conftest import encode, picture
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.detectors import FORWARD, constant_model, letterboxed, made

from torchpipe_py import BackendError, ConfigError, Detections, InvalidRequest, TensorSpec, pipe
from torchpipe_py.backends.image.original import WayBack
from torchpipe_py.backends.model.postprocess import masks
from torchpipe_py.backends.model.postprocess.palette import voc_colours

INPUT = (64, 96)


@pytest.fixture(params=FORWARD)
def forward(request: pytest.FixtureRequest) -> Any:
    return FORWARD[request.param]


# -- masks ------------------------------------------------------------------------------------------------------------


def segments(*objects: tuple[list[float], int, float]) -> list[torch.Tensor]:
    """Outputs of a YOLO-seg of two classes: boxes of (centre, sides), a prototype and a score each.

    Prototype 0 is positive everywhere, 1 in the left half of the input, 2 nowhere.
    """
    rows = torch.zeros(1, 4 + 2 + 3, 126)
    for index, (box, prototype, score) in enumerate(objects):
        rows[0, :4, index] = torch.tensor(box)
        rows[0, 4 + index % 2, index] = score
        rows[0, 6 + prototype, index] = 1
    prototypes = torch.ones(1, 3, INPUT[0] // 4, INPUT[1] // 4)
    prototypes[0, 1, :, INPUT[1] // 8 :] = -1
    prototypes[0, 2] = -1
    return [rows, prototypes]


def test_masks_are_on_the_original_inside_their_boxes(forward: Any) -> None:
    outputs = segments(([48, 32, 40, 20], 0, 0.9), ([48, 32, 64, 32], 1, 0.8), ([20, 32, 10, 10], 2, 0.7))
    # twice the input's width, padded above and below
    item = letterboxed((64, 192), INPUT)
    specs = [TensorSpec("output0", (None, 9, 126)), TensorSpec("output1", (None, 3, 16, 24))]
    (found,) = forward(made("YoloSegments", specs, masks="arrays"), outputs, [item])
    assert isinstance(found, Detections)
    assert found.scores.tolist() == pytest.approx([0.9, 0.8])  # without the mask that has no pixel
    assert found.boxes.tolist() == [[56, 12, 136, 52], [32, 0, 160, 64]]
    wanted = np.zeros((2, 64, 192), bool)
    wanted[0, 12:52, 56:136] = True
    wanted[1, :, 32:96] = True
    assert found.masks is not None
    assert all(mask.shape == (64, 192) for mask in found.masks)
    assert np.array_equal(np.stack(found.masks), wanted)


def test_forms_of_a_mask_say_the_same(forward: Any) -> None:
    outputs = segments(([48, 32, 40, 20], 0, 0.9), ([48, 32, 64, 32], 1, 0.8))
    item = letterboxed((64, 192), INPUT)
    found = {form: forward(made("YoloSegments", masks=form), outputs, [item])[0].masks for form in masks.FORMS}
    for index, mask in enumerate(found["arrays"]):
        assert np.array_equal(cv2.imdecode(np.frombuffer(found["png"][index], np.uint8), -1) == 255, mask)
        drawn = np.zeros(mask.shape, np.uint8)
        for outline in found["polygons"][index]:
            assert all(type(number) is int for point in outline for number in point)
            cv2.fillPoly(drawn, [np.array(outline)], 1)
        assert np.array_equal(drawn == 1, mask)
        assert found["rle"][index]["size"] == [64, 192]
        assert np.array_equal(decoded(found["rle"][index]), mask)


def decoded(run: dict[str, Any]) -> np.ndarray:
    """``rleFrString`` and ``rleDecode`` of COCO's ``maskApi.c``."""
    counts: list[int] = []
    value = shift = 0
    for character in run["counts"]:
        bits = ord(character) - 48
        value |= (bits & 31) << shift
        shift += 5
        if not bits & 32:
            value -= (1 << shift) if bits & 16 else 0
            counts.append(value + (counts[-2] if len(counts) > 2 else 0))
            value = shift = 0
    assert all(count > 0 for count in counts[1:])
    flat = np.repeat(np.arange(len(counts)) % 2, counts)
    return flat.reshape(run["size"], order="F").astype(bool)


@settings(max_examples=100, deadline=None)
@given(st.tuples(*[st.integers(1, 9)] * 2), st.tuples(*[st.integers(0, 3)] * 4), st.integers(0, 10**6))
def test_run_lengths_of_any_window(shape: Any, margins: Any, seed: int) -> None:
    top, left, below, right = margins
    pixels = np.random.default_rng(seed).random(shape) > 0.4
    window = masks.Window(pixels, top, left, (top + shape[0] + below, left + shape[1] + right))
    assert np.array_equal(decoded(masks.to_run_lengths(window)), window.whole())


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 10**6))
def test_window_is_the_part_of_the_whole_mask(height: int, width: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    prototypes, coefficients = rng.normal(size=(3, 8, 8)).astype(np.float32), rng.normal(size=3).astype(np.float32)
    upsampler = masks.Upsampler((8, 8), (32, 32), WayBack((width / 32, height / 32), (0, 0), (height, width)))
    whole = upsampler.window(prototypes, coefficients, [0, 0, width, height]).pixels
    expected = cv2.resize(np.tensordot(coefficients, prototypes, 1), (width, height), interpolation=cv2.INTER_LINEAR)
    assert whole.shape == (height, width)
    assert (whole == (expected > 0))[np.abs(expected) > 1e-3].all()
    left, top, right, bottom = 0.3 * width, 0.2 * height, 0.9 * width, 0.8 * height
    window = upsampler.window(prototypes, coefficients, [left, top, right, bottom])
    inside = np.zeros((height, width), bool)
    inside[int(np.ceil(top)) : int(np.ceil(bottom)), int(np.ceil(left)) : int(np.ceil(right))] = True
    assert np.array_equal(window.whole(), whole & inside)


@pytest.mark.parametrize(("height", "width"), [(2**14, 2**14), (2**17, 8)])
def test_refuses_masks_of_a_size_that_a_client_made_up(height: int, width: int) -> None:
    item = {**letterboxed((64, 96), INPUT), "image_size": (height, width)}
    (error,) = made("YoloSegments").forward(segments(([48, 32, 40, 20], 0, 0.9)), [item])
    assert isinstance(error, InvalidRequest)
    assert f"masks of {width}x{height} pixels; at most" in str(error)


def test_refuses_masks_of_more_pixels_than_an_item_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "MOST_MASK_PIXELS", 64 * 96)
    item = letterboxed((64, 96), INPUT)
    one, two = ([48, 32, 80, 40], 0, 0.9), ([48, 32, 40, 60], 1, 0.8)
    (found,) = made("YoloSegments").forward(segments(one), [item])
    assert len(found) == 1
    (error,) = made("YoloSegments").forward(segments(one, two, ([30, 20, 50, 40], 0, 0.7)), [item])
    assert isinstance(error, InvalidRequest)
    assert "pixels together, the most of an item: raise threshold, or lower iou or max_det" in str(error)


@pytest.mark.parametrize("form", masks.FORMS)
def test_refuses_more_whole_masks_of_a_large_image_than_take_seconds(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masks, "MOST_WHOLE_PIXELS", 2 * 64 * 96)
    item = letterboxed((64, 96), INPUT)
    small = [([48, 32, 8, 4], 0, 0.9), ([20, 32, 8, 4], 1, 0.8), ([30, 12, 8, 4], 0, 0.7)]
    (found,) = made("YoloSegments", masks=form).forward(segments(*small[:2]), [item])
    assert len(found) == 2
    (found,) = made("YoloSegments", masks=form).forward(segments(*small), [item])
    if form in ("png", "arrays"):
        assert isinstance(found, InvalidRequest)
        assert "3 masks of 96x64 pixels, at most 2 of them" in str(found)
    else:
        assert len(found) == 3


def test_model_without_a_batch_is_split_as_one_with_it() -> None:
    item = letterboxed((64, 96), INPUT)
    outputs = segments(([48, 32, 40, 20], 0, 0.9), ([20, 32, 20, 20], 1, 0.8))
    post = made("YoloSegments")
    (wanted,) = post.on_host(post.on_device(outputs), [item])
    (found,) = post.on_host(post.on_device([output[0] for output in outputs]), [item])
    assert found == wanted


def test_no_object_has_no_masks(forward: Any) -> None:
    (found,) = forward(made("YoloSegments"), segments(), [letterboxed((64, 96), INPUT)])
    assert (len(found), found.masks) == (0, ())


def test_nan_among_prototypes_is_an_error(forward: Any) -> None:
    outputs = segments(([48, 32, 40, 20], 0, 0.9))
    outputs[1][0, 0, 0, 0] = float("nan")
    (error,) = forward(made("YoloSegments"), outputs, [letterboxed((64, 96), INPUT)])
    assert isinstance(error, BackendError)
    assert "masks that are not finite" in str(error)


def test_refuses_outputs_without_prototypes() -> None:
    problem = "YoloSegments takes boxes with coefficients and prototypes NxMxhxw; the model has y"
    with pytest.raises(ConfigError, match=problem):
        made("YoloSegments", [TensorSpec("y", (1, 84, 8400))])
    with pytest.raises(ConfigError, match="YoloSegments takes an output"):
        made("YoloSegments", [TensorSpec("y", (1, 30, 8400)), TensorSpec("z", (1, 32, 160, 160))])


# -- keypoints --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end_to_end", [False, True])
def test_keypoints_are_on_the_original(forward: Any, end_to_end: bool) -> None:
    points = [48.0, 32, 0.5, 0, 16, 0.25]  # two
    if end_to_end:
        rows = torch.tensor([[[28.0, 22, 68, 42, 0.9, 0, *points], *[[0.0] * 12] * 99]])
    else:
        rows = torch.zeros(1, 11, 126)
        rows[0, :, 3] = torch.tensor([48.0, 32, 40, 20, 0.9, *points])
    specs = [TensorSpec("y", tuple(rows.shape))]
    (found,) = forward(made("YoloPose", specs), [rows], [letterboxed((64, 192), INPUT)])
    assert found.boxes.tolist() == [[56, 12, 136, 52]]
    assert found.keypoints.tolist() == [[[96, 32, 0.5], [0, 0, 0.25]]]
    assert found[0]["keypoints"] == [[96, 32, 0.5], [0, 0, 0.25]]


def test_number_of_keypoints_comes_from_the_key_or_the_metadata(tmp_path: Path) -> None:
    output = np.zeros((1, 4 + 2 + 8, 84), np.float32)
    output[0, :, 0] = [32, 32, 20, 20, 0.1, 0.9, 10, 10, 20, 20, 30, 30, 40, 40]
    path = constant_model(tmp_path / "pose.onnx", {"y": output}, {"kpt_shape": "[4, 2]", "names": "['a', 'b']"})
    config = {"backend": "OnnxTensor", "model": path, "postprocessor": "YoloPose", "max": 2}
    with pipe(config) as run:
        item: dict[str, Any] = {"data": torch.zeros(1, 3, 64, 64)}
        run(item)
    assert item["result"].labels == ["b"]
    assert item["result"].keypoints.tolist() == [[[10, 10, 1], [20, 20, 1], [30, 30, 1], [40, 40, 1]]]
    with pytest.raises(ConfigError, match="names keypoints, which YoloPose reads"):
        pipe({**config, "postprocessor": "Boxes"})
    with pytest.raises(ConfigError, match="does not tell the number of keypoints: set keypoints"):
        made("YoloPose", [TensorSpec("y", (1, 13, 8400))])
    assert made("YoloPose", [TensorSpec("y", (1, 4 + 5 + 6, 8400))], keypoints=2).shape == (2, 3)


# -- maps of classes --------------------------------------------------------------------------------------------------


def scores_of(classes: np.ndarray, count: int) -> torch.Tensor:
    """Logits N×C×h×w whose largest are at these classes."""
    return torch.nn.functional.one_hot(torch.from_numpy(classes).long(), count).movedim(-1, 1).float()


def test_map_has_the_size_of_the_original(forward: Any) -> None:
    classes = np.zeros((1, 16, 24), np.uint8)  # a quarter of the input
    classes[0, 8:, 12:] = 2
    (result,) = forward(made("ArgMax", original_size=True), [scores_of(classes, 3)], [letterboxed((64, 192), INPUT)])
    wanted = np.zeros((1, 64, 192), np.uint8)
    wanted[0, 32:, 96:] = 2
    assert result.dtype == torch.uint8
    assert np.array_equal(result.numpy(), wanted)


@pytest.mark.parametrize("original_size", [False, True])
def test_palette_makes_a_picture_of_a_map(forward: Any, original_size: bool) -> None:
    classes = np.array([[[0, 1], [2, 0]]], np.uint8)
    post = made("ArgMax", palette=("#000000", "#ff8000", "0000FF"), original_size=original_size)
    (result,) = forward(post, [scores_of(classes, 3)], [letterboxed(INPUT, INPUT)])
    colours = np.array([[0, 0, 0], [255, 128, 0], [0, 0, 255]], np.uint8)
    picture_ = colours[classes[0]]
    if original_size:
        picture_ = cv2.resize(picture_, INPUT[::-1], interpolation=cv2.INTER_NEAREST)
    assert result["color"] == "rgb"
    assert np.array_equal(result["result"], picture_)


def test_integers_without_a_class_dimension_are_the_classes(forward: Any) -> None:
    classes = torch.zeros(1, 16, 24, dtype=torch.int64)
    classes[0, 8:, 12:] = 2
    wanted = np.zeros((1, 64, 192), np.uint8)
    wanted[0, 32:, 96:] = 2
    item = letterboxed((64, 192), INPUT)
    for output in (classes, classes.to(torch.uint8), classes[:, None]):
        dtype = "uint8" if output.dtype == torch.uint8 else "int32"
        specs = [TensorSpec("classes", (None, *output.shape[1:]), str(output.dtype)[6:])]
        plain, large = made("ArgMax", specs), made("ArgMax", specs, original_size=True)
        assert plain.gives(specs) == [TensorSpec("result", (None, 16, 24), dtype)]
        assert large.gives(specs) == [TensorSpec("result", (None, None, None), dtype)]
        (small,), (result,) = forward(plain, [output], [item]), forward(large, [output], [item])
        assert (small.dtype, result.dtype) == (getattr(torch, dtype),) * 2
        assert np.array_equal(small.numpy(), classes.numpy())
        assert np.array_equal(result.numpy(), wanted)
        (picture_,) = forward(made("ArgMax", specs, palette=("#000000", "#ff8000", "#0000ff")), [output], [item])
        assert picture_["result"][12, 20].tolist() == [0, 0, 255]
    (bad,) = forward(made("ArgMax", palette=("#000000", "#ff8000")), [classes - 1], [item])
    assert "the model's output has class -1, palette has 2 colours" in str(bad)
    with pytest.raises(ConfigError, match="or NxHxW of integers, got scores"):
        made("ArgMax", [TensorSpec("scores", (1, 3, 5), "float32")], original_size=True)


def test_class_beyond_the_palette_is_an_error_of_its_item() -> None:
    post = made("ArgMax", palette=("#000000", "#ffffff"))
    maps = torch.tensor([[[0, 1]], [[0, 25]]], dtype=torch.uint8)
    good, bad = post.on_host([maps, torch.zeros(2, dtype=torch.bool)], [{}, {}])
    assert good["result"].tolist() == [[[0, 0, 0], [255, 255, 255]]]
    assert isinstance(bad, BackendError)
    assert str(bad) == "the model's output has class 25, palette has 2 colours"


def test_voc_colours_are_those_of_the_challenge() -> None:
    assert voc_colours()[[0, 1, 2, 3, 15, 20, 255]].tolist() == [
        *([0, 0, 0], [128, 0, 0], [0, 128, 0], [128, 128, 0], [192, 128, 128], [0, 64, 128], [224, 224, 192]),
    ]


@pytest.mark.parametrize(
    ("keys", "shape", "problem"),
    [
        ({"palette": ("red",)}, (1, 3, 4, 4), "palette: expected voc, or a colour #rrggbb for each class, got 'red'"),
        ({"palette": ("#000000",)}, (1, 3, 4, 4), "palette has 1 colour, the model 3 classes"),
        ({"palette": ("voc",)}, (1, 3), "palette and original_size are for maps, .* NxHxW of integers, got 1x3"),
        ({"original_size": True}, (1, 3), "palette and original_size are for maps"),
    ],
)
def test_refuses_palettes_that_do_not_fit(keys: Any, shape: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        made("ArgMax", **keys).forward([torch.zeros(shape)], [letterboxed(INPUT, INPUT)])


def test_segmenter_answers_a_picture_of_the_decoded_size(tmp_path: Path) -> None:
    logits = np.zeros((1, 2, 16, 16), np.float32)
    logits[0, 1, :, 8:] = 1
    path = constant_model(tmp_path / "segmenter.onnx", {"logits": logits})
    decode = {"backend": "S[DecodeMat,ResizeMat,Mat2Tensor]", "resize_h": 64, "resize_w": 64, "next": "model"}
    model = {"backend": "OnnxTensor", "model": path, "postprocessor": "ArgMax", "palette": "voc", "max": 2}
    with pipe({"decode": decode, "model": {**model, "original_size": True}}) as run:
        items: list[dict[str, Any]] = [{"data": encode(picture(30, 50))}, {"data": encode(picture(90, 20))}]
        run(items)
        assert run.signature().outputs == (TensorSpec("result", (None, None, 3), "uint8"),)
    for item, (height, width) in zip(items, ((30, 50), (90, 20)), strict=True):
        assert item["result"].shape == (height, width, 3)
        assert item["result"][:, : width // 2].max() == 0
        assert (item["result"][:, width // 2 :] == [128, 0, 0]).all()


# -- embeddings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 5), (3, 5, 1, 1)])
def test_embeddings_have_length_one(shape: tuple[int, ...]) -> None:
    vectors = torch.randn(shape)
    vectors[1] = 0
    post = made("L2Normalize")
    for results in (post.forward([vectors]), post.on_host(post.on_device([vectors.half()]))):
        wanted = torch.nn.functional.normalize(vectors.flatten(1), dim=1)
        assert all(result.shape == (1, 5) for result in results)
        assert torch.allclose(torch.cat(results), wanted, atol=1e-3)


def test_embeddings_of_pairs_of_images_by_name(tmp_path: Path) -> None:
    from onnx import TensorProto, helper, save

    nodes = [
        helper.make_node("GlobalAveragePool", ["left"], ["one"]),
        helper.make_node("GlobalAveragePool", ["right"], ["other"]),
        helper.make_node("Concat", ["one", "other"], ["both"], axis=1),
        helper.make_node("Flatten", ["both"], ["y"]),
    ]
    images = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 3, 8, 8]) for name in ("left", "right")]
    vector = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 6])]
    model = helper.make_model(
        helper.make_graph(nodes, "pair", images, vector), opset_imports=[helper.make_opsetid("", 17)], ir_version=9
    )
    save(model, tmp_path / "pair.onnx")
    config = {"backend": "OnnxTensor", "model": str(tmp_path / "pair.onnx"), "postprocessor": "L2Normalize", "max": 4}
    mats = [picture(8, 8, seed) for seed in range(6)]
    with pipe(config) as run:
        items: list[dict[str, Any]] = [
            {"data": {"right": mats[index + 3], "left": mats[index]}, "node_name": "node"} for index in range(3)
        ]
        run(items)
    for index, item in enumerate(items):
        means = np.concatenate([mats[index].mean((0, 1)), mats[index + 3].mean((0, 1))])
        assert np.allclose(item["result"], means / np.linalg.norm(means), atol=1e-5)
