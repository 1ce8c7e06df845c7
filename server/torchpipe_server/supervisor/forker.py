"""Forks workers and engine processes from a process that has imported everything, and replaces that where it hangs."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple

from torchpipe_server.front.journal import Journal
from torchpipe_server.front.loop import Loop, call_from_any_thread
from torchpipe_server.options import Options
from torchpipe_server.worker.engine import engine_main
from torchpipe_server.worker.heartbeat import Heartbeat
from torchpipe_server.worker.worker import Start, worker_main

logger = logging.getLogger("torchpipe_server")

CLOSE_SECONDS = 5.0  # for a fork under way
IMPORT_SECONDS = 300.0  # for the process that workers are forked from to import everything

Role = Literal["worker", "engine process"]

_MAINS: dict[Role, Callable[[Start], None]] = {"worker": worker_main, "engine process": engine_main}


class Forked(NamedTuple):
    """A worker or engine process, and what the supervisor has of it.

    Its end of the channel, the memory in which the process gives signs of life, and the end of the pipe to read from
    that is the process's stderr.
    """

    process: Any
    pidfd: int
    sock: socket.socket
    heartbeat: Heartbeat
    stderr: Connection

    def abandon(self) -> None:
        """End a process that nobody wants."""
        self.process.kill()
        self.sock.close()
        self.stderr.close()
        os.close(self.pidfd)


Done = Callable[["Forked | Exception"], object]


class Forker:
    """Starts workers and engine processes, one at a time, each on a thread.

    That may take seconds, in which the loop has to answer: the process that they are forked from has to import
    everything first.
    """

    def __init__(self, loop: Loop, options: Options, journal: Journal) -> None:
        self._loop, self._options, self._journal = loop, options, journal
        self._lock = threading.Lock()  # held while a fork is under way
        self._unclaimed: list[Forked] = []  # processes that nobody was told of yet
        self._is_closed = False
        self._looks = 0  # since the fork under way began
        self._has_forked = False  # whether the process that workers are forked from has imported everything

    def fork(self, role: Role, index: int, tables: Any, is_wanted: Callable[[], bool], done: Done) -> None:
        """Start a worker, or an engine process; ``done(forked or error)`` is called on the loop's thread.

        It is not where the process ``is_wanted`` no more when its turn comes, which is asked on the thread that forks.
        """
        args = (role, index, tables, is_wanted, done)
        try:
            threading.Thread(target=self._fork, args=args, name="torchpipe-fork", daemon=True).start()
        except RuntimeError as error:  # the system has no thread left
            done(OSError(errno.EAGAIN, str(error)))

    def look(self, seconds: float) -> None:
        """Give up a fork under way that has taken so long; to be called once in ``seconds``."""
        limit = self._options.hang_seconds
        if not limit or not self._lock.locked():
            return
        self._looks += 1
        if not self._has_forked:
            limit = max(limit, IMPORT_SECONDS)
        if self._looks * seconds > limit:
            logger.error("forking a process takes more than %g s: ending the one that does it", limit)
            self._looks, self._has_forked = 0, False
            _kill_fork_server()

    def close(self) -> None:
        """End what nobody was told of, and start nothing any more."""
        self._is_closed = True
        if self._lock.acquire(timeout=CLOSE_SECONDS):
            for forked in self._unclaimed:
                forked.abandon()
        else:
            _kill_fork_server()

    def _fork(self, role: Role, index: int, tables: Any, is_wanted: Callable[[], bool], done: Done) -> None:
        with self._lock:
            if self._is_closed or not is_wanted():
                return
            self._looks = 0
            try:
                forked = self._start_process(role, index, tables)
            except Exception as error:
                call_from_any_thread(self._loop, done, error)
                return
            self._has_forked = True
            self._unclaimed.append(forked)
        call_from_any_thread(self._loop, self._claim, forked, done)

    def _claim(self, forked: Forked, done: Done) -> None:
        self._unclaimed.remove(forked)
        done(forked)

    def _start_process(self, role: Role, index: int, tables: Any) -> Forked:
        ours, theirs = socket.socketpair()
        read_end, write_end = multiprocessing.Pipe(duplex=False)
        heartbeat = Heartbeat()
        context: Any = multiprocessing.get_context("forkserver")
        start = Start(index, self._options, tables, theirs, write_end, self._journal, heartbeat)
        name = f"torchpipe-{role.replace(' ', '-')}-{index}"
        process = context.Process(target=_MAINS[role], args=(start,), name=name)
        try:
            process.start()
            pidfd = os.pidfd_open(process.pid)
        except BaseException:
            if process.pid is not None:
                process.kill()
            ours.close()
            read_end.close()
            raise
        finally:
            theirs.close()
            write_end.close()
            heartbeat.close()
        return Forked(process, pidfd, ours, heartbeat, read_end)


def _kill_fork_server() -> None:
    """End the process that workers are forked from, stopped or not; the next fork starts a new one."""
    server: Any = getattr(forkserver, "_forkserver", None)  # NOTE: the library has no public name for it
    pid = getattr(server, "_forkserver_pid", None)
    if pid is not None:
        os.kill(pid, signal.SIGKILL)  # a child that nobody has waited for: the number is not another one's
