"""The worker processes of a run, seen from their parent."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from selectors import EVENT_READ, DefaultSelector
from time import monotonic
from typing import Any

from torchpipe_py.errors import WorkerDied, counted, first_line, logger
from torchpipe_py.proc.child import ChildProcess
from torchpipe_py.tools.report import ToolError
from torchpipe_py.tools.run.lines import Job, Settings

MODULE = "torchpipe_py.tools.run.worker"
MOST_BYTES = 2**26
"""Bytes of members and frames that are sent to a worker and not finished; a larger one is sent alone."""

CLOSE_SECONDS = 10.0
"""The longest wait for a worker to close its pipe."""

TOGETHER = 16
"""Jobs in one message."""

_LOOK_SECONDS = 0.25  # between two checks for workers that hang

Outcome = tuple[int, "bytes | str | WorkerDied"]
"""The number of a job, and its line, the hash of its content, or the reason why its worker died of it."""


class _LocalWorker:
    """A worker and its jobs.

    ``suspects`` were with a worker that died: they run one at a time, so that only the one that kills a worker fails.
    """

    def __init__(self, settings: Settings, processes: int, suspects: Iterable[Job] = ()) -> None:
        self.child = ChildProcess.spawn("worker", MODULE, leads_session=True)
        self.child.send((settings, processes, logger.getEffectiveLevel()))
        self.ahead = 0
        """Jobs that it may have; 0 until it is ready."""
        self.jobs: dict[int, Job] = {}
        self.bytes = 0
        self.unsent: list[Job] = []
        self.suspects = deque(suspects)
        self.heard = monotonic()
        # NOTE: the process too, since a program that a backend has started may hold the channel open.
        self.ends = [end for end in (self.child.channel, self.child.fileno()) if end not in (None, -1)]

    @property
    def has_room(self) -> bool:
        return len(self.jobs) < self.ahead and not self.suspects and (self.bytes < MOST_BYTES or not self.jobs)

    def add(self, job: Job) -> None:
        if not self.jobs:
            self.heard = monotonic()
        self.jobs[job.number] = job
        self.bytes += _size(job)
        self.unsent.append(job)
        if len(self.unsent) >= TOGETHER or job.data is not None:
            self.flush()

    def flush(self) -> None:
        """Send what is unsent; a worker that is dead is noticed where its answers are read."""
        if self.unsent:
            self.send(self.unsent)
            self.unsent = []

    def send(self, message: Any) -> None:
        try:
            self.child.send(message)
        except WorkerDied:
            pass

    def end_job(self, number: int) -> None:
        self.bytes -= _size(self.jobs.pop(number))

    def next_suspect(self) -> None:
        """Run the next suspect once the one before has ended."""
        if self.ahead and self.suspects and not self.jobs:
            self.add(self.suspects.popleft())
            self.flush()


def _size(job: Job) -> int:
    return 0 if job.data is None else int(getattr(job.data, "nbytes", 0) or len(job.data))


class LocalWorkers:
    """``count`` worker processes, each with a pipe. A worker that dies is replaced.

    Raises ``ToolError`` if one cannot be set up. A worker that gives no answer for ``seconds`` is killed.
    """

    def __init__(self, settings: Settings, count: int, seconds: float) -> None:
        self._settings, self._seconds = settings, seconds
        self._workers: list[_LocalWorker] = []
        self._count = count
        self._selector = DefaultSelector()
        try:
            for _ in range(count):
                self._workers.append(self._started())
        except BaseException:
            self.close()
            raise

    @property
    def has_room(self) -> bool:
        """Whether a worker takes another job."""
        return any(worker.has_room for worker in self._workers)

    @property
    def is_idle(self) -> bool:
        """Whether no job is left."""
        return not any(worker.jobs or worker.suspects for worker in self._workers)

    @property
    def most(self) -> int:
        """Jobs that all workers may have together."""
        return sum(worker.ahead for worker in self._workers)

    def add(self, job: Job) -> None:
        """Give a job to the worker with the fewest; only if there is room."""
        min((worker for worker in self._workers if worker.has_room), key=lambda worker: len(worker.jobs)).add(job)

    def decide(self, number: int, is_wanted: bool) -> None:
        """Answer the hash of a job: whether its worker is to run it; if not, it has no line."""
        for worker in self._workers:
            if number in worker.jobs:
                worker.send((number, is_wanted))
                if not is_wanted:
                    worker.end_job(number)
                    worker.next_suspect()
            elif not is_wanted:  # its worker has died meanwhile; if it is wanted, it is read and hashed again
                worker.suspects = deque(job for job in worker.suspects if job.number != number)

    def take(self) -> list[Outcome]:
        """Wait until something has ended, for a moment at most, and return it."""
        for worker in self._workers:
            worker.flush()
        ready = {key.fileobj: key.data for key, _ in self._selector.select(_LOOK_SECONDS)}
        outcomes: list[Outcome] = []
        for worker in dict.fromkeys(ready.values()):
            channel = worker.child.channel
            try:
                if channel not in ready:  # it has ended, and all that it has sent is read
                    raise EOFError
                message = channel.recv()
            except (EOFError, OSError):
                outcomes += self._replace(worker)
                continue
            outcomes += self._read(worker, message)
        self._kill_hung()
        return outcomes

    def finish(self) -> None:
        """Let the workers close their pipes, once they are idle; those that take too long are killed."""
        for worker in self._workers:
            worker.send(None)
        for worker in self._workers:
            worker.child.end(CLOSE_SECONDS)

    def close(self) -> None:
        """End the processes, with what their backends have started; may be called after ``finish``."""
        for worker in self._workers:
            worker.child.kill()
        for worker in self._workers:
            worker.child.end()
        self._selector.close()

    def _started(self, suspects: Iterable[Job] = ()) -> _LocalWorker:
        try:
            worker = _LocalWorker(self._settings, self._count, suspects)
        except OSError as error:
            raise ToolError(f"a worker process cannot be started: {error.strerror or first_line(error)}") from error
        for end in worker.ends:
            self._selector.register(end, EVENT_READ, worker)
        return worker

    def _read(self, worker: _LocalWorker, message: Any) -> Sequence[Outcome]:
        worker.heard = monotonic()
        if isinstance(message, list):
            for number, outcome in message:
                if isinstance(outcome, bytes):
                    worker.end_job(number)
                elif number in worker.jobs:  # another worker that has to read it again keeps the hash
                    worker.jobs[number] = worker.jobs[number].hashed(outcome)
            worker.next_suspect()
            return message
        kind, value = message
        if kind == "failed":
            raise ToolError(value)
        worker.ahead = value
        worker.next_suspect()
        return []

    def _replace(self, worker: _LocalWorker) -> list[Outcome]:
        """Start another worker in place of a dead one; the only job that it had fails."""
        for end in worker.ends:
            self._selector.unregister(end)
        error = worker.child.kill_and_describe()
        if not worker.ahead:
            raise ToolError(f"{error} while it was set up; is there enough memory?")
        lost = list(worker.jobs.values())
        suspects = [*(lost if len(lost) > 1 else ()), *worker.suspects]
        if suspects:
            logger.warning("%s; %s run again, one at a time", error, counted(len(suspects), "file"))
        self._workers[self._workers.index(worker)] = self._started(suspects)
        return [(lost[0].number, error)] if len(lost) == 1 else []

    def _kill_hung(self) -> None:
        now = monotonic()
        for worker in self._workers:
            if worker.jobs and now - worker.heard > self._seconds:
                logger.error("a worker has given no answer for %g s and is killed: does a backend hang?", self._seconds)
                worker.child.kill()
                worker.heard = now
