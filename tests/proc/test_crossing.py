"""What goes to another process and comes back, whichever way: ``Process`` in batches and singly, and a shared node."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import process_backends
import pytest
from engines import workers_of

from torchpipe_py import pipe, registry


@pytest.fixture(scope="module", params=["batches", "singles", "shared"])
def run(request: pytest.FixtureRequest) -> Iterator[pipe]:
    """A pipe whose backend does what ``data`` says."""
    with registry.default.restored() as default:
        cls = process_backends.Single if request.param == "singles" else process_backends.Obedient
        default.register_backend(cls, "X")
        if request.param == "shared":
            with workers_of({"node": {"backend": "X", "shared": True}}) as (worker,):
                yield worker.pipe
        else:
            with pipe({"node": {"backend": "Process[X]"}}) as built:
                built({"data": "x"})  # its threads have started
                yield built


def test_the_dict_becomes_what_the_backend_made_of_it(run: pipe) -> None:
    """Keys that were added, changed, deleted; what cannot be sent stays, and one object that is there twice is one."""
    array, same, lock = np.zeros(2), b"bytes" * 9999, threading.Lock()
    given = {"removed": 1, "changed": 1, "array": array, "same": same, "lock": lock}
    item = run({"data": "edit", **given})
    assert item.keys() == {"changed", "array", "same", "added", "lock", "result"}
    assert item["changed"] == 2
    assert item["array"].tolist() == [7, 0]
    assert item["same"] is item["added"] is same
    assert item["lock"] is lock


ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "raised": ({"data": "raise_value_error"}, r".*ValueError: no such value"),
    "stubborn": ({"data": "raise_stubborn"}, r".*StubbornError: two parts"),
    "long": ({"data": "raise_long"}, r".*ValueError: xxx"),
    "no way back": ({"data": "give_lambda"}, "'answer' cannot come back from another process"),
    "no way there": (
        {"data": threading.Lock()}, "'data' cannot go to another process: cannot pickle '_thread.lock'",
    ),
    "a request": ({"data": np.zeros(2**30, np.uint8)}, r"a request of 1073\d+ bytes is too large"),
    "an answer": ({"data": "zeros", "size": 2**30}, r"an answer of 1073\d+ bytes is too large"),
}  # fmt: skip
"""Large arrays are pages of zeros that nobody has written: no memory."""


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_costs_its_request_alone(run: pipe, name: str) -> None:
    item, message = ERRORS[name]
    with pytest.raises(Exception, match=message):
        run({**item})
    assert run({"data": "x"})["result"][2] == "x"
    assert run.stats()["inflight"] == 0
