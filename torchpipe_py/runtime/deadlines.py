"""How long a request may take."""

from __future__ import annotations

from torchpipe_py.runtime.pipe import pipe


class Deadlines:
    """``longest_ms`` is the deadline of requests that name none, or a later one; 0 is none."""

    def __init__(self, run: pipe, longest_ms: float = 0.0) -> None:
        self._pipe, self._longest_ms = run, longest_ms

    def seconds(self, milliseconds: float | None = None) -> float | None:
        """The time limit of a request that asks for so much, or ``None``; ``Overloaded`` where it cannot be kept.

        0 is what Thrift clients send that name none: Thrift has no other word for it in most languages.
        """
        limit = milliseconds or self._longest_ms
        if self._longest_ms and not 0 < limit <= self._longest_ms:
            limit = self._longest_ms
        seconds = limit / 1000 if limit > 0 else None
        self._pipe.check_delay(seconds)
        return seconds
