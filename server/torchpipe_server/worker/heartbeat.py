"""A worker's heartbeat: a thread writes to shared memory, which the supervisor reads, however busy the loop is."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from time import sleep
from typing import Any, NamedTuple

from torchpipe_py.serving import call_from_any_thread
from torchpipe_server.front.journal import SharedMemory
from torchpipe_server.front.loop import Loop

logger = logging.getLogger("torchpipe_server")

BEAT_SECONDS = 0.5


class Signs(NamedTuple):
    """The contents of a heartbeat.

    ``beats``: the number of heartbeats so far. ``loop_s``: seconds since its I/O loop last made a round, in steps of
    ``BEAT_SECONDS``. ``batch_s``: seconds that the oldest batch has run. ``dead``: instances whose thread has ended.
    """

    beats: float
    loop_s: float
    batch_s: float
    dead: float


_UNLINKED = len(Signs._fields)  # the index of the number after these


class Heartbeat:
    """Shared memory for ``Signs``: the worker that is started with it writes, the supervisor reads."""

    def __init__(self) -> None:
        self._memory = SharedMemory("torchpipe-heartbeat", 8 * (_UNLINKED + 1))

    def read(self) -> Signs:
        """The last signs; all zero before the first."""
        return Signs(*self._memory.view.cast("d")[:_UNLINKED])

    def write(self, signs: Signs) -> None:
        """Write the signs; each number is written atomically, and the supervisor may read in between."""
        view = self._memory.view.cast("d")
        for index in reversed(range(_UNLINKED)):
            view[index] = signs[index]

    @property
    def is_linked(self) -> bool:
        """Whether the worker has a link to its engine process or needs none."""
        return not self._memory.view.cast("d")[_UNLINKED]

    def set_linked(self, is_linked: bool) -> None:
        """Report whether there is a link; for any thread, also before the first heartbeat."""
        self._memory.view.cast("d")[_UNLINKED] = not is_linked

    def close(self) -> None:
        """Close it for new processes; its content remains."""
        self._memory.close()


class HeartbeatThread:
    """A thread that reports every ``BEAT_SECONDS`` on the worker's loop and its pipe, until the process ends.

    ``stats`` returns the statistics of the pipe.
    """

    def __init__(self, heartbeat: Heartbeat, loop: Loop, stats: Callable[[], dict[str, Any]]) -> None:
        self._heartbeat, self._loop, self._stats = heartbeat, loop, stats
        self._beats = self._idle_beats = 0
        self._has_turned = True  # whether the loop made a round since the last heartbeat

    def start(self) -> None:
        """Write the first heartbeat, then start the thread."""
        self.beat()
        threading.Thread(target=self._run, name="torchpipe-heart", daemon=True).start()

    def beat(self) -> None:
        """Write a heartbeat."""
        # NOTE: count heartbeats, not seconds: after a stop of the process, its loop is not stuck.
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
                logger.exception("missed a heartbeat")
