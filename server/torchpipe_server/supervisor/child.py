"""One worker or engine process, seen from the supervisor.

Who ends a process, when, and how. A stop of the service is described in ``supervisor``.

- ``Child.look``: ``problem`` finds that it hangs, has lost the thread of an instance, or is not ready in time. It is
  killed; first released, with ``RETIRE_SECONDS`` for its other requests, if only a batch or an instance is to blame.
- ``Child._receive``, ``_channel_ended``: it sent an invalid message, or its channel ended. It is killed.
- ``Fleet._swap``: a reload has replaced it. It is released, or killed if it is not ready.
- ``Fleet._ended``: of an engine process that was replaced, the last worker has ended. It is drained.
- ``Fleet._dismiss_successors``: the reload that started it is given up or starts over. It is killed.
- ``Fleet._became_ready``: a model was loaded or unloaded while it started. It is killed, and started again.
- ``Fleet._forked``, ``Forker.close``: it is no longer wanted when its fork is done. It is killed.
- ``Fleet.drain``, then ``Supervisor._step``: the service stops. It is drained (killed if it still starts), and killed
  if that takes too long.
- By itself: ``worker.run_process`` cannot start it, or ``Worker._cannot_listen``: it reports "failed" first. After
  ``Worker._orphaned`` or ``EngineProcess._orphaned``: the supervisor is gone. Or it crashes. While it starts, the
  system kills it when the fork server ends (``die_with_parent``).

Afterwards ``Fleet._ended`` has ``Connections.died`` answer its requests and move its connections. ``Fleet._replace``
starts a successor, at once or after a pause, or gives up; ``fleet.successor`` says which.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Mapping
from math import inf
from time import monotonic
from typing import Any, Literal

from torchpipe_server.front.loop import Loop
from torchpipe_server.logs.stderr import StderrPipe
from torchpipe_server.supervisor import messages
from torchpipe_server.supervisor.forker import Forked
from torchpipe_server.worker.channel import Channel

logger = logging.getLogger("torchpipe_server")

LOOK_SECONDS = 1.0  # between two checks of a worker's heartbeat
SHORTEST_HANG_SECONDS = 1.0  # heartbeats every BEAT_SECONDS cannot show a hang sooner
RESPONDS_SECONDS = 3.0  # without progress, after which a worker counts as not responding
RETIRE_SECONDS = 0.5  # in which a worker with a hung batch or a dead instance finishes its other requests
MOST_UNREAD = 2**12  # messages that a worker may leave unread before its control messages count as misbehaviour

State = Literal["starting", "ready", "draining", "gone"]
Reason = Literal["died", "silent", "stuck", "hung_batch", "dead_instance", "slow_start", "misbehaved", "dismissed"]
"""Why a worker ended or is to be ended: it exited or was killed from outside; no heartbeat; one step of its I/O loop
took too long; a batch took too long; the thread of an instance ended; it did not become ready in time; it sent an
invalid message or closed its channel; it is not needed and has served nothing yet."""

_PROBLEMS: dict[Reason, str] = {
    "silent": "has no heartbeat",
    "stuck": "has a stuck I/O loop",
    "hung_batch": "has a batch that does not end",
    "dead_instance": "has lost the thread of an instance",
}


class Child:
    """A worker or engine process and its state; ``name`` is its name in the log.

    ``on_message(child, message)`` is called for its messages, ``on_exit(child)`` for its end. ``connections`` are the
    journal slots of the connections that it serves. ``failure`` is the reported reason why it could not start.
    ``reason`` is why the supervisor ends it, or once it ended, why it did; ``None`` before.
    """

    def __init__(
        self,
        loop: Loop,
        name: str,
        forked: Forked,
        on_message: Callable[[Child, messages.Message], object],
        on_exit: Callable[[Child], object],
    ) -> None:
        self.name = name
        self.state: State = "starting"
        self.connections: set[int] = set()
        self.clients: set[Child] = set()  # the workers that an engine process serves
        self.failure = ""
        self.answered: bool | None = None  # once it ended: whether with every request answered
        self.stats: dict[str, Any] = {}
        self.graph = ""
        self.problems: Mapping[str, str] = {}  # why models of a folder are not served, by NAME/VERSION
        self.tables = forked.tables  # that it started with
        self._awaited: set[tuple[type[messages.Message], int]] = set()  # answers to ``ask_change``
        self.reason: Reason | None = None
        self.must_listen = self.listens = False  # at the port of gRPC
        self.has_served = self.has_streams = False  # whether it got a connection or a client; streams to read
        self.is_asked = False  # to send statistics
        self.started_at = monotonic()
        self.ready_at = 0.0
        self.process = forked.process
        self.pid = self.process.pid
        self._loop, self._on_message, self._on_exit = loop, on_message, on_exit
        self._heartbeat = forked.heartbeat
        self._signs = forked.heartbeat.read()
        self._silent_s = 0.0  # without a heartbeat
        self._starting_s = 0.0  # while it loads its models, in checks, as the machine may sleep meanwhile
        # Consecutive checks at which it had no link to its engine process, and at which a batch was overdue.
        self.unlinked_looks = self._overdue_looks = 0
        self._channel = Channel(loop, forked.sock, self._receive, self._channel_ended, is_trusted=False)
        self.stderr = StderrPipe(loop, forked.stderr, self.pid)
        loop.add_reader(self.process.fileno(), self._ended)

    @property
    def is_ready(self) -> bool:
        """Whether it takes connections."""
        return self.state == "ready"

    @property
    def must_still_listen(self) -> bool:
        """Whether it was asked to listen, and has not reported that it does."""
        return self.must_listen and not self.listens

    @property
    def is_serving(self) -> bool:
        """Whether it has statistics."""
        return self.state in ("ready", "draining")

    @property
    def responds(self) -> bool:
        """Whether it has made progress lately and has a link to its engine process."""
        return self._makes_progress and self._heartbeat.is_linked

    @property
    def _makes_progress(self) -> bool:
        return max(self._silent_s, self._signs.loop_s) < RESPONDS_SECONDS

    # -- health -----------------------------------------------------------------------------------------------------

    def look(self, hang_seconds: float, start_seconds: float) -> None:
        """Ask it for statistics, or end it if something in it hangs; called every ``LOOK_SECONDS``."""
        reason = self.problem(hang_seconds, start_seconds)
        if reason is None:
            if self.is_serving:
                self.ask_stats()
        elif self.reason is None:  # nothing ends it yet
            if reason == "slow_start":
                self.failure = f"{self.name} is not ready after {start_seconds:g} s (--start-seconds)"
                logger.error("killing %s (pid %d): it is not ready in time", self.name, self.pid)
            else:
                logger.error("%s (pid %d) %s: replacing it", self.name, self.pid, _PROBLEMS[reason])
            # NOTE: once the worker is dead, the supervisor answers what it could not finish.
            if self.is_ready and self.connections and reason in ("hung_batch", "dead_instance"):
                self._loop.call_later(RETIRE_SECONDS, self.kill)
                self.release(reason)
            else:
                self.kill(reason)

    def problem(self, hang_seconds: float, start_seconds: float) -> Reason | None:
        """Why it is unhealthy, if it is; called every ``LOOK_SECONDS``. 0 seconds means no limit."""
        # NOTE: a worker without progress would not accept the link.
        is_unlinked = self._makes_progress and not self._heartbeat.is_linked
        self.unlinked_looks = self.unlinked_looks + 1 if is_unlinked else 0
        if self.state == "starting":
            self._starting_s += LOOK_SECONDS
            return "slow_start" if 0 < start_seconds < self._starting_s else None
        if not self.is_serving:
            return None
        before, self._signs = self._signs, self._heartbeat.read()
        # NOTE: count checks, not seconds: after a suspend of the machine, not all workers hang. For the same reason a
        # batch must be overdue twice.
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
        if self._signs.dead and self.is_ready:  # a worker that ends closes its instances
            return "dead_instance"
        return None

    def rss_bytes(self) -> int:
        """Resident memory, including shared pages."""
        try:
            with open(f"/proc/{self.pid}/statm", encoding="ascii") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
        except (OSError, IndexError):
            return 0

    # -- commands -------------------------------------------------------------------------------------------------

    def send(self, type_: str, descriptor: int = -1, **fields: Any) -> None:
        """Send it a message and a copy of ``descriptor``. ``OSError`` if no descriptor is left for the copy."""
        self._channel.send({"type": type_, **fields}, descriptor)

    def give(self, sock: socket.socket, slot: int, is_refused: bool) -> None:
        """Give it a connection to serve."""
        self.has_served = True
        self.connections.add(slot)
        self.send("connection", sock.fileno(), slot=slot, is_refused=is_refused)

    def link(self, engine: Child) -> None:
        """Connect this worker and its engine process by a socket pair."""
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
            self._heartbeat.set_linked(False)

    def ask_stats(self) -> None:
        """Ask for statistics, unless an answer is already awaited; it comes as a message."""
        if not self.is_asked:
            self.is_asked = True
            self.send("stats")

    def ask_change(self, type_: Literal["prepare", "commit"], change: int, **fields: Any) -> None:
        """Have it set up a model, or serve what it has set up; the answer comes as a message with this number."""
        self._awaited.add((messages.Prepared if type_ == "prepare" else messages.Committed, change))
        self.send(type_, change=change, **fields)

    def release(self, reason: Reason | None = None) -> None:
        """Have it give back all connections and end."""
        self.reason = self.reason or reason
        self._finish("release")

    def drain(self) -> None:
        """Have it answer accepted requests and end; kill it if it has not begun to serve."""
        if self.state == "starting":
            self.kill("dismissed")
        else:
            self._finish("drain")

    def kill(self, reason: Reason | None = None) -> None:
        """Kill it."""
        self.reason = self.reason or reason
        self.process.kill()

    def close(self) -> None:
        """Kill it and release its resources."""
        if self.state != "gone":
            self.kill()
            self.state = "gone"
            self._loop.remove_reader(self.process.fileno())
            self.process.release()
            self._channel.close()
            self.stderr.close()

    def _finish(self, how: str) -> None:
        if self.state != "gone":
            self.state = "draining"
            self.send(how)

    # -- messages --------------------------------------------------------------------------------------------------

    def _receive(self, line: bytes, descriptor: int) -> None:
        try:
            message = messages.parse_message(line)
            self._note(message)
        except (ValueError, RecursionError) as error:
            logger.error("killing %s (pid %d): invalid message: %s", self.name, self.pid, error)
            self._channel.close()
            self.kill("misbehaved")
        else:
            self._on_message(self, message)

    def _note(self, message: messages.Message) -> None:
        """Record what it reports about itself; ``ValueError`` for a message that is not expected now."""
        match message:
            case messages.Ready() if self.state == "starting":
                self.state, self.ready_at, self.graph = "ready", monotonic(), message.graph
                self.problems = message.problems
            case messages.Prepared() | messages.Committed() if (type(message), message.change) in self._awaited:
                self._awaited.discard((type(message), message.change))
            case messages.Listening() if self.must_still_listen:
                self.listens = True
            case messages.Failed() if (self.state == "starting" or self.must_still_listen) and not self.failure:
                self.failure = message.message
            case messages.Stats() if self.is_asked:
                self.is_asked, self.stats = False, message.stats
            case messages.End() if self.answered is None:
                self.answered, self.stats = message.answered, message.stats
            case messages.Gone() if message.slot in self.connections:
                pass
            case messages.Event() | messages.Snapshot() if self.has_streams:
                pass
            case messages.Control() if self.is_serving and self._channel.unsent < MOST_UNREAD:
                pass
            case _:
                raise ValueError(f"unexpected {type(message).__name__.lower()!r} while the process is {self.state}")

    def _channel_ended(self) -> None:
        """Kill it, since nothing more can be sent to it. Its end of the channel closes a moment before it ends, too."""
        if self.process.is_ending():
            self.kill()
        else:
            logger.error("killing %s (pid %d): its channel has ended", self.name, self.pid)
            self.kill("misbehaved")

    def _ended(self) -> None:
        self._channel.drain()
        self.reason = self.reason or "died"
        self.close()
        self._on_exit(self)
