"""The models of a folder in a worker: set up at the start, loaded and unloaded one at a time."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from time import monotonic
from typing import TYPE_CHECKING, Any

from torchpipe_py import ConfigError, TorchpipeError
from torchpipe_py.serving import (
    SINCE_START,
    Folder,
    Pipes,
    add,
    call_from_any_thread,
    check_count,
    describe,
    engine_part,
    live_svg,
    metrics,
    name_of,
    pipe_of_worker,
    release_freed_memory,
    sections,
)
from torchpipe_server.front.loop import Loop
from torchpipe_server.options import Options
from torchpipe_server.worker.service import make_plan

if TYPE_CHECKING:
    from torchpipe_py import pipe
    from torchpipe_py.serving import EngineClient, Pipeline

logger = logging.getLogger("torchpipe_server")


class FolderModels:
    """``pipes`` has a pipe for each file that can be served; ``problems`` says why others are not, by ``NAME/VERSION``.

    ``engine`` runs their shared nodes, if any. A change is prepared on a thread of its own while the others serve, and
    takes effect by ``commit``. One change at a time. All methods are for the loop's thread.
    """

    def __init__(self, loop: Loop, options: Options, folder: Folder, engine: EngineClient | None) -> None:
        self.pipes = Pipes(options.max_inflight)
        self.problems: dict[str, str] = {}
        self._loop, self._options, self._engine = loop, options, engine
        self._folder = folder
        self._prepared: tuple[Folder, str, dict[str, pipe]] | None = None
        self._past: dict[str, Any] = {"nodes": {}, "metrics": {}}  # totals of removed pipes
        self._preparing: object = None  # the change that is being prepared, or was last
        self._retiring: list[tuple[pipe, float]] = []  # with the time when they are closed at the latest
        for key in folder:
            try:
                self.pipes.replace((), {key: self._set_up(folder, key)})
            except Exception as error:
                self.problems[key] = _text(error)
        self._check_start()
        self.add_problems({})

    def add_problems(self, problems: Mapping[str, str]) -> None:
        """Take from the supervisor why models could not be loaded that were not served before."""
        self._folder.problems.update(problems)
        self.pipes.replace((), {}, {**self._folder.problems, **self.problems})

    def _check_start(self) -> None:
        """Raise ``ConfigError`` if nothing can be served, or not all with ``--exit-on-error``; log what is not."""
        if self.problems and (self._options.exit_on_error or not (self.pipes.keys or self._options.repository_control)):
            raise ConfigError("\n".join(self.problems.values()))
        for key, problem in self.problems.items():
            logger.error("model %s is not served: %s", key, problem)

    def plan(self) -> Pipeline | None:
        """The plan of all models that are served; ``None`` without any."""
        return self._plan_of(self._folder)

    def _plan_of(self, folder: Folder, but: str = "") -> Pipeline | None:
        """The plan of what has no problem; those of the model ``but`` are of the past."""
        keys = [key for key in folder if key not in self.problems or name_of(key) == but]
        served = Folder({key: folder[key] for key in keys}, folder.source)
        return make_plan(self._options, served, self._options.workers) if served else None

    def _set_up(self, folder: Folder, key: str) -> pipe:
        from torchpipe_py import pipe

        plan = make_plan(self._options, folder.only(key), self._options.workers)
        heads = [section.head for section in sections(plan)] if self._engine is not None else []
        if self._engine is None or not heads:
            run = pipe(plan)
        elif missing := [head for head in heads if head not in self._engine.sections]:
            raise ConfigError(f"{folder[key].source}: the engine process cannot run {missing[0]!r}: see the log")
        else:
            run = pipe_of_worker(plan, self._engine)
        try:
            check_count(run)
        except ConfigError:
            run.close()
            raise
        return run

    def with_past(self, stats: Mapping[str, Any]) -> dict[str, Any]:
        """The statistics of the pipes, with the totals of removed ones: of nodes of the same names, and of metrics."""
        past = self._past
        for run, _ in self._retiring:
            past = _added(past, run)
        nodes = {name: {**node, **add(_of(node), past["nodes"].get(name, {}))} for name, node in stats["nodes"].items()}
        return {**stats, "nodes": nodes, "metrics": metrics.summed([past["metrics"], stats["metrics"]])}

    # -- changes ------------------------------------------------------------------------------------------------

    def prepare(self, folder: Folder, name: str, done: Callable[[str, str], object]) -> None:
        """Set up model ``name`` as it is in ``folder``, on a thread; then call ``done(problem, graph)`` on the loop.

        ``graph`` is that of all models, as SVG. Without the model in ``folder``, ``commit`` removes it.
        """
        # NOTE: what was given up may still be loading when the next change begins, and end after it.
        self._preparing = this = object()

        def run() -> None:
            added: dict[str, pipe] = {}
            problem = graph = ""
            try:
                for version in folder.versions(name):
                    added[f"{name}/{version}"] = self._set_up(folder, f"{name}/{version}")
                graph = draw(self._plan_of(folder, but=name))
            except Exception as error:
                problem = _text(error)
            call_from_any_thread(self._loop, settle, added, problem, graph)

        def settle(added: dict[str, pipe], problem: str, graph: str) -> None:
            try:
                self.pipes.check(self._keys_of(name), added)  # before any worker serves it
            except ConfigError as error:
                problem = problem or str(error)
            if problem or self._preparing is not this:
                _close_aside(added.values())
            else:
                self._prepared = folder, name, added
            done(problem, graph)

        threading.Thread(target=run, name="torchpipe-load", daemon=True).start()

    def commit(self) -> str:
        """Serve what was prepared; returns why not, empty if it does."""
        prepared, self._prepared = self._prepared, None
        if prepared is None:
            return "nothing is prepared"
        folder, name, added = prepared
        problems = {key: problem for key, problem in self.problems.items() if name_of(key) != name}
        try:
            removed = self.pipes.replace(self._keys_of(name), added, {**folder.problems, **problems})
        except BaseException:
            _close_aside(added.values())
            raise
        self._folder, self.problems = folder, problems
        until = monotonic() + self._options.drain_seconds
        self._retiring += [(run, until) for run in removed]
        return ""

    def _keys_of(self, name: str) -> list[str]:
        return [key for key in self.pipes.keys if name_of(key) == name]

    def abort(self) -> None:
        """Drop what was prepared, or will be."""
        self._preparing = None
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            _close_aside(prepared[2].values())

    def retire(self) -> None:
        """Close removed pipes that have answered their requests; to be called a few times a second."""
        now = monotonic()
        ended = [run for run, until in self._retiring if now >= until or not run.stats()["inflight"]]
        if not ended:
            return
        self._retiring = [each for each in self._retiring if each[0] not in ended]
        for run in ended:
            self._past = _added(self._past, run)
        _close_aside(ended)


def servable(options: Options, folder: Folder, processes: int, is_set_up: bool) -> Folder:
    """The files of a folder whose shared nodes an engine process can run; logs the others.

    Unless ``is_set_up``, they are planned only.
    """
    from torchpipe_py import pipe

    served = Folder(source=folder.source)
    for key in folder:
        try:
            plan = make_plan(options, folder.only(key), processes)
            if sections(plan):
                if is_set_up:
                    pipe(engine_part(plan)).close()
                served[key] = folder[key]
        except Exception as error:
            logger.error("the engine process does not run model %s: %s", key, _text(error))
    return served


def draw(plan: Pipeline | None) -> str:
    """The graph as SVG; empty without a plan, or if it cannot be drawn."""
    try:
        return "" if plan is None else live_svg(plan)
    except Exception:
        logger.exception("cannot draw the graph")
        return ""


def _added(past: Mapping[str, Any], run: pipe) -> dict[str, Any]:
    """The totals of a removed pipe's nodes and metrics, added to those of earlier ones."""
    stats = run.stats()
    nodes = add(past["nodes"], {name: _of(node) for name, node in stats["nodes"].items()})
    return {"nodes": nodes, "metrics": metrics.summed([past["metrics"], metrics.totals(stats["metrics"])])}


def _of(node: Mapping[str, Any]) -> dict[str, Any]:
    return {key: node[key] for key in SINCE_START}


def _close_aside(pipes: Iterable[pipe]) -> None:
    """Close the pipes on a thread of their own, and return their memory to the system."""
    left = list(pipes)

    def close() -> None:
        while left:
            left.pop().close()  # NOTE: no variable may keep the last one
        gc.collect()
        release_freed_memory()

    try:
        threading.Thread(target=close, name="torchpipe-unload", daemon=True).start()
    except RuntimeError:  # the system has no thread left; closing a pipe frees some
        close()


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, TorchpipeError) else describe(error)
