"""How long a call may take, and whether it is repeated."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from torchpipe_client.errors import (
    ClientError,
    ConnectionLost,
    NotConnected,
    Overloaded,
    TimedOut,
    Unavailable,
    WorkerDied,
)

_FIRST_DELAY_S = 0.05
_LONGEST_DELAY_S = 2.0

_NOT_BEGUN = (NotConnected, Overloaded, Unavailable)
_PERHAPS_BEGUN = (ConnectionLost, WorkerDied)


@dataclass(frozen=True)
class Limits:
    """Of every call of a client; times in seconds.

    ``idempotent``: whether a call may be repeated that the service has perhaps begun.
    """

    timeout: float
    connect_timeout: float
    retries: int
    idempotent: bool
    max_connections: int

    def __post_init__(self) -> None:
        for name in ("timeout", "connect_timeout", "max_connections"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be greater than 0, not {getattr(self, name)!r}")
        if self.retries < 0:
            raise ValueError(f"retries must be at least 0, not {self.retries!r}")

    def attempts(self, timeout: float | None, deadline_ms: int | None) -> Attempts:
        """Of a call that begins now; what it names goes before what the client was made with."""
        timeout = self.timeout if timeout is None else timeout
        if not timeout > 0:
            raise ValueError(f"timeout must be greater than 0, not {timeout!r}")
        if deadline_ms is not None and deadline_ms <= 0:
            raise ValueError(f"deadline_ms must be greater than 0, not {deadline_ms!r}")
        return Attempts(self, timeout, deadline_ms)


class Attempts:
    """The attempts of one call: the time and the repetitions that it has left.

    The client gives up after ``timeout``, all attempts together. The service is told the time that is left of
    ``deadline_ms``, else of ``timeout``: it need not compute what nobody waits for.
    """

    def __init__(self, limits: Limits, timeout: float, deadline_ms: int | None) -> None:
        self.connect_timeout, self.timeout = limits.connect_timeout, timeout
        now = time.monotonic()
        self._give_up_at = now + timeout
        self._deadline = now + min(timeout, timeout if deadline_ms is None else deadline_ms / 1000)
        self._retries, self._idempotent = limits.retries, limits.idempotent
        self._delay = _FIRST_DELAY_S
        self._has_lost_worker = False

    def left(self) -> float:
        """Seconds until the client gives up. Raises ``TimedOut`` where there are none."""
        left = self._give_up_at - time.monotonic()
        if left <= 0:
            raise self.timed_out()
        return left

    def timed_out(self) -> TimedOut:
        return TimedOut(f"no answer within {self.timeout:g} s")

    def deadline_ms(self) -> int:
        """For the service; at least 1, since 0 says that there is none."""
        return max(1, min(2**31 - 1, round(1000 * (self._deadline - time.monotonic()))))

    def may_repeat(self, error: ClientError) -> bool:
        """Whether a call that ended so can be sent again without harm."""
        return isinstance(error, _NOT_BEGUN) or (self._idempotent and isinstance(error, _PERHAPS_BEGUN))

    def delay_after(self, error: ClientError) -> float | None:
        """Seconds to wait before the next attempt, at least as long as the service asks for; ``None``: there is none.

        Clients that fail together do not come back together: a part of the delay is random.
        """
        if not self._retries or not self.may_repeat(error):
            return None
        if isinstance(error, WorkerDied):
            if self._has_lost_worker:
                return None  # the call may be what kills them
            self._has_lost_worker = True
        wanted = (error.retry_after_ms or 0) / 1000
        delay = wanted + random.uniform(self._delay / 2, self._delay)
        if time.monotonic() + delay >= self._deadline:
            return None
        self._retries -= 1
        self._delay = min(2 * self._delay, _LONGEST_DELAY_S)
        return delay
