"""``torchpipe run``: from the arguments to OUT, at most once for each file, however often it is killed on the way."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

from torchpipe_py.cores import NVIDIA, usable_cores
from torchpipe_py.errors import counted, nearest
from torchpipe_py.plan.build import Pipeline, plan_pipeline
from torchpipe_py.plan.config import Tables, parse_toml
from torchpipe_py.plan.sharing import usual_workers
from torchpipe_py.tools.report import ToolError
from torchpipe_py.tools.run.fleet import Fleet, Outcome
from torchpipe_py.tools.run.identity import identity_of
from torchpipe_py.tools.run.journal import Journal, Lock, remove_partial, sync_folder
from torchpipe_py.tools.run.lines import HEAD_KEYS, Job, Settings, failed_line, line_of_same_content
from torchpipe_py.tools.run.outputs import LINES, check_kind, write_table
from torchpipe_py.tools.run.pictures import picture_name, remove_unfinished
from torchpipe_py.tools.run.progress import Progress
from torchpipe_py.tools.run.sources import Item, Source, Unreadable, open_source
from torchpipe_py.wire.errors import Bound
from torchpipe_py.wire.parameters import check_values
from torchpipe_py.wire.parameters import split as split_parameters

ITEMS_PER_JOB = 4
"""Items without a line in the journal, for each job that the workers may have."""


class Workers(Protocol):
    """What runs jobs: processes of this machine, or actors of a Ray cluster."""

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
    _check_root(plan, args.node_name)
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
            except BaseException:
                if not lock.is_known:  # else an unfinished run can still be resumed
                    lock.remove()
                raise
            lock.begin()
        if args.draw:
            partial.mkdir(exist_ok=True)
        journal = Journal(partial / LINES if args.draw else partial, _has_picture(partial) if args.draw else None)
        stack.callback(journal.close)
        try:
            run = _Run(args, source, settings, journal, _workers(args, settings, tables))
            stack.callback(run.close)
            status = run.run()
        except BaseException:
            if not journal.files:  # nothing to resume
                remove_partial(partial)
                lock.remove()
            raise
        if status == 130:
            return status
        _finish(kind, journal, lock, out, partial)
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
    remove_partial(partial)


def _finish(kind: str, journal: Journal, lock: Lock, out: Path, partial: Path) -> None:
    """Give the output its name: whoever sees OUT sees it complete."""
    journal.sync(and_all=kind == "folder")
    if kind in ("csv", "parquet"):
        table = Path(f"{out}.tmp")
        write_table(kind, journal.lines, table)
        lock.finish(journal.errors)
        os.replace(table, out)
        partial.unlink()
    else:
        if kind == "folder":
            remove_unfinished(str(partial))
        lock.finish(journal.errors)
        os.replace(partial, out)
    sync_folder(out)
    lock.remove()


def _has_picture(folder: Path) -> Any:
    def is_whole(members: Any) -> bool:
        path = folder / members["picture"] if "picture" in members else None
        return path is None or (path.exists() and path.stat().st_size > 0)

    return is_whole


class _Run:
    """The items of a source on their way through workers to a journal."""

    def __init__(
        self, args: argparse.Namespace, source: Source, settings: Settings, journal: Journal, workers: Workers
    ) -> None:
        self._args, self._source, self._settings = args, source, settings
        self._journal, self._workers = journal, workers
        self._items: dict[int, tuple[Item, bytes]] = {}
        """Those without a line in the journal, with their keys."""
        self._under_way: set[bytes] = set()
        self._ended: dict[int, tuple[bytes, bool]] = {}
        """With ``--ordered``: lines that wait for earlier ones."""
        self._next = 0
        self._digests: dict[int, str] = {}
        self._first: dict[str, int] = {}
        """By content: the item that is computed, until its line is in the journal."""
        self._waiting: dict[int, list[int]] = {}
        """The items that wait for its line."""
        self._before = journal.files
        self._progress = Progress(args.progress, source.count, journal.files)

    def run(self) -> int:
        """The exit status."""
        try:
            for number, (item, key) in enumerate(self._left()):
                self._items[number] = item, key
                self._under_way.add(key)
                if item.error is not None:
                    self._end(number, failed_line(item.head(), item.error), True)
                    continue
                while not self._has_room():
                    self._take()
                self._start(number, item)
            while not self._workers.is_idle:
                self._take()
            self._progress.close()
            self._workers.finish()
        except KeyboardInterrupt:
            self._progress.close()
            self._journal.sync(and_all=self._args.draw)
            again = "start it again with the same arguments to go on"
            print(f"torchpipe: interrupted after {self.summary()}; {again}", file=sys.stderr)
            return 130
        except OSError as error:
            raise ToolError(
                f"{self._journal.path}: cannot be written: {error.strerror}; start it again to go on"
            ) from error
        if not self._journal.files:
            raise ToolError(f"{self._args.source}: nothing in it")
        return 1 if self._journal.errors else 0

    def summary(self) -> str:
        """What it has done, in a few words."""
        files, errors = self._journal.files, self._journal.errors
        seconds = monotonic() - self._progress.began
        rate = (files - self._before) / seconds if seconds else 0.0
        before = f", {self._before:,} of them before" if self._before else ""
        return f"{files:,} {'line' if files == 1 else 'lines'}{before}, {counted(errors, 'error')}, {rate:,.1f}/s"

    def close(self) -> None:
        """End the workers at once."""
        self._workers.close()

    def _left(self) -> Iterator[tuple[Item, bytes]]:
        """The items that have no line yet and are not under way, each once, with their keys."""
        own = os.path.join(os.path.abspath(self._settings.folder), "") if self._settings.folder else None
        for item in self._source.items():
            if own is not None and os.path.abspath(item.where).startswith(own):
                continue  # a picture of this run, whose folder lies in the source
            key = item.key
            if key not in self._journal.done and key not in self._under_way:
                yield item, key

    def _has_room(self) -> bool:
        # NOTE: also those that wait for an earlier line, or for one with the same content.
        return len(self._items) <= ITEMS_PER_JOB * self._workers.most and self._workers.has_room

    def _start(self, number: int, item: Item) -> None:
        try:
            data = None if item.load is None else item.load()
        except Exception as error:
            reason = Unreadable(getattr(error, "strerror", None) or str(error))
            self._end(number, failed_line(item.head(), reason), True)
            return
        picture = picture_name(item.path, self._args.source, item.frame) if self._args.draw else ""
        self._workers.add(Job(number, item.head(), item.where, data, item.color, picture))

    def _take(self) -> None:
        """Wait for outcomes, and add their lines to the journal."""
        for number, outcome in self._workers.take():
            if isinstance(outcome, str):
                self._decide(number, outcome)
            elif number not in self._items or number in self._ended:
                pass  # its worker died after it was decided that another one is computed
            elif isinstance(outcome, bytes):
                self._end(number, outcome, _is_error(outcome))
            else:
                self._end(number, failed_line(self._head(number), outcome), True)
        self._journal.sync_if_due(and_all=self._args.draw)
        self._progress.show(self._journal.files, self._journal.errors)

    def _head(self, number: int) -> dict[str, str]:
        head, digest = self._items[number][0].head(), self._digests.get(number)
        return {**head, "sha256": f'"{digest}"'} if digest else head

    def _decide(self, number: int, digest: str) -> None:
        """Have an item computed, unless one with the same content is, or was."""
        self._digests[number] = digest
        first = self._first.get(digest)
        line = self._journal.line_with(digest) if first is None else None
        is_wanted = first == number or (first is None and line is None)
        self._workers.decide(number, is_wanted)
        if is_wanted:
            self._first[digest] = number
            return
        if first is not None and first in self._ended:
            line = self._ended[first][0]
        if line is not None:
            self._end_same(number, line)
        elif first is not None:
            self._waiting.setdefault(first, []).append(number)

    def _end_same(self, number: int, line: bytes) -> None:
        same = line_of_same_content(line, self._items[number][0].head())
        self._write(number, same, _is_error(same))

    def _end(self, number: int, line: bytes, is_error: bool) -> None:
        """End an item, and those with the same content."""
        self._write(number, line, is_error)
        for other in self._waiting.pop(number, ()):
            self._end_same(other, line)

    def _write(self, number: int, line: bytes, is_error: bool) -> None:
        """Add a line to the journal, in the order of the items if asked for."""
        self._ended[number] = line, is_error
        if not self._args.ordered:
            self._add(number)
            return
        while self._next in self._ended:
            self._add(self._next)
            self._next += 1

    def _add(self, number: int) -> None:
        line, is_error = self._ended.pop(number)
        (_, key), digest = self._items.pop(number), self._digests.pop(number, "")
        if self._first.get(digest) == number:
            del self._first[digest]
        self._journal.add(key, line, is_error, digest)
        self._under_way.discard(key)


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


def _check_root(plan: Pipeline, node_name: str | None) -> None:
    if node_name is None and plan.only_root is None:
        raise ToolError(f"--node_name: has to name one of the roots: {', '.join(plan.roots)}")
    if node_name is not None and node_name not in plan.roots:
        raise ToolError(f"--node_name {node_name}: not a root; {nearest(node_name, plan.roots)}")


def _workers(args: argparse.Namespace, settings: Settings, tables: Tables) -> Workers:
    if args.ray:
        from torchpipe_py.tools.run.over_ray import RayWorkers

        return RayWorkers(args.ray, settings, args.workers)
    # As the service, but without engine processes: each worker has the shared nodes, too.
    usual = 1 if NVIDIA.exists() else usual_workers(tables, usable_cores(), has_gpu=False)
    return Fleet(settings, args.workers or usual, args.timeout)
