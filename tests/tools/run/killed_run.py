"""``torchpipe run`` in processes that kill themselves, each a step later: ``killed_run.py ARGUMENTS-OF-TORCHPIPE``.

Each is a fork of this one, begins when a line comes, and has its exit status printed.
A step is a call that changes files, or half of a line. Files are their own results, without a pipe.
"""

from __future__ import annotations

import functools
import itertools
import os
import signal
import sys
from typing import Any

from torchpipe_py import cli
from torchpipe_py.tools.run import command, partial
from torchpipe_py.tools.run.lines import Job
from torchpipe_py.tools.run.pictures import replace_file
from torchpipe_py.wire.json_values import json_line

STEPS = ("pwrite", "ftruncate", "fsync", "replace", "unlink", "mkdir", "rename")

_steps = itertools.count(1)
_last = 0


def step(half: Any = lambda: None) -> None:
    """Die if it is time, after ``half`` of what was to be done."""
    if next(_steps) == _last:
        half()
        os.kill(os.getpid(), signal.SIGKILL)


class InProcess:
    """Three jobs at a time, which end in another order than they began."""

    most = 3

    def __init__(self, folder: str) -> None:
        self._jobs: list[Job] = []
        self._folder = folder

    @property
    def has_room(self) -> bool:
        return len(self._jobs) < self.most

    @property
    def is_idle(self) -> bool:
        return not self._jobs

    def add(self, job: Job) -> None:
        self._jobs.append(job)

    def take(self) -> list[tuple[int, bytes]]:
        job = self._jobs.pop()
        members = dict(job.head)
        if job.picture:
            replace_file(os.path.join(self._folder, job.picture), b"drawn")
            members["picture"] = f'"{job.picture}"'
        return [(job.number, json_line({**members, "result": f'"{os.path.basename(job.where)}"'}))]

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass


def stepping(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        step()
        return function(*args, **options)

    return call


for name in STEPS:
    setattr(os, name, stepping(getattr(os, name)))


class LineFile(partial.LineFile):
    """A file whose lines may be torn."""

    def add(self, key: bytes, line: bytes, is_error: bool, digest: str = "") -> None:
        def half() -> None:
            self._file.write(line[: len(line) // 2])
            self._file.flush()

        step(half)
        super().add(key, line, is_error, digest)


command.LineFile = LineFile  # type: ignore[misc]
command._workers = lambda args, source, settings, tables: InProcess(settings.folder)  # type: ignore[assignment]
for _ in sys.stdin:
    _last += 1
    process = os.fork()
    if process == 0:
        sys.exit(cli.main(sys.argv[1:]))
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
