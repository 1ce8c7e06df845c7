"""A pipe that answers requests and can be exchanged at run time: a replica, without the parts specific to Ray."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

from torchpipe_py import DeadlineExceeded, Overloaded, PipeClosed, TorchpipeError, parse_toml, pipe
from torchpipe_py.ray.arguments import Arguments, found_folder, overridden, read_user_config
from torchpipe_py.ray.resources import plan_replica
from torchpipe_py.serving import (
    SMALL_BYTES,
    UNREAD,
    Bound,
    Call,
    Cancellable,
    Done,
    HttpAnswer,
    HttpRequest,
    Inference,
    LongMessages,
    Method,
    QueueTarget,
    ReplyTooLargeError,
    RequestTooLargeError,
    Routes,
    RpcRequest,
    Served,
    Tables,
    call_from_any_thread,
    compression,
    counted,
    deadline_ms_of,
    failure,
    import_all,
    json_answer,
    limited_ms,
    log_failure,
    logger,
    output_of,
    priority_in,
    timed,
)

MOST_FIELDS = 2**12
"""Maximum fields of a gRPC message, the default of ``torchpipe-serve``."""


class UnhealthyError(TorchpipeError, RuntimeError):
    """A pipe that must be replaced."""

    code = "unavailable"


class AwaitedCall:
    """A call that a coroutine awaits. It has up to three outcomes, one after the other: that a long body is inflated,
    the result, and a long answer as it is sent. An error in place of one is the last.
    """

    def __init__(self, message: Any) -> None:
        self.loop = asyncio.get_running_loop()
        self.call = Call(self, message)
        self._outcomes: asyncio.Queue[Any] = asyncio.Queue()

    def reply(self, call: Call, result: Any) -> None:
        """Pass the result, or the exception in its place, to the loop; for any thread."""
        call_from_any_thread(self.loop, self._outcomes.put_nowait, result)

    def inflate(self, inflating: Coroutine[Any, Any, None]) -> None:
        """Inflate a long body in a task, which ends with the call. The next outcome is ``None``, or its error."""

        def inflated(task: asyncio.Task[None]) -> None:
            self.call.inflating = None
            if not task.cancelled():
                self._outcomes.put_nowait(task.exception())

        self.call.inflating = self.loop.create_task(inflating)
        self.call.inflating.add_done_callback(inflated)

    def refuse(self, error: BaseException) -> None:
        """Make the error its next outcome."""
        self._outcomes.put_nowait(error)

    async def outcome(self) -> Any:
        """Wait for the next outcome, and raise it if it is an error."""
        outcome = await self._outcomes.get()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


class ServedPipe:
    """A pipe, its routes, and its running requests. For one event loop."""

    def __init__(self, run: pipe, usual: Inference) -> None:
        self.pipe, self.deadlines = run, usual.deadlines
        rpcs = usual.rpcs() if find_spec("grpc") else ()
        served = _traced(timed(Served({}, Routes(usual.routes), rpcs), run), run)
        self.routes, self.rpcs = served.routes, {rpc.path: rpc.method for rpc in served.rpcs}
        self._calls: set[AwaitedCall] = set()
        self._is_closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def calling(self, message: Any = None) -> Iterator[AwaitedCall]:
        """A call of one of its methods. Leaving it by an exception, as if it is cancelled, drops the request.

        Raises ``PipeClosed`` after ``end``.
        """
        if self._is_closed:
            raise PipeClosed("the pipe is closed")
        awaited = AwaitedCall(message)
        self._calls.add(awaited)
        self._idle.clear()
        try:
            yield awaited
            awaited.call.settle()
        finally:
            awaited.call.cancel()  # no effect after its answer
            self._calls.discard(awaited)
            if not self._calls:
                self._idle.set()

    async def finished(self, method: Method, args: Any) -> Any:
        """Wait for the outcome of a method, and raise it if it is an error. A late or cancelled request is dropped."""
        with self.calling() as awaited:
            awaited.call.start(awaited.loop, method, args, False)
            return await awaited.outcome()

    async def end(self, seconds: float) -> None:
        """Let its requests finish, for at most ``seconds``; then refuse those that are left, and close the pipe."""
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except asyncio.TimeoutError:
            logger.warning("%s not finished after %g s", counted(len(self._calls), "request"), seconds)
        self._is_closed = True
        for awaited in self._calls:
            awaited.refuse(PipeClosed(f"the pipe is closed: not finished within {seconds:g} s (drain_seconds)"))
        await asyncio.get_running_loop().run_in_executor(None, self.pipe.close, seconds)


class HeldBytes:
    """Bytes that unanswered requests and their answers keep in memory. For one event loop."""

    def __init__(self, most: Bound) -> None:
        self._most, self._size = most, 0

    @contextmanager
    def hold(self) -> Iterator[Hold]:
        """The share of one request, which is released at the end."""
        hold = Hold(self)
        try:
            yield hold
        finally:
            self._size -= hold.size

    def add(self, size: int) -> None:
        """Count ``size`` more bytes, fewer if it is negative. Raises ``Overloaded`` if there is no room for more."""
        self._size += size
        if size > 0 and self._size > self._most.bytes:
            raise Overloaded(f"more than {self._most.bytes} bytes of unanswered messages ({self._most.name})", 1000)


class Hold:
    """The bytes that one request keeps in memory."""

    def __init__(self, held: HeldBytes) -> None:
        self._held, self.size = held, 0

    def resize(self, size: int) -> None:
        """Have it count ``size`` bytes. Raises ``Overloaded`` if there is no room for them."""
        before, self.size = self.size, size
        self._held.add(size - before)


def _traced(served: Served, run: pipe) -> Served:
    """``served`` with spans, if the process exports any, as Ray does if its tracing is on."""
    trace: Any = sys.modules.get("opentelemetry.trace")
    provider = trace and trace.get_tracer_provider()
    if trace is None or isinstance(provider, trace.ProxyTracerProvider):
        return served
    from torchpipe_py.methods import tracing

    tracing.keep_fields_out_of_the_log()
    run.instrument(provider, starts_traces=False)
    return tracing.traced(served, provider, 0.0, "torchpipe_py.ray")


class PipeReplica:
    """A replica: one pipe, which forms the batches. ``serve.batch`` would form them twice.

    ``tables`` are the configuration that ``app`` read in ``folder``.
    """

    def __init__(self, arguments: Arguments, tables: Tables, folder: str) -> None:
        self._arguments, self._tables, self._folder = arguments, tables, folder
        names = ("max_message_bytes", "max_text_bytes", "max_reply_bytes")
        self._message, self._text, self._reply = (Bound(getattr(arguments, name), name) for name in names)
        self._held = HeldBytes(Bound(arguments.max_held_bytes, "max_held_bytes"))
        os.chdir(found_folder(arguments.config, folder))
        import_all(arguments.import_code)
        self._served = self._serve(arguments.config, tables)
        target = QueueTarget()
        target.set(self._queue_target)
        self._long_messages = LongMessages(target)
        self._inflating = compression.InflateQueue(self._long_messages.executor)
        self._writer = ThreadPoolExecutor(1, "torchpipe-writer")  # so that images and compression take one core at most
        self._is_at_work = False  # set by the first check, which Serve makes before it sends requests

    @property
    def _queue_target(self) -> float | None:
        """Seconds that a request without a deadline may wait; ``None`` for the default."""
        milliseconds = self._arguments.queue_target_ms
        return None if milliseconds < 0 else milliseconds / 1000

    def _serve(self, config: str, tables: Tables) -> ServedPipe:
        run, given = pipe(plan_replica(tables)), self._arguments
        run.limit_delays(self._queue_target)
        usual = Inference(
            run, Path(config).stem, given.deadline_ms, given.max_batch, self._text, self._reply,
            forward_headers=given.forward_headers,
        )  # fmt: skip
        return ServedPipe(run, usual)

    async def infer(self, given: Any, deadline_ms: float | None = None) -> Any:
        """The result of one request: bytes, a Mat or a tensor. For a dict with ``data``, that dict with its outputs.

        Raises the error that prevented the result.
        """
        served = self._served

        def start(data: dict[str, Any], done: Done) -> Cancellable:
            seconds = served.deadlines.admit(deadline_ms, priority_in(data), data.get("node_name"))
            return served.pipe.dispatch(data, lambda data, error: done(data if error is None else error), seconds)

        method = Method(dict, start)
        if isinstance(given, dict):
            return await served.finished(method, given)
        return output_of(await served.finished(method, {"data": given}), "result")

    async def answer(self, request: HttpRequest, body: AsyncIterator[bytes]) -> HttpAnswer:
        """The answer to an HTTP request whose body is still to be read; every error is an answer."""
        with self._held.hold() as hold:
            try:
                return await self._answered(request, body, hold)
            except Exception as error:
                failed = failure(error)
                return json_answer(failed.body, failed.status, failed.headers)

    async def _answered(self, request: HttpRequest, body: AsyncIterator[bytes], hold: Hold) -> HttpAnswer:
        """The answer; raises the error in place of it."""
        read = bytearray()
        async for piece in body:
            read += piece
            check_size(len(read), self._message)
            hold.resize(len(read))
        request.body, request.arrived = bytes(read), perf_counter()
        del read
        served = self._served  # NOTE: read it now: it may have been exchanged
        route, request.parameters = served.routes.find(request)
        inflater = compression.inflater_of(request, self._message)
        method = route.method
        with served.calling(request) as awaited:
            if inflater is not None:
                await self._inflate(awaited, request, inflater, hold)
            if method.takes_long is not None and method.takes_long(request):
                seconds = self._seconds_left(request)
                awaited.call.start_aside(awaited.loop, self._long_messages, method, request, seconds, False)
            else:
                awaited.call.start(awaited.loop, method, request, False)
            answer: HttpAnswer = await awaited.outcome()
            accepted = request.fields.get("accept-encoding", "")
            if answer.make is None and (len(answer.body) <= SMALL_BYTES or not compression.coding_of(answer, accepted)):
                return self._made(answer, accepted)
            hold.resize(hold.size + answer.held_bytes)
            make = partial(self._make, awaited.call, answer, accepted)
            awaited.call.write_aside(self._writer, answer.held_bytes, make)
            made: HttpAnswer = await awaited.outcome()
            return made

    async def _inflate(
        self, awaited: AwaitedCall, request: HttpRequest, inflater: compression.Inflater, hold: Hold
    ) -> None:
        """Inflate the body, a long one on another thread within the request's deadline."""
        if not inflater.step(SMALL_BYTES):
            awaited.inflate(self._inflating.finish(inflater, hold.resize))
            try:
                await asyncio.wait_for(awaited.outcome(), self._seconds_left(request))
            except asyncio.TimeoutError:
                raise DeadlineExceeded(UNREAD) from None
        request.inflated(inflater.take())
        hold.resize(request.size)

    def _seconds_left(self, request: HttpRequest) -> float | None:
        """Seconds to the request's deadline, as far as that is known before its body is read."""
        limit = limited_ms(deadline_ms_of(request), self._arguments.deadline_ms)
        return None if limit is None else limit / 1000 - (perf_counter() - (request.arrived or 0.0))

    def _make(self, call: Call, answer: HttpAnswer, accepted: str) -> None:
        """Make and compress the body of an answer, which is the call's next outcome; for any thread."""
        try:
            outcome: Any = self._made(answer, accepted)
        except BaseException as error:  # others' answers wait
            outcome = error
        call.done(outcome)

    def _made(self, answer: HttpAnswer, accepted: str) -> HttpAnswer:
        answer = answer.made()
        if len(answer.body) > self._reply.bytes:
            raise ReplyTooLargeError(len(answer.body), self._reply)
        return compression.compressed(answer, accepted)

    async def rpc(self, path: str, data: bytes, fields: Mapping[str, str]) -> Any:
        """The ``WireAnswer`` to a message over gRPC with this metadata; every error is an answer."""
        from torchpipe_py.serving import WireAnswer, parse_message

        served = self._served
        method = served.rpcs[path]
        try:
            check_size(len(data), self._message)
            with self._held.hold() as hold:
                hold.resize(len(data))
                message = parse_message(method.args, data, MOST_FIELDS, self._text)
                result = await served.finished(method, RpcRequest(message, fields))
        except Exception as error:
            result = error
        return WireAnswer.of(method, result, self._reply)

    async def stats(self) -> dict[str, Any]:
        """``pipe.stats()`` of this replica."""
        return self._served.pipe.stats()

    def check(self) -> None:
        """Raise ``UnhealthyError``, which names the node, for a dead instance or a batch that does not end."""
        self._is_at_work = True
        most = self._arguments.hang_seconds
        for name, node in self._served.pipe.stats()["nodes"].items():
            dead, age = node["instances"] - node["alive"], node["oldest_batch_s"]
            if dead:
                raise UnhealthyError(f"node {name!r}: {dead} of {node['instances']} instances are dead")
            if 0 < most < age:
                raise UnhealthyError(f"node {name!r}: a batch runs for {age:.0f} s, more than hang_seconds = {most:g}")

    async def reconfigure(self, user_config: Any) -> None:
        """Exchange the pipe for that of another file, or of other values; no request is lost.

        A pipe that cannot be built is an error at the start of a replica. Later it is only logged, and the previous
        pipe stays: on an error Serve would end the replica and could start no other.
        """
        try:
            served = await asyncio.get_running_loop().run_in_executor(None, self._rebuilt, user_config)
        except Exception as error:
            if not self._is_at_work:
                raise
            log_failure("the configuration cannot be exchanged; the previous one stays", error)
            return
        if served is not None:
            before, self._served = self._served, served
            await before.end(self._arguments.drain_seconds)

    async def end(self) -> None:
        """Finish accepted requests, for at most ``drain_seconds``, refuse those that are left, and close the pipe."""
        await self._served.end(self._arguments.drain_seconds)
        self._long_messages.close()
        self._writer.shutdown(wait=False)

    def _rebuilt(self, user_config: Any) -> ServedPipe | None:
        """A pipe for the changed configuration; ``None`` if nothing changed."""
        config, overrides = read_user_config(user_config, self._arguments)
        before = os.getcwd()
        try:
            os.chdir(found_folder(config, self._folder))
            tables = overridden(parse_toml(config), overrides)
            served = None if tables == self._tables else self._serve(config, tables)
        except BaseException:
            os.chdir(before)  # the previous pipe stays
            raise
        self._tables = tables
        return served


def check_size(size: int, most: Bound) -> None:
    """Raise ``RequestTooLargeError`` if a body or gRPC message has more bytes."""
    if size > most.bytes:
        raise RequestTooLargeError(f"a body of more than {most.bytes} bytes ({most.name})")
