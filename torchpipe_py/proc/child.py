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
from contextlib import suppress
from math import inf
from multiprocessing import spawn
from time import perf_counter
from typing import Any, Protocol

from torchpipe_py.errors import WorkerDied
from torchpipe_py.proc.codec import Packed
from torchpipe_py.proc.link import CLOSE, FAILED, SLEEP_SECONDS, Bell, Header, Link, Room, create_memory, new_bell

CLOSE_SECONDS = 5.0
"""What a child has for its backend's close."""

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

    def __init__(self, label: str, launch: Launch, room: Room) -> None:
        self._label = label
        memory = create_memory(room)
        link = self.link = Link(memory, room, [memory])
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

    def exchange(
        self, kind: int, message: Any, seconds: float | None, read: Callable[[Link, int, Header], Any] | None = None
    ) -> Any:
        """Ask while no ``Pool`` has it, and wait for the answer; a failure there is raised here.

        ``WorkerDied`` where the process ends first, or is ended because it takes longer than that.
        """
        link = self.link
        slot, number = link.take_slot(None)
        link.ask(slot, number, Packed.of(message), kind, perf_counter(), inf)
        link.other.ring()
        end = inf if seconds is None else perf_counter() + seconds
        while not link.has_answers():
            if perf_counter() >= end:
                raise self.overdue(seconds)
            if self.sleep(end - perf_counter()) and not link.has_answers():
                raise self.died()
        [slot] = link.take_answered()
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


def _has_ended(pid: int) -> bool:
    """Whether a process that nobody has waited for is gone, where the system has no descriptor for that."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except OSError:
        return True
