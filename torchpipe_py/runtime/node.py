"""A node: its instances with a thread each, their backends, and the lane on which requests come to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

from torchpipe_py.backends.base import Backend, BackendConfig, Graphs, Shared
from torchpipe_py.backends.control.basic import Composed
from torchpipe_py.backends.control.python import PythonClass
from torchpipe_py.backends.deferred import DeferredBackend, HandOverBackend
from torchpipe_py.plan.build import NodePlan
from torchpipe_py.runtime.instance import Instance
from torchpipe_py.runtime.lanes.batching import BatchingLane
from torchpipe_py.runtime.lanes.deferred import DeferredLane
from torchpipe_py.runtime.lanes.hand_over import HandOverLane
from torchpipe_py.runtime.lanes.lane import Around, Fail, Lane, Led, Source
from torchpipe_py.runtime.lanes.single import SingleLane
from torchpipe_py.runtime.statistics import summed
from torchpipe_py.runtime.tracing import Recorder


class Node:
    """N instances and a lane, which is chosen once their backends are set up.

    ``fail(request, error)`` completes a request that cannot go on. ``waiting`` is shared by the lanes of a pipe.
    """

    lane: Lane

    def __init__(
        self,
        name: str,
        create: Sequence[Callable[[int], Backend]],
        *,
        timeout: float,
        fail: Fail,
        waiting: set[Led],
    ) -> None:
        self.name = name
        self.instances = [Instance(name, index, make) for index, make in enumerate(create)]
        self.max = self.min = 1
        self._timeout, self._fail, self._waiting = timeout, fail, waiting
        self._is_open = False

    def start(self) -> None:
        """Start the threads; their backends are set up side by side."""
        for instance in self.instances:
            instance.start()

    def wait_setup(self) -> BaseException | None:
        """Wait until every backend is set up, and choose the lane; or the first error."""
        errors = [instance.wait_setup() for instance in self.instances]
        error = next((error for error in errors if error is not None), None)
        if error is None:
            self.max = max(instance.max for instance in self.instances)
            self.min = min(instance.min for instance in self.instances)
            self.lane = self._choose_lane()
        return error

    def _choose_lane(self) -> Lane:
        common = self.name, self.instances, self._fail, self._waiting
        if self.max > 1:
            return BatchingLane(*common, self._timeout)
        if isinstance(self.instances[0].backend, HandOverBackend):
            return HandOverLane(*common)
        if all(isinstance(instance.backend, DeferredBackend) for instance in self.instances):
            return DeferredLane(*common)
        return SingleLane(*common)

    def open(self) -> None:
        """Let the instances take requests, once those of all nodes are set up."""
        self._is_open = True
        for instance in self.instances:
            instance.open(self.lane.serve)

    def refuse(self) -> None:
        """Run nothing more: what comes from now on fails with ``PipeClosed``."""
        if self._is_open:
            self.lane.is_closing = True

    def close(self) -> None:
        """Let every instance finish its batch and end; what is still queued fails with ``PipeClosed``."""
        if self._is_open:
            self.lane.close()
        for instance in self.instances:
            instance.open(None)  # for those that were not let do so yet

    @property
    def has_own_code(self) -> bool:
        """Whether one of its backends is none of this package's."""
        return any(_is_own_code(instance.backend) for instance in self.instances)

    def instrument(self, recorder: Recorder, around: Around | None) -> None:
        """Tell ``recorder`` of each batch from now on, and run ``forward`` by ``around``."""
        for instance in self.instances:
            instance.record.traces = (*instance.record.traces, recorder)
        self.lane.around = around

    def draw_from(self, source: Source) -> bool:
        """Before the first request: have the lane's leader fetch what waits there; ``False`` where it has none."""
        if isinstance(self.lane, BatchingLane):
            self.lane.draw_from(source)
            return True
        return False

    def current_instance(self) -> Instance | None:
        """The instance whose thread, or whose stand-in, is calling."""
        return next((instance for instance in self.instances if instance.is_current), None)

    def stats(self) -> dict[str, Any]:
        """One node now, and since it started; see ``torchpipe_py.runtime.statistics``.

        ``alive`` counts the instances whose thread runs, ``busy`` those that have requests. ``oldest_batch_s`` is how
        long the ``forward`` runs that has run longest, 0.0 where none does.
        """
        now = perf_counter()
        return {
            "instances": len(self.instances),
            "alive": sum(1 for instance in self.instances if instance.is_alive),
            "min": self.min,
            "max": self.max,
            "queued": self.lane.queued(),
            "busy": self.lane.busy(),
            "oldest_batch_s": max(instance.running_s(now) for instance in self.instances),
            **summed([instance.record for instance in self.instances]),
        }


def _is_own_code(backend: Backend) -> bool:
    is_builtin = type(backend).__module__.startswith("torchpipe_py.") and not isinstance(backend, PythonClass)
    return not is_builtin or any(map(_is_own_code, backend.config.children))


def creators(plan: NodePlan, graphs: Graphs) -> list[Callable[[int], Backend]]:
    """One function for each instance, from its index to its backend: several parts of an ``&`` are one backend."""
    counts = plan.spec.instance_num
    shared = [Shared() for _ in plan.backends]

    def create(instance: int) -> Backend:
        config = BackendConfig(
            label=plan.label,
            device_id=plan.spec.device_id,
            instance=instance,
            instance_num=max(counts),
            processes=plan.processes,
            reaches_caller=plan.reaches_caller,
            graphs=graphs,
        )
        parts = [
            backend.create(replace(config, shared=own, instance_num=count))
            for backend, count, own in zip(plan.backends, counts, shared, strict=True)
            if instance < count
        ]
        return parts[0] if len(parts) == 1 else Composed(replace(config, children=tuple(parts)))

    return [create] * max(counts)
