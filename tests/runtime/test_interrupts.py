"""Ctrl-C and other handlers that raise: in the main thread, anywhere in a call. Nothing may be lost by it.

``python tests/runtime/test_interrupts.py 10000 1`` runs many more at random moments; the last number is the seed.
"""

from __future__ import annotations

import dis
import gc
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from statistics import median
from time import perf_counter
from types import CodeType, FrameType
from typing import Any

import pytest

import torchpipe_py.runtime
from torchpipe_py import Backend, PipeClosed, Registry, pipe, registry
from torchpipe_py.backends.base import BackendConfig
from torchpipe_py.backends.deferred import HandedOver, HandOverBackend

WAIT = 60.0
RUNTIME = str(Path(torchpipe_py.runtime.__file__).parent)
DEMO = Path(__file__).parents[2] / "configs" / "demo"


class Interrupt(BaseException):
    """What the handler raises here; no code of the pipe or of Python knows it."""


def assert_healthy(p: pipe, data: Any) -> None:
    """Every instance rests, nothing is in flight, no lock is held, and the next calls are answered."""
    limit = perf_counter() + WAIT
    nodes = p._runtime.nodes.values()
    while p.stats()["inflight"] or any(node.lane.idle.count() < len(node.instances) for node in nodes):
        assert perf_counter() < limit, p.stats()
    for node in p.stats()["nodes"].values():
        assert (node["alive"], node["busy"], node["oldest_batch_s"]) == (node["instances"], 0, 0.0)
    for node in nodes:
        assert len(set(resting(node.lane.idle))) == len(node.instances)
        assert not node.lane._waiting
        assert not node.lane._reached
    lock: Any = p._runtime.inflight._lock
    assert not lock._is_owned()
    several = [{"data": data} for _ in range(4)]
    p(several, timeout=WAIT)
    assert all("result" in item or "error" in item for item in several)
    while any(node.lane.load() for node in nodes):
        assert perf_counter() < limit, "something is under way"


def resting(idle: Any) -> list[Any]:
    return [*idle.to_wake, *getattr(idle, "_followers", ())]


class Elsewhere(HandOverBackend):
    """Result is data; stands for one in another process."""

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        self._is_stopped = threading.Event()

    def start(self, item: dict[str, Any], done: HandedOver, request: Any) -> None:
        item["result"] = item["data"]
        done(None)

    def keep(self) -> None:
        self._is_stopped.wait()

    def stop(self) -> None:
        self._is_stopped.set()


PIPES: dict[str, dict[str, Any]] = {
    "identity": {"backend": "Identity", "instance_num": 2},
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
        "b": {"filter": "run"},
        "c": {"backend": "Batched", "filter": "run"},
    },
    "skipped twice": {
        "a": {"filter": "skip", "next": "b,c"},
        "b": {"filter": "run", "next": "d"},
        "c": {"filter": "skip", "next": "d"},
        "d": {"map": "b[result:data]"},
    },
    "broken off": {"a": {"filter": "break", "next": "b"}, "b": {}},
    "elsewhere": {"a": {"backend": "Elsewhere", "next": "b"}, "b": {"backend": "Elsewhere"}},
}


def call(p: pipe) -> None:
    p({"data": 1})


def call_several(p: pipe) -> None:
    p([{"data": 1}, {"data": 2}], timeout=WAIT)


def call_too_briefly(p: pipe) -> None:
    try:
        p({"data": 1}, timeout=0.0)
    except TimeoutError:
        pass


def submit(p: pipe) -> None:
    p.submit({"data": 1}).result(WAIT)


def dispatch(p: pipe) -> None:
    done = threading.Event()
    p.dispatch({"data": 1}, lambda data, error: done.set())
    assert done.wait(WAIT)


def figures(p: pipe) -> None:
    with p.trace():
        p.stats()


# -- at every place where Python looks for signals ----------------------------------------------------------------

# Later ones are tried at random moments only, below.
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
        self.left = number
        self.where = ""
        self._handler = handler

    def trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(RUNTIME):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode" and frame.f_lasti in places(frame.f_code):
            self.left -= 1
            if self.left < 0:
                sys.settrace(None)
                self.where = f"{frame.f_code.co_name}:{frame.f_lineno}"
                self._handler(self.where)
        return self.trace


def interrupt_each_place(run: Callable[[], object], check: Callable[[], object]) -> int:
    """Run it again and again, and raise in the first place, in the second, … until it is through; how many."""
    number = 0
    while True:
        injection = Injection(number)
        sys.settrace(injection.trace)
        try:
            run()
        except Interrupt:
            pass
        else:
            assert not injection.where, f"the interrupt at {injection.where} was swallowed"
            return number
        finally:
            sys.settrace(None)
        try:
            check()
        except BaseException as error:
            raise AssertionError(f"after an interrupt at {injection.where}") from error
        number += 1


class Batched(Backend):
    """Result is data; takes batches."""

    def forward(self, items: list[dict[str, Any]]) -> None:
        for item in items:
            item["result"] = item["data"]

    def max(self) -> int:
        return 4


@pytest.fixture(autouse=True)
def batched(restored: Registry) -> None:
    restored.register_backend(Batched, "Batched")
    restored.register_backend(Elsewhere, "Elsewhere")


@pytest.fixture(scope="module")
def no_collection() -> Iterator[None]:
    """What a collection calls is interrupted as well, and Python only prints that."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@up_to_3_11
@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("use", [call, call_several, submit, dispatch])
@pytest.mark.parametrize("kind", PIPES)
def test_an_interrupt_anywhere_in_a_call_loses_nothing(kind: str, use: Callable[[pipe], object]) -> None:
    with pipe(PIPES[kind]) as p:
        number = interrupt_each_place(lambda: use(p), lambda: assert_healthy(p, 1))
    assert number > 10


@up_to_3_11
@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("use", [call_too_briefly, figures])
def test_an_interrupt_anywhere_else_loses_nothing(use: Callable[[pipe], object]) -> None:
    with pipe(PIPES["identity"]) as p:
        assert interrupt_each_place(lambda: use(p), lambda: assert_healthy(p, 1)) > 10
        with p.trace():
            pass


def pipe_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("torchpipe")]


def assert_no_thread() -> None:
    gc.collect(0)  # the interrupt's traceback has held the pipe
    for thread in pipe_threads():
        thread.join(WAIT)
    assert pipe_threads() == []


@up_to_3_11
@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("kind", ["identity", "batches"])
def test_an_interrupt_while_a_pipe_is_built_or_closed_leaves_no_thread(kind: str) -> None:
    def build_and_close() -> None:
        with pipe(PIPES[kind]) as p:
            p({"data": 1})

    assert interrupt_each_place(build_and_close, assert_no_thread) > 100


@up_to_3_11
@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("use", [call, call_several, submit])
@pytest.mark.parametrize("kind", ["batches", "diamond", "skipped twice", "elsewhere"])
def test_a_handler_may_call_the_pipe_anywhere_in_a_call(kind: str, use: Callable[[pipe], object]) -> None:
    answers: list[dict[str, Any]] = []

    def handler(where: str) -> None:
        answers.append(p({"data": where}, timeout=WAIT))

    with pipe(PIPES[kind]) as p:
        while True:
            injection = Injection(len(answers), handler)
            sys.settrace(injection.trace)
            try:
                use(p)
            finally:
                sys.settrace(None)
            if not injection.where:
                break
            assert answers[-1]["result"] == injection.where
        assert_healthy(p, 1)
    assert len(answers) > 10


@up_to_3_11
@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("kind", ["identity", "batches", "skipped", "elsewhere"])
def test_a_handler_may_close_the_pipe_anywhere_in_a_call(kind: str) -> None:
    has_closed: list[bool] = []

    def handler(where: str) -> None:
        has_closed.append(p.close())

    while True:
        p, data = pipe(PIPES[kind]), {"data": 1}
        injection = Injection(len(has_closed), handler)
        sys.settrace(injection.trace)
        try:
            p(data)
        except PipeClosed:
            assert "result" not in data
        else:
            assert data["result"] == 1
        finally:
            sys.settrace(None)
        assert p.close()
        if not injection.where:
            break
        assert p.stats()["inflight"] == 0
    assert len(has_closed) > 10
    assert all(has_closed)


def test_no_thread_of_the_pipe_waits_for_the_lock_of_a_future(restored: Registry) -> None:
    """The main thread may hold it, in ``result()``, while a handler of a signal calls the pipe; or for good."""
    may_end = threading.Event()

    class Waits(Batched):
        """Until it may end."""

        def forward(self, items: list[dict[str, Any]]) -> None:
            may_end.wait(WAIT)
            super().forward(items)

    restored.register_backend(Waits, "Waits")
    with pipe({"backend": "Waits"}) as p:
        future = p.submit({"data": 1})
        with future._condition:
            may_end.set()
            assert p({"data": 2}, timeout=WAIT / 4)["result"] == 2
        assert future.result(WAIT)["result"] == 1


# -- at random moments --------------------------------------------------------------------------------------------


@contextmanager
def raising_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, lambda number, frame: interrupt("a signal"))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def interrupt_at_random(p: pipe, data: Any, count: int, moments: random.Random) -> int:
    """Call until so many calls were interrupted; how many calls that took."""
    p({"data": data})
    spans = []
    for _ in range(21):
        started = perf_counter()
        p({"data": data})
        spans.append(perf_counter() - started)
    span = median(spans)  # a pause in one of them would put most moments behind the calls
    calls = hits = 0
    while hits < count:
        calls += 1
        item = {"data": data}
        try:
            signal.setitimer(signal.ITIMER_REAL, moments.random() * span * 1.2 + 1e-6)
            try:
                p(item)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except Interrupt:
            hits += 1
        else:
            assert "result" in item
    return calls


DECODE = {
    "decode": {"backend": "S[DecodeMat,ResizeMat]", "resize_h": 64, "resize_w": 64, "instance_num": 2, "next": "model"},
    "model": {"backend": "Batched", "batching_timeout": 2},
}


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize(("kind", "count"), [("identity", 300), ("decode", 150)])
def test_interrupts_at_random_moments(kind: str, count: int) -> None:
    data = (DEMO / "images" / "ring_00.jpg").read_bytes()
    with raising_handler(), pipe(DECODE if kind == "decode" else PIPES[kind]) as p:
        interrupt_at_random(p, data, count, random.Random(1))
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert_healthy(p, data)


if __name__ == "__main__":
    number, seed = int(sys.argv[1]), int(sys.argv[2])
    registry.default.register_backend(Batched, "Batched")
    registry.default.register_backend(Elsewhere, "Elsewhere")
    image = (DEMO / "images" / "ring_00.jpg").read_bytes()
    for name, tables in {**PIPES, "decode": DECODE}.items():
        with raising_handler(), pipe(tables) as built:
            tried = interrupt_at_random(built, image, number, random.Random(seed))
            assert_healthy(built, image)
        print(f"{name}: {number} interrupts in {tried} calls, nothing lost", flush=True)
