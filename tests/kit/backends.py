"""Backends that tests steer from the same process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from types import TracebackType
from typing import Any

from kit.waits import WAIT
from torchpipe_py import Backend, pipe


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


def returns(value: Any) -> type[Backend]:
    """A backend that always has this result."""

    class Returns(Backend):
        def forward(self, items: list[dict[str, Any]]) -> None:
            for item in items:
                item["result"] = value

    return Returns
