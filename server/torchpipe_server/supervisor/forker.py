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
from torchpipe_server.worker.worker import EngineProcess, Start, Worker, run_process

Role = Literal["worker", "engine process"]

_MAKERS: dict[Role, Callable[[Start], Worker | EngineProcess]] = {"worker": Worker, "engine process": EngineProcess}


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


IsWanted = Callable[[Any], bool]
Done = Callable[[Any, "Forked | Exception"], object]


class Forker:
    """Starts workers and engine processes, one at a time, each on a thread.

    ``is_wanted(slot)`` is for the thread that forks; ``done(slot, forked or error)`` is called on the loop's.

    That may take seconds, in which the loop has to answer: the process that they are forked from has to import
    everything first.
    """

    def __init__(self, loop: Loop, options: Options, journal: Journal, is_wanted: IsWanted, done: Done) -> None:
        self._loop, self._options, self._journal = loop, options, journal
        self._is_wanted, self._done = is_wanted, done
        self._lock = threading.Lock()  # held while a fork is under way
        self._unclaimed: list[Forked] = []  # processes that ``done`` did not get yet
        self._is_closed = False

    def fork(self, slot: Any) -> None:
        """Start a process for the ``WorkerSlot``, if it is still wanted when its turn comes."""
        try:
            threading.Thread(target=self._fork, args=(slot,), name="torchpipe-fork", daemon=True).start()
        except RuntimeError as error:  # the system has no thread left
            self._done(slot, OSError(errno.EAGAIN, str(error)))

    def close(self) -> None:
        """End what ``done`` did not get, and start nothing any more."""
        self._is_closed = True
        with suppress(IndexError):  # NOTE: the thread that forks may call this as well
            while True:
                self._unclaimed.pop().abandon()

    def _fork(self, slot: Any) -> None:
        with self._lock:
            if self._is_closed or not self._is_wanted(slot):
                return
            try:
                forked = self._start_process(slot.role, slot.index, slot.tables)
            except Exception as error:
                call_from_any_thread(self._loop, self._done, slot, error)
                return
            self._unclaimed.append(forked)
            if self._is_closed:
                self.close()
            else:
                call_from_any_thread(self._loop, self._claim, slot, forked)

    def _claim(self, slot: Any, forked: Forked) -> None:
        self._unclaimed.remove(forked)
        self._done(slot, forked)

    def _start_process(self, role: Role, index: int, tables: Any) -> Forked:
        ours, theirs = socket.socketpair()
        read_end, write_end = multiprocessing.Pipe(duplex=False)
        heartbeat = Heartbeat()
        context: Any = multiprocessing.get_context("forkserver")
        start = Start(index, self._options, tables, theirs, write_end, self._journal, heartbeat)
        name = f"torchpipe-{role.replace(' ', '-')}-{index}"
        process = context.Process(target=run_process, args=(start, _MAKERS[role]), name=name)
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
