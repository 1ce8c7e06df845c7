"""The type of what a detector found."""

from __future__ import annotations

import json
import pickle
from typing import Any

import numpy as np
import pytest

from torchpipe_py import Detections
from torchpipe_py.proc.codec import Packed, pack, padded, unpack

BOXES = np.array([[1, 2, 30, 40], [5, 6, 7, 8.5], [0, 0, 3, 3]], np.float32)
SCORES = np.array([0.75, 0.5, 0.25], np.float32)
CLASSES = np.array([1, 0, 7])
NAMES = ("cat", "dog")


def three(**more: Any) -> Detections:
    return Detections(BOXES, SCORES, CLASSES, NAMES, **more)


def through_codec(value: Any, copies: bool = False) -> Any:
    """``value`` as another process gets it."""
    packed: Packed = pack({"result": value})
    memory = np.zeros(sum(padded(part.nbytes) for part in packed.parts) + 64, np.uint8)
    offset = 0
    for part in packed.parts:
        content = np.frombuffer(part, np.uint8)
        memory[offset : offset + len(content)] = content
        offset += padded(part.nbytes)
    values, _ = unpack(packed.head, packed.pickled, packed.arrays, memory.data, 0, copies)
    return values["result"], memory


def test_has_arrays_of_declared_dtypes_that_cannot_be_written_to() -> None:
    boxes, scores, classes = (np.asarray(values, np.float64) for values in (BOXES, SCORES, CLASSES))
    found = Detections(boxes, scores, classes)
    assert [each.dtype for each in (found.boxes, found.scores, found.classes)] == [np.float32, np.float32, np.int64]
    with pytest.raises(ValueError, match="read-only"):
        found.boxes[0, 0] = 9
    with pytest.raises(AttributeError):
        found.scores = SCORES  # type: ignore[misc]
    own = BOXES.copy()
    assert np.shares_memory(Detections(own, SCORES, CLASSES).boxes, own)
    own[0, 0] = 9  # the caller's array stays as it was


def test_index_gives_a_dict_with_the_label_of_its_class() -> None:
    found = three()
    assert found[0] == {"box": [1, 2, 30, 40], "score": 0.75, "class": 1, "label": "dog"}
    assert found[np.int64(-1)] == {"box": [0, 0, 3, 3], "score": 0.25, "class": 7}
    assert found.labels == ["dog", "cat", 7]
    assert [row["score"] for row in found] == [0.75, 0.5, 0.25]
    with pytest.raises(IndexError):
        found[3]


@pytest.mark.parametrize(
    ("index", "scores"),
    [
        (slice(1, None), [0.5, 0.25]),
        (slice(None, None, -1), [0.25, 0.5, 0.75]),
        (np.array([True, False, True]), [0.75, 0.25]),
        (SCORES > 0.9, []),
        (np.array([2, 2, 0]), [0.25, 0.25, 0.75]),
        ([1], [0.5]),
        ([], []),
    ],
)
def test_slices_masks_and_indices_give_detections(index: Any, scores: list[float]) -> None:
    keypoints = np.arange(18, dtype=np.float32).reshape(3, 2, 3)
    found = three(keypoints=keypoints, masks=("a", "b", "c"))[index]
    assert isinstance(found, Detections)
    assert found.scores.tolist() == scores
    assert found.boxes.shape == (len(scores), 4)
    assert found.names == NAMES
    rows = [SCORES.tolist().index(score) for score in scores]
    assert found.masks == tuple("abc"[row] for row in rows)
    assert found.keypoints is not None
    assert found.keypoints.tolist() == [keypoints[row].tolist() for row in rows]


def test_refuses_index_of_another_length() -> None:
    with pytest.raises(IndexError):
        three()[np.array([True, False])]


def test_to_list_is_json() -> None:
    found = three(keypoints=np.ones((3, 1, 3)), masks=[np.eye(2, dtype=bool)] * 3)
    rows = json.loads(json.dumps(found.to_list()))
    assert rows[0] == {
        **{"box": [1, 2, 30, 40], "score": 0.75, "class": 1, "label": "dog"},
        **{"keypoints": [[1, 1, 1]], "mask": [[True, False], [False, True]]},
    }
    assert isinstance(found[0]["mask"], np.ndarray)


def test_none_found_has_arrays_of_full_rank() -> None:
    none = Detections(np.array([]), np.array([]), np.array([]))
    assert (none.boxes.shape, none.scores.shape, none.classes.shape) == ((0, 4), (0,), (0,))
    assert none.to_list() == []
    assert len(none) == 0


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"boxes": BOXES[:2]}, "boxes: expected an array 3x4, got 2x4"),
        ({"classes": CLASSES[:, None]}, "classes: expected an array 3, got 3x1"),
        ({"keypoints": np.zeros((3, 2, 2))}, r"keypoints: expected an array 3x\?x3, got 3x2x2"),
        ({"masks": ()}, "masks: expected 3, one for each score, got 0"),
    ],
)
def test_refuses_shapes_that_do_not_fit(wrong: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Detections(**{"boxes": BOXES, "scores": SCORES, "classes": CLASSES, **wrong})


def test_equal_if_everything_in_it_is() -> None:
    assert three() == three()
    assert three() != three(masks=(1, 2, 3))
    assert three() != three()[:2]
    assert three(masks=[np.eye(2)] * 3) == three(masks=[np.eye(2)] * 3)


@pytest.mark.parametrize("copies", [False, True])
def test_goes_to_another_process_without_a_copy_of_its_arrays(copies: bool) -> None:
    many = Detections(
        np.arange(40_000).reshape(-1, 4), np.ones(10_000), np.ones(10_000), NAMES, masks=(b"png",) * 10_000
    )
    for found in (three(), three(keypoints=np.ones((3, 2, 3))), many, many[::-1]):
        assert pickle.loads(pickle.dumps(found)) == found
        got, memory = through_codec(found, copies)
        assert got == found
        assert not got.boxes.flags.writeable
        if len(found) > 3:
            assert np.shares_memory(got.boxes, memory) is not copies
