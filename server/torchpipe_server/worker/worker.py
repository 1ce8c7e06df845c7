"""A worker: one pipe, one I/O thread, the connections that the supervisor hands over. An engine process: the pipe of
the shared nodes, for the workers whose ways to it the supervisor hands over."""

from __future__ import annotations

import ctypes
import errno
import gc
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NoReturn

from torchpipe_py.methods.timing import timed
from torchpipe_py.plan.folder import Folder
from torchpipe_server.front.counters import RequestCounters, log_request
from torchpipe_server.front.journal import Journal
from torchpipe_server.front.loop import Loop, call_from_any_thread, every, new_loop
from torchpipe_server.front.server import Server
from torchpipe_server.front.services import services_of
from torchpipe_server.logs import dropped_lines, set_up_logging
from torchpipe_server.logs.stderr import take_over_stderr
from torchpipe_server.options import Options
from torchpipe_server.worker.channel import Channel
from torchpipe_server.worker.heartbeat import Heart, Heartbeat
from torchpipe_server.worker.service import engine_processes, has_engine, make_plan, served_maker

if TYPE_CHECKING:
    from torchpipe_py import pipe
    from torchpipe_py.plan.build import Pipeline
    from torchpipe_py.proc.engine import EngineClient
    from torchpipe_server.front.rpc import RpcServer
    from torchpipe_server.worker.streams import WorkerStreams

logger = logging.getLogger("torchpipe_server")

SWITCH_SECONDS = 0.0005
PR_SET_PDEATHSIG = 1
HUNG = 3  # the exit status of a process whose backend does not return
# For the supervisor to take the last words, and for a backend to return once every request is answered or given up.
CLOSE_SECONDS = 2.0
END_SECONDS = 0.25  # between two looks at whether the time to end is over
_WITH_DESCRIPTOR = ("connection", "link")  # messages
ORPHANED = {"models": [], "error": "the supervisor is gone", "code": "unavailable"}  # as the outcome of any control
NO_DESCRIPTOR = "there is no link to the engine process: no descriptor is left for it"


Hear = dict[str, Callable[..., object]]
Figures = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Start:
    """What a worker or engine process is started with.

    ``tables`` is the configuration, ``sock`` its end of the channel, ``stderr`` where its libraries' lines go.
    """

    index: int
    options: Options
    tables: Any
    sock: socket.socket
    stderr: Connection
    journal: Journal
    heartbeat: Heartbeat


def run_process(start: Start, make: Callable[[Start], Worker | EngineProcess]) -> None:
    """The main function of a worker or engine process, which ``make`` loads.

    It ends when the supervisor wants it. Once that is gone, a worker ends as well, an engine process with the last
    worker.
    """
    # A terminal, and a service manager, signal all processes at once: what to do is for the supervisor to say.
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
            made = make(start)
        except Exception as error:
            _send_failed(start.sock, error)
            return
        die_with_parent(False)  # from here on it notices by itself, and answers what it has accepted
        gc.freeze()  # what was loaded stays; the collector need not look at it again and again
        made.serve()
    except Exception:
        logger.exception("a defect; the process ends")
        raise
    finally:
        logging.shutdown()  # the process ends without what a program does at its exit


def end_process(run: pipe, is_closed: bool, status: int) -> NoReturn:
    """End this process with ``status``, or with ``HUNG`` where a backend still runs, which is logged.

    It does not wait for backends that are being closed: those on a GPU take seconds, and end with the process.
    """
    if is_closed:
        sys.exit(status)
    is_hung = any(node["oldest_batch_s"] for node in run.stats()["nodes"].values())
    logging.shutdown()
    os._exit(HUNG if is_hung else status)


class Post:
    """The way of a worker or engine process to the supervisor.

    ``hear`` has what takes the fields of a message, by its type; ``figures`` are what the supervisor gets, ``stats``
    the pipe's. ``on_orphaned`` is called when the supervisor is gone.
    """

    def __init__(
        self, start: Start, loop: Loop, hear: Hear, figures: Figures, stats: Figures, on_orphaned: Callable[[], object]
    ) -> None:
        self._loop, self._hear, self._figures = loop, hear, figures
        self.channel = Channel(loop, start.sock, self._take, on_orphaned)
        self._heart = Heart(start.heartbeat, loop, stats)
        self.send = self.channel.send

    def run(self, graph: str) -> None:
        """Report that it is ready, and run the loop until it is stopped."""
        self._heart.start()
        self.send({"type": "ready", "graph": graph})
        self._loop.run_forever()

    def end(self, answered: bool) -> None:
        """The last words: whether every accepted request was answered."""
        self.send({"type": "end", "answered": answered, "stats": self._all_figures()})
        self.channel.finish(CLOSE_SECONDS)

    def _take(self, line: bytes, descriptor: int) -> None:
        message = json.loads(line)
        type_ = message.pop("type")
        if type_ == "stats":
            self.send({"type": "stats", "stats": self._all_figures()})
        elif type_ in _WITH_DESCRIPTOR:
            self._hear[type_](descriptor, **message)
        else:
            self._hear[type_](**message)

    def _all_figures(self) -> dict[str, Any]:
        return {
            "hand_over": {},
            "streams": {},
            **self._figures(),
            "log_lines_dropped": dropped_lines(),
            "gpus": used_gpus(),
        }


class Worker:
    """Serves the connections that come from the supervisor, and reports what becomes of them."""

    def __init__(self, start: Start) -> None:
        from torchpipe_py import pipe

        options = start.options
        self._loop, self._journal = new_loop(), start.journal
        self._engine: EngineClient | None = None
        self._provider: Any = None  # of spans
        self._controls: dict[int, Callable[[int, dict[str, Any]], object]] = {}  # that wait for their outcome
        make_served = served_maker(options, self._control if isinstance(start.tables, Folder) else None)
        set_up_process(options)
        self._plan = make_plan(options, start.tables, options.workers)
        if has_engine(options, start.tables):
            from torchpipe_py.proc.engine import EngineClient, pipe_of_worker

            self._engine = EngineClient(partial(_watch, self._loop), start.heartbeat.tell_linked)
            meet(self._engine, start)
            self._run = pipe_of_worker(self._plan, self._engine)
        else:
            self._run = pipe(self._plan)
        served = make_served(self._run)
        served = timed(served, self._run, options.server_timing == "all", options.slow_seconds, log_request)
        if options.trace_ratio >= 0:
            from torchpipe_py.methods.tracing import traced
            from torchpipe_server import tracing

            self._provider = tracing.set_up()
            self._run.instrument(self._provider, starts_traces=False)
            served = traced(served, self._provider, options.trace_ratio, "torchpipe_server")
        services = services_of(served, options)
        self._server = Server(self._loop, services, options, self._gone, served.names_with_pipe())
        self._rpc: RpcServer | None = None
        if options.grpc_port >= 0:
            # NOTE: imported after the fork, which its threads would not survive; it logs what clients send.
            os.environ.setdefault("GRPC_VERBOSITY", "NONE")
            from torchpipe_server.front.rpc import RpcServer

            self._rpc = RpcServer(self._loop, served.rpcs, options, self._server.counters)
        every(self._loop, END_SECONDS, self._end_if_finished)
        hear: Hear = {
            "connection": self._adopt,
            "link": self._adopt_link,
            "outcome": lambda id, status, body: self._controls.pop(id)(status, body),
            "shed": self._server.shed,
            "listen": self._listen,
            "release": partial(self._end, self._server.release),
            "drain": partial(self._end, self._server.drain),
        }
        self._post = Post(start, self._loop, hear, self._figures, self._run.stats, self._orphaned)
        self._streams: WorkerStreams | None = None
        if options.streams:
            from torchpipe_server.worker.streams import WorkerStreams

            self._streams = streams = WorkerStreams(self._run, self._loop, self._post.channel)
            hear.update(streams=streams.set, watch=streams.watch, snapshot=streams.snapshot)

    def serve(self) -> NoReturn:
        """Until the supervisor ends it, and the process with it."""
        self._post.run(_draw(self._plan))
        answered = self._server.close()
        if self._rpc is not None:
            answered = self._rpc.close() and answered
        self._post.end(answered)
        is_closed = self._run.close(CLOSE_SECONDS)
        if self._provider is not None:
            from torchpipe_server import tracing

            if not tracing.shut_down(self._provider, CLOSE_SECONDS):
                logger.warning("spans are lost: the exporter did not take them within %g s", CLOSE_SECONDS)
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
        """Have the supervisor load or unload a model, or list all; on the loop's thread."""
        if self._post.channel.is_closed:
            done(503, ORPHANED)
            return
        number = max(self._controls, default=0) + 1
        self._controls[number] = done
        self._post.send({"type": "control", "id": number, "action": action, "name": name[:200]})

    def _gone(self, slot: int, is_closed: bool) -> None:
        self._post.send({"type": "gone", "slot": slot, "is_closed": is_closed})
        self._end_if_finished()

    def _orphaned(self) -> None:
        logger.error("the supervisor is gone: answering what was accepted, then ending")
        for done in self._controls.values():
            done(503, ORPHANED)
        self._end(self._server.drain)

    def _listen(self) -> None:
        if self._rpc is not None:
            self._rpc.listen(lambda: self._post.send({"type": "listening"}))

    def _end_if_finished(self) -> None:
        if self._server.is_finished and (self._rpc is None or self._rpc.is_finished):
            self._loop.stop()

    def _figures(self) -> dict[str, Any]:
        stats = {**self._run.stats(), "requests": self._server.counters.summary()}
        if self._streams is not None:
            stats["streams"] = self._streams.figures()
        if self._engine is not None:
            # NOTE: the nodes that the engine process runs are in its own figures.
            stats["nodes"] = {name: node for name, node in stats["nodes"].items() if name not in self._engine.sections}
            stats["hand_over"] = self._engine.figures.as_dict()
        return stats


class EngineProcess:
    """Serves the workers that the supervisor links to it until that ends it."""

    def __init__(self, start: Start) -> None:
        from torchpipe_py.proc.engine import EngineServer

        set_up_process(start.options)
        plan = make_plan(start.options, start.tables, engine_processes(start.options, start.tables))
        self._server = EngineServer(plan)
        self._loop = new_loop(is_fast=False)
        hear: Hear = {"link": self._attach, "drain": self._loop.stop, "release": self._loop.stop}
        self._requests = RequestCounters("").summary()  # those of clients are the workers'
        self._post = Post(start, self._loop, hear, self._figures, self._server.pipe.stats, self._orphaned)

    def serve(self) -> NoReturn:
        """Until the supervisor ends it, and the process with it."""
        self._post.run("")
        self._post.end(True)
        end_process(self._server.pipe, self._server.close(CLOSE_SECONDS), 0)

    def _attach(self, descriptor: int) -> None:
        if descriptor < 0:
            logger.error("a worker cannot be linked: no descriptor is left for it")
        else:
            self._server.attach(socket.socket(fileno=descriptor))

    def _orphaned(self) -> None:
        logger.error("the supervisor is gone: serving the workers until they end")
        every(self._loop, END_SECONDS, lambda: self._server.workers or self._loop.stop())

    def _figures(self) -> dict[str, Any]:
        return {**self._server.pipe.stats(), "inflight": 0, "requests": self._requests}


def _watch(loop: Loop, fd: int, take: Callable[[], object] | None) -> None:
    """Have what ``fd`` announces taken on the loop; ``None`` ends that."""
    if take is None:
        call_from_any_thread(loop, loop.remove_reader, fd)
    else:
        call_from_any_thread(loop, loop.add_reader, fd, take)


def set_up_process(options: Options) -> None:
    """Import the user's own code, and have libraries, Python and malloc do as a process with a pipe needs it."""
    from torchpipe_py.malloc import keep_freed_memory
    from torchpipe_py.registry import import_all

    import_all(options.import_code)
    limit_threads()  # NOTE: after that code, which may have set them otherwise
    keep_freed_memory()


def meet(engine: EngineClient, start: Start) -> None:
    """Wait for an engine process, and the links that the supervisor makes to it, until one reports what it runs."""
    while True:
        # NOTE: links are all that the supervisor sends to a worker that starts.
        data, descriptors, _, _ = socket.recv_fds(start.sock, 4096, 1)
        if not data:
            raise OSError(errno.EPIPE, "the supervisor is gone")
        if not descriptors:
            logger.error(NO_DESCRIPTOR)
            start.heartbeat.tell_linked(False)
            continue
        os.set_inheritable(descriptors[0], False)
        if engine.meet(socket.socket(fileno=descriptors[0])):
            return


def limit_threads() -> None:
    """Set OpenCV and PyTorch to one thread, since the instances are the parallelism."""
    import cv2
    import torch

    cv2.setNumThreads(1)
    torch.set_num_threads(1)
    # A thread that comes back from OpenCV, or from a GPU, waits this long at most for Python's lock (default: 5 ms).
    sys.setswitchinterval(SWITCH_SECONDS)


def die_with_parent(is_wanted: bool) -> None:
    """Whether the system is to kill this process when the one that it was forked from ends: models load for minutes."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL if is_wanted else 0)


def _send_failed(sock: socket.socket, error: Exception) -> None:
    from torchpipe_py import TorchpipeError

    is_known = isinstance(error, TorchpipeError)
    if not is_known:
        logger.exception("the process cannot start")
    text = str(error) if is_known else f"{type(error).__name__}: {error}"
    sock.setblocking(True)
    sock.sendall(json.dumps({"type": "failed", "message": text}).encode() + b"\n")


def _draw(plan: Pipeline) -> str:
    """The graph as SVG, empty where it cannot be drawn."""
    from torchpipe_py.tools.draw.render import live_svg

    try:
        return live_svg(plan)
    except Exception:
        logger.exception("the graph cannot be drawn")
        return ""


def used_gpus() -> list[dict[str, Any]]:
    """Memory of the devices that this process uses, all processes' together."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    gpus = []
    for index in range(torch.cuda.device_count()):
        if torch.cuda.memory_reserved(index):  # asking costs a context on a device that is not in use
            free, total = torch.cuda.mem_get_info(index)
            number = int(visible[index]) if index < len(visible) and visible[index].isdigit() else index
            name = torch.cuda.get_device_name(index)
            gpus.append({"index": number, "name": name, "used_bytes": total - free, "total_bytes": total})
    return gpus
