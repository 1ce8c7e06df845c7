"""The processes that serve one configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchpipe_py.plan.sharing import has_shared
from torchpipe_server.options import Options
from torchpipe_server.supervisor.child import Child
from torchpipe_server.supervisor.forker import Role


@dataclass(eq=False)  # NOTE: two that look alike are not the same: one may be of a reload that was given up
class WorkerSlot:
    """One worker or engine process of a generation, whichever process it is now, and its configuration.

    ``child`` is none while it is being forked, and during the pause before the next attempt, at ``start_at``.
    """

    index: int
    tables: Any
    role: Role = "worker"
    child: Child | None = None
    restarts: int = 0
    pauses: int = 0  # since it last worked for a while
    failures: int = 0  # starts that failed, since the last one that did not
    start_at: float = 0.0
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
    """``workers``, and where nodes are shared by several of them, ``engines``: one for each device."""

    def __init__(self, tables: Any, options: Options) -> None:
        self.workers = [WorkerSlot(index, tables) for index in range(options.workers)]
        devices = [part for part in options.devices.split(",") if part.strip()]
        is_shared = options.workers > 1 and has_shared(tables)
        count = min(max(1, len(devices)), options.workers) if is_shared else 0
        self.engines = [WorkerSlot(index, tables, "engine process") for index in range(count)]
        self.has_started_workers = False

    @property
    def slots(self) -> list[WorkerSlot]:
        """All of them."""
        return [*self.engines, *self.workers]

    def engine_of(self, worker: WorkerSlot) -> WorkerSlot | None:
        """The one on the worker's device."""
        return self.engines[worker.index % len(self.engines)] if self.engines else None
