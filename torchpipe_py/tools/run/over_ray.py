"""Jobs on a Ray cluster, by Ray Data: actors with a pipe each read files and make their lines."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import numpy as np

from torchpipe_py.cores import usable_cores
from torchpipe_py.errors import first_line
from torchpipe_py.ray.resources import plan_replica, resources_of
from torchpipe_py.tools.report import ToolError
from torchpipe_py.tools.run.lines import Job, LineMaker, Settings, StartedJob
from torchpipe_py.tools.run.local_workers import Outcome
from torchpipe_py.tools.run.sources import is_url

ROUND = 50_000
"""Jobs of one dataset; their paths are in memory."""

BLOCK = 256
"""Jobs of one block, so of one call of an actor."""


def refusal(path: str) -> ToolError:
    """The error for a tar or video in SOURCE."""
    return ToolError(f"--ray takes files and URLs, not tars and videos, which one machine reads: {path}")


class RayWorkers:
    """Runs jobs in rounds: a dataset of jobs, whose blocks go through a pool of actors.

    ``count`` is the number of actors; 0: as many as the cluster has CPUs or GPUs for. Raises ``ToolError``.
    """

    def __init__(self, address: str, settings: Settings, count: int) -> None:
        try:
            import ray
        except ImportError:
            raise ToolError("--ray needs Ray (pip install 'torchpipe_py[ray]')") from None
        self._ray = ray
        try:
            ray.init(address, ignore_reinit_error=True)
        except Exception as error:
            raise ToolError(f"--ray {address}: {first_line(error)}") from error
        ray.data.DataContext.get_current().enable_progress_bars = False
        imports = tuple(os.path.abspath(name) if name.endswith(".py") else name for name in settings.imports)
        folder = os.path.abspath(settings.folder) if settings.folder else ""
        self._settings = replace(settings, imports=imports, folder=folder)
        needs = resources_of(plan_replica(settings.config))
        self._devices = {"num_gpus": needs.num_gpus} if needs.num_gpus else {"num_cpus": needs.num_cpus}
        self._count = count or self._usual_count()
        self._jobs: dict[int, Job] = {}
        """Those of the round that are not done."""
        self._wanted: dict[int, Job] = {}
        """By content: those of them that are to be computed."""
        self._round: Iterator[Any] | None = None

    @property
    def has_room(self) -> bool:
        return self._round is None and not self._wanted and len(self._jobs) < ROUND

    @property
    def is_idle(self) -> bool:
        return not self._jobs

    @property
    def most(self) -> int:
        return ROUND

    def add(self, job: Job) -> None:
        if job.data is not None:
            raise refusal(job.where)
        self._jobs[job.number] = job if is_url(job.where) else job._replace(where=os.path.abspath(job.where))

    def decide(self, number: int, is_wanted: bool) -> None:
        job = self._jobs[number] if is_wanted else self._jobs.pop(number)
        if is_wanted:
            self._wanted[number] = job

    def take(self) -> list[Outcome]:
        """The outcomes of the next block."""
        try:
            if self._round is None:
                self._round = self._begin()
            block = next(self._round, None)
        except ToolError:
            raise
        except Exception as error:  # of any kind: what an actor raised, or Ray itself
            raise ToolError(f"--ray: {first_line(error)}") from error
        if block is None:
            self._round = None
            return []
        outcomes: list[Outcome] = []
        for number, outcome in zip(block["number"], block["outcome"], strict=True):
            number = int(number)
            if outcome.endswith(b"\n"):
                del self._jobs[number]
                outcomes.append((number, bytes(outcome)))
            else:
                self._jobs[number] = self._jobs[number].hashed(outcome.decode())
                outcomes.append((number, outcome.decode()))
        return outcomes

    def finish(self) -> None:
        """Nothing: the actors end with their datasets."""

    def close(self) -> None:
        """Disconnect; the actors end."""
        self._round = None
        with suppress(Exception):
            self._ray.shutdown()

    def _begin(self) -> Iterator[Any]:
        """Start the round: with content the files are hashed first, then those that are wanted are computed."""
        data = self._ray.data
        hashes = self._settings.by_content and not self._wanted
        jobs = list(self._wanted.values()) or list(self._jobs.values())
        self._wanted = {}
        rows = [{"job": pickle.dumps(job)} for job in jobs]
        dataset = data.from_items(rows, override_num_blocks=-(-len(rows) // BLOCK))
        if hashes:
            mapped = dataset.map_batches(_hashes, batch_size=None)
        else:
            mapped = dataset.map_batches(
                _Lines,
                fn_constructor_args=(self._settings, os.getcwd()),
                compute=data.ActorPoolStrategy(size=min(self._count, -(-len(rows) // BLOCK))),
                batch_size=None,
                **self._devices,
            )
        blocks: Iterator[Any] = iter(mapped.iter_batches(batch_size=None, batch_format="numpy"))
        return blocks

    def _usual_count(self) -> int:
        (name, each), *_ = self._devices.items()
        there = self._ray.cluster_resources().get("GPU" if name == "num_gpus" else "CPU", 1.0)
        # NOTE: Ray Data itself needs a CPU, or it waits forever.
        return max(1, int((there if name == "num_gpus" else there - 1) // each))


def _block(outcomes: list[tuple[int, bytes]]) -> dict[str, np.ndarray]:
    column = np.empty(len(outcomes), object)
    for row, (_, outcome) in enumerate(outcomes):
        column[row] = outcome
    return {"number": np.array([number for number, _ in outcomes], np.int64), "outcome": column}


def _hashes(block: dict[str, Any]) -> dict[str, np.ndarray]:
    """The SHA-256 of each job's file, or the line of one that cannot be read."""
    from hashlib import sha256

    from torchpipe_py.tools.run.lines import failed_line
    from torchpipe_py.tools.run.sources import read_item

    outcomes = []
    for job in map(pickle.loads, block["job"]):
        try:
            outcome = sha256(read_item(job.where)).hexdigest().encode()
        except Exception as error:
            outcome = failed_line(job.head, error)
        outcomes.append((job.number, outcome))
    return _block(outcomes)


class _Lines:
    """In an actor: a pipe, called with blocks of jobs."""

    def __init__(self, settings: Settings, folder: str) -> None:
        if os.path.isdir(folder):
            os.chdir(folder)  # relative paths are those of the driver
        self._ended: SimpleQueue[StartedJob] = SimpleQueue()
        put: Callable[[StartedJob], None] = self._ended.put
        self._maker = LineMaker(settings, usable_cores(), put)

    def __call__(self, block: dict[str, Any]) -> dict[str, np.ndarray]:
        outcomes: list[tuple[int, bytes]] = []

        def take() -> None:
            ended = self._ended.get()
            outcomes.append((ended.job.number, self._maker.line(ended)))

        for started, job in enumerate(map(pickle.loads, block["job"])):
            if started - len(outcomes) >= self._maker.ahead:
                take()
            try:
                self._maker.start(job, *self._maker.read(job))
            except Exception as error:
                self._maker.fail(job, error)
        while len(outcomes) < len(block["job"]):
            take()
        return _block(outcomes)

    def close(self) -> None:
        """Close the pipe."""
        self._maker.close()
