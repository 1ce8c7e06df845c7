"""Processes that answer calls of their parent, all at once, and end with it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from multiprocessing.connection import Connection
from signal import SIG_IGN, SIGINT, signal
from typing import Any

from torchpipe_py.errors import TorchpipeError, WorkerDied, describe
from torchpipe_py.proc.child import ChildProcess, describe_ending
from torchpipe_py.proc.confine import end_with_parent
from torchpipe_py.tools.report import ToolError

Call = tuple[int, str, Sequence[Any]]
"""The number of a process, a method's name, and its arguments."""


class TeamDied(TorchpipeError):
    """A process ended, and its answers with it, or it hangs."""


class Team:
    """``count`` processes that run ``module.main``, seen from the parent.

    Raises ``ToolError`` if a call fails, ``TeamDied`` if a process dies or does not answer within the call's seconds.
    """

    def __init__(self, module: str, count: int) -> None:
        self._children: list[ChildProcess] = []
        try:
            for _ in range(count):
                self._children.append(ChildProcess.spawn("a process of the tuner", module, leads_session=True))
        except BaseException:
            self.close()
            raise
        self.pids = [child.pid for child in self._children]

    def call(self, calls: Sequence[Call], seconds: float) -> list[Any]:
        """Send all calls, at most one to each process, and return their answers in order."""
        for place, name, arguments in calls:
            try:
                self._children[place].send((name, arguments))
            except WorkerDied:
                raise _died(self._children[place]) from None
        answers = [self._answer(place, name, seconds) for place, name, _ in calls]
        for is_done, value in answers:
            if not is_done:
                raise ToolError(value)
        return [value for _, value in answers]

    def close(self) -> None:
        """End the processes, with what their backends have started."""
        for child in self._children:
            child.kill()
        for child in self._children:
            child.end()

    def _answer(self, place: int, name: str, seconds: float) -> Any:
        child = self._children[place]
        try:
            return child.receive(seconds)
        except WorkerDied:
            raise _died(child) from None
        except TimeoutError:
            what = f"has not answered for {seconds:g} s ({name}): does a backend hang?"
            raise TeamDied(f"{child.name} {what}") from None


def _died(child: ChildProcess) -> TeamDied:
    why = describe_ending(child.exit_status() if child.has_ended() else None)
    return TeamDied(f"{child.name} died ({why}); is there enough memory?")


def answer_calls(state: object, descriptor: int, parent: int) -> None:
    """Run in a process of a team: call methods of ``state`` until the parent is gone."""
    end_with_parent(parent)  # also within a call, which may take long
    signal(SIGINT, SIG_IGN)  # the parent ends it
    channel = Connection(descriptor)
    while True:
        try:
            name, arguments = channel.recv()
        except (EOFError, OSError):
            os._exit(0)  # threads of backends may never end
        try:
            answer = True, getattr(state, name)(*arguments)
        except BaseException as error:
            text = str(error) if isinstance(error, TorchpipeError) else describe(error)
            answer = False, text.split("\n", 1)[0]
        channel.send(answer)
