"""A backend in a process of its own, and that process as its parent sees it."""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
from collections.abc import Hashable
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing import connection, spawn
from time import perf_counter
from typing import Any

from torchpipe_py.backends.base import Backend, BackendConfig, Data, Param, tensor_key
from torchpipe_py.backends.process.outcome import visible
from torchpipe_py.backends.process.setup import Setup, is_loading_main, main_source, pickle_plan
from torchpipe_py.backends.process.transport import Block, SharedMemoryChannel
from torchpipe_py.backends.signature import Signature
from torchpipe_py.errors import BackendUnavailable, ConfigError, Failure, WorkerDied, first_line
from torchpipe_py.images.memory import waiting
from torchpipe_py.keys import TASK_DATA_KEY
from torchpipe_py.plan.binding import BackendPlan
from torchpipe_py.values import to_float, to_int

START_SECONDS = 60.0
"""In which a process that replaces another one is set up; the first may take as long as it wants."""

_CLOSE_TIMEOUT = 5.0  # seconds a worker has for its backend's close
_STARTS = 3

# The path comes first, so that nothing is imported from the working directory; then Ctrl-C, which reaches it too.
_PROGRAM = r"""
import sys
sys.path[:] = sys.argv[1].split("\n")
import signal
signal.signal(signal.SIGINT, lambda *_: None)
from torchpipe_py.backends.process.worker import main
main(*map(int, sys.argv[2:]))
"""


class Process(Backend):
    """Runs the backend in its brackets in a process of each instance's own, for Python code that holds the GIL.

    What the dict holds goes there and comes back as copies: large arrays, Tensors on the CPU and ``bytes`` through
    shared memory, everything else pickled. A value that cannot be pickled stays in the dict, unseen by the backend;
    ``TypeError`` where it is ``data``, or one that the backend wrote. A worker that dies fails the batch it had with
    ``WorkerDied``; the next one gets a new worker. Classes in the brackets must be importable from a module.
    """

    children = (1, 1)

    max_seconds = Param(
        to_float, 0.0, low=0, doc="seconds that a batch may take; then the process is ended and replaced; 0: any"
    )
    max_memory = Param(
        to_int, 0, low=0, high=2**24, doc="MiB that the process may take beyond what it has after setup; 0: any"
    )

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        self._colors: tuple[str | None, ...] = ()
        self._worker: WorkerProcess | None = None
        self._range, self._signature = (1, 1), Signature()

    def prefer_color(self, color: str | None) -> str | None:
        self._colors = (color,)
        return self.config.children[0].prefer_color(color)

    def setup(self) -> None:
        if not hasattr(select, "poll") or os.name != "posix":
            raise BackendUnavailable(f"{self.config.label} needs a POSIX system")
        if is_loading_main():
            raise ConfigError(
                f"{self.config.label}: a worker process imports the main script for a class that stands in it, and "
                'the script starts a pipe when imported: put that under `if __name__ == "__main__":`'
            )
        self._setup = self._describe()
        self._start()

    def forward(self, items: list[Data]) -> None:
        reason: BaseException | None = None
        starts = 0
        while starts < _STARTS:
            worker = self._worker
            if worker is None:
                starts += 1
                try:
                    with waiting():
                        worker = self._start(START_SECONDS)
                except Exception as error:
                    reason = error
                    continue
            try:
                self._forward(worker, items)
                return
            except WorkerDied as error:
                if worker.has_taken:
                    raise
                reason = error  # it died before it had the items: nothing is lost
        raise WorkerDied(
            f"{self.config.label}: its worker process cannot be started again: {first_line(reason)}"  # type: ignore[arg-type]
        ) from reason

    def close(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def max(self) -> int:
        return self._range[1]

    def min(self) -> int:
        return self._range[0]

    def signature(self) -> Signature:
        return self._signature

    def batch_key(self, item: Data) -> Hashable:
        try:
            return self.config.children[0].batch_key(item)
        except Exception:  # it needs what only setup gives it, and that was done elsewhere
            return tensor_key(item[TASK_DATA_KEY])

    def is_large(self, item: Data) -> bool:
        return self.config.children[0].is_large(item)

    def _describe(self) -> Setup:
        try:
            pickled = pickle_plan(BackendPlan.of(self.config.children[0]))
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"{self.config.label}: cannot go to a worker process: {first_line(error)}") from error
        return Setup(
            pickled,
            config=replace(self.config, params={}, children=(), filters=(), graphs=None),
            colors=self._colors,
            main=main_source(),
            argv=tuple(sys.argv),
            log_level=logging.getLogger("torchpipe_py").getEffectiveLevel(),
            max_memory=self.max_memory,
        )

    def _start(self, timeout: float | None = None) -> WorkerProcess:
        worker = WorkerProcess(self.config.label)
        try:
            self._range, self._signature = worker.call(worker.pack("setup", self._setup), timeout)
        except BaseException:
            worker.kill()
            raise
        self._worker = worker
        return worker

    def _forward(self, worker: WorkerProcess, items: list[Data]) -> None:
        sent = items
        try:
            packed = worker.pack("forward", items)
        except Exception:
            sent = [visible(item, self.config.label) for item in items]
            packed = worker.pack("forward", sent)
        try:
            outcomes = worker.call(packed, self.max_seconds or None)
        finally:
            if not worker.is_open:
                self._worker = None
        for item, of_it, outcome in zip(items, sent, outcomes, strict=True):
            outcome.apply(item, of_it)


class WorkerProcess:
    """A worker process and the only way to it; used from one thread."""

    def __init__(self, label: str) -> None:
        self._label = label
        self.is_open = True
        self.has_taken = False
        ours, theirs = connection.Pipe()
        with theirs, ExitStack() as undo:
            undo.callback(ours.close)
            outgoing = Block.create()
            undo.callback(outgoing.close)
            incoming = Block.create()
            undo.callback(incoming.close)
            # NOTE: what the worker writes into is what is read here, and the other way round.
            fds = (theirs.fileno(), incoming.fd, outgoing.fd)
            self._process = subprocess.Popen(
                [os.fsdecode(spawn.get_executable()), *interpreter_flags(), "-c", _PROGRAM, import_path()]
                + [str(number) for number in (*fds, os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=fds,
            )
            undo.pop_all()
        self._channel = SharedMemoryChannel(ours, outgoing, incoming)
        self._sentinel = _open_sentinel(self._process.pid)
        self._poller = select.poll()
        self._poller.register(ours, select.POLLIN)
        if self._sentinel is not None:
            self._poller.register(self._sentinel, select.POLLIN)
        self._answer_fd = ours.fileno()

    def pack(self, kind: str, value: Any) -> bytes:
        """A message for ``call``; raises whatever pickling raises."""
        return self._channel.pack((kind, value))

    def call(self, packed: bytes, timeout: float | None = None) -> Any:
        """Send, and wait for the answer; a failure there is raised here.

        ``WorkerDied`` where the process ends first, or is ended because ``timeout`` seconds are over; ``has_taken``
        then says whether the message was for it alone.
        """
        try:
            answer = self._exchange(packed, timeout)
        except (EOFError, OSError):
            raise self._died() from None
        except BaseException:
            self.kill()  # its answer to this must not be taken for one to the next
            raise
        if answer is None:
            self.has_taken = True
            self.kill()
            pid = self._process.pid
            raise WorkerDied(f"{self._label}: its worker process {pid} took longer than {timeout:g} s and was ended")
        try:
            kind, value = self._channel.unpack(answer)
        except Exception as error:
            raise TypeError(f"{self._label}: the answer of its worker process: {first_line(error)}") from error
        if kind == "failed":
            assert isinstance(value, Failure)
            raise value.error()
        return value

    def close(self) -> None:
        """Let the worker close its backend and end; an error of that is raised once everything is released."""
        failure: Any = None
        try:
            answer = self._exchange(self.pack("close", None), _CLOSE_TIMEOUT)
            if answer is not None:
                _, failure = self._channel.unpack(answer)
                self._wait(_CLOSE_TIMEOUT)
        except (EOFError, OSError):
            pass  # it is gone
        finally:
            self.kill()
        if isinstance(failure, Failure):
            raise failure.error()

    def kill(self) -> None:
        """End the process if it still runs, and release everything; twice is allowed."""
        if not self.is_open:
            return
        self.is_open = False
        self._process.kill()
        self._process.wait()
        if self._sentinel is not None:
            os.close(self._sentinel)
        self._channel.close()

    def _exchange(self, packed: bytes, timeout: float | None = None) -> bytes | None:
        """The answer; ``EOFError`` where the process ends first, ``None`` where ``timeout`` seconds pass."""
        self._channel.post(packed)
        ready = dict(self._poller.poll(None if timeout is None else 1000 * timeout))
        if not ready:
            return None
        if not ready.get(self._answer_fd, 0) & select.POLLIN:
            raise EOFError
        return self._channel.receive()

    def _died(self) -> WorkerDied:
        self.has_taken = self._channel.is_taken
        self._wait(1.0)  # the connection may end a moment before the process
        status = self._process.poll()
        self.kill()
        return WorkerDied(f"{self._label}: its worker process {self._process.pid} died: {describe_ending(status)}")

    def _wait(self, timeout: float) -> None:
        """Wait for the process to end, no longer than ``timeout`` seconds."""
        end = perf_counter() + timeout
        if self._sentinel is not None:
            poller = select.poll()
            poller.register(self._sentinel, select.POLLIN)
            poller.poll(1000 * timeout)
        try:
            self._process.wait(max(0.0, end - perf_counter()))
        except subprocess.TimeoutExpired:
            pass


def _open_sentinel(pid: int) -> int | None:
    """A descriptor that is readable when the process has ended, where the system has such a thing.

    The connection tells it too, unless a process that the worker has forked still holds the other end.
    """
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


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


def is_stopped(pid: int) -> bool:
    """Whether a process is held by a signal; ``False`` where the system does not tell."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except OSError:
        return False


def interpreter_flags() -> list[str]:
    """What makes another interpreter like this one."""
    return subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined,no-any-return]


def describe_ending(status: int | None) -> str:
    """How a process ended, from its exit status, which is less than 0 for a signal; ``None``: it has not."""
    if status is None:
        return "it closed its connection"
    if status >= 0:
        return f"exit status {status}"
    names = {number.value: number.name for number in signal.Signals}
    return f"killed by signal {-status} ({names.get(-status, 'unknown')})"
