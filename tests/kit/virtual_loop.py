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
        self._timers.append((self.time + seconds, function, args))
        return mock.Mock()

    def call_soon(self, function: Callable[..., object], *args: Any) -> mock.Mock:
        return self.call_later(0.0, function, *args)

    def advance(self, seconds: float) -> None:
        until = self.time + seconds
        while (timer := min(self._timers, key=lambda timer: timer[0], default=None)) and timer[0] <= until:
            self._timers.remove(timer)
            self.time = timer[0]
            timer[1](*timer[2])
        self.time = until
