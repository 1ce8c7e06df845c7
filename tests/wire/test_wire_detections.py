"""Detections as JSON and as arrays."""

from __future__ import annotations

import json
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchpipe_py import Detections, NoResult
from torchpipe_py.backends.signature import Signature, detection_outputs
from torchpipe_py.methods.oip.requests import InferRequest, Wanted
from torchpipe_py.methods.oip.results import outputs_of
from torchpipe_py.methods.roots import Root
from torchpipe_py.ray.columns import columns_of
from torchpipe_py.wire import detections
from torchpipe_py.wire.errors import Bound, ReplyTooLargeError
from torchpipe_py.wire.json_values import json_line, to_json
from torchpipe_py.wire.values import json_size

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def found(count: int, **more: Any) -> Detections:
    boxes = np.arange(count * 4, dtype=np.float32).reshape(count, 4) / 3
    return Detections(boxes, np.full(count, 0.1, "f4"), np.arange(count), **more)


def through_json(value: Any) -> Any:
    return json.loads(json_line(to_json("result", value)))["result"]


@given(st.lists(FLOATS, max_size=20))
def test_shortest_is_the_same_float32_in_as_few_digits_as_numpy_writes(numbers: list[float]) -> None:
    array = np.array(numbers, np.float32)
    short = detections.shortest(array)
    assert np.array_equal(short.astype(np.float32), array)
    for number, exact in zip(short.tolist(), array, strict=True):
        if 1e-12 < abs(exact) < 1e12:
            assert number == float(str(exact))


def test_rows_of_json_have_what_python_has() -> None:
    value = found(
        3, names=("cat", "größe \ud800"), keypoints=np.ones((3, 2, 3)), masks=([[[0.5, 1]]], {"size": [2, 2]}, [])
    )
    rows = through_json(value)
    assert [list(row) for row in rows[:1]] == [["box", "score", "class", "label", "keypoints", "mask"]]
    for row, expected in zip(rows, value.to_list(), strict=True):
        row["box"], row["score"] = np.array(row["box"], "f4").tolist(), float(np.float32(row["score"]))
        assert row == expected
    assert through_json(found(0)) == []
    assert through_json([found(1), {"a": found(2)}]) == [through_json(found(1)), {"a": through_json(found(2))}]


@pytest.mark.parametrize("member", ["boxes", "scores", "keypoints"])
def test_numbers_that_json_lacks_are_refused(member: str) -> None:
    arrays = {"boxes": np.ones((1, 4)), "scores": np.ones(1), "classes": [0], "keypoints": np.ones((1, 1, 3))}
    arrays[member] = arrays[member] * np.nan
    with pytest.raises(NoResult, match="'result' contains NaN"):
        to_json("result", Detections(**arrays))


@pytest.mark.parametrize("mask", [[[[float("nan"), 0]]], object(), {"counts": {1}}])
def test_mask_without_a_form_in_json_is_refused(mask: Any) -> None:
    with pytest.raises(NoResult, match="no form in JSON"):
        to_json("result", found(1, masks=(mask,)))
    with pytest.raises(NoResult, match="no form in JSON"):
        detections.tensors_of("result", [found(1, masks=(mask,))])


@pytest.mark.parametrize("shape", [(), (0, 2), (3,), (2, 2, 5), (1, 1, 2, 2)])
def test_mask_that_is_no_image_is_refused(shape: tuple[int, ...]) -> None:
    found = Detections(np.zeros((1, 4)), [0.5], [0], masks=[np.zeros(shape, bool)])
    for form in (detections.to_text, lambda key, value: detections.tensor_of(key, [value], "masks")):
        with pytest.raises(NoResult, match="which PNG cannot represent"):
            form("result", found)


def test_least_size_is_no_more_than_the_size() -> None:
    png = cv2.imencode(".png", np.eye(4, dtype=np.uint8))[1].tobytes()
    zeros: dict[str, Any] = {"boxes": np.zeros((9, 4)), "scores": np.zeros(9), "classes": np.zeros(9)}
    for more in (
        {},
        {"keypoints": np.zeros((9, 5, 3))},
        {"masks": (png,) * 9},
        {"masks": (np.ones((200, 200), bool),) * 9},
    ):
        value = Detections(**zeros, **more)
        assert 0 < json_size(value) <= len(json_line(to_json("result", value)))


def test_stops_where_more_is_too_large() -> None:
    with pytest.raises(ReplyTooLargeError, match="the limit of a reply is 9 "):
        to_json("result", found(2000), Bound(9, "most"))
    assert len(through_json(found(2000))) == 2000


def test_arrays_of_several_items_are_joined() -> None:
    mask = np.array([[True, False]])
    items = [found(2, keypoints=np.ones((2, 5, 3)), masks=(mask, [[[1, 2]]])), found(0), found(1, names=("cat",))]
    with pytest.raises(NoResult, match="different numbers of keypoints"):
        detections.tensors_of("result", items)
    tensors = detections.tensors_of("result", items[:2])
    assert {name: (array.dtype.name, array.shape) for name, array in tensors.items()} == {
        "boxes": ("float32", (2, 4)), "scores": ("float32", (2,)), "classes": ("int64", (2,)),
        "keypoints": ("float32", (2, 5, 3)), "masks": ("object", (2,)), "offsets": ("int64", (3,)),
    }  # fmt: skip
    assert tensors["offsets"].tolist() == [0, 2, 2]
    pixels = cv2.imdecode(np.frombuffer(tensors["masks"][0], np.uint8), cv2.IMREAD_GRAYSCALE)
    assert pixels.tolist() == [[255, 0]]
    assert tensors["masks"][1] == "[[[1, 2]]]"
    assert detections.tensors_of("result", items[1:])["labels"].tolist() == ["cat"]


@pytest.mark.parametrize("first", [5, 0])
def test_items_without_detections_fit_any_number_of_keypoints(first: int) -> None:
    empty = [found(0, keypoints=np.zeros((0, points, 3))) for points in (first, 17)]
    assert detections.tensors_of("result", empty)["keypoints"].shape == (0, 17, 3)
    full = found(1, keypoints=np.ones((1, 17, 3)))
    assert detections.tensors_of("result", [*empty, full])["keypoints"].shape == (1, 17, 3)


def test_items_with_masks_and_without_make_no_batch() -> None:
    with pytest.raises(NoResult, match="items with masks and items without"):
        detections.tensors_of("result", [found(1, masks=([],)), found(1)])


def test_only_the_arrays_that_are_asked_for_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(detections, "png_of", lambda mask: made.append("masks") or b"")
    monkeypatch.setattr(Detections, "labels", property(lambda self: made.append("labels") or ["a"]))
    value = found(1, names=("a",), masks=(np.ones((2, 2), bool),))
    item = {"result": value}
    root = Root(Signature((), detection_outputs(has_labels=True, has_masks=True)))
    column = next(column for column in columns_of("result", [found(1)]) if column.name == "boxes")
    asked = InferRequest(None, [item], [Wanted("boxes", False, 0)], False, None, None)
    for boxes in (root.output(item, "boxes"), column.value(value), outputs_of([item], asked, root.outputs)[0][0].data):
        assert np.array_equal(boxes, value.boxes)
    assert made == []
    assert root.output(item, "labels").tolist() == ["a"]
    assert made == ["labels"]
