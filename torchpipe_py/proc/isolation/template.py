"""The process that the decoders of a node are forked from, as their worker sees it."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing import spawn
from time import monotonic
from typing import Any

from torchpipe_py.encryption.keys import without_keys
from torchpipe_py.errors import Failure, WorkerDied, first_line
from torchpipe_py.proc.isolation.child import ANSWER, END, FORK
from torchpipe_py.proc.process.interpreter import import_path, interpreter_flags, is_stopped

logger = logging.getLogger("torchpipe_py")

START_SECONDS = 120.0
"""In which it imports what its decoders need."""
POLL_SECONDS = 0.5
"""How often it is looked whether a process that starts was stopped."""
ANSWER_SECONDS = 5.0
"""In which it forks or ends a decoder; it is replaced where it does not."""

# The path comes first, so that nothing is imported from the working directory.
_PROGRAM = r"""
import sys
sys.path[:] = sys.argv[1].split("\n")
from torchpipe_py.proc.isolation.child import main
main(*map(int, sys.argv[2:]))
"""
_MAX_MESSAGE = 65536


@dataclass(frozen=True)
class Forked:
    """A decoder's process, and which start of the template it is a child of."""

    pid: int
    start: int


class Template:
    """Forks decoders within milliseconds, where a new process would import for half a second; used by any thread.

    It is started when the first decoder is wanted, again where it has died, and ended when its last user leaves.
    Its decoders die with it. ``setup`` is a pickled ``Setup``.
    """

    def __init__(self, label: str, setup: bytes) -> None:
        self._label, self._setup = label, setup
        self._lock = threading.Lock()
        self._users = self._starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._is_stopped = threading.Event()  # the process, for the thread that has started it
        self._launcher: threading.Thread | None = None

    def enter(self) -> None:
        """One more user."""
        with self._lock:
            self._users += 1

    def leave(self) -> None:
        """One user less; with the last the process ends."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._stop()

    def fork(self, fds: list[int], instance: int, capacity: int, seconds: int, mebibytes: int) -> Forked:
        """Fork a decoder that has ``fds``; ``WorkerDied`` where that cannot be done, or what starting raises."""
        message = FORK.pack(b"f", instance, capacity, seconds, mebibytes)
        with self._lock:
            attempts = 1 if self._process is None else 2  # it may have died, unnoticed
            for attempt in range(attempts):
                try:
                    pid = self._ask(message, fds)
                    break
                except OSError as error:
                    if attempt + 1 == attempts:
                        problem = f"the process that forks decoders: {first_line(error)}"
                        raise WorkerDied(f"{self._label}: {problem}") from error
            if pid < 0:
                raise WorkerDied(f"{self._label}: no decoder can be started: {os.strerror(-pid)}")
            return Forked(pid, self._starts)

    def end(self, decoder: Forked) -> int | None:
        """Kill a decoder unless it has died; its exit status, less than 0 for a signal, as far as that can be known."""
        with self._lock:
            if self._process is None or decoder.start != self._starts:
                return None
            try:
                return self._ask(END.pack(b"e", decoder.pid), [])
            except OSError:
                return None

    def _ask(self, message: bytes, fds: list[int]) -> int:
        """The answer of the process; ``OSError`` where there is none, and no process any more."""
        control = self._control or self._start()
        try:
            socket.send_fds(control, [message], fds)
            (answer,) = ANSWER.unpack(receive(control, ANSWER.size))
        except BaseException as error:
            self._stop()
            if isinstance(error, OSError):
                logger.warning("%s: the process that its decoders are forked from does not answer", self._label)
            raise
        return int(answer)

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._starts += 1
        self._control = ours
        executable = os.fsdecode(spawn.get_executable())
        numbers = (str(theirs.fileno()), str(os.getpid()))
        try:
            with theirs:
                command = [executable, *interpreter_flags(), "-c", _PROGRAM, import_path(), *numbers]
                self._process = self._launch(command, theirs)
            assert self._process.stdin is not None
            with self._process.stdin as stdin:
                stdin.write(self._setup)
            told = json.loads(first_message(ours, START_SECONDS, self._process.pid))
            ours.settimeout(ANSWER_SECONDS)
        except BaseException:
            self._stop()
            raise
        if "failure" in told:
            self._stop()
            raise failure_of(told)
        return ours

    def _launch(self, command: list[str], theirs: socket.socket) -> subprocess.Popen[bytes]:
        """Start the process on a thread that stays until it is stopped.

        NOTE: the system ends the process with the thread that has started it, and that of an instance, at the end of a
        pipe, may be through before the others' decoders are.
        """
        launched: Future[subprocess.Popen[bytes]] = Future()
        self._is_stopped = is_stopped = threading.Event()

        def run() -> None:
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    # What decodes has no key of a model. Threads of OpenBLAS would not survive a fork.
                    env={**without_keys(os.environ), "OPENBLAS_NUM_THREADS": "1"},
                )
            except BaseException as error:
                launched.set_exception(error)
            else:
                launched.set_result(process)
                is_stopped.wait()

        launcher = threading.Thread(target=run, name="torchpipe_py template", daemon=True)
        launcher.start()
        self._launcher = launcher
        return launched.result()

    def _stop(self) -> None:
        control, self._control = self._control, None
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
        self._is_stopped.set()
        if self._launcher is not None:
            self._launcher.join()
            self._launcher = None
        if control is not None:
            control.close()


def first_message(sock: socket.socket, seconds: float, pid: int) -> bytes:
    """What a process says once it is ready; ``OSError`` as soon as it is dead or stopped, or ``seconds`` are over."""
    sock.settimeout(POLL_SECONDS)
    end = monotonic() + seconds
    while True:
        try:
            return receive(sock, _MAX_MESSAGE)
        except TimeoutError:
            if is_stopped(pid):
                raise ConnectionResetError("it was stopped") from None
            if monotonic() > end:
                raise


def failure_of(told: dict[str, Any]) -> BaseException:
    """The exception that a process could not start for."""
    kind, name, message, trace = map(str, told["failure"])
    return Failure(kind, name, message, trace, b"").error()


def receive(sock: socket.socket, size: int) -> bytes:
    """The next message, of at most ``size`` bytes; ``OSError`` where nobody is at the other end."""
    packed = sock.recv(size)
    if not packed:
        raise ConnectionResetError("it has died")
    return packed
