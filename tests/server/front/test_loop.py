"""The queue from any thread to the loop's thread."""

from __future__ import annotations

import logging

import pytest
from torchpipe_server.front.loop import Inbox, new_loop


def test_items_behind_one_that_raises_are_taken(caplog: pytest.LogCaptureFixture) -> None:
    loop = new_loop()
    taken: list[int] = []

    def take(item: int) -> None:
        if item == 1:
            raise ValueError("a bad item")
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
