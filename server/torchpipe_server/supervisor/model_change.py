"""Loads or unloads one model of a folder in all serving workers: in all, or in none."""

from __future__ import annotations

import base64
import pickle
from asyncio import TimerHandle
from collections.abc import Callable, Iterable
from enum import Enum, auto
from itertools import count

from torchpipe_py.serving import Folder
from torchpipe_server.front.loop import Loop
from torchpipe_server.supervisor.child import Child
from torchpipe_server.supervisor.messages import Committed, Prepared

COMMIT_SECONDS = 60.0  # time limit for workers to serve what they have set up, which takes them a moment

_numbers = count(1)


class ChangeState(Enum):
    """The state of a change::

    PREPARING ── all prepared ──► COMMITTING ── all committed ──► OVER
        │                             └── a worker cannot; cancel; too late ──► OVER, and workers may differ
        └── a worker cannot, or ended; cancel; too late ──► OVER, and nothing has changed
    """

    PREPARING = auto()  # workers set the model up; requests do not notice
    COMMITTING = auto()  # workers begin to serve it, or no longer do
    OVER = auto()


class ModelChange:
    """Serve model ``name`` as it is in ``folder``, or no longer if it is not there.

    The ``children`` have ``seconds`` to set it up, without a limit if 0; other workers start with ``folder``.
    ``on_end(problem, may_differ)`` is called once, with "" if all serve it. ``may_differ``: some workers may serve it
    and others not, so all have to be replaced.
    """

    def __init__(
        self, loop: Loop, folder: Folder, name: str, children: Iterable[Child],
        on_end: Callable[[str, bool], object], seconds: float,
    ) -> None:  # fmt: skip
        self._loop, self._on_end = loop, on_end
        self._number = next(_numbers)  # a worker may still answer a change that was given up
        self._children = set(children)
        self._waiting = set(self._children)
        self._graph = ""
        self._state = ChangeState.PREPARING
        self._limit: TimerHandle | None = None
        pickled = base64.b64encode(pickle.dumps(folder)).decode()
        for child in self._children:
            child.ask_change("prepare", self._number, name=name, folder=pickled)
        if seconds:
            self._limit_to(seconds, f"it is not set up after {seconds:g} s (--start-seconds)")

    def receive(self, child: Child, message: Prepared | Committed) -> None:
        """Take a worker's answer."""
        if message.change != self._number or self._state is ChangeState.OVER or child not in self._waiting:
            return
        if message.problem:
            self.cancel(message.problem)
            return
        if isinstance(message, Prepared):
            self._graph = message.graph
        self._answered(child)

    def lost(self, child: Child) -> None:
        """A process ended: if it was to change, no worker does, unless the others do already."""
        if child not in self._children or self._state is ChangeState.OVER:
            return
        self._children.discard(child)
        if self._state is ChangeState.PREPARING:
            self.cancel("a worker ended while it set the model up")
        else:
            self._answered(child)

    def _answered(self, child: Child) -> None:
        self._waiting.discard(child)
        if self._waiting:
            return
        if self._state is ChangeState.PREPARING and self._children:
            self._state, self._waiting = ChangeState.COMMITTING, set(self._children)
            for each in self._children:
                each.ask_change("commit", self._number)
            self._limit_to(COMMIT_SECONDS, f"a worker does not report within {COMMIT_SECONDS:g} s that it serves it")
            return
        for each in self._children:
            each.graph = self._graph
        self._end("", False)

    def _limit_to(self, seconds: float, problem: str) -> None:
        """Give the change up for ``problem`` after so long, in place of an earlier limit."""
        self._stop_limit()
        self._limit = self._loop.call_later(seconds, self.cancel, problem)

    def _stop_limit(self) -> None:
        if self._limit is not None:
            self._limit.cancel()

    def cancel(self, problem: str) -> None:
        """Change nothing, because of ``problem``; if workers have begun to serve the model, they may differ."""
        if self._state is not ChangeState.OVER:
            for child in self._children:
                child.send("abort")
            self._end(problem, self._state is ChangeState.COMMITTING)

    def _end(self, problem: str, may_differ: bool) -> None:
        self._state = ChangeState.OVER
        self._stop_limit()  # NOTE: it would keep the change for an hour
        self._on_end(problem, may_differ)
