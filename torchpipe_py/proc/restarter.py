"""Child processes with a link, and how one that dies is replaced."""

from __future__ import annotations

import os
import select
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from math import inf
from time import perf_counter
from typing import Any

from torchpipe_py.backends.current import waiting
from torchpipe_py.errors import WorkerDied, first_line
from torchpipe_py.proc.child import ChildProcess, Running, start_interpreter
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

Read = Callable[[Link, int, Header], Any]
"""Reads an answer that is not pickled."""

Launch = Callable[[list[int]], Running]
"""Starts a process with the descriptors of a link: its memory, the asker's bell, and the answerer's bell."""


def launch(fds: list[int]) -> subprocess.Popen[bytes]:
    """Start a process that runs ``worker.main``; it ends with the thread that starts it."""
    return start_interpreter("torchpipe_py.proc.worker", fds, os.getpid(), stdin=subprocess.DEVNULL)


class LinkedChild:
    """A child process and the ``link`` through which it answers; used from one thread."""

    def __init__(self, label: str, instance: int, launch: Launch, room: Room) -> None:
        memory = create_memory(room)
        link = self.link = Link(memory, room, [memory])
        link.instance = instance
        for _ in range(2):
            link.fds.append(new_bell())
        link.bell = Bell(link.fds[1], link.asker_asleep)
        link.other = Bell(link.fds[2], link.answerer_asleep)
        self._process = ChildProcess(f"{label}: its worker process", launch(link.fds))
        self._poller = select.poll()
        self._poller.register(link.bell.fd, select.POLLIN)
        if self._process.fileno() >= 0:
            self._poller.register(self._process, select.POLLIN)

    def sleep(self, seconds: float) -> bool:
        """Sleep until there is an answer, or for ``seconds``; returns whether the process has ended."""
        link = self.link
        ready = link.bell.sleep(self._poller, link.has_answers, max(0.0, min(seconds, SLEEP_SECONDS)))
        return bool(ready) or (self._process.fileno() < 0 and self._process.has_ended())

    def set_up(self, setup: Any, seconds: float | None, read: Read | None = None) -> Any:
        """Set the child up and return its answer; kill it if this fails."""
        try:
            return self.exchange(SET_UP, setup, seconds, read)
        except BaseException:
            self._process.end()
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
                raise self.kill_and_describe(f"took longer than {seconds:g} s")
            if self.sleep(end - perf_counter()) and not link.has_answers():
                raise self.kill_and_describe()
        header = link.reply(slot)
        answer = link.read(slot, header, copies=True) if read is None else read(link, slot, header)
        link.free_slot(slot)
        if header.kind == FAILED and read is None:
            raise answer.error()
        return answer

    def kill_and_describe(self, reason: str = "") -> WorkerDied:
        """Kill it; the error gives the reason or, without one, how it has ended by itself."""
        return self._process.kill_and_describe(reason)

    def close(self) -> None:
        """Let it close its backend and end; an error is raised after everything is released."""
        if self._process.is_released:
            return
        grace = 0.0
        try:
            self.exchange(CLOSE, None, CLOSE_SECONDS)
            grace = CLOSE_SECONDS
        except WorkerDied:
            pass
        finally:
            self._process.end(grace)

    def release(self) -> None:
        """Kill it and release its descriptors; the process that forked it takes its exit status."""
        self._process.kill()
        self._process.release()


class Restarter:
    """Keeps a child process running for a pool and replaces it if it dies; used on one thread, which starts them.

    ``start`` starts one that is ready for calls. ``max_seconds``: a child whose call takes longer is killed; 0 means no
    limit. ``on_lost`` is called after one has died.
    """

    def __init__(
        self, label: str, pool: Pool, start: Callable[[], LinkedChild], max_seconds: float,
        on_lost: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        self._label, self.pool, self._start, self.max_seconds = label, pool, start, max_seconds
        self._on_lost = on_lost
        self.child: LinkedChild | None = None

    def enter(self, child: LinkedChild) -> None:
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
        ends: list[Any] = []
        call = Call(packed, kind, lambda *end: ends.append(end))
        self.pool.ask(call)
        self.serve(lambda: call.is_over, waiting)
        if ends[0][0] is not None:
            raise ends.pop()[0]  # NOTE: a variable would form a cycle with this frame, and keep the link alive
        return ends[0][1]

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
                    self._lose(child.kill_and_describe(f"took longer than {self.max_seconds:g} s"), is_at_fault=True)
                elif child.sleep(left) and not child.link.has_answers():
                    self._lose(child.kill_and_describe())
            except GarbledError as error:
                self._lose(child.kill_and_describe(f"gave {error}"), is_at_fault=True)

    def is_idle(self) -> bool:
        """Whether the pool is closed and the child has finished its calls."""
        return self.pool.is_closed and (self.child is None or not self.child.link.under_way)

    def running_since(self) -> float:
        """When the child began its current call; 0.0 if it has none."""
        child = self.child
        return 0.0 if child is None else child.link.since

    def leave(self) -> LinkedChild | None:
        """Stop giving calls to the child, which must be idle, and return it."""
        child, self.child = self.child, None
        if child is not None:
            self.pool.remove(child.link)
        return child

    def _lose(self, error: WorkerDied, is_at_fault: bool = False) -> None:
        child, self.child = self.child, None
        if child is not None:
            self._on_lost()  # first, since who gets the error may look
            self.pool.lose(child.link, error, is_at_fault)

    def _restart(self, is_over: Callable[[], bool]) -> None:
        """Replace a dead child, unless it is over; if no child is left for any call, waiting calls fail."""
        pool, reason = self.pool, None
        for _ in range(LOSSES):
            if is_over():
                return
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
