"""Backends whose work goes on elsewhere: they start it, and are called back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchpipe_py.backends.base import Backend, Data


class DeferredBackend(Backend):
    """A backend whose work goes on elsewhere, and that waits for it without holding a thread."""

    def start(self, item: Data, done: Callable[[BaseException | None], None], request: Any) -> None:
        """Start on ``item``; ``done(error)`` is called once, from any thread, when its outcome is in it.

        An exception instead of that is a defect, as in ``forward``. ``request`` stands for the pipe's request.
        """
        raise NotImplementedError(type(self).__name__)


Ran = tuple[int, float, float]
"""Which instance ran an item elsewhere, and from when to when, ``perf_counter`` seconds."""


HandedOver = Callable[..., None]
"""``done(error, ran)`` of an item that was handed over: its error or ``None``, and a ``Ran`` where that is known."""


class HandOverBackend(DeferredBackend):
    """A deferred backend whose ``start`` takes microseconds and may run on any thread, several at once.

    The first instance's ``start`` is called for all of them.
    """

    runs_nodes = False
    """What is at the other end runs nodes: an error that ``done`` gets is the request's as it is."""

    def start(self, item: Data, done: HandedOver, request: Any) -> None:
        raise NotImplementedError(type(self).__name__)

    def keep(self) -> None:
        """Called on the instance's thread when items may come; may return after ``stop`` only."""

    def stop(self) -> None:
        """End what has not begun with ``PipeClosed``, as what comes from now on; ``close`` waits for the rest."""

    def expected_wait(self) -> float:
        """How long an item that is started now will take, by how long the last ones took, seconds; 0 is unknown."""
        return 0.0
