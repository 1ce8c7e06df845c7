"""The reader of large JSON gives what Python's gives."""

from __future__ import annotations

import base64
import json
import math
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchpipe_py import InvalidRequest
from torchpipe_py.wire import json_reader, json_values
from torchpipe_py.wire.errors import RequestTooLargeError
from torchpipe_py.wire.json_reader import Numbers, read_json
from torchpipe_py.wire.json_values import array_from, from_json, parse_json

SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text())
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner), st.lists(st.floats(), min_size=5), st.dictionaries(st.text(), inner)),
    max_leaves=20,
)


def plain(value: Any) -> Any:
    """The value with lists in place of ``Numbers``, and NaN as something that is equal to itself."""
    if isinstance(value, Numbers):
        value = value.to_list()
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return "NaN" if isinstance(value, float) and math.isnan(value) else value


def read(text: str) -> Any:
    return read_json(text.encode("utf-8", "surrogatepass"))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_reader, "LONG", 12)
    monkeypatch.setattr(json_reader, "PIECE", 7)
    monkeypatch.setattr(json_reader, "_FIRST_PIECE", 24)
    monkeypatch.setattr(json_reader, "_LONGEST_PIECE", 24)
    monkeypatch.setattr(json_values, "_PART", 16)


@settings(max_examples=300, deadline=None)
@given(VALUES, st.sampled_from([None, 1]), st.booleans())
def test_reads_what_python_reads(value: Any, indent: int | None, is_ascii: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=is_ascii)
    assert plain(read(text)) == plain(json.loads(text))


@settings(max_examples=500, deadline=None)
@given(st.data(), VALUES)
def test_refuses_what_python_refuses(data: st.DataObject, value: Any) -> None:
    text = json.dumps(value)
    at, other = data.draw(st.integers(0, len(text))), data.draw(st.sampled_from(["", *',][{}": 1\0']))
    broken = text[:at] + other + text[at + 1 :]
    outcomes = []
    for loads in (json.loads, read):
        try:
            outcomes.append(plain(loads(broken)))
        except ValueError:
            outcomes.append("refused")
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(
    "text", ["[1,2,3,4,5,6,]", "[,1,2,3,4,5,6]", "[1,2,3,,4,5,6,7]", "[1,2,3,4 5,6,7,8]", "[" + " " * 99]
)
def test_malformed_list_of_numbers_is_refused_with_its_place(text: str) -> None:
    with pytest.raises(json.JSONDecodeError) as expected:
        json.loads(text)
    with pytest.raises(json.JSONDecodeError) as raised:
        plain(read(text))
    assert abs(raised.value.pos - expected.value.pos) <= 1


ESCAPES = st.sampled_from(
    [*'aü€"\n\U0001f600\ud83d', "\\\\", '\\"', "\\n", "\\u00e4", "\\ud83d\\ude00", "\\ud83d", "\\ude00", "\\u12"]
)


@settings(max_examples=1000, deadline=None)
@given(st.lists(ESCAPES, max_size=60))
def test_reads_escapes_across_pieces_as_python_does(parts: list[str]) -> None:
    text = json.dumps(" " * 12)[:-1] + "".join(parts) + '"'
    try:
        expected = json.loads(text)
    except json.JSONDecodeError:
        with pytest.raises(json.JSONDecodeError):
            read(text)
    else:
        assert read(text) == expected


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
@pytest.mark.parametrize("rows", [[1], 300 * [1], 40 * [[1, 1, 1]], [20 * [1] for _ in range(30)]])
def test_gives_other_threads_a_turn_between_bounded_parts(monkeypatch: pytest.MonkeyPatch, dtype, rows) -> None:
    part, sizes, pauses = json_values._part, [], []
    monkeypatch.setattr(
        json_values, "_part", lambda where, kind, numbers: sizes.append(len(numbers)) or part(where, kind, numbers)
    )
    monkeypatch.setattr(json_reader.Turns, "pause", lambda self: pauses.append(1))
    array = array_from("", dtype, read(json.dumps(rows)))
    assert array.tolist() == [1] * array.size
    assert max(sizes) <= json_values._PART
    assert len(pauses) >= len(sizes) - 1


def test_thread_that_reads_for_long_sleeps_in_its_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [0.0], []
    monkeypatch.setattr(json_reader, "perf_counter", lambda: now[0])
    monkeypatch.setattr(json_reader, "sleep", slept.append)
    turns = json_reader.Turns()
    turns.pause()
    now[0] = 2 * json_reader.TURN_SECONDS
    turns.pause()
    turns.pause()
    assert slept == [json_reader.REST_SECONDS]


def test_list_of_blanks_is_empty() -> None:
    assert plain(read("[" + " " * 99 + "]")) == []


def test_too_many_values_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_reader, "MOST_SINGLE_VALUES", 10)
    with pytest.raises(RequestTooLargeError, match="more than 10 texts and single numbers"):
        read(json.dumps(["a"] * 11))
    assert len(read(json.dumps([["a"] * 5, [1.5] * 1000]))[1].to_list()) == 1000


@pytest.mark.parametrize("shape", [(90,), (3, 30), (30, 3), (2, 3, 15)])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "uint8", "bool"])
def test_nested_numbers_are_the_array(shape: tuple[int, ...], dtype: str) -> None:
    array = np.arange(90).reshape(shape).astype(dtype)
    given = array_from("", dtype, read(json.dumps(array.tolist())))
    assert (given.dtype, given.tolist()) == (array.dtype, array.ravel().tolist())


@pytest.mark.parametrize(
    ("data", "dtype", "said"),
    [
        ([1] * 40 + [256], "uint8", "the data has 1..256, uint8 has 0..255"),
        ([1] * 40 + [1.5], "int32", "the data has fractions, not int32"),
        ([1] * 40 + [True], "int32", "the data has true or false, not int32"),
        ([1] * 40 + [None], "float32", "the data has null, not float32"),
        ([1] * 40 + [1e39], "float32", "numbers beyond those of float32"),
        ([[1] * 40, [1] * 41], "float32", "lists of several lengths"),
        ([[1] * 40, 1], "float32", "lists of several depths"),
        ([[1] * 40, ["a"]], "float32", "the data has texts"),
    ],
)
def test_wrong_numbers_are_refused_in_any_piece(data: Any, dtype: str, said: str) -> None:
    for loads in (json.loads, read):
        with pytest.raises(InvalidRequest) as raised:
            array_from("x: ", dtype, loads(json.dumps(data)))
        if said.startswith("the data has 1.."):
            assert "256, uint8 has 0..255" in str(raised.value)
        elif "texts" not in said:
            assert said in str(raised.value)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 47, 48, 49, 1000])
def test_base64_in_pieces(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(json_values, "_BASE64_PIECE", 64)
    data = bytes(index % 251 for index in range(size))
    assert from_json("", {"b64": base64.b64encode(data).decode()}) == data
    for wrong in ("AA==" + "A" * 80, "A" * 81, "A" * 80 + "*AAA"):
        with pytest.raises(InvalidRequest, match="b64 is not base64"):
            from_json("", {"b64": wrong})


def test_large_bodies_are_read_by_it() -> None:
    text = json.dumps({"a": "ü", "b": [0.5] * 50_000})
    for coding in ("utf-8", "utf-8-sig", "utf-16", "utf-32-be"):
        value = parse_json(text.encode(coding))
        assert isinstance(value["b"], Numbers)
        assert plain(value) == json.loads(text)
    for wrong in (b"\xff\xfe" + text.encode(), text.encode() + b"}", b"[" * 60_000 + b" " * 10_000):
        with pytest.raises(InvalidRequest, match="JSON: "):
            parse_json(wrong)


def test_large_body_with_wide_characters_stays_as_narrow_as_its_bytes() -> None:
    text = json.dumps({"a": "\U0001f600", "b": [1] * 50_000, "c": "ü"}, ensure_ascii=False)
    value = parse_json(text.encode())
    assert (value["a"], value["c"]) == ("\U0001f600", "ü")
    assert sys.getsizeof(value["b"]._text) < 1.01 * len(text)
    with pytest.raises(InvalidRequest, match=rf"Extra data \(char {len(text)}\)"):
        parse_json((text + "}").encode())
    for wrong in ("ü".encode("latin-1"), b"\xf0\x9f\x98", b"\x80" * 9):
        with pytest.raises(InvalidRequest, match=r"JSON: Not UTF-8: .* \(char 7\)"):
            parse_json(text.encode().replace("\U0001f600".encode(), wrong))
