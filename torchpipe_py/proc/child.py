"""Child processes, seen from their parent: how they are started, how they talk, how their end is noticed."""

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
from errno import EMFILE, ENFILE, ENOMEM
from multiprocessing import connection, get_context, spawn
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from time import perf_counter, sleep
from typing import Any, Protocol

from torchpipe_py.errors import WorkerDied

# First set the path, so that nothing is imported from the working directory; then handle Ctrl-C, which it gets too.
_PROGRAM = r"""
import sys
sys.path[:] = sys.argv[1].split("\n")
import signal
signal.signal(signal.SIGINT, lambda *_: None)
from importlib import import_module
import_module(sys.argv[2]).main(*map(int, sys.argv[3:]))
"""

_CLOSED_SECONDS = 1.0  # from the end of a channel to the end of its process
_LOOK_SECONDS = 0.01  # between two looks, on a system that cannot report the end of a process
_EXHAUSTED = (EMFILE, ENFILE, ENOMEM)
_PF_EXITING = 4  # of the flags in /proc/PID/stat


class Running(Protocol):
    """The handle of a started process: a ``Popen``, ``Joined``, or one forked by a ``Zygote``."""

    @property
    def pid(self) -> int: ...

    def kill(self) -> object:
        """Kill the process."""

    def wait(self, timeout: float | None = None) -> int | None:
        """The exit status (negative for a signal) of a process that has ended or was killed; ``None`` if unknown."""


class Joined:
    """The handle of a process that ``multiprocessing`` has started."""

    def __init__(self, process: BaseProcess) -> None:
        assert process.pid is not None
        self.pid, self._process = process.pid, process

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        return self._process.exitcode


class SessionLeader:
    """The handle of a process that ends with all processes that it has started."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.pid, self._process = process.pid, process

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int | None:
        self.kill()  # NOTE: before it is reaped: from then on its id may be that of another process
        return self._process.wait(timeout)


class ChildProcess:
    """A started process, from its start to its end; its owner calls ``end`` or ``release``.

    ``name`` is its name in messages, ``channel`` its parent's end of a connection for messages, if it has one. Its end
    is noticed at once, even while a program that it has started holds the channel open.
    """

    def __init__(self, name: str, handle: Running, channel: Connection | None = None) -> None:
        """Own the process; if no descriptor is left for that, it is killed and ``OSError`` raised."""
        self.name, self.pid, self.channel = name, handle.pid, channel
        self._handle = handle
        self._status: int | None = None
        self.is_released = False
        self._pidfd = -1
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except (AttributeError, OSError) as error:
            if isinstance(error, OSError) and error.errno in _EXHAUSTED:
                self.end()
                raise
            # The system does not support it.

    @classmethod
    def fork(cls, name: str, main: Callable[..., object], *args: Any) -> ChildProcess:
        """Fork this process, which must have no other thread; the child calls ``main(channel, *args)``.

        ``OSError`` if the system lacks descriptors, memory or processes.
        """
        context = get_context("fork")
        ours, theirs = context.Pipe()
        keep_from_forks(ours)
        with theirs:  # NOTE: closed before the next fork, which would keep the channel open
            try:
                process = context.Process(target=main, args=(theirs, *args), name=name, daemon=True)
                process.start()
            except BaseException:
                ours.close()
                raise
        return cls(name, Joined(process), ours)

    @classmethod
    def spawn(cls, name: str, module: str, leads_session: bool = False) -> ChildProcess:
        """Start an interpreter that calls ``main(descriptor of its channel, id of this process)`` of the module.

        ``leads_session``: processes that it starts end with it. ``OSError`` as for ``fork``.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                fds = [theirs.fileno()]
                process = start_interpreter(module, fds, os.getpid(), start_new_session=leads_session)
            except BaseException:
                ours.close()
                raise
        channel = Connection(ours.detach())
        keep_from_forks(channel)
        return cls(name, SessionLeader(process) if leads_session else process, channel)

    def fileno(self) -> int:
        """A descriptor that is readable once the process has ended; -1 if the system does not support it."""
        return self._pidfd

    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self.wait(0.0)

    def is_ending(self) -> bool:
        """Whether it has ended or is about to: the system first closes its descriptors, then reports its end."""
        return self.has_ended() or _is_exiting(self.pid)

    def wait(self, seconds: float) -> bool:
        """Wait until the process has ended, for at most ``seconds``; returns whether it has."""
        if self.is_released:
            return True
        if self._pidfd >= 0:
            poller = select.poll()
            poller.register(self._pidfd, select.POLLIN)
            return bool(poller.poll(1000 * seconds))
        until = perf_counter() + seconds
        while not _is_zombie(self.pid):
            if perf_counter() >= until:
                return False
            sleep(_LOOK_SECONDS)
        return True

    def send(self, message: Any) -> None:
        """Send a message; ``WorkerDied`` if the process no longer reads."""
        assert self.channel is not None
        try:
            self.channel.send(message)
        except OSError:
            raise self._no_answer() from None

    def receive(self, seconds: float | None = None) -> Any:
        """The next message; ``WorkerDied`` if the process ends first, ``TimeoutError`` after ``seconds``."""
        assert self.channel is not None
        if not connection.wait([self.channel, *([self._pidfd] if self._pidfd >= 0 else [])], seconds):
            raise TimeoutError(f"{self.name} {self.pid} has not answered for {seconds:g} s")
        try:
            if self.channel.poll():
                return self.channel.recv()
        except (EOFError, OSError):
            pass
        raise self._no_answer()

    def kill(self) -> None:
        """Kill the process, unless it has ended."""
        if self._pidfd < 0:
            if not self.is_released:
                self._handle.kill()
            return
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def exit_status(self, seconds: float | None = None) -> int | None:
        """The exit status (negative for a signal) of a process that has ended; ``None`` if it is not known yet."""
        if self._status is None:
            self._status = self._handle.wait(seconds)
        return self._status

    def release(self) -> None:
        """Close the descriptors of a process that has ended or was killed."""
        self.is_released = True
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)
        if self.channel is not None:
            self.channel.close()

    def end(self, grace: float = 0.0) -> int | None:
        """Wait until the process has ended, kill it after ``grace`` seconds, and release it. May be called again.

        Returns its exit status.
        """
        if not self.is_released:
            if not self.wait(grace):
                self.kill()
            self.exit_status()
            self.release()
        return self._status

    def kill_and_describe(self, reason: str = "") -> WorkerDied:
        """End the process; the error gives the reason or, without one, how it has ended by itself."""
        status = self.end()
        what = f"{reason} and was ended" if reason else f"died: {describe_ending(status)}"
        return WorkerDied(f"{self.name} {self.pid} {what}")

    def _no_answer(self) -> WorkerDied:
        has_ended = self.wait(_CLOSED_SECONDS)
        how = f"died: {describe_ending(self.exit_status())}" if has_ended else "has closed its channel"
        return WorkerDied(f"{self.name} {self.pid} {how}")


def start_interpreter(module: str, fds: list[int], *more: int, **options: Any) -> subprocess.Popen[bytes]:
    """Start an interpreter like this one, which calls ``main`` of the module with these numbers."""
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    command = [os.fsdecode(spawn.get_executable()), *flags, "-c", _PROGRAM, import_path(), module]
    return subprocess.Popen([*command, *map(str, (*fds, *more))], pass_fds=fds, **options)


# Process-wide, because a fork affects the whole process.
_kept: weakref.WeakSet[socket.socket | Connection] = weakref.WeakSet()


def keep_from_forks(sock: socket.socket | Connection) -> None:
    """Close the socket in forked processes, so that the other end notices when this process ends."""
    _kept.add(sock)


def _after_fork() -> None:
    for sock in list(_kept):
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


def _is_zombie(pid: int) -> bool:
    """Whether a process that was not yet waited for has ended."""
    try:
        return _stat(pid)[0] in (b"Z", b"X")
    except OSError:
        return True


def _is_exiting(pid: int) -> bool:
    """Whether the system is ending a process that was not yet waited for."""
    try:
        return bool(int(_stat(pid)[6]) & _PF_EXITING)
    except OSError:
        return True


def _stat(pid: int) -> list[bytes]:
    """The fields of ``/proc/PID/stat`` after the name; ``OSError`` if the process is gone."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()
