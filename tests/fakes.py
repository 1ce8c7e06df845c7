"""Backends that tests steer, and waits that fail instead of hanging."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import psutil
import pytest
import torch

from torchpipe_py import Backend, pipe
from torchpipe_py.backends import cuda
from torchpipe_py.backends.model.cuda_model import CudaModel
from torchpipe_py.runtime.hand_over import HandOverNode

WAIT = 60.0
"""Seconds after which something that must happen counts as not happening."""

PROGRAM_WAIT = 4 * WAIT
"""The same for a whole program: a busy machine may take a minute to import PyTorch alone."""


class Gate:
    """A backend that blocks in ``forward`` until the gate opens; ``batches`` holds the data of each call.

    Leaving ``with gate`` opens it, so that a failing test does not hang in ``close``.
    """

    def __init__(self, most: int = 1, blocks: Callable[[Any], bool] = lambda data: True) -> None:
        gate = self
        self.batches: list[list[Any]] = []
        self.opened = threading.Event()
        self.arrived = threading.Event()
        """Set when a leader has taken a request for its batch."""
        self._entered = threading.Semaphore(0)

        class Gated(Backend):
            """Result is data, once the gate is open."""

            def forward(self, items: list[dict[str, Any]]) -> None:
                gate.batches.append([item["data"] for item in items])
                if any(blocks(item["data"]) for item in items):
                    gate._entered.release()
                    assert gate.opened.wait(WAIT)
                for item in items:
                    item["result"] = item["data"]

            def batch_key(self, item: dict[str, Any]) -> Hashable:
                gate.arrived.set()
                return super().batch_key(item)

            def max(self) -> int:
                return most

        self.backend = Gated

    def wait_entered(self, count: int = 1) -> None:
        """Wait until ``count`` further calls block."""
        for _ in range(count):
            assert self._entered.acquire(timeout=WAIT)

    def hold(self, p: pipe, data: dict[str, Any]) -> Future[Any]:
        """Submit a request that blocks here, and wait until it does."""
        future = p.submit(data)
        self.wait_entered()
        return future

    def open(self) -> None:
        self.opened.set()

    def __enter__(self) -> Gate:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.open()


def outcome(future: Future[Any]) -> Any:
    """The future's result; its error raised."""
    return future.result(WAIT)


def error_of(future: Future[Any]) -> BaseException | None:
    return future.exception(WAIT)


def eventually(is_true: Callable[[], object], what: str = "it does not come true", seconds: float = WAIT) -> None:
    """Wait until `is_true()`, for a bounded time."""
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def idle_count(node: Any) -> int:
    """How many instances of a node of a pipe are idle."""
    if isinstance(node, HandOverNode):
        return len(node.instances) - node.busy()
    return len(node.idle.to_wake) + len(getattr(node.idle, "_followers", ()))


def all_idle(p: pipe) -> pipe:
    """The pipe, once nothing is in flight and all its instances are idle."""
    nodes = p._runtime.nodes.values()
    eventually(
        lambda: not p.stats()["inflight"] and all(idle_count(node) == len(node.instances) for node in nodes), str(p)
    )
    return p


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


class FakeStream:
    """Stands in for a ``torch.cuda.Stream``."""

    cuda_stream = 0

    def query(self) -> bool:
        return False

    def synchronize(self) -> None: ...


class FakeGuard:
    """Stands in for a ``StreamGuard``; its device is the CPU."""

    is_cuda = True
    device = torch.device("cpu")
    stream = FakeStream()

    def __init__(self, config: Any) -> None: ...

    @contextmanager
    def active(self) -> Iterator[None]:
        yield

    def synchronize(self, batch: int = 1) -> None: ...

    def run(self, forward: Callable[[list[Any]], None], items: list[Any]) -> None:
        forward(items)

    def close(self) -> None: ...


def cpu_as_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets backends that need a GPU run on the CPU, without CUDA graphs: their logic on the host can be tested."""
    empty = torch.empty
    monkeypatch.setattr(cuda, "StreamGuard", FakeGuard)
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory=False, **more: empty(*args, **more))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: FakeStream())
    monkeypatch.setattr(CudaModel, "use_graphs", False)
