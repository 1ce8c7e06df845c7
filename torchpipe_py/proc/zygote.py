"""A process that imports the libraries of a node's decoders, and from which these are forked: both sides of it."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from typing import Any, NamedTuple

from torchpipe_py.encryption.keys import without_keys
from torchpipe_py.errors import DecodeError, Failure, WorkerDied, first_line, logger
from torchpipe_py.keys import TASK_DATA_KEY
from torchpipe_py.proc import raw
from torchpipe_py.proc.child import keep_from_forks, start_interpreter
from torchpipe_py.proc.codec import Packed
from torchpipe_py.proc.confine import confine, end_with_parent, limit_memory
from torchpipe_py.proc.link import SET_UP, Header
from torchpipe_py.proc.setup import Setup
from torchpipe_py.proc.worker import Answerer, make_backend, prepare

START_SECONDS = 120.0
"""Time limit for importing the libraries of its decoders."""
ANSWER_SECONDS = 5.0
"""Time limit for forking or ending a decoder, after which the process is replaced."""

_MAX_MESSAGE = 2**16
# Decode these first, so that lazy imports happen while files can still be opened.
_TRIALS = (b"", b"BM:\0\0\0\0\0\0\x006\0\0\0(\0\0\0\1\0\0\0\1\0\0\0\1\0\x18\0\0\0\0\0\4" + bytes(23))


class Limits(NamedTuple):
    """Limits of a decoder for each image: seconds; MiB of encoded bytes, of pixels, and of memory for decoding."""

    seconds: float
    mebibytes: int


class Zygote:
    """Forks decoders within milliseconds, while a new process would import for half a second; thread-safe.

    Its process starts with the first decoder, is replaced if it dies, and ends when its last user leaves. Its decoders
    die with it, and it dies with this process.
    """

    def __init__(self, label: str, setup: Setup) -> None:
        self._label, self._setup = label, setup
        self._lock = threading.Lock()
        self._users = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket

    def enter(self) -> None:
        """Add a user."""
        with self._lock:
            self._users += 1

    def leave(self) -> None:
        """Remove a user; with the last one the process ends."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._stop()

    def fork(self, instance: int, limits: Limits, fds: list[int]) -> Forked:
        """Fork a decoder that has ``fds``; raises ``WorkerDied`` if that fails, or an exception from starting it."""
        with self._lock:
            try:
                process = self._process or self._start()
                return Forked(self, process, self._ask((instance, limits), fds))
            except OSError as error:  # the next decoder comes from a new process
                raise WorkerDied(f"{self._label}: no decoder can be forked: {first_line(error)}") from error

    def end(self, decoder: Forked) -> int | None:
        """Kill a decoder unless it has died; its exit status (negative for a signal), or ``None`` if unknown."""
        with self._lock:
            if self._process is not decoder.zygote_process:
                return None  # the decoder died with its zygote
            with contextlib.suppress(OSError):
                return self._ask(decoder.pid, [])
            return None

    def _start(self) -> subprocess.Popen[bytes]:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        keep_from_forks(self._control)
        with theirs:
            self._process = start_interpreter(
                "torchpipe_py.proc.zygote",
                [theirs.fileno()],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                # Decoders must not have keys of models. Threads of OpenBLAS would not survive a fork.
                env={**without_keys(os.environ), "OPENBLAS_NUM_THREADS": "1"},
            )
        assert self._process.stdin is not None
        self._control.settimeout(START_SECONDS)
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            pickle.dump(self._setup, stdin)
        self._receive()
        self._control.settimeout(ANSWER_SECONDS)
        return self._process

    def _ask(self, order: Any, fds: list[int]) -> int:
        """The answer of the process; if there is none, kills the process and raises ``OSError``."""
        try:
            socket.send_fds(self._control, [pickle.dumps(order)], fds)
        except OSError:
            self._stop()
            raise
        return int(self._receive())

    def _receive(self) -> Any:
        try:
            packed = self._control.recv(_MAX_MESSAGE)
            if not packed:
                raise ConnectionResetError("the process that forks decoders has died")
        except BaseException:
            self._stop()
            logger.warning("%s: the process that its decoders are forked from does not answer", self._label)
            raise
        answer = pickle.loads(packed)
        if isinstance(answer, Failure):
            self._stop()
            raise answer.error()
        return answer

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            self._control.close()


class Forked(NamedTuple):
    """A decoder's process, as a ``Running``, and the process that it was forked from."""

    zygote: Zygote
    zygote_process: subprocess.Popen[bytes]
    pid: int

    def kill(self) -> None:
        """Does nothing; ``wait`` kills it: only its parent can be sure that the process id is still the decoder's."""

    def wait(self, timeout: float | None = None) -> int | None:
        return self.zygote.end(self)


# -- the process itself -----------------------------------------------------------------------------------------------


def main(control_fd: int) -> None:
    """Read a pickled ``Setup`` from standard input, report whether it works, and fork decoders until the parent ends.

    ``control_fd`` is a socket that preserves message boundaries.
    """
    prepare(control_fd)
    control = socket.socket(fileno=control_fd)
    try:
        setup: Setup = pickle.load(sys.stdin.buffer)
        trial = make_backend(setup)
        trial.setup()  # its imports are done before the first fork
        trial.close()
    except BaseException as error:
        control.send(_failure(error))
        return
    cv2: Any = sys.modules.get("cv2")
    if cv2 is not None:
        cv2.setNumThreads(1)  # a thread would not survive the fork, and the instances are the parallelism
    gc.collect()
    gc.freeze()
    control.send(pickle.dumps(None))
    while True:
        message, fds, _, _ = socket.recv_fds(control, _MAX_MESSAGE, 3)
        if not message:
            return
        order = pickle.loads(message)
        try:
            answer = pickle.dumps(_kill(order) if isinstance(order, int) else _fork(control, setup, order, fds))
        except OSError as error:
            answer = _failure(error)
        for fd in fds:
            os.close(fd)
        control.send(answer)


def _fork(control: socket.socket, setup: Setup, order: tuple[int, Limits], fds: list[int]) -> int:
    zygote = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            end_with_parent(zygote)
            control.close()  # NOTE: before any client's bytes arrive, since its messages are unpickled
            instance, limits = order
            _Decoder(replace(setup, config=replace(setup.config, instance=instance)), fds, *limits).run()
        finally:
            os._exit(1)
    return pid


def _kill(pid: int) -> int:
    """Kill the decoder, unless it has died by itself; returns its exit status."""
    try:
        os.kill(pid, signal.SIGKILL)  # still the same process, since this one has not waited for it yet
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except (ProcessLookupError, ChildProcessError):
        return 0


def _failure(error: BaseException) -> bytes:
    failure = Failure.of(error)
    packed = pickle.dumps(failure)
    return packed if len(packed) < _MAX_MESSAGE else pickle.dumps(replace(failure, trace="", pickled=b""))


class _Decoder(Answerer):
    """Sets up its backend and confines itself on the first call, then decodes an image on each call."""

    def __init__(self, setup: Setup, fds: list[int], seconds: float, mebibytes: int) -> None:
        super().__init__(*fds)
        self._fds, self._seconds, self._mebibytes = fds, math.ceil(seconds), mebibytes
        self._backend = make_backend(setup)

    def answer(self, header: Header, slot: int) -> Packed:
        item: dict[str, Any] = {}
        try:
            if header.kind == SET_UP:
                return self._set_up()
            _limit_cpu(self._seconds)
            item[TASK_DATA_KEY] = raw.encoded_in(self.link, slot, header).tobytes()
            self._backend.forward([item])
            return raw.pack_answer(item, self._mebibytes * 2**20)
        except MemoryError:
            problem = DecodeError(f"needs more than max_memory = {self._mebibytes} MiB")
            return raw.pack_error(problem, raised=False)
        except Exception as error:
            return raw.pack_error(error, raised=True)

    def _set_up(self) -> Packed:
        self._backend.setup()
        for trial in _TRIALS:
            with contextlib.suppress(Exception):
                self._backend.forward([{TASK_DATA_KEY: trial}])
        limit_memory(self._mebibytes)
        is_filtered = confine({0, 1, 2, *self._fds[1:]})
        return raw.pack_error(raw.FILTERED if is_filtered else "unfiltered", raised=False)


def _limit_cpu(seconds: int) -> None:
    """Let the system kill this process if one image takes more CPU time, even if the parent no longer watches it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    limit = int(used.ru_utime + used.ru_stime) + seconds + 1
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))
