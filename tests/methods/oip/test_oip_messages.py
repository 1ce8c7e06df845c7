"""Inference requests of the Open Inference Protocol: what is read of them, and what is refused."""

from __future__ import annotations

import json
import struct
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
import torch

from torchpipe_py import InvalidRequest, NoResult, Signature, TensorSpec
from torchpipe_py.backends.signature import LABEL_AND_SCORE, RANKING
from torchpipe_py.methods.oip.http import HEADER_LENGTH, answer, read_infer
from torchpipe_py.methods.oip.requests import InferLimits, InferRequest, Wanted
from torchpipe_py.methods.oip.results import kept, outputs_of
from torchpipe_py.methods.oip.tensors import NUMBERS, Output
from torchpipe_py.methods.roots import Root
from torchpipe_py.wire.errors import Bound, ReplyTooLargeError

MANY = Bound(2**20, "--max-reply-bytes")
LIMITS = InferLimits(Bound(2**16, "--max-text-bytes"), 32)
TEXT: dict[str, Any] = {"name": "data", "datatype": "BYTES", "shape": [1], "data": ["x"]}
ARRAY: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": [2, 2], "data": [1, 2, 3, 4]}


def read(asked: Any, binary: bytes = b"", length: str | None = "", **fields: str) -> InferRequest:
    """``length`` is the header's; that of the JSON where it is empty, none where it is ``None``."""
    text = asked if isinstance(asked, bytes) else json.dumps(asked).encode()
    if length is not None and (length or binary):
        fields[HEADER_LENGTH.lower()] = length or str(len(text))
    return read_infer(text + binary, fields, LIMITS)


def value_of(given: dict[str, Any], binary: bytes = b"") -> Any:
    """The one item of a request with this one input."""
    (row,) = read({"inputs": [given]}, binary).rows
    return row[given["name"]]


def elements(*texts: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


NUMBER_CASES = {"BOOL": [True, False], "UINT64": [0, 2**64 - 1], "INT64": [-(2**63), 2**63 - 1], "INT8": [-128, 127]}


@pytest.mark.parametrize("datatype", [*NUMBERS, "BF16"])
def test_numbers_as_json_and_as_binary(datatype: str):
    data = NUMBER_CASES.get(datatype, [0, 100])
    form = {"name": "x", "datatype": datatype, "shape": [1, 2]}
    expected = torch.from_numpy(np.array([data], NUMBERS[datatype])) if datatype in NUMBERS else None
    if expected is None:
        expected = torch.tensor([data], dtype=torch.bfloat16)
        binary = expected.view(torch.int16).numpy().tobytes()
    else:
        binary = expected.numpy().tobytes()
    of_json = value_of({**form, "data": data})
    of_nested = value_of({**form, "data": [data]})
    of_binary = value_of({**form, "parameters": {"binary_data_size": len(binary)}}, binary)
    for tensor in (of_json, of_nested, of_binary):
        assert tensor.dtype == expected.dtype
        assert tensor.tolist() == expected.tolist()


def test_bytes_as_json_and_as_binary():
    assert value_of({**TEXT, "data": ["größe"]}) == "größe".encode()
    assert value_of({**TEXT, "data": [{"b64": "AP8="}]}) == b"\x00\xff"
    assert value_of({**TEXT, "shape": [1, 1], "data": [["x"]]}) == b"x"
    pair: dict[str, Any] = {"name": "data", "datatype": "BYTES", "shape": [1, 2, 1]}
    for array in (
        value_of({**pair, "data": ["x", {"b64": "AP8="}]}),
        value_of({**pair, "data": [[["x"], [{"b64": "AP8="}]]]}),
        value_of({**pair, "parameters": {"binary_data_size": 11}}, elements(b"x", b"\x00\xff")),
    ):
        assert (array.dtype, array.tolist()) == (object, [[[b"x"], [b"\x00\xff"]]])
    assert value_of({**TEXT, "shape": [1, 0], "data": []}).shape == (1, 0)
    binary = elements(b"\xff\xd8", b"")
    form = {**TEXT, "shape": [2], "parameters": {"binary_data_size": len(binary)}}
    del form["data"]
    assert [row["data"] for row in read({"inputs": [form]}, binary).rows] == [b"\xff\xd8", b""]


def test_splits_batch_and_assigns_binary_data():
    binary = elements(b"a", b"bc") + np.arange(4, dtype=np.int16).tobytes()
    request = read(
        {
            "inputs": [
                {"name": "data", "datatype": "BYTES", "shape": [2, 1], "parameters": {"binary_data_size": 11}},
                ARRAY,
                {"name": "y", "datatype": "INT16", "shape": [2, 2], "parameters": {"binary_data_size": 8}},
            ]
        },
        binary,
    )
    first, second = request.rows
    assert (first["data"], second["data"]) == (b"a", b"bc")
    assert (first["x"].tolist(), second["x"].tolist()) == ([[1, 2]], [[3, 4]])
    assert (first["y"].tolist(), second["y"].tolist()) == ([[0, 1]], [[2, 3]])


def test_reads_id_outputs_and_parameters():
    request = read(
        {
            "id": "a",
            "parameters": {"deadline_ms": 20, "node_name": "n", "binary_data_output": True},
            "inputs": [TEXT],
            "outputs": [{"name": "o"}, {"name": "p", "parameters": {"binary_data": False}}],
        }
    )
    wanted = [Wanted("o", True), Wanted("p", False)]
    assert request == InferRequest("a", request.rows, wanted, True, "n", 20, 0)
    request = read({"inputs": [TEXT]})
    assert request == InferRequest(None, request.rows, (), False, None, None, 0)
    assert read({"inputs": [TEXT], "parameters": {"timeout": 5000}}).deadline_ms == 5, "Triton's, in microseconds"
    assert read({"inputs": [TEXT], "parameters": {"timeout": 0}}).deadline_ms is None
    assert read({"inputs": [TEXT], "parameters": None}, **{"x-deadline-ms": "7"}).deadline_ms == 7
    assert read({"inputs": [TEXT], "parameters": {"priority": 3}}).priority == 1, "Triton's larger numbers are lower"
    assert read({"inputs": [TEXT]}, **{"x-priority": "1"}).priority == 1


X = TensorSpec("x", (None, 2), "float32")
A, B = TensorSpec("a", (None, 2), "float32"), TensorSpec("b", (None, 2), "float32")


@pytest.mark.parametrize(
    ("inputs", "names", "expected"),
    [
        ([], ["data", "box"], {"data": 1, "box": 1}),
        ([A], ["a"], {"data": 1}),
        ([A], ["a", "box"], {"data": 1, "box": 1}),
        ([A], ["data"], {"data": 1}),
        ([A, B], ["b", "a"], {"data": {"a": 1, "b": 1}}),
        ([A, B], ["a"], {"data": {"a": 1}}),
        ([TensorSpec("data", (None, 2), "float32")], ["data"], {"data": 1}),
    ],
)
def test_inputs_of_the_root_are_its_data(inputs: list[TensorSpec], names: list[str], expected: dict[str, Any]):
    one = {"datatype": "INT8", "shape": [1, 1], "data": [1]}
    request = read({"inputs": [{**one, "name": name} for name in names], "parameters": {"node_name": "n"}})
    assert request.items(Root(Signature(inputs, ()))) == [{**expected, "node_name": "n"}]


@pytest.mark.parametrize(
    ("inputs", "said"), [([], "did you mean 'data'?"), ([A, B], "unknown input 'dat'; did you mean 'a'?")]
)
def test_unknown_input_names_nearest(inputs: list[TensorSpec], said: str):
    with pytest.raises(InvalidRequest) as raised:
        read({"inputs": [{**TEXT, "name": "dat"}]}).items(Root(Signature(inputs, ())))
    assert said in str(raised.value)


def of(**changes: Any) -> dict[str, Any]:
    return {"inputs": [{**ARRAY, **changes}]}


def binary_of(size: Any, **changes: Any) -> dict[str, Any]:
    given = {"name": "x", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": size}, **changes}
    return {"inputs": [given]}


WRONG: dict[str, tuple[Any, ...]] = {
    "nothing": (b"", "JSON: "),
    "half a character in a name": (
        {"inputs": [TEXT], "binary\ud800": 1}, r"'binary\ud800' has half of a surrogate pair",
    ),
    "half a character in the id": ({"id": "\ud800", "inputs": [TEXT]}, r"id: '\ud800' has half of a surrogate pair"),
    "half a character in an input": (of(name="x\ud800"), r"inputs: 'x\ud800' has half of a surrogate pair"),
    "half a character in an output": (
        {"inputs": [TEXT], "outputs": [{"name": "\ud800"}]}, r"outputs: '\ud800' has half of a surrogate pair",
    ),
    "half a character in node_name": (
        {"inputs": [TEXT], "parameters": {"node_name": "\ud800"}}, r"node_name: '\ud800' has half of a surrogate pair",
    ),
    "no inputs": ({"inputs": []}, "the request has no inputs"),
    "inputs of another kind": ({"inputs": {}}, "Expected `array`, got `object` - at `$.inputs`"),
    "an input twice": ({"inputs": [ARRAY, ARRAY]}, "inputs: 'x' appears twice"),
    "an unknown type": (of(datatype="FP33"), "input 'x': datatype 'FP33'; did you mean 'FP32'?"),
    "a large shape": (of(shape=[2, 2**40, 2**40]), "does not fit 4 numbers"),
    "no batch": (of(shape=[]), "the shape [] has no batch"),
    "an empty batch": (of(shape=[0, 4], data=[]), "the shape [0, 4] has no batch"),
    "a large batch": (of(shape=[33], data=[0] * 33), "a batch of 33; the limit is 32 (max_batch)"),
    "many values": (
        {"inputs": [{"name": str(index), "datatype": "INT8", "shape": [32, 0], "data": []} for index in range(200)]},
        "input '128': 4128 values so far; the limit is 4096",
    ),
    "other batches": (
        {"inputs": [ARRAY, TEXT]}, "a batch of 2 in input 'x' and of 1 in input 'data': their first dimensions differ",
    ),
    "no data": (of(data=None), "the data is not a list"),
    "numbers for texts": ({"inputs": [{**TEXT, "data": [1]}]}, "an element of BYTES is a text"),
    "half a character": ({"inputs": [{**TEXT, "data": ["\ud800"]}]}, "an element of BYTES is a text"),
    "too few texts": ({"inputs": [{**TEXT, "data": []}]}, "shape [1] does not fit 0 elements"),
    "many texts": ({"inputs": [{**TEXT, "shape": [1, 2**40, 2**40]}]}, "values so far; the limit is 4096"),
    "texts of another nesting": ({"inputs": [{**TEXT, "shape": [1, 2], "data": ["a", ["b"]]}]}, "is a text, or"),
    "no id": ({"id": [3], "inputs": [TEXT]}, "got `array` - at `$.id`"),
    "a long id": ({"id": "x" * 2000, "inputs": [TEXT]}, "id: a name of 2000 characters"),
    "no node_name": ({"parameters": {"node_name": 3}, "inputs": [TEXT]}, "at `$.parameters.node_name`"),
    "a timeout of ages": ({"parameters": {"timeout": 10**400}, "inputs": [TEXT]}, "$.parameters.timeout"),
    "another parameter": ({"parameters": {"deadline": 1}, "inputs": [TEXT]}, "did you mean 'deadline_ms'?"),
    "a sequence": ({"parameters": {"sequence_id": 1}, "inputs": [TEXT]}, "a pipe keeps no state between requests"),
    "shared memory": (of(parameters={"shared_memory_region": "a"}), "'shared_memory_region': shared memory is not"),
    "outputs of another kind": ({"inputs": [TEXT], "outputs": ["label"]}, "got `str` - at `$.outputs[0]`"),
    "many outputs": ({"inputs": [TEXT], "outputs": [{"name": "a"}] * 600}, "600 outputs; the limit"),
    "an output in two forms": (
        {"inputs": [TEXT], "outputs": [{"name": "a"}, {"name": "a", "parameters": {"classification": 2}}]},
        "outputs: 'a' appears twice in different forms",
    ),
    "classification": (
        {"inputs": [TEXT], "outputs": [{"name": "a", "parameters": {"classification": 0}}]},
        "output 'a': Expected `int` >= 1 - at `$.parameters.classification`",
    ),
    "a length of no number": ({"inputs": [TEXT]}, "'ten'; the body has", b"", "ten"),
    "a length beyond the body": ({"inputs": [TEXT]}, "'100000'; the body has", b"", "100000"),
    "a length of 0": ({"inputs": [TEXT]}, "JSON: ", b"", "0"),
    "a length that cuts the JSON": ({"inputs": [TEXT]}, "JSON: ", b"", "10"),
    "no length": (binary_of(8), "JSON: ", bytes(8), None),
    "binary data without any": (binary_of(8), "binary_data_size 8; 0 bytes follow the JSON"),
    "more than there is": (binary_of(16, shape=[1, 4]), "binary_data_size 16; 8 bytes follow the JSON", bytes(8)),
    "less than there is": (binary_of(8), "4 bytes behind the binary data of the inputs", bytes(12)),
    "another size than the shape's": (binary_of(12), "shape [1, 2] has 8 bytes, not 12", bytes(12)),
    "a negative size": (binary_of(-8), "binary_data_size -8", bytes(8)),
    "a size and data": (binary_of(8, data=[1, 2]), "both data and binary_data_size", bytes(8)),
    "an element that is cut": (
        binary_of(5, datatype="BYTES", shape=[1]),
        "element [0] of 1 ends at byte 6, there are 5; each element of BYTES begins with its length",
        b"\x02\0\0\0a",
    ),
    "a huge element": (binary_of(5, datatype="BYTES", shape=[1]), "ends at byte 4294967299", b"\xff\xff\xff\xffa"),
    "an element too many": (
        binary_of(10, datatype="BYTES", shape=[1]), "5 bytes behind its last element", elements(b"a", b"b"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_refuses_invalid_requests(name: str):
    asked, said, *rest = WRONG[name]
    with pytest.raises(InvalidRequest) as raised:
        read(asked, *rest)
    assert said in str(raised.value)
    assert len(str(raised.value)) < 400
    assert type(raised.value) is InvalidRequest


# -- results ----------------------------------------------------------------------------------------------------------


Y = TensorSpec("y", (None, 2), "float32")


def asking(*names: str, is_binary: bool = False) -> InferRequest:
    return InferRequest(None, [], [Wanted(name, is_binary) for name in names], is_binary, None, None)


def tensors(items: list[dict[str, Any]], *names: str, specs: Any = ()) -> dict[str, tuple[str, list[int], Any]]:
    """Each output's datatype, shape and elements as JSON has them."""
    request = asking(*names)
    found = outputs_of([kept(item, request) for item in items], request, specs)
    return {
        each.name: (each.datatype, list(each.shape), json.loads(msgspec.json.encode(each.to_json(MANY))))
        for each, _ in found
    }


def results(*values: Any, specs: Any = ()) -> dict[str, tuple[str, list[int], Any]]:
    return tensors([{"data": b"", "result": value} for value in values], specs=specs)


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


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
        ([np.ma.array([1, 2], mask=[False, True])], ("INT64", [2], [1, 2])),
        ([torch.tensor([1.5, -2.0], dtype=torch.bfloat16)], ("BF16", [2], [1.5, -2])),
        ([np.array([1.5, -2.0], ml_dtypes.bfloat16)], ("BF16", [2], [1.5, -2])),
        ([torch.tensor([1 + 2j]).conj().imag], ("FP32", [1], [-2])),
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
def test_converts_results_without_labels(values: list[Any], expected: Any):
    assert results(*values) == {"result": expected}
    assert results(*values, specs=[Y]) == {"y": expected}


@pytest.mark.parametrize(
    "value",
    [
        10**5000, ("a", 10**400), [("a", 10**400)], [np.longdouble(1)], np.timedelta64(5, "s"), nested(10_000),
        torch.eye(2).to_sparse(), torch.empty(2, device="meta"), [torch.empty(2, device="meta"), 1],
        torch.empty(2, device="meta", dtype=torch.bfloat16),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_a_value_without_a_form_is_no_result(value: Any):
    with pytest.raises(NoResult):
        results(value)


def test_several_tensors_have_the_names_of_the_model():
    pair = [torch.tensor([[1]]), torch.tensor([[2]])]
    assert results(pair, pair, specs=[Y, TensorSpec("z")]) == {
        "y": ("INT64", [2, 1], [1, 1]),
        "z": ("INT64", [2, 1], [2, 2]),
    }
    assert list(results(pair)) == ["result_0", "result_1"]


def test_gives_requested_outputs_only():
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


def test_answers_as_json_and_binary():
    outputs = [
        (Output("a", "FP32", [1], np.array([0.5], np.float32)), True),
        (Output("b", "BYTES", [1], [b"x"]), False),
    ]
    asked = asking()
    asked.id = "7"
    given = answer("demo", "1", asked, outputs, MANY)
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
    plain = answer("demo", "1", asking(), outputs[1:], MANY)
    assert (plain.kind, plain.headers) == ("application/json", {})


@pytest.mark.parametrize("datatype", ["UINT8", "FP64", "BYTES"])
def test_refuses_json_beyond_the_reply_as_it_is_sent(datatype: str):
    data: Any = [b"x" * 600] if datatype == "BYTES" else np.zeros(300, datatype.replace("FP64", "float64").lower())
    output = Output("a", datatype, [1, len(data)], data)
    whole = answer("demo", "1", asking(), [(output, False)], MANY).body
    assert answer("demo", "1", asking(), [(output, False)], Bound(len(whole), "--max-reply-bytes")).body == whole
    with pytest.raises(ReplyTooLargeError, match=r"or more; .* \(--max-reply-bytes\); ask .* with binary_data"):
        answer("demo", "1", asking(), [(output, False)], Bound(len(whole) - 1, "--max-reply-bytes"))
