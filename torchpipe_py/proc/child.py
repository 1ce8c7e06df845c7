"""A child process as its parent sees it: how it is started, the link to it, and how it ends."""

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
"""What a child has for its backend's close."""

_RETRY_SECONDS = 1.0  # after which a child that could not be started is tried again, while others run

# The path comes first, so that nothing is imported from the working directory; then Ctrl-C, which reaches it too.
_PROGRAM = r"""
import sys
sys.path[:] = sys.argv[1].split("\n")
import signal
signal.signal(signal.SIGINT, lambda *_: None)
from importlib import import_module
import_module(sys.argv[2]).main(*map(int, sys.argv[3:]))
"""


class Running(Protocol):
    """A process that was started: a ``Popen``, or one that a ``Zygote`` has forked."""

    @property
    def pid(self) -> int: ...

    def kill(self) -> None:
        """End it."""

    def wait(self, timeout: float | None = None) -> int | None:
        """Its exit status, less than 0 for a signal, once it has ended; ``None`` where that cannot be known."""


Read = Callable[[Link, int, Header], Any]
"""Reads an answer that is not pickled."""

Launch = Callable[[list[int]], Running]
"""Starts a process that has the descriptors of a link: its memory, its asker's bell, and its answerer's."""


def launch(fds: list[int]) -> subprocess.Popen[bytes]:
    """Start a process that runs ``worker.main``; it ends with the thread that starts it."""
    return start_interpreter("torchpipe_py.proc.worker", fds, os.getpid(), stdin=subprocess.DEVNULL)


def start_interpreter(module: str, fds: list[int], *more: int, **options: Any) -> subprocess.Popen[bytes]:
    """Start another interpreter like this one, which calls ``main`` of the module with these numbers."""
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    command = [os.fsdecode(spawn.get_executable()), *flags, "-c", _PROGRAM, import_path(), module]
    return subprocess.Popen([*command, *map(str, (*fds, *more))], pass_fds=fds, **options)


# Process-wide, since a fork is.
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def keep_from_forks(sock: socket.socket) -> None:
    """A process that a backend forks does not hold it open: the other end hears when this process has ended."""
    _sockets.add(sock)


def _after_fork() -> None:
    for sock in list(_sockets):
        sock.close()


os.register_at_fork(after_in_child=_after_fork)


def import_path() -> str:
    """``sys.path`` for a child process, a folder a line.

    Only absolute ones, so that nothing is imported from the working directory, wherever that is.
    """
    paths = [path for path in sys.path if isinstance(path, str) and os.path.isabs(path)]
    # TRAP: while another thread imports cv2, that has its own folder in front of the others, where a `typing` lies.
    file = getattr(sys.modules.get("cv2"), "__file__", None)
    if file:
        folder = os.path.join(os.path.dirname(os.path.realpath(file)), "")
        paths = [path for path in paths if not os.path.join(path, "").startswith(folder)]
    return "\n".join(paths)


def describe_ending(status: int | None) -> str:
    """How a process ended, from its exit status, which is less than 0 for a signal."""
    if status is None:
        return "its exit status is unknown"
    if status >= 0:
        return f"exit status {status}"
    names = {number.value: number.name for number in signal.Signals}
    return f"killed by signal {-status} ({names.get(-status, 'unknown')})"


class Child:
    """A child process and the ``link`` to it, from whose other end it answers; used from one thread."""

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
        with suppress(AttributeError, OSError):  # a system without it
            pidfd = os.pidfd_open(self.pid)
            link.fds.append(pidfd)
            self._poller.register(pidfd, select.POLLIN)
            self._has_pidfd = True

    def sleep(self, seconds: float) -> bool:
        """Sleep until there is an answer, or so long; whether the process has ended."""
        link = self.link
        ready = link.bell.sleep(self._poller, link.has_answers, max(0.0, min(seconds, SLEEP_SECONDS)))
        return bool(ready) or (not self._has_pidfd and _has_ended(self.pid))

    def set_up(self, setup: Any, seconds: float | None, read: Read | None = None) -> Any:
        """What it says once it is ready; it is ended where that fails."""
        try:
            return self.exchange(SET_UP, setup, seconds, read)
        except BaseException:
            self.kill()
            raise

    def exchange(self, kind: int, message: Any, seconds: float | None, read: Read | None = None) -> Any:
        """Ask while no ``Pool`` has it, and wait for the answer; a failure there is raised here.

        ``WorkerDied`` where the process ends first, or is ended because it takes longer than that.
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
        """How it has ended."""
        return WorkerDied(f"{self._label}: its worker process {self.pid} died: {describe_ending(self.kill())}")

    def overdue(self, seconds: Any) -> WorkerDied:
        """End it, and say that it took too long."""
        return self.ended(f"took longer than {seconds:g} s")

    def ended(self, reason: str) -> WorkerDied:
        """End it, and say why."""
        self.kill()
        return WorkerDied(f"{self._label}: its worker process {self.pid} {reason} and was ended")

    def close(self) -> None:
        """Let it close its backend and end; an error of that is raised once everything is released."""
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
        """End the process if it still runs; its exit status. Twice is allowed."""
        self.is_open = False
        self._process.kill()
        return self._process.wait()


class Keeper:
    """Has a child process for a pool, and another one where that dies; on one thread, which starts them.

    ``start`` starts one, ready for calls. ``max_seconds``: a call that takes longer costs the child; 0 is any time.
    """

    def __init__(self, label: str, pool: Pool, start: Callable[[], Child], max_seconds: float) -> None:
        self._label, self.pool, self._start, self.max_seconds = label, pool, start, max_seconds
        self.child: Child | None = None

    def enter(self, child: Child) -> None:
        """This one takes the pool's calls from now on."""
        self.child = child
        self.pool.add(child.link)

    def move(self, pool: Pool) -> None:
        """The child, which is at nothing, takes the calls of another pool from now on."""
        child, self.pool = self.leave(), pool
        if child is not None:
            self.enter(child)

    def call(self, packed: Packed, kind: int) -> Any:
        """Have a call run by a pool that no other thread has, and wait for its outcome; its error is raised."""
        told: list[Any] = []
        call = Call(packed, kind, lambda *outcome: told.append(outcome))
        self.pool.ask(call)
        self.serve(lambda: call.is_over, waiting)
        if told[0][0] is not None:
            raise told.pop()[0]  # NOTE: a variable and this frame would keep each other, and the link
        return told[0][1]

    def serve(
        self, is_over: Callable[[], bool], starting: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        """Take the answers of the child, and start another one, inside ``starting()``, where it dies; until then."""
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
        """Whether the pool is closed, and the child has ended its calls."""
        return self.pool.is_closed and (self.child is None or not self.child.link.under_way)

    def running_since(self) -> float:
        """When the call was begun that the child is at; 0.0 where it has none."""
        child = self.child
        return 0.0 if child is None else child.link.since

    def leave(self) -> Child | None:
        """The child, which is at nothing, takes calls no more."""
        child, self.child = self.child, None
        if child is not None:
            self.pool.remove(child.link)
        return child

    def _lose(self, error: WorkerDied, is_at_fault: bool = False) -> None:
        child, self.child = self.child, None
        if child is not None:
            self.pool.lose(child.link, error, is_at_fault)

    def _restart(self, is_over: Callable[[], bool]) -> None:
        """A child in place of one that has died; where there is none for any call, those that wait fail."""
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
    """Whether a process that nobody has waited for is gone, where the system has no descriptor for that."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except OSError:
        return True
