"""Results that are no arrays: what has a form in JSON is the same value over Thrift, and what has none is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kit import doors
from kit.clients import ask
from kit.doors import House
from kit.steered import steering
from torchpipe_client import Client, NoResult

VALUES: dict[str, Any] = {
    "nothing": None,
    "bool": np.bool_(True),
    "bytes of numpy": np.void(b"ab"),
    "largest": 2**63 - 1,
    "larger": 2**63,
    "unsigned": np.uint64(2**64 - 1),
    "negative": -(2**63) - 1,
    "beyond float64": 10**400,
    "list": [None, 2**64, "a"],
}
WITHOUT_FORM: dict[str, Any] = {"time": np.timedelta64(5, "s"), "digits": 10**5000, "complex": 1j, "set": {1}}


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    with steering(**VALUES, **WITHOUT_FORM), doors.house({"any": {"backend": "Steered"}}) as house:
        yield house


def of_json(house: House, name: str) -> tuple[int, dict[str, Any]]:
    return ask(house.server.port, f"value {name}".encode())


@pytest.mark.parametrize("name", VALUES)
def test_value_is_the_same_over_thrift_as_in_json(house: House, name: str) -> None:
    status, body = of_json(house, name)
    assert status == 200
    with Client(f"127.0.0.1:{house.server.port}") as client:
        assert client.infer({"data": f"value {name}"}) == body


@pytest.mark.parametrize("name", WITHOUT_FORM)
def test_value_without_a_form_is_refused_alike(house: House, name: str) -> None:
    status, body = of_json(house, name)
    assert (status, body["code"]) == (422, "no_result")
    with Client(f"127.0.0.1:{house.server.port}") as client, pytest.raises(NoResult) as caught:
        client.infer({"data": f"value {name}"})
    assert str(caught.value) == body["error"]


def test_a_large_integer_spoils_no_other_result_of_a_call(house: House) -> None:
    with Client(f"127.0.0.1:{house.server.port}") as client:
        answers = client.infer_many([{"data": "value larger"}, {"data": "value largest"}, {"data": "value digits"}])
    assert answers[:2] == [{"result": 2**63}, {"result": 2**63 - 1}]
    assert isinstance(answers[2], NoResult)
