"""Files that are whole or not there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def in_the_place_of(path: Path) -> Iterator[Path]:
    """A path beside it to write to; once that is done it takes the place of ``path``."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    yield unfinished
    os.replace(unfinished, path)
