"""A loop whose time a test moves on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock


class VirtualLoop:
    """A loop whose time passes only in ``advance``."""

    def __init__(self) -> None:
        self.time = 1000.0
        self._timers: list[tuple[float, Callable[..., object], tuple[Any, ...]]] = []

    def call_later(self, seconds: float, function: Callable[..., object], *args: Any) -> mock.Mock:
        timer = (self.time + seconds, function, args)
        self._timers.append(timer)
        return mock.Mock(cancel=lambda: self._forget(timer))

    def _forget(self, timer: object) -> None:
        self._timers = [other for other in self._timers if other is not timer]

    @property
    def waiting(self) -> int:
        """The number of timers and calls that are still to come."""
        return len(self._timers)

    def call_soon(self, function: Callable[..., object], *args: Any) -> mock.Mock:
        return self.call_later(0.0, function, *args)

    def advance(self, seconds: float) -> None:
        until = self.time + seconds
        while (timer := min(self._timers, key=lambda timer: timer[0], default=None)) and timer[0] <= until:
            self._timers.remove(timer)
            self.time = timer[0]
            timer[1](*timer[2])
        self.time = until
