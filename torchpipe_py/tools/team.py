"""Processes that answer calls of their parent, all at once, and end with it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from signal import SIG_IGN, SIGINT, SIGKILL, signal
from socket import socketpair
from subprocess import TimeoutExpired
from typing import Any

from torchpipe_py.errors import TorchpipeError, describe
from torchpipe_py.proc.child import describe_ending, start_interpreter
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
        self._processes, self._channels = [], []
        try:
            for _ in range(count):
                ours, theirs = socketpair()
                with theirs:
                    process = start_interpreter(module, [theirs.fileno()], os.getpid(), start_new_session=True)
                self._processes.append(process)
                self._channels.append(Connection(ours.detach()))
        except BaseException:
            self.close()
            raise
        self.pids = [process.pid for process in self._processes]

    def call(self, calls: Sequence[Call], seconds: float) -> list[Any]:
        """Send all calls, at most one to each process, and return their answers in order."""
        for place, name, arguments in calls:
            try:
                self._channels[place].send((name, arguments))
            except OSError:
                raise self._died(place) from None
        answers = [self._answer(place, name, seconds) for place, name, _ in calls]
        for is_done, value in answers:
            if not is_done:
                raise ToolError(value)
        return [value for _, value in answers]

    def close(self) -> None:
        """End the processes, with what their backends have started."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, SIGKILL)
        for process in self._processes:
            process.wait()
        for channel in self._channels:
            channel.close()

    def _answer(self, place: int, name: str, seconds: float) -> Any:
        try:
            if self._channels[place].poll(seconds):
                return self._channels[place].recv()
        except (EOFError, OSError):
            raise self._died(place) from None
        raise TeamDied(f"a process of the tuner has not answered for {seconds:g} s ({name}): does a backend hang?")

    def _died(self, place: int) -> TeamDied:
        with suppress(TimeoutExpired):
            self._processes[place].wait(1.0)
        why = describe_ending(self._processes[place].returncode)
        return TeamDied(f"a process of the tuner died ({why}); is there enough memory?")


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
