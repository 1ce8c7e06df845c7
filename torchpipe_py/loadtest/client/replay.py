"""The send times of `--replay`: a line for each call, or a column of a CSV file."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path

from torchpipe_py.loadtest.errors import CannotRunError

_LATEST_FIRST_S = 3600.0


def read_replay(path: Path, column: str | None) -> list[float]:
    """Seconds since the start, ascending; `CannotRunError` names the file and the line that is wrong.

    Without a `column` each line is a number; blank ones and what follows a # do not count. With one, the file is a CSV
    file whose first line names the columns.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not a text file"
        raise CannotRunError(f"--replay {path}: {why}") from error
    lines = text.splitlines()
    entries = _lines(lines) if column is None else _column(path, lines, column)
    times = list(_ascending(path, entries))
    if not times:
        raise CannotRunError(f"--replay {path}: no time in it; one send time in seconds per line is needed")
    if times[0] > _LATEST_FIRST_S:
        raise CannotRunError(
            f"--replay {path}: the first time is {times[0]:.0f} s; times count from the start of the run"
        )
    return times


def _lines(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if text:
            yield number, text


def _column(path: Path, lines: Iterable[str], column: str) -> Iterator[tuple[int, str]]:
    rows = csv.DictReader(lines)
    if column not in (rows.fieldnames or ()):
        known = ", ".join(rows.fieldnames or ()) or "none"
        raise CannotRunError(f"--replay_column {column}: {path} has no such column; it has: {known}")
    for row in rows:
        yield rows.line_num, (row[column] or "").strip()


def _ascending(path: Path, entries: Iterable[tuple[int, str]]) -> Iterator[float]:
    latest = 0.0
    for number, text in entries:
        time = _seconds(path, number, text)
        if time < latest:
            raise CannotRunError(
                f"--replay {path}, line {number}: {text} is before {latest:g}; times must ascend from 0"
            )
        latest = time
        yield time


def _seconds(path: Path, number: int, text: str) -> float:
    try:
        time = float(text)
    except ValueError:
        time = float("nan")
    if not abs(time) < float("inf"):
        raise CannotRunError(f"--replay {path}, line {number}: {text!r} is not a number of seconds")
    return time
