"""The same request has the same outcome, whichever way it comes in: ``contract`` has the ways and the table."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from kit import contract
from kit.cells import check_each
from kit.contract import IN_PROCESS, MOST_INFLIGHT, WAYS, Asked, House, Outcome
from kit.steered import Steered, steering
from kit.waits import WAIT, all_idle, error_of, eventually
from torchpipe_server.front import connection

from torchpipe_py.aging import Aging

ON_SOCKETS = [way for way in WAYS if way not in IN_PROCESS]
every_way = pytest.mark.parametrize("way", WAYS)


@pytest.fixture(scope="module")
def built() -> Iterator[House]:
    with contract.house() as house:
        yield house


@pytest.fixture
def house(built: House) -> Iterator[House]:
    with steering(**contract.VALUES):
        yield built
    for way in IN_PROCESS:
        run = built.pipe_of(way)
        eventually(lambda run=run: run.stats()["inflight"] == 0, "a request is left")


@pytest.fixture
def block(house: House) -> Iterator[Any]:
    """Fill a pipe with requests that block, so many."""
    futures = []

    def fill(way: str, count: int = 1) -> None:
        run = house.pipe_of(way)
        futures.extend(run.submit({"data": b"block"}) for _ in range(count))
        assert Steered.entered.acquire(timeout=WAIT)
        eventually(lambda: run.stats()["inflight"] == count)

    yield fill
    Steered.opened.set()
    assert [error_of(future) for future in futures] == [None] * len(futures)


@every_way
def test_outcome(house: House, caplog: pytest.LogCaptureFixture, way: str) -> None:
    def check(name: str) -> None:
        caplog.clear()
        row = contract.ROWS[name]
        outcome = WAYS[way](house, row.asked)
        code, said = row.outcome_for(way)
        assert outcome.code == code, outcome
        assert (outcome.label == said or not said) if code == "ok" else said in outcome.message
        is_defect = code == "internal" or code == "backend_error"
        if way not in ("pipe", "shared") and "large" not in name:
            eventually(lambda: len(caplog.records) >= is_defect)
            assert [record.levelno for record in caplog.records] == [logging.ERROR] * is_defect, "logged once"
            assert ('raise ValueError("on request")' in caplog.text) == (code == "backend_error"), "where it was raised"
        assert house.pipe_of(way).stats()["inflight"] == 0
        assert WAYS[way](house, Asked()) == Outcome("ok", "abc")

    check_each([name for name, asked_by in contract.CASES if asked_by == way], check)


@every_way
def test_a_full_pipe_refuses_at_once(house: House, block: Any, way: str) -> None:
    block(way, MOST_INFLIGHT)
    for _ in range(3):
        outcome = WAYS[way](house, Asked())
        assert outcome.code == "overloaded"
        assert outcome.retry_after_ms is None if way in ("own_method",) else outcome.retry_after_ms >= 1
    assert b"abc" not in Steered.seen


@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("infer_batch", "own_method", "own_route")])
def test_low_priority_waits_for_normal_requests(
    house: House, block: Any, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(Aging, "SECONDS", 2 * WAIT)  # after which it would not
    block(way)
    run, outcomes = house.pipe_of(way), []

    def ask(data: bytes, priority: int) -> threading.Thread:
        queued = run.stats()["inflight"]
        asking = threading.Thread(target=lambda: outcomes.append(WAYS[way](house, Asked(data, priority=priority))))
        asking.start()
        eventually(lambda: run.stats()["inflight"] == queued + 1)
        return asking

    threads = [ask(b"low", 1), ask(b"normal", 0)]
    if way == "shared":
        eventually(lambda: house.engine.stats()["inflight"] == 3)
    Steered.opened.set()
    for thread in threads:
        thread.join(WAIT)
    assert [outcome.code for outcome in outcomes] == ["ok", "ok"]
    assert [bytes(data) for data in Steered.seen[-2:]] == [b"normal", b"low"]


@pytest.mark.parametrize("way", [way for way in WAYS if way not in contract.PLAIN])
def test_another_priority_is_refused(house: House, way: str) -> None:
    outcome = WAYS[way](house, Asked(priority=-1))
    assert outcome.code == "invalid_request"
    assert "priority" in outcome.message


@pytest.mark.parametrize("way", [way for way in WAYS if way != "infer_batch"])
def test_a_deadline_is_answered_while_the_backend_blocks(house: House, block: Any, way: str) -> None:
    """What waits behind another request is not computed any more, or refused: the time of batches is measured."""
    block(way)
    assert WAYS[way](house, Asked(b"late", deadline_ms=50)).code in ("deadline_exceeded", "overloaded")
    Steered.opened.set()
    eventually(lambda: house.pipe_of(way).stats()["inflight"] == 0)
    assert WAYS[way](house, Asked()) == Outcome("ok", "abc")
    assert Steered.seen == [b"block", b"abc"]
    Steered.opened.clear()
    all_idle(house.pipe_of(way))  # what has to wait may be refused
    assert WAYS[way](house, Asked(b"block", deadline_ms=200)).code == "deadline_exceeded"


@pytest.mark.parametrize("way", ON_SOCKETS)
def test_the_requests_of_a_client_that_is_gone_are_not_computed(
    house: House, block: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    monkeypatch.setattr(connection, "END_SECONDS", 0.05)
    monkeypatch.setattr(house, "seconds", 0.3)
    block(way)
    with pytest.raises(TimeoutError):
        WAYS[way](house, Asked(b"abandoned"))
    eventually(lambda: not house.server.server.connections and not house.own.server.connections)
    eventually(lambda: house.pipe.stats()["inflight"] == 1)
    Steered.opened.set()
    eventually(lambda: house.pipe.stats()["inflight"] == 0)
    monkeypatch.undo()
    assert WAYS[way](house, Asked()) == Outcome("ok", "abc")
    assert Steered.seen == [b"block", b"abc"]
    assert caplog.records == []
