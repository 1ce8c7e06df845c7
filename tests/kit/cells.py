"""One test over the cells of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

Cell = TypeVar("Cell")


def check_each(cells: Iterable[Cell], check: Callable[[Cell], object]) -> None:
    """Check each cell, and fail with the names and errors of all that failed."""
    failed = []
    for cell in cells:
        try:
            check(cell)
        except Exception as error:
            failed.append(f"{cell}: {type(error).__name__}: {error}")
    assert not failed, "\n".join(failed)
