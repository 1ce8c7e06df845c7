"""The line of JSON of an item: its path, and the result of a pipe or the error in place of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from torchpipe_py.backends.image.decoders import Decoders
from torchpipe_py.cores import limit_threads
from torchpipe_py.errors import TorchpipeError, without_warnings
from torchpipe_py.keys import TASK_COLOR_KEY, TASK_DATA_KEY, TASK_RESULT_KEY
from torchpipe_py.malloc import keep_freed_memory
from torchpipe_py.methods.roots import Root, Roots
from torchpipe_py.plan.build import plan_pipeline
from torchpipe_py.plan.config import Tables
from torchpipe_py.registry import import_code
from torchpipe_py.runtime.pipe import pipe
from torchpipe_py.tools.report import ToolError
from torchpipe_py.tools.run.pictures import draw_picture
from torchpipe_py.tools.run.sources import read_item
from torchpipe_py.wire.errors import code_of, describe_error, log_defect
from torchpipe_py.wire.json_values import json_line, to_json, to_text

HEAD_KEYS = ("path", "frame", "pts", "sha256", "picture", "error", "code")
"""Members of a line beside the outputs."""

LEAST_AHEAD, MOST_AHEAD = 4, 256
"""Bounds of the items that a process has at once."""

_HASH = b', "sha256": "'


@dataclass(frozen=True)
class Settings:
    """Settings that the lines of a run depend on, beside their items.

    ``config`` are the tables of the TOML; ``folder`` is where pictures are written, empty without them.
    """

    config: Tables
    imports: Sequence[str] = ()
    node_name: str | None = None
    outputs: Sequence[str] = (TASK_RESULT_KEY,)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    by_content: bool = False
    folder: str = ""


class Job(NamedTuple):
    """An item for a process that has a pipe; ``data`` is ``None`` for what that reads at ``where``.

    ``head`` are the first members of the line, as JSON. ``picture`` is the name of the picture to draw.
    """

    number: int
    head: dict[str, str]
    where: str
    data: Any = None
    color: str = ""
    picture: str = ""

    def hashed(self, digest: str) -> Job:
        """The same with the hash of its content in its lines."""
        return self._replace(head=with_hash(self.head, digest))


@dataclass(eq=False)
class StartedJob:
    """A job on its way: ``source`` is its image, if it is to be drawn; the outcome is in ``data``, or ``error``."""

    job: Job
    head: dict[str, str]
    root: Root | None = None
    source: Any = None
    data: dict[str, Any] = field(default_factory=dict)
    error: BaseException | None = None


class LineMaker:
    """A pipe that runs jobs, and makes the line of each.

    Raises what ``pipe`` raises. ``processes`` is the number of processes that share the cores. ``started`` jobs
    end in ``finished``, from any thread; ``line`` makes the line.
    """

    def __init__(self, settings: Settings, processes: int, finished: Callable[[StartedJob], object]) -> None:
        for name in settings.imports:
            import_code(name)
        limit_threads()  # NOTE: after custom code, which may have set them
        keep_freed_memory()
        self._settings, self._finished = settings, finished
        with without_warnings():  # the command has planned it, too
            plan = plan_pipeline(settings.config, processes=processes)
        self._pipe, self._decoders = pipe(plan), Decoders.of(plan, settings.node_name).in_color("bgr")
        self._roots = Roots(self._pipe, Path(settings.config.source).stem)
        self._roots.find(settings.node_name).check_parameters(settings.parameters)
        self._has_logged = False
        stats = self._pipe.stats()
        busy = 2 * max(node["instances"] * node["max"] for node in stats["nodes"].values())
        self.ahead: int = min(max(LEAST_AHEAD, min(busy, MOST_AHEAD)), stats["max_inflight"])
        """Jobs that keep the pipe busy."""

    def read(self, job: Job) -> tuple[Any, str]:
        """The data of a job, and its SHA-256 in hex if lines have one. ``Unreadable`` if it cannot be read."""
        data = read_item(job.where) if job.data is None else job.data
        return data, sha256(data).hexdigest() if self._settings.by_content else ""

    def start(self, job: Job, data: Any, digest: str) -> None:
        """Run a job on its data; it ends in ``finished``."""
        started = StartedJob(job, with_hash(job.head, digest), source=data if job.picture else None)
        settings = self._settings
        try:
            started.root, started.data = self._roots.item(
                {TASK_DATA_KEY: data}, settings.node_name, None, settings.outputs, settings.parameters
            )
            if job.color:
                started.data[TASK_COLOR_KEY] = job.color

            def finish(_: Any, error: BaseException | None) -> None:
                started.error = error
                self._finished(started)

            self._pipe.dispatch(started.data, finish)
        except Exception as error:
            started.error = error
            self._finished(started)

    def fail(self, job: Job, error: BaseException) -> None:
        """End a job that was not started."""
        self._finished(StartedJob(job, job.head, error=error))

    def line(self, started: StartedJob) -> bytes:
        """The line of a job that has ended; draws its picture before. ``ToolError`` if none can be written."""
        try:
            if started.error is not None:
                raise started.error
            assert started.root is not None
            values = {key: started.root.output(started.data, key) for key in self._settings.outputs}
            members = dict(started.head)
            if started.source is not None:
                result = next(iter(values.values()))
                where, job = self._settings.folder, started.job
                draw_picture(where, job.picture, started.source, job.color, result, self._decoders)
                members["picture"] = to_text("picture", started.job.picture)
            for key, value in values.items():
                members.update(to_json(key, value))
            return json_line(members)
        except ToolError:
            raise
        except Exception as error:
            if not isinstance(error, TorchpipeError) or code_of(error) == "backend_error":
                self._log(error)
            return failed_line(started.head, error)

    def close(self) -> None:
        """Close the pipe."""
        self._pipe.close()

    def _log(self, error: BaseException) -> None:
        """Log the first defect with its traceback; the lines have the others."""
        if not self._has_logged:
            self._has_logged = True
            log_defect(error)


def with_hash(head: dict[str, str], digest: str) -> dict[str, str]:
    """The first members of a line, with a hash if there is one."""
    return {**head, "sha256": f'"{digest}"'} if digest else head


def failed_line(head: Mapping[str, str], error: BaseException) -> bytes:
    """The line of an item without a result: the error's text and code as in an answer of the service."""
    code, text = code_of(error), describe_error(error)
    if code == "internal":
        text = f"{type(error).__name__}: {text}"
    return json_line({**head, "error": to_text("error", text), "code": to_text("code", code)})


def line_of_same_content(line: bytes, head: Mapping[str, str]) -> bytes:
    """``line``, which has a hash, for another item with the same bytes."""
    # NOTE: within a text of JSON each quote has a backslash before it, so this is the member itself.
    return json_line(head)[:-2] + line[line.index(_HASH) :]


def read_line(line: bytes) -> dict[str, Any] | None:
    """The members of a whole line of a run; ``None`` for anything else."""
    if not line.endswith(b"}\n"):
        return None
    try:
        members = json.loads(line)
    except ValueError:
        return None
    is_line = isinstance(members, dict) and isinstance(members.get("path"), str)
    return members if is_line and isinstance(members.get("frame", 0), int) else None
