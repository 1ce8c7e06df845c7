"""A process of the tuner: it profiles nodes one by one, or runs a pipe under load, as its parent asks."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from queue import SimpleQueue
from socket import socketpair
from time import perf_counter, process_time, sleep
from typing import Any

from torchpipe_py.backends.base import run_padded
from torchpipe_py.cores import RunDelay
from torchpipe_py.errors import TorchpipeError, describe, logger
from torchpipe_py.keys import TASK_DATA_KEY, TASK_ERROR_KEY, TASK_RESULT_KEY
from torchpipe_py.plan.build import plan_pipeline
from torchpipe_py.plan.config import Tables
from torchpipe_py.proc.child import start_interpreter
from torchpipe_py.registry import import_code
from torchpipe_py.runtime.instance import Instance, creator
from torchpipe_py.runtime.pipe import pipe
from torchpipe_py.runtime.request import Request
from torchpipe_py.runtime.runtime import Runtime
from torchpipe_py.tools.report import ToolError

Config = Mapping[str, Mapping[str, Any]]

_KEPT_BYTES = 2**28  # of what reaches a node: further images are not kept
_LEAST_BATCHES = 3
_WAIT_S = 60.0


class Worker:
    """A process as its parent sees it; ``ask`` and ``answer`` may be called for several before the first answers."""

    def __init__(self, source: str, images: Sequence[bytes], imports: Sequence[str], cores: Sequence[int]) -> None:
        ours, theirs = socketpair()
        with theirs:
            self._process = start_interpreter("torchpipe_py.tools.tune.worker", [theirs.fileno()])
        self._channel = Connection(ours.detach())
        self.ask("open", source, list(images), list(imports), list(cores))

    def call(self, name: str, *arguments: Any) -> Any:
        """Have it do something, and wait for what that gives."""
        self.ask(name, *arguments)
        return self.answer()

    def ask(self, name: str, *arguments: Any) -> None:
        """Have it do something; ``answer`` is to follow."""
        self._channel.send((name, arguments))

    def answer(self) -> Any:
        """What the last ``ask`` gives; ``ToolError`` where it failed, or the process died."""
        try:
            done, value = self._channel.recv()
        except (EOFError, OSError):
            raise ToolError("a process of the tuner died; out of memory, or killed?") from None
        if not done:
            raise ToolError(value)
        return value

    def close(self) -> None:
        """End it."""
        self._channel.close()
        self._process.kill()
        self._process.wait()


def ask_all(workers: Sequence[Worker], name: str, *arguments: Any) -> list[Any]:
    """Have all do the same at once; what each gives. ``ToolError``, once all have answered, where one failed."""
    for worker in workers:
        worker.ask(name, *arguments)
    return answers_of(workers)


def answers_of(workers: Sequence[Worker]) -> list[Any]:
    """What each gives; ``ToolError``, once all have answered, where one failed."""
    answers: list[Any] = []
    problems: list[ToolError] = []
    for worker in workers:
        try:
            answers.append(worker.answer())
        except ToolError as error:
            problems.append(error)
    if problems:
        raise problems[0]
    return answers


def main(descriptor: int) -> None:
    """Do what the parent asks for until it is gone."""
    channel, room = Connection(descriptor), _Room()
    while True:
        try:
            name, arguments = channel.recv()
        except (EOFError, OSError):
            os._exit(0)  # threads of a backend may not end
        try:
            answer = True, getattr(room, name)(*arguments)
        except TorchpipeError as error:
            answer = False, str(error).split("\n", 1)[0]
        except BaseException as error:
            answer = False, describe(error)
        if name != "open" or not answer[0]:
            channel.send(answer)


@dataclass(frozen=True)
class Captured:
    """What one run of all images showed, by node.

    ``visits`` counts those of each image at each node, ``limits`` are the batches of an instance, ``lone`` the seconds
    of each image alone, ``failed`` why images, by number, have no result, ``results`` the results of the first few.
    """

    visits: dict[str, list[int]]
    limits: dict[str, tuple[int, int]]
    lone: list[float]
    failed: dict[int, str]
    results: list[Any]
    gpu_bytes: int


class _Room:
    """The process: what it keeps between the parent's questions."""

    def open(self, source: str, images: list[bytes], imports: list[str], cores: list[int]) -> None:
        os.sched_setaffinity(0, cores)
        logger.setLevel("ERROR")
        self.source, self.images = source, images
        self.items: dict[str, list[tuple[int, dict[str, Any]]]] = {}
        self.nodes: dict[tuple[str, int], list[_Stand]] = {}
        self.pipe: pipe | None = None
        for name in imports:
            import_code(name)

    def _tables(self, config: Config) -> Tables:
        tables = Tables({name: dict(table) for name, table in config.items()})
        tables.source = self.source
        return tables

    # -- nodes alone ----------------------------------------------------------------------------------------------

    def capture(self, config: Config, units: dict[str, str]) -> Captured:
        """Run each image through the pipe, one at a time, and keep what reaches each node as items of its unit."""
        free = _gpu_free()
        runtime = Runtime(plan_pipeline(self._tables(config)))
        runtime.start()
        visits: dict[str, list[int]] = {name: [0] * len(self.images) for name in runtime.nodes}
        kept: dict[str, list[tuple[int, dict[str, Any]]]] = defaultdict(list)
        results: list[Any] = []
        lone, failed, image, room = [], {}, 0, defaultdict[str, int](lambda: _KEPT_BYTES)

        def watch(name: str) -> Callable[..., Any]:
            def around(requests: Sequence[Request], started: float, run: Callable[[], Any]) -> Any:
                for request in requests:
                    visits[name][image] += 1
                    if room[name] > 0:
                        data = request.data.get(TASK_DATA_KEY)
                        room[name] -= int(getattr(data, "nbytes", 0)) or (len(data) if isinstance(data, bytes) else 0)
                        kept[name].append((image, dict(request.data)))
                return run()

            return around

        try:
            entered = runtime.graph.entered
            if len(entered) != 1:
                raise ToolError(f"{self.source}: requests enter at {', '.join(entered)}; one root can be tuned")
            for name, node in runtime.nodes.items():
                node.around = watch(name)
            for image, body in enumerate((self.images[0], *self.images), start=-1):
                data = {TASK_DATA_KEY: body}
                done: SimpleQueue[BaseException | None] = SimpleQueue()
                began = perf_counter()
                runtime.inflight.submit([Request(data, partial(_put, done), entered[0])])
                error = done.get()
                if image < 0:  # the first run warms up
                    visits = {name: [0] * len(self.images) for name in runtime.nodes}
                    kept.clear()
                    room.clear()
                    continue
                lone.append(perf_counter() - began)
                if error is not None or TASK_RESULT_KEY not in data:
                    why: Any = error or data.get(TASK_ERROR_KEY)
                    failed[image] = describe(why) if isinstance(why, BaseException) else "no result"
                elif len(results) < 8:
                    results.append(_comparable(data[TASK_RESULT_KEY]))
            limits = {name: (node.min, node.max) for name, node in runtime.nodes.items()}
            used = max(0, free - _gpu_free())
        finally:
            runtime.end(perf_counter() + _WAIT_S)
        for name, unit in units.items():
            self.items.setdefault(unit, kept.get(name, []))
        return Captured(visits, limits, lone, failed, results, used)

    def prepare(self, unit: str, config: Config, threads: int, instances: int) -> tuple[int, int]:
        """Set up so many instances of a node alone, with so many threads of its model; the batches they take."""
        (plan,) = plan_pipeline(self._tables(config)).plans.values()
        create = creator(plan)
        stands = [_Stand(Instance("node", index, create)) for index in range(instances)]
        self.nodes[unit, threads] = stands
        for stand in stands:
            if error := stand.instance.wait_setup():
                raise ToolError(f"{self.source}: {describe(error)}")
            stand.instance.open(stand.serve)
        return stands[0].instance.min, stands[0].instance.max

    def measure(
        self, unit: str, threads: int, size: int, instances: int, seconds: float, start: float
    ) -> tuple[list[tuple[list[tuple[int, int]], float]], float, float]:
        """Instances run batches of ``size`` from ``start`` on: items and seconds of each.

        Then the processor time of all, and the time that their threads waited for a core, which is in no batch's time.
        """
        stands, items = self.nodes[unit, threads][:instances], self.items[unit]
        batches = _batches(items, size, stands[0].instance)
        sleep(max(0.0, start - perf_counter()))
        cpu = process_time()
        for index, stand in enumerate(stands):
            stand.jobs.put((batches, index * len(batches) // instances, seconds))
        runs = [stand.done.get() for stand in stands]
        used = process_time() - cpu
        for run in runs:
            if isinstance(run, BaseException):
                raise run
        return [each for batches_run, _ in runs for each in batches_run], used, sum(delay for _, delay in runs)

    # -- a pipe under load ----------------------------------------------------------------------------------------

    def release(self) -> None:
        """End the nodes that ran alone."""
        for stands in self.nodes.values():
            for stand in stands:
                stand.jobs.put(None)
        self.nodes.clear()
        self.items.clear()

    def build(self, config: Config, processes: int) -> list[Any]:
        """Build the pipe, one of so many; the results of the first images."""
        if self.pipe is not None:
            self.pipe.close(_WAIT_S)
        self.pipe = pipe(plan_pipeline(self._tables(config), processes=processes))
        results: list[Any] = []
        for body in self.images:
            self.pipe(data := {TASK_DATA_KEY: body})
            if TASK_RESULT_KEY in data and len(results) < 8:
                results.append(_comparable(data[TASK_RESULT_KEY]))
        return results

    def open_loop(self, dues: Sequence[tuple[int, float]], start: float, patience: float) -> list[float]:
        """Send image ``number`` at ``start + due``; seconds from when each was due, infinite where there is no result.

        ``patience`` seconds after the last one it is over.
        """
        assert self.pipe is not None
        latencies, left = [float("inf")] * len(dues), threading.Semaphore(0)
        for index, (number, due) in enumerate(dues):
            wait = start + due - perf_counter()
            if wait > 0:
                sleep(wait)

            def on_done(data: Any, error: BaseException | None, index: int = index, due: float = due) -> None:
                if error is None and TASK_RESULT_KEY in data:
                    latencies[index] = perf_counter() - start - due
                left.release()

            try:
                self.pipe.dispatch({TASK_DATA_KEY: self.images[number % len(self.images)]}, on_done)
            except TorchpipeError:
                left.release()
        end = perf_counter() + patience
        for _ in dues:
            if not left.acquire(timeout=max(0.0, end - perf_counter())):
                break
        latencies = list(latencies)  # NOTE: what comes later is not counted
        self._drain()
        return latencies

    def closed_loop(self, clients: int, seconds: float, start: float) -> list[tuple[float, float]]:
        """Clients that wait for each answer; when each call ended, in seconds since the start, and what it took."""
        assert self.pipe is not None
        ends: list[tuple[float, float]] = []
        free: SimpleQueue[int] = SimpleQueue()
        numbers = count()
        for client in range(clients):
            free.put(client)
        sleep(max(0.0, start - perf_counter()))
        while (began := perf_counter()) < start + seconds:
            free.get()
            began = perf_counter()

            def on_done(data: Any, error: BaseException | None, began: float = began) -> None:
                now = perf_counter()
                ends.append((now - start, now - began))
                free.put(0)

            self.pipe.dispatch({TASK_DATA_KEY: self.images[next(numbers) % len(self.images)]}, on_done)
        self._drain()
        return ends

    def _drain(self) -> None:
        """Wait until nothing is under way: the next load starts from an idle pipe."""
        assert self.pipe is not None
        end = perf_counter() + _WAIT_S
        while self.pipe.stats()["inflight"] and perf_counter() < end:
            sleep(0.01)


class _Stand:
    """An instance that runs, on its own thread, the batches it is given."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.jobs: SimpleQueue[Any] = SimpleQueue()
        self.done: SimpleQueue[Any] = SimpleQueue()
        instance.start()

    def serve(self, instance: Instance) -> None:
        while (job := self.jobs.get()) is not None:
            try:
                self.done.put(self._run(*job))
            except BaseException as error:
                self.done.put(error)

    def _run(self, batches: Sequence[Any], first: int, seconds: float) -> tuple[list[Any], float]:
        backend, took, delay = self.instance.backend, [], RunDelay()
        start, end, number = delay.seconds(), perf_counter() + seconds, 0
        while number < _LEAST_BATCHES or perf_counter() < end:
            names, originals = batches[(first + number) % len(batches)]
            items = [dict(item) for item in originals]
            before, began = delay.seconds(), perf_counter()
            run_padded(backend, items)
            passed = perf_counter() - began
            took.append((names, max(1e-6, passed - (delay.seconds() - before))))
            number += 1
        return took, delay.seconds() - start


def _batches(
    items: Sequence[tuple[int, dict[str, Any]]], size: int, instance: Instance
) -> list[tuple[list[tuple[int, int]], list[dict[str, Any]]]]:
    """Batches of items of one shape, each with image and visit of its items; every item is in one at least."""
    visits: dict[int, int] = defaultdict(int)
    shapes: dict[Any, list[tuple[tuple[int, int], dict[str, Any]]]] = defaultdict(list)
    for image, data in items:
        shapes[instance.backend.batch_key(dict(data))].append(((image, visits[image]), data))
        visits[image] += 1
    batches = []
    for group in shapes.values():
        for first in range(0, len(group), size):
            chosen = [group[(first + offset) % len(group)] for offset in range(size)]
            batches.append(([name for name, _ in chosen], [data for _, data in chosen]))
    return batches


def _put(done: SimpleQueue[BaseException | None], _: Any, error: BaseException | None) -> None:
    done.put(error)


def _comparable(result: Any) -> Any:
    """A result that can be sent and compared."""
    if hasattr(result, "detach"):
        result = result.detach().cpu().numpy()
    if isinstance(result, (list, tuple)):
        return [_comparable(each) for each in result]
    if isinstance(result, dict):
        return {str(key): _comparable(value) for key, value in result.items()}
    is_plain = isinstance(result, (str, bytes, int, float, bool)) or hasattr(result, "dtype")
    return result if is_plain else type(result).__name__


def _gpu_free() -> int:
    """Bytes of the first GPU that are free; 0 without one."""
    try:
        import torch

        return int(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else 0
    except (ImportError, RuntimeError):
        return 0
