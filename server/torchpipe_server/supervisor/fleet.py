"""Starts, watches and replaces workers and engine processes, and swaps generations at a reload."""

from __future__ import annotations

import logging
from asyncio import TimerHandle
from collections import Counter
from collections.abc import Callable, Mapping
from enum import Enum, auto
from time import monotonic
from typing import Any, NamedTuple

from torchpipe_py import ConfigError, Overloaded, TorchpipeError
from torchpipe_py.serving import UNLOADED, Folder, describe, describe_ending, name_of
from torchpipe_server.front.loop import Loop, call_on_thread, every
from torchpipe_server.options import Options
from torchpipe_server.supervisor import messages
from torchpipe_server.supervisor.acceptor import EXHAUSTED
from torchpipe_server.supervisor.child import LOOK_SECONDS, Child
from torchpipe_server.supervisor.connections import Connections
from torchpipe_server.supervisor.forker import Forked, Forker, look_at_working_directory
from torchpipe_server.supervisor.generation import (
    RETRY_MS,
    START_ATTEMPTS,
    Change,
    Changes,
    Configuration,
    Generation,
    WorkerSlot,
)
from torchpipe_server.supervisor.model_change import ModelChange
from torchpipe_server.supervisor.monitoring import figures
from torchpipe_server.worker.worker import HUNG

logger = logging.getLogger("torchpipe_server")

FIRST_DELAY, LONGEST_DELAY = 0.25, 30.0  # seconds between attempts
EXHAUSTED_DELAY = 1.0  # after a lack of descriptors, memory or threads
SETTLED_SECONDS = 1.0  # a worker that was ready this long works
RECOVER_SECONDS = 1.0  # within which the successor of a dead worker is expected
REAP_SECONDS = 1.0  # after the end of a process, for the fork server to report its exit status
EXIT_STATUS_SECONDS = 0.2  # the same while the service ends


class Fleet:
    """``options.workers`` workers. ``load`` reads the configuration again, on another thread, or raises
    ``ConfigError``.

    Each slot of a generation is filled by one process after another. A reload builds the next generation beside the
    serving one and swaps them once all its workers are ready. Processes of neither are leaving. ``on_failure(problem)``
    is called if no worker can be started. ``clock`` is that of ``Child``, in seconds.
    """

    def __init__(
        self,
        loop: Loop,
        options: Options,
        connections: Connections,
        configuration: Configuration,
        load: Callable[[], Configuration],
        on_failure: Callable[[str], object],
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.generation = Generation(configuration, options)
        self._next_generation: Generation | None = None  # during a reload
        self._reading: Change | None = None  # whose files are being read, or wait for the reader
        self._read_limit: TimerHandle | None = None
        self._is_reader_busy = False  # perhaps with files that nobody wants any more
        self.ended_stats = figures.NOTHING  # statistics of workers that have ended
        self.restarts: Counter[str] = Counter()  # by ``Reason``, or "failed_start"
        self.has_begun = False  # every worker was ready or given up
        self.has_lost = False  # an accepted request, since the stop began
        self._loop, self._options, self._connections = loop, options, connections
        self.on_message: Callable[[Child, Any], object] = lambda *_: None  # for messages that are not about processes
        self._load, self._on_failure, self._clock = load, on_failure, clock
        self._forker = Forker(loop, options, connections.journal, self._wants, self._forked)
        self._leaving: set[Child] = set()
        self._is_ending = self._wants_reload = False
        self._may_differ = False  # workers may serve different models: a change was cut short
        self._is_repairing = False  # by a reload that replaces them
        self._changes = Changes()
        self._model_change: ModelChange | None = None
        self.reloads: Counter[str] = Counter({"ok": 0, "failed": 0})  # by outcome; loads and unloads as well
        self.is_last_reload_ok = True
        self._on_begun: Callable[[], object] = lambda: None
        every(loop, LOOK_SECONDS, self._look)

    @property
    def _slots(self) -> list[WorkerSlot]:
        """The slots of the serving and of the next generation."""
        following = self._next_generation  # read once: a reload may end meanwhile
        return [*dict.fromkeys([*self.generation.slots, *(following.slots if following else ())])]

    @property
    def ready(self) -> list[Child]:
        """Workers that take connections; if some respond, only those."""
        children = [worker.child for worker in self.generation.workers if worker.child is not None]
        ready = [child for child in children if child.is_ready]
        return [child for child in ready if child.responds] or ready

    @property
    def listens(self) -> bool:
        """Whether any worker listens at the port of gRPC."""
        return any(worker.child is not None and worker.child.listens for worker in self.generation.workers)

    @property
    def is_recovering(self) -> bool:
        """Whether a worker with connections died recently and its successor is not ready."""
        since = self._clock() - RECOVER_SECONDS
        return any(worker.died_at > since for worker in self.generation.workers)

    @property
    def is_responding(self) -> bool:
        """Whether some worker would answer requests now, with all engine processes ready."""
        has_engines = all(engine.is_ready for engine in self.generation.engines)
        return has_engines and any(child.responds for child in self.ready)

    @property
    def children(self) -> list[Child]:
        """All processes that run, or ended a moment ago."""
        return [*(slot.child for slot in self._slots if slot.child is not None), *self._leaving]

    # -- life ---------------------------------------------------------------------------------------------------

    def start(self, on_begun: Callable[[], object]) -> None:
        """Start all processes; ``on_begun`` is called once every worker is ready or given up."""
        self._on_begun = on_begun
        self._begin(self.generation)

    def drain(self) -> None:
        """Have every process answer accepted requests and end."""
        self._is_ending = True
        if self._model_change is not None:
            self._model_change.cancel("the service is stopping")
        self._stop_reading()
        self._changes.stop("the service is stopping")
        self._drain(self._leaving)
        self._drain_rest()

    def close(self) -> None:
        """Kill what is left, including processes being forked."""
        self._forker.close()
        for child in self.children:
            child.close()

    def _drain_rest(self) -> None:
        """Drain the serving processes once no leaving one passes connections or requests to them."""
        if not self._leaving:
            self._drain(self.children)

    def _drain(self, children: list[Child] | set[Child]) -> None:
        for child in children:
            if not child.clients:
                child.drain()

    def _begin(self, generation: Generation) -> None:
        """Start the engine processes and, once they are ready, the workers."""
        if all(engine.is_ready for engine in generation.engines):
            generation.has_started_workers = True
        for slot in generation.workers if generation.has_started_workers else generation.engines:
            self._forker.fork(slot)

    def _wants(self, slot: WorkerSlot) -> bool:
        """Whether the slot belongs to the serving or the next generation; for any thread."""
        return not self._is_ending and slot in self._slots

    def _forked(self, slot: WorkerSlot, forked: Forked | Exception) -> None:
        if isinstance(forked, Exception):
            self._not_forked(slot, forked)
        elif self._wants(slot):
            slot.child = Child(self._loop, slot.name, forked, self._receive, self._ended)
            self._link(slot)
        else:
            forked.kill()  # its reload was given up, or the service is stopping

    def _not_forked(self, slot: WorkerSlot, error: Exception) -> None:
        logger.error("cannot start %s: %s", slot.name, error or type(error).__name__)
        if self._is_of_next_generation(slot):
            self._give_up_reload(f"{slot.name} cannot be started")
        elif self._wants(slot):
            self._count_restart(slot, "failed_start")
            if isinstance(error, OSError) and error.errno in EXHAUSTED:
                self._loop.call_later(EXHAUSTED_DELAY, self._forker.fork, slot)  # not the worker's fault
            else:
                self._failed_start(slot)

    def _look(self) -> None:
        for child in self.children:
            child.look(self._options.hang_seconds, self._options.start_seconds)
        for slot in self._slots:
            # NOTE: at the second check, since its engine process may just have died.
            if slot.child is not None and slot.child.unlinked_looks >= 2 and not self._is_ending:
                self._link(slot)

    # -- events of processes ----------------------------------------------------------------------------------

    def _receive(self, child: Child, message: messages.Message) -> None:
        match message:
            case messages.Ready():
                self._became_ready(child)
            case messages.Listening():
                self._serve_if_complete()
            case messages.Gone():
                self._connections.gone(child, message.slot, message.is_closed)
            case messages.Prepared() | messages.Committed():
                if self._model_change is not None:
                    self._model_change.receive(child, message)
            case messages.Event() | messages.Snapshot() | messages.Control():
                self.on_message(child, message)

    def _slot_of(self, child: Child) -> WorkerSlot | None:
        return next((slot for slot in self._slots if slot.child is child), None)

    def _is_of_next_generation(self, slot: WorkerSlot) -> bool:
        """Whether the slot belongs to the next generation only."""
        following = self._next_generation
        return following is not None and slot in following.slots and slot not in self.generation.slots

    def _became_ready(self, child: Child) -> None:
        slot = self._slot_of(child)
        if self._is_ending:
            child.drain()
        elif slot is not None:
            slot.died_at = 0.0
            if child.tables is not slot.tables:
                child.kill("dismissed")  # a model was loaded or unloaded while it started
            elif slot.role == "engine process":
                self._engine_became_ready(slot)
            else:
                self._send_problems(child, slot.tables)
                if self._is_of_next_generation(slot) or not self.has_begun:
                    self._serve_if_complete()
                else:
                    logger.info("%s is back (pid %d)", child.name, child.pid)
                    self._have_listen([child])
                    self._connections.became_ready(child)

    def _have_listen(self, children: list[Child]) -> None:
        """Have them listen at the port of gRPC as well."""
        for child in children:
            if not child.must_listen and self._options.grpc_port >= 0:
                child.must_listen = True
                child.send("listen")

    def _engine_became_ready(self, engine: WorkerSlot) -> None:
        for generation in filter(None, (self.generation, self._next_generation)):
            if generation.has_started_workers:
                for worker in generation.workers:
                    if generation.engine_of(worker) is engine:
                        self._link(worker)
            elif all(other.is_ready for other in generation.engines):
                self._begin(generation)
        if self.has_begun and engine.restarts and engine.child is not None:
            logger.info("%s is back (pid %d)", engine.name, engine.child.pid)

    def _link(self, worker: WorkerSlot) -> None:
        """Link a worker to its engine process if both run."""
        generation = self.generation
        if self._next_generation is not None and self._is_of_next_generation(worker):
            generation = self._next_generation
        engine = generation.engine_of(worker) if worker.role == "worker" else None
        if engine is not None and engine.child is not None and engine.is_ready and worker.child is not None:
            worker.child.link(engine.child)

    def _serve_if_complete(self) -> None:
        """Serve with the first or the next generation once its workers are ready and listen.

        The first one also serves without workers that were given up.
        """
        generation = self._next_generation or self.generation
        ready = [worker.child for worker in generation.workers if worker.child is not None and worker.is_ready]
        is_complete = ready and all(worker.is_ready or worker.is_given_up for worker in generation.workers)
        if self._is_ending or not is_complete or (self._next_generation is None and self.has_begun):
            return
        if self._next_generation is not None and (problem := self._loss(ready)):
            self._give_up_reload(problem)
            return
        self._have_listen(ready)
        if not all(child.listens or not child.must_listen for child in ready):
            return
        if self._next_generation is not None:
            self._swap(ready[-1])
            return
        self.has_begun = True
        self.generation.log_engines(self._options)
        self._on_begun()
        if self._wants_reload:
            self._loop.call_soon(self.reload)

    def _ended(self, child: Child) -> None:
        if self._model_change is not None:
            self._model_change.lost(child)
        if child.stats:
            self.ended_stats = figures.add_past(self.ended_stats, child.stats)
        self._leaving.discard(child)
        for engine in self.children:
            if child in engine.clients:
                engine.clients.discard(child)
                if not engine.clients and (engine in self._leaving or self._is_ending):
                    engine.drain()
        slot = self._slot_of(child)
        if slot is not None:
            slot.child, slot.died_at = None, self._clock() if child.has_served else 0.0
        self._log_death(child, self._connections.died(child))
        self._loop.call_later(REAP_SECONDS, child.process.exit_status, 0.0)
        if self._is_ending:
            self._drain_rest()
        elif slot is not None:
            self._replace(slot, child)

    def _log_death(self, child: Child, lost: int) -> None:
        if child.answered or not child.ready_at or child.reason == "dismissed":
            return
        if self._is_ending:
            self.has_lost = self.has_lost or lost > 0 or bool(child.clients) or child.answered is False
        status = child.process.exit_status(EXIT_STATUS_SECONDS if self._is_ending else 0.0)
        how = f": {describe_ending(status)}" if status is not None else ""
        words = f"; its last lines: {' / '.join(last)}" if (last := child.stderr.lines.recent()) else ""
        what = "its workers answer its requests" if child.clients else f"requests lost: {lost}"
        # A process that exits so has already logged, as an error, which backend does not return.
        is_logged = self._is_ending and status == HUNG
        level = logging.WARNING if is_logged else logging.ERROR
        logger.log(level, "%s (pid %d) died%s; %s%s", child.name, child.pid, how, what, words)

    def _replace(self, slot: WorkerSlot, child: Child) -> None:
        """Start the successor of a process that ended, unless its reload or the service ends for that."""
        if child.ready_at:
            slot.failures = 0
        if self._is_of_next_generation(slot):
            self._give_up_reload(child.failure or f"{slot.name} of the new configuration died while it started")
            return
        if child.failure and not self.has_begun:
            self._on_failure(child.failure)  # another attempt would fail in the same way
            return
        if child.reason == "dismissed" and child.tables is not slot.tables:  # a model was loaded while it started
            self._forker.fork(slot)  # NOTE: its pauses stay: it has not proved that it works
            return
        # NOTE: engine processes are linked to workers before any request, so until then that proves nothing.
        is_settled = child.ready_at and self._clock() - child.ready_at >= SETTLED_SECONDS
        has_worked = bool(is_settled) or (child.has_served and self.has_begun)
        starts, counted, text = successor(child, has_worked)
        if text:
            logger.error("%s %s", slot.name, text)
        self._count_restart(slot, counted)
        if starts is Starts.AT_ONCE:
            slot.pauses = 0
            self._forker.fork(slot)
        elif starts is Starts.AFTER_PAUSE:
            self._pause(slot)
        else:
            self._failed_start(slot)

    def _count_restart(self, slot: WorkerSlot, reason: str) -> None:
        slot.restarts += 1
        self.restarts[reason] += 1

    def _pause(self, slot: WorkerSlot) -> None:
        """Start it again, after a longer pause each time."""
        slot.pauses += 1
        self._loop.call_later(min(LONGEST_DELAY, FIRST_DELAY * 2 ** (slot.pauses - 1)), self._forker.fork, slot)

    def _failed_start(self, slot: WorkerSlot) -> None:
        """Start it again, unless too many attempts in a row have failed."""
        slot.failures += 1
        if slot.failures < START_ATTEMPTS:
            self._pause(slot)
            return
        slot.is_given_up = True
        logger.critical("%s is given up after %d attempts to start it", slot.name, slot.failures)
        if self._next_generation is not None and slot in self._next_generation.engines:
            self._give_up_reload(f"{slot.name} cannot be started")  # its workers would wait for it forever
        else:
            self._end_if_hopeless()
        self._serve_if_complete()

    def _end_if_hopeless(self) -> None:
        """End the service if no worker can be started, unless a reload that may mend it is in progress."""
        may_mend = self._next_generation is not None or self._reading is not None
        if not may_mend and (problem := self.generation.hopeless()):
            self._on_failure(problem)

    # -- reload -------------------------------------------------------------------------------------------------

    def reload(self) -> None:
        """Replace all workers by those of the current configuration; a reload in progress starts over."""
        self._wants_reload = not self.has_begun
        if self._wants_reload or self._is_ending:
            return
        if self._model_change is not None:
            self._model_change.cancel("interrupted by a reload")
        if self._next_generation is not None or self._reading is not None:
            assert self._changes.current is not None
            model = self._changes.current.model
            what = f"the change of model {model!r} is given up" if model else "the reload in progress starts over"
            logger.info("SIGHUP: %s", what)
            self._stop_reading()
            self._dismiss_successors()
            self._may_differ = self._may_differ or self._is_repairing  # in case this reload fails
            self._reload_ended("interrupted by a reload")
        self._begin_reload(Change(self._load, lambda problem: None, ""))  # it is logged

    def change(self, load: Callable[[], Any], done: Callable[[str], object], model: str = "") -> None:
        """Serve the tables that ``load`` returns, after a reload in progress; then call ``done`` with "" or why not.

        ``load`` is called on another thread. If they are a folder in which only ``model`` differs, the workers stay and
        change that. Raises ``Overloaded`` if it cannot be queued now.
        """
        if self._is_ending or not self.has_begun:
            raise Overloaded("the service is starting or stopping", RETRY_MS)
        self._changes.add(Change(lambda: self._with_streams(load()), done, model))
        self._begin_change()

    def _with_streams(self, tables: Any) -> Configuration:
        """The tables with the streams as they are."""
        return Configuration.of(tables, self.generation.streams, self._options)

    def _begin_change(self) -> None:
        if self._next_generation is not None or self._model_change is not None or self._reading is not None:
            return
        if self._is_ending:
            return
        self._end_if_hopeless()  # a worker may have been given up during the change before
        if self._may_differ:
            self._may_differ = False  # NOTE: even if the reload fails: the next one might, too, without an end
            self._is_repairing = True
            self._begin_reload(Change(lambda: self._with_streams(self.generation.tables), lambda problem: None, ""))
        elif (change := self._changes.next()) is not None:
            self._begin_reload(change)

    def _reload_ended(self, problem: str) -> None:
        if not self._is_repairing:  # nobody has asked for a repair, and the load before it has failed
            self.reloads["failed" if problem else "ok"] += 1
            self.is_last_reload_ok = not problem
        self._is_repairing = False
        self._changes.report(problem)
        self._loop.call_soon(self._begin_change)

    def _begin_reload(self, change: Change) -> None:
        self._changes.current = change
        if not change.model:
            logger.info("reloading %s", self._options.config)
        self._reading = change
        if seconds := self._options.start_seconds:
            problem = f"its files are not read after {seconds:g} s (--start-seconds)"
            self._read_limit = self._loop.call_later(seconds, self._was_read, change, ConfigError(problem))
        if self._is_reader_busy:
            logger.warning("files of an earlier reload or load are still being read; these are read after them")
        else:
            self._read(change)

    def _read(self, change: Change) -> None:
        """Read the files of a change on another thread: one at a time, since storage may keep each for long."""
        self._is_reader_busy = True

        def read() -> Configuration:
            look_at_working_directory()
            return change.load()

        def done(outcome: Configuration | Exception) -> None:
            self._is_reader_busy = False
            self._was_read(change, outcome)
            if self._reading is not None and not self._is_reader_busy:
                self._read(self._reading)  # it came meanwhile

        call_on_thread(self._loop, "torchpipe-reload", read, done)

    def _was_read(self, change: Change, outcome: Configuration | Exception) -> None:
        if self._reading is change:  # else it was interrupted, or is too late
            self._stop_reading()
            self._apply(change, outcome)

    def _stop_reading(self) -> None:
        """Want no files any more. NOTE: the timer would keep the change for an hour."""
        self._reading = None
        if self._read_limit is not None:
            self._read_limit.cancel()
            self._read_limit = None

    def _apply(self, change: Change, read: Configuration | Exception) -> None:
        """Begin to change the workers, or to start their successors, by the configuration that was read."""
        try:
            if isinstance(read, Exception):
                raise read
            if isinstance(read.tables, Folder):
                self._refuse_losses(read.tables)
            if change.model and self.generation.changes_alone(read.tables, change.model, self._options):
                self._begin_model_change(read.tables, change.model)
                return
            self._next_generation = Generation(read, self._options, self.generation)
            self._begin(self._next_generation)
        except (TorchpipeError, OSError) as error:
            self._give_up_reload(str(error))
        except Exception as error:  # the caller waits for an outcome, and so does the next change
            logger.exception("internal error while a reload began")
            self._give_up_reload(describe(error))

    def _refuse_losses(self, folder: Folder) -> None:
        """Raise ``ConfigError`` if a mistake would take away a model that is served."""
        for key, problem in folder.problems.items():
            if key in self.generation.tables and problem != UNLOADED:
                raise ConfigError(problem)

    def _loss(self, ready: list[Child]) -> str:
        """Why a model that is served cannot be set up by the ``ready`` workers of the next generation, if so."""
        problems = {key: problem for child in ready for key, problem in child.problems.items()}
        served = (
            set(self.generation.tables if isinstance(self.generation.tables, Folder) else ()) - self.problems.keys()
        )
        return next((problem for key, problem in problems.items() if key in served), "")

    @property
    def problems(self) -> dict[str, str]:
        """Why workers do not serve models of the folder, by ``NAME/VERSION``."""
        return {key: problem for child in self.ready for key, problem in child.problems.items()}

    def add_problems(self, problems: Mapping[str, str]) -> None:
        """Have workers, also those that start later, report why models are not served, by ``NAME/VERSION``."""
        folder = self.generation.tables
        # NOTE: in a new dict: the thread that forks may be pickling this one.
        folder.problems = {**folder.problems, **problems}
        for worker in self.generation.workers:
            if worker.child is not None and worker.is_ready:
                self._send_problems(worker.child, folder)

    def _send_problems(self, child: Child, tables: Any) -> None:
        """Send all to a worker that is ready: it may have been forked before the last ones."""
        if isinstance(tables, Folder) and tables.problems:
            child.send("problems", problems=tables.problems)

    def _begin_model_change(self, folder: Folder, name: str) -> None:
        children = [worker.child for worker in self.generation.workers if worker.child is not None and worker.is_ready]

        def end(problem: str, may_differ: bool) -> None:
            self._model_change = None
            if problem:
                logger.error("model %r stays as it is: %s", name, problem)
            else:
                self._serve_folder(folder, name)
            if may_differ and not self._is_ending:
                logger.error("workers may serve different versions of model %r: all are replaced", name)
                self._may_differ = True
            self._reload_ended(problem)

        if children:
            seconds = self._options.start_seconds
            self._model_change = ModelChange(self._loop, folder, name, children, end, seconds)
        else:
            end("no worker is ready yet; one is starting", False)

    def _serve_folder(self, folder: Folder, name: str) -> None:
        """Have workers that start from now on serve ``folder``, which differs by model ``name``."""
        self.generation.tables = folder
        for slot in self.generation.workers:
            slot.tables = folder
            if slot.child is not None and slot.child.is_ready:
                slot.child.tables = folder
                problems = slot.child.problems
                slot.child.problems = {key: text for key, text in problems.items() if name_of(key) != name}

    def _swap(self, last: Child) -> None:
        """Let the next generation serve; the one before passes on its connections and ends."""
        assert self._next_generation is not None
        before, self.generation, self._next_generation = self.generation, self._next_generation, None
        self._may_differ = False
        for old, new in zip(before.workers, self.generation.workers, strict=True):
            new.restarts = old.restarts
        for child in self._leave(before.slots):
            if not child.is_ready:
                child.kill("dismissed")
            elif not child.clients:
                child.release()
        logger.info("reloaded %s", self._options.config)
        self.generation.log_engines(self._options, before)
        self._connections.became_ready(last)
        self._reload_ended("")

    def _give_up_reload(self, problem: str) -> None:
        logger.error("not reloaded, keeping the old configuration: %s", problem)
        self._dismiss_successors()
        self._reload_ended(problem)

    def _dismiss_successors(self) -> None:
        dismissed, self._next_generation = self._next_generation, None
        for child in self._leave(dismissed.slots if dismissed else []):
            child.kill("dismissed")

    def _leave(self, slots: list[WorkerSlot]) -> list[Child]:
        """Mark the processes of a generation that no longer serves as leaving, except engines that stay."""
        children = [slot.child for slot in slots if slot.child is not None and slot not in self.generation.engines]
        self._leaving.update(children)
        return children


class Starts(Enum):
    """When the successor of a process starts."""

    AT_ONCE = auto()
    AFTER_PAUSE = auto()  # a longer one each time
    AS_RETRY = auto()  # after a pause as well, unless it was the last attempt


class Successor(NamedTuple):
    """How a process that ended is replaced."""

    starts: Starts
    counted: str  # the reason under which it counts as a restart
    log: str = ""  # after the name of the slot


def successor(child: Child, has_worked: bool) -> Successor:
    """How ``child`` is replaced, which ended by its ``reason``. ``has_worked``: it can start and serve."""
    assert child.reason is not None
    if child.failure and child.ready_at:  # it cannot listen
        return Successor(Starts.AFTER_PAUSE, "failed_start", f"ended: {child.failure}")
    if has_worked:  # requests that kill workers must not delay others
        return Successor(Starts.AT_ONCE, child.reason)
    if child.ready_at:  # it did start, so this is not a failed attempt; several of those end the service
        return Successor(Starts.AFTER_PAUSE, child.reason, "ended as soon as it was ready")
    counted = "failed_start" if child.reason == "died" else child.reason
    return Successor(Starts.AS_RETRY, counted, f"ended while it started: {child.failure or 'killed, or crashed'}")
