"""``pipe.map``: in order, bounded, errors raised or as values, the newest only."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import Register
from kit.waits import WAIT

from torchpipe_py import BackendError, DecodeError, InvalidRequest, ItemBackend, pipe


class Double(ItemBackend):
    """Twice the number; the later ones sooner."""

    def forward_item(self, item: dict[str, Any]) -> None:
        if item["data"] == "bad":
            raise ValueError("a bad item")
        threading.Event().wait(0.01 * (3 - item["data"] % 4))
        item["result"] = 2 * item["data"]


@pytest.fixture
def run(register: Register) -> Iterator[pipe]:
    with pipe({"backend": register(Double), "instance_num": 4}) as built:
        yield built


def items(*values: Any) -> Iterator[dict[str, Any]]:
    return ({"data": value} for value in values)


def test_gives_results_in_order_and_takes_no_more_than_it_may_have_ahead(run: pipe) -> None:
    taken = []

    def source() -> Iterator[dict[str, Any]]:
        for index in range(10):
            taken.append(index)
            yield {"data": index}

    results = run.map(source(), ahead=3)
    for index in range(10):
        assert next(results)["result"] == 2 * index
        assert len(taken) <= index + 4
    assert next(results, None) is None


def test_raises_an_error_in_its_place_and_cancels_the_rest(run: pipe) -> None:
    results = run.map(items(0, "bad", 2, 3))
    assert next(results)["result"] == 0
    with pytest.raises(BackendError, match="a bad item"):
        next(results)
    assert next(results, None) is None


def test_gives_errors_as_values(run: pipe) -> None:
    done = list(run.map([{"data": 0}, {"data": "bad"}, {"nodata": 1}, {"data": 3}], return_errors=True))
    assert [item.get("result") for item in done] == [0, None, None, 6]
    assert [type(item.get("error")) for item in done] == [type(None), BackendError, InvalidRequest, type(None)]
    with pipe({"backend": "DecodeMat"}) as decode:  # what has no result is a value either way
        assert [type(item["error"]) for item in decode.map(items(b"no image"))] == [DecodeError]


def test_the_newest_item_waits(register: Register) -> None:
    gate, started, all_read = threading.Event(), threading.Event(), threading.Event()

    class Gated(ItemBackend):
        def forward_item(self, item: dict[str, Any]) -> None:
            started.set()
            assert gate.wait(WAIT)
            item["result"] = item["data"]

    def source() -> Iterator[dict[str, Any]]:
        yield {"data": 0}
        assert started.wait(WAIT)
        for index in range(1, 10):
            yield {"data": index}
        all_read.set()

    with pipe({"backend": register(Gated)}) as run:
        results = run.map(source(), ahead=1, newest=True)
        threading.Thread(target=lambda: all_read.wait(WAIT) and gate.set(), daemon=True).start()
        assert [done["result"] for done in results] == [0, 9]


def test_what_the_iterable_raises_is_raised(run: pipe) -> None:
    def source() -> Iterator[dict[str, Any]]:
        yield {"data": 0}
        raise OSError("no more")

    for newest in (False, True):
        with pytest.raises(OSError, match="no more"):
            list(run.map(source(), newest=newest))


@pytest.mark.parametrize("newest", [False, True])
def test_gives_a_result_as_soon_as_it_is_there(run: pipe, newest: bool) -> None:
    taken = threading.Event()

    def source() -> Iterator[dict[str, Any]]:
        yield {"data": 3}
        if newest:
            assert taken.wait(WAIT), "the result is not given while the next item is awaited"
        yield {"data": 7}

    results = run.map(source(), newest=newest)
    assert next(results)["result"] == 6
    taken.set()
    assert [done["result"] for done in results] == [14]


def test_nothing_is_read_before_a_result_is_asked_for(run: pipe) -> None:
    read: list[int] = []

    def source() -> Iterator[dict[str, Any]]:
        read.append(1)
        yield {"data": 1}

    del_me = run.map(source(), newest=True)
    del del_me
    assert read == []


def test_refuses_to_be_nothing_ahead(run: pipe) -> None:
    with pytest.raises(ValueError, match="ahead must be at least 1, not 0"):
        run.map(items(1), ahead=0)
