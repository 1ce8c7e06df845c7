"""Loads or unloads one model of a folder in all serving workers: in all, or in none."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable, Iterable
from enum import Enum, auto
from itertools import count

from torchpipe_py.serving import Folder
from torchpipe_server.supervisor.child import Child
from torchpipe_server.supervisor.messages import Committed, Prepared

_numbers = count(1)


class ChangeState(Enum):
    """The state of a change::

    PREPARING ── all prepared ──► COMMITTING ── all committed ──► OVER
        └──────── a worker cannot, or ended; cancel ────────────────┘
    """

    PREPARING = auto()  # workers set the model up; requests do not notice
    COMMITTING = auto()  # workers begin to serve it, or no longer do
    OVER = auto()


class ModelChange:
    """Serve model ``name`` as it is in ``folder``, or no longer if it is not there.

    Workers that are not among ``children`` start with ``folder``. ``on_end(problem)`` is called once, with "" if they
    all serve it.
    """

    def __init__(self, folder: Folder, name: str, children: Iterable[Child], on_end: Callable[[str], object]) -> None:
        self.folder, self._on_end = folder, on_end
        self._number = next(_numbers)  # a worker may still answer a change that was given up
        self._children = set(children)
        self._waiting = set(self._children)
        self._graph = ""
        self._state = ChangeState.PREPARING
        pickled = base64.b64encode(pickle.dumps(folder)).decode()
        for child in self._children:
            child.ask_change("prepare", self._number, name=name, folder=pickled)

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
            return
        for each in self._children:
            each.graph = self._graph
        self._end("")

    def expire(self, seconds: float) -> None:
        """Change nothing if a worker has not set the model up by now, after ``seconds``."""
        if self._state is ChangeState.PREPARING:
            self.cancel(f"it is not set up after {seconds:g} s (--start-seconds)")

    def cancel(self, problem: str) -> None:
        """Change nothing, because of ``problem``."""
        if self._state is not ChangeState.OVER:
            for child in self._children:
                child.send("abort")
            self._end(problem)

    def _end(self, problem: str) -> None:
        self._state = ChangeState.OVER
        self._on_end(problem)
