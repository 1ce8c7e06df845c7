"""One worker or engine process as the supervisor sees it."""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from math import inf
from time import monotonic
from typing import Any, Literal

from torchpipe_server.front.loop import Loop
from torchpipe_server.logs.stderr import StderrPipe
from torchpipe_server.supervisor.forker import Forked
from torchpipe_server.supervisor.monitoring import figures
from torchpipe_server.worker.channel import Channel

logger = logging.getLogger("torchpipe_server")

LOOK_SECONDS = 1.0  # between two looks at a worker's signs of life
SHORTEST_HANG_SECONDS = 1.0  # a beat every BEAT_SECONDS shows nothing sooner
RESPONDS_SECONDS = 3.0  # without progress, after which a worker counts as one that answers nobody
RETIRE_SECONDS = 0.5  # for a worker with something that hangs to finish the rest
MOST_UNREAD = 2**12  # messages that a worker may leave unread and still have its clients' wishes answered

State = Literal["starting", "ready", "draining", "gone"]
Reason = Literal["died", "silent", "stuck", "hung_batch", "dead_instance", "misbehaved", "dismissed"]
"""Why a worker ended, or is to be ended: by itself or from outside; no sign of life; its I/O loop did one thing for too
long; a batch runs for too long; the thread of an instance has ended; it sent a message that no worker sends; it is not
needed, and has nothing to answer yet."""

_PROBLEMS: dict[Reason, str] = {
    "silent": "gives no sign of life",
    "stuck": "has an I/O loop that is stuck",
    "hung_batch": "has a batch that does not end",
    "dead_instance": "has lost the thread of an instance",
}


class Child:
    """A worker or engine process that was forked; ``name`` is what the log calls it.

    ``on_message(child, message)`` gets what it sends, ``on_exit(child)`` its end, which its pidfd alone reports: a
    process that it has started may hold the channel open. The end of the channel has it killed.

    ``connections`` are the slots, in the journal, of those that it serves. ``failure`` is why it could not start, as it
    reported. ``reason`` is why it ended, or is ended.
    """

    def __init__(
        self,
        loop: Loop,
        name: str,
        forked: Forked,
        on_message: Callable[[Child, figures.Message], object],
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
        self.must_listen = self.listens = False  # at gRPC's port
        self.has_served = self.has_streams = False  # whether it was given a connection or a client; streams to read
        self.is_asked = False  # for its figures
        self.started_at = monotonic()
        self.ready_at = 0.0
        self.process = forked.process
        self.pid: int = self.process.pid
        self._loop, self._on_message, self._on_exit = loop, on_message, on_exit
        self._heartbeat = forked.heartbeat
        self._signs = forked.heartbeat.read()
        self._silent_s = 0.0  # without a sign of life
        # In a row, the looks at which it had no link to its engine process, and at which a batch ran for too long.
        self.unlinked_looks = self._overdue_looks = 0
        self._pidfd = forked.pidfd
        self._channel = Channel(loop, forked.sock, self._hear, self.kill, is_trusted=False)
        self.stderr = StderrPipe(loop, forked.stderr, self.pid)
        loop.add_reader(self._pidfd, self._ended)

    @property
    def is_ready(self) -> bool:
        """Whether it takes connections."""
        return self.state == "ready"

    @property
    def is_serving(self) -> bool:
        """Whether it has figures."""
        return self.state in ("ready", "draining")

    @property
    def responds(self) -> bool:
        """Whether it has shown lately that it makes progress, and has a link to its engine process."""
        return self._makes_progress and self._heartbeat.is_linked

    @property
    def _makes_progress(self) -> bool:
        return max(self._silent_s, self._signs.loop_s) < RESPONDS_SECONDS

    # -- signs of life ------------------------------------------------------------------------------------------------

    def look(self, hang_seconds: float) -> None:
        """Once in ``LOOK_SECONDS``: ask it for figures, or end it where something in it is stuck for good."""
        reason = self.problem(hang_seconds)
        if reason is None:
            if self.is_serving:
                self.ask_stats()
        elif self.reason == "died":  # it is not being ended yet
            logger.error("%s (pid %d) %s: replacing it", self.name, self.pid, _PROBLEMS[reason])
            # NOTE: what cannot be finished is answered once the worker is dead, by the supervisor.
            if self.is_ready and self.connections and reason in ("hung_batch", "dead_instance"):
                self._loop.call_later(RETIRE_SECONDS, self.kill)
                self.release(reason)
            else:
                self.kill(reason)

    def problem(self, hang_seconds: float) -> Reason | None:
        """Once in ``LOOK_SECONDS``: what is wrong with it, if anything; ``hang_seconds`` of 0 are no limit."""
        # NOTE: one that makes no progress would not take the link.
        is_unlinked = self._makes_progress and not self._heartbeat.is_linked
        self.unlinked_looks = self.unlinked_looks + 1 if is_unlinked else 0
        if not self.is_serving:
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
        if self._signs.dead and self.is_ready:  # at its end, a worker's instances end as well
            return "dead_instance"
        return None

    def rss_bytes(self) -> int:
        """Memory that is resident, what it shares with others included."""
        try:
            with open(f"/proc/{self.pid}/statm", encoding="ascii") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
        except (OSError, IndexError):
            return 0

    # -- what it is to do ---------------------------------------------------------------------------------------------

    def send(self, type_: str, descriptor: int = -1, **fields: Any) -> None:
        """Send it a message; it gets a copy of ``descriptor``. ``OSError`` where none is left for the copy."""
        self._channel.send({"type": type_, **fields}, descriptor)

    def give(self, sock: socket.socket, slot: int, is_refused: bool) -> None:
        """Let it serve the connection."""
        self.has_served = True
        self.connections.add(slot)
        self.send("connection", sock.fileno(), slot=slot, is_refused=is_refused)

    def link(self, engine: Child) -> None:
        """Give this worker and its engine process the two ends of a way to each other."""
        self.unlinked_looks = 0
        try:
            ours, theirs = socket.socketpair()
            with ours, theirs:
                engine.has_served = True
                engine.clients.add(self)
                engine.send("link", ours.fileno())
                self.send("link", theirs.fileno())
        except OSError as error:
            logger.error("%s and %s cannot be linked: %s", self.name, engine.name, error)
            self._heartbeat.tell_linked(False)

    def ask_stats(self) -> None:
        """It answers with a message of that type; one answer for all who ask until then."""
        if not self.is_asked:
            self.is_asked = True
            self.send("stats")

    def release(self, reason: Reason = "died") -> None:
        """Have it give back all connections, and end."""
        self.reason = reason
        self._finish("release")

    def drain(self) -> None:
        """Have it answer what was accepted, and end; at once, where it has not begun to serve."""
        if self.state == "starting":
            self.kill("dismissed")
        else:
            self._finish("drain")

    def kill(self, reason: Reason = "died") -> None:
        """End it now."""
        if self.reason == "died":
            self.reason = reason
        if self.state != "gone":
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        """End it now, and forget it."""
        if self.state != "gone":
            self.kill()
            self.state = "gone"
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._channel.close()
            self.stderr.close()

    def forget(self) -> None:
        """Let go of the descriptors that its exit code came by."""
        with suppress(ValueError):  # it has not come: they stay until this object goes
            self.process.close()

    def _finish(self, how: str) -> None:
        if self.state != "gone":
            self.state = "draining"
            self.send(how)

    # -- what it sends ------------------------------------------------------------------------------------------------

    def _hear(self, line: bytes, descriptor: int) -> None:
        try:
            message = figures.parse_message(line)
            self._note(message)
        except (ValueError, RecursionError) as error:
            logger.error("killing %s (pid %d): its message is not one of a worker: %s", self.name, self.pid, error)
            self._channel.close()
            self.kill("misbehaved")
        else:
            self._on_message(self, message)

    def _note(self, message: figures.Message) -> None:
        """Note what it reports of itself; ``ValueError`` for what it has no reason to send now."""
        match message:
            case figures.Ready() if self.state == "starting":
                self.state, self.ready_at, self.graph = "ready", monotonic(), message.graph
            case figures.Listening() if self.must_listen and not self.listens:
                self.listens = True
            case figures.Failed() if self.state == "starting" and not self.failure:
                self.failure = message.message
            case figures.Stats() if self.is_asked:
                self.is_asked, self.stats = False, message.stats
            case figures.End() if self.answered is None:
                self.answered, self.stats = message.answered, message.stats
            case figures.Gone() if message.slot in self.connections:
                pass
            case figures.Event() | figures.Snapshot() if self.has_streams:
                pass
            case figures.Control() if self.is_serving and self._channel.unsent < MOST_UNREAD:
                pass
            case _:
                raise ValueError(f"{type(message).__name__.lower()!r} is out of place")

    def _ended(self) -> None:
        self._channel.hear_out()
        self.close()
        self._on_exit(self)
