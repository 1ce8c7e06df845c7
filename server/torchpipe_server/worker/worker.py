"""A worker process: one pipe, one I/O thread, the connections that the supervisor hands over."""

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
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from torchpipe_server.front.journal import Journal
from torchpipe_server.front.loop import Loop, call_from_any_thread, every, new_loop
from torchpipe_server.front.server import Server
from torchpipe_server.front.services import Routes, Served, services_of
from torchpipe_server.logs import dropped_lines, set_up_logging
from torchpipe_server.logs.stderr import take_over_stderr
from torchpipe_server.options import Options
from torchpipe_server.worker.channel import Channel, Said
from torchpipe_server.worker.heartbeat import Heart, Heartbeat

if TYPE_CHECKING:
    from torchpipe_py import pipe
    from torchpipe_py.plan.build import Pipeline
    from torchpipe_py.proc.engine import EngineClient

logger = logging.getLogger("torchpipe_server")

SWITCH_SECONDS = 0.0005
PR_SET_PDEATHSIG = 1
HUNG = 3  # the exit status of a process whose backend does not return
# For the supervisor to take the last words, and for a backend to return once every request is answered or given up.
CLOSE_SECONDS = 2.0
END_SECONDS = 0.25  # between two looks at whether the time to end is over
NO_DESCRIPTOR = "there is no link to the engine process: no descriptor is left for it"


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


def worker_main(start: Start) -> None:
    """The main function of a worker. It ends when the supervisor says so, or is gone."""
    run_process(start, _work)


def run_process(start: Start, work: Callable[[Start], object]) -> None:
    """What a worker and an engine process have in common: signals and log lines."""
    # A terminal, and a service manager, signal all processes at once: what to do is for the supervisor to say.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    set_up_logging(start.options)
    take_over_stderr(start.stderr.fileno())
    start.stderr.close()
    try:
        work(start)
    except Exception:
        logger.exception("a defect; the process ends")
        raise
    finally:
        logging.shutdown()  # the process ends without what a program does at its exit


def _work(start: Start) -> None:
    choose_device(start)
    die_with_parent(True)
    engine, loop = None, new_loop()
    try:
        from torchpipe_py import pipe

        make_served = served_maker(start.options)
        set_up_process(start.options)
        plan = make_plan(start.options, start.tables, start.options.workers)
        if has_engine(start.options, start.tables):
            from torchpipe_py.proc.engine import EngineClient, pipe_of_worker

            engine = EngineClient(partial(_watch, loop), start.heartbeat.tell_linked)
            meet(engine, start)
            run = pipe_of_worker(plan, engine)
        else:
            run = pipe(plan)
        served = make_served(run)
        provider = None
        if start.options.trace_ratio >= 0:
            from torchpipe_server import tracing

            provider = tracing.set_up()
            run.instrument(provider, starts_traces=False)
            served = tracing.traced(served, provider, start.options.trace_ratio)
        worker = Worker(start, loop, plan, run, served, engine)
    except Exception as error:
        say_failed(start.sock, error)
        return
    die_with_parent(False)  # from here on it notices by itself, and answers what it has accepted
    gc.freeze()  # what was loaded stays; the collector need not look at it again and again
    answered = worker.serve()
    is_closed = run.close(CLOSE_SECONDS)
    if provider is not None and not tracing.shut_down(provider, CLOSE_SECONDS):
        logger.warning("spans are lost: the exporter did not take them within %g s", CLOSE_SECONDS)
    end_process(run, is_closed, 0 if answered else 1)


def end_process(run: pipe, is_closed: bool, status: int) -> NoReturn:
    """End this process with ``status``, or with ``HUNG`` where a backend still runs, which the log has said.

    It does not wait for backends that are being closed: those on a GPU take seconds, and end with the process.
    """
    if is_closed:
        sys.exit(status)
    is_hung = any(node["oldest_batch_s"] for node in run.stats()["nodes"].values())
    logging.shutdown()
    os._exit(HUNG if is_hung else status)


class Worker:
    """Serves the connections that come through the channel, and says what becomes of them."""

    def __init__(
        self, start: Start, loop: Loop, plan: Pipeline, run: pipe, served: Served, engine: EngineClient | None = None
    ) -> None:
        self._plan, self._run, self._engine = plan, run, engine
        self._loop = loop
        self._journal = start.journal
        services = services_of(served, start.options)
        self._server = Server(loop, services, start.options, self._gone, served.names_with_pipe())
        every(loop, END_SECONDS, self._end_if_finished)
        self._channel = Channel(self._loop, start.sock, self._hear, self._orphaned)
        self._heart = Heart(start.heartbeat, self._loop, run.stats)

    def serve(self) -> bool:
        """Until told to end; whether every accepted request was answered."""
        self._heart.start()
        self._channel.send({"type": "ready", "graph": _draw(self._plan)})
        self._loop.run_forever()
        answered = self._server.close()
        self._channel.send({"type": "end", "answered": answered, "stats": self._stats()})
        self._channel.finish(CLOSE_SECONDS)
        return answered

    def _hear(self, message: Said, descriptor: int) -> None:
        kind = message["type"]
        if kind == "connection":
            self._adopt(message, descriptor)
        elif kind == "link":
            self._adopt_link(descriptor)
        elif kind == "stats":
            self._channel.send({"type": "stats", "stats": self._stats()})
        elif kind == "shed":
            self._server.shed(message["count"])
        elif kind == "release":
            self._server.release()
        elif kind == "drain":
            self._server.drain()

    def _adopt(self, message: Said, descriptor: int) -> None:
        slot = message["slot"]
        if descriptor < 0:
            logger.error("no descriptor is left for a connection")
            self._gone(slot, True)
            return
        self._server.adopt(socket.socket(fileno=descriptor), slot, self._journal.entry(slot), message["refused"])

    def _adopt_link(self, descriptor: int) -> None:
        if descriptor < 0 or self._engine is None:
            logger.error(NO_DESCRIPTOR)
        else:
            self._engine.attach(socket.socket(fileno=descriptor))

    def _gone(self, slot: int, is_closed: bool) -> None:
        self._channel.send({"type": "closed" if is_closed else "released", "slot": slot})
        self._end_if_finished()

    def _orphaned(self) -> None:
        logger.error("the supervisor is gone: answering what was accepted, then ending")
        self._server.drain()

    def _end_if_finished(self) -> None:
        if self._server.is_finished:
            self._loop.stop()

    def _stats(self) -> dict[str, Any]:
        stats = {**self._run.stats(), "requests": self._server.counters.summary()}
        if self._engine is not None:
            # NOTE: the nodes that the engine process runs are in its own figures.
            stats["nodes"] = {name: node for name, node in stats["nodes"].items() if name not in self._engine.sections}
            stats["hand_over"] = self._engine.figures.as_dict()
        return {**stats, "log_lines_dropped": dropped_lines(), "gpus": used_gpus()}


def _watch(loop: Loop, fd: int, take: Callable[[], object] | None) -> None:
    """Have what ``fd`` announces taken on the loop; ``None`` ends that."""
    if take is None:
        call_from_any_thread(loop, loop.remove_reader, fd)
    else:
        call_from_any_thread(loop, loop.add_reader, fd, take)


def set_up_process(options: Options) -> None:
    """Import the user's own code, and have libraries, Python and malloc do as a process with a pipe needs it."""
    from torchpipe_py import import_code
    from torchpipe_py.malloc import keep_freed_memory

    for name in filter(None, (part.strip() for part in options.import_code.split(","))):
        import_code(name)
    limit_threads()  # NOTE: after that code, which may have set them otherwise
    keep_freed_memory()


def make_plan(options: Options, tables: Any, processes: int) -> Pipeline:
    """The plan of the configuration for one of so many processes that run it.

    What the options say otherwise is written into ``tables``.
    """
    from torchpipe_py.plan.build import plan_pipeline

    if options.max_inflight:
        tables["global"]["max_inflight"] = options.max_inflight
    if options.decode_isolation != "config":
        for table in tables.values():
            table.pop("decode_isolation", None)
        tables["global"]["decode_isolation"] = options.decode_isolation
    return plan_pipeline(tables, processes=processes)


def has_engine(options: Options, tables: Any) -> bool:
    """Whether an engine process runs the shared nodes of the configuration."""
    from torchpipe_py.plan.sharing import shared_nodes

    return options.workers > 1 and bool(shared_nodes(tables))


def engine_processes(options: Options, tables: Any) -> int:
    """How many run the shared nodes, if there are any: no more than workers."""
    from torchpipe_py.plan.sharing import decodes_on_gpu

    each = options.engines or (2 if decodes_on_gpu(tables) else 1)
    return min(each * max(1, len(options.device_numbers)), options.workers)


def meet(engine: EngineClient, start: Start) -> None:
    """Wait for an engine process, and the links that the supervisor makes to it, until one has told what it runs."""
    while True:
        # NOTE: links are all that the supervisor sends to a worker that starts.
        said, descriptors, _, _ = socket.recv_fds(start.sock, 4096, 1)
        if not said:
            raise OSError(errno.EPIPE, "the supervisor is gone")
        if not descriptors:
            logger.error(NO_DESCRIPTOR)
            start.heartbeat.tell_linked(False)
            continue
        os.set_inheritable(descriptors[0], False)
        if engine.meet(socket.socket(fileno=descriptors[0])):
            return


def limit_threads() -> None:
    """Tell OpenCV, PyTorch and Python that the instances are the parallelism."""
    import cv2
    import torch

    cv2.setNumThreads(1)
    torch.set_num_threads(1)
    # A thread that comes back from OpenCV, or from a GPU, waits this long at most for Python's lock (default: 5 ms).
    sys.setswitchinterval(SWITCH_SECONDS)


def served_maker(options: Options) -> Callable[[pipe], Served]:
    """What makes of a pipe what is served: the usual service, or the user's own."""
    if options.handler:
        from torchpipe_server.methods.custom import CustomHandler, load_handler

        cls = load_handler(options.handler)

        def make_own(run: pipe) -> Served:
            limit_delays(run, options)
            handler = CustomHandler(cls, run, options.deadline_ms)
            return Served(handler.methods, Routes(handler.routes, options.monitoring))

        return make_own
    return partial(usual_service, options)


def usual_service(options: Options, run: pipe) -> Served:
    """The methods of ``idl/inference.thrift``, ``POST /infer``, and the Open Inference Protocol."""
    from torchpipe_py.idl import load_idl
    from torchpipe_py.runtime.admission import Deadlines
    from torchpipe_py.wire.errors import Bound
    from torchpipe_server.front.services import reply_bound
    from torchpipe_server.methods.http import HttpHandler
    from torchpipe_server.methods.many import Turns
    from torchpipe_server.methods.oip.handler import OipHandler
    from torchpipe_server.methods.oip.requests import InferLimits
    from torchpipe_server.methods.thrift import InferenceHandler

    limit_delays(run, options)
    deadlines, turns = Deadlines(run, options.deadline_ms), Turns(run)
    thrift = InferenceHandler(run, load_idl(), deadlines, options.max_batch, options.max_reply_bytes, turns)
    http = HttpHandler(run, deadlines, options.max_text_bytes, options.max_reply_bytes)
    limits = InferLimits(Bound(options.max_text_bytes, "--max-text-bytes"), options.max_batch)
    model = Path(options.config).stem
    oip = OipHandler(run, model, deadlines, turns, limits, reply_bound(options.max_reply_bytes))
    return Served(thrift.methods, Routes([*http.routes, *oip.routes], options.monitoring))


def limit_delays(run: pipe, options: Options) -> None:
    """Have the pipe refuse what waits too long."""
    run.limit_delays(None if options.queue_target_ms < 0 else options.queue_target_ms / 1000)


def die_with_parent(is_wanted: bool) -> None:
    """Whether the system is to kill this process when the one that it was forked from ends: models load for minutes."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL if is_wanted else 0)


def choose_device(start: Start) -> None:
    device = start.options.device_of(start.index)
    if device:
        os.environ["CUDA_VISIBLE_DEVICES"] = device


def say_failed(sock: socket.socket, error: Exception) -> None:
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
