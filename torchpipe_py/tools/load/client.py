"""Clients: each sends its share of the images over a session of its own, as a process or as a thread."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection as Channel
from multiprocessing.connection import wait
from typing import Any, Protocol

from torchpipe_py.errors import BackendError, TorchpipeError, counted, first_line
from torchpipe_py.keys import TASK_DATA_KEY, TASK_ERROR_KEY, TASK_RESULT_KEY
from torchpipe_py.runtime.pipe import pipe
from torchpipe_py.tools.load.arrivals import LagMeter, Load, Pace, Payload, Plan
from torchpipe_py.tools.load.records import NO_REPLY, CallLog, Outcome, shared_words
from torchpipe_py.tools.report import ToolError

READY = "ready"
WAITING, GOING, STOPPING = range(3)

_BROKEN_CALLS_IN_A_ROW = 10
_LOOK_S = 0.25
_GRACE_S = 1.0


# --- a client


@dataclass(frozen=True)
class Answer:
    """A result; ``label`` is None where it has none."""

    label: str | None


def error_name(error: Any) -> str:
    """What an error is counted as: ``timeout``, its class, or its class and a detail: the code that a service
    gave (``InferenceError:overloaded``), the kind of a Thrift error, the class of a defect's cause.
    """
    name = type(error).__name__
    if isinstance(error, TorchpipeError):
        defect = isinstance(error, BackendError) and error.__cause__ is not None
        return f"{name}:{type(error.__cause__).__name__}" if defect else name
    if isinstance(error, TimeoutError):
        return "timeout"
    if name == "TApplicationException":
        kinds = {value: kind.lower() for kind, value in vars(type(error)).items() if kind.isupper()}
        return f"{name}:{kinds.get(error.type, error.type)}"
    more = error.type if name == "TTransportException" else getattr(error, "code", None)
    return name if more is None else f"{name}:{more}"


class Session(Protocol):
    """How one client reaches what is tested."""

    def call(self, sequence: int, bodies: Sequence[bytes]) -> list[Any]:
        """An ``Answer`` or an exception for each image; raises what breaks the session."""

    def renew(self) -> None:
        """A new connection in place of a broken one; raises ``OSError``."""

    def close(self) -> None: ...


class PipeSession:
    """Calls a pipe of this process: with a dict where a call has one image, else with a list of dicts."""

    def __init__(self, run: pipe, batch: int) -> None:
        self._pipe, self._batch = run, batch

    def call(self, sequence: int, bodies: Sequence[bytes]) -> list[Any]:
        """Of several images that failed with a defect the pipe raises the first; it counts for each of them."""
        items: list[dict[str, Any]] = [{TASK_DATA_KEY: body} for body in bodies]
        raised: Exception | None = None
        try:
            self._pipe(items[0] if self._batch == 1 else items)
        except Exception as error:  # whatever a pipe raises is a finding, by type
            raised = error
        return [
            Answer(_label(item[TASK_RESULT_KEY])) if TASK_RESULT_KEY in item else item.get(TASK_ERROR_KEY, raised)
            for item in items
        ]

    def renew(self) -> None:
        """A pipe needs no connection."""

    def close(self) -> None:
        """The pipe belongs to the run."""


def _label(result: Any) -> str | None:
    """The label of ``(label, score)``."""
    return str(result[0]) if isinstance(result, tuple) and len(result) == 2 else None


class Client:
    """Sends calls and enters them in its log; errors are counted in images, by ``error_name``.

    After ``_BROKEN_CALLS_IN_A_ROW`` calls without a reply, or when no new connection can be had, it gives up.
    """

    def __init__(
        self, plan: Plan, payload: Payload, session: Session, log: CallLog, is_stopping: Callable[[], bool]
    ) -> None:
        self.log = log
        self.errors: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        self._plan, self._payload, self._session, self._is_stopping = plan, payload, session, is_stopping
        self._sequence, self._next_image = 0, plan.first_image

    def warm_up(self) -> None:
        """The plan's calls, not counted; ends early when one of them breaks the session. Raises ``OSError``."""
        for _ in range(self._plan.warmup):
            if self._is_stopping():
                return
            try:
                self._session.call(*self._next_call(self._plan.batch)[:2])
            except Exception:
                self._session.renew()
                return

    def work(self, pace: Pace, cpu_clock: Callable[[], int]) -> int:
        """The plan's share, or as much of it as comes before the stop or the pace ends it.

        Returns how many images it gave up because it could not reach the service any more.
        """
        began, cpu = time.perf_counter_ns(), cpu_clock()
        left, given_up, broken_in_a_row = self._plan.share, 0, 0
        lag = LagMeter()
        while left and not self._is_stopping():
            turn = pace.wait_next()
            if turn is None:
                break
            if pace.is_open:
                self.log.delay(*lag.sent(*turn))
            count = min(self._plan.batch, left)
            left -= count
            sequence, bodies, labels = self._next_call(count)
            try:
                answers = self._session.call(sequence, bodies)
            except Exception as error:  # whatever a server does to a connection is a finding, by type
                ended = time.perf_counter_ns()
                self._count_error(error, count)
                self.log.count(count, 0, 0, 0)
                self.log.record(ended - turn[0], ended, NO_REPLY)
                broken_in_a_row += 1
                if broken_in_a_row >= _BROKEN_CALLS_IN_A_ROW or not self._can_renew():
                    given_up = left
                    break
            else:
                ended = time.perf_counter_ns()
                broken_in_a_row = ok = correct = 0
                for answer, label in zip(answers, labels, strict=True):
                    if isinstance(answer, Answer):
                        ok += 1
                        correct += label is not None and answer.label == label
                    else:
                        self._count_error(answer, 1)
                self.log.count(count, count, ok, correct)
                self.log.record(ended - turn[0], ended, ok)
            if pace.is_open:
                lag.free(time.perf_counter_ns())
        self._session.close()
        self.log.close(cpu_clock() - cpu, time.perf_counter_ns() - began)
        return given_up

    def _next_call(self, count: int) -> tuple[int, list[bytes], list[str | None]]:
        """Sequence number, bodies and expected labels of the next ``count`` images."""
        bodies, labels = self._payload.bodies, self._payload.labels
        picks = [(self._next_image + offset) % len(bodies) for offset in range(count)]
        self._next_image = (self._next_image + count) % len(bodies)
        self._sequence += 1
        return self._sequence, [bodies[pick] for pick in picks], [labels[pick] for pick in picks]

    def _count_error(self, error: Any, images: int) -> None:
        name = error_name(error)
        self.errors[name] += images
        if name not in self.examples:
            self.examples[name] = str(getattr(error, "message", None) or first_line(error)).strip().split("\n", 1)[0]

    def _can_renew(self) -> bool:
        try:
            self._session.renew()
        except OSError:
            return False
        return True


# --- all clients of a run


class ClientThreads:
    """Owns the client threads of one run on a pipe, in a closed loop."""

    def __init__(self, plans: Sequence[Plan], run: pipe, payload: Payload) -> None:
        self._clients = [
            Client(plan, payload, PipeSession(run, plan.batch), CallLog(plan.calls), lambda: self._is_stopping)
            for plan in plans
        ]
        self._warm, self._gate, self._is_stopping = threading.Semaphore(0), threading.Event(), False
        self._threads = [
            threading.Thread(target=self._main, args=(client,), name=f"torchpipe-bench-{index}", daemon=True)
            for index, client in enumerate(self._clients)
        ]

    def warm_up(self) -> None:
        """Start the clients, until every one of them is warm and waits at the gate."""
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            self._warm.acquire()

    def run(self, progress: Callable[[int], None]) -> Outcome:
        """Open the gate and wait for all clients; ``progress`` gets the number of images sent, now and then.

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
        """End every client after the call it is in; wait a little for that. May be called again, and at any time."""
        self._is_stopping = True
        self._gate.set()
        deadline = time.monotonic() + _GRACE_S
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))

    def _main(self, client: Client) -> None:
        try:
            client.warm_up()
        finally:
            self._warm.release()
        self._gate.wait()
        client.work(Pace(None, 0, None, lambda: self._is_stopping), time.thread_time_ns)


@dataclass(frozen=True)
class _Child:
    """A client process as its parent sees it."""

    plan: Plan
    log: CallLog
    process: Any
    channel: Channel

    def receive(self) -> Any:
        """The process's next message, None when it died: ``READY`` or why it is not; then errors and examples."""
        try:
            return self.channel.recv()
        except (EOFError, OSError):
            return None


class ClientProcesses:
    """Owns the client processes of one run. Make it before any thread exists: it forks.

    Clients wait in a read of a pipe, the gate, that only the parent can write: closing it wakes all of them at once,
    and so does the parent's death, which leaves the state at ``WAITING``.
    """

    def __init__(self, load: Load, connect: Callable[[int], Session], payload: Payload) -> None:
        """Fork; ``connect(client)`` makes a client's session, in its process.

        ``ToolError`` where the system lacks descriptors, memory or processes for all of them.
        """
        self._load, self._connect, self._payload = load, connect, payload
        self._shared = shared_words(2)  # the state; when the run begins, in ns of perf_counter_ns
        self._parent = os.getpid()
        self._gate, self._opener = os.pipe()
        self._children: list[_Child] = []
        context = multiprocessing.get_context("fork")
        gc.freeze()  # what exists now stays shared: no collection in a client touches it
        try:
            for plan in load.plans:
                log = CallLog(plan.calls)
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=self._main, args=(plan, log, theirs), daemon=True)
                process.start()
                self._children.append(_Child(plan, log, process, ours))
                theirs.close()  # NOTE: before the next fork, or its death would not end the channel
        except OSError as error:
            self.stop()
            raise ToolError(
                f"only {len(self._children)} of {counted(len(load.plans), 'client process')} can be started: "
                f"{error.strerror or error}; start fewer (--request_client), or allow more (ulimit -n, ulimit -u)"
            ) from error

    @property
    def pids(self) -> list[int]:
        return [child.process.pid for child in self._children]

    def wait_ready(self) -> None:
        """Until every client is connected and warm; ``ToolError`` with the first reason why one is not."""
        waiting: dict[Any, _Child] = {child.channel: child for child in self._children}
        while waiting:
            for channel in wait(list(waiting)):
                child = waiting.pop(channel)
                message = child.receive()
                if message != READY:
                    raise ToolError(message or f"client {child.plan.index} died before the start")

    def run(self, progress: Callable[[int], None]) -> Outcome:
        """Open the gate and wait for all clients; ``progress`` gets the number of images sent, now and then.

        KeyboardInterrupt ends the run early: what was done until then is the outcome.
        """
        start = time.perf_counter_ns() + self._load.head_start
        outcome = Outcome(start, [child.log for child in self._children])
        try:  # NOTE: before the gate opens, for an interrupt from then on must find someone to report the part done
            self._shared[1], self._shared[0] = start, GOING
            self._open_gate()
            waiting: list[Any] = [child.channel for child in self._children]
            while waiting:  # until every client has sent its last message, or died
                for channel in wait(waiting, _LOOK_S):
                    waiting.remove(channel)
                progress(sum(child.log.sent for child in self._children))
        except KeyboardInterrupt:
            outcome.interrupted = True
            self.stop()
        for child in self._children:
            message = child.receive()
            if message is None:  # a process that ended without one owes all that has no result
                owed = child.log.sent - child.log.images_ok
                if not outcome.interrupted:
                    owed = max(1, owed + self._load.unsent(child.plan.share - child.log.sent))
                message = {"interrupted" if outcome.interrupted else "ClientProcessDied": owed}, {}
            outcome.errors += Counter(message[0])
            outcome.examples |= message[1]
        return outcome

    def stop(self) -> None:
        """End every client, after a grace by force. May be called again, and at any time."""
        self._shared[0] = STOPPING
        self._open_gate()
        deadline = time.monotonic() + _GRACE_S
        for child in self._children:
            child.process.join(max(0.0, deadline - time.monotonic()))
        for child in self._children:
            child.process.terminate()
            child.process.join()
        end, self._gate = self._gate, -1
        if end >= 0:
            os.close(end)

    def _open_gate(self) -> None:
        end, self._opener = self._opener, -1  # NOTE: before the close: an interrupt must not close it twice
        if end >= 0:
            os.close(end)

    # --- in a client process

    def _is_stopping(self) -> bool:
        """Whether to end: the parent said so, or is gone."""
        return self._shared[0] == STOPPING or os.getppid() != self._parent

    def _main(self, plan: Plan, log: CallLog, channel: Channel) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent takes it, and stops the clients
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.close(self._opener)  # the copy of the parent's end
        try:
            client = Client(plan, self._payload, self._connect(plan.index), log, self._is_stopping)
            client.warm_up()
        except OSError as error:
            channel.send(f"client {plan.index} cannot connect to the service: {error.strerror or error}")
            return
        try:
            channel.send(READY)
        except BrokenPipeError:  # the parent is gone
            return
        os.read(self._gate, 1)
        if self._shared[0] != GOING:
            return
        given_up = client.work(self._load.pace(plan.index, self._shared[1], self._is_stopping), time.process_time_ns)
        if os.getppid() == self._parent:
            if unsent := self._load.unsent(given_up):
                client.errors["unsent"] += unsent
            channel.send((dict(client.errors), client.examples))
