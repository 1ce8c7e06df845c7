"""``Pipes.acall``: the limit that all pipes share, a pipe that is replaced, timeouts and cancelled calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from threading import Event
from typing import Any

import pytest
from conftest import Register
from kit.backends import Echo, Gate
from kit.waits import WAIT

from torchpipe_py import DeadlineExceeded, Overloaded, UnknownNode, pipe
from torchpipe_py.runtime.pipes import Pipes
from torchpipe_py.runtime.runtime import Runtime

Data = dict[str, Any]
SOON = 0.01


@pytest.fixture
def gate() -> Iterator[Gate]:
    with Gate() as made:
        yield made


@pytest.fixture
def pipes(register: Register, gate: Gate) -> Iterator[Pipes]:
    """The models ``a`` and ``b``, which wait for the gate, and at most two requests at a time."""
    backend, pipes = register(gate.backend), Pipes(2)
    with ExitStack() as stack:
        each = {f"{name}/1": stack.enter_context(pipe({name: {"backend": backend}})) for name in "ab"}
        stack.callback(gate.open)
        pipes.replace((), each)
        yield pipes


async def started(pipes: Pipes, *names: str) -> list[asyncio.Task[Data]]:
    tasks = [asyncio.create_task(pipes.acall({"data": name, "node_name": name})) for name in names]
    await asyncio.sleep(0)
    return tasks


async def is_refused(pipes: Pipes, **more: Any) -> bool:
    """Whether another request is; if not, it ends at its timeout."""
    with pytest.raises((Overloaded, DeadlineExceeded)) as caught:
        await pipes.acall({"data": "other", "node_name": "b", **more}, SOON)
    return caught.type is Overloaded


def test_awaited_requests_of_all_models_are_counted_together(pipes: Pipes, gate: Gate) -> None:
    async def check() -> None:
        first = await started(pipes, "a")
        assert await is_refused(pipes, priority=1)
        assert not await is_refused(pipes)
        second = await started(pipes, "b")
        assert await is_refused(pipes)
        gate.open()
        assert [data["result"] for data in await asyncio.gather(*first, *second)] == ["a", "b"]
        assert (await pipes.acall({"data": 1, "node_name": "a", "priority": 1}))["result"] == 1
        with pytest.raises(UnknownNode):
            await pipes.acall({"data": 1, "node_name": "c"})

    asyncio.run(check())


def test_cancelled_call_gives_its_place_back_and_is_not_computed(pipes: Pipes, gate: Gate) -> None:
    async def check() -> None:
        held, queued = await started(pipes, "a", "a")
        gate.wait_entered()
        queued.cancel()
        with pytest.raises(asyncio.CancelledError):
            await queued
        assert not await is_refused(pipes)
        gate.open()
        await held

    asyncio.run(check())
    assert gate.batches.count(["a"]) == 1


class Lookup(dict[str, Any]):
    """A request during whose start something happens."""

    happens: Callable[[], object] | None = None

    def get(self, key: str, default: Any = None) -> Any:
        happens, self.happens = self.happens, None
        if happens is not None:
            happens()
        return super().get(key, default)


def test_call_at_a_pipe_that_was_just_replaced_goes_to_the_new_one(pipes: Pipes, register: Register) -> None:
    def replace() -> None:
        for old in pipes.replace(["a/1"], {"a/2": new}):
            old.close()

    request = Lookup(data=1, node_name="a")
    request.happens = replace
    with pipe({"a": {"backend": register(Echo)}}) as new:
        assert asyncio.run(pipes.acall(request))["result"] == 1


def test_a_request_that_is_done_when_an_interrupt_comes_counts_once(
    pipes: Pipes, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, done = Runtime.start_requests, Event()

    def interrupted(self: Runtime, requests: Any) -> None:
        start(self, requests)
        assert done.wait(WAIT)
        raise KeyboardInterrupt

    gate.open()
    with monkeypatch.context() as patched:
        patched.setattr(Runtime, "start_requests", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pipes.dispatch({"data": 1, "node_name": "a"}, lambda data, error: done.set())

    async def check() -> None:
        gate.opened.clear()
        waiting = await started(pipes, "a", "b")
        assert await is_refused(pipes)
        gate.open()
        await asyncio.gather(*waiting)

    asyncio.run(check())
