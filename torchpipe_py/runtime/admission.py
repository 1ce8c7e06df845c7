"""What is worth queueing: recent compute times, queues that stand, clients that leave. The clock is an argument."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any, Protocol

from torchpipe_py.errors import Overloaded

INTERVAL = 0.1
"""Seconds for which the oldest request must have waited longer than the target before any is shed, as CoDel has it."""

LEAST_TARGET = 0.05
"""Seconds: the least target of a queue, where none is configured."""

COMPUTES = 4
"""So many recent compute times are the target, where that is more."""

LEAST_LEFT = 0.1
"""The share of its compute time that a batch takes from now on that should be through already."""

PATIENT = 10
"""So many times the target a request may wait while all clients wait for their answers."""

CALM = 1.0
"""Seconds without a refusal after which a node does not shed any more."""

RECENT = 1.0
"""Seconds after which compute times are forgotten: a mean that refuses everything would never be corrected."""

REMEMBERED = 10.0
"""Seconds after which a batch that was too large for a time limit is tried again."""

_WEIGHT = 0.1  # of the newest batch in the mean of those of its size
_SIZES = 64  # by bit length of the size


class ComputeTimes:
    """Recent compute times of a node's batches, by size; seconds. Instances write, any thread reads.

    Sizes of one bit length share a mean: 1, 2 and 3, 4 to 7, and so on.
    """

    __slots__ = ("_at", "_means")

    def __init__(self) -> None:
        self._means = [0.0] * _SIZES
        self._at = [-math.inf] * _SIZES  # when the last one of that size ran

    def add(self, size: int, seconds: float, now: float) -> None:
        """A batch of ``size`` took so long."""
        place = size.bit_length()
        mean = self._means[place]
        is_fresh = now - self._at[place] <= RECENT
        self._means[place] = mean + _WEIGHT * (seconds - mean) if is_fresh else seconds
        self._at[place] = now

    def expected(self, size: int, now: float) -> float:
        """How long a batch of ``size`` takes: the mean of the nearest size that ran, a larger one first.

        0.0 if nothing ran within the last ``RECENT`` seconds; what a size took before that is forgotten.
        """
        place, means, at, since = size.bit_length(), self._means, self._at, now - RECENT
        if at[place] >= since:
            return means[place]
        for distance in range(1, _SIZES):
            for near in (place + distance, place - distance):
                if 0 <= near < _SIZES and at[near] >= since:
                    return means[near]
        return 0.0

    def fitting(self, size: int, seconds: float, now: float) -> int:
        """The largest batch of at most ``size``, and at least 1, that takes no longer than ``seconds``.

        What a size took counts for ``REMEMBERED`` seconds: one that is too large is not to be tried each second.
        """
        while size > 1:
            place = size.bit_length()
            is_known = now - self._at[place] <= REMEMBERED
            if (self._means[place] if is_known else self.expected(size, now)) <= seconds:
                break
            size = (size + 1) // 2
        return size

    def remaining(self, size: int, started: float, now: float) -> float:
        """Seconds until a batch of ``size`` that began at ``started`` (0.0: unknown) is through."""
        expected = self.expected(size, now) if size else 0.0
        return max(LEAST_LEFT * expected, started + expected - now) if started else expected / 2

    def wait(self, waiting: int, remaining: Sequence[float], most: int, now: float) -> float:
        """Seconds until a newcomer is begun, behind ``waiting`` others; ``remaining`` until each instance is free."""
        rounds, place = divmod(waiting // most, len(remaining))
        return rounds * self.expected(min(most, max(1, waiting)), now) + sorted(remaining)[place]


class ControlledDelay:
    """Which requests of a node are not worth computing any more (after CoDel).

    A queue stands once its oldest request has waited longer than ``target`` seconds for ``INTERVAL`` without a break.
    When one has then waited more than twice the target, more comes than the node can take, and it sheds: as long as
    requests are refused, those are that could not be finished within the target, or before clients leave. A longer
    queue would only make each answer later. A burst that the instances work off in time loses nothing.
    Where nobody leaves (a fixed number of clients that wait for each answer, say) queues may be ``PATIENT`` times as
    long, unless the target is configured.
    """

    __slots__ = ("_above_since", "_patience", "_shed_at", "_target", "sheds")

    def __init__(self, target: float | None, patience: Patience | None = None) -> None:
        """``target`` in seconds; 0.0: never. ``None``: ``COMPUTES`` times a batch, at least ``LEAST_TARGET``."""
        self._target, self._patience = target, patience
        self.sheds = target != 0.0
        self._above_since = 0.0
        self._shed_at = -math.inf

    def is_shedding(self, now: float) -> bool:
        """Whether a request was refused within the last ``CALM`` seconds."""
        return now - self._shed_at < CALM

    def refused(self, now: float) -> None:
        """A request was refused, here or at the door."""
        self._shed_at = now

    def took(self, wait: float, compute: float, now: float) -> bool:
        """A request that takes ``compute`` seconds leaves the queue after ``wait`` seconds; whether it is refused."""
        if not self.sheds:
            return False
        if self.is_shedding(now):
            is_late = wait + compute > self.longest(compute)
        else:
            target = self._allowed(compute)
            if wait <= target:
                self._above_since = 0.0
                return False
            self._above_since = self._above_since or now
            is_late = wait > 2 * target and now - self._above_since >= INTERVAL
        if is_late:
            self.refused(now)
        return is_late

    def longest(self, compute: float) -> float:
        """Seconds that a request which takes ``compute`` alone may take while it sheds."""
        if self._target is not None or self._patience is None or self._patience.is_endless:
            return self._allowed(compute)
        return min(self._allowed(compute), self._patience.allows(compute))

    def _allowed(self, compute: float) -> float:
        """The target of such a request, seconds."""
        if self._target is not None:
            return self._target
        return max(LEAST_TARGET, COMPUTES * compute) * (PATIENT if self._is_patient() else 1)

    def _is_patient(self) -> bool:
        return self._target is None and self._patience is not None and self._patience.is_endless


class Patience:
    """How long clients wait for an answer, as far as they show it by leaving; seconds, ``inf`` while few leave.

    Learnt where within ``WITHIN`` windows at least ``SEEN`` clients left, in ``WINDOWS`` of them or more (many may be
    closed at once and mean nothing), and they are more than ``MOST`` of those that waited as long as the median of
    them: it is that median, at least ``LEAST``. From then on it shrinks where more than ``SHARE`` of a window's clients
    left after half of it or more, and else grows slowly, since nobody can tell how much longer the others would wait.
    Beyond ``FORGOTTEN`` it is over. A window is ``WINDOW`` seconds, and ``SEEN`` requests.
    """

    WINDOW, SEEN, WINDOWS, WITHIN, MOST, LEAST = 0.1, 8, 3, 100, 0.5, 0.01
    SHARE, SHRINKING, GROWTH, FORGOTTEN = 0.05, 0.95, 1.002, 60.0
    MARGIN = 0.85
    """Of that time an answer may take: it has a way back, and an answer that is late is of no use."""

    def __init__(self) -> None:
        self._seconds = math.inf
        self._left: list[float] = []
        self._answered: list[float] = []
        self._admitted = 0
        self._age = 0  # in windows, of what is being learnt
        self._windows = self._seen = 0  # in which some left, and those that had until the last one
        self._until = -math.inf

    @property
    def is_endless(self) -> bool:
        """Whether (nearly) all wait for their answers, as far as is known."""
        return self._seconds == math.inf

    @property
    def is_learning(self) -> bool:
        """Whether some left lately: then it is to be told of answers."""
        return self.is_endless and bool(self._left)

    def left(self, seconds: float) -> None:
        """A client did not wait any longer for its answer; from any thread."""
        self._left.append(seconds)

    def answered(self, seconds: float) -> None:
        """A client waited so long and got its answer; from any thread."""
        self._answered.append(seconds)

    def bound(self, admitted: int, now: float) -> float:
        """How long most wait; ``admitted`` counts the requests since the start."""
        count = admitted - self._admitted
        if now >= self._until and count >= self.SEEN:
            if self.is_endless:
                self._learn()
            else:
                left, self._left = self._left, []
                if sum(1 for each in left if 2 * each >= self._seconds) > self.SHARE * count:
                    self._seconds = max(self.LEAST, self.SHRINKING * self._seconds)
                else:
                    self._seconds = self.GROWTH * self._seconds if self._seconds < self.FORGOTTEN else math.inf
            self._admitted, self._until = admitted, now + self.WINDOW
        return self._seconds

    def _learn(self) -> None:
        left = sorted(self._left)
        if len(left) > self._seen:
            self._windows, self._seen = self._windows + 1, len(left)
        self._age += 1
        is_enough = self._windows >= self.WINDOWS and len(left) >= self.SEEN
        if is_enough:
            median = left[len(left) // 2]
            stayed = sum(1 for each in list(self._answered) if each >= median)
            if len(left) > self.MOST * (len(left) + stayed):
                self._seconds = max(self.LEAST, median)
        if is_enough or not left or self._age >= self.WITHIN:
            self._left, self._answered, self._age, self._windows, self._seen = [], [], 0, 0, 0

    def allows(self, compute: float) -> float:
        """Seconds that a request which takes ``compute`` alone may take."""
        return max(self.MARGIN * self._seconds, 2 * compute)


class Queued(Protocol):
    """A node, as far as it says how long a newcomer waits and takes there; seconds."""

    delay: ControlledDelay | None

    def expected_wait(self, now: float, priority: int = 0) -> float: ...

    def expected_compute(self, now: float) -> float: ...


class Path:
    """The way of a request from a root: its nodes in topological order, with those each comes after."""

    def __init__(self, nodes: Mapping[str, Queued], predecessors: Mapping[str, Sequence[str]]) -> None:
        order = list(nodes)
        places = {name: place for place, name in enumerate(order)}
        self.nodes = list(nodes.values())
        self._steps = [
            (nodes[name], [places[before] for before in predecessors[name] if before in places]) for name in order
        ]

    def expected(self, now: float, priority: int = 0) -> tuple[float, float]:
        """Seconds that a request which enters now waits, and is computed, along the branch that takes longest."""
        ends: list[tuple[float, float]] = []
        for node, before in self._steps:
            waited, computed = max((ends[place] for place in before), key=sum, default=(0.0, 0.0))
            ends.append((waited + node.expected_wait(now, priority), computed + node.expected_compute(now)))
        return max(ends, key=sum)


class Door:
    """What a request meets before it enters: refused where it could not be finished in time.

    ``paths`` has the way from each root, ``nodes`` all that any of them passes.
    """

    def __init__(self, paths: Mapping[str, Path], nodes: Sequence[Queued]) -> None:
        self.patience: Patience | None = None
        self._paths, self._nodes = paths, nodes

    def limit_delays(self, target: float | None) -> None:
        """Shed requests without a deadline that wait too long, before the first request; see ``pipe.limit_delays``."""
        self.patience = None if target == 0.0 else Patience()
        for node in self._nodes:
            node.delay = ControlledDelay(target, self.patience)

    def expected_wait(self) -> float:
        """How long a request that enters now waits along its longest way, by recent times, seconds."""
        now = perf_counter()
        return max(path.expected(now)[0] for path in self._paths.values())

    def check(self, seconds: float | None, root: str | None, admitted: int, priority: int = 0) -> None:
        """``Overloaded`` where a request that comes now cannot be finished in time; see ``pipe.check_delay``.

        ``admitted`` counts the requests since the start.
        """
        now, bound, why, shedding = perf_counter(), seconds, "its deadline is", []
        if bound is None:
            if self.patience is None or priority:
                return
            bound, why = self.patience.bound(admitted, now), "clients leave after"
            nodes = self._nodes if root is None else self._paths[root].nodes
            shedding = [node.delay for node in nodes if node.delay is not None and node.delay.is_shedding(now)]
            if bound == math.inf and not shedding:
                return
        for path in self._paths.values() if root is None else [self._paths[root]]:
            waits, computes = path.expected(now, priority)
            # NOTE: a request that need not wait is begun even if the means say that it takes too long.
            if not waits:
                continue
            takes = waits + computes
            if shedding and takes > min(delay.longest(computes) for delay in shedding):
                for delay in shedding:
                    delay.refused(now)
            elif takes <= (bound if seconds is not None or self.patience is None else self.patience.allows(computes)):
                continue
            limit = f"{why} {1000 * bound:.15g} ms" if bound < math.inf else "more come than can be taken"
            raise Overloaded(f"a request takes {1000 * takes:.0f} ms now, {limit}", max(1, math.ceil(1000 * waits)))


class Deadlines:
    """``longest_ms`` is the deadline of requests to a pipe that name none, or a later one; 0 is none."""

    def __init__(self, run: Any, longest_ms: float = 0.0) -> None:
        self._pipe, self._longest_ms = run, longest_ms

    def seconds(self, milliseconds: float | None = None, priority: int = 0, node_name: object = None) -> float | None:
        """The time limit of a request that asks for so much, or ``None``; ``Overloaded`` where it cannot be kept.

        0 is what Thrift clients send that name none: Thrift has no other word for it in most languages.
        """
        limit = milliseconds or self._longest_ms
        if self._longest_ms and not 0 < limit <= self._longest_ms:
            limit = self._longest_ms
        seconds = limit / 1000 if limit > 0 else None
        self._pipe.check_delay(seconds, priority, node_name)
        return seconds
