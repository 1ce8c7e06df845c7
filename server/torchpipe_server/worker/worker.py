"""Workers and engine processes.

A worker has one pipe, one I/O thread, and connections from the supervisor. An engine process runs the shared nodes for
the workers that the supervisor links to it.
"""

from __future__ import annotations

import base64
import ctypes
import errno
import gc
import json
import logging
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NoReturn

from torchpipe_py import SetupError, TorchpipeError
from torchpipe_py.serving import (
    CertifiedTables,
    EngineClient,
    EngineServer,
    Folder,
    describe,
    import_all,
    keep_freed_memory,
    limit_threads,
    pipe_of_worker,
    shared_nodes,
    timed,
    watch_on,
)
from torchpipe_server.front.counters import RequestCounters, log_request
from torchpipe_server.front.journal import Journal
from torchpipe_server.front.loop import Loop, every, new_loop
from torchpipe_server.front.server import Server
from torchpipe_server.front.services import services_of
from torchpipe_server.logs import dropped_lines, set_up_logging
from torchpipe_server.logs.stderr import take_over_stderr
from torchpipe_server.options import Options
from torchpipe_server.worker.channel import Channel
from torchpipe_server.worker.heartbeat import Heartbeat, HeartbeatThread
from torchpipe_server.worker.models import FolderModels, draw, servable
from torchpipe_server.worker.service import engine_processes, has_engine, make_plan, served_maker

if TYPE_CHECKING:
    from torchpipe_py import pipe
    from torchpipe_py.serving import Pipeline, Served
    from torchpipe_server.front.rpc import RpcServer
    from torchpipe_server.worker.streams import WorkerStreams

logger = logging.getLogger("torchpipe_server")

PR_SET_PDEATHSIG = 1
HUNG = 3  # exit status of a process with a backend that does not return
# For the supervisor to read the last messages, and for backends to return at the end.
CLOSE_SECONDS = 2.0
END_SECONDS = 0.25  # between two checks whether the process is to end
_WITH_DESCRIPTOR = ("connection", "link")  # messages
ORPHANED = {"models": [], "error": "the supervisor is gone", "code": "unavailable"}  # the answer to any control
_NOTHING = {"global": {}, "none": {"backend": "Identity"}}  # no shared node
NO_DESCRIPTOR = "cannot link to the engine process: no descriptor is left"


Handlers = dict[str, Callable[..., object]]
Figures = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Start:
    """The arguments of a worker or engine process.

    ``tables`` is the configuration, ``sock`` its end of the channel, ``stderr`` a pipe for the output of libraries.
    """

    index: int
    options: Options
    tables: Any
    sock: socket.socket
    stderr: Connection
    journal: Journal
    heartbeat: Heartbeat


def run_process(start: Start, make: Callable[[Start], Worker | EngineProcess]) -> None:
    """The main function of a worker or engine process, which ``make`` creates.

    It ends when the supervisor asks for it. If the supervisor is gone, a worker ends too, and an engine process with
    its last worker.
    """
    # Terminals and service managers signal all processes at once; only the supervisor acts on it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    set_up_logging(start.options)
    take_over_stderr(start.stderr.fileno())
    start.stderr.close()
    try:
        device = start.options.device_of(start.index)
        if device:
            os.environ["CUDA_VISIBLE_DEVICES"] = device
        die_with_parent(True)
        try:
            made = make_certified(start, make)
        except Exception as error:
            _send_failed(start.sock, error)
            return
        die_with_parent(False)  # from here on it notices by itself and answers accepted requests
        gc.freeze()  # loaded models stay: the collector need not traverse them
        made.serve()
    except Exception:
        logger.exception("internal error; the process ends")
        raise
    finally:
        logging.shutdown()  # the process ends without Python's exit handlers


def make_certified(start: Start, make: Callable[[Start], Worker | EngineProcess]) -> Worker | EngineProcess:
    """``make(start)``; with a certificate, ``ConfigError`` if it loads or chooses something else than is certified."""
    tables = start.tables
    if not isinstance(tables, CertifiedTables):
        return make(start)
    shared = set(shared_nodes(tables)) if has_engine(start.options, tables) else set()

    def runs(node: str) -> bool:
        return node in shared if make is EngineProcess else node not in shared

    with tables.loading(runs):
        made = make(start)
    tables.check_choices(made.setup_choices(), runs)
    return made


def end_process(run: pipe, is_closed: bool, status: int) -> NoReturn:
    """End this process with ``status``, or with ``HUNG`` if a backend still runs a batch, which is already logged.

    It does not wait for backends to close: on a GPU that takes seconds, and they end with the process anyway.
    """
    if is_closed:
        sys.exit(status)
    is_hung = any(node["oldest_batch_s"] for node in run.stats()["nodes"].values())
    logging.shutdown()
    os._exit(HUNG if is_hung else status)


class SupervisorClient:
    """The connection of a worker or engine process to the supervisor.

    ``handlers`` take the fields of messages, by type; ``figures`` returns what the supervisor gets, ``stats`` the
    pipe's statistics. ``on_orphaned`` is called when the supervisor is gone.
    """

    def __init__(
        self, start: Start, loop: Loop, handlers: Handlers, figures: Figures, stats: Figures,
        on_orphaned: Callable[[], object],
    ) -> None:  # fmt: skip
        self._loop, self._handlers, self._figures = loop, handlers, figures
        self.channel = Channel(loop, start.sock, self._take, on_orphaned)
        self._heart = HeartbeatThread(start.heartbeat, loop, stats)
        self.send = self.channel.send

    def serve(self, graph: str, problems: Mapping[str, str] = {}) -> None:
        """Report that it is ready, and run the loop until it is stopped.

        ``problems`` says why models of a folder are not served, by ``NAME/VERSION``.
        """
        self._heart.start()
        self.send({"type": "ready", "graph": graph, "problems": dict(problems)})
        self._loop.run_forever()

    def send_end(self, answered: bool) -> None:
        """Send the last message: whether every accepted request was answered."""
        self.send({"type": "end", "answered": answered, "stats": self._all_figures()})
        self.channel.finish(CLOSE_SECONDS)

    def _take(self, line: bytes, descriptor: int) -> None:
        message = json.loads(line)
        type_ = message.pop("type")
        if type_ == "stats":
            self.send({"type": "stats", "stats": self._all_figures()})
        elif type_ in _WITH_DESCRIPTOR:
            self._handlers[type_](descriptor, **message)
        else:
            self._handlers[type_](**message)

    def _all_figures(self) -> dict[str, Any]:
        return {
            "hand_over": {},
            "streams": {},
            "models": {},
            **self._figures(),
            "log_lines_dropped": dropped_lines(),
            "gpus": used_gpus(),
        }


class Worker:
    """Serves connections from the supervisor, and reports when they end."""

    def __init__(self, start: Start) -> None:
        options = start.options
        self._loop, self._journal = new_loop(), start.journal
        self._controls: dict[int, Callable[[int, dict[str, Any]], object]] = {}  # requests that wait for their outcome
        # Import custom code, the handler first, before threads are limited: it may have set their number.
        control = self._control if isinstance(start.tables, Folder) else None
        make_served = served_maker(options, control, self._ask_totals)
        set_up_process(options)
        # Wait for the engine process, which says what it runs: the pipe is made without that. Its link comes over the
        # channel's socket, which the loop reads from ``SupervisorClient`` on.
        self._engine = self._link_engine(start)
        self._models, self._run, self._plan = self._load(start)
        self._provider: Any = None  # where trace spans go
        self._served = self._observed(make_served(self._run), options)
        # Serve clients; gRPC shares the counters of the server, and takes no calls before ``_listen``.
        services = services_of(self._served, options)
        self._server = Server(self._loop, services, options, self._gone, self._served.names_with_pipe())
        self._rpc = self._make_rpc(options)
        every(self._loop, END_SECONDS, self._end_if_finished)
        # Take messages of the supervisor, now that there is what they are for; streams send theirs on its channel.
        handlers = self._handlers()
        self._supervisor = SupervisorClient(start, self._loop, handlers, self._figures, self._run.stats, self._orphaned)
        self._streams: WorkerStreams | None = None
        if options.streams:
            from torchpipe_server.worker.streams import WorkerStreams

            self._streams = streams = WorkerStreams(self._run, self._loop, self._supervisor.channel)
            handlers.update(streams=streams.set, watch=streams.watch, snapshot=streams.snapshot)

    def _link_engine(self, start: Start) -> EngineClient | None:
        """Link this worker to its engine process, if there is one."""
        if not has_engine(start.options, start.tables):
            return None
        engine = EngineClient(partial(watch_on, self._loop), start.heartbeat.set_linked)
        wait_for_engine(engine, start)
        return engine

    def _load(self, start: Start) -> tuple[FolderModels | None, Any, Pipeline | None]:
        """The models of a folder, a pipe or ``Pipes``, and its plan, which an empty folder lacks."""
        from torchpipe_py import pipe

        options = start.options
        if isinstance(start.tables, Folder):
            models = FolderModels(self._loop, options, start.tables, self._engine)
            return models, models.pipes, models.plan()
        plan = make_plan(options, start.tables, options.workers)
        return None, pipe(plan) if self._engine is None else pipe_of_worker(plan, self._engine), plan

    def _observed(self, served: Served, options: Options) -> Served:
        """The methods with times and, with a trace ratio, spans, which contain the times."""
        served = timed(served, self._run, options.server_timing == "all", options.slow_seconds, log_request)
        if options.trace_ratio < 0:
            return served
        from torchpipe_py.methods.tracing import traced
        from torchpipe_server import tracing

        self._provider = tracing.set_up()
        self._run.instrument(self._provider, starts_traces=False)
        return traced(served, self._provider, options.trace_ratio, "torchpipe_server")

    def _make_rpc(self, options: Options) -> RpcServer | None:
        if options.grpc_port < 0:
            return None
        # NOTE: import it after the fork, which its threads would not survive.
        from torchpipe_server.front.rpc import RpcServer

        server = self._server
        return RpcServer(self._loop, self._served.rpcs, options, server.counters, server.pacing, server.inflating)

    def _handlers(self) -> Handlers:
        """What takes the messages of the supervisor, by type."""
        return {
            "connection": self._adopt,
            "link": self._adopt_link,
            "outcome": lambda id, status, body: self._controls.pop(id)(status, body),
            "prepare": self._prepare,
            "commit": self._commit,
            "abort": self._abort,
            "problems": self._add_problems,
            "hand_over": self._server.hand_over,
            "listen": self._listen,
            "release": partial(self._end, self._server.release),
            "drain": partial(self._end, self._server.drain),
        }

    def setup_choices(self) -> dict[str, list[str]]:
        """See ``pipe.setup_choices``."""
        choices: dict[str, list[str]] = self._run.setup_choices()
        return choices

    def serve(self) -> NoReturn:
        """Serve until the supervisor ends this process."""
        self._supervisor.serve(draw(self._plan), self._models.problems if self._models is not None else {})
        answered = self._server.close()
        if self._rpc is not None:
            answered = self._rpc.close() and answered
        self._supervisor.send_end(answered)
        is_closed = self._run.close(CLOSE_SECONDS)
        if self._provider is not None:
            from torchpipe_server import tracing

            if not tracing.shut_down(self._provider, CLOSE_SECONDS):
                logger.warning("spans are lost: the exporter was not done within %g s", CLOSE_SECONDS)
        end_process(self._run, is_closed, 0 if answered else 1)

    def _end(self, how: Callable[[], object]) -> None:
        if self._streams is not None:
            self._streams.close()
        how()
        if self._rpc is not None:
            self._rpc.drain()

    def _adopt(self, descriptor: int, slot: int, is_refused: bool) -> None:
        if descriptor < 0:
            logger.error("no descriptor is left for a connection")
            self._gone(slot, True)
            return
        self._server.adopt(socket.socket(fileno=descriptor), slot, self._journal.entry(slot), is_refused)

    def _adopt_link(self, descriptor: int) -> None:
        if descriptor < 0 or self._engine is None:
            logger.error(NO_DESCRIPTOR)
        else:
            self._engine.attach(socket.socket(fileno=descriptor))

    def _control(self, action: str, name: str, done: Callable[[int, dict[str, Any]], object]) -> None:
        """Have the supervisor load or unload a model, or list all; for the loop's thread."""
        if self._supervisor.channel.is_closed:
            done(503, ORPHANED)
            return
        number = max(self._controls, default=0) + 1
        self._controls[number] = done
        self._supervisor.send({"type": "control", "id": number, "action": action, "name": name[:200]})

    def _ask_totals(self, done: Callable[[Mapping[str, Any]], object]) -> None:
        """Ask the supervisor for the statistics of all workers; nothing if it is gone."""
        self._control("statistics", "", lambda status, body: done(body if status == 200 else {}))

    def _prepare(self, change: int, name: str, folder: str) -> None:
        """Set up a model of the folder, which is pickled, in base 64; ``change`` is the number of the answer."""
        assert self._models is not None

        def done(problem: str, graph: str) -> None:
            self._supervisor.send({"type": "prepared", "change": change, "problem": problem, "graph": graph})

        try:
            self._models.prepare(pickle.loads(base64.b64decode(folder)), name, done)
        except Exception as error:  # no thread can be started, say; the supervisor waits for an answer
            logger.exception("cannot begin to set up model %r", name)
            done(describe(error), "")

    def _commit(self, change: int) -> None:
        assert self._models is not None
        try:
            problem = self._models.commit()
        except Exception as error:
            logger.exception("cannot serve the model that is set up")
            problem = describe(error)
        self._supervisor.send({"type": "committed", "change": change, "problem": problem})

    def _abort(self) -> None:
        assert self._models is not None
        self._models.abort()

    def _add_problems(self, problems: Mapping[str, str]) -> None:
        assert self._models is not None
        self._models.add_problems(problems)

    def _gone(self, slot: int, is_closed: bool) -> None:
        self._supervisor.send({"type": "gone", "slot": slot, "is_closed": is_closed})
        self._end_if_finished()

    def _orphaned(self) -> None:
        logger.error("the supervisor is gone: answering accepted requests, then ending")
        for done in self._controls.values():
            done(503, ORPHANED)
        self._end(self._server.drain)

    def _listen(self) -> None:
        if self._rpc is not None:
            self._rpc.listen(lambda: self._supervisor.send({"type": "listening"}), self._cannot_listen)

    def _cannot_listen(self, problem: str) -> None:
        self._supervisor.send({"type": "failed", "message": problem})
        self._end(self._server.release)

    def _end_if_finished(self) -> None:
        if self._models is not None:
            self._models.retire()
        if self._server.is_finished and (self._rpc is None or self._rpc.is_finished):
            self._loop.stop()

    def _figures(self) -> dict[str, Any]:
        stats = {**self._run.stats(), "requests": self._server.counters.summary(), "models": self._served.figures()}
        if self._models is not None:
            stats = self._models.with_past(stats)
        if self._streams is not None:
            stats["streams"] = self._streams.figures()
        if self._engine is not None:
            # NOTE: the engine process reports its nodes itself.
            stats["nodes"] = {name: node for name, node in stats["nodes"].items() if name not in self._engine.sections}
            stats["hand_over"] = self._engine.figures.as_dict()
        return stats


class EngineProcess:
    """Serves the workers that the supervisor links to it, until the supervisor ends it."""

    def __init__(self, start: Start) -> None:
        options, tables = start.options, start.tables
        set_up_process(options)
        processes = engine_processes(options, tables)
        if not isinstance(tables, Folder) or options.exit_on_error:
            self._server = EngineServer(make_plan(options, tables, processes))
        else:
            try:
                planned = servable(options, tables, processes, is_set_up=False)
                self._server = EngineServer(make_plan(options, planned or _NOTHING, processes))
            except SetupError:  # of one file: set up each alone to see which
                able = servable(options, tables, processes, is_set_up=True)
                self._server = EngineServer(make_plan(options, able or _NOTHING, processes))
        self._loop = new_loop(is_fast=False)
        handlers: Handlers = {"link": self._attach, "drain": self._loop.stop, "release": self._loop.stop}
        self._requests = RequestCounters("").summary()  # always zero: the workers count the requests of clients
        self._supervisor = SupervisorClient(
            start, self._loop, handlers, self._figures, self._server.pipe.stats, self._orphaned
        )

    def setup_choices(self) -> dict[str, list[str]]:
        """See ``pipe.setup_choices``."""
        return self._server.pipe.setup_choices()

    def serve(self) -> NoReturn:
        """Serve until the supervisor ends this process."""
        self._supervisor.serve("")
        self._supervisor.send_end(True)
        end_process(self._server.pipe, self._server.close(CLOSE_SECONDS), 0)

    def _attach(self, descriptor: int) -> None:
        if descriptor < 0:
            logger.error("cannot link a worker: no descriptor is left")
        else:
            self._server.attach(socket.socket(fileno=descriptor))

    def _orphaned(self) -> None:
        logger.error("the supervisor is gone: serving the workers until they end")
        every(self._loop, END_SECONDS, lambda: self._server.workers or self._loop.stop())

    def _figures(self) -> dict[str, Any]:
        return {**self._server.pipe.stats(), "inflight": 0, "requests": self._requests}


def set_up_process(options: Options) -> None:
    """Import custom code, and tune libraries, Python and malloc for a process with a pipe."""
    import_all(options.import_code)
    limit_threads()  # NOTE: after custom code, which may have set them
    keep_freed_memory()


def wait_for_engine(engine: EngineClient, start: Start) -> None:
    """Wait for links from the supervisor until an engine process reports what it runs."""
    while True:
        # NOTE: a starting worker gets no other messages than links.
        data, descriptors, _, _ = socket.recv_fds(start.sock, 4096, 1)
        if not data:
            raise OSError(errno.EPIPE, "the supervisor is gone")
        if not descriptors:
            logger.error(NO_DESCRIPTOR)
            start.heartbeat.set_linked(False)
            continue
        os.set_inheritable(descriptors[0], False)
        if engine.attach_and_wait(socket.socket(fileno=descriptors[0])):
            return


def die_with_parent(is_wanted: bool) -> None:
    """Have the system kill this process when its parent ends, or not: loading models takes minutes."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL if is_wanted else 0)


def _send_failed(sock: socket.socket, error: Exception) -> None:
    is_known = isinstance(error, TorchpipeError)
    if not is_known:
        logger.exception("cannot start")
    text = str(error) if is_known else f"{type(error).__name__}: {error}"
    sock.setblocking(True)
    sock.sendall(json.dumps({"type": "failed", "message": text}).encode() + b"\n")


def used_gpus() -> list[dict[str, Any]]:
    """Memory of the GPUs that this process uses, by all processes."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    gpus = []
    for index in range(torch.cuda.device_count()):
        if torch.cuda.memory_reserved(index):  # on an unused device, the query would create a context
            free, total = torch.cuda.mem_get_info(index)
            number = int(visible[index]) if index < len(visible) and visible[index].isdigit() else index
            name = torch.cuda.get_device_name(index)
            gpus.append({"index": number, "name": name, "used_bytes": total - free, "total_bytes": total})
    return gpus
