"""``MapReduce``: what becomes of an element that ends without a result, and what can be split."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from conftest import Register

from torchpipe_py import (
    Backend,
    BackendError,
    DecodeError,
    InvalidRequest,
    MapReduce,
    NoResult,
    Overloaded,
    TorchpipeError,
    pipe,
)
from torchpipe_py.backends.control import jump
from torchpipe_py.errors import prefixed
from torchpipe_py.wire.answers import failure


class Tells(Backend):
    """``data`` is the result; an exception or a text is the ``error``."""

    def forward(self, items: list[dict[str, Any]]) -> None:
        for item in items:
            if isinstance(item["data"], (BaseException, str)):
                item["error"] = item["data"]
            else:
                item["result"] = item["data"]


class TooDarkError(TorchpipeError):
    """An error of somebody's own, with a code of its own and arguments of its own."""

    code = "too_dark"

    def __init__(self, level: int, least: int) -> None:
        super().__init__(f"{level} is less than {least}")
        self.level = level


def graph(backend: str, register: Register, **keys: Any) -> dict[str, Any]:
    split = {"backend": backend, "jump": "each", "next": "last", **keys}
    return {"all": split, "last": {"map": "all[result:data]"}, "each": {"backend": register(Tells)}}


def ask(config: dict[str, Any], data: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The dict, and the figures of the nodes."""
    with pipe(config) as run:
        return run({"data": data, "node_name": "all"}), run.stats()["nodes"]


@pytest.mark.parametrize("backend", ["MapReduce", "S[Identity,MapReduce]"])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidRequest("a box is four numbers"), 400),
        (DecodeError("no image"), 400),
        (NoResult("nothing found"), 422),
        (TooDarkError(3, 10), 400),
        (Overloaded("later", 70), 429),
    ],
)
def test_the_error_of_an_element_is_that_of_the_request(
    register: Register, backend: str, error: TorchpipeError, status: int
) -> None:
    data, figures = ask(graph(backend, register), [1, error, InvalidRequest("a later one")])
    found = data["error"]
    assert type(found) is type(error)
    assert str(found) == f"element 1 of 3: {error}"
    assert (found.code, found.retry_after_ms, found.__cause__) == (error.code, error.retry_after_ms, error)
    assert "result" not in data
    assert failure(found).status == status
    assert {name: node["failed"] for name, node in figures.items()} == {"all": 0, "each": 0, "last": 0}


def test_an_exception_that_takes_no_message_is_told_as_it_is(register: Register) -> None:
    error = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no text")
    assert ask(graph("MapReduce", register), [error])[0]["error"] is error
    assert prefixed("x: ", error) is error


def test_nested_elements_are_both_named(register: Register) -> None:
    config = {"all": {"backend": "MapReduce", "jump": "rows"}, "rows": {"backend": "MapReduce", "jump": "each"}}
    data, _ = ask({**config, "each": {"backend": register(Tells)}}, [[1], [2, 3, InvalidRequest("no")]])
    assert str(data["error"]) == "element 1 of 2: element 2 of 3: no"


def test_a_merge_key_that_nothing_writes_is_a_defect(register: Register) -> None:
    with pytest.raises(BackendError, match="element 1 of 2: 'each' gave no 'boxes'"):
        ask(graph("MapReduce", register, merge="boxes"), [InvalidRequest("no"), 1])


def test_a_merge_of_ones_own_leaves_no_result_beside_the_error(register: Register) -> None:
    class Counted(MapReduce):
        def merge(self, data: Any, parts: Any) -> None:
            data["result"] = len(parts)
            super().merge(data, parts)

    data, _ = ask(graph(register(Counted), register), [1, InvalidRequest("no")])
    assert (str(data["error"]), "result" in data) == ("element 1 of 2: no", False)


# -- what can be split ----------------------------------------------------------------------------------------------

BOXES = [[0, 0, 4, 2], [1, 1, 3, 5]]


@pytest.mark.parametrize("backend", ["MapReduce", "S[Identity,MapReduce]"])
@pytest.mark.parametrize("boxes", [BOXES, np.array(BOXES), torch.tensor(BOXES, dtype=torch.float32)])
def test_the_rows_of_an_array_are_elements(register: Register, backend: str, boxes: Any) -> None:
    config = {"all": {"backend": backend, "jump": "crop", "split": "box"}, "crop": {"backend": "CropMat"}}
    with pipe(config) as run:
        data = run({"data": np.zeros((8, 8, 3), np.uint8), "box": boxes, "node_name": "all"})
    assert [mat.shape for mat in data["result"]] == [(2, 4, 3), (4, 2, 3)]


@pytest.mark.parametrize("array", [np.arange(3), torch.arange(3), np.arange(24).reshape(3, 2, 4)])
def test_rows_have_a_dimension_less(register: Register, array: Any) -> None:
    found = ask(graph("MapReduce", register), array)[0]["data"]
    assert [type(row) for row in found] == [type(array[0])] * 3
    assert [row.tolist() for row in found] == array.tolist()


@pytest.mark.parametrize("array", [np.zeros((0, 4)), torch.zeros(0), torch.zeros((0, 4))])
def test_no_rows_are_an_empty_list(register: Register, array: Any) -> None:
    assert ask(graph("MapReduce", register), array)[0]["result"] == []
    keys = {"split": "data,k", "merge": "result,k"}
    with pipe(graph("MapReduce", register, **keys)) as run:
        data = run({"data": array, "k": [], "node_name": "all"})
    assert data["result"] == []


@pytest.mark.parametrize("array", [np.array(1), torch.tensor(1)])
def test_what_has_no_rows_is_refused(register: Register, array: Any) -> None:
    found = ask(graph("MapReduce", register), array)[0]["error"]
    assert type(found) is InvalidRequest
    assert str(found).endswith(f"found {type(array).__name__} of no dimension")


def test_an_array_of_many_rows_is_refused_before_they_are_made(register: Register) -> None:
    found = ask(graph("MapReduce", register), np.zeros((jump.MOST_ROWS + 1, 1), np.uint8))[0]["error"]
    assert type(found) is InvalidRequest
    assert str(found) == "the ndarray under 'data' has 65537 rows to split; the limit is 65536"
    with pipe(graph("MapReduce", register, split="data,k")) as run:
        data = run({"data": np.zeros((3, 4)), "k": [1, 2], "node_name": "all"})
    assert str(data["error"]) == "the keys to split hold lists of different lengths: 'data' has 3, 'k' has 2"
