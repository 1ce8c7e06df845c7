"""Requests whose work is done elsewhere: their answers come on several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from conftest import Register
from fakes import WAIT, eventually

from torchpipe_py import pipe
from torchpipe_py.backends.base import Data
from torchpipe_py.backends.deferred import HandedOver, HandOverBackend


def test_a_thread_that_has_told_an_answer_is_in_no_callback_any_more(register: Register) -> None:
    """Though another one began to tell its own meanwhile, and ended later: the first may close the pipe."""
    answers: list[Callable[[], object]] = []

    class Elsewhere(HandOverBackend):
        """Leaves the answers to the test."""

        def start(self, item: Data, done: HandedOver, request: Any) -> None:
            item["result"] = item["data"]
            answers.append(partial(done, None))

    entered, is_told = threading.Event(), threading.Event()
    run = pipe({"backend": register(Elsewhere)})
    first, second = (run.submit({"data": number}) for number in range(2))
    eventually(lambda: len(answers) == 2, "they are not handed over")
    other = threading.Thread(target=answers[1])
    first.add_done_callback(lambda _: (other.start(), entered.wait(WAIT)))
    second.add_done_callback(lambda _: (entered.set(), is_told.wait(WAIT)))
    answers[0]()
    is_told.set()
    other.join(WAIT)
    assert second.done()
    assert run.close()
