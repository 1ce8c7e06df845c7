"""Backends that tests steer from the same process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from types import TracebackType
from typing import Any

from kit.waits import WAIT
from torchpipe_py import Backend, ItemBackend, pipe


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
        self.entered = threading.Semaphore(0)

        class Gated(Backend):
            """Result is data, once the gate is open."""

            def forward(self, items: list[dict[str, Any]]) -> None:
                gate.batches.append([item["data"] for item in items])
                if any(blocks(item["data"]) for item in items):
                    gate.entered.release()
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
            assert self.entered.acquire(timeout=WAIT)

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


class Echo(ItemBackend):
    """Result is data, unless that is an exception, which it raises."""

    def forward_item(self, item: dict[str, Any]) -> None:
        if isinstance(item["data"], BaseException):
            raise item["data"]
        item["result"] = item["data"]


class EchoFour(Echo):
    """The same, four at once."""

    def max(self) -> int:
        return 4


class Company:
    """Two nodes: ``first`` holds back what is ``slow``; ``second`` takes four at once and waits a minute for more."""

    def __init__(self, register: Callable[[type], str]) -> None:
        self.gate, self._second = Gate(blocks=lambda data: data == "slow"), Gate(most=4, blocks=lambda data: False)
        self.nodes: dict[str, Any] = {
            "first": {"backend": register(self.gate.backend), "instance_num": 2, "next": "second"},
            "second": {"backend": register(self._second.backend), "batching_timeout": 60_000},
        }

    def meet(self, p: pipe) -> None:
        """A slow and a quick request end as one batch of ``second``, whose leader has waited for the slow one."""
        with self.gate:
            slow = self.gate.hold(p, {"data": "slow"})
            self._second.arrived.clear()
            quick = p.submit({"data": "quick"})
            assert self._second.arrived.wait(WAIT)
            self.gate.open()
            for future in (slow, quick):
                future.result(WAIT)


def returns(value: Any) -> type[Backend]:
    """A backend that always has this result."""

    class Returns(Backend):
        def forward(self, items: list[dict[str, Any]]) -> None:
            for item in items:
                item["result"] = value

    return Returns
