"""One backend on its own thread, which sets it up, runs it and closes it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from numbers import Integral
from time import perf_counter

from torchpipe_py.backends.base import Backend, BackendConfig, Graphs, Shared
from torchpipe_py.backends.control.basic import Composed
from torchpipe_py.backends.current import CURRENT
from torchpipe_py.errors import log_failure
from torchpipe_py.metrics import Metrics, collect_in
from torchpipe_py.plan.build import NodePlan
from torchpipe_py.runtime.nodes.idle import Sleeper
from torchpipe_py.runtime.record.statistics import Record, Recorder
from torchpipe_py.runtime.request import Request

THREAD_PREFIX = "torchpipe-"
"""Prefix of the names of a pipe's threads."""


class Instance(Sleeper):
    """One backend and its thread, which waits between ``setup`` and the first request for ``open``.

    ``stand_ins`` are the identities of other threads that act for it: a caller that runs ``forward``, or threads that
    deliver results from elsewhere. ``metrics`` gets what the backend declares. ``taken`` are the requests on its own
    thread, ``busy`` counts the undelivered requests on its thread or the caller's, ``started`` is when ``forward`` was
    last called for them (``perf_counter``; 0.0 when idle), ``deadline`` is their last deadline. Only one of these two
    threads at a time writes these and ``record``.
    """

    def __init__(
        self, node: str, index: int, create: Callable[[int], Backend], recorders: Sequence[Recorder] = (),
        metrics: Metrics | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.node, self.index = node, index
        self.backend = Backend(BackendConfig(instance=index))  # a placeholder before set-up and after the end
        self.max = self.min = 1
        self.taken: Sequence[Request] = ()
        self.busy = 0
        self.stand_ins: set[int] = set()
        self.started = 0.0
        self.deadline: float | None = None
        self.last_compute = 0.0  # seconds
        self.record = Record(node, index, recorders)
        self._create: Callable[[int], Backend] | None = create
        self._metrics = metrics
        self._setup_error: BaseException | None = None
        self._is_set_up, self._is_opened = threading.Event(), threading.Event()
        self._serve: Callable[[Instance], None] | None = None
        self._thread = threading.Thread(target=self._main, name=f"{THREAD_PREFIX}{node}-{index}", daemon=True)

    def start(self) -> None:
        """Start the thread, which sets the backend up."""
        self._thread.start()

    def wait_setup(self) -> BaseException | None:
        """Wait until the backend is set up; returns the exception that this raised, if any."""
        self._is_set_up.wait()
        return self._setup_error

    def open(self, serve: Callable[[Instance], None] | None) -> None:
        """Let the thread run ``serve(self)``; with ``None`` it ends at once."""
        self._serve = self._serve or serve
        self._is_opened.set()

    def join(self, until: float) -> None:
        """Wait until the thread ends, at most until ``until``."""
        self._thread.join(max(0.0, until - perf_counter()))

    @property
    def is_alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    def rest(self) -> None:
        """Mark the instance as idle, and release its last batch."""
        self.taken = ()
        self.started = self.busy = 0

    def running_s(self, now: float) -> float:
        """Seconds since the running ``forward`` began, on any thread or process; 0.0 if none runs."""
        started = self.started or self.backend.running_since()
        return max(0.0, now - started) if started else 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A context in which its ``forward`` does not count as running: it waits for memory or for other nodes."""
        self.started = 0.0
        try:
            yield
        finally:
            self.started = perf_counter()

    @property
    def is_current(self) -> bool:
        """Whether the calling thread is its own, or one that acts for it."""
        return self._thread is threading.current_thread() or threading.get_ident() in self.stand_ins

    def _main(self) -> None:
        collect_in(self._metrics, (self.node, self.index))
        try:
            self._set_up()
        except BaseException as error:
            self._setup_error = error
        finally:
            self._is_set_up.set()
        self._is_opened.wait()
        CURRENT.instance = self
        if self._serve is not None:
            self._serve(self)
        try:
            self.backend.close()
        except BaseException as error:
            log_failure(f"node {self.node!r}: close of instance {self.index} failed", error)
        # State that the instances share, such as an engine, is freed with the last of them.
        self.backend, self._create = Backend(BackendConfig(instance=self.index)), None

    def _set_up(self) -> None:
        assert self._create is not None
        self.backend = self._create(self.index)
        self.backend.setup()
        low, high = self.backend.min(), self.backend.max()
        are_sizes = isinstance(low, Integral) and isinstance(high, Integral)
        if not (are_sizes and 1 <= low <= high <= sys.maxsize):
            raise ValueError(
                f"{self.backend.config.label} has no valid range: min() and max() must be integers with "
                f"1 <= min() <= max() <= {sys.maxsize}, not {low} and {high}"
            )
        self.max, self.min = int(high), int(low)


def creator(plan: NodePlan, graphs: Graphs | None = None) -> Callable[[int], Backend]:
    """A function from the index of an instance to its backend, in which the parts of an ``&`` are combined."""
    counts = plan.spec.instance_num
    shared = [Shared() for _ in plan.backends]

    def create(instance: int) -> Backend:
        config = BackendConfig(
            label=plan.label,
            node=plan.spec.name,
            device_id=plan.spec.device_id,
            instance=instance,
            instance_num=max(counts),
            processes=plan.processes,
            reaches_caller=plan.reaches_caller,
            graphs=graphs,
            reloading=plan.reloading,
        )
        parts = [
            backend.create(replace(config, shared=own, instance_num=count))
            for backend, count, own in zip(plan.backends, counts, shared, strict=True)
            if instance < count
        ]
        return parts[0] if len(parts) == 1 else Composed(replace(config, children=tuple(parts)))

    return create
