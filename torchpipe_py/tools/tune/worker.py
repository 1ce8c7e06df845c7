"""Processes of the tuner, which run pipes under load for their parent, as workers or as engine processes."""

from __future__ import annotations

import os
import threading
from asyncio import new_event_loop
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from socket import AF_UNIX, socket
from time import perf_counter
from typing import Any

from torchpipe_py.cores import limit_threads
from torchpipe_py.errors import logger
from torchpipe_py.malloc import keep_freed_memory
from torchpipe_py.plan.build import plan_pipeline
from torchpipe_py.plan.config import Tables
from torchpipe_py.proc.engine import EngineClient, EngineServer, pipe_of_worker, watch_on
from torchpipe_py.registry import import_code
from torchpipe_py.runtime.pipe import pipe
from torchpipe_py.tools.load.in_process import WAIT_S, Failed, closed_loop, open_loop
from torchpipe_py.tools.report import ToolError
from torchpipe_py.tools.team import answer_calls


def main(descriptor: int, parent: int) -> None:
    """Run in the process."""
    answer_calls(_State(), descriptor, parent)


class _State:
    """The state of a process between its parent's calls. Pipes and engine processes are built in numbered slots."""

    def __init__(self) -> None:
        self._running: defaultdict[int, ExitStack] = defaultdict(ExitStack)
        self._servers: dict[int, tuple[EngineServer, socket]] = {}
        self._pipes: dict[int, pipe] = {}

    def open(self, images: Sequence[bytes], imports: Sequence[str], cores: Sequence[int]) -> None:
        """Prepare the process."""
        os.sched_setaffinity(0, cores)
        logger.setLevel("ERROR")
        self.gpu_free()  # NOTE: the memory of PyTorch itself does not belong to a pipe
        self._images = images
        for name in imports:
            import_code(name)
        limit_threads()
        keep_freed_memory()

    def gpu_free(self) -> int:
        """Free bytes of the first GPU; 0 without one."""
        try:
            import torch

            return int(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else 0
        except (ImportError, RuntimeError):
            return 0

    def serve(self, slot: int, config: Tables, processes: int, path: str) -> None:
        """Be one of ``processes`` engine processes, which listens on the Unix socket ``path``."""
        server, running = EngineServer(plan_pipeline(config, processes=processes)), ExitStack()
        self._running[slot] = running
        running.callback(server.close, WAIT_S)
        listener = running.enter_context(socket(AF_UNIX))
        listener.bind(path)
        running.callback(os.unlink, path)
        listener.listen(os.cpu_count() or 1)
        listener.settimeout(WAIT_S)
        self._servers[slot] = server, listener

    def accept(self, slot: int, workers: int) -> None:
        """Attach as many workers as will connect."""
        server, listener = self._servers[slot]
        for _ in range(workers):
            server.attach(listener.accept()[0])

    def build(self, slot: int, config: Tables, processes: int, engine: str | None) -> None:
        """Build the pipe of one of ``processes`` workers, whose shared nodes run in the process at a Unix socket."""
        plan, running = plan_pipeline(config, processes=processes), self._running[slot]
        if engine is None:
            self._pipes[slot] = pipe(plan)
        else:
            loop = new_event_loop()
            threading.Thread(target=loop.run_forever, daemon=True).start()
            running.callback(loop.call_soon_threadsafe, loop.stop)
            client = EngineClient(partial(watch_on, loop))
            running.callback(client.close)
            link = socket(AF_UNIX)
            link.connect(engine)
            if not client.attach_and_wait(link):
                raise ToolError("the engine process cannot be linked")
            self._pipes[slot] = pipe_of_worker(plan, client)
        running.callback(self._pipes[slot].close, WAIT_S)

    def drop(self, slot: int) -> None:
        """Close everything in a slot."""
        self._servers.pop(slot, None)
        self._pipes.pop(slot, None)
        self._running.pop(slot, ExitStack()).close()

    def busy(self, slot: int) -> dict[str, float]:
        """Milliseconds that each node has computed so far in this process."""
        run = self._servers[slot][0].pipe if slot in self._servers else self._pipes[slot]
        return {name: sum(node["instance_compute_ms"]) for name, node in run.stats()["nodes"].items()}

    def closed_loop(self, slot: int, *arguments: Any) -> tuple[list[float], Failed | None]:
        """``in_process.closed_loop``."""
        return closed_loop(self._pipes[slot], self._images, *arguments)

    def failures(self, slot: int, seconds: float) -> list[Failed]:
        """The images without a result, each run alone, as far as ``seconds`` allow."""
        until, found = perf_counter() + seconds, list[Failed]()
        for number, image in enumerate(self._images):
            now = perf_counter()
            _, failed = closed_loop(self._pipes[slot], [image], 1, max(0.0, until - now), now, most=1)
            found += [] if failed is None else [(number, failed[1])]
        return found

    def open_loop(self, slot: int, *arguments: Any) -> list[float]:
        """``in_process.open_loop``."""
        return open_loop(self._pipes[slot], self._images, *arguments)
