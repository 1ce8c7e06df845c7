"""Serves gRPC on its own port: each worker listens there, and calls run on the worker's loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic, perf_counter
from typing import Any

import grpc
import grpc.aio

from torchpipe_py import InvalidRequest, Overloaded, TorchpipeError
from torchpipe_py.serving import (
    SMALL_BYTES,
    Bound,
    Call,
    Method,
    Rpc,
    RpcRequest,
    WireAnswer,
    compression,
    counted,
    describe,
    joined_fields,
    log_failure,
    parse_message,
)
from torchpipe_server.front.counters import RequestCounters
from torchpipe_server.front.loop import Inbox, Loop, every
from torchpipe_server.front.pacing import RefusalPacing
from torchpipe_server.front.peers import Peer, Peers
from torchpipe_server.front.rpc_limits import TICK_SECONDS, RpcLimits, grpc_settings
from torchpipe_server.front.services import reply_bound
from torchpipe_server.options import Options

logger = logging.getLogger("torchpipe_server")

STREAM_REQUESTS = 16  # the most of one stream in work or with unread answers
WATCHED_BYTES = 4096  # the largest message of a watch, which is kept and parsed at each tick
MOST_COMPRESSED_BYTES = 2**15  # of an answer: grpc compresses it on the loop's thread, in up to 2 ms


class Recipient:
    """Where the answer of a call goes. NOTE: it does not know the `RpcCall`, or both would wait for the collector."""

    def __init__(self, server: RpcServer, method: Method, future: asyncio.Future[WireAnswer]) -> None:
        self._server, self._method, self._future = server, method, future
        self.compresses = False  # as its client does

    def reply(self, call: Call, result: Any) -> None:
        """Encode the answer and pass it to the loop; for any thread."""
        try:
            answer = WireAnswer.of(self._method, result, self._server.reply)
        except BaseException as failure:  # without an answer the client would wait for ever
            log_failure("an answer cannot be encoded", failure)
            error = TorchpipeError(f"the answer cannot be encoded: {describe(failure)}")
            answer = WireAnswer.of(self._method, error, self._server.reply)
        if self.compresses and compression.SMALLEST_BYTES <= len(answer.data) <= MOST_COMPRESSED_BYTES:
            answer = answer._replace(is_compressed=compression.shrinks(answer.data))
        self._server.answer(self, call, answer)

    def settle(self, call: Call, answer: WireAnswer) -> None:
        """Take the answer; discarded if the client has left."""
        if not self._future.done():
            self._future.set_result(answer)
            call.settle()


class RpcCall:
    """The client's side of a call over gRPC: ``future`` is its answer. ``hold`` counts the bytes that it keeps."""

    def __init__(self, server: RpcServer, rpc: Rpc) -> None:
        self.server, self.rpc = server, rpc
        self.future: asyncio.Future[WireAnswer] = server.loop.create_future()
        self.recipient = Recipient(server, rpc.method, self.future)
        self.call = Call(self.recipient)
        self.refusal: BaseException | None = None  # in place of the message that it waited for
        self.arrived = perf_counter()  # when its message was complete
        self.answered_at = 0.0  # since when an answer waits for the client
        self.peer: Peer | None = None  # from its admission on
        self.watched = b""  # the message of a watch
        self.model = ""  # that it asks, once that is known

    async def receive(self, data: Any, context: Any) -> None:
        """Take the message, compressed or not, and start the method that it calls; an error is the answer."""
        self.call.began, self.arrived = monotonic(), perf_counter()
        if data is grpc.aio.EOF:
            self.call.done(InvalidRequest("the call has no message"))
            return
        self.hold(len(data))
        if self.peer is not None:
            self.peer.deliver(len(data))
        if data.startswith(compression.MAGIC):
            self.recipient.compresses = True
            try:
                data = await self._inflate(data)
            except Exception as error:
                self.call.done(error)
                return
        self.start(data, context)

    async def _inflate(self, data: bytes) -> bytes:
        """The message, inflated on another thread unless it is short."""
        inflater = compression.Inflater(data, "gzip", self.server.message)
        if not inflater.step(SMALL_BYTES):
            await self.server.inflating.finish(inflater, self._hold_inflated)
        inflated = inflater.take()
        self.hold(len(inflated) - self.call.size)
        return inflated

    def _hold_inflated(self, size: int) -> None:
        self.hold(size - self.call.size)
        self.server.limits.check_room()

    def start(self, data: bytes, context: Any) -> None:
        """Start the method that the message calls; an error is the answer."""
        server, method, call = self.server, self.rpc.method, self.call
        try:
            if self.rpc.is_watch:
                if len(data) > WATCHED_BYTES:
                    raise InvalidRequest(f"{len(data)} bytes to watch; the limit is {WATCHED_BYTES}")
                self.watched = data
            server.limits.check_room()
            message = parse_message(method.args, data, server.options.max_items, server.text)
            fields, deadline_ms = _metadata_of(context, self.arrived)
            request = RpcRequest(message, fields, deadline_ms, server.is_ending, self.arrived)
            try:
                call.start(server.loop, method, request, server.counters.is_logging)
            finally:
                self.model = request.model
        except BaseException as error:  # others' requests are here
            call.done(error)

    def hold(self, size: int) -> None:
        """Count ``size`` more bytes that it keeps in memory; negative when they are freed."""
        self.call.size += size
        self.server.limits.hold(size)

    def release(self) -> None:
        """Release what it holds: its answer was sent, or its client has left, and the request is cancelled."""
        self.hold(-self.call.size)
        self.call.cancel()
        self.future.cancel()


class RpcServer:
    """Serves the methods at ``options.host`` and ``options.grpc_port`` after ``listen``.

    ``drain`` answers accepted calls for at most ``drain_seconds``. Long messages are inflated in ``inflating``.
    Everything but ``answer`` is for the loop's thread.
    """

    def __init__(
        self, loop: Loop, rpcs: Sequence[Rpc], options: Options, counters: RequestCounters, pacing: RefusalPacing,
        inflating: compression.InflateQueue,
    ) -> None:  # fmt: skip
        self.loop, self.options, self.counters, self._pacing = loop, options, counters, pacing
        self.inflating, self.message = inflating, Bound(options.max_message_bytes, "--max-message-bytes")
        self.limits = RpcLimits(loop, options, counters, Peers(options.grpc_port, options.max_calls_per_connection))
        self.reply, self.text = reply_bound(options.max_reply_bytes), Bound(options.max_text_bytes, "--max-text-bytes")
        self._handlers = {rpc.path: self._handler(rpc) for rpc in rpcs}
        self._server: grpc.aio.Server | None = None
        self.answer = Inbox(loop, Recipient.settle).put
        self.draining: asyncio.Future[None] = loop.create_future()
        self._listening: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._stop_ticks: Callable[[], None] = lambda: None

    # -- life ---------------------------------------------------------------------------------------------------

    def listen(self, done: Callable[[], object], failed: Callable[[str], object]) -> None:
        """Start to accept connections, beside the other workers; then call ``done``, or ``failed`` with the reason."""
        if self._listening is None and self._ending is None:
            logging.getLogger("grpc._cython.cygrpc").addFilter(keep_log_record)
            self._stop_ticks = every(self.loop, TICK_SECONDS, lambda: self.limits.enforce(self.is_ending))
            self._listening = self.loop.create_task(self._listen(done, failed))

    async def _listen(self, done: Callable[[], object], failed: Callable[[str], object]) -> None:
        if self.is_ending:
            return
        server = grpc.aio.server(options=grpc_settings(self.options))
        server.add_generic_rpc_handlers((self,))
        # NOTE: grpc passes on the calls of a registered method from a queue of its own, all others from one, some
        # rounds of the loop apart. So health checks do not wait for inference, nor the reverse. Each further registered
        # method would slow all calls down. Before grpcio 1.84 this does nothing.
        for path, handler in self._handlers.items():
            service, _, name = path[1:].rpartition("/")
            if name == "ModelInfer":
                server.add_registered_method_handlers(service, {name: handler})
        host, port = self.options.host, self.options.grpc_port
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            server.add_insecure_port(address)
            self._server = server
            await server.start()
        except Exception as error:
            self._server = None
            failed(f"cannot listen on {address} (--grpc-port): {error}")
            return
        done()

    def service(self, details: Any) -> Any:
        """The handler of a call's method, or ``None``; grpc calls this."""
        return self._handlers.get(details.method)

    def drain(self) -> asyncio.Task[None]:
        """Take no further calls, answer those in work, and end streams between two messages; returns when in a task."""
        if self._ending is None:
            self.draining.set_result(None)
            self._ending = self.loop.create_task(self._end())
        return self._ending

    async def _end(self) -> None:
        if self._listening is not None:
            await self._listening  # it may just begin to
        if self._server is not None:
            # NOTE: wait even if no call is known here: grpc may have accepted some that it has not passed on.
            await self._server.stop(self.options.drain_seconds)
        self._stop_ticks()

    @property
    def is_ending(self) -> bool:
        """Whether it takes no further calls."""
        return self.draining.done()

    @property
    def is_finished(self) -> bool:
        """Whether the drain is complete or its time is over."""
        return self._server is None or (self._ending is not None and self._ending.done())

    def close(self) -> bool:
        """End all calls, once the loop no longer runs; returns whether there were none."""
        busy = len(self.limits.calls)
        self._stop_ticks()
        if busy:
            logger.warning("%s still busy after drain_seconds", counted(busy, "gRPC call"))
        if self._server is not None:
            self.loop.run_until_complete(self._server.stop(None))
        return not busy

    # -- calls --------------------------------------------------------------------------------------------------

    def _handler(self, rpc: Rpc) -> Any:
        async def serve_one(messages: Any, context: Any) -> bytes:
            return await self._serve_one(RpcCall(self, rpc), context)

        # NOTE: a call of one message is read as a stream, so that its time can be bounded.
        if rpc.is_stream or rpc.is_watch:
            serve = self._serve_stream if rpc.is_stream else self._serve_watch
            return grpc.stream_stream_rpc_method_handler(partial(serve, rpc))
        return grpc.stream_unary_rpc_method_handler(serve_one)

    def _enter(self, call: RpcCall, context: Any) -> bool:
        """Admit the call if there is room, which it takes until its answer is sent; returns whether there was."""
        try:
            self.limits.enter(call, context.peer())
        except Overloaded as error:
            call.call.done(error)
            return False

        def leave(_: Any) -> None:
            self.limits.leave(call)
            call.release()

        # NOTE: a callback of the context would make a reference cycle, which keeps it until garbage collection.
        task: Any = asyncio.current_task()
        task.add_done_callback(leave)
        return True

    async def _serve_one(self, call: RpcCall, context: Any) -> bytes:
        if self._enter(call, context):
            task: Any = asyncio.current_task()
            self.limits.begin_reading(call, task.cancel)
            try:
                data = await context.read()
                self.limits.end_reading(call)
                await call.receive(data, context)
                del data  # NOTE: grpc keeps this frame with an error until garbage collection
            except asyncio.CancelledError:
                if call.refusal is None:
                    raise  # its client is gone
                call.call.done(call.refusal)
        answer = await call.future
        return await self._reply(call, answer, context)

    async def _reply(self, call: RpcCall, answer: WireAnswer, context: Any) -> bytes:
        self.count(call, answer)
        if answer.outcome == Overloaded.code and answer.code is not None and call in self.limits.calls:
            await self._pace(call, context)
        call.answered_at = monotonic()  # NOTE: grpc sends it in this task, which ends when the client has read it
        if answer.code is not None:
            await _abort(context, answer)
        if call in self.limits.calls:
            call.hold(len(answer.data))
        if answer.headers:
            context.set_trailing_metadata(tuple((name.lower(), value) for name, value in answer.headers.items()))
        if answer.is_compressed:
            context.set_compression(grpc.Compression.Gzip)
            await context.send_initial_metadata(())  # NOTE: with those that it sends by itself, grpc forgets the coding
        return answer.data

    async def _pace(self, call: RpcCall, context: Any) -> None:
        """Wait until the call's refusal is due."""
        call.hold(-call.call.size)  # its message is gone
        assert call.peer is not None
        seconds = context.time_remaining()
        delay = self._pacing.delay(call.peer, monotonic(), None if seconds is None else perf_counter() + seconds)
        if delay > 0.0:
            await asyncio.sleep(delay)

    def count(self, call: RpcCall, answer: WireAnswer) -> None:
        """Count the call's request."""
        seconds = monotonic() - call.call.began
        self.counters.add(call.rpc.label, answer.outcome, seconds, call.call.request_id, call.model)

    async def _serve_stream(self, rpc: Rpc, messages: Any, context: Any) -> None:
        """Run the requests of a stream concurrently and answer them in order."""
        place = RpcCall(self, rpc)
        if not self._enter(place, context):
            await self._reply(place, await place.future, context)
        stream = _RequestStream(self, place, context)
        try:
            reason = await stream.run()
            if reason:
                await context.abort(grpc.StatusCode.UNAVAILABLE, f"the stream {reason}")
        finally:
            await stream.close()

    async def _serve_watch(self, rpc: Rpc, messages: Any, context: Any) -> None:
        """Repeat a call and send each answer that differs. Only the first is counted, and only it can be an error."""
        watch, sent, was_ending = RpcCall(self, rpc), b"", self.is_ending
        data = await self._serve_one(watch, context)
        while True:
            if data != sent:
                watch.answered_at = monotonic()
                await context.write(data)
                sent, watch.answered_at = data, 0.0
            if was_ending:  # NOTE: after the answer that reports it
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the service is ending: watch again")
            await asyncio.wait({self.draining}, timeout=TICK_SECONDS)
            call, was_ending = RpcCall(self, rpc), self.is_ending
            call.call.began = monotonic()
            call.hold(len(watch.watched))
            try:
                call.start(watch.watched, context)
                answer = await call.future
            finally:
                call.release()  # NOTE: its client may leave meanwhile
            data = sent if answer.code else answer.data


class _RequestStream:
    """The requests of one call of ``server``. A reader starts them, and a writer answers them in order.

    ``place`` is the call's room at the server; ``answered_at`` and the bytes of the answer that is written count there.
    """

    def __init__(self, server: RpcServer, place: RpcCall, context: Any) -> None:
        self._server, self._place, self._context = server, place, context
        self._calls: asyncio.Queue[RpcCall | None] = asyncio.Queue()  # in the order of their messages; None ends them
        self._room = asyncio.Semaphore(STREAM_REQUESTS)
        self._unanswered: set[RpcCall] = set()
        self._reading: asyncio.Task[Any] | None = None
        self._writing = server.loop.create_task(self._write())
        self._writing.add_done_callback(lambda _: self._room.release())  # the reader may be waiting for it

    async def run(self) -> str:
        """Read and answer until the client ends the stream. Returns why the server ends it, empty if it does not."""
        reason = await self._read()
        self._calls.put_nowait(None)
        await self._writing
        return reason

    async def close(self) -> None:
        """End both sides, and cancel the requests in work."""
        for task in (self._writing, self._reading):
            if task is not None:
                task.cancel()
                with suppress(BaseException):
                    await task  # NOTE: even if it has ended, or asyncio would log its error
        for call in self._unanswered:
            call.release()

    async def _read(self) -> str:
        server, idle_seconds = self._server, self._server.options.idle_seconds
        while not self._writing.done():
            await self._room.acquire()
            self._reading = reading = server.loop.create_task(self._context.read())
            server.limits.begin_reading(self._place, reading.cancel)
            waiting = {reading, self._writing, server.draining}
            await asyncio.wait(waiting, timeout=idle_seconds or None, return_when=asyncio.FIRST_COMPLETED)
            server.limits.end_reading(self._place)
            if not reading.done():
                return "is ending: open the stream again" if server.is_ending else f"was idle for {idle_seconds:g} s"
            refusal = self._place.refusal
            if refusal is None and reading.result() is grpc.aio.EOF:
                break
            call = RpcCall(server, self._place.rpc)
            call.peer = self._place.peer
            self._unanswered.add(call)
            self._calls.put_nowait(call)
            if refusal is not None:
                call.call.done(refusal)
                break
            await self._enter(call)
            await call.receive(reading.result(), self._context)
        return ""

    async def _enter(self, call: RpcCall) -> None:
        """Wait until all streams of the client together have few enough requests in work."""
        assert call.peer is not None
        room = call.peer.room
        await room.acquire()
        call.future.add_done_callback(lambda _: room.release())

    async def _write(self) -> None:
        place, is_first = self._place, True
        while (call := await self._calls.get()) is not None:
            answer = await call.future
            self._server.count(call, answer)
            call.release()
            self._unanswered.discard(call)
            place.answered_at = monotonic()
            if answer.code is not None:
                await _abort(self._context, answer)
            place.hold(len(answer.data))
            if is_first and call.recipient.compresses:
                self._context.set_compression(grpc.Compression.Gzip)
            is_first = False
            if not answer.is_compressed:
                self._context.disable_next_message_compression()
            await self._context.write(answer.data)
            place.hold(-len(answer.data))
            place.answered_at = 0.0
            self._room.release()


async def _abort(context: Any, answer: WireAnswer) -> None:
    """End the call with the answer's status; raises."""
    await context.abort(grpc.StatusCode[answer.code], answer.text, tuple(answer.headers.items()))


def keep_log_record(record: logging.LogRecord) -> bool:
    """A logging filter that leaves out grpc's records of clients that left before they read their answers."""
    return not record.exc_info or not isinstance(record.exc_info[1], grpc.aio.InternalError)


def _metadata_of(context: Any, arrived: float) -> tuple[dict[str, str], float | None]:
    """Metadata of a call, and milliseconds from ``arrived`` to its deadline; binary metadata is left out."""
    seconds = context.time_remaining()
    fields = joined_fields(context.invocation_metadata())
    return fields, None if seconds is None else max(1000 * (seconds + perf_counter() - arrived), 0.001)
