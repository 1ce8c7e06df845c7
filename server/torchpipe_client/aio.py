"""The client for asyncio: ``Client``'s calls as coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from torchpipe_client.client import BaseClient, Client
from torchpipe_client.connection import BaseConnection, BasePool
from torchpipe_client.contract import FrameReader, decode_reply
from torchpipe_client.core import Address, Attempts, Call
from torchpipe_client.errors import BadReply, ClientError, ConnectionLost, NotConnected, not_connected

P = ParamSpec("P")
T = TypeVar("T")


class AsyncConnection(BaseConnection, asyncio.Protocol):
    """A connection; cancelling its call closes it."""

    def __init__(self, address: Address) -> None:
        super().__init__(address)
        self._transport: Any = None
        self._reader = FrameReader()
        self._answer: asyncio.Future[bytes] | None = None

    async def exchange(self, call: Call[Any]) -> ClientError | None:
        """Like ``Connection.exchange``."""
        frame = self._encode(call)
        with self._exchanging():
            message = await self._transfer(frame, call.attempts)
            return call.take(decode_reply(call.method, self._sequence, message))

    def close(self) -> None:
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
            self.close()  # no call is waiting
            return
        try:
            if (message := self._reader.feed(data)) is not None:
                self._answer.set_result(message)
        except BadReply as error:
            self._fail(error)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        how = "closed the connection" if error is None else f"broke the connection ({error})"
        self._fail(ConnectionLost(f"{self._address} {how} before the answer"))


class AsyncPool(BasePool[AsyncConnection]):
    """Connections for the tasks of one event loop."""

    _loop: asyncio.AbstractEventLoop | None = None
    _slots: asyncio.Semaphore

    @asynccontextmanager
    async def connection(self, attempts: Attempts) -> AsyncIterator[AsyncConnection]:
        """A connection for one call. Raises ``ClientClosed``, ``NotConnected``, ``TimedOut``."""
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop, self._slots = loop, asyncio.Semaphore(self._most)
        if self._loop is not loop:
            raise RuntimeError("an AsyncClient belongs to the event loop of its first call; make one for each loop")
        if not self._slots.locked():
            await self._slots.acquire()
        else:
            try:
                await _within(attempts.left(), self._slots.acquire(), lambda _: self._slots.release())
            except asyncio.TimeoutError:
                raise attempts.no_connection() from None
        try:
            connection = self._take_idle() or await self._connect(attempts)
            try:
                yield connection
            finally:
                self._put_back(connection)
        finally:
            self._slots.release()

    async def _connect(self, attempts: Attempts) -> AsyncConnection:
        address, loop = self._address, asyncio.get_running_loop()
        seconds = min(attempts.limits.connect_timeout, attempts.left())
        opening = loop.create_connection(lambda: AsyncConnection(address), address.host, address.port, ssl=self._tls)
        try:
            _, connection = await _within(seconds, opening, lambda made: made[1].close())
        except asyncio.TimeoutError:
            raise NotConnected(f"cannot connect to {address}: no answer within {seconds:.3g} s") from None
        except OSError as error:
            raise not_connected(address, error) from error
        return connection


async def _within(seconds: float, work: Coroutine[Any, Any, T], undo: Callable[[T], object]) -> T:
    """The result of ``work``; ``asyncio.TimeoutError`` after ``seconds``, and a later result goes to ``undo``.

    NOTE: before Python 3.12 ``asyncio.wait_for`` loses a cancellation that coincides with the result.
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


def _coroutine(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """A method of ``Client`` as a coroutine: ``_run``, whose result it returns, is a coroutine here."""

    @wraps(method)
    async def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        return await method(self, *args, **kwargs)  # type: ignore[misc,no-any-return]

    return call  # type: ignore[return-value]


class AsyncClient(BaseClient[AsyncPool]):
    """``Client`` for asyncio: the same arguments, and calls as coroutines, for any number of tasks of one loop.

    Cancelling a call closes its connection, and the service drops it if it is still queued there.
    """

    _pool_class = AsyncPool

    ping = _coroutine(Client.ping)
    infer_batch = _coroutine(Client.infer_batch)
    infer_many = _coroutine(Client.infer_many)
    infer = _coroutine(Client.infer)

    async def close(self) -> None:
        """Let running calls finish; later ones raise ``ClientClosed``. May be called again."""
        self._pool.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _run(self, call: Call[T]) -> T:
        while True:
            try:
                async with self._pool.connection(call.attempts) as connection:
                    error = await connection.exchange(call)
            except ClientError as failure:
                error = failure
            delay = None if error is None else call.attempts.delay_after(error)
            if delay is None:
                return call.result(error)
            await asyncio.sleep(delay)
