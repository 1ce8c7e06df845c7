"""Every client's connection: which worker serves it, and which process takes over if that worker cannot."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from time import monotonic
from typing import Any

from torchpipe_py import WorkerDied
from torchpipe_py.serving import HttpRequest
from torchpipe_server.front.journal import Journal
from torchpipe_server.front.loop import Loop
from torchpipe_server.front.server import Server, has_unread
from torchpipe_server.options import Options
from torchpipe_server.supervisor.acceptor import Acceptor
from torchpipe_server.supervisor.child import Child
from torchpipe_server.supervisor.connection_limits import ConnectionLimits, slots_for
from torchpipe_server.supervisor.fallback import Fallback
from torchpipe_server.supervisor.messages import Figures

logger = logging.getLogger("torchpipe_server")

HOLD_SECONDS = 0.4  # that connections wait for a worker; then another one serves them, or they get an error
LOOK_SECONDS = 0.5  # workers update the journal as often


class Connections:
    """Keeps a copy of each client's socket until the client closes it.

    A worker of ``ready()`` serves the connection. Without a worker it waits for ``HOLD_SECONDS``; then the fallback, a
    server that answers every request with an error, serves it until a worker is ready. Connections move only between
    two messages.

    While a dead worker is being replaced (``is_recovering()``), suspect connections wait for its successor, so that
    they cannot kill the other workers too: new ones, and those with a lost request.

    While the first workers load their models (``is_starting()``), the fallback serves all connections at once: health
    checks must not wait.
    """

    def __init__(
        self, loop: Loop, listener: socket.socket, options: Options, idl: Any, ready: Callable[[], list[Child]],
        is_recovering: Callable[[], bool], is_starting: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        self.journal = Journal(slots_for(options.max_connections))
        self._options, self._ready = options, ready
        self._is_recovering, self._is_starting = is_recovering, is_starting
        self._limits = ConnectionLimits(options.max_connections, options.max_connections_per_address, self._evict)
        self._acceptor = Acceptor(loop, listener, self._take, self._limits.make_room)
        self._fallback = Fallback(loop, idl, options)
        self._fallback_server = Server(loop, self._fallback.services, options, self._left)
        self._sockets: dict[int, socket.socket] = {}
        self._loop = loop
        self._waiting: dict[int, asyncio.TimerHandle] = {}  # slots that wait for a worker, with their timers
        self._is_ending = False
        self._silent: Iterator[int] = iter(())  # idle slots without any request so far
        self._looked_at = 0.0  # when they were listed

    # -- life ---------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Start to accept connections."""
        self._acceptor.start()

    def drain(self) -> None:
        """Take what the system has accepted and close the port; connections no longer wait for a worker."""
        self._acceptor.close()
        self._is_ending = True
        waiting, self._waiting = self._waiting, {}
        for slot, timer in waiting.items():
            timer.cancel()
            self._give_to_fallback(slot)
        self._fallback_server.drain()

    @property
    def is_drained(self) -> bool:
        """Whether the fallback serves no connection, or its time is over."""
        return self._fallback_server.is_finished or not self._fallback_server.connections

    def close(self) -> None:
        """Close all connections."""
        self._fallback_server.close()
        for slot in list(self._sockets):
            self._close(slot)
        self.journal.close()

    def figures(self) -> tuple[Figures, Figures]:
        """Statistics of the connections and of the requests that the fallback answered."""
        connections = {
            "open": self._limits.open,
            "max": self._options.max_connections,
            "accepted": self._limits.accepted,
            "refused": self._limits.refused,
            "evicted": self._limits.evicted,
        }
        return connections, self._fallback_server.counters.summary()

    # -- events of workers ------------------------------------------------------------------------------------------

    def gone(self, child: Child, slot: int, is_closed: bool) -> None:
        """A worker closed a connection or handed it over."""
        child.connections.discard(slot)
        self._left(slot, is_closed)

    def became_ready(self, child: Child) -> None:
        """Give a new worker the waiting connections and its share of those that the other workers serve."""
        waiting, self._waiting = self._waiting, {}
        for slot, timer in waiting.items():
            timer.cancel()
            self._give(slot, child)
        self._fallback_server.hand_over(self._fallback_server.connections)
        ready = self._ready()
        share = sum(len(other.connections) for other in ready) // len(ready)
        for other in ready:
            if len(other.connections) > share + 1:
                other.send("hand_over", count=len(other.connections) - share - 1)

    def died(self, child: Child) -> int:
        """Take over the connections of a dead worker; returns how many requests or replies were lost."""
        slots, child.connections = sorted(child.connections), set()
        return sum([self._take_over(slot) for slot in slots])

    def _take_over(self, slot: int) -> bool:
        """Answer the request in work and place the connection elsewhere; returns whether anything was lost."""
        request, is_lost = self.journal.read(slot)
        if request is not None:
            error = WorkerDied("the worker process ended while it had the request")
            services = self._fallback.services
            service: Any = services.http if isinstance(request, HttpRequest) else services.thrift
            reply, name, outcome = service.reply(request, error)
            self._fallback_server.counters.add(name, outcome, 0.0, "")
            is_written = False
            with suppress(OSError):
                is_written = self._sockets[slot].send(reply) == len(reply)
            if is_written and request.is_last and not self._is_ending:
                self._give_to_fallback(slot, is_answered=True)
                return True
            is_lost = is_lost or not is_written
        if is_lost or self._is_ending:
            is_lost = is_lost or has_unread(self._sockets[slot])  # which no process will read
            self._close(slot)
        else:
            self._place(slot, is_suspect=request is not None)
        return request is not None or is_lost

    # -- placement -------------------------------------------------------------------------------------------------

    def _take(self, sock: socket.socket, peer: str) -> None:
        place = self._limits.take(peer)
        if place is None:
            sock.close()
        else:
            slot, _ = place
            self._sockets[slot] = sock
            self.journal.begin(slot, monotonic())
            self._place(slot, is_suspect=True)
        if self._limits.is_short:
            self._acceptor.pause()

    def _evict(self, slots: Collection[int]) -> int | None:
        """Shut down the idlest of ``slots``: the process that serves it sees the end and reports it closed."""
        for slot in self._idle():
            # NOTE: read the journal once more, since the worker may have read those bytes meanwhile.
            if slot in slots and not has_unread(self._sockets[slot]) and self.journal.is_idle(slot):
                self._hang_up(slot)
                return slot
        return None

    def _idle(self) -> Iterator[int]:
        """Slots of idle connections, the longest idle first: those without any request, then the others."""
        # NOTE: in a flood of new connections the first list is reused for a while: later ones are younger. `yield from`
        # would close the iterator, which the next call continues.
        if monotonic() - self._looked_at < LOOK_SECONDS:
            for slot in self._silent:
                yield slot
        self._looked_at, self._silent = monotonic(), self.journal.idle(self._sockets, has_asked=False)
        for slot in self._silent:
            yield slot
        yield from self.journal.idle(self._sockets, has_asked=True)

    def _hang_up(self, slot: int) -> None:
        with suppress(OSError):  # the client was faster
            self._sockets[slot].shutdown(socket.SHUT_RDWR)

    def _place(self, slot: int, is_suspect: bool = False) -> None:
        """Give the connection to the worker with the fewest connections, or let it wait for a worker."""
        if self._is_starting():
            self._give_to_fallback(slot)
            return
        children = self._ready()
        if children and not (is_suspect and self._is_recovering()):
            self._give(slot, min(children, key=lambda child: (len(child.connections), child.stats.get("inflight", 0))))
        elif self._is_ending:
            self._give_to_fallback(slot)
        else:
            self._waiting[slot] = self._loop.call_later(HOLD_SECONDS, self._end_wait, slot)

    def _give(self, slot: int, child: Child) -> None:
        self.journal.entry(slot)  # clears it: the new worker may die before it has the connection
        try:
            child.give(self._sockets[slot], slot, self._limits.is_refused(slot))
        except OSError as error:
            logger.error("cannot pass a connection to a worker: %s", error)
            self.gone(child, slot, True)

    def _give_to_fallback(self, slot: int, is_answered: bool = False) -> None:
        """Answer its requests with errors until a worker is ready; if ``is_answered``, only close it."""
        sock = _Borrowed(fileno=self._sockets[slot].fileno())
        self._fallback_server.adopt(sock, slot, self.journal.entry(slot), is_answered=is_answered)

    def _left(self, slot: int, is_closed: bool) -> None:
        if is_closed:
            self._close(slot)
        else:
            self._place(slot)

    def _close(self, slot: int) -> None:
        self._hang_up(slot)
        self._sockets.pop(slot).close()
        timer = self._waiting.pop(slot, None)
        if timer is not None:
            timer.cancel()
        self._limits.release(slot)
        self._acceptor.resume()

    def _end_wait(self, slot: int) -> None:
        del self._waiting[slot]
        if self._ready():
            self._place(slot)
        else:
            self._give_to_fallback(slot)


class _Borrowed(socket.socket):
    """A socket that shares the supervisor's descriptor, because no free one may be left."""

    def close(self) -> None:
        """Leave the descriptor to its owner."""
        self.detach()
