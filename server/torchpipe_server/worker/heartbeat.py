"""A worker's signs of life, which no queue and no busy loop can delay: a thread writes them, the supervisor reads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from time import sleep
from typing import Any, NamedTuple

from torchpipe_server.front.journal import SharedMemory
from torchpipe_server.front.loop import Loop, call_from_any_thread

logger = logging.getLogger("torchpipe_server")

BEAT_SECONDS = 0.5


class Signs(NamedTuple):
    """What a worker has told last.

    ``beats``: how often it has told anything. ``loop_s``: seconds for which its I/O loop has been at one thing, in
    steps of ``BEAT_SECONDS``. ``batch_s``: seconds that the oldest batch runs. ``dead``: instances whose thread ended.
    """

    beats: float
    loop_s: float
    batch_s: float
    dead: float


_UNLINKED = len(Signs._fields)  # the place of the number after them


class Heartbeat:
    """Shared memory for the signs: the worker that is started with it writes, the supervisor reads."""

    def __init__(self) -> None:
        self._memory = SharedMemory("torchpipe-heartbeat", 8 * (_UNLINKED + 1))

    def read(self) -> Signs:
        """What was told last; all zero before."""
        return Signs(*self._memory.view.cast("d")[:_UNLINKED])

    def write(self, signs: Signs) -> None:
        """Tell."""
        # NOTE: a number at a time, each of them whole: the supervisor may look in between.
        view = self._memory.view.cast("d")
        for index in reversed(range(_UNLINKED)):
            view[index] = signs[index]

    @property
    def is_linked(self) -> bool:
        """Whether the worker has a link to its engine process, or needs none as far as it has told."""
        return not self._memory.view.cast("d")[_UNLINKED]

    def tell_linked(self, is_linked: bool) -> None:
        """Tell that, from any thread and before the first beat."""
        self._memory.view.cast("d")[_UNLINKED] = not is_linked

    def close(self) -> None:
        """No process is started with it any more; what is written there stays."""
        self._memory.close()


class Heart:
    """A thread of a worker that tells ``BEAT_SECONDS`` after ``BEAT_SECONDS`` how its loop and its pipe are.

    ``stats`` are the pipe's. It runs as long as the process does, and beside whatever keeps the loop's thread busy.
    """

    def __init__(self, heartbeat: Heartbeat, loop: Loop, stats: Callable[[], dict[str, Any]]) -> None:
        self._heartbeat, self._loop, self._stats = heartbeat, loop, stats
        self._beats = self._idle_beats = 0
        self._has_turned = True  # whether the loop has gone round since the last beat

    def start(self) -> None:
        """Beat from now on, the first time before this returns."""
        self.beat()
        threading.Thread(target=self._run, name="torchpipe-heart", daemon=True).start()

    def beat(self) -> None:
        """Tell how things are now."""
        # NOTE: beats are counted, not seconds: a process that was stopped must not find its loop stuck.
        if self._has_turned:
            self._idle_beats, self._has_turned = 0, False
            call_from_any_thread(self._loop, setattr, self, "_has_turned", True)
        else:
            self._idle_beats += 1
        self._beats += 1
        nodes = self._stats()["nodes"].values()
        oldest = max((node["oldest_batch_s"] for node in nodes), default=0.0)
        dead = sum(node["instances"] - node["alive"] for node in nodes)
        self._heartbeat.write(Signs(self._beats, self._idle_beats * BEAT_SECONDS, oldest, dead))

    def _run(self) -> None:
        while True:
            sleep(BEAT_SECONDS)
            try:
                self.beat()
            except Exception:
                logger.exception("a heartbeat is missed")
