"""A pipe that answers requests and can be exchanged meanwhile. Nothing here knows Ray."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, NamedTuple

from torchpipe_py.errors import DeadlineExceeded, TorchpipeError, counted, log_failure
from torchpipe_py.ray.arguments import Arguments
from torchpipe_py.runtime.deadlines import Deadlines
from torchpipe_py.runtime.pipe import pipe
from torchpipe_py.wire.answers import failure, to_line
from torchpipe_py.wire.errors import Bound, RequestTooLargeError, RouteError, reason
from torchpipe_py.wire.infer import answer_of, read_request

logger = logging.getLogger("torchpipe_py")

PATH = "/infer"


class Answer(NamedTuple):
    """``body`` is JSON."""

    status: int
    body: bytes
    headers: Mapping[str, str]


class UnhealthyError(TorchpipeError, RuntimeError):
    """A pipe that must be replaced."""

    code = "unavailable"


class Served:
    """A pipe, and the requests that it has. For one event loop."""

    def __init__(self, run: pipe, deadline_ms: float) -> None:
        self.pipe, self.deadlines = run, Deadlines(run, deadline_ms)
        self._requests = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def call(self, data: dict[str, Any], deadline_ms: float | None) -> dict[str, Any]:
        """Run a request; cancelled, it is dropped from its queue."""
        self._requests += 1
        self._idle.clear()
        try:
            seconds = self.deadlines.seconds(deadline_ms)
            if seconds is None:
                return await self.pipe.acall(data)
            return await asyncio.wait_for(self.pipe.acall(data, seconds), seconds)
        except DeadlineExceeded:
            raise
        except asyncio.TimeoutError:
            raise DeadlineExceeded(f"not finished within {seconds} s") from None
        finally:
            self._requests -= 1
            if not self._requests:
                self._idle.set()

    async def end(self, seconds: float) -> None:
        """Let its requests finish, then close the pipe."""
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except asyncio.TimeoutError:
            logger.warning("%s not finished after %g s", counted(self._requests, "request"), seconds)
        await asyncio.get_running_loop().run_in_executor(None, self.pipe.close, seconds)


class Service:
    """What a replica does. ``build`` makes a pipe; it may take long."""

    def __init__(self, build: Callable[[], pipe], arguments: Arguments) -> None:
        self._arguments = arguments
        self._text = Bound(arguments.max_text_bytes, "max_text_bytes")
        self._reply = Bound(arguments.max_reply_bytes, "max_reply_bytes")
        self._served = Served(build(), arguments.deadline_ms)
        self._is_at_work = False  # from the first check on, which Serve makes before it sends requests

    @property
    def current(self) -> pipe:
        """The pipe that takes new requests."""
        return self._served.pipe

    async def infer(self, given: Any, deadline_ms: float | None = None) -> Any:
        """The result of one request: bytes, a Mat, a tensor. A dict with ``data`` comes back, with what was added.

        Raises what keeps the result from being there.
        """
        if isinstance(given, dict):
            return await self._served.call(given, deadline_ms)
        data = await self._served.call({"data": given}, deadline_ms)
        if "result" not in data:
            raise reason(data, "result")
        return data["result"]

    async def answer(
        self, method: str, path: str, query: str, fields: Mapping[str, str], body: AsyncIterator[bytes]
    ) -> Answer:
        """What an HTTP request gets; every error is one."""
        try:
            if path.rstrip("/") != PATH:
                raise RouteError(f"no {path[:80]}; there is {PATH}")
            if method != "POST":
                raise RouteError(f"{PATH} takes POST, not {method[:20]}", ["POST"])
            asked = read_request(await self._read(body), query, fields, self._text)
            data = await self._served.call(asked.data, asked.deadline_ms)
            return Answer(200, answer_of(data, asked, self._reply), {})
        except Exception as error:
            failed = failure(error)
            return Answer(failed.status, to_line(failed.body), failed.headers)

    async def _read(self, body: AsyncIterator[bytes]) -> bytes:
        most = self._arguments.max_message_bytes
        read = bytearray()
        async for piece in body:
            read += piece
            if len(read) > most:
                raise RequestTooLargeError(f"a body of more than {most} bytes (max_message_bytes)")
        return bytes(read)

    def check(self) -> None:
        """Raises ``UnhealthyError`` that names a node with a dead instance, or with a batch that does not end."""
        self._is_at_work = True
        most = self._arguments.hang_seconds
        for name, node in self.current.stats()["nodes"].items():
            dead = node["instances"] - node["alive"]
            if dead:
                raise UnhealthyError(f"node {name!r}: {dead} of {node['instances']} instances are dead")
            if 0 < most < node["oldest_batch_s"]:
                raise UnhealthyError(
                    f"node {name!r}: a batch runs for {node['oldest_batch_s']:.0f} s, more than hang_seconds = {most:g}"
                )

    async def exchange(self, build: Callable[[], pipe | None]) -> None:
        """Build another pipe, let it take new requests, and end the old one once its requests are finished.

        Nothing is exchanged where ``build`` gives none, or raises. That is raised at the start; of a pipe that is at
        work Serve would end the replica for it, and have none that can be started: then it is a line in the log.
        """
        try:
            run = await asyncio.get_running_loop().run_in_executor(None, build)
        except Exception as error:
            if not self._is_at_work:
                raise
            log_failure("the configuration cannot be exchanged; the one before stays", error)
            return
        if run is None:
            return
        before, self._served = self._served, Served(run, self._arguments.deadline_ms)
        await before.end(self._arguments.drain_seconds)

    async def end(self) -> None:
        """Finish what was accepted, and close the pipe."""
        await self._served.end(self._arguments.drain_seconds)
