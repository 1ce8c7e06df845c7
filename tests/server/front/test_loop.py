"""The queue from any thread to the loop's thread, and connections that advance together."""

from __future__ import annotations

import asyncio
import errno
import logging
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from torchpipe_server.front.loop import Inbox, call_on_thread, new_loop
from torchpipe_server.front.server import Server


@pytest.mark.parametrize("is_fast", [False, True])
@pytest.mark.parametrize("kind", [ValueError, asyncio.CancelledError, GeneratorExit])
def test_items_behind_one_that_raises_are_taken(
    kind: type[BaseException], is_fast: bool, caplog: pytest.LogCaptureFixture
) -> None:
    loop = new_loop(is_fast)
    taken: list[int] = []

    def take(item: int) -> None:
        if item == 1:
            raise kind("a bad item")
        taken.append(item)
        if item == 4:
            loop.stop()

    inbox = Inbox(loop, take)
    with caplog.at_level(logging.ERROR, "torchpipe_server"):
        for item in range(5):
            inbox.put(item)
        loop.call_later(30, loop.stop)  # not reached
        loop.run_forever()
    loop.close()
    assert taken == [0, 2, 3, 4]
    assert [record.exc_info[1].args for record in caplog.records if record.exc_info] == [("a bad item",)]  # type: ignore[union-attr]


@pytest.mark.parametrize("is_fast", [False, True])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_items_behind_one_that_ends_the_loop_are_taken(kind: type[BaseException], is_fast: bool) -> None:
    loop = new_loop(is_fast)
    taken: list[int] = []

    def take(item: int) -> None:
        if item == 1:
            raise kind
        taken.append(item)

    inbox = Inbox(loop, take)
    for item in range(5):
        inbox.put(item)
    with pytest.raises(kind):
        loop.run_forever()
    loop.close()
    assert taken == [0, 2, 3, 4]


@pytest.mark.parametrize("kind", [ValueError, SystemExit])
def test_a_call_on_a_thread_returns_its_outcome_to_the_loop(
    monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    loop, outcomes, here = new_loop(), list[Any](), threading.get_ident()

    def work(number: int) -> tuple[int, bool]:
        if not number:
            raise kind("nothing")
        return number, threading.get_ident() == here

    def done(outcome: Any) -> None:
        outcomes.append((outcome, threading.get_ident() == here))
        loop.stop()

    for number in range(2):
        call_on_thread(loop, "a-thread", partial(work, number), done)
        loop.run_forever()
    (error, is_here), given = outcomes
    expected = "nothing" if kind is ValueError else "SystemExit: nothing"
    assert (str(error), is_here, given) == (expected, True, ((1, False), True))
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    call_on_thread(loop, "a-thread", partial(work, 1), done)
    assert len(outcomes) == 2, "never before it returns"
    loop.run_forever()
    assert outcomes[2][0].errno == errno.EAGAIN
    loop.close()


@pytest.mark.parametrize("kind", [ValueError, asyncio.CancelledError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("method", [Server._advance, Server._tick])
def test_connections_behind_one_that_raises_advance(method: Callable[[Any], None], kind: type[BaseException]) -> None:
    """What ends the loop is raised, as by an ``Inbox``, once all had their turn."""
    bad, good = Mock(**{"advance.side_effect": kind, "check_time.side_effect": kind}), Mock()
    server: Any = SimpleNamespace(scheduled={bad: None, good: None}, _connections=[bad, good], is_ending=False)
    with pytest.raises(kind) if kind in (KeyboardInterrupt, SystemExit) else nullcontext():
        method(server)
    bad.fail.assert_called_once_with()
    assert good.advance.call_count + good.check_time.call_count == 1
    good.fail.assert_not_called()
