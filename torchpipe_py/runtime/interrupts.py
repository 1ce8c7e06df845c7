"""A thread that runs the pipe's code for the main thread, so that Ctrl-C interrupts only a wait."""

from __future__ import annotations

import os
import signal
import threading
from _thread import allocate_lock, start_new_thread
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

from torchpipe_py.errors import log_failure

BUSY_SECONDS = 0.05
"""Seconds after which a job counts as blocked: it is in a backend."""

T = TypeVar("T")
Job = Callable[[], object]


def has_handlers() -> bool:
    """Whether the main thread has a signal handler in Python, which may raise; by default Ctrl-C has one."""
    return any(callable(signal.getsignal(number)) for number in signal.valid_signals())


class InterruptSafeExecutor:
    """Runs jobs of the main thread, in order, on a thread of its own.

    A signal handler may raise in the main thread between any two bytecodes: with a lock just taken, or with an
    instance chosen but not woken. So the main thread changes no state that other threads use. It puts a job on a queue,
    which is one C call, and waits.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Job | None] | None = None  # of the thread, once there is one
        os.register_at_fork(after_in_child=self._forget)

    def start(self, job: Job) -> None:
        """Run the job soon, after those before it."""
        jobs = self._jobs
        if jobs is None:
            jobs = SimpleQueue()
            # NOTE: not by `threading.Thread`, whose methods an interrupt leaves half done.
            try:
                start_new_thread(_run_all, (jobs,))
            except RuntimeError:  # Python exits
                job()
                return
            self._jobs = jobs
        jobs.put(job)

    def run(self, work: Callable[[], T]) -> T:
        """Run ``work`` after the jobs before it; returns its result or raises its error. It survives an interrupt."""
        done, results, errors = allocate_lock(), list[T](), list[BaseException]()
        done.acquire()

        def job() -> None:
            try:
                results.append(work())
            except BaseException as error:
                errors.append(error)
            done.release()

        self.start(job)
        done.acquire()
        if errors:
            raise errors[0]
        return results[0]

    def abandon(self, give_up: Job) -> None:
        """Run ``give_up`` after the jobs before it, or, if these take long, at once and on another thread."""
        done = allocate_lock()
        done.acquire()

        def job() -> None:
            give_up()
            done.release()

        self.start(job)
        is_done = False
        try:
            is_done = done.acquire(timeout=BUSY_SECONDS)
        finally:
            if not is_done:
                jobs, self._jobs = self._jobs, None
                if jobs is not None:
                    jobs.put(None)
                self.start(give_up)

    def _forget(self) -> None:
        """Forget the thread, which a forked child does not have."""
        self._jobs = None


EXECUTOR = InterruptSafeExecutor()
"""Process-wide, because there is one main thread."""


def _run_all(jobs: SimpleQueue[Job | None]) -> None:
    threading.current_thread().name = "MainThread-torchpipe"
    while (job := jobs.get()) is not None:
        try:
            job()
        except BaseException as error:
            log_failure("a call of the main thread failed", error)
        del job  # an idle thread must not keep its last request alive
