"""A pipe that answers requests and can be exchanged at run time: a replica, without the parts specific to Ray."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

from torchpipe_py import DeadlineExceeded, TorchpipeError, parse_toml, pipe
from torchpipe_py.ray.arguments import Arguments, found_folder, overridden, read_user_config
from torchpipe_py.ray.resources import plan_replica
from torchpipe_py.serving import (
    SMALL_BYTES,
    Bound,
    Cancellable,
    Done,
    HttpAnswer,
    HttpRequest,
    Inference,
    ReplyTooLargeError,
    RequestTooLargeError,
    Routes,
    RpcRequest,
    Served,
    Tables,
    compression,
    counted,
    failure,
    import_all,
    json_answer,
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


class ServedPipe:
    """A pipe, its routes, and its running requests. For one event loop."""

    def __init__(self, run: pipe, usual: Inference) -> None:
        self.pipe, self.deadlines = run, usual.deadlines
        rpcs = usual.rpcs() if find_spec("grpc") else ()
        served = _traced(timed(Served({}, Routes(usual.routes), rpcs), run), run)
        self.routes, self.rpcs = served.routes, {rpc.path: rpc.method for rpc in served.rpcs}
        self._requests = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def finished(
        self, start: Callable[[Any, Done], Cancellable | None], args: Any, reader: Executor | None = None
    ) -> Any:
        """Wait for the outcome of a method, and raise it if it is an error. A late or cancelled request is dropped.

        With a ``reader``, ``start`` runs on its thread, since it takes long.
        """
        result: Future[Any] = Future()

        def done(outcome: Any) -> None:
            if result.set_running_or_notify_cancel():  # unless cancelled
                result.set_result(outcome)

        self._requests += 1
        self._idle.clear()
        ticket = None
        try:
            ticket = start(args, done) if reader is None else await _started(reader, start, args, done)
            waiting = asyncio.wrap_future(result)
            if ticket is not None and ticket.deadline is not None:
                await asyncio.wait([waiting], timeout=max(0.0, ticket.deadline - perf_counter()))
                ticket.cancel(DeadlineExceeded("not finished by its deadline"))  # no effect if it is finished
            outcome = await waiting
        finally:
            if ticket is not None:
                ticket.cancel()  # if this call was cancelled
            self._requests -= 1
            if not self._requests:
                self._idle.set()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    async def end(self, seconds: float) -> None:
        """Let its requests finish, then close the pipe."""
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except asyncio.TimeoutError:
            logger.warning("%s not finished after %g s", counted(self._requests, "request"), seconds)
        await asyncio.get_running_loop().run_in_executor(None, self.pipe.close, seconds)


async def _started(reader: Executor, start: Callable[[Any, Done], Cancellable | None], args: Any, done: Done) -> Any:
    """The ticket of a method that ``reader`` starts. If this is cancelled meanwhile, so is the ticket."""

    def drop(reading: Future[Cancellable | None]) -> None:
        ticket = None if reading.cancelled() or reading.exception() else reading.result()
        if ticket is not None:
            ticket.cancel()

    reading = reader.submit(start, args, done)
    try:
        return await asyncio.wrap_future(reading)
    except asyncio.CancelledError:
        reading.add_done_callback(drop)
        raise


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
        os.chdir(found_folder(arguments.config, folder))
        import_all(arguments.import_code)
        self._served = self._serve(arguments.config, tables)
        self._reader = ThreadPoolExecutor(1, "torchpipe-reader")
        self._writer = ThreadPoolExecutor(1, "torchpipe-writer")  # so that compression takes one core at most
        self._inflating = compression.InflateQueue(self._reader)
        self._is_at_work = False  # set by the first check, which Serve makes before it sends requests

    def _serve(self, config: str, tables: Tables) -> ServedPipe:
        run, given = pipe(plan_replica(tables)), self._arguments
        run.limit_delays(None if given.queue_target_ms < 0 else given.queue_target_ms / 1000)
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

        if isinstance(given, dict):
            return await served.finished(start, given)
        return output_of(await served.finished(start, {"data": given}), "result")

    async def answer(self, request: HttpRequest, body: AsyncIterator[bytes]) -> HttpAnswer:
        """The answer to an HTTP request whose body is still to be read; every error is an answer."""
        read = bytearray()
        try:
            async for piece in body:
                read += piece
                check_size(len(read), self._message)
            request.body, request.arrived = bytes(read), perf_counter()
            served = self._served  # NOTE: read it now: it may have been exchanged
            route, request.parameters = served.routes.find(request)
            inflater = compression.inflater_of(request, self._message)
            if inflater is not None:
                if not inflater.step(SMALL_BYTES):
                    await self._inflating.finish(inflater)
                request.inflated(inflater.take())
            takes_long = route.method.takes_long
            reader = self._reader if takes_long is not None and takes_long(request) else None
            answer: HttpAnswer = await served.finished(route.method.start, request, reader)
            if answer.make is not None:
                answer = await asyncio.get_running_loop().run_in_executor(None, answer.made)
            if len(answer.body) > self._reply.bytes:
                raise ReplyTooLargeError(len(answer.body), self._reply)
            accepted = request.fields.get("accept-encoding", "")
            if len(answer.body) > SMALL_BYTES and accepted:
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._writer, compression.compressed, answer, accepted)
            return compression.compressed(answer, accepted)
        except Exception as error:
            failed = failure(error)
            return json_answer(failed.body, failed.status, failed.headers)

    async def rpc(self, path: str, data: bytes, fields: Mapping[str, str]) -> Any:
        """The ``WireAnswer`` to a message over gRPC with this metadata; every error is an answer."""
        from torchpipe_py.serving import WireAnswer, parse_message

        served = self._served
        method = served.rpcs[path]
        try:
            check_size(len(data), self._message)
            message = parse_message(method.args, data, MOST_FIELDS, self._text)
            result = await served.finished(method.start, RpcRequest(message, fields))
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
        """Finish accepted requests, and close the pipe."""
        await self._served.end(self._arguments.drain_seconds)
        for executor in (self._reader, self._writer):
            executor.shutdown(wait=False)

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
