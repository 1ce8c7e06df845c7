"""One request, one outcome, whichever door it comes through: models, what is wrong, and the doors of ``kit.doors``.

A new kind of model is a line in ``KINDS``, a new mistake one in ``MISTAKES``.
"""

from __future__ import annotations

import json
import random
import string
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from kit import doors
from kit.cells import check_each
from kit.clients import HttpClient
from kit.doors import DOORS, LIMITS, ROW_DOORS, Answer, Asked, House, to_texts
from kit.waits import WAIT, eventually
from onnx import TensorProto, helper, numpy_helper
from torchpipe_server.front import connection

from torchpipe_py import Backend, Detections, Signature, TensorSpec, registry
from torchpipe_py.backends.signature import detection_outputs
from torchpipe_py.wire.values import MOST_DIMENSIONS, MOST_TEXTS, MOST_VALUES

Arrays = dict[str, Any]
DTYPES: dict[str, tuple[int, Any]] = {
    "fp32": (TensorProto.FLOAT, np.array([[1.5, -2, 3e38, 1e-40]], "f4")),
    "fp16": (TensorProto.FLOAT16, np.array([[1.5, -2, 65504, 6e-8]], "f2")),
    "fp64": (TensorProto.DOUBLE, np.array([[1.1, -2, 1e300, 5e-324]], "f8")),
    "bf16": (TensorProto.BFLOAT16, np.array([[1.5, -2, 3e38, 1e-40]], ml_dtypes.bfloat16)),
    "int8": (TensorProto.INT8, np.array([[-128, 0, 1, 127]], "i1")),
    "int16": (TensorProto.INT16, np.array([[-(2**15), 0, 1, 2**15 - 1]], "i2")),
    "int32": (TensorProto.INT32, np.array([[-(2**31), 0, 1, 2**31 - 1]], "i4")),
    "int64": (TensorProto.INT64, np.array([[-(2**63), 2**53 + 1, 1, 2**63 - 1]], "i8")),
    "uint8": (TensorProto.UINT8, np.array([[0, 1, 254, 255]], "u1")),
    "uint16": (TensorProto.UINT16, np.array([[0, 1, 2**15, 2**16 - 1]], "u2")),
    "uint32": (TensorProto.UINT32, np.array([[0, 1, 2**31, 2**32 - 1]], "u4")),
    "uint64": (TensorProto.UINT64, np.array([[0, 2**53 + 1, 2**63, 2**64 - 1]], "u8")),
    "bool": (TensorProto.BOOL, np.array([[True, False, True, True]])),
    "string": (TensorProto.STRING, to_texts(["", "ä\0b", "x" * 300, "🙂"], (1, 4))),
}


class Kind(NamedTuple):
    """A kind of model: its node, good inputs, and the outputs that it gives for them.

    ``required`` are the inputs that a request must have; those of custom backends may have any type and shape.
    """

    node: dict[str, Any]
    inputs: Arrays
    outputs: Arrays
    required: Sequence[str] = ()
    is_custom: bool = False


F = TensorProto.FLOAT
ROW = np.array([[5, 6, 7, 8]], "f4")
ONES = np.ones((1, 4), "f4")
DETECTIONS = Detections(
    np.array([[0.1, 2, 30, 40], [1e-3, 6, 7.77, 1234.5678]], "f4"), [0.9, 1 / 3], [1, 0], ("cat", "größe"),
    [[[1, 2, 0.5]], [[3, 4, 0.1]]], ([[[0, 0], [1.5, 0], [1, 1]]], {"size": [2, 2], "counts": "04"}),
)  # fmt: skip
NESTED = {"size": [4, [1.5, None]], "text": "ä"}


def save(
    folder: Path, name: str, nodes: Sequence[Any], inputs: Mapping[str, Any], outputs: Mapping[str, Any],
    constants: Mapping[str, np.ndarray] = {},
) -> dict[str, Any]:  # fmt: skip
    """A node with a model of these tensors, each a type and dimensions. Its ``constants`` may be inputs, too."""
    declared = [
        [helper.make_tensor_value_info(tensor, *form) for tensor, form in forms.items()] for forms in (inputs, outputs)
    ]
    graph = helper.make_graph(
        list(nodes), name, *declared, [numpy_helper.from_array(value, key) for key, value in constants.items()]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    onnx.save(model, folder / f"{name}.onnx")
    return {"backend": "OnnxTensor", "model": str(folder / f"{name}.onnx"), "postprocessor": "cpu", "max": 4}


def identity(folder: Path, name: str, number: int, value: Any, dims: Sequence[Any], x: str = "x", y: str = "y") -> Kind:
    node = helper.make_node("Identity", [x], [y])
    return Kind(save(folder, name, [node], {x: (number, dims)}, {y: (number, dims)}), {x: value}, {y: value}, [x])


def difference(folder: Path, name: str, a: str, b: str, y: str = "y") -> Kind:
    node = helper.make_node("Sub", [a, b], [y])
    form = (F, ["n", 4])
    inputs = {a: ROW, b: ONES}
    return Kind(save(folder, name, [node], {a: form, b: form}, {y: form}), inputs, {y: ROW - 1}, [a, b])


class Nested(Backend):
    """A dict and lists in a list."""

    def forward(self, items: list[dict[str, Any]]) -> None:
        for item in items:
            item["result"] = NESTED


class Short(Backend):
    """A short result for data of any length."""

    def forward(self, items: list[dict[str, Any]]) -> None:
        for item in items:
            item["result"] = np.ones((1, 1), "f4")


class Detects(Backend):
    """Two objects with all that detections may have."""

    def forward(self, items: list[dict[str, Any]]) -> None:
        for item in items:
            item["result"] = DETECTIONS

    def signature(self) -> Signature:
        return Signature((TensorSpec("data", (None, 4), "float32"),), detection_outputs(keypoints=1, has_masks=True))


class Gated(Backend):
    """Returns the tensor; a first number below 0 waits for ``opened``."""

    opened = threading.Event()
    entered = threading.Semaphore(0)
    seen: list[float] = []  # noqa: RUF012

    def forward(self, items: list[dict[str, Any]]) -> None:
        for item in items:
            first = float(np.asarray(item["data"]).ravel()[0])
            self.seen.append(first)
            if first < 0:
                opened = Gated.opened
                Gated.entered.release()
                opened.wait(WAIT)
            item["result"] = item["data"]


def kinds_in(folder: Path) -> dict[str, Kind]:
    """All kinds of models, each a root of one pipe."""
    make = helper.make_node
    kinds = {name: identity(folder, name, number, value, ["n", 4]) for name, (number, value) in DTYPES.items()}
    pairs = {
        "own_data": ("data", "im_info"), "own_data_last": ("im_info", "data"), "own_result": ("a", "result"),
        "own_error": ("error", "b"), "own_priority": ("priority", "b"), "own_node_name": ("node_name", "b"),
        "own_context": ("context", "b"), "own_parameters": ("parameters", "b"),
    }  # fmt: skip
    kinds |= {name: difference(folder, name, *pair) for name, pair in pairs.items()}
    kinds |= {
        f"gives_{name}": difference(folder, f"gives_{name}", "a", "b", name) for name in ("result", "data", "error")
    }
    kinds["only_data"] = identity(folder, "only_data", F, ROW, ["n", 4], "data")
    kinds["any_name"] = identity(folder, "any_name", F, ROW, ["n", 4], "images:0", "output/Ünï.0")
    kinds["wide"] = identity(folder, "wide", F, np.arange(7, dtype="f4")[None], ["n", "w"])
    pixels = np.arange(48, dtype="u1").reshape(1, 4, 4, 3)
    kinds["nhwc"] = identity(folder, "nhwc", TensorProto.UINT8, pixels, ["n", 4, 4, 3])
    image = np.arange(48, dtype="f4").reshape(1, 3, 4, 4)
    kinds["no_batch"] = Kind(
        {**identity(folder, "no_batch", F, image, [3, 4, 4]).node, "max": 1}, {"x": image}, {"y": image[0]}, ["x"]
    )
    stereo = save(
        folder, "normalised",
        [make("Cast", ["left"], ["a"], to=F), make("Identity", ["right"], ["b"])],
        {"left": (TensorProto.UINT8, ["n", 4, 4, 3]), "right": (F, ["n", 3, 4, 4])},
        {"a": (F, ["n", 4, 4, 3]), "b": (F, ["n", 3, 4, 4])},
    )  # fmt: skip
    kinds["normalised"] = Kind(
        {**stereo, "mean::left": "128, 64, 32", "std::left": 64, "mean::right": 8},
        {"left": pixels, "right": image},
        {"a": (pixels - np.array([128, 64, 32], "f4")) / 64, "b": image - 8},
        ["left", "right"],
    )
    form = (F, ["n", 4])
    kinds["optional_left_out"] = Kind(
        save(
            folder, "optional", [make("Add", ["a", "b"], ["y"])], {"a": form, "b": (F, [4])}, {"y": form},
            {"b": np.full(4, 10, "f4")},
        ),
        {"a": ROW}, {"y": ROW + 10}, ["a"],
    )  # fmt: skip
    kinds["optional_given"] = kinds["optional_left_out"]._replace(
        inputs={"a": ROW, "b": np.array([[1, 2, 3, 4]], "f4")}, outputs={"y": ROW + np.array([1, 2, 3, 4], "f4")}
    )
    several = {"a": form, "b": (TensorProto.INT64, ["n", 4]), "s": (F, ["n"])}
    kinds["several"] = Kind(
        save(
            folder, "several",
            [make("Identity", ["x"], ["a"]), make("Cast", ["x"], ["b"], to=TensorProto.INT64),
             make("ReduceSum", ["x", "axis"], ["s"], keepdims=0)],
            {"x": form}, several, {"axis": np.array([1])},
        ),
        {"x": ROW}, {"a": ROW, "b": ROW.astype("i8"), "s": np.array([26], "f4")}, ["x"],
    )  # fmt: skip
    found = save(
        folder, "found",
        [make("Greater", ["x", "zero"], ["m"]), make("NonZero", ["m"], ["i"]),
         make("Transpose", ["i"], ["rows"], perm=[1, 0]), make("ReduceSum", ["x"], ["count"], keepdims=0)],
        {"x": (F, [1, "w"])}, {"rows": (TensorProto.INT64, ["k", 2]), "count": (F, [])}, {"zero": np.float32(0)},
    )  # fmt: skip
    kinds["scalar"] = Kind(
        {**found, "max": 1}, {"x": ROW}, {"rows": np.array([[0, i] for i in range(4)]), "count": np.array([26], "f4")},
        ["x"],
    )  # fmt: skip
    kinds["no_rows"] = kinds["scalar"]._replace(
        inputs={"x": -ROW}, outputs={"rows": np.zeros((0, 2), "i8"), "count": np.array([-26], "f4")}
    )
    logits = np.zeros((1, 3, 2, 2), "f4")
    logits[0, 2, 1] = 1
    mask = identity(folder, "mask", F, logits, ["n", 3, 2, 2]).node
    kinds |= one_at_a_time(folder)
    kinds["mask"] = Kind(
        {**mask, "postprocessor": "ArgMax"}, {"x": logits}, {"result": np.array([[[0, 0], [2, 2]]], "u1")}, ["x"]
    )
    kinds["nested"] = Kind(
        {"backend": "Nested"}, {"data": ROW}, {"result": {"size": [4, [1.5, None]], "text": "ä"}}, (), True
    )
    kinds["texts"] = identity(folder, "texts", TensorProto.STRING, to_texts(["a", "ü"], (1, 2)), ["n", "w"])
    kinds["detector"] = Kind(
        {"backend": "Detects"}, {"data": ROW},
        {
            "boxes": DETECTIONS.boxes, "scores": DETECTIONS.scores, "classes": DETECTIONS.classes,
            "labels": to_texts(["größe", "cat"], [2]), "keypoints": DETECTIONS.keypoints,
            "masks": to_texts(["[[[0, 0], [1.5, 0], [1, 1]]]", '{"size": [2, 2], "counts": "04"}'], [2]),
            "offsets": np.array([0, 2]),
        },
        ["data"], True,
    )  # fmt: skip
    yolo = np.zeros((1, 6, 8), "f4")  # two classes, eight places
    yolo[0, :, 1], yolo[0, :, 3] = [10, 10, 8, 8, 0.9, 0.1], [20, 20, 4, 4, 0.2, 0.6]
    node = save(
        folder, "yolo",
        [make("ReduceMin", ["x"], ["least"], axes=[1, 2, 3]), make("Reshape", ["least", "to"], ["each"]),
         make("Mul", ["each", "found"], ["y"])],
        {"x": (F, ["n", 3, 32, 32])}, {"y": (F, ["n", 6, 8])}, {"found": yolo, "to": np.array([-1, 1, 1])},
    )  # fmt: skip
    kinds["yolo"] = Kind(
        {**node, "postprocessor": "YoloBoxes", "least_threshold": 0.1}, {"x": np.ones((1, 3, 32, 32), "f4")},
        {
            "boxes": np.array([[6, 6, 14, 14], [18, 18, 22, 22]], "f4"), "scores": np.array([0.9, 0.6], "f4"),
            "classes": np.array([0, 1]), "offsets": np.array([0, 2]),
        },
        ["x"],
    )  # fmt: skip
    kinds["large_reply"] = Kind(
        {**save(
            folder, "large_reply", [make("Expand", ["x", "to"], ["y"])], {"x": (F, ["n", 1])}, {"y": (F, ["n", 2**15])},
            {"to": np.array([1, 2**15])},
        ), "max": 1},
        {"x": ROW[:, :1]}, {"y": np.full((1, 2**15), 5, "f4")}, ["x"],
    )  # fmt: skip
    return kinds


def one_at_a_time(folder: Path) -> dict[str, Kind]:
    """Models with an open first dimension and ``max = 1``: of the first two it is not a batch."""
    make, form = helper.make_node, (F, ["p", 4])
    nodes = {
        "points": save(
            folder, "points", [make("ReduceMax", ["x"], ["most"], axes=[0]), make("Add", ["x", "most"], ["y"])],
            {"x": form}, {"y": form},
        ),
        "sequence": save(
            folder, "sequence",
            [make("LSTM", ["x", "w", "r"], ["states"], hidden_size=2), make("Squeeze", ["states", "axis"], ["y"])],
            {"x": (F, ["t", 1, 4])}, {"y": (F, ["t", 1, 2])},
            {"w": np.linspace(-1, 1, 32, dtype="f4").reshape(1, 8, 4), "axis": np.array([1]),
             "r": np.linspace(1, -1, 16, dtype="f4").reshape(1, 8, 2)},
        ),
        "row_by_row": save(folder, "row_by_row", [make("Softmax", ["x"], ["y"])], {"x": form}, {"y": form}),
    }  # fmt: skip
    kinds = {}
    for name, node in nodes.items():
        x = ROW[:, None] / 4 if name == "sequence" else ROW
        session = onnxruntime.InferenceSession(node["model"], providers=["CPUExecutionProvider"])
        kinds[name] = Kind({**node, "max": 1}, {"x": x}, {"y": session.run(None, {"x": x})[0]}, ["x"])
    return kinds


MIXED = ("points", "sequence")

NAMES = (
    *DTYPES, "own_data", "own_data_last", "own_result", "own_error", "own_priority", "own_node_name", "own_context",
    "own_parameters", "gives_result", "gives_data", "gives_error", "only_data", "any_name", "wide", "nhwc", "no_batch",
    "optional_left_out", "optional_given", "several", "scalar", "no_rows", "mask", "nested", "texts", "detector",
    "yolo", "normalised", *MIXED, "row_by_row",
)  # fmt: skip


class Table(NamedTuple):
    house: House
    kinds: dict[str, Kind]

    def asked(self, name: str, inputs: Arrays | None = None, **more: Any) -> Asked:
        """A request to the root of this kind, by default its good one."""
        kind = self.kinds[name]
        root = name.removesuffix("_given").removesuffix("_left_out")
        return Asked(root, kind.inputs if inputs is None else inputs, list(kind.outputs), **more)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Table]:
    kinds = kinds_in(tmp_path_factory.mktemp("kinds"))
    nodes = {name.removesuffix("_given").removesuffix("_left_out"): kind.node for name, kind in kinds.items()}
    nodes["short"] = {"backend": "Short"}
    nodes["gated"] = {"backend": "Gated", "instance_num": 1}
    with registry.default.restored() as default:
        default.register_backend(Nested, "Nested")
        default.register_backend(Detects, "Detects")
        default.register_backend(Gated, "Gated")
        default.register_backend(Short, "Short")
        with doors.house(nodes) as house:
            yield Table(house, kinds)


every_door = pytest.mark.parametrize("door", DOORS)


def check_values(answer: Answer, expected: Arrays) -> None:
    assert (answer.code, answer.message) == ("ok", "")
    assert answer.values.keys() == expected.keys()
    for output, value in expected.items():
        assert doors.same(answer.values[output], value), (output, answer.values[output])


@every_door
def test_good_request_has_the_same_result(table: Table, door: str) -> None:
    check_each(NAMES, lambda name: check_values(DOORS[door](table.house, table.asked(name)), table.kinds[name].outputs))


def test_metadata_declares_what_is_sent(table: Table) -> None:
    def check(name: str) -> None:
        asked = table.asked(name)
        answer = DOORS["oip_binary"](table.house, asked)
        client.send(f"GET /v2/models/{asked.model} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        declared = json.loads(client.read().body)
        outputs = {output["name"]: (output["datatype"], output["shape"]) for output in declared["outputs"]}
        for output, value in answer.values.items():
            datatype, shape = outputs.pop(output)
            assert (datatype, len(shape)) == (doors.datatype_of(value), value.ndim)
            assert all(size in (-1, given) for size, given in zip(shape, value.shape, strict=True))
        assert not outputs
        inputs = {given["name"]: given.get("parameters", {}).get("optional", False) for given in declared["inputs"]}
        assert [given for given, is_optional in inputs.items() if not is_optional] == list(table.kinds[name].required)
        assert asked.inputs.keys() <= inputs.keys()

    with HttpClient(table.house.server.port) as client:
        check_each([name for name in NAMES if name != "nested"], check)


# -- what is wrong --------------------------------------------------------------------------------------------------


def unknown(kind: Kind) -> Arrays | None:
    return {**kind.inputs, "nonsense": ONES}


def misspelt(kind: Kind) -> Arrays | None:
    return {f"{name}_": value for name, value in kind.inputs.items()}


def missing(kind: Kind) -> Arrays | None:
    return {name: kind.inputs[name] for name in kind.required[1:]} if len(kind.required) > 1 else None


def other_type(kind: Kind) -> Arrays | None:
    first, value = next(iter(kind.inputs.items()))
    wrong = ROW if value.dtype == object else to_texts(["1"] * value.size, value.shape)
    return {**kind.inputs, first: wrong}


def fractions(kind: Kind) -> Arrays | None:
    first, value = next(iter(kind.inputs.items()))
    return {**kind.inputs, first: value.astype("f4") + 0.5} if value.dtype.kind in "iub" else None


def other_shape(kind: Kind) -> Arrays | None:
    first, value = next(iter(kind.inputs.items()))
    return {**kind.inputs, first: value[:, None, None]}


MISTAKES: dict[str, Callable[[Kind], Arrays | None]] = {
    "unknown input": unknown,
    "misspelt input": misspelt,
    "missing input": missing,
    "other type": other_type,
    "fractions for integers": fractions,
    "other shape": other_shape,
}
"""Inputs that are wrong, or ``None`` if a kind cannot have the mistake. Each is an ``invalid_request``."""


@every_door
def test_wrong_inputs_are_invalid_at_every_door(table: Table, door: str) -> None:
    def check(cell: tuple[str, str]) -> None:
        mistake, name = cell
        kind = table.kinds[name]
        inputs = None if kind.is_custom else MISTAKES[mistake](kind)
        if inputs is None or (door == "python" and name == "only_data"):  # its ``data`` is no dict
            return
        answer = DOORS[door](table.house, table.asked(name, inputs))
        assert (answer.code, answer.values) == ("invalid_request", {})
        assert ("'nonsense'" if mistake == "unknown input" else "input") in answer.message

    check_each(product(MISTAKES, NAMES), check)


@every_door
def test_unknown_model_is_refused(table: Table, door: str) -> None:
    answer = DOORS[door](table.house, table.asked("fp32")._replace(model="fp23"))
    assert answer.code == "unknown_node"
    assert "fp32" in answer.message


@every_door
def test_unknown_output_is_refused(table: Table, door: str) -> None:
    if door == "python":
        pytest.skip("a result has all outputs")
    answer = DOORS[door](table.house, table.asked("several")._replace(outputs=["a", "nonsense"]))
    assert answer.code == "invalid_request"
    assert "'nonsense'" in answer.message


@every_door
def test_too_large_request_is_refused(table: Table, door: str) -> None:
    if door == "python":
        pytest.skip("a call has no limit")
    inputs = {"x": np.zeros((1, LIMITS["max_message_bytes"] // 4 + 1), "f4")}
    assert DOORS[door](table.house, table.asked("wide", inputs)).code == "too_large"


@every_door
def test_too_large_reply_is_refused(table: Table, door: str) -> None:
    if door == "python":
        pytest.skip("a call has no limit")
    answer = DOORS[door](table.house, table.asked("large_reply"))
    assert (answer.code, answer.values) == ("too_large", {})


# -- sizes around each limit ----------------------------------------------------------------------------------------

over_a_wire = pytest.mark.parametrize("door", [door for door in DOORS if door != "python"])


def text_of(size: int) -> str:
    """Text that does not become much smaller when it is compressed."""
    return "".join(random.Random(size).choices(string.ascii_letters + string.digits, k=size))


def check_limit(ask: Callable[[int], Answer], size_of: Callable[[Answer], int], limit: int, tried: int) -> None:
    """What is as large as the limit passes, and what is larger by one is refused; ``tried`` is a size that passes."""
    size = tried + limit - size_of(ask(tried))
    answer = ask(size)
    assert (answer.code, size_of(answer)) == ("ok", limit)
    assert ask(size + 1).code == "too_large"


@over_a_wire
def test_request_passes_at_the_limit_of_its_bytes_and_not_beyond(table: Table, door: str) -> None:
    def ask(size: int) -> Answer:
        inputs = {"data": to_texts([text_of(size)], (1, 1))}
        answer: Answer = DOORS[door](table.house, Asked("short", inputs, ["result"]))
        return answer

    check_limit(ask, lambda answer: answer.sent, LIMITS["max_message_bytes"], 100_000)


@over_a_wire
def test_reply_passes_at_the_limit_of_its_bytes_and_not_beyond(table: Table, door: str) -> None:
    def ask(size: int) -> Answer:
        inputs = {"x": to_texts([text_of(size)], (1, 1))}
        answer: Answer = DOORS[door](table.house, table.asked("texts", inputs))
        return answer

    check_limit(ask, lambda answer: answer.received, LIMITS["max_reply_bytes"], 50_000)


@over_a_wire
@pytest.mark.parametrize(
    ("form", "most"),
    [(lambda count: to_texts(["a"] * count, (1, count)), MOST_TEXTS),
     (lambda count: np.zeros((1,) * count, "f4"), MOST_DIMENSIONS)],
    ids=["texts", "dimensions"],
)  # fmt: skip
def test_array_passes_at_its_limits_and_not_beyond(
    table: Table, door: str, form: Callable[[int], np.ndarray], most: int
) -> None:
    for count, code in ((most, "ok"), (most + 1, "invalid_request")):
        answer = DOORS[door](table.house, Asked("short", {"data": form(count)}, ["result"]))
        assert answer.code == code, answer.message


@over_a_wire
def test_request_passes_at_the_limit_of_its_names_and_not_beyond(table: Table, door: str) -> None:
    for count, code in ((MOST_VALUES, "ok"), (MOST_VALUES + 1, "invalid_request")):
        inputs = {"data": ROW, **{f"more{index}": ROW[:, :1] for index in range(count - 1)}}
        answer = DOORS[door](table.house, Asked("short", inputs, ["result"]))
        assert answer.code == code, answer.message


@pytest.mark.parametrize("door", [door for door in ROW_DOORS if door != "python"])
def test_call_passes_at_the_limit_of_its_items_and_not_beyond(table: Table, door: str) -> None:
    most = LIMITS["max_batch"]
    for count, code in ((most, "ok"), (most + 1, "invalid_request")):
        inputs = {"x": np.arange(4 * count, dtype="f4").reshape(count, 4)}
        answer = ROW_DOORS[door](table.house, table.asked("fp32", inputs))
        assert answer.code == code, answer.message
        if code == "ok":
            assert doors.same(answer.values["y"], inputs["x"])
        else:
            assert f"the limit is {most}" in answer.message


# -- batches --------------------------------------------------------------------------------------------------------

WITHOUT_BATCH = ("no_batch", "scalar", "no_rows", "nested", *MIXED)


@pytest.fixture(scope="module")
def batches(table: Table) -> dict[str, tuple[Asked, Arrays]]:
    """A batch of three for each kind that takes one, with the joined results of its rows asked alone."""
    made = {}
    for name in [name for name in NAMES if name not in WITHOUT_BATCH]:
        inputs = {
            key: np.concatenate([np.roll(value, index, axis=-1) for index in range(3)])
            for key, value in table.kinds[name].inputs.items()
        }
        asked = table.asked(name, inputs)
        alone = [DOORS["python"](table.house, asked._replace(inputs=row)) for row in doors.rows_of(asked)]
        made[name] = asked, doors.joined([each.values for each in alone])
    return made


@pytest.mark.parametrize("door", ROW_DOORS)
def test_rows_of_a_batch_have_the_results_of_single_requests(
    table: Table, batches: dict[str, tuple[Asked, Arrays]], door: str
) -> None:
    def check(name: str) -> None:
        asked, expected = batches[name]
        answer = ROW_DOORS[door](table.house, asked)
        assert (answer.code, answer.message) == ("ok", "")
        for output, value in expected.items():
            assert doors.same(answer.values[output], value), (output, answer.values[output])

    check_each(batches, check)


@pytest.mark.parametrize("door", ROW_DOORS)
def test_batch_with_wrong_inputs_is_invalid(table: Table, door: str) -> None:
    def check(cell: tuple[str, str]) -> None:
        mistake, name = cell
        kind = table.kinds[name]
        wrong = None if kind.is_custom or name in WITHOUT_BATCH else MISTAKES[mistake](kind)
        if wrong is None or (door == "python" and name == "only_data"):  # its ``data`` is no dict
            return
        inputs = {key: np.concatenate([value] * 3) for key, value in wrong.items()}
        answer = ROW_DOORS[door](table.house, table.asked(name, inputs))
        assert (answer.code, answer.values) == ("invalid_request", {})

    check_each(product([mistake for mistake in MISTAKES if mistake != "fractions for integers"], NAMES), check)


@every_door
def test_rows_that_depend_on_each_other_are_refused_alike(table: Table, door: str) -> None:
    """They are the values of one request, whose answer row by row would be wrong."""

    def check(name: str) -> None:
        (value,) = table.kinds[name].inputs.values()
        asked = table.asked(name, {"x": np.concatenate([value, -value])})
        answer = DOORS[door](table.house, asked)
        assert answer == Answer("invalid_request", {}, DOORS["python"](table.house, asked).message)
        shape, batched = ("2x1x4", "1x?x1x4") if name == "sequence" else ("2x4", "1x?x4")
        assert f"input 'x' takes 1{shape[1:]}, got {shape}; the model's rows depend on each other" in answer.message
        assert answer.message.endswith(f"export the model with a batch before it, {batched}")

    check_each(MIXED, check)


@pytest.mark.parametrize("name", [*MIXED, "row_by_row"])
def test_metadata_says_whether_a_request_may_have_several_rows(table: Table, name: str) -> None:
    most, first = (1, 1) if name in MIXED else (LIMITS["max_batch"], -1)
    with HttpClient(table.house.server.port) as client:
        client.send(f"GET /v2/models/{name} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        (given,) = json.loads(client.read().body)["inputs"]
        assert given["shape"] == [first, *table.kinds[name].inputs["x"].shape[1:]]
        client.send(f"GET /v2/models/{name}/config HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        config = json.loads(client.read().body)
        assert config["max_batch_size"] == most
        assert config["input"][0]["dims"] == given["shape"][1:]


# -- parameters -----------------------------------------------------------------------------------------------------


OF_A_DETECTOR: list[tuple[dict[str, Any], list[float] | str]] = [
    ({"threshold": 0.7}, [0.9]),
    ({"classes": "1", "max_det": 1}, [0.6]),
    ({"threshold": 0.05}, "parameter 'threshold': must be from 0.1 to 1, got 0.05"),
    ({"threshold": "high"}, "parameter 'threshold'"),
    ({"max_det": 1000}, "must be from 1 to 300"),
]
"""Parameters, and the scores that they leave or the refusal."""


@every_door
def test_parameters_of_a_detector_keep_its_bounds(table: Table, door: str) -> None:
    def check(cell: tuple[dict[str, Any], list[float] | str]) -> None:
        parameters, expected = cell
        answer = DOORS[door](table.house, table.asked("yolo", parameters=parameters))
        if isinstance(expected, str):
            assert answer.code == "invalid_request"
            assert expected in answer.message
        else:
            assert np.array_equal(answer.values["scores"], np.array(expected, "f4"))

    check_each(OF_A_DETECTOR, check)


@every_door
def test_usual_parameters_that_no_backend_reads_are_refused(table: Table, door: str) -> None:
    """Where a custom backend may read any, they reach it."""

    def check(cell: tuple[str, str, str]) -> None:
        kind, name, said = cell
        answer = DOORS[door](table.house, table.asked(kind, parameters={name: 0.5}))
        assert (answer.code, said in answer.message) == (("invalid_request", True) if said else ("ok", True)), answer

    if not door.startswith("python"):
        check_each(
            [("yolo", "conf", "'conf'; did you mean 'threshold'?"), ("yolo", "imgsz", "'imgsz'; valid: class"),
             ("yolo", "mine", ""), ("texts", "threshold", "'threshold'; the model reads none"), ("texts", "mine", ""),
             ("nested", "conf", "")],
            check,
        )  # fmt: skip


# -- late and cancelled ---------------------------------------------------------------------------------------------


@pytest.fixture
def gate(table: Table) -> Iterator[None]:
    Gated.opened, Gated.entered = threading.Event(), threading.Semaphore(0)
    Gated.seen.clear()
    yield
    Gated.opened.set()
    for door in ("python", "ray_infer"):
        run = table.house.pipe_of(door)
        eventually(lambda run=run: run.stats()["inflight"] == 0, "a request is left")


def gated(number: float, **more: Any) -> Asked:
    return Asked("gated", {"data": np.array([[number]], "f4")}, ["result"], **more)


@every_door
def test_late_request_is_answered_at_its_deadline(table: Table, gate: None, door: str) -> None:
    assert DOORS[door](table.house, gated(-1, deadline_ms=50)).code in ("deadline_exceeded", "overloaded")
    Gated.opened.set()
    eventually(lambda: table.house.pipe_of(door).stats()["inflight"] == 0)
    assert DOORS[door](table.house, gated(1)).code == "ok"


@every_door
def test_request_of_a_client_that_left_is_not_computed(
    table: Table, gate: None, monkeypatch: pytest.MonkeyPatch, door: str
) -> None:
    house, run = table.house, table.house.pipe_of(door)
    monkeypatch.setattr(connection, "END_SECONDS", 0.05)
    blocking = run.submit({"data": np.array([[-1]], "f4"), "node_name": "gated"})
    assert Gated.entered.acquire(timeout=WAIT)
    monkeypatch.setattr(house, "seconds", 0.3)
    with pytest.raises(TimeoutError):  # such as a socket's
        DOORS[door](house, gated(7))
    eventually(lambda: run.stats()["inflight"] == 1, "the request is still there")
    assert run.stats()["nodes"]["gated"]["queued"] == 0, "it counts as pending"
    monkeypatch.undo()
    Gated.opened.set()
    assert float(blocking.result(WAIT)["result"][0, 0]) == -1
    answer: Answer = DOORS[door](house, gated(1))
    assert doors.same(answer.values["result"], np.array([[1]], "f4"))
    assert Gated.seen == [-1, 1]
