"""One call's state on its way through a pipe."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter
from typing import Any


class Request:
    """One dict that travels; a pipe completes it exactly once, from whichever thread finishes it.

    ``data`` is the dict that backends see. ``caller_data`` is set where that is a private copy, so that a request
    given up at its deadline cannot change the caller's dict later; ``merge`` hands the outcome over.
    ``deadline`` and ``arrived`` (the entry into the current node's queue) are ``time.perf_counter`` seconds.
    ``on_done`` is called once, without arguments, when ``error`` and the dict are final.

    ``at`` is the logical node it is at where several share their instances, ``trip`` its way through a graph with
    branches, ``inner`` the requests that it waits for (a jump's), ``is_inner`` whether it is one of those, and
    ``origin`` whose. ``number`` is that of its trace.
    ``ride`` is set while it is on the thread of its blocked caller.
    """

    __slots__ = (
        "arrived",
        "at",
        "caller_data",
        "data",
        "deadline",
        "done",
        "error",
        "inner",
        "is_inner",
        "number",
        "on_done",
        "origin",
        "ride",
        "trip",
    )

    def __init__(self, data: dict[str, Any], on_done: Callable[[], object], deadline: float | None = None) -> None:
        self.data = data
        self.on_done = on_done
        self.deadline = deadline
        self.caller_data: dict[str, Any] | None = None
        self.error: BaseException | None = None
        self.done = False
        self.arrived = 0.0
        self.at = ""
        self.trip: Any = None
        self.inner: list[Request] | None = None
        self.is_inner = False
        self.origin: Request | None = None
        self.number = 0
        self.ride: Ride | None = None
        if deadline is not None:
            self.caller_data, self.data = data, dict(data)

    def merge(self) -> None:
        """Make the caller's dict equal to the private copy, where there is one."""
        if self.caller_data is not None:
            for key in self.caller_data.keys() - self.data.keys():
                del self.caller_data[key]
            self.caller_data.update(self.data)


class Ride:
    """The thread of a blocked caller, which itself brings its request from node to node as far as backends allow.

    ``stops`` holds the nodes that it has reached, with the request or the branch of it that is there; the node's
    ``carry`` takes that on.
    """

    __slots__ = ("stops",)

    def __init__(self) -> None:
        self.stops: list[tuple[Any, Request]] = []

    def go(self) -> None:
        """On until other threads have taken over, or the request is through."""
        try:
            while self.stops:
                node, request = self.stops.pop()
                node.carry(request)
        finally:
            for node, request in self.stops:  # after Ctrl-C
                node.forget(request)


class Countdown:
    """Calls ``on_done`` when it was called ``count`` times."""

    def __init__(self, count: int, on_done: Callable[[], object]) -> None:
        self._left, self._on_done, self._lock = count, on_done, threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left:
                return
        self._on_done()


def nothing() -> None:
    """The callback of a request that nobody waits for, or not any more."""


def deadline_after(timeout: float | None) -> float | None:
    """The deadline ``timeout`` seconds from now; ``None`` stays ``None``."""
    return None if timeout is None else perf_counter() + timeout
