"""Forks workers and engine processes from a process that has imported everything."""

from __future__ import annotations

import errno
import fcntl
import logging
import multiprocessing
import multiprocessing.util
import os
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple

from torchpipe_py import ConfigError
from torchpipe_py.serving import ChildProcess, Joined, call_from_any_thread, leave_deleted_folder
from torchpipe_server.front.journal import Journal
from torchpipe_server.front.loop import Loop
from torchpipe_server.options import Options
from torchpipe_server.worker.heartbeat import Heartbeat
from torchpipe_server.worker.worker import EngineProcess, Start, Worker, run_process

_MOST_FOLDER_BYTES = 107 - len("/listener-12345678")  # of a Unix socket's path
_FOLDERS = "pymp-"  # how Python's names of such folders begin
_LOCK = "torchpipe-serve.lock"
logger = logging.getLogger("torchpipe_server")

Role = Literal["worker", "engine process"]

_MAKERS: dict[Role, Callable[[Start], Worker | EngineProcess]] = {"worker": Worker, "engine process": EngineProcess}


def prepare_fork_server(libraries: Sequence[str]) -> None:
    """Set what the fork server imports besides ``worker.preload``, and what it inherits; before the first fork.

    It inherits the environment, from which ``worker.preload`` removes what is meant for it alone.
    Raises ``ConfigError`` if there is no folder for its socket.
    """
    os.environ["TORCHPIPE_FORK_FOLDER"] = _socket_folder()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torchpipe_server.worker.preload", *libraries])
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # its pool is unused, and would exist before the fork
    # Python starts it by `python -c`, which prefers modules of the working directory.
    if sys.version_info >= (3, 11):
        os.environ.setdefault("PYTHONSAFEPATH", "torchpipe-serve")
    else:
        here = os.getcwd()
        os.chdir(os.path.dirname(os.__file__))
        forkserver.ensure_running()
        os.chdir(here)


def _socket_folder() -> str:
    try:
        folder: str = multiprocessing.util.get_temp_dir()
    except OSError as error:
        raise ConfigError(f"the socket between processes needs a folder to write to: set TMPDIR ({error})") from None
    if len(os.fsencode(folder)) > _MOST_FOLDER_BYTES:
        raise ConfigError(f"{folder}: too long for the socket between processes: set TMPDIR to a shorter path")
    with suppress(OSError):  # on some file systems nothing can be locked
        _remove_left_folders(os.path.dirname(folder))
        _hold_lock(folder)
    return folder


def _remove_left_folders(parent: str) -> None:
    """Remove the folders of services that were killed with all their processes: the lock in them is free."""
    with os.scandir(parent) as entries:
        folders = [entry.path for entry in entries if entry.name.startswith(_FOLDERS)]
    for folder in folders:
        with suppress(OSError):  # of another program or user, or of a service that runs
            lock = os.open(os.path.join(folder, _LOCK), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(lock)


def _hold_lock(folder: str) -> None:
    """Lock the folder for as long as this process runs."""
    # NOTE: locked before it has its name, or another service would take it for one that was left.
    new = os.path.join(folder, f"{_LOCK}.new")
    fcntl.flock(os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), fcntl.LOCK_EX)
    os.rename(new, os.path.join(folder, _LOCK))


def look_at_working_directory() -> None:
    """Leave a working directory that was deleted, in which no process can be started and no file be read."""
    if text := leave_deleted_folder():
        logger.warning("%s", text)


class Forked(NamedTuple):
    """A worker or engine process, and the supervisor's handles of it.

    ``sock`` is the supervisor's end of the channel, ``heartbeat`` shared memory, ``stderr`` the read end of a pipe.
    ``tables`` is its configuration.
    """

    process: ChildProcess
    sock: socket.socket
    heartbeat: Heartbeat
    stderr: Connection
    tables: Any = None

    def kill(self) -> None:
        """Kill a process that is no longer wanted, and close its handles."""
        self.process.kill()
        self.process.release()
        self.sock.close()
        self.stderr.close()


IsWanted = Callable[[Any], bool]
Done = Callable[[Any, "Forked | Exception"], object]


class Forker:
    """Starts workers and engine processes, one at a time, each on its own thread.

    ``is_wanted(slot)`` is called on that thread, ``done(slot, forked or error)`` on the loop's.

    A start may take seconds, because the fork server first imports everything; the loop must stay responsive.
    """

    def __init__(self, loop: Loop, options: Options, journal: Journal, is_wanted: IsWanted, done: Done) -> None:
        self._loop, self._options, self._journal = loop, options, journal
        self._is_wanted, self._done = is_wanted, done
        self._lock = threading.Lock()  # held during a fork
        self._unclaimed: list[Forked] = []  # processes not yet passed to ``done``
        self._is_closed = False

    def fork(self, slot: Any) -> None:
        """Start a process for the ``WorkerSlot``, if it is still wanted when its turn comes."""
        try:
            threading.Thread(target=self._fork, args=(slot,), name="torchpipe-fork", daemon=True).start()
        except RuntimeError as error:  # the system has no thread left
            self._done(slot, OSError(errno.EAGAIN, str(error)))

    def close(self) -> None:
        """Kill processes not yet passed to ``done``, and start no more."""
        self._is_closed = True
        with suppress(IndexError):  # NOTE: the forking thread may call this at the same time
            while True:
                self._unclaimed.pop().kill()

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
        look_at_working_directory()
        ours, theirs = socket.socketpair()
        read_end, write_end = multiprocessing.Pipe(duplex=False)
        heartbeat = Heartbeat()
        context: Any = multiprocessing.get_context("forkserver")
        start = Start(index, self._options, tables, theirs, write_end, self._journal, heartbeat)
        name = f"torchpipe-{role.replace(' ', '-')}-{index}"
        process = context.Process(target=run_process, args=(start, _MAKERS[role]), name=name)
        try:
            process.start()
            child = ChildProcess(name, Joined(process))
        except BaseException:
            ours.close()
            read_end.close()
            raise
        finally:
            theirs.close()
            write_end.close()
            heartbeat.close()
        return Forked(child, ours, heartbeat, read_end, tables)
