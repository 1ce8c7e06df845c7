"""A pipe that answers requests and can be exchanged meanwhile: a replica, without what only Ray has."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple

from torchpipe_py.errors import DeadlineExceeded, TorchpipeError, counted, log_failure
from torchpipe_py.plan.config import Tables, parse_toml
from torchpipe_py.ray.arguments import Arguments, found_folder, overridden, read_user_config
from torchpipe_py.ray.resources import plan_replica
from torchpipe_py.registry import import_code
from torchpipe_py.runtime.admission import Deadlines
from torchpipe_py.runtime.pipe import pipe
from torchpipe_py.wire.answers import failure, to_line
from torchpipe_py.wire.errors import Bound, RequestTooLargeError, RouteError, reason
from torchpipe_py.wire.infer import answer_of, priority_in, read_request

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


class ServedPipe:
    """A pipe and its running requests. For one event loop."""

    def __init__(self, run: pipe, deadline_ms: float) -> None:
        self.pipe, self._deadlines = run, Deadlines(run, deadline_ms)
        self._requests = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def call(self, data: dict[str, Any], deadline_ms: float | None) -> dict[str, Any]:
        """Run a request; cancelled, it is dropped from its queue."""
        self._requests += 1
        self._idle.clear()
        try:
            seconds = self._deadlines.seconds(deadline_ms, priority_in(data), data.get("node_name"))
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


class PipeReplica:
    """A replica: one pipe, which forms the batches. ``serve.batch`` would form them twice.

    ``tables`` are what ``app`` read in ``folder``.
    """

    def __init__(self, arguments: Arguments, tables: Tables, folder: str) -> None:
        self._arguments, self._tables, self._folder = arguments, tables, folder
        os.chdir(found_folder(arguments.config, folder))
        import_modules(arguments)
        self._served = ServedPipe(pipe(plan_replica(tables)), arguments.deadline_ms)
        self._is_at_work = False  # from the first check on, which Serve makes before it sends requests

    async def infer(self, given: Any, deadline_ms: float | None = None) -> Any:
        """The result of one request: bytes, a Mat, a tensor. A dict with ``data`` comes back, with what was added.

        Raises the error that is there in the place of the result.
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
        """The answer to an HTTP request; every error is an answer."""
        most = self._arguments.max_message_bytes
        try:
            if path.rstrip("/") != PATH:
                raise RouteError(f"no {path[:80]}; there is {PATH}")
            if method != "POST":
                raise RouteError(f"{PATH} takes POST, not {method[:20]}", ["POST"])
            read = bytearray()
            async for piece in body:
                read += piece
                if len(read) > most:
                    raise RequestTooLargeError(f"a body of more than {most} bytes (max_message_bytes)")
            text = Bound(self._arguments.max_text_bytes, "max_text_bytes")
            asked = read_request(bytes(read), query, fields, text)
            data = await self._served.call(asked.data, asked.deadline_ms)
            reply = Bound(self._arguments.max_reply_bytes, "max_reply_bytes")
            return Answer(200, answer_of(data, asked, reply), {})
        except Exception as error:
            failed = failure(error)
            return Answer(failed.status, to_line(failed.body), failed.headers)

    async def stats(self) -> dict[str, Any]:
        """``pipe.stats()`` of this replica."""
        return self._served.pipe.stats()

    def check(self) -> None:
        """Raises ``UnhealthyError`` that names a node with a dead instance, or with a batch that does not end."""
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

        A pipe that cannot be built is an error at the start of a replica. Later it is a line in the log, and the pipe
        before stays: for an error Serve would end the replica, and have none that can be started.
        """
        try:
            run = await asyncio.get_running_loop().run_in_executor(None, self._pipe_for, user_config)
        except Exception as error:
            if not self._is_at_work:
                raise
            log_failure("the configuration cannot be exchanged; the one before stays", error)
            return
        if run is not None:
            before, self._served = self._served, ServedPipe(run, self._arguments.deadline_ms)
            await before.end(self._arguments.drain_seconds)

    async def end(self) -> None:
        """Finish what was accepted, and close the pipe."""
        await self._served.end(self._arguments.drain_seconds)

    def _pipe_for(self, user_config: Any) -> pipe | None:
        """Another pipe; ``None`` where the configuration is the same."""
        config, overrides = read_user_config(user_config, self._arguments)
        before = os.getcwd()
        try:
            os.chdir(found_folder(config, self._folder))
            tables = overridden(parse_toml(config), overrides)
            run = None if tables == self._tables else pipe(plan_replica(tables))
        except BaseException:
            os.chdir(before)  # the pipe before stays
            raise
        self._tables = tables
        return run


def import_modules(arguments: Arguments) -> None:
    """Import the code of the user's backends."""
    for name in arguments.import_code.split(","):
        if name.strip():
            import_code(name.strip())
