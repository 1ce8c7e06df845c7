"""A progress bar, where someone is there to see it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(total: int | None, wanted: bool) -> Iterator[Callable[[int], None]]:
    """Gives a function that takes the number of images sent so far; silent without tqdm or without a terminal."""
    if not wanted or sys.stderr is None or not sys.stderr.isatty():
        yield lambda _: None
        return
    try:
        tqdm = importlib.import_module("tqdm").tqdm
    except ImportError:
        yield lambda _: None
        return
    tqdm.monitor_interval = 0  # no thread
    with tqdm(total=total, unit="img", file=sys.stderr) as bar:
        yield lambda sent: bar.update(sent - bar.n) and None
