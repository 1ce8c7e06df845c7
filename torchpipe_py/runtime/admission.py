"""Decides which requests to queue, from recent compute times, queue times and clients that leave.

The clock is an argument.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any, Protocol

from torchpipe_py.errors import Overloaded

INTERVAL = 0.1
"""Seconds for which the oldest request must exceed the target before any request is shed, as in CoDel."""

LEAST_TARGET = 0.05
"""Minimum target of a queue in seconds, if no target is configured."""

COMPUTES = 4
"""The target is this multiple of the recent compute time, or ``LEAST_TARGET`` if that is more."""

LEAST_LEFT = 0.1
"""Share of its compute time that a running batch is assumed to need, even if it should have finished."""

TARGETS = 10
"""While all clients wait for their answers, a request may wait this multiple of the target."""

CALM = 1.0
"""Seconds without a refusal after which a node stops shedding."""

RECENT = 1.0
"""Seconds after which compute times expire: otherwise a mean that refuses everything would never be corrected."""

REMEMBERED = 10.0
"""Seconds after which a batch that was too large for a time limit is tried again."""

_WEIGHT, _KEPT = 0.1, 0.9  # of the newest batch in the mean for its size, and of the mean before it
_SIZES = 64  # indexed by the bit length of the size


class ComputeTimes:
    """Recent compute times of a node's batches in seconds, by size. Instances write, any thread reads.

    Sizes with the same bit length share a mean: 1, 2 and 3, 4 to 7, and so on.
    """

    __slots__ = ("_at", "_means")

    def __init__(self) -> None:
        self._means = [0.0] * _SIZES
        self._at = [-math.inf] * _SIZES  # when the last batch of that size ran

    def add(self, size: int, seconds: float, now: float) -> None:
        """Record that a batch of ``size`` took ``seconds``."""
        place, means, at = size.bit_length(), self._means, self._at
        means[place] = means[place] * _KEPT + seconds * _WEIGHT if now - at[place] <= RECENT else seconds
        at[place] = now

    def expected(self, size: int, now: float) -> float:
        """Expected seconds for a batch of ``size``: the mean of the nearest size that ran, a larger one first.

        0.0 if nothing ran within the last ``RECENT`` seconds; older times are ignored.
        """
        place, means, at, since = size.bit_length(), self._means, self._at, now - RECENT
        if at[place] >= since:
            return means[place]
        for distance in range(1, _SIZES):
            for near in (place + distance, place - distance):
                if 0 <= near < _SIZES and at[near] >= since:
                    return means[near]
        return 0.0

    def known(self, size: int, now: float) -> float | None:
        """How long batches of that size took; ``None`` if none ran within the last ``REMEMBERED`` seconds."""
        place = size.bit_length()
        return self._means[place] if now - self._at[place] <= REMEMBERED else None

    def fitting(self, size: int, seconds: float, now: float) -> int:
        """The largest batch size, from 1 to ``size``, that takes no longer than ``seconds``.

        Times count for ``REMEMBERED`` seconds here, so that a batch that is too large is not tried every second.
        """
        while size > 1:
            known = self.known(size, now)
            if (self.expected(size, now) if known is None else known) <= seconds:
                break
            size = (size + 1) // 2
        return size

    def remaining(self, size: int, started: float, now: float) -> float:
        """Seconds until a batch of ``size`` that began at ``started`` (0.0: unknown) is finished."""
        expected = self.expected(size, now) if size else 0.0
        return max(LEAST_LEFT * expected, started + expected - now) if started else expected / 2

    def wait(self, waiting: int, remaining: Sequence[float], most: int, now: float) -> float:
        """Seconds until a new request starts, after ``waiting`` others; ``remaining``: until each instance is free."""
        rounds, place = divmod(waiting // most, len(remaining))
        return rounds * self.expected(min(most, max(1, waiting)), now) + sorted(remaining)[place]


class ControlledDelay:
    """Decides which requests of a node are no longer worth computing (after CoDel).

    A queue is standing once its oldest request has exceeded ``target`` seconds throughout ``INTERVAL``. If a request
    has then waited more than twice the target, the node is overloaded and sheds: it refuses requests that it could not
    finish within the target, or before clients leave, until a pause in refusals. A longer queue would only delay every
    answer. A burst that the instances process in time loses nothing.
    If no client leaves (for example, a fixed number of clients that wait for each answer), queues may be ``TARGETS``
    times as long, unless the target is configured.
    """

    __slots__ = ("_above_since", "_client_timeout", "_least", "_shed_at", "_target", "calm_wait")

    def __init__(self, target: float | None, client_timeout: ClientTimeout | None = None) -> None:
        """``target`` in seconds; 0.0: no shedding. ``None``: ``COMPUTES`` batch times, at least ``LEAST_TARGET``."""
        self._target, self._client_timeout = target, client_timeout
        self._least = math.inf if target == 0.0 else target or LEAST_TARGET
        self.calm_wait = self._least
        """Seconds up to which ``took`` refuses none, whatever it computes; 0.0 while requests wait longer."""
        self._above_since = 0.0
        self._shed_at = -math.inf

    def is_shedding(self, now: float) -> bool:
        """Whether a request was refused within the last ``CALM`` seconds."""
        return now - self._shed_at < CALM

    def refused(self, now: float) -> None:
        """Record that a request was refused, in the queue or on entry."""
        self._shed_at, self.calm_wait = now, 0.0

    def took(self, wait: float, compute: float, now: float) -> bool:
        """Whether to refuse a request that leaves the queue after ``wait`` seconds and needs ``compute`` seconds."""
        if self._target == 0.0:
            return False
        if self.is_shedding(now):
            is_late = wait + compute > self.longest(compute)
        else:
            target = self._allowed(compute)
            if wait <= target:
                self._above_since, self.calm_wait = 0.0, self._least
                return False
            self.calm_wait = 0.0
            self._above_since = self._above_since or now
            is_late = wait > 2 * target and now - self._above_since >= INTERVAL
        if is_late:
            self.refused(now)
        return is_late

    def longest(self, compute: float) -> float:
        """Maximum seconds, while shedding, for a request whose computation takes ``compute``."""
        if self._target is not None or self._client_timeout is None or self._client_timeout.is_endless:
            return self._allowed(compute)
        return min(self._allowed(compute), self._client_timeout.allows(compute))

    def _allowed(self, compute: float) -> float:
        """The target for such a request in seconds."""
        if self._target is not None:
            return self._target
        all_wait = self._client_timeout is not None and self._client_timeout.is_endless
        return max(LEAST_TARGET, COMPUTES * compute) * (TARGETS if all_wait else 1)


class ClientTimeout:
    """Estimates from departures how long clients wait for an answer; in seconds, ``inf`` while few leave.

    The estimate is the shortest time after which most clients leave: of the last ``KEPT`` clients, at least ``LEFT``
    left between that time and three times that, and they are more than a share of all that waited as long. The share
    is ``MOST`` to set the estimate, and ``STILL`` to lower it again. It is set only once clients left in ``WINDOWS``
    windows, never more than ``APART`` windows apart: many that close at once, as a load tester does at its end, mean
    nothing.
    No client waits longer than the estimate allows, so it is unknown how much longer they would. Once ``HELD`` windows
    have not lowered it, it grows by ``GROWTH`` a window, until clients leave again: quickly, since answers are late in
    vain while it comes near the truth. Above ``FORGOTTEN`` seconds it is dropped.
    A window is ``WINDOW`` seconds, and longer if no request comes.
    """

    WINDOW, WINDOWS, APART, HELD = 0.02, 5, 25, 500
    KEPT, LEFT, MOST, STILL = 512, 3, 0.5, 0.2
    GROWTH, LEAST, FORGOTTEN = 1.03, 0.01, 60.0
    MARGIN = 0.85
    """Share of that time that an answer may take: it must still reach the client, and a late answer is useless."""

    def __init__(self) -> None:
        self._seconds = math.inf
        self._ends: deque[tuple[float, bool]] = deque(maxlen=self.KEPT)  # how long a client waited, whether it left
        self.is_learning = False
        """Whether clients left lately, so that answers must be recorded too."""
        self._has_left = False  # in this window
        self._windows = 0  # in which clients left
        self._age = 0  # in windows, since a client left or, if the estimate is set, since it was set or lowered
        self.until = -math.inf
        """When this window ends, by the clock of ``bound``."""

    @property
    def is_endless(self) -> bool:
        """Whether (nearly) all clients wait for their answers, as far as is known."""
        return self._seconds == math.inf

    def left(self, seconds: float) -> None:
        """Record that a client left after waiting ``seconds``; from any thread."""
        self._ends.append((seconds, True))
        self._has_left = self.is_learning = True

    def answered(self, seconds: float) -> None:
        """Record that a client got its answer after ``seconds``; from any thread."""
        self._ends.append((seconds, False))

    def bound(self, now: float) -> float:
        """Seconds that most clients wait; to be called for each request."""
        if now >= self.until:
            self.until = now + self.WINDOW
            self._age += 1
            shortest = math.inf
            if self._has_left:
                self._has_left = False
                self._windows += 1
                if self.is_endless:
                    self._age = 0
                if self._windows >= self.WINDOWS:
                    shortest = self._shortest(self.MOST if self.is_endless else self.STILL)
            if shortest < self._seconds:
                self._seconds, self._age = max(self.LEAST, shortest), 0
            elif self.is_endless:
                if self._age >= self.APART:
                    self._forget()
            elif self._age > self.HELD:
                self._seconds *= self.GROWTH
                if self._seconds > self.FORGOTTEN:
                    self._forget()
        return self._seconds

    def _shortest(self, share: float) -> float:
        """The shortest time that more than ``share`` of those that waited so long left after, before three times it."""
        ends = list(self._ends)
        waited = sorted(seconds for seconds, _ in ends)
        left = sorted(seconds for seconds, has_left in ends if has_left)
        for place, seconds in enumerate(left):
            leaving = bisect_left(left, 3 * seconds) - place
            if leaving >= self.LEFT and leaving > share * (len(waited) - bisect_left(waited, seconds)):
                return seconds
        return math.inf

    def _forget(self) -> None:
        self._seconds, self._windows, self._age = math.inf, 0, 0
        self._ends.clear()
        self.is_learning = False

    def allows(self, compute: float) -> float:
        """Maximum seconds for a request whose computation takes ``compute``."""
        return max(self.MARGIN * self._seconds, 2 * compute)


class Queued(Protocol):
    """The part of a node that estimates, in seconds, how long a new request waits and computes there."""

    delay: ControlledDelay | None

    def expected_wait(self, now: float, priority: int = 0) -> float: ...

    def expected_compute(self, now: float) -> float: ...


class Path:
    """The nodes that a request visits from a root, in topological order, with the predecessors of each."""

    def __init__(self, nodes: Mapping[str, Queued], predecessors: Mapping[str, Sequence[str]]) -> None:
        order = list(nodes)
        places = {name: place for place, name in enumerate(order)}
        self.nodes = list(nodes.values())
        self._steps = [
            (nodes[name], [places[before] for before in predecessors[name] if before in places]) for name in order
        ]

    def expected(self, now: float, priority: int = 0) -> tuple[float, float]:
        """Expected wait and compute seconds of a request that enters now, along its slowest branch."""
        ends: list[tuple[float, float]] = []
        for node, before in self._steps:
            waited, computed = max((ends[place] for place in before), key=sum, default=(0.0, 0.0))
            ends.append((waited + node.expected_wait(now, priority), computed + node.expected_compute(now)))
        return max(ends, key=sum)


class Door:
    """Checks each request before it enters, and refuses it if it could not be finished in time.

    ``paths`` has the path from each root, ``nodes`` all nodes on these paths.
    """

    def __init__(self, paths: Mapping[str, Path], nodes: Sequence[Queued]) -> None:
        self.client_timeout: ClientTimeout | None = None
        self._paths, self._nodes = paths, nodes
        self._refused_at = -math.inf
        self._calm_until = -math.inf  # until then nothing is shed and no client leaves, as far as is known
        self.is_refusing = False
        """Whether ``check`` refused a request within ``CALM`` seconds before its last call."""

    def limit_delays(self, target: float | None) -> None:
        """Shed requests without a deadline that wait too long, before the first request; see ``pipe.limit_delays``."""
        self.client_timeout = None if target == 0.0 else ClientTimeout()
        for node in self._nodes:
            node.delay = ControlledDelay(target, self.client_timeout)

    def expected_wait(self) -> float:
        """Expected seconds that a request that enters now waits on its longest path, from recent times."""
        now = perf_counter()
        return max(path.expected(now)[0] for path in self._paths.values())

    def check(self, seconds: float | None, root: str | None, priority: int = 0) -> None:
        """Raise ``Overloaded`` if a request that arrives now cannot be finished in time; see ``pipe.check_delay``."""
        now, bound, why, shedding = perf_counter(), seconds, "its deadline is", []
        if self.is_refusing:
            self.is_refusing = now - self._refused_at < CALM
        timeout = self.client_timeout
        if bound is None:
            if timeout is None or priority or now < self._calm_until:
                return
            bound, why = timeout.bound(now), "clients leave after"
            nodes = self._nodes if root is None else self._paths[root].nodes
            shedding = _shedding(nodes, now)
            if bound == math.inf and not shedding:
                if not _shedding(self._nodes, now):
                    self._calm_until = timeout.until
                return
        for path in self._paths.values() if root is None else [self._paths[root]]:
            waits, computes = path.expected(now, priority)
            # NOTE: a request that need not wait is started even if the means predict that it takes too long.
            if not waits:
                continue
            takes = waits + computes
            if shedding and takes > min(delay.longest(computes) for delay in shedding):
                for delay in shedding:
                    delay.refused(now)
            elif takes <= (timeout.allows(computes) if timeout and seconds is None else bound):
                continue
            self._refused_at, self.is_refusing = now, True
            limit = f"{why} {round(1000 * bound, 3):.15g} ms" if bound < math.inf else "more come than can be taken"
            text, deadline = f"a request takes {1000 * takes:.0f} ms now, {limit}", seconds and now + seconds
            raise Overloaded(text, max(1, math.ceil(1000 * waits)), deadline)


def _shedding(nodes: Sequence[Queued], now: float) -> list[ControlledDelay]:
    """The delays of the nodes that refused a request lately."""
    return [node.delay for node in nodes if node.delay is not None and node.delay.is_shedding(now)]


class Deadlines:
    """Limits the deadlines of requests to a pipe: ``longest_ms`` is both default and maximum; 0 disables it."""

    def __init__(self, run: Any, longest_ms: float = 0.0) -> None:
        self._pipe, self._longest_ms = run, longest_ms

    def seconds(self, milliseconds: float | None = None, priority: int = 0, node_name: object = None) -> float | None:
        """The time limit of a request that asks for ``milliseconds``, or ``None``; ``Overloaded`` if it cannot be met.

        0 means no limit: Thrift clients send it in most languages if none is set.
        """
        limit = milliseconds or self._longest_ms
        if self._longest_ms and not 0 < limit <= self._longest_ms:
            limit = self._longest_ms
        seconds = limit / 1000 if limit > 0 else None
        self._pipe.check_delay(seconds, priority, node_name)
        return seconds
