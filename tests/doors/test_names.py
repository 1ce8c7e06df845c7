"""Names of outputs that a request repeats, at every door."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from kit import doors
from kit.doors import House

from torchpipe_py.wire.values import MOST_VALUES


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    with doors.house({"any": {"backend": "Identity"}}) as house:
        yield house


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
