"""Images of a folder, and what gives a result for each: pipes and functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from torchpipe_py.backends.image.files import find_images
from torchpipe_py.backends.model.postprocess import read_labels
from torchpipe_py.errors import UnknownNode
from torchpipe_py.keys import TASK_COLOR_KEY, TASK_DATA_KEY, TASK_ERROR_KEY, TASK_RESULT_KEY
from torchpipe_py.plan.build import Pipeline, plan_pipeline
from torchpipe_py.runtime.pipe import pipe
from torchpipe_py.tools.compare_models.predicted import as_result
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


@dataclass(frozen=True)
class Pictures:
    """The images of a folder, or some of them: ``paths`` relative to it."""

    img_dir: str
    paths: Sequence[Path] | None = None

    def listed(self) -> Sequence[Path]:
        """The paths; ``ToolError`` if there are none."""
        return images_of(self.img_dir) if self.paths is None else self.paths

    def shuffled(self) -> Sequence[Path]:
        """The paths in a random order that is the same each time, so that the first of them are a sample of all."""
        paths = self.listed()
        return [paths[index] for index in np.random.default_rng(0).permutation(len(paths))]


class Picture(NamedTuple):
    """A file: its name in reports, its path and its bytes."""

    name: str
    path: str
    data: bytes


def read_images(img_dir: str, paths: Sequence[Path]) -> tuple[list[Picture], list[tuple[str, str]]]:
    """The images, and name and reason for each unreadable one."""
    found: list[Picture] = []
    unread: list[tuple[str, str]] = []
    for path in paths:
        file = Path(img_dir, path)
        try:
            found.append(Picture(shown_name(path), str(file), file.read_bytes()))
        except OSError as error:
            unread.append((shown_name(path), f"the file cannot be read: {error.strerror}"))
    return found, unread


def shown_name(path: Path) -> str:
    """The path with '/', on one line."""
    return printable(path.as_posix())


Function = Callable[[str], Any]
"""Called with the path of an image; returns its class, detections, map, vector or pixels."""


@dataclass(frozen=True)
class ResultSource:
    """A source of results for images, and its name in reports: a TOML file, its tables or plan, or a function."""

    name: str
    config: str | Mapping[str, Any] | Pipeline | Function

    def open(self, stack: ExitStack) -> Runner:
        """Its runner, closed with ``stack``. Raises like ``pipe``, and ``ToolError`` for several roots."""
        return FunctionRunner(self.name, self.config) if callable(self.config) else self.open_pipe(stack)

    def open_pipe(self, stack: ExitStack) -> PipeRunner:
        """The same, of a configuration. ``ToolError`` for a function."""
        if not isinstance(self.config, (str, Mapping, Pipeline)):
            raise ToolError(f"{self.name}: expected a configuration, not a function")
        return PipeRunner(self.name, self.config, stack)


class Runner(Protocol):
    """Computes a result for each image; ``config`` is its name in messages, ``batch`` how many it runs at once.

    ``is_function``: a function of the user, not a pipe. ``choices`` are those of ``pipe.setup_choices``.
    """

    config: str
    batch: int
    is_function: bool
    choices: Mapping[str, Sequence[str]]

    def run(self, pictures: Iterable[Picture]) -> Iterator[Data]:
        """The finished dict of each image, in order."""
        ...

    def labels(self) -> Sequence[str]:
        """The names of the classes by index; empty if they are unknown."""
        ...


class PipeRunner:
    """A pipe, closed with ``stack``, and the name of the configuration it is built from."""

    is_function = False

    def __init__(self, config: str, source: str | Mapping[str, Any] | Pipeline, stack: ExitStack) -> None:
        self.config = config
        self._plan = plan_pipeline(source)
        self._pipe = stack.enter_context(pipe(self._plan))
        self.batch = min(BATCH, int(self._pipe.stats()["max_inflight"]))
        self.choices: Mapping[str, Sequence[str]] = self._pipe.setup_choices()
        try:
            self._pipe.signature()
        except UnknownNode as error:
            raise ToolError(f"{config}: {error}; parity takes a configuration with one root") from error

    def run(self, pictures: Iterable[Picture]) -> Iterator[Data]:
        return self.run_items({TASK_DATA_KEY: picture.data} for picture in pictures)

    def run_items(self, requests: Iterable[Data]) -> Iterator[Data]:
        """The finished dicts of the requests; ``batch`` are in the pipe at once."""
        return self._pipe.map(requests, self.batch, return_errors=True)

    def labels(self) -> Sequence[str]:
        for plan in reversed([*self._plan.plans.values()]):
            for part in plan.parts():
                if part.params.get("labels"):
                    return read_labels(part.params["labels"])
        return ()


class FunctionRunner:
    """A function of the user, called with one path after the other."""

    batch = BATCH
    is_function = True

    def __init__(self, config: str, function: Function) -> None:
        self.config = config
        self.choices: Mapping[str, Sequence[str]] = {}
        self._function = function

    def run(self, pictures: Iterable[Picture]) -> Iterator[Data]:
        for picture in pictures:
            try:
                yield as_result(self._function(picture.path))
            except (Exception, SystemExit) as error:
                yield {TASK_ERROR_KEY: error}

    def labels(self) -> Sequence[str]:
        return ()


class Recorded:
    """A source that runs once for each image, however often it is compared; closed with ``stack``.

    All its results are kept in memory.
    """

    def __init__(self, source: ResultSource, stack: ExitStack) -> None:
        self.name = source.name
        self._runner = source.open(stack)
        self.config, self.batch, self.labels = self._runner.config, self._runner.batch, self._runner.labels
        self.is_function, self.choices = self._runner.is_function, self._runner.choices
        self._items: dict[str, Data] = {}

    def open(self, stack: ExitStack) -> Runner:
        """This object, which stays open."""
        return self

    def run(self, pictures: Iterable[Picture]) -> Iterator[Data]:
        wanted = list(pictures)
        new = [picture for picture in wanted if picture.path not in self._items]
        for picture, item in zip(new, self._runner.run(new), strict=True):
            self._items[picture.path] = {key: item[key] for key in _OF_RESULTS if key in item}
        return (dict(self._items[picture.path]) for picture in wanted)


_OF_RESULTS = (TASK_RESULT_KEY, TASK_COLOR_KEY, TASK_ERROR_KEY, "score")
"""The value that ``results.read`` reads."""
