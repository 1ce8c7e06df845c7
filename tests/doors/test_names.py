"""Names of outputs that a request repeats, at every door."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import Register, save_model
from kit import doors
from kit.backends import returns
from kit.cells import check_each
from kit.doors import House
from onnx import helper

from torchpipe_py import ConfigError, pipe
from torchpipe_py.methods.inference import Inference
from torchpipe_py.wire.errors import Bound
from torchpipe_py.wire.values import MOST_VALUES


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    with doors.house({"any": {"backend": "Identity"}}) as house:
        yield house


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """A model of 300 inputs and as many outputs, as a table of 300 columns has."""
    forms = [{f"{name}{index}": ["n", 1] for index in range(300)} for name in "xy"]
    nodes = [helper.make_node("Neg", [f"x{index}"], [f"y{index}"]) for index in range(300)]
    path = save_model(tmp_path_factory.mktemp("wide") / "wide.onnx", nodes, *forms)
    with doors.house({"wide": {"backend": "OnnxTensor", "model": path}}) as house:
        yield house


@pytest.mark.parametrize("door", doors.DOORS)
def test_model_with_many_inputs_and_outputs_is_asked(wide: House, door: str) -> None:
    inputs = {f"x{index}": np.array([[index]], "f4") for index in range(300)}
    answer = doors.DOORS[door](wide, doors.Asked("wide", inputs, [f"y{index}" for index in range(300)]))
    assert answer.code == "ok", answer.message
    assert [answer.values[f"y{index}"].item() for index in range(300)] == [-index for index in range(300)]


def test_model_with_more_inputs_than_a_request_can_have_is_not_served(tmp_path: Path) -> None:
    count = MOST_VALUES + 1
    path = save_model(
        tmp_path / "wide.onnx",
        [helper.make_node("Sum", [f"x{index}" for index in range(count)], ["y"])],
        {f"x{index}": ["n", 1] for index in range(count)},
        {"y": ["n", 1]},
    )
    with (
        pipe({"wide": {"backend": "OnnxTensor", "model": path}}) as run,
        pytest.raises(ConfigError, match="model 'wide' has 513 inputs; a request can have 512"),
    ):
        Inference(run, "wide", 0.0, 8, Bound(2**20, ""), Bound(2**20, ""))


@pytest.mark.parametrize("door", doors.DOORS)
def test_output_that_is_named_twice_is_answered_once(house: House, door: str) -> None:
    value = np.array([[1, 2]], "f4")
    answer = doors.DOORS[door](house, doors.Asked("any", {"data": value}, ["result", "result"]))
    assert answer.code == "ok", answer.message
    assert doors.same(answer.values["result"], value)


@pytest.mark.parametrize("door", [door for door in doors.DOORS if not door.startswith("python")])
def test_repeated_names_count_towards_the_limit(house: House, door: str) -> None:
    names = ["result"] * (MOST_VALUES + 1)
    answer = doors.DOORS[door](house, doors.Asked("any", {"data": np.array([[1]], "f4")}, names))
    assert (answer.code, answer.message) == ("invalid_request", f"{len(names)} outputs; the limit is {MOST_VALUES}")


def test_parts_of_a_list_have_the_same_names_at_every_door(register: Register) -> None:
    parts = {"result_0": np.array([[1, 2]], "f4"), "result_1": np.array([[3]], "i8")}
    with doors.house({"m": {"backend": register(returns([*parts.values()]))}, "other": {}}) as house:

        def check(door: str) -> None:
            asked = doors.Asked("m", {"data": np.array([[0]], "f4")}, list(parts))
            answer = doors.DOORS[door](house, asked)
            assert answer.code == "ok", answer.message
            assert all(doors.same(answer.values[name], part) for name, part in parts.items())
            answer = doors.DOORS[door](house, asked._replace(outputs=["result_2"]))
            assert answer.code == "invalid_request"

        check_each([door for door in doors.DOORS if not door.startswith("python")], check)
