"""The processes of one configuration, and the changes that wait for the next one."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchpipe_py.errors import Overloaded, counted
from torchpipe_py.plan.sharing import same_shared, shared_files, shared_nodes
from torchpipe_server.options import Options
from torchpipe_server.supervisor.child import Child
from torchpipe_server.supervisor.forker import Role
from torchpipe_server.worker.service import engine_processes, has_engine

logger = logging.getLogger("torchpipe_server")

START_ATTEMPTS = 5  # of a worker that ends before it is ready
MOST_CHANGES = 16  # that wait for a reload to be over
RETRY_MS = 1000  # after a refused change

Change = tuple[Callable[[], Any], Callable[[str], object]]
"""What gives a configuration, and what gets the reason why it is not served, or "" once it is."""


class Changes:
    """Those that wait for a reload to be over, and who gets the outcome of the one under way."""

    def __init__(self) -> None:
        self.done: Callable[[str], object] | None = None  # of the one under way, not called yet
        self._waiting: deque[Change] = deque()

    def add(self, change: Change) -> None:
        """Have it wait; ``Overloaded`` where too many do."""
        if len(self._waiting) >= MOST_CHANGES:
            raise Overloaded(f"more than {MOST_CHANGES} changes wait", RETRY_MS)
        self._waiting.append(change)

    def next(self) -> Change | None:
        """That which has waited longest."""
        return self._waiting.popleft() if self._waiting else None

    def tell(self, problem: str) -> None:
        """Report the outcome of the one under way, once."""
        done, self.done = self.done, None
        if done is not None:
            done(problem)

    def stop(self, problem: str) -> None:
        """Report that to all."""
        self.tell(problem)
        while (change := self.next()) is not None:
            change[1](problem)


@dataclass(eq=False)  # NOTE: two that look alike are not the same: one may be of a reload that was given up
class WorkerSlot:
    """One worker or engine process of a generation, whichever process it is now, and its configuration.

    ``child`` is none while it is being forked, and during the pause before the next attempt.
    """

    index: int
    tables: Any
    role: Role = "worker"
    child: Child | None = None
    restarts: int = 0
    pauses: int = 0  # since it last worked for a while
    failures: int = 0  # starts that failed, since the last one that did not
    is_given_up: bool = False
    died_at: float = 0.0  # when its last process died with connections; 0 once the next one is ready

    @property
    def is_ready(self) -> bool:
        """Whether its process takes connections, or links."""
        child = self.child  # asked by other threads as well
        return child is not None and child.is_ready

    @property
    def name(self) -> str:
        """For a line in the log."""
        return f"{self.role} {self.index}"


class Generation:
    """``workers``, and where nodes are shared by several of them, ``engines``: as many for each device.

    Engine processes of the generation ``before`` go on where the shared nodes are the same: then their models are not
    loaded again. Where code of the user's own is imported it may have changed, and they do not.
    """

    def __init__(self, tables: Any, options: Options, before: Generation | None = None) -> None:
        self.workers = [WorkerSlot(index, tables) for index in range(options.workers)]
        self.engines: list[WorkerSlot] = []
        self.has_started_workers = False
        self.tables, self._files = tables, {}
        if has_engine(options, tables):
            # NOTE: looked at before anybody reads the files: what changes meanwhile is different at the next reload.
            self._files = shared_files(tables)
            if before is not None and not options.import_code and self._shares_with(before):
                self.engines = before.engines
            else:
                most, count = options.engines * max(1, len(options.device_numbers)), engine_processes(options, tables)
                if options.engines > 1 and count < most:
                    logger.warning(
                        "--engines %d: %d engine processes instead of %d, one for each worker (--workers)",
                        options.engines, count, most,
                    )  # fmt: skip
                self.engines = [WorkerSlot(index, tables, "engine process") for index in range(count)]
        elif options.engines > 1:
            reason = "no node has shared = true" if options.workers > 1 else "it takes --workers of 2 or more"
            logger.warning("--engines %d does nothing: %s", options.engines, reason)

    def log_engines(self, options: Options, before: Generation | None = None) -> None:
        """Log which engine processes run its shared nodes, and whether they are those of the generation ``before``."""
        if not self.engines:
            return
        named = [
            f"{engine.name} on CUDA device {device}" if (device := options.device_of(engine.index)) else engine.name
            for engine in self.engines
        ]
        logger.info(
            "shared nodes (%s) run in %s for %d workers: %s%s",
            ", ".join(shared_nodes(self.tables)), counted(len(named), "engine process"), options.workers,
            ", ".join(named), ", as before" if before is not None and before.engines is self.engines else "",
        )  # fmt: skip

    def _shares_with(self, before: Generation) -> bool:
        """Whether the engine processes of the generation before run what those of this one would."""
        are_ready = bool(before.engines) and all(engine.is_ready for engine in before.engines)
        return are_ready and self._files == before._files and same_shared(before.tables, self.tables)

    @property
    def slots(self) -> list[WorkerSlot]:
        """All of them."""
        return [*self.engines, *self.workers]

    def engine_of(self, worker: WorkerSlot) -> WorkerSlot | None:
        """One on the worker's device."""
        return self.engines[worker.index % len(self.engines)] if self.engines else None

    def hopeless(self) -> str:
        """Why it will never serve; empty while it may."""
        for slots in (self.workers, self.engines):
            if slots and all(slot.is_given_up for slot in slots):
                return f"no {slots[0].role} can be started, after {START_ATTEMPTS} attempts each"
        missing = [engine.name for engine in self.engines if engine.is_given_up]
        if missing and not self.has_started_workers:  # which wait for all of them
            return f"{missing[0]} cannot be started, after {START_ATTEMPTS} attempts"
        return ""
