"""Clients as threads of this process, in a closed loop: each calls the pipe again as soon as it has its answer."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torchpipe_py.errors import BackendError, first_line
from torchpipe_py.keys import TASK_DATA_KEY, TASK_ERROR_KEY, TASK_RESULT_KEY
from torchpipe_py.loadtest.plans import Payload, Plan, Rotation
from torchpipe_py.loadtest.records import CallLog, Outcome
from torchpipe_py.runtime.pipe import pipe

_LOOK_S = 0.25
_GRACE_S = 1.0


class PipeClient:
    """One thread's share of the run. Errors are counted in images, by ``error_name``; ``examples`` has one of each.

    A call is a dict where the plan has one image per call, else a list of dicts.
    """

    def __init__(self, plan: Plan, run: pipe, payload: Payload) -> None:
        self.log = CallLog(plan.calls)
        self.errors: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        self._plan, self._pipe, self._payload = plan, run, payload
        self._rotation = Rotation(plan.first_image, len(payload.bodies))

    def warm_up(self, stopping: Callable[[], bool]) -> None:
        """The plan's calls, not counted, whatever comes of them."""
        for _ in range(self._plan.warmup):
            if stopping():
                return
            self._call(self._next_items(self._plan.batch)[1])

    def work(self, stopping: Callable[[], bool]) -> None:
        """The plan's share, or as much of it as comes before ``stopping`` says so."""
        began, cpu = time.perf_counter_ns(), time.thread_time_ns()
        left = self._plan.share
        while left and not stopping():
            count = min(self._plan.batch, left)
            left -= count
            picks, items = self._next_items(count)
            started = time.perf_counter_ns()
            error = self._call(items)
            ended = time.perf_counter_ns()
            ok, correct = self._judge(picks, items, error)
            self.log.count(count, count, ok, correct)
            self.log.record(ended - started, ended, ok)
        self.log.close(time.thread_time_ns() - cpu, time.perf_counter_ns() - began)

    def _next_items(self, count: int) -> tuple[list[int], list[dict[str, Any]]]:
        picks = self._rotation.take(count)
        return picks, [{TASK_DATA_KEY: self._payload.bodies[pick]} for pick in picks]

    def _call(self, items: list[dict[str, Any]]) -> Exception | None:
        try:
            self._pipe(items[0] if self._plan.batch == 1 else items)
        except Exception as error:  # whatever a pipe raises is a finding, by type
            return error
        return None

    def _judge(self, picks: Sequence[int], items: list[dict[str, Any]], raised: Exception | None) -> tuple[int, int]:
        """How many images have a result, and how many the expected label; counts the errors.

        Of several images that failed with a defect the pipe raises the first; it counts for each of them.
        """
        ok = correct = 0
        for pick, item in zip(picks, items, strict=True):
            if TASK_RESULT_KEY in item:
                ok += 1
                label = self._payload.labels[pick]
                correct += label is not None and label == _label(item[TASK_RESULT_KEY])
            else:
                self._count_error(item.get(TASK_ERROR_KEY, raised))
        return ok, correct

    def _count_error(self, error: Any) -> None:
        name = error_name(error)
        self.errors[name] += 1
        if name not in self.examples:
            self.examples[name] = first_line(error)


def error_name(error: Any) -> str:
    """What an error is counted as: its class, for a defect with that of its cause."""
    name = type(error).__name__
    if isinstance(error, BackendError) and error.__cause__ is not None:
        return f"{name}:{type(error.__cause__).__name__}"
    return name


def _label(result: Any) -> str | None:
    """The label of ``(label, score)``."""
    return str(result[0]) if isinstance(result, tuple) and len(result) == 2 else None


class ClientThreads:
    """Owns the client threads of one run on a pipe."""

    def __init__(self, plans: Sequence[Plan], run: pipe, payload: Payload) -> None:
        self._clients = [PipeClient(plan, run, payload) for plan in plans]
        self._warm = threading.Semaphore(0)
        self._gate = threading.Event()
        self._is_stopping = False
        self._threads = [
            threading.Thread(target=self._main, args=(client,), name=f"torchpipe-bench-{index}", daemon=True)
            for index, client in enumerate(self._clients)
        ]

    def warm_up(self) -> None:
        """Starts the clients, until every one of them is warm and waits at the gate."""
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            self._warm.acquire()

    def run(self, progress: Callable[[int], None]) -> Outcome:
        """Opens the gate and waits for all clients; ``progress`` gets the number of images sent, now and then.

        KeyboardInterrupt ends the run early: what was done until then is the outcome.
        """
        outcome = Outcome(time.perf_counter_ns(), [client.log for client in self._clients])
        try:
            self._gate.set()
            for thread in self._threads:
                while thread.is_alive():
                    thread.join(_LOOK_S)
                    progress(sum(client.log.sent for client in self._clients))
        except KeyboardInterrupt:
            outcome.interrupted = True
            self.stop()
        for client in self._clients:
            outcome.errors += client.errors
            outcome.examples |= client.examples
        return outcome

    def stop(self) -> None:
        """Ends every client after the call it is in; waits a little for that. May be called again, and at any time."""
        self._is_stopping = True
        self._gate.set()
        deadline = time.monotonic() + _GRACE_S
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))

    def _main(self, client: PipeClient) -> None:
        try:
            client.warm_up(self._stopping)
        finally:
            self._warm.release()
        self._gate.wait()
        client.work(self._stopping)

    def _stopping(self) -> bool:
        return self._is_stopping
