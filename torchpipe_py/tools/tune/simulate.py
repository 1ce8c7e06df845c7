"""Simulates a service in virtual time: the real nodes, routes and batches, with measured times for backends."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any

from torchpipe_py.errors import Overloaded
from torchpipe_py.filters import Status
from torchpipe_py.keys import TASK_DATA_KEY, TASK_RESULT_KEY
from torchpipe_py.plan.build import Pipeline
from torchpipe_py.proc.backends import Remote
from torchpipe_py.runtime.nodes.batching import BatchingNode
from torchpipe_py.runtime.nodes.instance import Instance
from torchpipe_py.runtime.nodes.node import Node
from torchpipe_py.runtime.nodes.single import SingleNode
from torchpipe_py.runtime.request import Request
from torchpipe_py.runtime.runtime import Runtime

MOST_UNDER_WAY = 2000
"""Requests in flight at which a simulation gives up, because the queue only grows."""


@dataclass
class Cost:
    """The measured costs of a node's backend.

    ``times`` has the seconds of each visit of each image alone; images without a visit do not reach the node. In a
    batch of ``n`` an item takes the share ``ladder[0] + ladder[1] / n`` of that. It keeps ``cores`` cores busy. A job
    that runs at the same time slows it by ``slowing``, and in the same process by ``lock`` too: 0.3 is 30 % longer.
    ``limits`` are the batch sizes of an instance.
    """

    times: Sequence[Sequence[float]]
    ladder: tuple[float, float] = (1.0, 0.0)
    cores: float = 1.0
    lock: float = 0.0
    slowing: float = 0.0
    limits: tuple[int, int] = (1, 1)

    def seconds(self, items: Sequence[tuple[int, int]]) -> float:
        """The time of a batch of ``(image, visit)``."""
        each, batch = self.ladder
        return sum(self.alone(*item) for item in items) * (each + batch / max(len(items), self.limits[0]))

    def alone(self, image: int, visit: int) -> float:
        """Seconds of one item alone."""
        visits = self.times[image % len(self.times)]
        return visits[visit % len(visits)] if visits else 0.0


@dataclass(frozen=True)
class Machine:
    """The cores of a machine, and the overhead of a pipe.

    In the pipe a node takes ``slower`` times its time alone, plus ``handover`` seconds for a batch whose instance was
    asleep. Other delays, as of the system, add ``tail`` seconds to a p99.
    """

    cores: int
    slower: float = 1.0
    handover: float = 0.0
    tail: float = 0.0


@dataclass(slots=True, eq=False)
class _Job:
    """The computation of a worker's thread; ``left`` is the rest in seconds at full speed."""

    kind: tuple[int, str]
    cost: Cost
    left: float
    done: Callable[[], object]
    speed: float = 1.0


class _InVirtualTime(Node):
    """A node without threads: the simulation starts and ends the batches of its instances.

    If it jumps, its requests then run the graphs of ``roots``.
    """

    simulation: Simulation
    runtime: Runtime
    worker: int
    cost: Cost
    roots: Sequence[str]
    free: list[Instance]

    def put(self, request: Request) -> None:
        request.arrived = self.simulation.now
        self._queue.normal.append(request)
        self.simulation.look.append(self)

    def start_batches(self) -> None:
        """Give idle instances the batches that close now."""
        while self.free and self._queue.normal:
            instance = self.free.pop()
            self.simulation.start(self, instance, [self._queue.take()])

    def ended(self, batch: Sequence[Request]) -> None:
        """Deliver a computed batch, after the graphs that it jumps to."""
        for request in batch:
            self._jump(request, self.roots)

    def _jump(self, request: Request, roots: Sequence[str], *_: object) -> None:
        """Run the graphs one after the other, then deliver the request."""
        image = request.data[TASK_DATA_KEY][0]
        for number, root in enumerate(roots, 1):
            if parts := [{TASK_DATA_KEY: (image, visit)} for visit in range(self.simulation.visits(root, image))]:
                self.runtime.run_graphs(root, parts, partial(self._jump, request, roots[number:]), request)
                return
        self.finish(request)

    def finish(self, request: Request) -> None:
        """Deliver a request."""
        request.data.update(self.simulation.keys(request.data))
        self.deliver(request)


class _Single(_InVirtualTime, SingleNode):
    """One request at a time."""


class _Remote(_InVirtualTime, SingleNode):
    """Shared nodes, which ``engine`` runs."""

    engine: Runtime

    def put(self, request: Request) -> None:
        self.instances[0].busy += 1  # NOTE: later nodes may wait for the request

        def on_done(errors: list[BaseException | None]) -> None:
            self.instances[0].busy -= 1
            self.finish(request)
            self.simulation.look += self._waiting

        self.engine.run_graphs(self.name, [{TASK_DATA_KEY: request.data[TASK_DATA_KEY]}], on_done, request)


class _Batching(_InVirtualTime, BatchingNode):
    """The real batching rule, with timers instead of sleeping threads."""

    def start_batches(self) -> None:
        while self.free:
            instance = self.free[-1]
            batch = self.closing(instance, self.simulation.now)
            if batch is None:
                self._waiting.add(self)
                close = self.next_close(instance)
                if close is not None:
                    self.simulation.wake_at(close, self)
                return
            self._waiting.discard(self)
            if not batch:
                return
            self.free.pop()
            self.simulation.start(self, instance, batch)


class _VirtualRuntime(Runtime):
    """A simulated worker process, or engine process; ``engine`` is that of a worker with shared nodes."""

    def __init__(
        self, pipeline: Pipeline, simulation: Simulation, worker: int, engine: _VirtualRuntime | None = None
    ) -> None:
        super().__init__(pipeline)
        self._simulation, self._worker, self._engine = simulation, worker, engine
        owners = {instance.node for instance in self.instances}
        for instance in self.instances:
            planned = self.plans[instance.node].batch_range()
            instance.min, instance.max = planned or simulation.costs.get(instance.node, Cost([[]])).limits
        self.nodes = {name: self.make_node(name) for name in self.plans if name in owners}
        self.connect({name: partial(self._passes, self.plans[name].spec.owner) for name in self.plans})

    def make_node(self, name: str) -> Node:
        parts, plan = self.parts_of(name), self.plans[name]
        node: _InVirtualTime
        if max(instance.max for instance in parts[1]) > 1:
            node = _Batching(*parts, plan.spec.batching_timeout / 1000)
        elif self._engine is not None and plan.backends[0].cls is Remote:
            node = _Remote(*parts)
            node.engine = self._engine
        else:
            node = _Single(*parts)
        node.simulation, node.runtime, node.worker = self._simulation, self, self._worker
        node.free, node.cost = list(parts[1]), self._simulation.costs.get(name, Cost([[]]))
        node.roots = list(plan.jumps())
        return node

    def _passes(self, owner: str, data: dict[str, Any]) -> Status:
        """The filter of each node, which runs for the images that reached the node when captured."""
        return Status.Run if self._simulation.visits(owner, data[TASK_DATA_KEY][0]) else Status.Skip


class Simulation:
    """Simulated workers and engine processes, each with the runtime of its plan, on the cores of a machine.

    Running batches share the cores evenly, and slow each other according to ``costs``, which is by node.
    """

    def __init__(
        self, plans: tuple[Sequence[Pipeline], Sequence[Pipeline]], costs: dict[str, Cost], machine: Machine
    ) -> None:
        self.costs, self.machine, self.now = costs, machine, 0.0
        self.look: list[_InVirtualTime] = []
        # Seconds, by node, from the arrival to the start of the batch.
        self.waited: defaultdict[str, float] = defaultdict(float)
        self._timers: list[tuple[float, int, _InVirtualTime]] = []
        self._numbers = count()
        self._jobs: list[_Job] = []
        self._under_way = 0  # requests
        self._rested: dict[Instance, float] = {}
        self._speeds: dict[frozenset[tuple[tuple[int, str], int]], dict[tuple[int, str], float]] = {}
        workers, engines = plans
        sources = [source for plan in workers for node in plan.spec.nodes.values() for source in node.map]
        self._names = {key for source in sources for pair in source.pairs for key in pair}
        shared = [_VirtualRuntime(plan, self, len(workers) + number) for number, plan in enumerate(engines)]
        self._workers = [
            _VirtualRuntime(plan, self, number, shared[number % len(shared)] if shared else None)
            for number, plan in enumerate(workers)
        ]

    # -- for nodes ------------------------------------------------------------------------------------------------

    def keys(self, data: dict[str, Any]) -> dict[str, Any]:
        """Keys that a backend may have written, for maps; a request's data is its image and the visit to a node."""
        return dict.fromkeys((*self._names, TASK_RESULT_KEY), data[TASK_DATA_KEY])

    def visits(self, node: str, image: int) -> int:
        """How often an image reaches a node; once if unknown."""
        cost = self.costs.get(node)
        return 1 if cost is None else len(cost.times[image % len(cost.times)])

    def start(self, node: _InVirtualTime, instance: Instance, batch: Sequence[Request]) -> None:
        """Start to compute a batch in an instance."""
        instance.busy = len(batch)
        self.waited[node.name] += sum(self.now - request.arrived for request in batch)
        work = self.machine.slower * node.cost.seconds([request.data[TASK_DATA_KEY] for request in batch])
        if self._rested.get(instance) != self.now:
            work += self.machine.handover
        self._jobs.append(_Job((node.worker, node.name), node.cost, work, lambda: self._end(node, instance, batch)))
        self._set_speeds()

    def _end(self, node: _InVirtualTime, instance: Instance, batch: Sequence[Request]) -> None:
        """End a batch; requests that wait for the instance continue at once."""
        node.ended(batch)
        instance.rest()
        self._rested[instance] = self.now
        node.free.append(instance)
        self.look += [node, *node._waiting]  # whose batches may close when a request leaves this one

    def wake_at(self, time: float, node: _InVirtualTime) -> None:
        """Check the node at ``time``."""
        heappush(self._timers, (time, next(self._numbers), node))

    # -- runs -----------------------------------------------------------------------------------------------------

    def open_loop(self, dues: Sequence[float]) -> list[float]:
        """The latency of each request in seconds, infinite without an answer; workers take turns."""
        ends = self._run(deque((due, turn) for turn, due in enumerate(dues)), len(dues))
        return [end - due for due, end in zip(dues, ends, strict=True)]

    def closed_loop(self, clients: int, calls: int) -> float:
        """Requests per second of clients that wait for each answer, over at least ten times as many calls.

        The first tenth is left out, and the end, when clients stop.
        """
        calls = max(calls, 10 * clients)
        ends = sorted(self._run(deque((0.0, client) for client in range(clients)), calls))[
            calls // 10 : calls - clients
        ]
        return (len(ends) - 1) / max(1e-12, ends[-1] - ends[0])

    def _run(self, left: deque[tuple[float, int]], calls: int) -> list[float]:
        """Advance time from event to event: requests, timers of batches, ends of jobs.

        ``left`` has the times at which requests are due, and whose turn it is; after an answer comes the next, up to
        ``calls``. Returns the time of each answer, infinite without one.
        """
        ends: list[float] = []

        def submit(turn: int) -> None:
            number = len(ends)
            ends.append(inf)

            def on_done(*_: object) -> None:
                self._under_way -= 1
                ends[number] = self.now
                if len(ends) + len(left) < calls:
                    left.append((self.now, turn))

            worker = self._workers[turn % len(self._workers)]
            entered = worker.graph.entered or worker.graph.roots
            self._under_way += 1
            try:
                worker.inflight.submit([Request({TASK_DATA_KEY: (number, 0)}, on_done, entered[0])])
            except Overloaded:  # not answered
                self._under_way -= 1

        jobs, timers = self._jobs, self._timers
        while self._under_way <= MOST_UNDER_WAY:
            arrival, timer = left[0][0] if left else inf, timers[0][0] if timers else inf
            first: _Job | None = None
            end = inf
            for job in jobs:
                at = self.now + job.left / job.speed
                if at < end:
                    first, end = job, at
            time = min(arrival, timer, end)
            if time == inf:
                break
            passed = max(0.0, time - self.now)
            for job in jobs:
                job.left -= passed * job.speed
            self.now = max(self.now, time)
            if arrival <= time:
                submit(left.popleft()[1])
            elif end <= time and first is not None:
                jobs.remove(first)
                self._set_speeds()
                first.done()
            else:
                self.look.append(heappop(timers)[2])
            while self.look:
                self.look.pop().start_batches()
        return ends + [inf] * (calls - len(ends))

    def _set_speeds(self) -> None:
        """Set each job's share of full speed, which depends on what else runs."""
        kinds: defaultdict[tuple[int, str], int] = defaultdict(int)
        for job in self._jobs:
            kinds[job.kind] += 1
        key = frozenset(kinds.items())
        if key not in self._speeds:
            self._speeds[key] = self._shares({job.kind[1]: job.cost for job in self._jobs}, kinds)
        speeds = self._speeds[key]
        for job in self._jobs:
            job.speed = speeds[job.kind]

    def _shares(self, costs: dict[str, Cost], kinds: dict[tuple[int, str], int]) -> dict[tuple[int, str], float]:
        asked = sum(costs[name].cores * number for (_, name), number in kinds.items())
        fair = min(1.0, self.machine.cores / asked) if asked else 1.0
        # NOTE: only those slow a job that run at the same time, on the other cores.
        beside = min(1.0, (self.machine.cores - 1) / max(1, sum(kinds.values()) - 1))
        totals: Counter[str] = Counter()
        of_worker: defaultdict[int, list[tuple[Cost, int]]] = defaultdict(list)
        for (worker, name), number in kinds.items():
            totals[name] += number
            of_worker[worker].append((costs[name], number))
        shares = {}
        for kind in kinds:
            cost = costs[kind[1]]
            slower = sum(number * min(cost.slowing, costs[name].slowing) for name, number in totals.items())
            locked = sum(number * (cost.lock + other.lock) / 2 for other, number in of_worker[kind[0]])
            shares[kind] = fair / (1 + beside * (slower - cost.slowing + locked - cost.lock))
        return shares
