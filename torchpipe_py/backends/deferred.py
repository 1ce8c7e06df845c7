"""Backends whose work continues elsewhere: they start it, and are called back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchpipe_py.backends.base import Backend, Data


class DeferredBackend(Backend):
    """A backend whose work continues elsewhere, and which does not block a thread meanwhile."""

    def start(self, item: Data, done: Callable[[BaseException | None], None], request: Any) -> None:
        """Start ``item``; ``done(error)`` must be called once, from any thread, when its dict holds the outcome.

        An exception instead of that is a defect, as in ``forward``. ``request`` is the pipe's request.
        """
        raise NotImplementedError(type(self).__name__)


Ran = tuple[int, float, float]
"""The instance that ran an item elsewhere, and its start and end in ``perf_counter`` seconds."""


HandedOver = Callable[..., None]
"""``done(error, ran)`` for an item that was handed over: its error or ``None``, and a ``Ran`` if known."""


class HandOverBackend(Backend):
    """A backend whose work continues elsewhere: ``start`` takes microseconds and may run on several threads at once.

    The first instance's ``start`` is called for all of them.
    """

    runs_nodes = False
    """The other process runs nodes: an error passed to ``done`` is the request's error, unchanged."""

    def start(self, item: Data, done: HandedOver, request: Any) -> None:
        """Start ``item``, as ``DeferredBackend.start``; ``done`` may also get a ``Ran``."""
        raise NotImplementedError(type(self).__name__)

    def keep(self) -> None:
        """Called on the instance's thread when items may come; must not return before ``stop``."""

    def stop(self) -> None:
        """Fail items that have not begun, and all later ones, with ``PipeClosed``; ``close`` waits for the rest."""

    def expected_wait(self) -> float:
        """Expected seconds of an item that is started now, from recent ones; 0 if unknown."""
        return 0.0
