"""Files that are whole or not there."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def in_the_place_of(path: Path) -> Iterator[Path]:
    """A path beside it to write to; once that is done it takes the place of ``path``."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    yield unfinished
    os.replace(unfinished, path)


def to_toml(config: Mapping[str, Mapping[str, Any]]) -> str:
    """Scalars of ``global`` first, then a table for each node."""
    lines = [f"{key} = {_value(value)}" for key, value in config.get("global", {}).items()]
    for name, table in config.items():
        if name != "global":
            lines += [f"[{name}]", *(f"{_value(key)} = {_value(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    # JSON's, but for its pairs of surrogates and for the one character that TOML has escaped beside JSON's.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
