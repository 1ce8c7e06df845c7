"""Numbers of JSON: those of another form of the same value, and those that it lacks, at every JSON door."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest
from kit import doors
from kit.clients import ask
from kit.doors import House
from onnx import TensorProto, helper

NAMES = {"bool": "BOOL", "uint8": "UINT8", "int64": "INT64", "uint64": "UINT64", "float32": "FP32"}


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    with doors.house({"any": {"backend": "Identity"}}) as house:
        yield house


def over_infer(dtype: str, data: str, count: int) -> doors.Http:
    body = f'{{"inputs": {{"data": {{"dtype": "{dtype}", "shape": [1, {count}], "data": {data}}}}}}}'
    return doors.Http("/infer", body.encode(), {"content-type": "application/json"}, doors._read_infer)


def over_oip(dtype: str, data: str, count: int) -> doors.Http:
    given = f'{{"name": "data", "datatype": "{NAMES[dtype]}", "shape": [1, {count}], "data": {data}}}'
    return doors.Http("/v2/models/any/infer", f'{{"inputs": [{given}]}}'.encode(), {}, doors._read_oip)


FORMS = {"infer": over_infer, "oip": over_oip}
JSON_DOORS = ("infer", "infer_gzip", "infer_chunked", "oip", "ray_infer", "ray_infer_gzip")
every_json_door = pytest.mark.parametrize("door", ["infer", "oip", "ray_infer", "ray_oip"])
JSON = "application/json"
MANY = ", ".join(["1.0"] * 40_000)
"""Longer than what is read at once."""


def asking(house: House, door: str, dtype: str, data: str, count: int) -> doors.Answer:
    way = doors.over_ray if door.startswith("ray") else doors.over_http
    form = FORMS[door.removeprefix("ray_")]
    return way(lambda asked: form(dtype, data, count))(house, doors.Asked("any", {}, []))


@every_json_door
@pytest.mark.parametrize(
    ("dtype", "data", "value"),
    [
        ("int64", "[1.0, 2, -3.0]", [1, 2, -3]),
        ("int64", "[-9223372036854775808.0, 9223372036854775807]", [-(2**63), 2**63 - 1]),
        ("uint64", "[0.0, 18446744073709551615]", [0, 2**64 - 1]),
        ("uint8", "[[255.0, 1e2]]", [255, 100]),
        ("bool", "[0, 1, true, 1.0, 0.0, false]", [False, True, True, True, False, False]),
        ("float32", "[1, 2.5, -0.0]", [1, 2.5, -0.0]),
    ],
)
def test_numbers_of_the_same_value_are_taken(house: House, door: str, dtype: str, data: str, value: Any) -> None:
    answer = asking(house, door, dtype, data, len(value))
    assert answer.code == "ok", answer.message
    assert doors.same(answer.values["result"], np.array([value], dtype))


@pytest.mark.parametrize("door", ["infer", "oip"])
@pytest.mark.parametrize("dtype", ["int64", "uint8", "bool"])
def test_long_list_of_them_is_taken(dtype: str, door: str, large_house: House) -> None:
    answer = asking(large_house, door, dtype, f"[{MANY}]", 40_000)
    assert answer.code == "ok", answer.message
    assert doors.same(answer.values["result"], np.ones((1, 40_000), dtype))


@pytest.fixture(scope="module")
def large_house() -> Iterator[House]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doors, "LIMITS", {"max_message_bytes": 2**20, "max_reply_bytes": 2**20, "max_text_bytes": 2**10})
        with doors.house({"any": {"backend": "Identity"}}) as house:
            yield house


@every_json_door
@pytest.mark.parametrize(
    ("dtype", "data", "said"),
    [
        ("int64", "[1.5]", "the data has fractions, not int64"),
        ("int64", "[1e300]", "int64 has -9223372036854775808..9223372036854775807"),
        ("uint8", "[256.0]", "uint8 has 0..255"),
        ("uint8", "[-1.0]", "uint8 has 0..255"),
        ("int64", "[true]", "the data has true or false, not int64"),
        ("int64", "[1.0, true]", ", not int64"),
        ("bool", "[2]", "the data has numbers other than 0 and 1, not bool"),
        ("bool", "[0.5]", "the data has numbers other than 0 and 1, not bool"),
        ("bool", '["1"]', "not"),
        ("float32", "[true]", "the data has true or false, not float32"),
    ],
)
def test_other_numbers_are_refused(house: House, door: str, dtype: str, data: str, said: str) -> None:
    answer = asking(house, door, dtype, data, 1)
    assert answer.code == "invalid_request"
    assert said in answer.message


@pytest.mark.parametrize(("given", "named"), [(5, "5"), (-(2**70), str(-(2**70))), (1.5, "1.5"), ("a", "a"), (0, "0")])
def test_number_is_an_id(house: House, given: Any, named: str) -> None:
    tensor = {"name": "data", "datatype": "INT8", "shape": [1], "data": [1]}
    for padding in ("", " " * 70_000):
        body = json.dumps({"id": given, "inputs": [tensor]}) + padding
        assert ask(house.server.port, body.encode(), "/v2/models/any/infer")[1]["id"] == named


def test_boolean_is_not_an_id(house: House) -> None:
    tensor = {"name": "data", "datatype": "INT8", "shape": [1], "data": [1]}
    status, answer = ask(house.server.port, {"id": True, "inputs": [tensor]}, "/v2/models/any/infer")
    assert (status, answer["code"]) == (400, "invalid_request")
    assert "got `bool`" in answer["error"]


# -- numbers without a type -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """Models that answer their input: ``SCALARS`` take a number, ``rows`` of the same types three."""
    folder, config = tmp_path_factory.mktemp("typed"), {}
    for name, number in {"int64": TensorProto.INT64, "uint64": TensorProto.UINT64, "float32": TensorProto.FLOAT,
                         "bool": TensorProto.BOOL, "string": TensorProto.STRING}.items():  # fmt: skip
        for kind, dims in (("one", []), ("row", ["n", 3])):
            form = [helper.make_tensor_value_info(each, number, dims) for each in "xy"]
            graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], name, form[:1], form[1:])
            path = str(folder / f"{name}_{kind}.onnx")
            onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
            config[f"{name}_{kind}"] = {"backend": "OnnxTensor", "model": path, "postprocessor": "cpu"}
    with doors.house(config) as house:
        yield house


def asked_of(house: House, model: str, given: str) -> tuple[int, Any]:
    body = f'{{"inputs": {{"x": {given}}}, "node_name": "{model}"}}'
    return ask(house.server.port, body.encode(), "/infer", Content_Type=JSON)


@pytest.mark.parametrize(
    ("model", "given", "value"),
    [
        ("int64_one", "3.0", [3]),
        ("int64_one", "-9223372036854775808", [-(2**63)]),
        ("uint64_one", "18446744073709551615", [2**64 - 1]),
        ("bool_one", "1", [True]),
        ("float32_one", "1", [1.0]),
        ("float32_one", str(2**70), [2.0**70]),
        ("int64_row", "[1.0, 2, -3e0]", [1, 2, -3]),
        ("int64_row", "[[9223372036854775807, 1.0, 0]]", [2**63 - 1, 1, 0]),
        ("uint64_row", "[1, 18446744073709551615, 0.0]", [1, 2**64 - 1, 0]),
        ("bool_row", "[0, 1.0, true]", [False, True, True]),
        ("float32_row", f"[1, {2**70}, 0.5]", [1.0, 2.0**70, 0.5]),
    ],
)
def test_plain_numbers_are_taken_by_their_value(typed: House, model: str, given: str, value: list[Any]) -> None:
    status, answer = asked_of(typed, model, given)
    assert status == 200, answer
    assert answer["result"]["dtype"] == model.partition("_")[0]
    assert answer["result"]["data"] == value


@pytest.mark.parametrize(
    ("model", "given", "said"),
    [
        ("int64_one", "1.5", "input 'x' takes int64, got 1.5"),
        ("int64_one", str(2**70), f"takes int64, got {2**70}; its least is {-(2**63)}, its most {2**63 - 1}"),
        ("int64_one", "1e30", f"takes int64, got {int(1e30)}; its least is"),
        ("int64_row", f"[1, 2, {2**70}]", f"takes int64, got {2**70}; its least is"),
        ("int64_row", "[1, 2.5, 3]", "input 'x' takes int64, got 2.5"),
        ("uint64_row", "[1, 2, -1]", "input 'x' takes uint64, got int64 of -1..2"),
        ("bool_row", "[0, 1, 2]", "input 'x' takes bool, got 2"),
        ("float32_row", '[1, "a", 2]', "input 'x': a list with 'a' at [1]; expected float32"),
        ("float32_row", '[[1, 2, "a"]]', "input 'x': a list with 'a' at [2]; expected float32"),
        ("string_row", '["a", 1.5, "b"]', "input 'x' takes texts, got 1.5"),
        ("string_row", "[1, 2, 3]", "input 'x' takes texts, got int64"),
    ],
)
def test_other_plain_values_are_named(typed: House, model: str, given: str, said: str) -> None:
    status, answer = asked_of(typed, model, given)
    assert (status, answer["code"]) == (400, "invalid_request")
    assert said in answer["error"]


@pytest.mark.parametrize(
    ("path", "dtype", "nearest"),
    [
        ("/infer", "float128", "float64"),
        ("/infer", "Float32", "float32"),
        ("/infer", "int4", "int8"),
        ("/infer", "bool8", "bool"),
        ("/v2/models/any/infer", "FP128", "FP64"),
        ("/v2/models/any/infer", "BF32", "BF16"),
    ],
)
def test_type_that_does_not_exist_suggests_the_nearest_of_its_kind(
    house: House, path: str, dtype: str, nearest: str
) -> None:
    given = {"shape": [1, 2], "data": [1, 2]}
    of_infer = {"data": {"dtype": dtype, **given}}
    inputs: Any = of_infer if path == "/infer" else [{"name": "data", "datatype": dtype, **given}]
    status, answer = ask(house.server.port, json.dumps({"inputs": inputs}).encode(), path, Content_Type=JSON)
    assert (status, answer["code"]) == (400, "invalid_request")
    assert answer["error"].endswith(f"'data': datatype {dtype!r}; did you mean {nearest!r}?")


def test_thrift_names_the_input_of_a_wrong_tensor(house: House) -> None:
    answer = doors.DOORS["thrift"](house, doors.Asked("any", {"data": np.zeros((1, 2), np.longdouble)}, ["result"]))
    assert answer.code == "invalid_request"
    assert answer.message == "'data': datatype 'float128'; did you mean 'float64'?"


# -- NaN and infinity -------------------------------------------------------------------------------------------------

NOT_FINITE = "NaN", "Infinity", "-Infinity", "1e400"


@every_json_door
@pytest.mark.parametrize("number", NOT_FINITE)
@pytest.mark.parametrize("count", [1, 2000])
def test_numbers_that_json_cannot_represent_are_refused(house: House, door: str, number: str, count: int) -> None:
    answer = asking(house, door, "float32", f"[{', '.join(['1'] * (count - 1) + [number])}]", count)
    assert answer.code == "invalid_request"
    said = "the data has NaN or infinity, which JSON cannot represent: send it as binary"
    assert said in answer.message or (number == "1e400" and "Number out of range" in answer.message)


@pytest.mark.parametrize("number", NOT_FINITE)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/infer", '{"inputs": {"data": %}}'),
        ("/infer", '{"inputs": {"data": [[%]]}}'),
        ("/infer", '{"inputs": {"data": 1}, "parameters": {"a": [%]}}'),
        ("/infer", '{"inputs": {"data": 1}, "deadline_ms": %}'),
        ("/v2/models/any/infer", '{"inputs": [{"name": "data", "datatype": "INT8", "shape": [1], "data": [%]}]}'),
        (
            "/v2/models/any/infer",
            '{"parameters": {"a": {"b": %}}, '
            '"inputs": [{"name": "data", "datatype": "INT8", "shape": [1], "data": [1]}]}',
        ),
    ],
)
def test_they_are_refused_wherever_they_are(house: House, path: str, body: str, number: str) -> None:
    status, answer = ask(house.server.port, body.replace("%", number).encode(), path, Content_Type="application/json")
    assert (status, answer["code"]) == (400, "invalid_request")


DIVISION = np.array([[1, 0, -1, 4]], "f4"), np.array([[0, 0, 0, 2]], "f4")
QUOTIENT = np.array([[np.inf, np.nan, -np.inf, 2]], "f4")


@pytest.fixture(scope="module")
def divides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    form = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in "aby"]
    graph = helper.make_graph([helper.make_node("Div", ["a", "b"], ["y"])], "divide", form[:2], form[2:])
    path = str(tmp_path_factory.mktemp("model") / "divide.onnx")
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    with doors.house({"divide": {"backend": "OnnxTensor", "model": path, "postprocessor": "cpu"}}) as house:
        yield house


@pytest.mark.parametrize("door", doors.DOORS)
def test_results_that_json_cannot_represent_are_refused_in_json_alone(divides: House, door: str) -> None:
    answer = doors.DOORS[door](divides, doors.Asked("divide", dict(zip("ab", DIVISION, strict=True)), ["y"]))
    if door in JSON_DOORS:
        assert answer.code == "no_result"
        assert "NaN or infinity, which JSON cannot represent" in answer.message
    else:
        assert answer.code == "ok", answer.message
        assert np.array_equal(answer.values["y"], QUOTIENT, equal_nan=True)


@pytest.mark.parametrize("door", [door for door in doors.DOORS if door not in JSON_DOORS])
def test_they_pass_as_binary(house: House, door: str) -> None:
    answer = doors.DOORS[door](house, doors.Asked("any", {"data": QUOTIENT}, ["result"]))
    assert answer.code == "ok", answer.message
    assert np.array_equal(answer.values["result"], QUOTIENT, equal_nan=True)
