"""Waits that fail instead of hanging."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import psutil

from kit.inside import runtime_of
from torchpipe_py import pipe

WAIT = 60.0
"""Seconds after which something that must happen counts as not happening."""

PROGRAM_WAIT = 4 * WAIT
"""The same for a whole program: a busy machine may take a minute to import PyTorch alone."""


def outcome(future: Future[Any]) -> Any:
    """The future's result; its error raised."""
    return future.result(WAIT)


def error_of(future: Future[Any]) -> BaseException | None:
    return future.exception(WAIT)


def run(*command: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """A program, for as long as ``PROGRAM_WAIT`` at most: its exit status and what it printed."""
    arguments = [*map(str, command)]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=PROGRAM_WAIT, check=False, **options)


def eventually(is_true: Callable[[], object], what: str = "it does not come true", seconds: float = WAIT) -> None:
    """Wait until `is_true()`, for a bounded time."""
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def wait_queued(p: pipe, count: int) -> None:
    """Wait until ``count`` requests are queued in the pipe: a request that the main thread starts may arrive later."""
    eventually(lambda: sum(node["queued"] for node in p.stats()["nodes"].values()) == count)


def is_alive(process: psutil.Process) -> bool:
    """Whether it still runs: where nobody waits for orphans, one that has ended stays as a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def in_threads(count: int, work: Callable[[int], object]) -> None:
    """Run ``work(index)`` in ``count`` threads at once, and raise the first error."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(count)

    def run(index: int) -> None:
        try:
            barrier.wait(WAIT)
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4 * WAIT)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


def all_idle(p: pipe) -> pipe:
    """The pipe, once nothing is in flight and all its instances are idle."""
    nodes = runtime_of(p).nodes.values()
    eventually(lambda: not p.stats()["inflight"] and all(node.is_idle() for node in nodes), str(p))
    return p
