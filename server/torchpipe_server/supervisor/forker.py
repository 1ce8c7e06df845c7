"""Forks workers and engine processes from a process that has imported everything."""

from __future__ import annotations

import errno
import multiprocessing
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple

from torchpipe_server.front.journal import Journal
from torchpipe_server.front.loop import Loop, call_from_any_thread
from torchpipe_server.options import Options
from torchpipe_server.worker.heartbeat import Heartbeat
from torchpipe_server.worker.worker import Start, engine_main, worker_main

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

    def fork(self, role: Role, index: int, tables: Any, is_wanted: Callable[[], bool], done: Done) -> None:
        """Start a worker, or an engine process; ``done(forked or error)`` is called on the loop's thread.

        It is not where the process ``is_wanted`` no more when its turn comes, which is asked on the thread that forks.
        """
        args = (role, index, tables, is_wanted, done)
        try:
            threading.Thread(target=self._fork, args=args, name="torchpipe-fork", daemon=True).start()
        except RuntimeError as error:  # the system has no thread left
            done(OSError(errno.EAGAIN, str(error)))

    def close(self) -> None:
        """End what nobody was told of, and start nothing any more."""
        self._is_closed = True
        with suppress(IndexError):  # NOTE: the thread that forks may call this as well
            while True:
                self._unclaimed.pop().abandon()

    def _fork(self, role: Role, index: int, tables: Any, is_wanted: Callable[[], bool], done: Done) -> None:
        with self._lock:
            if self._is_closed or not is_wanted():
                return
            try:
                forked = self._start_process(role, index, tables)
            except Exception as error:
                call_from_any_thread(self._loop, done, error)
                return
            self._unclaimed.append(forked)
            if self._is_closed:
                self.close()
            else:
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
