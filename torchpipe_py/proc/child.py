"""The parent's side of a child process: how it is started, the link to it, and how it ends."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from math import inf
from multiprocessing import spawn
from time import perf_counter
from typing import Any, Protocol

from torchpipe_py.backends.image.memory import waiting
from torchpipe_py.errors import WorkerDied, first_line
from torchpipe_py.proc.codec import Packed
from torchpipe_py.proc.link import (
    CLOSE,
    FAILED,
    SET_UP,
    SLEEP_SECONDS,
    Bell,
    GarbledError,
    Header,
    Link,
    Room,
    create_memory,
    new_bell,
)
from torchpipe_py.proc.pool import LOSSES, Call, Pool

CLOSE_SECONDS = 5.0
"""Time limit for closing a child's backend."""

_RETRY_SECONDS = 1.0  # delay before retrying to start a child, while others run

# First set the path, so that nothing is imported from the working directory; then handle Ctrl-C, which it gets too.
_PROGRAM = r"""
import sys
sys.path[:] = sys.argv[1].split("\n")
import signal
signal.signal(signal.SIGINT, lambda *_: None)
from importlib import import_module
import_module(sys.argv[2]).main(*map(int, sys.argv[3:]))
"""


class Running(Protocol):
    """A started process: a ``Popen``, or one forked by a ``Zygote``."""

    @property
    def pid(self) -> int: ...

    def kill(self) -> None:
        """Kill the process."""

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait until it ends; returns its exit status (negative for a signal), or ``None`` if unknown."""


Read = Callable[[Link, int, Header], Any]
"""Reads an answer that is not pickled."""

Launch = Callable[[list[int]], Running]
"""Starts a process with the descriptors of a link: its memory, the asker's bell, and the answerer's bell."""


def launch(fds: list[int]) -> subprocess.Popen[bytes]:
    """Start a process that runs ``worker.main``; it ends with the thread that starts it."""
    return start_interpreter("torchpipe_py.proc.worker", fds, os.getpid(), stdin=subprocess.DEVNULL)


def start_interpreter(module: str, fds: list[int], *more: int, **options: Any) -> subprocess.Popen[bytes]:
    """Start an interpreter like this one, which calls ``main`` of the module with these numbers."""
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    command = [os.fsdecode(spawn.get_executable()), *flags, "-c", _PROGRAM, import_path(), module]
    return subprocess.Popen([*command, *map(str, (*fds, *more))], pass_fds=fds, **options)


# Process-wide, because a fork affects the whole process.
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def keep_from_forks(sock: socket.socket) -> None:
    """Close the socket in forked processes, so that the other end notices when this process ends."""
    _sockets.add(sock)


def _after_fork() -> None:
    for sock in list(_sockets):
        sock.close()


os.register_at_fork(after_in_child=_after_fork)


def import_path() -> str:
    """``sys.path`` for a child process, one folder per line.

    It holds only absolute paths, so that nothing is imported from the working directory.
    """
    paths = [path for path in sys.path if isinstance(path, str) and os.path.isabs(path)]
    # TRAP: while another thread imports cv2, cv2's own folder, which has a `typing`, is first in the path.
    file = getattr(sys.modules.get("cv2"), "__file__", None)
    if file:
        folder = os.path.join(os.path.dirname(os.path.realpath(file)), "")
        paths = [path for path in paths if not os.path.join(path, "").startswith(folder)]
    return "\n".join(paths)


def describe_ending(status: int | None) -> str:
    """Describe how a process ended, from its exit status (negative for a signal)."""
    if status is None:
        return "its exit status is unknown"
    if status >= 0:
        return f"exit status {status}"
    names = {number.value: number.name for number in signal.Signals}
    return f"killed by signal {-status} ({names.get(-status, 'unknown')})"


class Child:
    """A child process and the ``link`` through which it answers; used from one thread."""

    def __init__(self, label: str, instance: int, launch: Launch, room: Room) -> None:
        self._label = label
        memory = create_memory(room)
        link = self.link = Link(memory, room, [memory])
        link.instance = instance
        for _ in range(2):
            link.fds.append(new_bell())
        link.bell = Bell(link.fds[1], link.asker_asleep)
        link.other = Bell(link.fds[2], link.answerer_asleep)
        self._process = launch(link.fds)
        self.is_open = True
        self.pid = self._process.pid
        self._poller = select.poll()
        self._poller.register(link.bell.fd, select.POLLIN)
        self._has_pidfd = False
        with suppress(AttributeError, OSError):  # not supported by the system
            pidfd = os.pidfd_open(self.pid)
            link.fds.append(pidfd)
            self._poller.register(pidfd, select.POLLIN)
            self._has_pidfd = True

    def sleep(self, seconds: float) -> bool:
        """Sleep until there is an answer, or for ``seconds``; returns whether the process has ended."""
        link = self.link
        ready = link.bell.sleep(self._poller, link.has_answers, max(0.0, min(seconds, SLEEP_SECONDS)))
        return bool(ready) or (not self._has_pidfd and _has_ended(self.pid))

    def set_up(self, setup: Any, seconds: float | None, read: Read | None = None) -> Any:
        """Set the child up and return its answer; kill it if this fails."""
        try:
            return self.exchange(SET_UP, setup, seconds, read)
        except BaseException:
            self.kill()
            raise

    def exchange(self, kind: int, message: Any, seconds: float | None, read: Read | None = None) -> Any:
        """Send a call while no ``Pool`` uses the child, and wait for the answer; raises the child's failure.

        Raises ``WorkerDied`` if the process ends first, or if it takes longer than ``seconds`` and is killed.
        """
        link = self.link
        slot, number = link.take_slot(None)
        link.ask(slot, number, Packed.of(message), kind, perf_counter(), inf)
        link.other.ring()
        end = inf if seconds is None else perf_counter() + seconds
        while slot not in link.take_answered():
            if perf_counter() >= end:
                raise self.overdue(seconds)
            if self.sleep(end - perf_counter()) and not link.has_answers():
                raise self.died()
        header = link.reply(slot)
        answer = link.read(slot, header, copies=True) if read is None else read(link, slot, header)
        link.free_slot(slot)
        if header.kind == FAILED and read is None:
            raise answer.error()
        return answer

    def died(self) -> WorkerDied:
        """The error that describes how it ended."""
        return WorkerDied(f"{self._label}: its worker process {self.pid} died: {describe_ending(self.kill())}")

    def overdue(self, seconds: Any) -> WorkerDied:
        """Kill it; the error reports that it took too long."""
        return self.ended(f"took longer than {seconds:g} s")

    def ended(self, reason: str) -> WorkerDied:
        """Kill it; the error gives the reason."""
        self.kill()
        return WorkerDied(f"{self._label}: its worker process {self.pid} {reason} and was ended")

    def close(self) -> None:
        """Let it close its backend and end; an error is raised after everything is released."""
        if self.is_open:
            try:
                self.exchange(CLOSE, None, CLOSE_SECONDS)
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(CLOSE_SECONDS)
            except WorkerDied:
                pass
            finally:
                self.kill()

    def kill(self) -> int | None:
        """Kill the process if it still runs; returns its exit status. May be called twice."""
        self.is_open = False
        self._process.kill()
        return self._process.wait()


class Keeper:
    """Keeps a child process running for a pool and replaces it if it dies; used on one thread, which starts them.

    ``start`` starts one that is ready for calls. ``max_seconds``: a child whose call takes longer is killed; 0 means no
    limit.
    """

    def __init__(self, label: str, pool: Pool, start: Callable[[], Child], max_seconds: float) -> None:
        self._label, self.pool, self._start, self.max_seconds = label, pool, start, max_seconds
        self.child: Child | None = None

    def enter(self, child: Child) -> None:
        """Let this child take the pool's calls from now on."""
        self.child = child
        self.pool.add(child.link)

    def move(self, pool: Pool) -> None:
        """Let the child, which must be idle, take the calls of another pool from now on."""
        child, self.pool = self.leave(), pool
        if child is not None:
            self.enter(child)

    def call(self, packed: Packed, kind: int) -> Any:
        """Run a call in the pool, which no other thread may use, and wait for its outcome; raises its error."""
        told: list[Any] = []
        call = Call(packed, kind, lambda *outcome: told.append(outcome))
        self.pool.ask(call)
        self.serve(lambda: call.is_over, waiting)
        if told[0][0] is not None:
            raise told.pop()[0]  # NOTE: a variable would form a cycle with this frame, and keep the link alive
        return told[0][1]

    def serve(
        self, is_over: Callable[[], bool], starting: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        """Take the child's answers until ``is_over()``; if it dies, start another one inside ``starting()``."""
        pool = self.pool
        while not is_over():
            child = self.child
            if child is None:
                with starting():
                    self._restart(is_over)
                continue
            try:
                if child.link.has_answers():
                    pool.take(child.link)
                    continue
                left, since = SLEEP_SECONDS, child.link.since
                if self.max_seconds and since:
                    left = since + self.max_seconds - perf_counter()
                if left <= 0:
                    self._lose(child.overdue(self.max_seconds), is_at_fault=True)
                elif child.sleep(left) and not child.link.has_answers():
                    self._lose(child.died())
            except GarbledError as error:
                self._lose(child.ended(f"gave {error}"), is_at_fault=True)

    def is_idle(self) -> bool:
        """Whether the pool is closed and the child has finished its calls."""
        return self.pool.is_closed and (self.child is None or not self.child.link.under_way)

    def running_since(self) -> float:
        """When the child began its current call; 0.0 if it has none."""
        child = self.child
        return 0.0 if child is None else child.link.since

    def leave(self) -> Child | None:
        """Stop giving calls to the child, which must be idle, and return it."""
        child, self.child = self.child, None
        if child is not None:
            self.pool.remove(child.link)
        return child

    def _lose(self, error: WorkerDied, is_at_fault: bool = False) -> None:
        child, self.child = self.child, None
        if child is not None:
            self.pool.lose(child.link, error, is_at_fault)

    def _restart(self, is_over: Callable[[], bool]) -> None:
        """Start a child to replace a dead one; if no child is left for any call, waiting calls fail."""
        pool, reason = self.pool, None
        for _ in range(LOSSES):
            try:
                self.enter(self._start())
                return
            except Exception as error:
                reason = error
        assert reason is not None
        died = WorkerDied(f"{self._label}: its worker process cannot be started again: {first_line(reason)}")
        died.__cause__ = reason
        if not pool.links:
            pool.fail_waiting(died)
        with pool.changed:
            seconds = _RETRY_SECONDS if pool.links else None
            pool.changed.wait_for(lambda: is_over() or (pool.is_waiting() and not pool.links), seconds)


def _has_ended(pid: int) -> bool:
    """Whether a process that was not yet waited for has ended, for systems without process descriptors."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except OSError:
        return True
