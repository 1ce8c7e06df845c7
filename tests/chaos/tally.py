"""What became of requests, and what a scenario reports."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Tally:
    """Each request sent is in exactly one of codes, closed, abandoned, lost and crossed.

    codes: answers by ``ok`` or the error's code. closed: when it was sent, and when it was noticed that the server had
    closed the connection. abandoned: by the client. lost: without an answer in time. crossed: with another one's, or
    with a second answer.
    seconds: by code, from sending to the answer.
    """

    sent: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    closed: list[tuple[float, float]] = field(default_factory=list)
    abandoned: int = 0
    lost: int = 0
    crossed: int = 0
    refused: int = 0  # connections
    longest: float = 0.0
    seconds: dict[str, list[float]] = field(default_factory=dict)

    @property
    def ok(self) -> int:
        return self.codes["ok"]

    def add(self, code: str, seconds: float) -> None:
        self.codes[code] += 1
        self.longest = max(self.longest, seconds)
        self.seconds.setdefault(code, []).append(seconds)

    def __iadd__(self, other: Tally) -> Tally:
        self.sent += other.sent
        self.codes += other.codes
        self.closed += other.closed
        self.abandoned += other.abandoned
        self.lost += other.lost
        self.crossed += other.crossed
        self.refused += other.refused
        self.longest = max(self.longest, other.longest)
        for code, seconds in other.seconds.items():
            self.seconds.setdefault(code, []).extend(seconds)
        return self

    def figures(self) -> dict[str, Any]:
        return {
            "sent": self.sent,
            **dict(self.codes),
            "closed": len(self.closed),
            "abandoned": self.abandoned,
            "lost": self.lost,
            "crossed": self.crossed,
            "longest_s": round(self.longest, 3),
        }


@dataclass
class Report:
    """``problems`` is what the judge has found: empty is passed."""

    name: str
    figures: dict[str, Any]
    problems: list[str]

    def __str__(self) -> str:
        told = ", ".join(f"{key} {value}" for key, value in self.figures.items())
        return f"{self.name}: {'FAILED' if self.problems else 'passed'}: {'; '.join(self.problems)}\n  {told}"


def percentile(values: list[float], share: float) -> float:
    """Nearest rank; 0 of none."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0
