"""Loops on a pipe in this process: what is sent, counted and waited for. No test depends on how fast the machine is."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from time import perf_counter
from typing import Any

import pytest
from kit.waits import WAIT, eventually

from torchpipe_py import ItemBackend, pipe, register_backend
from torchpipe_py.tools.load.in_process import closed_loop, open_loop

GATE = threading.Event()


@register_backend
class GatedInLoops(ItemBackend):
    """Waits for the gate with ``b"wait"``, and has no result for ``b"fail"``."""

    def forward_item(self, item: dict[str, Any]) -> None:
        if item["data"] == b"wait":
            GATE.wait(WAIT)
        if item["data"] == b"fail":
            raise ValueError("no result for this")
        item["result"] = item["data"]


def open_after(run: pipe, count: int) -> None:
    """Open the gate once so many requests were sent."""
    eventually(lambda: run.stats()["admitted"] >= count)
    GATE.set()


@pytest.fixture
def run() -> Iterator[pipe]:
    GATE.clear()
    with ExitStack() as stack:
        run = stack.enter_context(pipe({"backend": "GatedInLoops", "instance_num": 2}))
        stack.callback(GATE.set)  # before the pipe closes, which waits for its backend
        yield run


def test_each_image_is_sent_once_with_a_limit(run: pipe) -> None:
    ends, failed = closed_loop(run, [b"a", b"b", b"c"], 1, WAIT, perf_counter(), most=3)
    assert (len(ends), failed) == (3, None)
    assert ends == sorted(ends)


def test_first_failed_image_is_reported(run: pipe) -> None:
    ends, failed = closed_loop(run, [b"a", b"fail", b"c"], 3, WAIT, perf_counter(), most=3)
    assert len(ends) == 2
    assert failed is not None
    assert failed[0] == 1
    assert "ValueError: no result for this" in failed[1]


def test_client_without_a_result_leaves(run: pipe) -> None:
    """With the last client the loop ends, long before its time."""
    ends, failed = closed_loop(run, [b"fail"], 2, 10 * WAIT, perf_counter())
    assert (ends, failed and failed[0]) == ([], 0)
    assert run.stats()["nodes"]["node"]["requests"] == 2


def test_closed_loop_waits_for_its_last_results(run: pipe) -> None:
    opener = threading.Thread(target=open_after, args=(run, 2))
    opener.start()
    ends, failed = closed_loop(run, [b"wait"], 2, 0.0, perf_counter(), most=2)
    opener.join()
    assert (len(ends), failed) == (2, None)


def test_closed_loop_gives_up_waiting(run: pipe) -> None:
    assert closed_loop(run, [b"wait"], 2, 0.01, perf_counter(), wait_s=0.0) == ([], None)


def test_refused_request_is_a_failure() -> None:
    with pipe({"backend": "GatedInLoops"}) as run:
        pass
    ends, failed = closed_loop(run, [b"a"], 2, WAIT, perf_counter())
    assert ends == []
    assert failed is not None
    assert "closed" in failed[1]
    assert open_loop(run, [b"a"], [(0, 0.0)], perf_counter(), 0.0) == [math.inf]


def test_open_loop_counts_from_when_requests_were_due(run: pipe) -> None:
    late_s = 5.0
    latencies = open_loop(run, [b"a", b"fail"], [(0, 0.0), (1, 0.0), (2, 0.0)], perf_counter() - late_s, WAIT)
    assert min(latencies[0], latencies[2]) >= late_s
    assert latencies[1] == math.inf


def test_open_loop_counts_no_result_after_its_grace(run: pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchpipe_py.tools.load.in_process.WAIT_S", 0.0)
    assert open_loop(run, [b"wait"], [(0, 0.0)], perf_counter(), 0.0) == [math.inf]


def test_open_loop_waits_within_its_grace(run: pipe) -> None:
    opener = threading.Thread(target=open_after, args=(run, 2))
    opener.start()
    latencies = open_loop(run, [b"wait"], [(0, 0.0), (1, 0.0)], perf_counter(), WAIT)
    opener.join()
    assert all(map(math.isfinite, latencies))
