"""One worker or engine process as the supervisor sees it."""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Callable
from math import inf
from time import monotonic
from typing import Any, Literal

from torchpipe_server.front.loop import Loop
from torchpipe_server.supervisor.children.forker import Forked
from torchpipe_server.supervisor.messages import UnexpectedMessageError, check_message
from torchpipe_server.supervisor.stderr import WorkerStderr
from torchpipe_server.worker.channel import Channel, Said

logger = logging.getLogger("torchpipe_server")

KILLED_SECONDS = 0.05  # after which a killed process runs no code of ours, even if the system still cleans up behind it

LOOK_SECONDS = 1.0  # between two looks at a worker's signs of life
SHORTEST_HANG_SECONDS = 1.0  # what is told once in BEAT_SECONDS cannot be judged sooner
RESPONDS_SECONDS = 3.0  # without progress, after which a worker counts as one that answers nobody

State = Literal["starting", "ready", "draining", "gone"]
Reason = Literal["died", "silent", "stuck", "hung_batch", "dead_instance", "misbehaved"]
"""Why a worker ended, or is to be ended: by itself or by somebody else; no sign of life; its I/O loop at one thing for
too long; a batch that runs for too long; an instance whose thread has ended; a message that no worker sends."""


class Child:
    """A worker or engine process that was forked; ``name`` is what the log calls it.

    ``on_message(child, message)`` gets what it says, ``on_exit(child)`` its end.
    ``connections`` are the slots, in the journal, of those that it serves. ``failure`` is why it could not start, if it
    has said so. ``reason`` is why it ended. What it says is not believed before it is checked: it has read bytes from
    clients.
    """

    def __init__(
        self,
        loop: Loop,
        name: str,
        forked: Forked,
        on_message: Callable[[Child, Said], object],
        on_exit: Callable[[Child], object],
    ) -> None:
        self.name = name
        self.state: State = "starting"
        self.connections: set[int] = set()
        self.clients: set[Child] = set()  # of an engine process: the workers that it serves
        self.failure = ""
        self.answered: bool | None = None  # whether it ended with every request answered, once it has
        self.stats: dict[str, Any] = {}
        self.graph = ""
        self.reason: Reason = "died"
        self.has_served = False  # whether it was given a connection, or a client
        self.started_at = monotonic()
        self.ready_at = 0.0
        self._loop, self._on_message, self._on_exit = loop, on_message, on_exit
        self._heartbeat = forked.heartbeat
        self._signs = forked.heartbeat.read()
        self._silent_s = 0.0  # without a sign of life
        self.needs_link = False  # to its engine process, if that lives
        self._unlinked_looks = 0  # in a row, at which it had none
        self._overdue_looks = 0  # in a row, at which a batch ran for too long
        self._is_asked = False  # for its figures
        self._is_trusted = True
        self.is_dismissed = False  # ended on purpose, before it had anything to answer
        self.process = forked.process
        self.pid: int = self.process.pid
        self._pidfd = forked.pidfd  # where it is dead already, the channel's end tells
        self._channel = Channel(loop, forked.sock, self._hear, self._channel_ended, is_trusted=False)
        self._stderr = WorkerStderr(loop, forked.stderr, self.pid)
        if self._pidfd >= 0:
            # NOTE: a process that it has started may hold the channel open beyond its end.
            loop.add_reader(self._pidfd, self._process_ended)

    @property
    def is_ready(self) -> bool:
        """Whether it takes connections."""
        return self.state == "ready"

    @property
    def is_gone(self) -> bool:
        """Whether its process has ended."""
        return self.state == "gone"

    @property
    def responds(self) -> bool:
        """Whether it has shown lately that it makes progress, and has a link to its engine process."""
        return self._makes_progress and self._heartbeat.is_linked

    @property
    def _makes_progress(self) -> bool:
        return max(self._silent_s, self._signs.loop_s) < RESPONDS_SECONDS

    def look(self, hang_seconds: float) -> Reason | None:
        """Once in ``LOOK_SECONDS``: what is wrong with it, if anything; ``hang_seconds`` of 0 are no limit."""
        # NOTE: twice, as the supervisor may not have heard yet that the engine process has died. One that makes no
        # progress would not take the link.
        is_unlinked = self._makes_progress and not self._heartbeat.is_linked
        self._unlinked_looks = self._unlinked_looks + 1 if is_unlinked else 0
        self.needs_link = self.needs_link or self._unlinked_looks >= 2
        if self.state not in ("ready", "draining"):
            return None
        before, self._signs = self._signs, self._heartbeat.read()
        # NOTE: looks are counted, not seconds: a machine that slept must not find all its workers hanging. For the
        # same reason a batch has to be overdue twice: that of a machine that slept is over by then.
        self._silent_s = self._silent_s + LOOK_SECONDS if self._signs.beats == before.beats else 0.0
        is_overdue = 0 < hang_seconds < self._signs.batch_s
        self._overdue_looks = self._overdue_looks + 1 if is_overdue else 0
        longest = max(hang_seconds, SHORTEST_HANG_SECONDS) if hang_seconds else inf
        if self._silent_s > longest:
            return "silent"
        if self._signs.loop_s > longest:
            return "stuck"
        if self._overdue_looks >= 2:
            return "hung_batch"
        if self._signs.dead and self.state == "ready":  # at its end, a worker's instances end as well
            return "dead_instance"
        return None

    def give(self, sock: socket.socket, slot: int, is_refused: bool) -> None:
        """Let it serve the connection."""
        self.has_served = True
        self.connections.add(slot)
        self._channel.send({"type": "connection", "slot": slot, "refused": is_refused}, sock.fileno())

    def link(self, sock: socket.socket, client: Child | None = None) -> None:
        """Give it its end of the way to another process; an engine process gets one for each ``client``."""
        if client is not None:
            self.has_served = True
            self.clients.add(client)
        self.needs_link, self._unlinked_looks = False, 0
        self._channel.send({"type": "link"}, sock.fileno())

    def ask_stats(self) -> None:
        """It answers with a message of that type; one answer for all who ask until then."""
        if not self._is_asked:
            self._is_asked = True
            self._channel.send({"type": "stats"})

    def shed(self, count: int) -> None:
        """Have it give back so many connections."""
        self._channel.send({"type": "shed", "count": count})

    def release(self, reason: Reason = "died") -> None:
        """Have it give back all connections, and end."""
        self.reason = reason
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

    def kill(self, reason: Reason = "died") -> None:
        """End it now."""
        if self.is_gone:
            return
        if self.reason == "died":
            self.reason = reason
        try:
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def close(self) -> None:
        """End it now, and forget it."""
        self.kill()
        self._channel.close()
        self._stderr.close()
        if self._pidfd >= 0 and not self.is_gone:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        self.state = "gone"

    def last_words(self) -> str:
        """What was written on its stderr in the last moments, on one line."""
        return self._stderr.last_words()

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
        if not self._is_trusted:
            return
        try:
            check_message(message)
            self._take(message)
            self._on_message(self, message)
        except UnexpectedMessageError as error:
            self._distrust(str(error))
        except Exception:
            logger.exception("a defect")
            self._distrust("what it says cannot be taken")

    def _distrust(self, problem: str) -> None:
        logger.error("%s (pid %d): %s: killing it", self.name, self.pid, problem)
        self._is_trusted = False
        self.kill("misbehaved")

    def _take(self, message: Said) -> None:
        """Note what it says of itself; ``UnexpectedMessageError`` for what it has no reason to say now."""
        kind = message["type"]
        if kind == "ready":
            _require(self.state == "starting", "it was ready before")
            self.state, self.ready_at, self.graph = "ready", monotonic(), message["graph"]
        elif kind == "failed":
            _require(self.state == "starting" and not self.failure, "it cannot fail to start any more")
            self.failure = message["message"]
        elif kind == "stats":
            _require(self._is_asked, "nobody has asked for its figures")
            self._is_asked, self.stats = False, message["stats"]
        elif kind == "end":
            _require(self.answered is None, "it has ended before")
            self.answered, self.stats = message["answered"], message["stats"]
        else:
            _require(message["slot"] in self.connections, "the connection is not its own")

    def _channel_ended(self) -> None:
        """All it has said is heard. What it held may be looked at as soon as it is certain that it runs no more."""
        self.kill()
        if self._pidfd < 0:
            self._loop.call_soon(self._exited)
        else:
            self._loop.call_later(KILLED_SECONDS, self._exited)

    def _process_ended(self) -> None:
        self._channel.hear_out()
        self._exited()

    def _exited(self) -> None:
        if self.is_gone:
            return
        self.state = "gone"
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        self._stderr.close()
        self._on_exit(self)


def _require(is_right: bool, problem: str) -> None:
    if not is_right:
        raise UnexpectedMessageError(problem)
