"""Closed and open loops on a pipe in this process, which need no thread for each client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from queue import Empty, SimpleQueue
from time import perf_counter, sleep
from typing import Any

from torchpipe_py.errors import NoResult, TorchpipeError, describe
from torchpipe_py.keys import TASK_DATA_KEY, TASK_ERROR_KEY, TASK_RESULT_KEY
from torchpipe_py.runtime.pipe import pipe

WAIT_S = 60.0
"""How long a loop waits after its end for the last requests, so that the next one starts with an idle pipe."""

Failed = tuple[int, str]
"""The number of an image without a result, and the reason."""


def closed_loop(
    run: pipe,
    images: Sequence[bytes],
    clients: int,
    seconds: float,
    start: float,
    most: float = inf,
    wait_s: float = WAIT_S,
) -> tuple[list[float], Failed | None]:
    """Run clients that each wait for a result, from ``start`` on for ``seconds``, or until ``most`` images are sent.

    Returns the time of each result in seconds since ``start``, and the first image without one. A client that gets no
    result leaves, so that an overloaded pipe is not asked again at once. Waits for the last results until ``wait_s``
    after that time.
    """
    ends, failed, idle = list[float](), list[Failed](), SimpleQueue[bool]()

    def on_done(number: int, why: str) -> None:
        if why:
            failed.append((number, why))
        else:
            ends.append(perf_counter() - start)
        idle.put(not why)

    sleep(max(0.0, start - perf_counter()))
    for _ in range(clients):
        idle.put(True)
    sent = left = 0
    while sent < most and left < clients and (is_answered := _next(idle, start + seconds)) is not None:
        if is_answered:
            _send(run, images, sent, partial(on_done, sent))
            sent += 1
        else:
            left += 1
    until = start + seconds + wait_s
    while len(ends) + len(failed) < sent and _next(idle, until) is not None:
        pass
    return list(ends), min(failed, default=None)


def open_loop(
    run: pipe, images: Sequence[bytes], schedule: Sequence[tuple[int, float]], start: float, grace_s: float
) -> list[float]:
    """Send image ``number`` at ``start + due``, for each of ``schedule``; returns seconds since each was due.

    They are infinite without a result. A result counts until ``grace_s`` seconds after the last one was due.
    """
    latencies, done = [inf] * len(schedule), SimpleQueue[bool]()

    def on_done(index: int, why: str) -> None:
        if not why:
            latencies[index] = perf_counter() - start - schedule[index][1]
        done.put(True)

    for index, (number, due) in enumerate(schedule):
        sleep(max(0.0, start + due - perf_counter()))
        _send(run, images, number, partial(on_done, index))
    left, until = len(schedule), perf_counter() + grace_s
    while left and _next(done, until):
        left -= 1
    counted, until = list(latencies), until + WAIT_S
    while left and _next(done, until):
        left -= 1
    return counted


def _send(run: pipe, images: Sequence[bytes], number: int, on_done: Callable[[str], None]) -> None:
    """Send an image; ``on_done`` gets why it has no result, or an empty text."""

    def answer(data: Any, error: BaseException | None) -> None:
        if error is None and TASK_RESULT_KEY not in data:
            error = data.get(TASK_ERROR_KEY) or NoResult("no result")
        on_done("" if error is None else describe(error).split("\n", 1)[0])

    data = {TASK_DATA_KEY: images[number % len(images)]}
    try:
        run.dispatch(data, answer)
    except TorchpipeError as error:  # it was refused
        answer(data, error)


def _next(queue: SimpleQueue[bool], until: float) -> bool | None:
    """The next value, or None once it is ``until``."""
    try:
        return queue.get(timeout=max(0.0, until - perf_counter()))
    except Empty:
        return None
