"""Calls from any thread to the worker processes of a node, and the one thread that takes the answers."""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable
from itertools import count
from operator import attrgetter
from time import perf_counter

from torchpipe_py.errors import DeadlineExceeded, PipeClosed, WorkerDied, log_failure
from torchpipe_py.proc.process.child import AHEAD, Answer, Call, WorkerProcess, is_for_main_thread
from torchpipe_py.proc.shared.memory import NOT_RUN, SLEEP_SECONDS, barrier, sleep_by

_LOSSES = 3  # worker processes that may die before they begin a call; then it fails

_RETRY_SECONDS = 1.0  # after which a worker process that could not be started is tried again, while others run

_JOIN_SECONDS = 5.0  # for the thread that takes the answers; a callback of a user's may keep it

_Given = tuple[Call, WorkerProcess, int, int]  # a call, and the slot and number it has there


class Dispatcher:
    """Has each call run by the worker process that has least to do.

    A worker process has some calls beside the one that it runs, so that it need not wait for this process. What it has
    not begun is taken back where another one has nothing to do, or where it dies. Of several, one never runs large
    calls, and none has others behind a large one. ``in_place``: arrays of answers lie where they were written, as long
    as somebody has them.

    Each worker process is ``entered`` by the thread that starts it and its successors, when ``mend`` says so.
    """

    def __init__(self, instances: int, max_seconds: float, in_place: bool) -> None:
        self._max_seconds, self._in_place = max_seconds, in_place
        self._lock = threading.RLock()  # a collection may close a pipe anywhere
        self._freed = threading.Condition(self._lock)
        self._waiting: deque[Call] = deque()
        self._large: deque[Call] = deque()  # wait until another large one has ended
        self._large_left = instances - 1
        self._order = count()
        self._workers: dict[int, WorkerProcess] = {}
        self._mend: dict[int, Callable[[], object]] = {}
        self._down: dict[int, float] = {}  # since when an instance has no worker process, and starts none
        self._is_closed = False
        self._poller = select.poll()
        self._wake = -1  # an eventfd, for the thread
        self._thread: threading.Thread | None = None

    # -- calls, from any thread ----------------------------------------------------------------------------------

    def ask(self, call: Call) -> None:
        """Have a call run; its ``done`` gets the answer once, on any thread.

        The answer's error is ``PipeClosed`` where the call has not begun before ``close``, ``DeadlineExceeded`` where
        not before its deadline, ``WorkerDied`` where its worker process has died or none can be started, or what
        ``write`` raises.
        """
        with self._lock:
            is_closed = self._is_closed
            if not is_closed:
                self._waiting.append(call)
                given = self._give()
                if self._down:
                    self._revive()
        if is_closed:
            self._tell(call, PipeClosed("closed"))
        else:
            self._write(given)

    def give_up(self, call: Call) -> None:
        """Nobody waits for it any more; if it has not begun it is not run."""
        # NOTE: without the lock. The main thread comes here too, and the handler of a signal that calls the pipe there,
        # or closes it, would wait for a thread that waits for the lock. ``_give`` looks once the call has its worker.
        call.is_given_up = True
        worker = call.worker
        if worker is not None:
            worker.memory.give_up(call.slot, call.number)

    def close(self) -> None:
        """Fail what has not begun with ``PipeClosed``, as what comes from now on."""
        with self._lock:
            self._is_closed = True
            left = self._drop_waiting()
            for worker in self._workers.values():
                left += [call for call in worker.calls if call is not None and self._takes_back(worker, call)]
        for call in left:
            self._tell(call, PipeClosed("closed"))

    def running_since(self, index: int) -> float:
        """When the call was begun that a worker process is at; 0.0 where it has none."""
        worker = self._workers.get(index)
        return 0.0 if worker is None else worker.since

    # -- worker processes, from the threads that start them ------------------------------------------------------

    def enter(self, index: int, worker: WorkerProcess, mend: Callable[[], object]) -> bool:
        """A worker process takes calls from now on; ``mend`` is called when it has died. ``False`` once closed."""
        with self._lock:
            if self._is_closed:
                return False
            worker.bell.await_ring(True)
            worker.is_shared = True
            self._workers[index], self._mend[index] = worker, mend
            for fd in (*worker.watched, worker.bell.fd):
                self._poller.register(fd, select.POLLIN)
            if self._thread is None:
                if self._wake < 0:
                    self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
                    self._poller.register(self._wake, select.POLLIN)
                thread = threading.Thread(target=self._run, name="torchpipe-answers", daemon=True)
                thread.start()
                self._thread = thread  # NOTE: not before: where none could be started, the instance comes again
            given = self._give_to(worker)
            os.eventfd_write(self._wake, 1)
        self._write(given)
        return True

    def fail(self, index: int, error: WorkerDied) -> None:
        """No worker process can be started for an instance; the next call has it tried again."""
        with self._lock:
            self._down[index] = perf_counter()
            has_others = self._workers or len(self._down) < len(self._mend)
            lost = [] if has_others else self._drop_waiting()
        for call in lost:
            self._tell(call, error)

    def leave(self, index: int) -> WorkerProcess | None:
        """Once closed: the worker process, if it lives, as soon as it has ended its calls."""
        with self._lock:
            self._freed.wait_for(lambda: index not in self._workers or not any(self._workers[index].calls))
            worker = self._workers.pop(index, None)
            if worker is not None:
                self._forget(worker)
            self._mend.pop(index, None)
            thread = None if self._mend else self._thread
        if thread is not None:
            os.eventfd_write(self._wake, 1)
            thread.join(_JOIN_SECONDS)
            if not thread.is_alive():
                os.close(self._wake)
        return worker

    def _revive(self) -> None:
        now = perf_counter()
        for index, since in [*self._down.items()]:
            if not self._workers or now > since + _RETRY_SECONDS:
                del self._down[index]
                self._mend[index]()

    # -- which worker process has which call; with the lock held --------------------------------------------------

    def _give(self) -> list[_Given]:
        """Give the calls that wait to worker processes, as far as there is room; they are to be written then."""
        given: list[_Given] = []
        while self._waiting:
            call = self._waiting[0]
            if call.is_large and self._large_left <= 0 and not call.is_given_up:
                self._large.append(self._waiting.popleft())
                continue
            worker = self._freest()
            if worker is None:
                break
            self._waiting.popleft()
            if call.is_large:
                self._large_left -= 1
                worker.has_large = True
            worker.take_slot(call)
            call.worker, call.order = worker, next(self._order)
            if call.is_given_up:
                worker.memory.give_up(call.slot, call.number)
            worker.since = worker.since or perf_counter()
            given.append((call, worker, call.slot, call.number))
        return given

    def _give_to(self, worker: WorkerProcess) -> list[_Given]:
        """``_give``; where none waits, one that has nothing to do gets a call of another."""
        given = self._give()
        if not given and worker.is_open and worker.since == 0.0 and len(self._workers) > 1:
            self._share(worker)
            given = self._give()
        return given

    def _freest(self) -> WorkerProcess | None:
        best, most = None, 0
        for worker in self._workers.values():
            if worker.room > most and not worker.has_large:
                best, most = worker, worker.room
        return best

    def _takes_back(self, worker: WorkerProcess, call: Call) -> bool:
        """Whether a call can go elsewhere: the worker process has not begun it, and will not."""
        if call.worker is not worker or not worker.memory.is_asked(call.slot, call.number):
            return False  # NOTE: what is not written yet would never be answered there
        worker.memory.give_up(call.slot, call.number)
        # Either it is seen here that it has begun, or there that it was given up. Perhaps both: it says so then.
        barrier()
        if worker.had_begun(call):
            return False
        self._end(worker, call)
        return True

    def _share(self, idle: WorkerProcess) -> None:
        """Take a call back from the one that has most to do, for one that has nothing to do."""
        busiest = min(self._workers.values(), key=attrgetter("room"))
        if idle.room == AHEAD and busiest.room < AHEAD - 1:
            calls = sorted(filter(None, busiest.calls), key=attrgetter("order"), reverse=True)
            call = next((call for call in calls[:-1] if self._takes_back(busiest, call)), None)
            if call is not None:
                self._waiting.append(call)

    def _end(self, worker: WorkerProcess, call: Call) -> None:
        """A worker process has a call no more."""
        call.worker = None
        if call.is_large:
            worker.has_large = False
            self._large_left += 1
            self._waiting.extendleft(reversed(self._large))
            self._large.clear()

    def _drop_waiting(self) -> list[Call]:
        dropped = [*self._waiting, *self._large]
        self._waiting.clear()
        self._large.clear()
        return dropped

    def _forget(self, worker: WorkerProcess) -> None:
        for fd in (*worker.watched, worker.bell.fd):
            self._poller.unregister(fd)

    # -- without it -----------------------------------------------------------------------------------------------

    def _write(self, given: list[_Given]) -> None:
        """Write calls into the slots that they were given; what cannot be written ends."""
        for call, worker, slot, number in given:
            try:
                # NOTE: if it has died, another one may have the call by now; nobody reads what is written here then.
                worker.write(call, slot, number)
            except Exception as error:
                with self._lock:
                    is_ours = call.worker is worker and call.slot == slot
                    if is_ours:
                        self._end(worker, call)
                        worker.free_slot(slot)
                        self._freed.notify_all()
                    more = self._give()
                if is_ours:
                    self._tell(call, error)
            else:
                if worker.room >= AHEAD - 1:
                    continue
                # Another one may have become idle, and could not have this call before it was written.
                with self._lock:
                    idle = self._freest()
                    more = [] if idle is None else self._give_to(idle)
            self._write(more)

    def _tell(self, call: Call, outcome: Answer | BaseException) -> None:
        answer = outcome if isinstance(outcome, Answer) else Answer(NOT_RUN, None, outcome, 0.0, 0.0, -1)
        try:
            assert call.done is not None
            call.done(answer)
        except BaseException as error:
            if is_for_main_thread(error):
                raise
            log_failure("the answer of a worker process cannot be told", error)

    # -- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._mend:
            try:
                self._round()
            except Exception as error:
                log_failure("what comes from a worker process cannot be taken", error)

    def _round(self) -> None:
        with self._lock:
            workers = [*self._workers.items()]
        found = False
        for _, worker in workers:
            for slot in worker.take_answered():
                self._take(worker, slot)
                found = True
        if found:
            return
        bells = [worker.bell for _, worker in workers]
        ready = sleep_by(bells, self._poller, lambda: any(worker.has_answers() for _, worker in workers), SLEEP_SECONDS)
        if self._wake in ready:
            os.eventfd_read(self._wake)
        now = perf_counter()
        for index, worker in workers:
            if any(fd in ready for fd in worker.watched):
                self._lose(index, worker, False)
            elif self._is_late(worker, now):
                self._lose(index, worker, True)

    def _is_late(self, worker: WorkerProcess, now: float) -> bool:
        since = worker.since
        return bool(self._max_seconds and since and now > since + self._max_seconds) and not worker.has_answers()

    def _take(self, worker: WorkerProcess, slot: int) -> None:
        """Take an answer; the worker process has its next call before this one is told."""
        call = worker.calls[slot]
        assert call is not None
        answer = worker.read(slot, self._in_place)
        with self._lock:
            worker.free_slot(slot)
            is_its = call.worker is worker and call.slot == slot
            if is_its:
                self._end(worker, call)
            is_to_run = is_its and answer.kind == NOT_RUN and not call.is_given_up and perf_counter() < call.deadline
            if is_to_run and not self._is_closed:
                self._waiting.appendleft(call)
            worker.since = perf_counter() if any(worker.calls) else 0.0
            given = self._give_to(worker)
            if self._is_closed:
                self._freed.notify_all()
        self._write(given)
        if not is_its:
            return  # it was taken back
        if answer.kind != NOT_RUN:
            self._tell(call, answer)
        elif self._is_closed and is_to_run:
            self._tell(call, PipeClosed("closed"))
        elif not is_to_run:
            self._tell(call, DeadlineExceeded("deadline passed"))

    def _lose(self, index: int, worker: WorkerProcess, is_late: bool) -> None:
        """A worker process has died, or takes too long: fail what it had begun, and have the rest run elsewhere."""
        with self._lock:
            if self._workers.get(index) is not worker:
                return
            del self._workers[index]
            self._forget(worker)
        error = worker.overdue(self._max_seconds) if is_late else worker.died()
        for slot in worker.take_answered():
            self._take(worker, slot)
        with self._lock:
            calls = sorted(filter(None, worker.calls), key=attrgetter("order"))
            calls = [call for call in calls if call.worker is worker]
            for call in calls:
                self._end(worker, call)
                call.losses += 1
            lost = [call for call in calls if worker.had_begun(call)] or calls[: 1 if is_late else 0]
            lost += [call for call in calls if call.losses == _LOSSES and call not in lost]
            rest = [call for call in calls if call not in lost]
            if not self._is_closed:
                self._waiting.extendleft(reversed(rest))
            given = self._give()
            self._freed.notify_all()
            if not self._is_closed:
                self._mend[index]()
        self._write(given)
        for call in lost:
            self._tell(call, error)
        if self._is_closed:
            for call in rest:
                self._tell(call, PipeClosed("closed"))
