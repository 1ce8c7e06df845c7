"""Loads and unloads the models of a folder while the service runs.

Both are reloads: new workers with the new set of models take over, and the old ones end, which frees all their memory.
If the new ones cannot start, the old ones stay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic
from typing import Any

from torchpipe_py import ConfigError, Overloaded
from torchpipe_py.serving import Folder, answers, describe_error, find_models, nearest
from torchpipe_server.supervisor.fleet import Fleet

logger = logging.getLogger("torchpipe_server")


class Repository:
    """The folder that ``fleet`` serves."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._problems: dict[str, str] = {}  # why the last attempt to load a model failed

    def index(self) -> list[dict[str, str]]:
        """Each version that is served or in the folder, with ``state`` and ``reason``."""
        served: Folder = self._fleet.generation.tables
        files = self._files()
        keys = dict.fromkeys([*served, *(f"{name}/{version}" for name, each in files.items() for version in each)])
        rows = []
        for key in sorted(keys):
            name, _, version = key.partition("/")
            state, reason = ("READY", "") if key in served else ("UNAVAILABLE", self._problems.get(name, "unloaded"))
            rows.append({"name": name, "version": version, "state": state, "reason": reason})
        return rows

    def control(self, action: str, name: str, done: Callable[[int, dict[str, Any]], object]) -> None:
        """``load`` or ``unload`` the model; ``done`` is called with the status and body of the outcome."""
        began = monotonic()

        def finish(problem: str) -> None:
            served: Folder = self._fleet.generation.tables
            if problem:
                if action == "load" and name in self._files() and not served.versions(name):
                    self._problems[name] = describe_error(ConfigError(problem))  # without folders: clients read it
                done(400, {"error": f"failed to {action} {name[:80]!r}: {problem}", "code": "config"})
                return
            self._problems.pop(name, None)
            seconds = round(monotonic() - began, 3)
            logger.info("%sed model %r in %.1f s", action, name, seconds)
            done(200, {"name": name, "versions": served.versions(name), "seconds": seconds})

        try:
            self._fleet.change(lambda: self._changed(action, name), finish)
        except Overloaded as error:
            failed = answers.failure(error)
            done(failed.status, failed.body)

    def _files(self) -> dict[str, dict[str, str]]:
        """The files of the folder, by model and version."""
        try:
            return find_models(self._fleet.generation.tables.source)
        except ConfigError as error:
            logger.error("cannot list the models of the folder: %s", error)
            return {}

    def _changed(self, action: str, name: str) -> Folder:
        served: Folder = self._fleet.generation.tables
        if action == "load":
            return served.having(name)
        if not served.versions(name):
            raise ConfigError(f"no such model is served; {nearest(name[:80], served.names)}")
        rest = served.without(name)
        if not rest:
            raise ConfigError("the only model cannot be unloaded; stop the service instead")
        return rest
