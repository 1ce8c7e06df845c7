"""Loads and unloads the models of a folder while the service runs.

The workers set up or close that model alone; the others are not touched. A model with shared nodes is a reload: new
workers and engine processes take over. If a model cannot be set up, all stays as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic
from typing import Any

from torchpipe_py import ConfigError, Overloaded
from torchpipe_py.serving import (
    UNLOADED,
    Done,
    Folder,
    answers,
    describe_error,
    list_models,
    name_of,
    nearest,
    version_of,
)
from torchpipe_server.front.loop import Loop, call_on_thread
from torchpipe_server.supervisor.fleet import Fleet

Files = dict[str, dict[str, str]]
Wrong = dict[str, str]
_ADDED = "added to the folder, not loaded yet"  # the reason for which a model is not served

logger = logging.getLogger("torchpipe_server")


class Repository:
    """The folder that ``fleet`` serves. Its files are listed and read on other threads."""

    def __init__(self, loop: Loop, fleet: Fleet, may_be_empty: bool) -> None:
        self._loop, self._fleet, self._may_be_empty = loop, fleet, may_be_empty
        self._problems: dict[str, str] = {}  # why the last attempt to load a model failed
        self._asking: list[Done] = []  # for the next listing of the folder
        self._is_listing = False

    def index(self, done: Done) -> None:
        """Call ``done`` with each version that is served or in the folder, with ``state`` and ``reason``."""
        self._asking.append(done)
        if not self._is_listing:
            self._list()

    def _list(self) -> None:
        """List the folder for all that ask; those that ask meanwhile may know of newer files."""
        asking, self._asking, self._is_listing = self._asking, [], True

        def answer(listed: tuple[Files, Wrong] | Exception) -> None:
            self._is_listing = False
            if self._asking:
                self._list()
            rows: list[dict[str, str]] | Exception
            try:
                if isinstance(listed, Exception):
                    raise listed
                rows = self._rows(*listed)
            except Exception as error:
                rows = error
            for done in asking:
                done(rows)

        call_on_thread(self._loop, "torchpipe-list", self._files, answer)

    def _rows(self, files: Files, wrong: Wrong) -> list[dict[str, str]]:
        served: Folder = self._fleet.generation.tables
        problems = {**wrong, **self._fleet.problems}
        ready = served.keys() - self._fleet.problems.keys()
        named = {f"{name}/{version}" for name, each in files.items() for version in each}
        rows = []
        for key in sorted({*served, *named, *wrong}):
            name, version = name_of(key), version_of(key)
            state, reason = "READY", ""
            if key not in ready:
                problem = self._problems.get(name) or problems.get(key) or served.problems.get(key)
                state, reason = "UNAVAILABLE", describe_error(ConfigError(problem)) if problem else _ADDED
            rows.append({"name": name, "version": version, "state": state, "reason": reason})
        return rows

    def control(self, action: str, name: str, done: Callable[[int, dict[str, Any]], object]) -> None:
        """``load`` or ``unload`` the model; ``done`` is called with the status and body of the outcome."""
        began = monotonic()
        versions: list[str] = []  # in the folder, of a model to load

        def read() -> Folder:
            if action == "load":
                versions.extend(self._files()[0].get(name, ()))
            return self._changed(action, name)

        def finish(problem: str) -> None:
            served: Folder = self._fleet.generation.tables
            if problem:
                if versions:
                    self._problems[name] = problem
                    if not served.versions(name):
                        self._fleet.add_problems({f"{name}/{version}": problem for version in versions})
                text = describe_error(ConfigError(problem))  # without folders: clients read it
                done(400, {"error": f"failed to {action} {name[:80]!r}: {text}", "code": "config"})
                return
            self._problems.pop(name, None)
            seconds = round(monotonic() - began, 3)
            logger.info("%sed model %r in %.1f s", action, name, seconds)
            done(200, {"name": name, "versions": served.versions(name), "seconds": seconds})

        try:
            self._fleet.change(read, finish, name)
        except Overloaded as error:
            failed = answers.failure(error)
            done(failed.status, failed.body)

    def _files(self) -> tuple[Files, Wrong]:
        """The files of the folder, by model and version, and problems of other files by ``NAME/VERSION``."""
        try:
            return list_models(self._fleet.generation.tables.source)
        except ConfigError as error:
            logger.error("cannot list the models of the folder: %s", error)
            return {}, {}

    def _changed(self, action: str, name: str) -> Folder:
        served: Folder = self._fleet.generation.tables
        if action == "load":
            return served.having(name)
        if not served.versions(name):
            raise ConfigError(f"no such model is served; {nearest(name[:80], served.names)}")
        rest = served.without(name)
        if not rest and not self._may_be_empty:
            raise ConfigError("the only model cannot be unloaded without --repository-control")
        rest.problems.update({f"{name}/{version}": UNLOADED for version in served.versions(name)})
        return rest
