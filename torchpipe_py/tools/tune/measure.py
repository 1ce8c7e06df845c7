"""Runs candidates in the tuner's processes and measures them under load: first the user's file, to know how."""

from __future__ import annotations

import math
import statistics
from collections import ChainMap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Protocol

from torchpipe_py.errors import listed
from torchpipe_py.tools.load.arrivals import repeated
from torchpipe_py.tools.load.in_process import WAIT_S, Failed
from torchpipe_py.tools.report import ToolError, printable
from torchpipe_py.tools.statistics import quantile
from torchpipe_py.tools.team import Team
from torchpipe_py.tools.tune.candidates import Candidate, as_served

CALLS = (20, 2500)
"""The least and the most requests of an open loop."""

MOST_ARRIVALS = 8 * CALLS[1]
"""Arrivals of the schedule from which open loops take their parts."""

OPEN_LOOP_S = (0.15, 2.0)
"""The least and the greatest length of an open loop."""

LEAST_SLOS = 5
"""The same in SLOs: in a shorter loop a queue that only grows stays within the SLO."""

USUAL_SLO_LONE_TIMES, USUAL_SLO_S = 10, 0.02
"""The SLO without ``--slo-p99``: so many times a single request's time, at least so many seconds."""

LONGEST_SLO_LONE_TIMES = 4
"""The longest SLO that is measured allows at least so many times a single request's time."""

CLIENTS_PER_CORE = 10
"""The most clients of a closed loop, per core."""

MOST_BUILT, MOST_BUILT_ON_GPU = 4, 2
"""Candidates whose pipes are kept, so that they can take turns; on a GPU they share its memory."""

LATE_S = 2 * WAIT_S
"""How long a process may take beyond the length of a load, and to close a pipe."""

SET_UP_S = 600.0
"""How long a pipe may take to be built: TensorRT may build an engine."""

WARM_UP_CLIENTS, WARM_UP_S, WARM_UP_ON_GPU_S = 8, 0.15, 0.5

HEAD_START_S = 0.05
"""Time for all processes to get ready for a loop, which they begin at once."""

FIRST_LOOP_S, FIRST_LOOP_LONE_TIMES = (0.5, 3.0), 4
"""The length of the first closed loop: so many seconds, as two answers of each client take, but at least so many times
what a single request takes.

NOTE: a node may decode a whole batch of large images before it answers the first one.
"""

MOST_QUEUE_S = 0.3
"""How long clients wait at most, unless they are two per core: else a slow pipe answers nothing within a loop."""

ANSWERS, CLOSED_LOOP_S = 60, (0.3, 2.0)
"""A closed loop is as long as so many answers take, within these seconds."""

NEVER_S = 60.0
"""In place of an infinite p99."""


@dataclass(frozen=True)
class Goal:
    """Most requests per second with a p99 of at most ``slo`` seconds or, with a ``rate``, the shortest p99.

    ``times`` is the schedule of arrivals for all candidates, on average one per second. An open loop takes ``seconds``.
    """

    slo: float
    rate: float | None
    times: Sequence[float]
    seconds: float

    @classmethod
    def of(cls, slo: float | None, rate: float | None, times: Sequence[float], lone: float, seconds: float) -> Goal:
        """The goal for requests that alone take ``lone`` seconds, with open loops of about so many ``seconds``."""
        least, most = OPEN_LOOP_S
        longest = max(most / LEAST_SLOS, LONGEST_SLO_LONE_TIMES * lone)
        slo = min(longest, slo or max(USUAL_SLO_S, USUAL_SLO_LONE_TIMES * lone))
        return cls(slo, rate, repeated(times, MOST_ARRIVALS), min(most, max(least, seconds, LEAST_SLOS * slo)))

    def send_times(self, rate: float, number: int = 0) -> list[float]:
        """The times at which the calls of an open loop at ``rate`` are due.

        Loops of another ``number`` have another part of the schedule, each at the same rate.
        """
        count = max(CALLS[0], min(CALLS[1], round(rate * self.seconds)))
        first = number * count % max(1, len(self.times) - count)
        some = self.times[first : first + count]
        factor = (len(some) - 1) / rate / (some[-1] - some[0] or math.inf)
        return [(time - some[0]) * factor for time in some]


@dataclass(frozen=True)
class Point:
    """One open loop: requests per second, and latencies in seconds; infinite if over 1 % had no answer."""

    rate: float
    p50: float
    p99: float


class Measurer(Protocol):
    """Measures candidates; the ``number`` of a loop chooses its arrivals. Raises ``ToolError`` if one cannot run."""

    def figure(self, candidate: Candidate, number: int) -> float:
        """Measure what the goal asks for, more is better: answers per second, or with a rate the inverse of the p99."""

    def point(self, candidate: Candidate, rate: float, number: int) -> Point:
        """One open loop."""

    def busy(self, candidate: Candidate) -> dict[str, float]:
        """Milliseconds that each node has computed so far."""


class Service:
    """Runs candidates in processes, one for each core and ``engines`` more; those used last stay built.

    A candidate may take ``gpu_memory`` bytes. All methods build the candidate unless it is built, and raise
    ``ToolError`` if that fails, or takes too much GPU memory.
    """

    def __init__(
        self,
        images: Sequence[bytes],
        imports: Sequence[str],
        cores: Sequence[int],
        engines: int,
        gpu_memory: float = math.inf,
    ) -> None:
        self._cores, self._gpu_memory, self._images = len(cores), gpu_memory, len(images)
        self._folder = TemporaryDirectory(prefix="torchpipe-tune-")  # of the sockets between workers and engines
        self._team = Team("torchpipe_py.tools.tune.worker", len(cores) + engines)
        self.pids = self._team.pids
        self._built: dict[int, Candidate] = {}  # by slot, the last used one at the end
        self.uses_gpu = False
        """Whether the candidate that was built last takes GPU memory."""
        try:
            everything = list(images), list(imports), list(cores)
            self._team.call([(place, "open", everything) for place in range(len(self.pids))], SET_UP_S)
            self.has_gpu = self._gpu_free() > 0
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the processes."""
        self._team.close()
        self._folder.cleanup()

    def one_by_one(self, candidate: Candidate, seconds: float) -> tuple[list[float], Failed | None]:
        """Run each image alone in the first worker.

        Returns the seconds of each, and the first image without a result with the reason, or None.
        """
        arguments = self._slot_of(candidate), 1, seconds, perf_counter(), self._images, 0.0
        ends, failed = self._team.call([(0, "closed_loop", arguments)], seconds + LATE_S)[0]
        if failed is None and len(ends) < self._images:
            raise ToolError("one at a time, the images take too long: give fewer, or a longer --budget")
        return [end - begin for begin, end in pairwise([0.0, *ends])], failed

    def failures(self, candidate: Candidate, seconds: float) -> list[Failed]:
        """The images that have no result in the first worker, as far as ``seconds`` allow."""
        return list(self._team.call([(0, "failures", (self._slot_of(candidate), seconds))], seconds + LATE_S)[0])

    def closed_loop(self, candidate: Candidate, clients: int, seconds: float) -> float:
        """Answers per second, without the first tenth of the time."""
        ends, failed = self._closed_loop(self._slot_of(candidate), candidate.workers, clients, seconds)
        counted = sum(1 for end in ends if seconds / 10 <= end < seconds)
        if not counted:
            raise ToolError(f"nothing was answered within {seconds:g} s{failed and ': '}{failed}")
        return counted / (0.9 * seconds)

    def open_loop(self, candidate: Candidate, send_times: Sequence[float], grace_s: float) -> list[float]:
        """Latencies in seconds; workers take turns. It ends ``grace_s`` seconds after the last request."""
        slot, workers, numbered = self._slot_of(candidate), candidate.workers, list(enumerate(send_times))
        start = perf_counter() + HEAD_START_S
        shares = [(slot, numbered[worker::workers], start, grace_s) for worker in range(workers)]
        calls = [(worker, "open_loop", share) for worker, share in enumerate(shares)]
        return [latency for each in self._team.call(calls, send_times[-1] + grace_s + LATE_S) for latency in each]

    def busy(self, candidate: Candidate) -> dict[str, float]:
        """Milliseconds that each node has computed so far, in a worker or else in an engine process."""
        slot = self._slot_of(candidate)
        # NOTE: a worker waits in the first node of a shared section while an engine process computes.
        places = (0, self._cores) if candidate.engines else (0,)
        return dict(ChainMap(*self._team.call([(place, "busy", (slot,)) for place in places], WAIT_S)[::-1]))

    def _closed_loop(self, slot: int, workers: int, clients: int, seconds: float) -> tuple[list[float], str]:
        """The time of each answer, and why an image has none, empty if all have one."""
        start, ends = perf_counter() + HEAD_START_S, [clients * at // workers for at in range(workers + 1)]
        shares = [(slot, max(1, last - first), seconds, start) for first, last in pairwise(ends)]
        runs = self._team.call(
            [(worker, "closed_loop", share) for worker, share in enumerate(shares)], seconds + LATE_S
        )
        return [end for ends, _ in runs for end in ends], next((failed[1] for _, failed in runs if failed), "")

    def _gpu_free(self) -> int:
        return int(self._team.call([(0, "gpu_free", ())], SET_UP_S)[0])

    def _slot_of(self, candidate: Candidate) -> int:
        """The slot of a candidate; builds it, and warms up the pipes of all its workers, if needed."""
        for slot, built in self._built.items():
            if built is candidate:
                self._built[slot] = self._built.pop(slot)
                return slot
        most = MOST_BUILT_ON_GPU if self.has_gpu else MOST_BUILT
        while len(self._built) >= most:
            self._drop(next(iter(self._built)))
        slot = next(slot for slot in range(most) if slot not in self._built)
        while True:
            try:
                self._build(slot, candidate)
                break
            except ToolError:
                self._drop(slot)  # other workers may have built theirs
                if not (self.has_gpu and self._built):
                    raise
                for other in list(self._built):  # perhaps there is not enough memory for several
                    self._drop(other)
        self._built[slot] = candidate
        return slot

    def _build(self, slot: int, candidate: Candidate) -> None:
        free, config, workers, engines = self._gpu_free(), candidate.config, candidate.workers, candidate.engines
        paths = [f"{self._folder.name}/{slot}-{engine}" for engine in range(engines)]
        serve = [(self._cores + at, "serve", (slot, config, engines, path)) for at, path in enumerate(paths)]
        self._team.call(serve, SET_UP_S)
        links = [paths[worker % engines] if engines else None for worker in range(workers)]
        # NOTE: a worker connects while its engine process accepts, so both are called at once.
        accept = [(self._cores + at, "accept", (slot, links.count(path))) for at, path in enumerate(paths)]
        build = [(worker, "build", (slot, config, workers, path)) for worker, path in enumerate(links)]
        self._team.call([*accept, *build], SET_UP_S)
        # The first batch of each size takes many times as long, on a GPU seconds. A slow pipe gets few clients.
        answered, loop_s = 1, WARM_UP_ON_GPU_S if self.has_gpu else WARM_UP_S
        for clients in (1, WARM_UP_CLIENTS, CLIENTS_PER_CORE * self._cores):
            ends, failed = self._closed_loop(slot, workers, min(clients, 2 * answered), loop_s)
            if not ends and not failed:
                raise ToolError(f"nothing was answered within {WAIT_S:g} s: does a backend hang?")
            answered = max(1, len(ends))
        taken = free - self._gpu_free()
        if taken > self._gpu_memory:
            raise ToolError(f"needs {taken / 2**30:.1f} GiB, over --gpu-memory")
        self.uses_gpu = taken > 0

    def _drop(self, slot: int) -> None:
        self._built.pop(slot, None)
        self._team.call([(place, "drop", (slot,)) for place in range(len(self.pids))], LATE_S)


class Loops:
    """The ``Measurer`` of a service: closed loops of ``clients`` that take ``seconds``, and open loops of the goal."""

    def __init__(self, service: Service, goal: Goal, clients: int, seconds: float) -> None:
        self._service, self._goal, self._clients, self._seconds = service, goal, clients, seconds
        self.busy = service.busy

    def figure(self, candidate: Candidate, number: int) -> float:
        """``Measurer.figure``."""
        rate = self._goal.rate
        if rate is None:
            return self._service.closed_loop(candidate, self._clients, self._seconds)
        # If over 1 % have no answer, the length of the loop stands for the p99.
        return 1 / min(self._goal.send_times(rate)[-1] + self._goal.slo, self.point(candidate, rate, number).p99)

    def point(self, candidate: Candidate, rate: float, number: int) -> Point:
        """``Measurer.point``."""
        latencies = self._service.open_loop(candidate, self._goal.send_times(rate, number), 2 * self._goal.slo + 0.2)
        return Point(rate, quantile(latencies, 0.5), quantile(latencies, 0.99))


@dataclass(frozen=True)
class Profile:
    """How the file runs as it is served, which is ``base``.

    ``lone`` is the median time of a single request in seconds, ``answers`` are per second of ``clients`` that keep it
    busy in a closed loop of ``loop_s`` seconds.
    """

    base: Candidate
    cores: int
    uses_gpu: bool
    lone: float
    answers: float
    clients: int
    loop_s: float


def _without_result(failures: Sequence[Failed], names: Sequence[str]) -> str:
    """What to do about images without a result."""
    (number, why), *others = failures
    problem = f"{printable(names[number])} has no result: {why}"
    if len(failures) == len(names) > 1:
        return f"{problem}; the other images have none either"
    more = [printable(names[number]) for number, _ in others]
    return f"{problem}; remove it from the images" + (f", and {listed(more)}, which have none either" if more else "")


def profile(service: Service, written: Candidate, cores: int, names: Sequence[str], most_s: float) -> Profile:
    """Measure the file; its images, which have ``names``, may take ``most_s`` seconds one at a time.

    Raises ``ToolError`` if the pipe cannot be built, an image has no result, or nothing is answered.
    """
    took, failed = service.one_by_one(written, most_s)
    if failed is not None:
        raise ToolError(_without_result(service.failures(written, most_s) or [failed], names))
    lone, uses_gpu, most = statistics.median(took), service.uses_gpu, CLIENTS_PER_CORE * cores
    base = as_served(written, cores, uses_gpu)
    try:
        least, longest = FIRST_LOOP_S
        seconds = max(least, FIRST_LOOP_LONE_TIMES * lone, min(longest, 2 * CLIENTS_PER_CORE * lone))
        answers = service.closed_loop(base, most, seconds)
    except ToolError as error:
        raise ToolError(f"the file as it is: {error}") from None
    clients = min(most, max(2 * cores, int(MOST_QUEUE_S * answers)))
    loop_s = min(CLOSED_LOOP_S[1], max(CLOSED_LOOP_S[0], ANSWERS / answers))
    return Profile(base, cores, uses_gpu, lone, answers, clients, loop_s)
