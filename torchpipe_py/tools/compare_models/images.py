"""Images of a folder as requests, and the pipes that run them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torchpipe_py.backends.image.files import find_images
from torchpipe_py.errors import UnknownNode
from torchpipe_py.keys import TASK_DATA_KEY
from torchpipe_py.runtime.pipe import pipe
from torchpipe_py.tools.report import ToolError, printable

Data = dict[str, Any]

BATCH = 16
"""Images in flight at once, which bounds the memory."""


def images_of(img_dir: str) -> list[Path]:
    """The images of a folder, relative to it; ``ToolError`` if there are none."""
    try:
        return [path.relative_to(img_dir) for path in find_images(img_dir)]
    except OSError as error:
        raise ToolError(f"--img_dir {error}") from error


def read_images(img_dir: str, paths: Sequence[Path]) -> tuple[list[str], list[Data], list[tuple[str, str]]]:
    """Names and requests of the images; and name and reason for each unreadable one."""
    names: list[str] = []
    requests: list[Data] = []
    unread: list[tuple[str, str]] = []
    for path in paths:
        try:
            requests.append({TASK_DATA_KEY: Path(img_dir, path).read_bytes()})
            names.append(shown_name(path))
        except OSError as error:
            unread.append((shown_name(path), f"the file cannot be read: {error.strerror}"))
    return names, requests, unread


def shown_name(path: Path) -> str:
    """The path with '/', on one line."""
    return printable(path.as_posix())


class PipeRunner:
    """A pipe and the name of the configuration it is built from; closed with ``stack``."""

    def __init__(self, config: str, source: str | Mapping[str, Any], stack: ExitStack) -> None:
        self.config = config
        self._pipe = stack.enter_context(pipe(source))
        self.batch = min(BATCH, int(self._pipe.stats()["max_inflight"]))
        try:
            self._pipe.signature()
        except UnknownNode as error:
            raise ToolError(f"{config}: {error}; parity takes a configuration with one root") from error

    def run(self, requests: Iterable[Data]) -> Iterator[Data]:
        """The finished dicts of copies of the requests, in order; ``batch`` are in the pipe at once."""
        return self._pipe.map(map(dict, requests), self.batch, return_errors=True)
