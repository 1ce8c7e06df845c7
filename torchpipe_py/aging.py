"""The rule by which work of low priority gets a turn although work of normal priority never ends."""

from __future__ import annotations


class Aging:
    """Gives low-priority work that has waited ``SECONDS`` one turn after every ``TURNS`` turns of normal work.

    The caller holds the lock of the queue. Times are seconds of any one clock.
    """

    SECONDS = 1.0
    TURNS = 3

    def __init__(self) -> None:
        self._turns = 0

    @classmethod
    def is_aged(cls, arrived: float, now: float) -> bool:
        """Whether work that arrived at that time has waited long enough for a turn."""
        return arrived + cls.SECONDS <= now

    def count_turn(self, oldest: float, now: float) -> bool:
        """Count a turn while low-priority work waits, the oldest since ``oldest``; ``True`` gives it this turn."""
        if not self.is_aged(oldest, now):
            return False
        self._turns += 1
        if self._turns <= self.TURNS:
            return False
        self._turns = 0
        return True
