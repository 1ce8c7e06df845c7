"""How much the clients of gRPC may take: calls, connections, bytes and seconds. Imports no grpc."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import NamedTuple, Protocol

from torchpipe_py import DeadlineExceeded, Overloaded
from torchpipe_py.serving import Rpc, counted
from torchpipe_server.front.counters import RequestCounters
from torchpipe_server.front.loop import Loop
from torchpipe_server.front.peers import Peer, Peers
from torchpipe_server.options import Options
from torchpipe_server.wire.http import MAX_HEAD_BYTES

TICK_SECONDS = 0.5
SILENT_SECONDS = 0.1  # a call without a message may be replaced by a newcomer after these
LOOK_SECONDS, FASTEST_BYTES = 0.02, 4 * 2**30  # shortest time between two looks; what may arrive in a second
HEALTH = frozenset({"Check", "ServerLive", "ServerReady", "ModelReady"})
# Room beyond the limit of calls: first for newcomers, which are connections without a call, then for health checks.
NEWCOMERS_SHARE = 16  # room for one newcomer for each so many calls of the limit
HEALTH_CALLS = 64
PENDING_CALLS = 4  # in grpc's queue for each call of the limit, until it is admitted or refused
PROBE_EVERY_MS, PROBE_MS = 60_000, 20_000  # keep-alive probes to clients, which may have vanished
CLIENT_PROBE_MS = 10_000  # a client that pings more often is disconnected


class LimitedCall(Protocol):
    """What the limits read of a call; they write ``peer``, its client from its admission on, and ``refusal``."""

    rpc: Rpc
    peer: Peer | None
    answered_at: float
    """Since when an answer waits for the client; 0 if none does."""
    refusal: BaseException | None
    """The error in place of the message that it waited for."""


class Reading(NamedTuple):
    """A call waits for a message ``since``; ``cancel`` ends the wait."""

    cancel: Callable[[], object]
    since: float


class RpcLimits:
    """Admits calls, counts what they hold, and ends those that take too much; for the loop's thread.

    Each limit, and what enforces it:

    - calls at a time (``max_connections``, half of them watches): ``enter``, which replaces a silent call, and has
      room beyond the limit for health checks, and for a call of each of some connections that have none;
    - connections (``max_connections``): ``enforce``, which disconnects idle ones;
    - calls of one connection (``max_calls_per_connection``): grpc; requests of its streams: ``Peer.room``;
    - bytes of messages and answers (``max_held_bytes``): ``check_room`` for those that were read, and ``_bound_memory``
      for what grpc holds, at each tick, and in between if much may arrive until the next;
    - seconds for a message (``message_seconds``): ``enforce``, which also disconnects clients that take no answers if
      room is scarce; for a handshake: grpc;
    - seconds without a call, vanished clients, bytes of a message and of metadata: grpc, see ``grpc_settings``;
    - what is inside of a message, inflated bytes, idle streams: ``RpcServer`` and its calls.
    """

    def __init__(self, loop: Loop, options: Options, counters: RequestCounters, peers: Peers) -> None:
        self._loop, self._options, self._counters, self._peers = loop, options, counters, peers
        self.calls: set[LimitedCall] = set()
        """The calls that were admitted and take room."""
        self.reading: dict[LimitedCall, Reading] = {}
        """The calls that wait for a message, the longest waiting first."""
        self.held_bytes = 0
        """Bytes of messages and answers in memory."""
        self._unread_bytes = 0  # that grpc holds, at the last look
        self._is_looking = False  # before the next tick

    # -- calls --------------------------------------------------------------------------------------------------

    def enter(self, call: LimitedCall, client: str) -> None:
        """Admit a call of this client, which takes room until ``leave``, or raise ``Overloaded``."""
        most, peer = self._options.max_connections, self._peers.of(client)
        room = most
        if not peer.calls:
            room += most // NEWCOMERS_SHARE
        if call.rpc.path.rpartition("/")[2] in HEALTH:
            room = most + most // NEWCOMERS_SHARE + HEALTH_CALLS
        # NOTE: a watch lasts as long as its client likes; half of the room is kept for other calls.
        is_full = call.rpc.is_watch and 2 * sum(other.rpc.is_watch for other in self.calls) >= most
        is_full = is_full or (len(self.calls) >= room and not self._replace_silent())
        if is_full:
            text = f"more than {counted(most, 'call')} at a time, or half of them watches (--max-connections)"
            raise Overloaded(text, retry_after_ms=1000)
        self.calls.add(call)
        call.peer = peer
        peer.calls += 1

    def _replace_silent(self) -> bool:
        """Give the room of the call that has waited longest for its message to a newcomer, if there is one."""
        call, reading = next(iter(self.reading.items()), (None, None))
        if call is None or reading is None or monotonic() < reading.since + SILENT_SECONDS:
            return False
        self._free(call)
        most = counted(self._options.max_connections, "call")
        text = f"sent no message while there were {most} (--max-connections): replaced by a newcomer"
        self._refuse(call, Overloaded(text, retry_after_ms=1000))
        return True

    def leave(self, call: LimitedCall) -> None:
        """Free the room of a call that has ended."""
        self._free(call)
        self.reading.pop(call, None)

    def _free(self, call: LimitedCall) -> None:
        if call in self.calls and call.peer is not None:
            self.calls.remove(call)
            call.peer.calls -= 1

    def begin_reading(self, call: LimitedCall, cancel: Callable[[], object]) -> None:
        """Record that the call waits for its next message, until ``end_reading``.

        If it may wait no longer, it gets a ``refusal`` and ``cancel`` is called.
        """
        self.reading[call] = Reading(cancel, monotonic())
        self._watch_memory()

    def end_reading(self, call: LimitedCall) -> None:
        """Record that the call waits no longer."""
        self.reading.pop(call, None)

    def _refuse(self, call: LimitedCall, error: BaseException) -> None:
        """Refuse the message that the call waits for; it may still be answered for earlier ones."""
        call.refusal = error
        self.reading.pop(call).cancel()

    # -- memory -------------------------------------------------------------------------------------------------

    def hold(self, size: int) -> None:
        """Count ``size`` more bytes in memory; negative when they are freed."""
        self.held_bytes += size

    def check_room(self) -> None:
        """Raise ``Overloaded`` if the messages of all calls together take more memory than they may."""
        if self.held_bytes > self._options.max_held_bytes:
            text = f"more than {self._options.max_held_bytes} bytes of unanswered messages (--max-held-bytes)"
            raise Overloaded(text, 1000)

    def _bound_memory(self) -> None:
        """If messages that were not read yet hold too much, refuse them, beginning with the clients that hold most."""
        limit, partial = self._options.max_held_bytes, self._peers.partial()
        self._unread_bytes = sum(peer.held_bytes for peer in partial)
        excess = self.held_bytes + self._unread_bytes - limit
        for peer in partial:
            if excess <= 0:
                return
            calls = [call for call in self.reading if call.peer is peer]
            if not calls:
                excess -= peer.held_bytes
                self._peers.disconnect([peer], "sent more than there is room for (--max-held-bytes)")
                self._counters.add("gRPC connection", Overloaded.code, 0.0, "")
                continue
            each = -(-peer.held_bytes // len(calls))
            # NOTE: those that have waited longest, since grpc does not show which of them has how much.
            for call in calls:
                if excess > 0:
                    excess -= each
                    text = f"more than {limit} bytes of unanswered messages (--max-held-bytes)"
                    self._refuse(call, Overloaded(text, retry_after_ms=1000))

    def _watch_memory(self) -> None:
        """Look again before messages that were not read yet can hold too much."""
        room = self._options.max_held_bytes - self.held_bytes - self._unread_bytes
        if not self._is_looking and len(self.calls) * self._options.max_message_bytes > room:
            self._is_looking = True
            self._loop.call_later(min(max(LOOK_SECONDS, room / FASTEST_BYTES), TICK_SECONDS), self._look_again)

    def _look_again(self) -> None:
        self._is_looking = False
        self._look(monotonic())
        self._watch_memory()

    # -- connections, time --------------------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        """See what the clients' connections hold, and make room where that is too much."""
        calls = [call.peer for call in self.calls if call.peer is not None]
        idle = self._peers.look(calls, self._options.max_message_bytes, now)
        most = self._options.max_connections
        if self._peers.connections > most:
            replaced = idle[: self._peers.connections - most + most // 8]
            self._peers.disconnect(replaced, "called nothing and made room for others")
            for _ in replaced:
                self._counters.add("gRPC connection", Overloaded.code, 0.0, "")
        self._bound_memory()

    def enforce(self, is_ending: bool) -> None:
        """End calls whose messages do not arrive, and clients that hold too much; called every ``TICK_SECONDS``.

        When room is scarce, also disconnect clients that do not read their answers; while the service ends, those with
        nothing but watches that they do not read.
        """
        options, now = self._options, monotonic()
        late = now - options.message_seconds
        self._look(now)
        slow: set[Peer | None] = {peer for peer in self._peers.partial() if 0 < peer.partial_since < late}
        for call, reading in list(self.reading.items()):
            # NOTE: a stream may wait for a message that has not begun; grpc does not show which of a client's calls
            # has the part that arrived.
            if reading.since < late and (not call.rpc.is_stream or call.peer in slow):
                slow.discard(call.peer)
                self._refuse(call, DeadlineExceeded(f"no whole message within {options.message_seconds:g} s"))
        stalled: set[Peer | None] = set()
        # NOTE: grpc cannot end one such call: whatever it sends to the client waits for the same connection.
        if 2 * len(self.calls) >= options.max_connections or 2 * self.held_bytes > options.max_held_bytes:
            stalled = {call.peer for call in self.calls if 0 < call.answered_at < late}
        if is_ending:  # a watch whose client does not read would delay it
            recent = now - TICK_SECONDS
            watches = {call for call in self.calls if call.rpc.is_watch and 0 < call.answered_at < recent}
            stalled |= {call.peer for call in watches} - {call.peer for call in self.calls - watches}
        self._peers.disconnect([peer for peer in stalled if peer is not None], "took no answers")


def grpc_settings(options: Options) -> list[tuple[str, int]]:
    """The limits that grpc enforces, as options of its server.

    NOTE: grpc does not bound what it inflates, so it passes compressed messages as they are. It does not say which are,
    so only gzip is allowed, whose first bytes no message has.
    """
    most, forever = options.max_connections, 2**31 - 1
    return [
        ("grpc.so_reuseport", 1),
        ("grpc.max_receive_message_length", options.max_message_bytes),
        ("grpc.max_send_message_length", -1),  # answers are bounded before
        # NOTE: grpc has one queue for all that happens, so that a client waits for all calls that others have in work.
        ("grpc.max_concurrent_streams", max(1, min(options.max_calls_per_connection, most // 2))),
        # NOTE: it would count calls that were answered and not yet freed, and reset others of the same client.
        ("grpc.http.overload_protection", 0),
        # NOTE: beyond as many that Python has not taken yet, grpc resets calls at random, without a word.
        ("grpc.server.max_pending_requests", PENDING_CALLS * most),
        ("grpc.server.max_pending_requests_hard_limit", PENDING_CALLS * most),
        ("grpc.max_allowed_incoming_connections", 2 * most),  # silent ones are closed at the next tick
        ("grpc.max_metadata_size", MAX_HEAD_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_HEAD_BYTES),
        ("grpc.compression_enabled_algorithms_bitset", 0b101),  # none and gzip
        ("grpc.per_message_decompression", 0),
        ("grpc.server_handshake_timeout_ms", min(forever, round(1000 * options.message_seconds))),
        ("grpc.max_connection_idle_ms", min(forever, round(1000 * options.idle_seconds)) or forever),
        ("grpc.keepalive_time_ms", PROBE_EVERY_MS),
        ("grpc.keepalive_timeout_ms", PROBE_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", CLIENT_PROBE_MS),
    ]
