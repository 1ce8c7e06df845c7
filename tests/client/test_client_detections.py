"""Detections in an answer: what the client makes of them, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchpipe_client import BadReply, Detections
from torchpipe_client.detections import detections_of

ROW: dict[str, Any] = {"box": [1, 2.5, 3, 4], "score": 0.5, "class": 1}


def test_has_the_values_of_all_rows_as_arrays() -> None:
    rows = [{**ROW, "label": "cat", "keypoints": [[1, 2, 0.5]]}, {**ROW, "class": 2, "keypoints": [[3, 4, 1]]}]
    found = detections_of("result", rows)
    assert isinstance(found, Detections)
    assert found == rows
    assert (found.boxes.dtype.name, found.boxes.tolist()) == ("float32", [[1, 2.5, 3, 4]] * 2)
    assert (found.scores.dtype.name, found.classes.tolist(), found.labels) == ("float32", [1, 2], ["cat", 2])
    assert found.keypoints is not None
    assert found.keypoints.shape == (2, 1, 3)
    assert found.masks is None


def test_mask_that_is_a_file_is_bytes() -> None:
    rows = [{**ROW, "mask": {"b64": "iVBORw=="}}, {**ROW, "mask": [[[1, 2]]]}]
    assert detections_of("result", rows).masks == [b"\x89PNG", [[[1, 2]]]]


WRONG: dict[str, Any] = {
    "no list": {}, "no object": [7], "no box": [{"score": 1, "class": 1}], "three sides": [{**ROW, "box": [1, 2, 3]}],
    "a text": [{**ROW, "score": "1"}], "a boolean": [{**ROW, "class": True}], "a fraction": [{**ROW, "class": 1.5}],
    "beyond float32": [{**ROW, "score": 1e39}], "NaN": [{**ROW, "box": [float("nan"), 0, 0, 0]}],
    "beyond int64": [{**ROW, "class": 2**63}], "a number for a label": [{**ROW, "label": 7}],
    "a point of two": [{**ROW, "keypoints": [[1, 2]]}], "keypoints of one": [ROW, {**ROW, "keypoints": []}],
    "other numbers of keypoints": [{**ROW, "keypoints": []}, {**ROW, "keypoints": [[1, 2, 3]]}],
    "mask of one": [ROW, {**ROW, "mask": []}], "no base64": [{**ROW, "mask": {"b64": "*"}}],
    "base64 of a number": [{**ROW, "mask": {"b64": 7}}],
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_refuses_wrong_rows(name: str) -> None:
    with pytest.raises(BadReply, match="result"):
        detections_of("result", WRONG[name])


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.sampled_from(["b64", "size"]), inner)),
    max_leaves=8,
)
MEMBERS = st.sampled_from(["box", "score", "class", "label", "keypoints", "mask"])


@given(st.lists(st.dictionaries(MEMBERS, VALUES).map(lambda more: {**ROW, **more}), max_size=3))
def test_whatever_comes_is_refused_or_has_its_arrays(rows: list[Any]) -> None:
    try:
        found = detections_of("result", rows)
    except BadReply:
        return
    count = len(rows)
    assert (found.boxes.shape, found.scores.shape, found.classes.shape) == ((count, 4), (count,), (count,))
    assert np.isfinite(found.boxes).all()
    assert len(found.labels) == count
    assert found.keypoints is None or found.keypoints.shape[::2] == (count, 3)
    assert found.masks is None or len(found.masks) == count
