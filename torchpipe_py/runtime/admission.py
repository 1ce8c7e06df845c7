"""Decides whether a request may wait, before it does, from recent compute times and the requests that wait already.

It is one of the places where load refuses a request. A request meets them in this order:

- ``supervisor/connection_limits.py`` of the service: more connections than are served.
- ``Server.bound_memory``, ``Connection._hold``, ``RpcLimits.check_room`` (``HeldBytes`` on Ray): more bytes of messages
  and answers than may be held, at any time from the first byte on.
- ``LongMessages.check``: a long message would wait too long for the thread that reads it.
- ``Door.check``, here, by way of ``Deadlines.admit``: it would wait too long, or miss its deadline.
- ``FairAdmission.gather``: too many images of calls with several images wait.
- ``Pipes.dispatch``: too many requests are in the pipes of a folder; ``InFlight.admit``: in this pipe.
- ``Order.put``: its key would be one too many at a node with ``ordered_by``.
- ``Node._limit_or_complete``: it has waited too long at a node, or would miss its deadline there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any, NoReturn, Protocol

from torchpipe_py.errors import DeadlineExceeded, Overloaded

TARGET = 0.1
"""Seconds that a request without a deadline may wait, if no target is configured."""

COMPUTES = 4
"""It may wait this multiple of the compute time of its path instead, if that is more."""

DEADLINE_MARGIN = 0.003
"""Seconds for waking up, routing and the way back: an answer must be computed that much before its deadline."""

LEAST_LEFT = 0.1
"""Share of its compute time that a running batch is assumed to need, even if it should have finished."""

REFUSING = 1.0
"""Seconds after a refusal for which ``Door.is_refusing`` is true."""

RECENT = 1.0
"""Seconds after which a compute time expires, or twice the time itself if that is more.

It expires since a mean that refuses everything would never be corrected otherwise, and no sooner than the next batch of
a slow model can end.
"""

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
        age = now - at[place]
        is_recent = age <= RECENT or age <= 2 * means[place]
        means[place] = means[place] * _KEPT + seconds * _WEIGHT if is_recent else seconds
        at[place] = now

    def expected(self, size: int, now: float) -> float:
        """Expected seconds for a batch of ``size``: the mean of the nearest size that ran, a larger one first.

        Times that expired (see ``RECENT``) are ignored; 0.0 without others.
        """
        place, means, at, since = size.bit_length(), self._means, self._at, now - RECENT
        if at[place] >= since:
            return means[place]
        for distance in range(_SIZES):
            for near in (place + distance, place - distance):
                if 0 <= near < _SIZES and (at[near] >= since or at[near] >= now - 2 * means[near]):
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


class QueueTarget:
    """The longest wait of requests without a deadline: ``seconds`` at the door of a pipe, ``is_exceeded`` at its nodes.

    ``is_on``: requests are limited, as for servers; the requests of programs are not.
    """

    __slots__ = ("_computes", "is_on", "least")

    def __init__(self) -> None:
        self.is_on = False
        self.least = math.inf
        """Seconds that each such request may wait, whatever it computes."""
        self._computes = COMPUTES

    def set(self, seconds: float | None) -> None:
        """Limit requests: waits to ``seconds``, 0.0 for no limit, ``None`` for ``TARGET`` or ``COMPUTES``."""
        self.is_on = True
        self.least = math.inf if seconds == 0.0 else seconds or TARGET
        self._computes = COMPUTES if seconds is None else 0

    def seconds(self, compute: float) -> float:
        """The longest wait of a request whose path computes for ``compute`` seconds."""
        return max(self.least, self._computes * compute)

    def is_exceeded(self, waited: float, compute: float) -> bool:
        """Whether such a request has waited too long to be run: longer than the door could have expected.

        The door admits by an expected wait, which may be wrong by a computation that has begun.
        """
        return waited > self.seconds(compute) + compute


class Queued(Protocol):
    """The part of a node that estimates, in seconds, how long a new request waits and computes there.

    If ``is_exact``, requests whose clients have left do not count.
    """

    def expected(self, now: float, priority: int = 0, is_exact: bool = False) -> tuple[float, float]: ...


class Path:
    """The nodes that a request visits from a root, in topological order, with the predecessors of each.

    ``inner`` has the paths of the graphs that a node runs and whose time is not its own compute time.
    """

    def __init__(
        self,
        nodes: Mapping[str, Queued],
        predecessors: Mapping[str, Sequence[str]],
        inner: Mapping[str, Sequence[Path]] | None = None,
    ) -> None:
        places = {name: place for place, name in enumerate(nodes)}
        self._steps = [
            (
                node,
                [places[before] for before in predecessors[name] if before in places],
                (inner or {}).get(name, ()),
            )
            for name, node in nodes.items()
        ]

    def expected(self, now: float, priority: int = 0, is_exact: bool = False) -> tuple[float, float]:
        """Expected wait and compute seconds of a request that enters now, along its slowest branch; see ``Queued``."""
        ends: list[tuple[float, float]] = []
        for node, before, inner in self._steps:
            waits, computes = node.expected(now, priority, is_exact)
            if inner:
                more = max((path.expected(now, priority, is_exact) for path in inner), key=sum)
                waits, computes = waits + more[0], computes + more[1]
            if before:
                earlier = max((ends[place] for place in before), key=sum)
                waits, computes = waits + earlier[0], computes + earlier[1]
            ends.append((waits, computes))
        return ends[0] if len(ends) == 1 else max(ends, key=sum)


def longest_compute(paths: Sequence[Path], now: float) -> float:
    """Expected compute seconds of the path that computes longest; 0.0 without paths."""
    return max((path.expected(now)[1] for path in paths), default=0.0)


class Door:
    """Refuses requests that would wait too long, or could not meet their deadline, before they enter the pipe.

    ``paths`` has the path from each root that requests enter.
    """

    def __init__(self, paths: Mapping[str, Path], target: QueueTarget) -> None:
        self._paths, self._target = paths, target
        self._refused_at = -math.inf

    @property
    def is_refusing(self) -> bool:
        """Whether a request was refused within the last ``REFUSING`` seconds."""
        return perf_counter() - self._refused_at < REFUSING

    def expected_wait(self) -> float:
        """Expected seconds that a request that enters now waits on its longest path, from recent times."""
        now = perf_counter()
        return max(path.expected(now)[0] for path in self._paths.values())

    def check(self, seconds: float | None, root: str | None, priority: int = 0) -> None:
        """Raise ``Overloaded`` if a request that arrives now would wait beyond the target or miss its deadline."""
        if seconds is None and (priority or self._target.least == math.inf):
            return
        now = perf_counter()
        for path in self._paths.values() if root is None else [self._paths[root]]:
            waits, computes = path.expected(now, priority)
            # NOTE: a request that need not wait is started even if the means predict that it takes too long.
            if waits and waits > self._most(seconds, computes):
                # NOTE: requests whose clients have left stay queued until their turn, and delay nobody.
                waits, computes = path.expected(now, priority, True)
                if waits and waits > self._most(seconds, computes):
                    self._refuse(now, waits, computes, seconds)

    def _most(self, seconds: float | None, computes: float) -> float:
        """The longest wait of a request that computes for so long, with ``seconds`` to its deadline or without one."""
        return self._target.seconds(computes) if seconds is None else seconds - computes - DEADLINE_MARGIN

    def _refuse(self, now: float, waits: float, computes: float, seconds: float | None) -> NoReturn:
        self._refused_at = now
        retry_after_ms = max(1, math.ceil(1000 * waits))
        if seconds is None:
            text = f"a request waits {_ms(waits)} now, and may wait {_ms(self._target.seconds(computes))}"
            raise Overloaded(text, retry_after_ms)
        text = f"a request takes {_ms(waits + computes)} now, its deadline is {round(1000 * seconds, 3):.15g} ms"
        raise Overloaded(text, retry_after_ms, now + seconds)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms"


def limited_ms(milliseconds: float | None, longest_ms: float) -> float | None:
    """The deadline of a request that asks for ``milliseconds``, 0 or ``None`` for none; ``None`` without a limit."""
    limit = milliseconds or longest_ms
    if longest_ms and not 0 < limit <= longest_ms:
        limit = longest_ms
    return limit if limit > 0 else None


class Deadlines:
    """Limits the deadlines of requests to a pipe: ``longest_ms`` is both default and maximum; 0 disables it."""

    def __init__(self, run: Any, longest_ms: float = 0.0) -> None:
        self._pipe, self._longest_ms = run, longest_ms

    def admit(
        self, milliseconds: float | None = None, priority: int = 0, node_name: object = None,
        arrived: float | None = None,
    ) -> float | None:  # fmt: skip
        """Return the seconds that a request may take that asks for ``milliseconds``; ``None`` without a limit.

        Raises ``Overloaded`` if it cannot be met, or if requests wait too long now.

        0 means no limit: Thrift clients send it in most languages if none is set. ``arrived``: from when it counts, in
        seconds of ``perf_counter``, if not from now; ``DeadlineExceeded`` if it is over.
        """
        limit = limited_ms(milliseconds, self._longest_ms)
        seconds = None if limit is None else limit / 1000
        if seconds is not None and arrived is not None:
            seconds -= perf_counter() - arrived
            if seconds <= 0:
                raise DeadlineExceeded("not read by its deadline")
        self._pipe.check_delay(seconds, priority, node_name)
        return seconds
