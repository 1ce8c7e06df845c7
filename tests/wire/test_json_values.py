"""What a pipeline wrote, as JSON."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from torchpipe_py import NoResult
from torchpipe_py.wire.json_values import json_line, to_json


def as_dict(array: np.ndarray) -> dict[str, Any]:
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": array.ravel().tolist()}


LARGE = np.arange(2 * 3 * 4099, dtype=np.int32).reshape(2, 3, 4099)
FRACTIONS = np.linspace(0, 1, 4097, dtype=np.float32)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (LARGE, as_dict(LARGE)),
        (torch.from_numpy(FRACTIONS), as_dict(FRACTIONS)),
        (np.zeros((0, 4), np.uint8), as_dict(np.zeros((0, 4), np.uint8))),
        ([LARGE, "a"], [as_dict(LARGE), "a"]),
        ({"ü": [1, None, b"ab"]}, {"ü": [1, None, {"b64": "YWI="}]}),
    ],
)
def test_arrays_of_any_size_equal_json(value: Any, expected: Any) -> None:
    assert json.loads(json_line(to_json('key "x', value))) == {'key "x': expected}


@pytest.mark.parametrize("value", [np.array([1.0, np.nan]), ("a", float("inf")), [1, object()]])
def test_values_without_json_form_are_no_result(value: Any) -> None:
    with pytest.raises(NoResult):
        to_json("key", value)
