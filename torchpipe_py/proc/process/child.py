"""A worker process as its parent sees it: how it is started, its slots of shared memory, and how it ends."""

from __future__ import annotations

import os
import pickle
import select
import subprocess
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from math import inf
from multiprocessing import connection, spawn
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from torchpipe_py.errors import Failure, WorkerDied, first_line
from torchpipe_py.proc.process.interpreter import describe_ending, import_path, interpreter_flags
from torchpipe_py.proc.process.transport import Packed
from torchpipe_py.proc.shared.link import Slots
from torchpipe_py.proc.shared.memory import DONE, FAILED, NOT_RUN, SLEEP_SECONDS, Bell, LinkMemory

_CLOSE_TIMEOUT = 5.0  # seconds a worker has for its backend's close
_END_TIMEOUT = 1.0  # and to end after its connection, for which the answers of other workers wait

# The path comes first, so that nothing is imported from the working directory; then Ctrl-C, which reaches it too.
_PROGRAM = r"""
import sys
sys.path[:] = sys.argv[1].split("\n")
import signal
signal.signal(signal.SIGINT, lambda *_: None)
from torchpipe_py.proc.process.worker import main
main(*map(int, sys.argv[2:]))
"""


class WorkerMemory(LinkMemory):
    """What a worker process shares with its parent: calls that it has, and answers that are read where they lie."""

    slots = 16
    slot_bytes = 2**30
    kept_bytes = 2**22


AHEAD = 4
"""Calls that a worker process has at once, of which it runs one: it need not wait for its parent."""

_IN_PLACE = WorkerMemory.slots - AHEAD  # answers of a worker process that are read in place at once; others are copied


class Answer(NamedTuple):
    """What came of a call: its outcomes, or an error; by which instance it was run, and when. Not for ``NOT_RUN``."""

    kind: int
    outcomes: Any
    error: BaseException | None
    begun: float
    ended: float
    instance: int


class Call:
    """Items on their way to a worker process, packed. ``count`` is 1, or that of a list of them.

    ``done(answer)`` is called once where several worker processes take calls; ``worker`` has it now.
    """

    __slots__ = (
        "count",
        "deadline",
        "done",
        "is_given_up",
        "is_large",
        "losses",
        "number",
        "order",
        "packed",
        "slot",
        "worker",
    )

    def __init__(
        self,
        packed: Packed,
        count: int = 1,
        deadline: float | None = None,
        done: Callable[[Answer], object] | None = None,
        is_large: bool = False,
    ) -> None:
        self.packed, self.count, self.done, self.is_large = packed, count, done, is_large
        self.deadline = inf if deadline is None else deadline
        self.worker: WorkerProcess | None = None
        self.slot, self.number, self.order = -1, 0, 0
        self.is_given_up = False
        self.losses = 0  # worker processes that died with it


class WorkerProcess(Slots[Call]):
    """A worker process and the only way to it.

    ``set_up`` and ``close`` are called from the thread that made it, ``call`` too where that is the only one. Where a
    ``Dispatcher`` has it, calls come through ``write`` from any thread, and one takes the answers. ``since`` is when
    the call that it is at was begun, as seen from here; 0.0 where it has none.
    """

    def __init__(self, label: str, instance: int) -> None:
        self._label, self.instance = label, instance
        self.is_open = True
        self.is_shared = False  # by several threads
        self.has_taken = False
        self.has_large = False
        self.since = 0.0
        self.room = AHEAD
        self._read_in_place: dict[int, weakref.ref[np.ndarray]] = {}
        self._dropped: deque[int] = deque()  # slots whose answers nobody reads any more
        self._fresh: np.ndarray | None = None
        self._fds: list[int] = []
        ours, theirs = connection.Pipe()
        with theirs, ExitStack() as undo:
            undo.callback(ours.close)
            undo.callback(self._close_fds)
            super().__init__(WorkerMemory.create())
            self._fds.append(self.memory.fd)
            undo.callback(self.memory.close)
            self._fds += [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(2)]
            fds = theirs.fileno(), *self._fds
            self._process = subprocess.Popen(
                [os.fsdecode(spawn.get_executable()), *interpreter_flags(), "-c", _PROGRAM, import_path()]
                + [str(number) for number in (*fds, os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=fds,
            )
            undo.pop_all()
        self._connection = ours
        self.bell = Bell(self.memory.asker_asleep, self._fds[1])
        self._its_bell = Bell(self.memory.answerer_asleep, self._fds[2])
        self._sentinel = _open_sentinel(self._process.pid)
        # Readable when the process has ended, or has something to say of its setup or close.
        self.watched = [ours.fileno()] + ([] if self._sentinel is None else [self._sentinel])
        self._poller = _poller(self.watched)
        self._sleeper = _poller([*self.watched, self.bell.fd])

    # -- calls --------------------------------------------------------------------------------------------------

    def write(self, call: Call, slot: int, number: int) -> None:
        """Write a call into the slot that it was given; raises what there is no room for."""
        self.memory.ask(slot, number, call.packed, call.count, perf_counter(), call.deadline)
        self._its_bell.ring()

    def take_slot(self, call: Call) -> None:
        while self._dropped:
            slot = self._dropped.popleft()
            del self._read_in_place[slot]
            self.memory.release(slot, self.memory.reply(slot))
            self.free.append(slot)
        super().take_slot(call)
        self.room -= 1

    def free_slot(self, slot: int) -> None:
        """The call in the slot has ended; the slot is free, once its answer is not read in place any more."""
        self.room += 1
        if slot in self._read_in_place:
            self.calls[slot] = None
            self._fresh = None
        else:
            super().free_slot(slot)

    def read(self, slot: int, in_place: bool = False) -> Answer:
        """The answer in a slot, before that is freed. ``in_place``: its arrays lie there as long as they live."""
        header = self.memory.reply(slot)
        outcomes: Any = None
        error: BaseException | None = None
        if header.kind != NOT_RUN:
            try:
                if in_place and header.kind == DONE and len(self._read_in_place) < _IN_PLACE:
                    outcomes, content = self.memory.read_in_place(slot, header)
                    self._fresh = content  # NOTE: until ``free_slot``, or the slot would be free before that
                    dropped = self._dropped
                    self._read_in_place[slot] = weakref.ref(content, lambda _: dropped.append(slot))
                else:
                    outcomes = self.memory.read(slot, header, copies=True)
                if header.kind == FAILED:
                    outcomes, error = None, outcomes.error()
            except BaseException as failure:
                if is_for_main_thread(failure):
                    raise
                error = TypeError(f"{self._label}: the answer of its worker process: {first_line(failure)}")
                error.__cause__ = failure.with_traceback(None)  # NOTE: its frames would keep the memory
        if slot not in self._read_in_place:
            self.memory.release(slot, header)
        return Answer(header.kind, outcomes, error, header.first, header.second, self.instance)

    def call(self, packed: Packed, count: int, timeout: float | None) -> Any:
        """Have one call run, and wait for its outcomes; a failure there is raised here.

        ``WorkerDied`` where the process ends first, or is ended because ``timeout`` seconds are over; ``has_taken``
        then says whether that may be due to the call.
        """
        call = Call(packed, count)
        self.take_slot(call)
        try:
            self.write(call, call.slot, call.number)
        except BaseException:
            self.free_slot(call.slot)
            raise
        self.since = start = perf_counter()
        try:
            while not self.has_answers():
                left = SLEEP_SECONDS if timeout is None else min(SLEEP_SECONDS, start + timeout - perf_counter())
                if left <= 0:
                    self.has_taken = True
                    raise self.overdue(timeout)
                if self.bell.sleep(self._sleeper, self.has_answers, left) and not self.has_answers():
                    self.has_taken = self.had_begun(call)
                    raise self.died()
        except BaseException:
            self.kill()  # its answer to this must not be taken for one to the next
            raise
        finally:
            self.since = 0.0
        [slot] = self.take_answered()
        answer = self.read(slot)
        self.free_slot(slot)
        if answer.error is not None:
            raise answer.error
        return answer.outcomes

    def had_begun(self, call: Call) -> bool:
        """Whether it has begun a call."""
        return self.memory.has_begun(call.slot, call.number)

    def died(self) -> WorkerDied:
        """End it, and say how it has ended."""
        self._wait(_END_TIMEOUT)  # the connection may end a moment before the process
        status = self._process.poll()
        self.kill()
        return WorkerDied(f"{self._label}: its worker process {self._process.pid} died: {describe_ending(status)}")

    def overdue(self, timeout: Any) -> WorkerDied:
        """End it, and say that it took too long."""
        self.kill()
        pid = self._process.pid
        return WorkerDied(f"{self._label}: its worker process {pid} took longer than {timeout:g} s and was ended")

    # -- its beginning and its end --------------------------------------------------------------------------------

    def set_up(self, setup: Any, timeout: float | None = None) -> Any:
        """What it tells of its backend once that is set up; what that raised is raised here."""
        try:
            answer = self._exchange(("setup", setup), timeout)
        except (EOFError, OSError):
            raise self.died() from None
        if answer is None:
            raise self.overdue(timeout)
        kind, value = answer
        if kind == FAILED:
            raise value.error()
        return value

    def close(self) -> None:
        """Let the worker close its backend and end; an error of that is raised once everything is released."""
        failure: Any = None
        try:
            answer = self._exchange(("close", None), _CLOSE_TIMEOUT)
            if answer is not None:
                _, failure = answer
                self._wait(_CLOSE_TIMEOUT)
        except (EOFError, OSError):
            pass  # it is gone
        finally:
            self.kill()
        if isinstance(failure, Failure):
            raise failure.error()

    def kill(self) -> None:
        """End the process if it still runs; twice is allowed."""
        if not self.is_open:
            return
        self.is_open = False
        self._process.kill()
        self._process.wait()
        if self._sentinel is not None:
            os.close(self._sentinel)
        self._connection.close()
        if not self.is_shared:
            del self.bell, self._its_bell
            self.memory.close()
            self._close_fds()

    def _exchange(self, message: Any, timeout: float | None) -> Any:
        """The answer; ``EOFError`` where the process ends first, ``None`` where ``timeout`` seconds pass."""
        self._connection.send_bytes(pickle.dumps(message))
        ready = dict(self._poller.poll(None if timeout is None else 1000 * timeout))
        if not ready:
            return None
        if not ready.get(self._connection.fileno(), 0) & select.POLLIN:
            raise EOFError
        return pickle.loads(self._connection.recv_bytes())

    def _wait(self, timeout: float) -> None:
        """Wait for the process to end, no longer than ``timeout`` seconds."""
        end = perf_counter() + timeout
        if self._sentinel is not None:
            _poller([self._sentinel]).poll(1000 * timeout)
        try:
            self._process.wait(max(0.0, end - perf_counter()))
        except subprocess.TimeoutExpired:
            pass

    def _close_fds(self) -> None:
        while self._fds:
            os.close(self._fds.pop())

    def __del__(self) -> None:
        # NOTE: not before, where it is shared: a thread that has just written a call is about to ring.
        self._close_fds()


def is_for_main_thread(error: BaseException) -> bool:
    """Whether it is, as Ctrl-C is. NOTE: nothing else may end the thread that takes the answers."""
    return not isinstance(error, Exception) and threading.current_thread() is threading.main_thread()


def _poller(fds: list[int]) -> select.poll:
    """For what is readable."""
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    return poller


def _open_sentinel(pid: int) -> int | None:
    """A descriptor that is readable when the process has ended, where the system has such a thing.

    The connection tells it too, unless a process that the worker has forked still holds the other end.
    """
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None
