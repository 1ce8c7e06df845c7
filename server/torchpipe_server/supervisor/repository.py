"""Loads and unloads the models of a folder while the service runs.

The workers set up or close that model alone; the others are not touched. A model with shared nodes is a reload: new
workers and engine processes take over. If a model cannot be set up, all stays as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic
from typing import Any

from torchpipe_py import ConfigError, Overloaded, TorchpipeError
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
from torchpipe_server.front.loop import Loop, call_on_thread, take_each
from torchpipe_server.supervisor.fleet import Fleet
from torchpipe_server.supervisor.generation import RETRY_MS

Files = dict[str, dict[str, str]]
Problems = dict[str, str]

LIST_SECONDS = 5.0  # time limit for a list of the folder, which takes milliseconds unless its storage hangs
_ADDED = "added to the folder, not loaded yet"  # the reason for which a model is not served

logger = logging.getLogger("torchpipe_server")


class FolderUnavailable(TorchpipeError, RuntimeError):
    """The folder cannot be listed now."""

    code = "unavailable"
    retry_after_ms = RETRY_MS


class Repository:
    """The folder that ``fleet`` serves. Its files are listed and read on other threads."""

    def __init__(self, loop: Loop, fleet: Fleet, may_be_empty: bool) -> None:
        self._loop, self._fleet, self._may_be_empty = loop, fleet, may_be_empty
        self._problems: dict[str, str] = {}  # why the last attempt to load a model failed
        self._listing: list[Done] = []  # get the list that is being made
        self._asking: list[Done] = []  # get the next one
        self._is_listing = False
        self._refusal: Exception | None = None  # why nobody gets a list: the folder hangs, or the service is stopping

    def index(self, done: Done) -> None:
        """Call ``done`` with each version that is served or in the folder, with ``state`` and ``reason``.

        Or with an exception, at the latest after ``LIST_SECONDS``, and at once while an earlier list is not made.
        """
        if self._refusal is not None:
            done(self._refusal)
            return
        self._asking.append(done)
        if not self._is_listing:
            self._list()

    def stop(self) -> None:
        """Answer all that ask, so that no client waits for the storage while the service stops."""
        self._refuse(FolderUnavailable("the service is stopping"))

    def _refuse(self, refusal: Exception) -> None:
        self._refusal = self._refusal or refusal
        asking, self._listing, self._asking = [*self._listing, *self._asking], [], []
        _answer(asking, self._refusal)

    def _list(self) -> None:
        """List the folder for all that ask; those that ask meanwhile may know of newer files."""
        self._listing, self._asking, self._is_listing = self._asking, [], True
        late = FolderUnavailable(f"the folder of models is not listed after {LIST_SECONDS:g} s: its storage hangs")

        def give_up() -> None:
            logger.error("%s", late)
            self._refuse(late)

        limit = self._loop.call_later(LIST_SECONDS, give_up)

        def answer(listed: tuple[Files, Problems] | Exception) -> None:
            limit.cancel()
            listing, self._listing, self._is_listing = self._listing, [], False
            if self._refusal is late:
                self._refusal = None
            if self._asking:
                self._list()
            rows: list[dict[str, str]] | Exception
            try:
                if isinstance(listed, Exception):
                    raise listed
                rows = self._rows(*listed)
            except (ConfigError, OSError) as error:
                logger.error("cannot list the models of the folder: %s", error)
                rows = FolderUnavailable(f"the folder of models cannot be listed: {error}")
            except Exception as error:
                rows = error
            _answer(listing, rows)

        folder = self._fleet.generation.tables.source
        call_on_thread(self._loop, "torchpipe-list", lambda: list_models(folder), answer)

    def _rows(self, files: Files, wrong: Problems) -> list[dict[str, str]]:
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
            served: Folder = self._fleet.generation.tables
            if action == "unload":
                return self._without(served, name)
            listed = list_models(served.source)
            versions.extend(listed[0].get(name, ()))
            return served.having(name, listed)

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

    def _without(self, served: Folder, name: str) -> Folder:
        if not served.versions(name):
            raise ConfigError(f"no such model is served; {nearest(name[:80], served.names)}")
        rest = served.without(name)
        if not rest and not self._may_be_empty:
            raise ConfigError("the only model cannot be unloaded without --repository-control")
        rest.problems.update({f"{name}/{version}": UNLOADED for version in served.versions(name)})
        return rest


def _answer(asking: list[Done], outcome: list[dict[str, str]] | Exception) -> None:
    take_each(
        asking, lambda done: done(outcome), lambda _: logger.exception("internal error while a list was answered")
    )
