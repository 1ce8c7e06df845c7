"""The kinds of OUT: how the lines of a run become the file or folder of that name."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from torchpipe_py.tools.report import ToolError

LINES = "results.ndjson"
"""The lines in a folder of pictures."""

MOST_ROWS, MOST_BYTES = 4096, 2**25
"""Rows of a Parquet file that are in memory at once, and bytes of their lines."""

FIRST = ("path", "frame", "pts", "sha256", "picture")
"""The first columns of a table."""

Lines = Callable[[], Iterator[bytes]]
"""Iterates over all lines from the start, as often as it is called."""


@dataclass
class Column:
    """A column of a table: the types of its values, and the one data type and shape of its arrays, if they have one.

    ``is_exact``: as ``float64`` its integers are the same numbers.
    """

    types: set[type] = field(default_factory=set)
    arrays: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)
    is_exact: bool = True

    def see(self, value: Any) -> None:
        """Take account of a value."""
        is_huge = type(value) is int and not -(2**63) <= value < 2**63
        self.types.add(object if is_huge else type(value))
        if type(value) is int and not -(2**53) <= value <= 2**53:
            self.is_exact = False
        if isinstance(value, dict):
            is_array = value.keys() == {"dtype", "shape", "data"}
            self.arrays.add((value["dtype"], tuple(value["shape"])) if is_array else ("", ()))

    @property
    def is_number(self) -> bool:
        """Whether all values are numbers that one data type of Arrow holds."""
        return self.types == {int} or (bool(self.types) and self.types <= {int, float} and self.is_exact)

    @property
    def array(self) -> str:
        """The data type of its arrays, if all values are numeric arrays of one shape; else empty."""
        (dtype, _), *others = self.arrays or {("", ())}
        return dtype if self.types == {dict} and not others and dtype != "string" else ""


def columns_of(lines: Iterator[bytes]) -> dict[str, Column]:
    """The columns of all lines: first those of ``FIRST``, then outputs as they occur; ``error`` and ``code`` last."""
    columns = {name: Column() for name in FIRST}
    for line in lines:
        for name, value in json.loads(line).items():
            if value is not None:
                columns.setdefault(name, Column()).see(value)
    last = {name: columns.pop(name, Column({str})) for name in ("error", "code")}
    return {name: column for name, column in columns.items() if column.types} | last


def check_kind(out: Path, draws: bool) -> str:
    """The kind of OUT: ``ndjson``, ``csv``, ``parquet`` or ``folder``. ``ToolError`` if it cannot be written here."""
    kind = {".jsonl": "ndjson"}.get(out.suffix.lower(), out.suffix.lower()[1:])
    if kind not in ("ndjson", "csv", "parquet"):
        if not draws:
            names = ".ndjson, .csv or .parquet"
            raise ToolError(f"--out {out}: expected a name that ends in {names}, or a folder, with --draw")
        kind = "folder"
    elif draws:
        raise ToolError(f"--draw: --out is the folder of the pictures then, not {out}")
    if kind == "parquet" and importlib.util.find_spec("pyarrow") is None:
        raise ToolError(f"--out {out}: Parquet needs pyarrow (pip install 'torchpipe_py[parquet]')")
    folder = out.parent
    if not folder.is_dir():
        raise ToolError(f"--out {out}: no such folder: {folder}")
    if not os.access(folder, os.W_OK):
        raise ToolError(f"--out {out}: the folder {folder} cannot be written")
    return kind


def write_table(kind: str, lines: Lines, path: Path) -> None:
    """Write lines as ``csv`` or ``parquet``, and bring the file to the disk."""
    {"csv": _write_csv, "parquet": _write_parquet}[kind](lines, path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _write_csv(lines: Lines, path: Path) -> None:
    """Values that are not texts or numbers are JSON; a member that a line lacks is empty."""
    columns = columns_of(lines())
    with open(path, "w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        file.write(_row(columns))
        for line in lines():
            members = json.loads(line)
            file.write(_row(_cell(members.get(name)) for name in columns))


def _row(cells: Iterable[Any]) -> str:
    """A row that ends in ``\\n``; before Python 3.13, ``csv`` quotes a ``\\r`` in a text only if rows end in one."""
    row = io.StringIO()
    csv.writer(row, lineterminator="\r\n").writerow(cells)
    return row.getvalue()[:-2] + "\n"


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def _write_parquet(lines: Lines, path: Path) -> None:
    """Columns of texts, numbers and booleans; of lists, if all are arrays of one shape; of anything else as JSON."""
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    columns = columns_of(lines())
    types = {name: _arrow_type(pyarrow, column) for name, column in columns.items()}
    fields = [
        pyarrow.field(name, types[name], metadata={"shape": str(list(next(iter(column.arrays))[1]))})
        if column.array
        else pyarrow.field(name, types[name])
        for name, column in columns.items()
    ]
    schema = pyarrow.schema(fields)
    with ParquetWriter(str(path), schema) as writer:
        for rows in _chunks(lines()):
            values = {name: [_value(row.get(name), column) for row in rows] for name, column in columns.items()}
            writer.write_table(pyarrow.table(values, schema))


def _arrow_type(pyarrow: Any, column: Column) -> Any:
    if column.array:
        return pyarrow.list_(pyarrow.from_numpy_dtype(np.dtype(column.array)))
    if column.types == {bool}:
        return pyarrow.bool_()
    if column.types == {int}:
        return pyarrow.int64()
    return pyarrow.float64() if column.is_number else pyarrow.string()


def _value(value: Any, column: Column) -> Any:
    if value is None:
        return None
    if column.array:
        return np.array(value["data"], column.array)
    if column.types == {bool} or column.is_number:
        return value
    text = value if column.types == {str} else json.dumps(value, ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace").decode()


def _chunks(lines: Iterator[bytes]) -> Iterator[list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    size = 0
    for line in lines:
        rows.append(json.loads(line))
        size += len(line)
        if len(rows) >= MOST_ROWS or size >= MOST_BYTES:
            yield rows
            rows, size = [], 0
    yield rows
