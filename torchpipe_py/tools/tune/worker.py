"""Processes of the tuner, which profile single nodes or run a pipe under load for their parent."""

from __future__ import annotations

import os
import statistics
import threading
from asyncio import new_event_loop
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from math import inf
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from queue import Empty, SimpleQueue
from signal import SIG_IGN, SIGINT, SIGKILL, signal
from socket import socket, socketpair
from subprocess import TimeoutExpired
from time import perf_counter, process_time, sleep
from typing import Any

from torchpipe_py.backends.base import Data, run_padded
from torchpipe_py.cores import limit_threads
from torchpipe_py.errors import ConfigError, NoResult, TorchpipeError, describe, logger
from torchpipe_py.keys import TASK_DATA_KEY, TASK_ERROR_KEY, TASK_RESULT_KEY
from torchpipe_py.malloc import keep_freed_memory
from torchpipe_py.plan.build import plan_pipeline
from torchpipe_py.proc.child import describe_ending, start_interpreter
from torchpipe_py.proc.confine import end_with_parent
from torchpipe_py.proc.engine import EngineClient, EngineServer, pipe_of_worker, watch_on
from torchpipe_py.registry import import_code
from torchpipe_py.runtime.nodes.instance import Instance, creator
from torchpipe_py.runtime.pipe import pipe
from torchpipe_py.runtime.request import Request
from torchpipe_py.runtime.runtime import Runtime
from torchpipe_py.tools.report import ToolError
from torchpipe_py.tools.tune.shapes import Candidate, Knobs, Shape, copied

Config = Mapping[str, Mapping[str, Any]]
Item = tuple[int, int]
"""An image, and the number of its visit to a node."""

_KEPT_BYTES = 2**28  # of a node's captured inputs; further images are dropped
_LEAST_BATCHES = 2  # besides the first
_WAIT_S = 60.0
_SET_UP, _SET_UP_S = ("open", "start", "prepare", "serve", "build"), 600.0  # TensorRT may build an engine
CAPTURED = -1
"""In place of a slot, for the pipe whose nodes' inputs are captured."""


class TeamDied(TorchpipeError):
    """A process of the tuner ended, and its answers with it, or it hangs."""


class Team:
    """One process per core, and ``engines`` more, seen from the parent. Calls may take up to ``seconds``.

    Raises ``ToolError`` if one fails, ``TeamDied`` if one dies or does not answer.
    """

    def __init__(
        self,
        source: str,
        images: Sequence[bytes],
        imports: Sequence[str],
        cores: Sequence[int],
        engines: int = 0,
        seconds: float = 120.0,
    ) -> None:
        self._seconds = seconds
        self._processes, self._channels, self._workers = [], [], len(cores)
        try:
            for _ in range(len(cores) + engines):
                ours, theirs = socketpair()
                with theirs:
                    fds, me = [theirs.fileno()], os.getpid()
                    process = start_interpreter("torchpipe_py.tools.tune.worker", fds, me, start_new_session=True)
                    self._processes.append(process)
                self._channels.append(Connection(ours.detach()))
            self.pids = [process.pid for process in self._processes]
            self.all("open", source, list(images), list(imports), list(cores), most=len(self.pids))
            self.has_gpu = self.gpu_free() > 0
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return self._workers

    def all(self, name: str, *arguments: Any, most: int | None = None) -> list[Any]:
        """Call a method in the processes of all cores, or the first ``most``, at once; returns their results."""
        return self.each(name, [arguments] * (most or len(self)))

    def each(self, name: str, arguments: Sequence[Sequence[Any]], first: int = 0) -> list[Any]:
        """Like ``all``, with different arguments for each process, from the ``first`` on."""
        for place, own in enumerate(arguments, first):
            with self._asking(place) as channel:
                channel.send((name, own))
        answers = [self._answer(place, name) for place in range(first, first + len(arguments))]
        for is_done, value in answers:
            if not is_done:
                raise ToolError(value)
        return [value for _, value in answers]

    def _answer(self, place: int, name: str) -> Any:
        limit = self._seconds + (_SET_UP_S if name in _SET_UP else 2 * _WAIT_S)
        with self._asking(place) as channel:
            if channel.poll(limit):
                return channel.recv()
        raise TeamDied(f"a process of the tuner has not answered for {limit:g} s ({name}): does a backend hang?")

    @contextmanager
    def _asking(self, place: int) -> Iterator[Connection]:
        """The channel of a process; ``TeamDied`` if it is gone."""
        try:
            yield self._channels[place]
        except (EOFError, OSError):
            with suppress(TimeoutExpired):
                self._processes[place].wait(1.0)
            why = describe_ending(self._processes[place].returncode)
            raise TeamDied(f"a process of the tuner died ({why}); is there enough memory?") from None

    def build(self, slot: int, config: Config, workers: int, engines: int) -> None:
        """Build the pipes of workers, with engine processes for shared nodes, in a free ``slot``."""
        if engines:
            self.each("serve", [(slot, config, engines)] * engines, self._workers)
        for worker in range(workers if engines else 0):
            with ExitStack() as stack:
                for place, sock in zip((self._workers + worker % engines, worker), socketpair(), strict=True):
                    stack.enter_context(sock)
                    with self._asking(place) as channel:
                        channel.send(("attach", (slot,)))
                        send_handle(channel, sock.fileno(), self.pids[place])
                    self._answer(place, "attach")
        self.all("build", slot, config, workers, most=workers)

    def gpu_free(self) -> int:
        """Free bytes of the first GPU; 0 without one."""
        return int(self.all("gpu_free", most=1)[0])

    def drop(self, slot: int) -> None:
        """Close the pipes in ``slot``."""
        self.all("drop", slot, most=len(self.pids))

    def close(self) -> None:
        """End them, with what their backends have started."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, SIGKILL)
        for process in self._processes:
            process.wait()
        for channel in self._channels:
            channel.close()


def main(descriptor: int, parent: int) -> None:
    """Run in the process: answer the parent's calls until it is gone."""
    end_with_parent(parent)  # also within a call, which may take long
    signal(SIGINT, SIG_IGN)  # the parent ends it; and no worker of a service has such a handler
    channel = Connection(descriptor)
    state = _State(channel)
    while True:
        try:
            name, arguments = channel.recv()
        except (EOFError, OSError):
            os._exit(0)  # threads of backends may never end
        try:
            answer = True, getattr(state, name)(*arguments)
        except BaseException as error:
            text = str(error) if isinstance(error, TorchpipeError) else describe(error)
            answer = False, text.split("\n", 1)[0]
        channel.send(answer)


@dataclass(frozen=True)
class Captured:
    """The outcome of one run of all images.

    ``visits`` has the visits of each image by node, ``lone`` the seconds of each image alone, ``handover`` the seconds
    of one that pass between two threads, ``failed`` the first image without a result and why, ``gpu_bytes`` the GPU
    memory of the pipe in one process.
    """

    visits: dict[str, list[int]]
    lone: list[float]
    handover: float
    failed: tuple[int, str] | None
    gpu_bytes: int = 0


class _State:
    """The state of a process between its parent's calls: a worker, or an engine process."""

    def __init__(self, channel: Connection) -> None:
        self._channel = channel
        self._link: socket | None = None
        self._running: defaultdict[int, ExitStack] = defaultdict(ExitStack)  # by slot
        self._servers: dict[int, EngineServer] = {}
        self._pipes: dict[int, pipe] = {}

    def open(self, source: str, images: list[bytes], imports: list[str], cores: list[int]) -> None:
        """Prepare the process."""
        os.sched_setaffinity(0, cores)
        logger.setLevel("ERROR")
        self.gpu_free()  # NOTE: what PyTorch itself takes is no part of a pipe
        self.source, self.images = source, images
        self.items: dict[str, list[tuple[Item, Data]]] = {}
        self.nodes: dict[tuple[str, int], list[_Runner]] = {}
        for name in imports:
            import_code(name)
        limit_threads()
        keep_freed_memory()

    def gpu_free(self) -> int:
        """``Team.gpu_free``."""
        try:
            import torch

            return int(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else 0
        except (ImportError, RuntimeError):
            return 0

    # -- nodes alone ----------------------------------------------------------------------------------------------

    def start(self, config: Config, units: dict[str, str], seconds: float) -> None:
        """Build the pipe from which to ``capture`` inputs by unit, and run the first image within ``seconds``."""
        self.drop(CAPTURED)
        self._runtime, self._units = Runtime(plan_pipeline(copied(config, self.source))), units
        self._running[CAPTURED].callback(lambda: self._runtime.end(perf_counter() + _WAIT_S))
        self._runtime.start()
        self._run_alone(self._runtime, self.images[0], perf_counter() + seconds)

    def capture(self, seconds: float) -> Captured:
        """Run each image through the pipe, one at a time, keep the inputs of each node, and close the pipe.

        ``ToolError`` if it takes longer than ``seconds``.
        """
        runtime, until = self._runtime, perf_counter() + seconds
        watches = {name: _Watch(len(self.images)) for name in runtime.nodes}
        for name, node in runtime.nodes.items():
            node.around = watches[name].around
        lone, between, failed = list[float](), list[float](), None
        for image, body in enumerate(self.images):
            for watch in watches.values():
                watch.image = image
                watch.seconds = 0.0
            began = perf_counter()
            why = self._run_alone(runtime, body, until)
            lone.append(perf_counter() - began)
            threads = 1 + sum(watch.visits[image] for watch in watches.values())
            between.append((lone[-1] - sum(watch.seconds for watch in watches.values())) / threads)
            if why and failed is None:
                failed = image, why
        self.drop(CAPTURED)
        for name, unit in self._units.items():
            self.items[unit] = self.items.get(unit) or watches[name].kept
        visits = {name: watch.visits for name, watch in watches.items()}
        return Captured(visits, lone, max(0.0, statistics.median(between)), failed)

    def _run_alone(self, runtime: Runtime, body: bytes, until: float) -> str:
        """Run one image; returns why it has no result, or an empty text. ``ToolError`` if it takes too long."""
        done: SimpleQueue[Any] = SimpleQueue()
        data = {TASK_DATA_KEY: body}
        request = Request(data, lambda _, error: done.put(error), runtime.graph.entered[0])
        runtime.inflight.submit([request])
        try:
            error = done.get(timeout=max(0.0, until - perf_counter()))
        except Empty:
            raise ToolError("one at a time, the images take too long: give fewer, or a longer --budget") from None
        error = error or (None if TASK_RESULT_KEY in data else data.get(TASK_ERROR_KEY, NoResult("no result")))
        return describe(error).split("\n", 1)[0] if isinstance(error, BaseException) else ""

    def prepare(self, unit: str, config: Config, threads: int, instances: int) -> tuple[int, int]:
        """Set up instances of a single node, with threads of its model; returns their batch sizes."""
        (plan,) = plan_pipeline(copied(config, self.source)).plans.values()
        create = creator(plan)
        self._close_nodes(self.nodes.pop((unit, threads), []))
        runners = self.nodes[unit, threads] = [_Runner(Instance("node", index, create)) for index in range(instances)]
        for runner in runners:
            if error := runner.instance.wait_setup():
                self._close_nodes(runners)
                raise ToolError(f"{self.source}: {describe(error)}")
        for runner in runners:
            runner.instance.open(runner.serve)
        return runners[0].instance.min, runners[0].instance.max

    def measure(
        self, unit: str, threads: int, size: int, instances: int, seconds: float, start: float
    ) -> tuple[list[tuple[list[Item], float]], float]:
        """Run batches of ``size`` from ``start`` on; returns items and seconds of each, and the total CPU time."""
        runners = self.nodes[unit, threads][:instances]
        batches = _batches(self.items[unit], size, runners[0].instance)
        sleep(max(0.0, start - perf_counter()))
        cpu = process_time()
        for index, runner in enumerate(runners):
            runner.jobs.put((batches, index * len(batches) // instances, seconds))
        runs = [each for runner in runners for each in runner.done.get().result()]
        return runs, process_time() - cpu

    def release(self) -> None:
        """Close the single nodes."""
        self._close_nodes([runner for runners in self.nodes.values() for runner in runners])
        self.nodes.clear()
        self.items.clear()

    def _close_nodes(self, runners: Sequence[_Runner]) -> None:
        for runner in runners:
            runner.jobs.put(None)
            runner.instance.open(None)  # if it was not opened
        until = perf_counter() + _WAIT_S
        for runner in runners:
            runner.instance.join(until)

    # -- simulations --------------------------------------------------------------------------------------------

    def learn(self, predictor: Any, shapes: Sequence[tuple[str, Config, str]]) -> None:
        """Be ready to predict candidates of ``shapes``: name, configuration and twin."""
        # NOTE: a plan cannot be sent, since classes of custom backends are known by their names alone.
        made = (replace(Shape.of(name, copied(tables, self.source)), twin=twin) for name, tables, twin in shapes)
        self._predictor, self._shapes = predictor, {shape.name: shape for shape in made}

    def fit(self, shape: str, workers: int, knobs: Knobs, engines: int, clients: int, rate: float) -> Any:
        """``Predictor.fit``."""
        return self._predictor.fit(Candidate(self._shapes[shape], workers, knobs, engines), clients, rate)

    def predict(
        self, shape: str, workers: int, knobs: Knobs, engines: int, floor: float, is_exact: bool, slower: float
    ) -> Any:
        """The prediction of a candidate, without the candidate; a text says why it cannot be built."""
        try:
            candidate = Candidate(self._shapes[shape], workers, knobs, engines)
            found = self._predictor.predict(candidate, floor, is_exact, slower)
        except ConfigError as error:
            return str(error)
        return found and replace(found, candidate=None)

    # -- a pipe under load ----------------------------------------------------------------------------------------

    def drop(self, slot: int) -> None:
        """Close what was built in a slot."""
        self._servers.pop(slot, None)
        self._pipes.pop(slot, None)
        self._running.pop(slot, ExitStack()).close()

    def serve(self, slot: int, config: Config, processes: int) -> None:
        """Be one of ``processes`` engine processes of a configuration."""
        server = EngineServer(plan_pipeline(copied(config, self.source), processes=processes))
        self._servers[slot] = server
        self._running[slot].callback(server.close, _WAIT_S)

    def attach(self, slot: int) -> None:
        """Receive the link between an engine process and a worker that is built next."""
        link = socket(fileno=recv_handle(self._channel))
        if slot in self._servers:
            self._servers[slot].attach(link)
        else:
            self._link = link

    def build(self, slot: int, config: Config, processes: int) -> None:
        """Build the pipe of one of ``processes`` workers."""
        link, self._link = self._link, None
        plan, running = plan_pipeline(copied(config, self.source), processes=processes), self._running[slot]
        if link is None:
            self._pipes[slot] = pipe(plan)
        else:
            loop = new_event_loop()
            threading.Thread(target=loop.run_forever, daemon=True).start()
            running.callback(loop.call_soon_threadsafe, loop.stop)
            client = EngineClient(partial(watch_on, loop))
            running.callback(client.close)
            if not client.attach_and_wait(link):
                raise ToolError(f"{self.source}: the engine process cannot be linked")
            self._pipes[slot] = pipe_of_worker(plan, client)
        running.callback(self._pipes[slot].close, _WAIT_S)

    def open_loop(self, slot: int, dues: Sequence[tuple[int, float]], start: float, grace_s: float) -> list[float]:
        """Send image ``number`` at ``start + due``; returns seconds since each was due, infinite without a result.

        It ends ``grace_s`` seconds after the last one.
        """
        latencies, done = [inf] * len(dues), threading.Semaphore(0)

        def on_done(index: int, is_answered: bool) -> None:
            if is_answered:
                latencies[index] = perf_counter() - start - dues[index][1]
            done.release()

        for index, (number, due) in enumerate(dues):
            sleep(max(0.0, start + due - perf_counter()))
            if not self._send(slot, number, partial(on_done, index)):
                done.release()
        left = _left_of(len(dues), done, grace_s)
        counted = list(latencies)
        _left_of(left, done, _WAIT_S)  # NOTE: so that the next load starts with an idle pipe
        return counted

    def closed_loop(self, slot: int, clients: int, seconds: float, start: float) -> list[float]:
        """Run clients in a closed loop; returns the time of each result in seconds since ``start``."""
        ends: list[float] = []
        numbers, done = count(), threading.Semaphore(0)

        def send() -> None:
            if not self._send(slot, next(numbers), on_done):
                done.release()

        def on_done(is_answered: bool) -> None:
            end = perf_counter() - start
            if is_answered:
                ends.append(end)
            if end < seconds:
                send()
            else:
                done.release()

        sleep(max(0.0, start - perf_counter()))
        for _ in range(clients):
            send()
        _left_of(clients, done, seconds + _WAIT_S)
        return ends

    def _send(self, slot: int, number: int, on_done: Callable[[bool], None]) -> bool:
        """Send an image; ``on_done`` gets whether it has a result. False if it is refused."""
        data = {TASK_DATA_KEY: self.images[number % len(self.images)]}
        try:
            self._pipes[slot].dispatch(data, lambda found, error: on_done(error is None and TASK_RESULT_KEY in found))
        except TorchpipeError:
            return False
        return True


def _left_of(count: int, done: threading.Semaphore, seconds: float) -> int:
    """How many of the requests are not done within ``seconds``."""
    end = perf_counter() + seconds
    while count and done.acquire(timeout=max(0.0, end - perf_counter())):
        count -= 1
    return count


class _Watch:
    """Counts the visits to a node, and keeps its inputs."""

    def __init__(self, images: int) -> None:
        self.visits, self.image, self.seconds, self._room = [0] * images, -1, 0.0, _KEPT_BYTES
        self.kept: list[tuple[Item, Data]] = []

    def around(self, requests: Sequence[Request], started: float, run: Any) -> Any:
        for request in requests if self.image >= 0 else ():
            data = request.data.get(TASK_DATA_KEY)
            if self._room > 0:
                self.kept.append(((self.image, self.visits[self.image]), dict(request.data)))
                self._room -= len(data) if isinstance(data, bytes) else getattr(data, "nbytes", 0)
            self.visits[self.image] += 1
        began = perf_counter()
        try:
            return run()
        finally:
            self.seconds += perf_counter() - began


class _Runner:
    """An instance with its own thread, which runs the given batches."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.jobs, self.done = SimpleQueue[Any](), SimpleQueue[Future[Any]]()
        instance.start()

    def serve(self, instance: Instance) -> None:
        while (job := self.jobs.get()) is not None:
            run: Future[Any] = Future()
            try:
                run.set_result(self._run(*job))
            except BaseException as error:
                run.set_exception(error)
            self.done.put(run)

    def _run(self, batches: Sequence[Any], first: int, seconds: float) -> list[tuple[list[Item], float]]:
        took: list[tuple[list[Item], float]] = []
        end = perf_counter() + seconds
        while len(took) <= _LEAST_BATCHES or perf_counter() < end:
            names, originals = batches[(first + len(took)) % len(batches)]
            items = [dict(item) for item in originals]
            began = perf_counter()
            run_padded(self.instance.backend, items)
            took.append((names, perf_counter() - began))
        return took[1:]  # NOTE: the first one comes after other nodes' work, and may take many times as long on a GPU


def _batches(items: Sequence[tuple[Item, Data]], size: int, instance: Instance) -> list[tuple[list[Item], list[Data]]]:
    """Batches of items of one shape, which include every item at least once."""
    shapes: dict[Any, list[tuple[Item, Data]]] = defaultdict(list)
    for name, data in items:
        shapes[instance.backend.batch_key(dict(data))].append((name, data))
    batches = []
    for group in shapes.values():
        for first in range(0, len(group), size):
            names, originals = zip(*[group[(first + at) % len(group)] for at in range(size)], strict=True)
            batches.append((list(names), list(originals)))
    return batches
