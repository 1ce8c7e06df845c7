"""``torchpipe run``: from the arguments to OUT, at most once for each file, however often it is killed on the way."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

from torchpipe_py.cores import NVIDIA, usable_cores
from torchpipe_py.errors import counted
from torchpipe_py.plan.build import plan_pipeline
from torchpipe_py.plan.config import Tables, parse_toml
from torchpipe_py.plan.sharing import usual_workers
from torchpipe_py.tools.options import check_node_name
from torchpipe_py.tools.report import ToolError
from torchpipe_py.tools.run.identity import identity_of
from torchpipe_py.tools.run.lines import HEAD_KEYS, Job, Settings, failed_line, line_of_same_content, with_hash
from torchpipe_py.tools.run.local_workers import LocalWorkers, Outcome
from torchpipe_py.tools.run.outputs import LINES, check_kind, write_table
from torchpipe_py.tools.run.partial import LineFile, Lock, remove_partial, sync_folder, writing
from torchpipe_py.tools.run.pictures import picture_name, remove_unfinished
from torchpipe_py.tools.run.progress import Progress
from torchpipe_py.tools.run.sources import Item, Source, Unreadable, open_source
from torchpipe_py.wire.errors import Bound
from torchpipe_py.wire.parameters import check_values
from torchpipe_py.wire.parameters import split as split_parameters

ITEMS_PER_JOB = 4
"""Items without a line in the file, for each job that the workers may have."""


class Workers(Protocol):
    """Runs jobs: processes of this machine, or actors of a Ray cluster."""

    @property
    def has_room(self) -> bool: ...
    @property
    def is_idle(self) -> bool: ...
    @property
    def most(self) -> int: ...
    def add(self, job: Job) -> None: ...
    def decide(self, number: int, is_wanted: bool) -> None: ...
    def take(self) -> list[Outcome]: ...
    def finish(self) -> None: ...
    def close(self) -> None: ...


def run_run(args: argparse.Namespace) -> int:
    """0 if every file has a result, 1 if some have errors, 130 if interrupted. Raises ``TorchpipeError``."""
    out: Path = args.out
    kind = check_kind(out, args.draw)
    source = open_source(args.source)
    tables = parse_toml(args.config)
    plan = plan_pipeline(tables)
    check_node_name(plan, args.node_name)
    partial = Path(f"{out}.partial")
    settings = _settings(args, tables, str(partial) if args.draw else "")
    lock = Lock(out, identity_of(args, tables, plan, kind), args.restart)
    with ExitStack() as stack:
        stack.callback(lock.close)
        if lock.errors is not None and out.exists() and not partial.exists():  # it was killed just before its end
            lock.remove()
            print(f"{out}: complete, {counted(lock.errors, 'error')}", file=sys.stderr)
            return 1 if lock.errors else 0
        if lock.is_new:
            try:
                _begin(out, partial, args.restart, lock.is_known)
                lock.begin()
            except BaseException:
                if not lock.is_known:  # else an unfinished run can still be resumed
                    lock.remove()
                raise
        if args.draw:
            with writing(partial):
                partial.mkdir(exist_ok=True)
        line_file = LineFile(partial / LINES if args.draw else partial, _has_picture(partial) if args.draw else None)
        stack.callback(line_file.close)
        try:
            run = _Run(args, source, settings, line_file, _workers(args, source, settings, tables))
            stack.callback(run.close)
            status = run.run()
        except BaseException:
            if not line_file.files:  # nothing to resume
                remove_partial(partial)
                lock.remove()
            raise
        if status == 130:
            return status
        _finish(kind, line_file, lock, out, partial)
        print(f"{out}: {run.summary()}", file=sys.stderr)
    return status


def _begin(out: Path, partial: Path, restart: bool, is_known: bool) -> None:
    """Make way for a new run; a folder is removed only if a run of before has made it."""
    for path in (out, *(() if is_known else (partial,))):
        if path.is_dir():
            raise ToolError(f"--out {out}: there is a folder {path}; give another name, or remove it")
    for path in (out, partial):
        if path.exists() and not restart:
            raise ToolError(f"{path}: there already; --restart begins anew and replaces {out}")
    with writing(partial):
        remove_partial(partial)


def _finish(kind: str, line_file: LineFile, lock: Lock, out: Path, partial: Path) -> None:
    """Give the output its name: whoever sees OUT sees it complete."""
    line_file.sync(and_all=kind == "folder")
    complete = partial
    if kind in ("csv", "parquet"):
        complete = Path(f"{out}.tmp")
        with writing(complete):
            write_table(kind, line_file.lines, complete)
    elif kind == "folder":
        with writing(partial):
            remove_unfinished(str(partial))
    lock.finish(line_file.errors)
    with writing(out):
        os.replace(complete, out)
        remove_partial(partial)
        sync_folder(out)
    lock.remove()


def _has_picture(folder: Path) -> Any:
    def is_whole(members: Any) -> bool:
        path = folder / members["picture"] if "picture" in members else None
        return path is None or (path.exists() and path.stat().st_size > 0)

    return is_whole


@dataclass(eq=False)
class _Entry:
    """An item that has no line in the file yet."""

    number: int
    item: Item
    key: bytes
    digest: str = ""
    """With ``--by content``: the hash of its content, once it is known."""
    same: list[_Entry] = field(default_factory=list)
    """Later items with this content, which wait for its line."""
    line: bytes | None = None
    """With ``--ordered``: its line, which waits for those of earlier items."""


class _Run:
    """The items of a source on their way through workers to the file of lines."""

    def __init__(
        self, args: argparse.Namespace, source: Source, settings: Settings, line_file: LineFile, workers: Workers
    ) -> None:
        self._args, self._source, self._settings = args, source, settings
        self._line_file, self._workers = line_file, workers
        self._entries: dict[int, _Entry] = {}
        self._keys: set[bytes] = set()
        """Those of the entries."""
        self._computed: dict[str, _Entry] = {}
        """The entry that is computed, by the hash of its content."""
        self._count = self._next = 0
        """The number of the next item, and of the next line with ``--ordered``."""
        self._before = line_file.files
        self._progress = Progress(args.progress, source.count, line_file.files)

    def run(self) -> int:
        """The exit status."""
        try:
            for item in self._left():
                if item is None:  # the next one has not come yet
                    if not self._workers.is_idle:
                        self._take()
                else:
                    self._begin(item)
            while not self._workers.is_idle:
                self._take()
            self._progress.close()
            self._workers.finish()
        except KeyboardInterrupt:
            self._progress.close()
            self._line_file.sync(and_all=self._args.draw)
            again = "start it again with the same arguments to go on"
            print(f"torchpipe: interrupted after {self.summary()}; {again}", file=sys.stderr)
            return 130
        if not self._line_file.files:
            raise ToolError(f"{self._args.source}: nothing in it")
        return 1 if self._line_file.errors else 0

    def summary(self) -> str:
        """The lines so far, in a few words."""
        files, errors = self._line_file.files, self._line_file.errors
        seconds = monotonic() - self._progress.began
        rate = (files - self._before) / seconds if seconds else 0.0
        before = f", {self._before:,} of them before" if self._before else ""
        return f"{files:,} {'line' if files == 1 else 'lines'}{before}, {counted(errors, 'error')}, {rate:,.1f}/s"

    def close(self) -> None:
        """End the workers at once."""
        self._workers.close()

    def _left(self) -> Iterator[Item | None]:
        """The items of the source that have no line yet and are not under way, each once; ``None`` if one must come."""
        own = os.path.join(os.path.abspath(self._settings.folder), "") if self._settings.folder else None
        items = self._source.items()
        while True:
            try:
                item = next(items)
            except StopIteration:
                return
            except OSError as error:
                raise ToolError(f"{self._args.source}: cannot be read: {error.strerror or error}") from error
            if item is not None and own is not None and os.path.abspath(item.where).startswith(own):
                continue  # a picture of this run, whose folder lies in the source
            if item is None or (item.key not in self._line_file.done and item.key not in self._keys):
                yield item

    def _has_room(self) -> bool:
        # NOTE: also those that wait for an earlier line, or for one with the same content.
        return len(self._entries) <= ITEMS_PER_JOB * self._workers.most and self._workers.has_room

    def _begin(self, item: Item) -> None:
        """Give an item to the workers once they have room, or end it with its error."""
        entry = _Entry(self._count, item, item.key)
        self._entries[entry.number] = entry
        self._keys.add(entry.key)
        self._count += 1
        if item.error is not None:
            self._end(entry, failed_line(item.head(), item.error))
            return
        while not self._has_room():
            self._take()
        try:
            data = None if item.load is None else item.load()
        except Exception as error:
            reason = Unreadable(getattr(error, "strerror", None) or str(error))
            self._end(entry, failed_line(item.head(), reason))
            return
        picture = picture_name(item.path, self._args.source, item.frame) if self._args.draw else ""
        self._workers.add(Job(entry.number, item.head(), item.where, data, item.color, picture))

    def _take(self) -> None:
        """Wait for outcomes, and add their lines to the file."""
        for number, outcome in self._workers.take():
            entry = self._entries.get(number)
            if entry is None or entry.line is not None:
                pass  # its worker died after it was decided that another one is computed
            elif isinstance(outcome, str):
                self._decide(entry, outcome)
            elif isinstance(outcome, bytes):
                self._end(entry, outcome)
            else:
                self._end(entry, failed_line(with_hash(entry.item.head(), entry.digest), outcome))
        self._line_file.sync_if_due(and_all=self._args.draw)
        self._progress.show(self._line_file.files, self._line_file.errors)

    def _decide(self, entry: _Entry, digest: str) -> None:
        """Have an item computed, unless one with the same content is, or was."""
        entry.digest = digest
        first = self._computed.get(digest)
        line = self._line_file.line_with(digest) if first is None else first.line
        is_wanted = line is None and first in (None, entry)
        self._workers.decide(entry.number, is_wanted)
        if line is not None:
            self._end(entry, line_of_same_content(line, entry.item.head()))
        elif is_wanted:
            self._computed[digest] = entry
        elif first is not None:
            first.same.append(entry)

    def _end(self, entry: _Entry, line: bytes) -> None:
        """End an item, and those with the same content: their lines go to the file, in order if that is wanted."""
        entry.line = line
        if not self._args.ordered:
            self._add(entry, line)
        while (following := self._entries.get(self._next)) is not None and following.line is not None:
            self._add(following, following.line)
            self._next += 1
        for other in entry.same:
            self._end(other, line_of_same_content(line, other.item.head()))

    def _add(self, entry: _Entry, line: bytes) -> None:
        del self._entries[entry.number]
        self._keys.discard(entry.key)
        if self._computed.get(entry.digest) is entry:
            del self._computed[entry.digest]
        self._line_file.add(entry.key, line, _is_error(line), entry.digest)


def _is_error(line: bytes) -> bool:
    return b'"error": ' in line and "error" in json.loads(line)


# --- settings


def _settings(args: argparse.Namespace, tables: Tables, folder: str) -> Settings:
    for name in args.outputs:
        if name in HEAD_KEYS:
            raise ToolError(f"--outputs: {name!r} is a member of each line already")
    parameters = dict(args.param or ())
    split_parameters("--param: ", parameters, ())
    check_values(parameters, Bound(2**20, "--param"))
    return Settings(
        tables, tuple(args.imports or ()), args.node_name, tuple(args.outputs), parameters, args.by == "content", folder
    )


def _workers(args: argparse.Namespace, source: Source, settings: Settings, tables: Tables) -> Workers:
    if args.ray:
        from torchpipe_py.tools.run.over_ray import RayWorkers, refusal

        if archive := source.archive():
            raise refusal(archive)
        return RayWorkers(args.ray, settings, args.workers)
    # As the service, but without engine processes: each worker has the shared nodes, too.
    usual = 1 if NVIDIA.exists() else usual_workers(tables, usable_cores(), has_gpu=False)
    return LocalWorkers(settings, args.workers or usual, args.timeout)
