"""The client for asyncio: ``Client``'s calls as coroutines."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, TypeVar

from torchpipe_client.address import Address
from torchpipe_client.attempts import Attempts, Limits
from torchpipe_client.calls import Call, Infer, InferBatch, InferMany, Ping, only
from torchpipe_client.connection import IDLE_SECONDS
from torchpipe_client.contract import FrameReader, decode_reply, encode_call
from torchpipe_client.errors import (
    BadReply,
    ClientClosed,
    ClientError,
    ConnectionLost,
    InferenceError,
    NotConnected,
    TimedOut,
    ends_connection,
    not_connected,
)
from torchpipe_client.tracing import trace_of
from torchpipe_client.values import Result

T = TypeVar("T")


class AsyncConnection(asyncio.Protocol):
    """A connection. One call at a time; after one that has no whole answer, a cancelled one too, it is closed."""

    def __init__(self, address: Address) -> None:
        self._address, self._sequence = address, 0
        self._transport: Any = None
        self._reader = FrameReader()
        self._answer: asyncio.Future[bytes] | None = None
        self.is_open = True
        self.idle_since = time.monotonic()

    async def exchange(self, call: Call[Any], attempts: Attempts) -> Any:
        """Sends the call's next attempt and returns what the service answered; raises as ``Connection.exchange``."""
        self._sequence = self._sequence % (2**31 - 1) + 1
        frame = encode_call(call.method, self._sequence, call.arguments(attempts.deadline_ms()))
        try:
            answer = decode_reply(call.method, self._sequence, await self._transfer(frame, attempts))
        except InferenceError as error:
            if ends_connection(error):
                self.close()
            raise
        except BaseException:  # a cancellation as well: an answer that comes later must not be the next call's
            self.close()
            raise
        self.idle_since = time.monotonic()
        return answer

    def is_usable(self) -> bool:
        """Whether the service has kept it, as far as the event loop knows."""
        return self.is_open and time.monotonic() - self.idle_since <= IDLE_SECONDS

    def close(self) -> None:
        """May be called again."""
        if self.is_open:
            self.is_open = False
            self._transport.abort()

    async def _transfer(self, frame: bytes, attempts: Attempts) -> bytes:
        loop = asyncio.get_running_loop()
        self._reader, self._answer = FrameReader(), loop.create_future()
        if not self.is_open:
            self._fail(ConnectionLost(f"{self._address} closed the connection before the answer"))
        timer = loop.call_later(attempts.left(), lambda: self._fail(attempts.timed_out()))
        try:
            self._transport.write(frame)
            return await self._answer
        finally:
            timer.cancel()
            self._answer = None

    def _fail(self, error: ClientError) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    # -- what the event loop calls ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():
            self.close()  # nobody asked for it
            return
        try:
            message = self._reader.feed(data)
        except BadReply as error:
            self._fail(error)
            return
        if message is not None:
            self._answer.set_result(message)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        how = "closed the connection" if error is None else f"broke the connection ({error})"
        self._fail(ConnectionLost(f"{self._address} {how} before the answer"))


class AsyncPool:
    """The connections of a client. A call has one for the length of an attempt; those in no use are kept."""

    def __init__(self, address: Address, tls: ssl.SSLContext | None, most: int) -> None:
        self._address, self._tls, self._most = address, tls, most
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots = asyncio.Semaphore(most)
        self._idle: list[AsyncConnection] = []

    @asynccontextmanager
    async def connection(self, attempts: Attempts) -> AsyncIterator[AsyncConnection]:
        """One that no other call has. Raises ``ClientClosed``, ``NotConnected``, ``TimedOut``."""
        await self._take_slot(attempts)
        try:
            connection = self._take_idle() or await self._connect(attempts)
            try:
                yield connection
            finally:
                if connection.is_open and not self._is_closed:
                    self._idle.append(connection)
                else:
                    connection.close()
        finally:
            self._slots.release()

    def close(self) -> None:
        """Closes idle connections now, the others when their calls have ended."""
        self._is_closed = True
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    async def _take_slot(self, attempts: Attempts) -> None:
        loop = asyncio.get_running_loop()
        self._loop = self._loop or loop
        if self._loop is not loop:
            raise RuntimeError("an AsyncClient belongs to the event loop of its first call; make one for each loop")
        if not self._slots.locked():
            await self._slots.acquire()
            return
        try:
            await _within(attempts.left(), self._slots.acquire(), lambda _: self._slots.release())
        except asyncio.TimeoutError:
            most = f"all {self._most} connections were in use for {attempts.timeout:g} s (max_connections)"
            raise TimedOut(most) from None

    def _take_idle(self) -> AsyncConnection | None:
        if self._is_closed:
            raise ClientClosed("the client is closed")
        while self._idle:
            connection = self._idle.pop()  # the one used last: the others grow old and are closed
            if connection.is_usable():
                return connection
            connection.close()
        return None

    async def _connect(self, attempts: Attempts) -> AsyncConnection:
        address, loop = self._address, asyncio.get_running_loop()
        seconds = min(attempts.connect_timeout, attempts.left())
        opening = loop.create_connection(lambda: AsyncConnection(address), address.host, address.port, ssl=self._tls)
        try:
            _, connection = await _within(seconds, opening, lambda made: made[1].close())
        except asyncio.TimeoutError:
            raise NotConnected(f"cannot connect to {address}: no answer within {seconds:.3g} s") from None
        except OSError as error:
            raise not_connected(address, error) from error
        return connection


async def _within(seconds: float, work: Coroutine[Any, Any, T], undo: Callable[[T], object]) -> T:
    """What ``work`` makes; ``asyncio.TimeoutError`` after so many seconds. What it makes in vain goes to ``undo``.

    NOTE: before Python 3.12 ``asyncio.wait_for`` forgets a cancellation that comes together with the result.
    """
    task = asyncio.ensure_future(work)

    def end(task: asyncio.Task[T]) -> None:
        if not task.cancelled() and task.exception() is None:
            undo(task.result())

    try:
        if not (await asyncio.wait({task}, timeout=seconds))[0]:
            raise asyncio.TimeoutError
    except BaseException:
        task.cancel()
        task.add_done_callback(end)
        raise
    return task.result()


class AsyncClient:
    """``Client`` for asyncio: the same arguments, and the same calls as coroutines, for any number of a loop's tasks.

    A call that is cancelled closes its connection, and the service computes it no more if it still waits there.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout: float = 30.0,
        connect_timeout: float = 5.0,
        retries: int = 3,
        idempotent: bool = True,
        max_connections: int = 64,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Connects to nobody yet. Raises ``ValueError`` for an address without a port, and for times of 0 or less."""
        self._address = Address.parse(address)
        self._limits = Limits(timeout, connect_timeout, retries, idempotent, max_connections)
        self._pool = AsyncPool(self._address, tls, max_connections)

    async def ping(self, *, timeout: float | None = None) -> None:
        """Returns when the service has answered."""
        await self._run(Ping(), self._limits.attempts(timeout, None))

    async def infer_batch(
        self, image: bytes, *, timeout: float | None = None, uuid: str = "", traceparent: str | None = None
    ) -> Result:
        """Label and score of one encoded image. As part of a trace it is sent as an ``infer_many`` of one image."""
        trace = trace_of(traceparent)
        attempts = self._limits.attempts(timeout, None)
        if trace.parent:
            return only(await self._run(InferMany((image,), uuid, attempts.may_repeat, trace), attempts))
        return await self._run(InferBatch(image, uuid), attempts)

    async def infer_many(
        self,
        images: Iterable[bytes],
        *,
        deadline_ms: int | None = None,
        timeout: float | None = None,
        uuid: str = "",
        traceparent: str | None = None,
    ) -> list[Result | InferenceError]:
        """A result, or the error in its place, for each of the encoded images; raises where none has an outcome."""
        attempts = self._limits.attempts(timeout, deadline_ms)
        return await self._run(InferMany(images, uuid, attempts.may_repeat, trace_of(traceparent)), attempts)

    async def infer(
        self,
        inputs: Mapping[str, Any],
        *,
        outputs: Iterable[str] | None = None,
        node_name: str | None = None,
        deadline_ms: int | None = None,
        timeout: float | None = None,
        uuid: str = "",
        traceparent: str | None = None,
    ) -> dict[str, Any]:
        """Any pipeline, as ``Client.infer``."""
        attempts = self._limits.attempts(timeout, deadline_ms)
        return await self._run(Infer(inputs, outputs, node_name, uuid, trace_of(traceparent)), attempts)

    async def close(self) -> None:
        """Calls under way end as they would; those that come later raise ``ClientClosed``. May be called again."""
        self._pool.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._address)!r})"

    async def _run(self, call: Call[T], attempts: Attempts) -> T:
        while True:
            try:
                async with self._pool.connection(attempts) as connection:
                    error = call.take(await connection.exchange(call, attempts))
            except ClientError as failure:
                error = failure
            delay = None if error is None else attempts.delay_after(error)
            if delay is None:
                return call.result(error)
            await asyncio.sleep(delay)
