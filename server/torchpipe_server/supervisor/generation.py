"""The processes of one configuration, and the changes that wait for a reload."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from torchpipe_py import Overloaded
from torchpipe_py.serving import (
    Folder,
    counted,
    is_same_certificate,
    name_of,
    same_shared,
    shared_files,
    shared_nodes,
)
from torchpipe_server.options import Options
from torchpipe_server.supervisor.child import Child
from torchpipe_server.supervisor.forker import Role
from torchpipe_server.worker.service import engine_processes, has_engine

logger = logging.getLogger("torchpipe_server")

START_ATTEMPTS = 5  # failed starts in a row until a worker is given up
MOST_CHANGES = 16  # that may wait for a reload to finish
RETRY_MS = 1000  # after a refused change


class Configuration(NamedTuple):
    """What the processes of a generation run: its tables, and those of the streams that its workers read.

    ``files`` has the states of the files that shared nodes name, if engine processes run these. NOTE: recorded before
    the processes read them: a change meanwhile is then noticed at the next reload.
    """

    tables: Any
    streams: Mapping[str, Any] = MappingProxyType({})
    files: Mapping[str, Any] = MappingProxyType({})

    @classmethod
    def of(cls, tables: Any, streams: Mapping[str, Any], options: Options) -> Configuration:
        """A configuration with the present states of its files, which takes as long as their storage does."""
        return cls(tables, streams, shared_files(tables) if has_engine(options, tables) else {})


class Change(NamedTuple):
    """``load`` returns a configuration, ``done`` gets "" once it is served, or the reason why not.

    ``load`` is called on another thread. ``model``: the one that differs, in a folder.
    """

    load: Callable[[], Configuration]
    done: Callable[[str], object]
    model: str


class Changes:
    """Changes that wait for a reload to finish, and the one in progress."""

    def __init__(self) -> None:
        self.current: Change | None = None
        self._waiting: deque[Change] = deque()

    def add(self, change: Change) -> None:
        """Queue a change; ``Overloaded`` if too many wait."""
        if len(self._waiting) >= MOST_CHANGES:
            raise Overloaded(f"more than {MOST_CHANGES} changes wait", RETRY_MS)
        self._waiting.append(change)

    def next(self) -> Change | None:
        """The change that has waited longest, if any."""
        return self._waiting.popleft() if self._waiting else None

    def report(self, problem: str) -> None:
        """Report the outcome of the change in progress, once."""
        current, self.current = self.current, None
        if current is not None:
            _report(current, problem)

    def stop(self, problem: str) -> None:
        """Report ``problem`` to all."""
        waiting, self._waiting = self._waiting, deque()
        self.report(problem)
        for change in waiting:
            _report(change, problem)


def _report(change: Change, problem: str) -> None:
    """Report the outcome of a change; others are reported, and begin, whatever its callback raises."""
    try:
        change.done(problem)
    except Exception:
        logger.exception("internal error while the outcome of a change was reported")


@dataclass(eq=False)  # NOTE: equal slots differ: one may belong to a reload that was given up
class WorkerSlot:
    """The place of a worker or engine process in a generation, filled by one process after another.

    ``child`` is ``None`` during a fork and during the pause before the next attempt.
    """

    index: int
    tables: Any
    role: Role = "worker"
    child: Child | None = None
    restarts: int = 0
    pauses: int = 0  # since it last worked for a while
    failures: int = 0  # failed starts in a row
    is_given_up: bool = False
    died_at: float = 0.0  # when its last process died with connections; 0 once the next one is ready

    @property
    def is_ready(self) -> bool:
        """Whether its process takes connections or links."""
        child = self.child  # read once: other threads call this too
        return child is not None and child.is_ready

    @property
    def name(self) -> str:
        """Its name in the log."""
        return f"{self.role} {self.index}"


class Generation:
    """``workers`` and, if they share nodes, ``engines``: the same number for each device.

    Engine processes of the generation ``before`` are kept if the shared nodes are the same, so that models are not
    loaded again; not if custom code is imported, which may have changed, nor with another certificate.
    """

    def __init__(self, configuration: Configuration, options: Options, before: Generation | None = None) -> None:
        tables = configuration.tables
        self.tables, self.streams, self._files = configuration
        self.workers = [WorkerSlot(index, tables) for index in range(options.workers)]
        self.engines: list[WorkerSlot] = []
        self.has_started_workers = False
        if has_engine(options, tables):
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
        """Log which engine processes run its shared nodes, and whether they are kept from ``before``."""
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
        """Whether the engine processes of ``before`` run the same shared nodes as this generation."""
        are_ready = bool(before.engines) and all(engine.is_ready for engine in before.engines)
        are_checked = is_same_certificate(before.tables, self.tables)
        return are_ready and are_checked and self._files == before._files and same_shared(before.tables, self.tables)

    def changes_alone(self, folder: Folder, name: str, options: Options) -> bool:
        """Whether its workers can load and unload model ``name``, since no engine process runs nodes of it."""
        shared = [*shared_nodes(self.tables), *shared_nodes(folder)] if options.workers > 1 else []
        return all(name_of(node.rpartition("/")[0]) != name for node in shared)

    @property
    def slots(self) -> list[WorkerSlot]:
        """All slots."""
        return [*self.engines, *self.workers]

    def engine_of(self, worker: WorkerSlot) -> WorkerSlot | None:
        """The engine process of a worker, on the same device."""
        return self.engines[worker.index % len(self.engines)] if self.engines else None

    def hopeless(self) -> str:
        """Why it will never serve; empty if it may."""
        for slots in (self.workers, self.engines):
            if slots and all(slot.is_given_up for slot in slots):
                return f"no {slots[0].role} can be started, after {START_ATTEMPTS} attempts each"
        missing = [engine.name for engine in self.engines if engine.is_given_up]
        if missing and not self.has_started_workers:  # workers wait for all engines
            return f"{missing[0]} cannot be started, after {START_ATTEMPTS} attempts"
        return ""
