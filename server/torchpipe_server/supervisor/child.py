"""One worker process as the supervisor sees it."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any, Literal, NamedTuple

from torchpipe_server.options import Options
from torchpipe_server.serving.journal import Journal
from torchpipe_server.serving.loop import READ, Loop
from torchpipe_server.worker.channel import Channel, Said
from torchpipe_server.worker.worker import Start, worker_main

logger = logging.getLogger("torchpipe_server")

KILLED_SECONDS = 0.05  # after which a killed process runs no code of ours, even if the system still cleans up behind it

State = Literal["starting", "ready", "draining", "gone"]


class Forked(NamedTuple):
    """A worker's process, and the supervisor's end of the channel to it."""

    process: Any
    sock: socket.socket


def fork_worker(index: int, options: Options, tables: Any, journal: Journal) -> Forked:
    """Start a worker. From any thread; blocks until the process that workers are forked from has imported all."""
    ours, theirs = socket.socketpair()
    context: Any = multiprocessing.get_context("forkserver")
    start = Start(index, options, tables, theirs, journal)
    process = context.Process(target=worker_main, args=(start,), name=f"torchpipe-worker-{index}")
    try:
        process.start()
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return Forked(process, ours)


class Child:
    """A worker that was forked. ``on_message(child, message)`` gets what it says, ``on_exit(child)`` its end.

    ``connections`` are the slots of those that it serves. ``failure`` is why it could not start, if it has said so.
    """

    def __init__(
        self,
        loop: Loop,
        index: int,
        forked: Forked,
        on_message: Callable[[Child, Said], object],
        on_exit: Callable[[Child], object],
    ) -> None:
        self.index = index
        self.state: State = "starting"
        self.connections: set[int] = set()
        self.failure = ""
        self.answered: bool | None = None  # whether it ended with every request answered, once it has
        self.stats: dict[str, Any] = {}
        self.graph = ""
        self.unheard = 0  # beats since it last said anything
        self.started_at = monotonic()
        self.ready_at = 0.0
        self._loop, self._on_message, self._on_exit = loop, on_message, on_exit
        self._gone_at = 0.0
        self.is_dismissed = False  # ended on purpose, before it had anything to answer
        self.process = forked.process
        self.pid: int = self.process.pid
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            self._pidfd = -1  # dead already; the channel's end tells
        self._channel = Channel(loop, forked.sock, self._hear, self._channel_ended)
        if self._pidfd >= 0:
            # NOTE: a process that it has started may hold the channel open beyond its end.
            loop.watch(self._pidfd, READ, self._process_ended)

    @property
    def is_ready(self) -> bool:
        """Whether it takes connections."""
        return self.state == "ready"

    @property
    def is_gone(self) -> bool:
        """Whether its process has ended."""
        return self.state == "gone"

    def give(self, sock: socket.socket, slot: int, is_refused: bool) -> None:
        """Let it serve the connection."""
        self.connections.add(slot)
        self._channel.send({"type": "connection", "slot": slot, "refused": is_refused}, sock.fileno())

    def ask_stats(self) -> None:
        """It answers with a message of that type."""
        self._channel.send({"type": "stats"})

    def shed(self, count: int) -> None:
        """Have it give back so many connections."""
        self._channel.send({"type": "shed", "count": count})

    def release(self) -> None:
        """Have it give back all connections, and end."""
        self._end("release")

    def drain(self) -> None:
        """Have it answer what was accepted, and end; at once, where it has not begun to serve."""
        if self.state == "starting":
            self.dismiss()
        else:
            self._end("drain")

    def dismiss(self) -> None:
        """End it now, since it is not needed."""
        self.is_dismissed = True
        self.kill()

    def kill(self) -> None:
        """End it now."""
        if self.is_gone:
            return
        try:
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def close(self) -> None:
        """End it now, and forget it."""
        self.kill()
        self._channel.close()
        if self._pidfd >= 0 and not self.is_gone:
            self._loop.watch(self._pidfd, 0, self._process_ended)
            os.close(self._pidfd)
        self.state = "gone"

    def rss_bytes(self) -> int:
        """Memory that is resident, what it shares with others included."""
        try:
            with open(f"/proc/{self.pid}/statm", encoding="ascii") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
        except (OSError, IndexError, ValueError):
            return 0

    def _end(self, how: str) -> None:
        if not self.is_gone:
            self.state = "draining"
            self._channel.send({"type": how})

    def _hear(self, message: Said, descriptor: int) -> None:
        self.unheard = 0
        kind = message["type"]
        if kind == "ready":
            self.state, self.ready_at, self.graph = "ready", monotonic(), message["graph"]
        elif kind == "failed":
            self.failure = message["message"]
        elif kind == "end":
            self.answered = message["answered"]
        elif kind == "stats":
            self.stats = message["stats"]
        try:
            self._on_message(self, message)
        except Exception:
            logger.exception("worker %d: a defect; killing it", self.index)
            self.kill()

    def _channel_ended(self) -> None:
        """All it has said is heard. What it held may be looked at as soon as it is certain that it runs no more."""
        self.kill()
        if self._pidfd < 0:
            self._loop.call(self._exited)
            return
        self._gone_at = monotonic() + KILLED_SECONDS
        self._loop.steps.append(self._step)

    def _process_ended(self, events: int) -> None:
        self._channel.hear_out()
        self._exited()

    def _step(self) -> float:
        left = self._gone_at - monotonic()
        if left <= 0:
            self._exited()
        return left

    def _exited(self) -> None:
        if self.is_gone:
            return
        self.state = "gone"
        if self._pidfd >= 0:
            self._loop.watch(self._pidfd, 0, self._process_ended)
            os.close(self._pidfd)
        if self._step in self._loop.steps:
            self._loop.call(partial(self._loop.steps.remove, self._step))
        self._on_exit(self)
