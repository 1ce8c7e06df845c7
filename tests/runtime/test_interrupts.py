"""Signal handlers that raise anywhere in a call of the main thread, as for Ctrl-C: the pipe stays usable."""

from __future__ import annotations

import asyncio
import dis
import gc
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from itertools import product
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from time import perf_counter
from types import CodeType, FrameType
from typing import Any, ClassVar

import psutil
import pytest
from conftest import Register
from kit.backends import Echo, EchoFour
from kit.inside import runtime_of
from kit.waits import WAIT, all_idle, eventually

import torchpipe_py.runtime
from torchpipe_py import pipe
from torchpipe_py.backends.deferred import HandedOver, HandOverBackend
from torchpipe_py.runtime.interrupts import EXECUTOR, InterruptSafeExecutor

RUNTIME = str(Path(torchpipe_py.runtime.__file__).parent)


class Interrupt(BaseException):
    """What the handler raises here; no code of the pipe or of Python knows it."""


class Elsewhere(HandOverBackend):
    """Result is data; stands for one in another process."""

    def setup(self) -> None:
        self._is_stopped = threading.Event()

    def start(self, item: dict[str, Any], done: HandedOver, request: Any) -> None:
        item["result"] = item["data"]
        done(None)

    def keep(self) -> None:
        self._is_stopped.wait()

    def stop(self) -> None:
        self._is_stopped.set()


PIPES: dict[str, dict[str, Any]] = {
    "chain": {"a": {"next": "b", "instance_num": 2}, "b": {"next": "c"}, "c": {}},
    "batches": {"a": {"next": "b"}, "b": {"backend": "Batched", "instance_num": 2, "batching_timeout": 5}},
    "diamond": {
        "a": {"next": "b,c"},
        "b": {"next": "d"},
        "c": {"next": "d"},
        "d": {"map": "b[result:data],c[result:x]"},
    },
    "skipped": {
        "a": {"filter": "skip", "next": "b,c"},
        "b": {"filter": "run", "next": "d"},
        "c": {"filter": "skip", "next": "d"},
        "d": {"map": "b[result:data]"},
    },
    "broken off": {"a": {"filter": "break", "next": "b"}, "b": {}},
    "elsewhere": {"a": {"backend": "Elsewhere", "next": "b"}, "b": {"backend": "Elsewhere"}},
}


@pytest.fixture(autouse=True)
def pipes(register: Register, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    names = {"Batched": register(EchoFour), "Elsewhere": register(Elsewhere)}
    for nodes in PIPES.values():
        for node in nodes.values():
            if node.get("backend") in names:
                monkeypatch.setitem(node, "backend", names[node["backend"]])
    gc.collect()
    gc.disable()  # what a collection calls is interrupted as well, and Python only prints that
    yield
    gc.enable()


def assert_healthy(p: pipe) -> None:
    """All instances are idle, nothing is in flight or held, and the next calls are answered."""
    nodes = runtime_of(all_idle(p)).nodes.values()
    several = [{"data": 1} for _ in range(4)]
    p(several, timeout=WAIT)
    assert all("result" in item or "error" in item for item in several)
    eventually(lambda: all(node.is_idle() for node in nodes))


def call(p: pipe) -> None:
    p({"data": 1})


def call_several(p: pipe) -> None:
    with p.trace():
        p([{"data": 1}, {"data": 2}], timeout=WAIT)


def call_too_briefly(p: pipe) -> None:
    try:
        p({"data": 1}, timeout=0.0)
    except TimeoutError:
        pass


def submit(p: pipe) -> None:
    p.submit({"data": 1}).result(WAIT)


# -- at every place where Python looks for signals ----------------------------------------------------------------

up_to_3_11 = pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python 3.12 looks for signals in other places")


@cache
def places(code: CodeType) -> frozenset[int]:
    """Where in a function a handler may run: as it begins, after calls, and where it jumps back."""
    found, is_after_call = {0}, False
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        if is_after_call or name == "RESUME" or name.startswith(("JUMP_BACKWARD", "JUMP_ABSOLUTE")):
            found.add(instruction.offset)
        if name not in ("CACHE", "PRECALL"):
            is_after_call = name.startswith("CALL")
    return frozenset(found)


def interrupt(where: str) -> None:
    raise Interrupt(where)


class Injection:
    """Calls ``handler(where)`` in the ``number``-th place that the main thread comes to in the package."""

    def __init__(self, number: int, handler: Callable[[str], object] = interrupt) -> None:
        self.left, self.where, self._handler = number, "", handler

    def run(self, what: Callable[[], object]) -> None:
        sys.settrace(self._trace)
        try:
            what()
        finally:
            sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(RUNTIME):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode" and frame.f_lasti in places(frame.f_code):
            self.left -= 1
            if self.left < 0:
                sys.settrace(None)
                self.where = f"{frame.f_code.co_name}:{frame.f_lineno}"
                self._handler(self.where)
        return self._trace


def interrupt_each_place(run: Callable[[], object], check: Callable[[], object]) -> int:
    """Run it again and again, and raise in the first place, in the second, … until it is through; how many."""
    number = 0
    while True:
        injection = Injection(number)
        try:
            injection.run(run)
        except Interrupt:
            pass
        else:
            assert not injection.where, f"the interrupt at {injection.where} was swallowed"
            return number
        try:
            check()
        except BaseException as error:
            raise AssertionError(f"after an interrupt at {injection.where}") from error
        number += 1


@up_to_3_11
@pytest.mark.parametrize(
    ("kind", "use"),
    [*product(PIPES, (call,)), *product(("batches", "elsewhere"), (call_several, call_too_briefly, submit))],
)
def test_interrupt_anywhere_in_a_call_leaves_pipe_usable(kind: str, use: Callable[[pipe], object]) -> None:
    with pipe(PIPES[kind]) as p:
        assert interrupt_each_place(lambda: use(p), lambda: assert_healthy(p)) > 10


class Held(Echo):
    """Waits for ``opened``: what has started is not finished before."""

    opened = threading.Event()
    dropped: ClassVar[list[BaseException | None]] = []
    """Errors that ``on_done`` of ``dispatch`` got."""

    def forward_item(self, item: dict[str, Any]) -> None:
        self.opened.wait(10 * WAIT)
        super().forward_item(item)


def submit_several(p: pipe) -> None:
    future = p.submit([{"data": 1}, {"data": 2}])
    Held.opened.set()
    future.result(WAIT)


def dispatch(p: pipe) -> None:
    is_over = threading.Event()
    p.dispatch({"data": 1}, lambda data, error: is_over.set() if error is None else Held.dropped.append(error))
    Held.opened.set()
    assert is_over.wait(WAIT)


def await_call(p: pipe) -> None:
    async def main() -> None:
        task = asyncio.create_task(p.acall({"data": 1}, timeout=WAIT))
        await asyncio.sleep(0)  # it starts
        if not task.done():
            Held.opened.set()
        await task

    asyncio.run(main())


def map_each(p: pipe) -> None:
    def items() -> Iterator[dict[str, Any]]:
        yield {"data": 1}
        yield {"data": 2}
        Held.opened.set()

    for _ in p.map(items(), ahead=3):
        pass


@up_to_3_11
@pytest.mark.parametrize("use", [submit_several, dispatch, await_call, map_each])
def test_interrupt_anywhere_in_a_call_drops_what_it_started(use: Callable[[pipe], object], register: Register) -> None:
    def assert_dropped() -> None:
        EXECUTOR.run(lambda: None)  # what the main thread has handed over is done
        eventually(lambda: p.stats()["inflight"] == 0, "a request is left")
        assert not Held.dropped, "dispatch raised, and its callback was called too"
        Held.opened.set()
        all_idle(p)
        Held.opened.clear()

    with pipe({"backend": register(Held), "instance_num": 2}) as p, ExitStack() as stack:
        stack.callback(Held.opened.set)
        Held.opened.clear()
        assert interrupt_each_place(lambda: use(p), assert_dropped) > 10


def test_thread_that_an_interrupt_gave_up_ends_after_its_job() -> None:
    executor, is_free, is_given_up = InterruptSafeExecutor(), threading.Event(), threading.Event()
    threads: SimpleQueue[int] = SimpleQueue()

    def block() -> None:
        threads.put(threading.get_native_id())
        is_free.wait(WAIT)

    executor.start(block)
    blocked = threads.get(timeout=WAIT)
    executor.abandon(is_given_up.set)
    assert is_given_up.wait(WAIT), "the job before it goes on"
    is_free.set()
    eventually(lambda: blocked not in [thread.id for thread in psutil.Process().threads()])


@up_to_3_11
def test_interrupt_while_pipe_is_built_or_closed_leaves_no_thread() -> None:
    def build_and_close() -> None:
        with pipe({name: PIPES["batches"][name] | {"instance_num": 1} for name in ("a", "b")}) as p:
            p({"data": 1})

    def assert_no_thread() -> None:
        gc.collect(0)  # the interrupt's traceback has held the pipe
        for thread in [thread for thread in threading.enumerate() if thread.name.startswith("torchpipe")]:
            thread.join(WAIT)
            assert not thread.is_alive()

    assert interrupt_each_place(build_and_close, assert_no_thread) > 100


# -- at random moments --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["chain", "batches"])
def test_interrupts_at_random_moments_leave_pipe_usable(kind: str) -> None:
    moments, spans, hits = random.Random(1), [], 0
    before = signal.signal(signal.SIGALRM, lambda number, frame: interrupt("a signal"))
    try:
        with pipe(PIPES[kind]) as p:
            for _ in range(21):
                started = perf_counter()
                p({"data": 1})
                spans.append(perf_counter() - started)
            while hits < 150:
                item = {"data": 1}
                try:
                    signal.setitimer(signal.ITIMER_REAL, moments.random() * median(spans) * 1.2 + 1e-6)
                    try:
                        p(item)
                    finally:
                        signal.setitimer(signal.ITIMER_REAL, 0)
                except Interrupt:
                    hits += 1
                else:
                    assert "result" in item
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert_healthy(p)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
