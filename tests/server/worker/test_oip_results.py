"""Results as the tensors of the Open Inference Protocol."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from torchpipe_py import InvalidRequest, NoResult, TensorSpec
from torchpipe_py.backends.signature import LABEL_AND_SCORE, RANKING
from torchpipe_py.methods.oip.http import answer
from torchpipe_py.methods.oip.requests import InferRequest, Wanted
from torchpipe_py.methods.oip.results import kept, outputs_of
from torchpipe_py.methods.oip.tensors import Output
from torchpipe_py.wire.errors import Bound, ReplyTooLargeError

Y = TensorSpec("y", (None, 2), "float32")


def asking(*names: str, is_binary: bool = False) -> InferRequest:
    return InferRequest(None, [], [Wanted(name, is_binary) for name in names], is_binary, None, None)


def tensors(items: list[dict[str, Any]], *names: str, specs: Any = ()) -> dict[str, tuple[str, list[int], Any]]:
    """Each output's datatype, shape and elements as JSON has them."""
    request = asking(*names)
    found = outputs_of([kept(item, request) for item in items], request, specs)
    return {each.name: (each.datatype, list(each.shape), each.to_list()) for each, _ in found}


def results(*values: Any, specs: Any = ()) -> dict[str, tuple[str, list[int], Any]]:
    return tensors([{"data": b"", "result": value} for value in values], specs=specs)


def test_labels_and_scores():
    assert results(("ring", 0.5)) == {"label": ("BYTES", [1], ["ring"]), "score": ("FP32", [1], [0.5])}
    assert results(("größe", 0.5), (7, 0.25), specs=LABEL_AND_SCORE) == {
        "label": ("BYTES", [2], ["größe", "7"]),
        "score": ("FP32", [2], [0.5, 0.25]),
    }


def test_rankings_are_filled_up():
    assert results([("a", 0.5), ("b", 0.25)], [], [("c", 1.0)]) == {
        "label": ("BYTES", [3, 2], ["a", "b", "", "", "c", ""]),
        "score": ("FP32", [3, 2], [0.5, 0.25, 0, 0, 1, 0]),
    }
    assert results([], [], specs=RANKING) == {"label": ("BYTES", [2, 0], []), "score": ("FP32", [2, 0], [])}
    assert results([]) == {"result": ("BYTES", [1], ["[]"])}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([torch.tensor([[1.0, 2.0]])], ("FP32", [1, 2], [1, 2])),
        ([torch.tensor([[1, 2]]), torch.tensor([[3, 4]])], ("INT64", [2, 2], [1, 2, 3, 4])),
        ([np.zeros((3, 1), np.uint8)], ("UINT8", [3, 1], [0, 0, 0])),
        ([torch.tensor([1.5, -2.0], dtype=torch.bfloat16)], ("BF16", [2], [1.5, -2])),
        ([torch.tensor([0.5], dtype=torch.float16)], ("FP16", [1], [0.5])),
        ([torch.tensor(True), np.array(False)], ("BOOL", [2], [True, False])),
        (["größe", b"x"], ("BYTES", [2], ["größe", "x"])),
        ([np.array([["größe", b"x"]], object)], ("BYTES", [1, 2], ["größe", "x"])),
        ([np.array([["a", "b"]]), np.array([[b"c", b"d"]])], ("BYTES", [2, 2], ["a", "b", "c", "d"])),
        ([True, False], ("BOOL", [2], [True, False])),
        ([1, np.int8(2)], ("INT64", [2], [1, 2])),
        ([2**63], ("BYTES", [1], ["9223372036854775808"])),
        ([0.1, np.float32(0.5)], ("FP64", [2], [0.1, 0.5])),
        ([[{"box": (1, 2), "score": np.float32(0.5)}], []], ("BYTES", [2], ['[{"box": [1, 2], "score": 0.5}]', "[]"])),
        ([None, 1], ("BYTES", [2], ["null", "1"])),
    ],
)
def test_other_results(values: list[Any], expected: Any):
    assert results(*values) == {"result": expected}
    assert results(*values, specs=[Y]) == {"y": expected}


def test_several_tensors_have_the_names_of_the_model():
    pair = [torch.tensor([[1]]), torch.tensor([[2]])]
    assert results(pair, pair, specs=[Y, TensorSpec("z")]) == {
        "y": ("INT64", [2, 1], [1, 1]),
        "z": ("INT64", [2, 1], [2, 2]),
    }
    assert list(results(pair)) == ["result_0", "result_1"]


def test_outputs_that_are_asked_for():
    item = {"result": ("ring", 0.5), "class": 3, "data": b""}
    assert tensors([item], "score", "class") == {"score": ("FP32", [1], [0.5]), "class": ("INT64", [1], [3])}
    assert tensors([item], "result") == {"result": ("BYTES", [1], ['["ring", 0.5]'])}
    assert tensors([{"class": 3, "error": NoResult("none")}], "class") == {"class": ("INT64", [1], [3])}
    with pytest.raises(NoResult, match="none"):
        tensors([{"class": 3, "error": NoResult("none")}], "class", "label")
    with pytest.raises(InvalidRequest, match="no output 'scor'; did you mean 'score'"):
        tensors([item], "scor")
    with pytest.raises(InvalidRequest, match="no output 'class'; valid: result"):
        tensors([item, {"result": ("star", 0.5)}], "class")


def test_an_answer_as_json_and_as_binary():
    outputs = [
        (Output("a", "FP32", [1], np.array([0.5], np.float32)), True),
        (Output("b", "BYTES", [1], [b"x"]), False),
    ]
    text = Bound(100, "--max-text-bytes")
    given = answer("demo", "1", asking()._replace(id="7"), outputs, text)
    head = {"model_name": "demo", "model_version": "1", "id": "7"}
    size = int(given.headers["Inference-Header-Content-Length"])
    assert json.loads(given.body[:size]) == {
        **head,
        "outputs": [
            {"name": "a", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": 4}},
            {"name": "b", "datatype": "BYTES", "shape": [1], "data": ["x"]},
        ],
    }
    assert (given.kind, given.body[size:]) == ("application/octet-stream", np.float32(0.5).tobytes())
    plain = answer("demo", "1", asking(), outputs[1:], text)
    assert (plain.kind, plain.headers) == ("application/json", {})


@pytest.mark.parametrize("datatype", ["UINT8", "FP64"])
def test_large_outputs_come_as_binary(datatype: str):
    text = Bound(100, "--max-text-bytes")
    output = Output("a", datatype, [1, 26], np.zeros((1, 26), datatype.replace("FP64", "float64").lower()))
    with pytest.raises(ReplyTooLargeError, match=r"104 bytes; .* 100 \(--max-text-bytes\); ask .* with binary_data"):
        answer("demo", "1", asking(), [(output, False)], text)
    assert answer("demo", "1", asking(), [(output, True)], text).body.endswith(output.to_binary())
