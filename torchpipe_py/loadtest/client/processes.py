"""Clients as processes: each has one connection, over which it sends its share of the images."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection as Channel
from multiprocessing.connection import wait
from typing import Any

from torchpipe_py.errors import counted
from torchpipe_py.loadtest.arrivals import Arrivals, CallTime, LagMeter, Load
from torchpipe_py.loadtest.client.connection import Endpoint, connect_with_retries
from torchpipe_py.loadtest.client.wire import Template, Wire, error_message, error_name
from torchpipe_py.loadtest.errors import CannotRunError
from torchpipe_py.loadtest.plans import Payload, Plan, Rotation
from torchpipe_py.loadtest.records import NO_REPLY, CallLog, Outcome, shared_words

READY = "ready"
WAITING, GOING, STOPPING = range(3)

_BROKEN_CALLS_IN_A_ROW = 10
_LOOK_S = 0.25
_GRACE_S = 1.0


class Gate:
    """Starts all client processes at once, and tells them to stop, through memory that they share with the parent.

    Clients sleep in a read of a pipe that only the parent can write: closing it wakes all of them, and so does the
    parent's death, which leaves the state at `WAITING`.
    """

    def __init__(self) -> None:
        self._state = shared_words(2)
        self._parent = os.getpid()
        self._read_end, self._write_end = os.pipe()

    @property
    def is_stopping(self) -> bool:
        """In a client: whether to end, told to or orphaned."""
        return self._state[0] == STOPPING or self.is_orphaned

    @property
    def is_orphaned(self) -> bool:
        """In a client: whether its parent is no more."""
        return os.getppid() != self._parent

    @property
    def start(self) -> int:
        """In a client: when the run begins, in ns of `perf_counter_ns`, which is one clock for all processes."""
        return self._state[1]

    def wait(self) -> bool:
        """In a client: blocks until the gate is opened; whether there is work to do."""
        os.read(self._read_end, 1)
        return self._state[0] == GOING

    def enter_client(self) -> None:
        """In a client, right after the fork: gives up its copy of the parent's end."""
        os.close(self._write_end)

    def open(self, start: int) -> None:
        """In the parent: every client goes to work; the run begins at `start`, in ns of `perf_counter_ns`."""
        self._state[1] = start
        self._state[0] = GOING
        self._wake()

    def stop(self) -> None:
        """In the parent: every client ends, at the latest after the call it is in. May be called again."""
        self._state[0] = STOPPING
        self._wake()

    def close(self) -> None:
        """In the parent, once no client is left. May be called again."""
        end, self._read_end = self._read_end, -1
        if end >= 0:
            os.close(end)

    def _wake(self) -> None:
        end, self._write_end = self._write_end, -1  # NOTE: before the close: an interrupt must not close it twice
        if end >= 0:
            os.close(end)


class ServiceClient:
    """Sends calls and enters them in its log; errors are counted in images, by `error_name`.

    After `_BROKEN_CALLS_IN_A_ROW` calls without a reply, or when no new connection can be had within the endpoint's
    timeout, it gives up: the images that it has not sent are errors named `unsent`.
    """

    def __init__(self, plan: Plan, endpoint: Endpoint, wire: Wire, payload: Payload, log: CallLog, gate: Gate) -> None:
        """Connects; raises `OSError`."""
        self.errors: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        self._plan, self._endpoint, self._wire = plan, endpoint, wire
        self._payload, self._log, self._gate = payload, log, gate
        self._templates: dict[int, Template] = {}
        self._sequence = 0
        self._rotation = Rotation(plan.first_image, len(payload.bodies))
        self._broken_in_a_row = 0
        self._connection = connect_with_retries(wire, endpoint)

    def warm_up(self) -> None:
        """The plan's calls, not counted; ends early when one of them breaks the connection. Raises `OSError`."""
        for _ in range(self._plan.warmup):
            try:
                self._exchange(self._plan.batch)
            except Exception:
                self._connection.close()
                self._connection = connect_with_retries(self._wire, self._endpoint)
                return
            if self._gate.is_stopping:
                return

    def work(self, arrivals: Arrivals) -> int:
        """The plan's share, or as much of it as comes before the gate or the arrivals say stop.

        Returns how many images it gave up because it could reach the server no more.
        """
        left, given_up = self._plan.share, 0
        lag = LagMeter()
        while left and not self._gate.is_stopping:
            call = arrivals.wait_next()
            if call is None:
                break
            if arrivals.is_open:
                self._log.delay(*lag.sent(call))
            count = min(self._plan.batch, left)
            left -= count
            if not self._send(count, call) and not self._recover():
                given_up = left
                break
            if arrivals.is_open:
                lag.free(time.perf_counter_ns())
        self._connection.close()
        return given_up

    def _send(self, count: int, call: CallTime) -> bool:
        """Whether the call was answered, be it with an error."""
        try:
            answers, labels = self._exchange(count)
        except Exception as error:  # whatever a server does to a connection is a finding, by type
            ended = time.perf_counter_ns()
            self._count_error(error, count)
            self._log.count(count, 0, 0, 0)
            self._log.record(ended - call.due, ended, NO_REPLY)
            return False
        ended = time.perf_counter_ns()
        ok, correct = self._judge(answers, labels)
        self._log.count(count, count, ok, correct)
        self._log.record(ended - call.due, ended, ok)
        self._broken_in_a_row = 0
        return True

    def _exchange(self, count: int) -> tuple[list[Any], list[str | None]]:
        """Sends the next `count` images; one answer and one expected label for each."""
        payload, picks = self._payload, self._rotation.take(count)
        self._sequence += 1
        if count not in self._templates:
            self._templates[count] = self._wire.template(count, self._plan.index)
        buffers = self._templates[count].fill(self._sequence, [payload.bodies[pick] for pick in picks])
        return self._connection.call(self._sequence, count, buffers), [payload.labels[pick] for pick in picks]

    def _judge(self, answers: list[Any], labels: list[str | None]) -> tuple[int, int]:
        """How many images have a result, and how many the expected label; counts the errors."""
        ok = correct = 0
        for answer, label in zip(answers, labels, strict=True):
            if isinstance(answer, Exception):
                self._count_error(answer, 1)
            else:
                ok += 1
                correct += answer.label == label
        return ok, correct

    def _count_error(self, error: Exception, images: int) -> None:
        name = error_name(error)
        self.errors[name] += images
        if name not in self.examples and (message := error_message(error)):
            self.examples[name] = message

    def _recover(self) -> bool:
        """A new connection after a broken call; False when there is no point in going on."""
        self._connection.close()
        self._broken_in_a_row += 1
        if self._broken_in_a_row >= _BROKEN_CALLS_IN_A_ROW:
            return False
        try:
            self._connection = connect_with_retries(self._wire, self._endpoint)
        except OSError:
            return False
        return True


class ClientProcess:
    """One client: `_main` runs in a process of its own, the rest is the parent's side of it."""

    def __init__(self, plan: Plan, load: Load, endpoint: Endpoint, wire: Wire, payload: Payload, gate: Gate) -> None:
        """Forks."""
        self.plan, self.log = plan, CallLog(plan.calls)
        self._load, self._endpoint, self._wire, self._payload, self._gate = load, endpoint, wire, payload, gate
        context = multiprocessing.get_context("fork")
        self.channel, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=self._main, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()  # NOTE: before the next fork, or its death would not end the channel

    def receive(self) -> Any:
        """The process's next word, None when it died: `READY` or why it is not; then its errors and examples."""
        try:
            return self.channel.recv()
        except (EOFError, OSError):
            return None

    def last_errors(self, interrupted: bool) -> tuple[Counter[str], dict[str, str]]:
        """The errors that it sent in the end, in images by type, and an example of each.

        A process that ended without a word owes all that has no result.
        """
        word = self.receive()
        if word is not None:
            errors, examples = word
            return Counter(errors), examples
        owed = self.log.sent - self.log.images_ok
        if interrupted:
            return Counter({"interrupted": owed}), {}
        owed += self._load.unsent(self.plan.share - self.log.sent)
        return Counter({"ClientProcessDied": max(1, owed)}), {}

    def _main(self, channel: Channel) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, and stops the clients by the gate
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        gate, plan = self._gate, self.plan
        gate.enter_client()
        try:
            client = ServiceClient(plan, self._endpoint, self._wire, self._payload, self.log, gate)
            client.warm_up()
        except OSError as error:
            channel.send(f"client {plan.index} cannot connect to {self._endpoint}: {error.strerror or error}")
            return
        try:
            channel.send(READY)
        except BrokenPipeError:  # the parent is gone
            return
        if gate.wait():
            wall, cpu = time.perf_counter_ns(), time.process_time_ns()
            given_up = client.work(self._load.arrivals(plan.index, gate.start, lambda: gate.is_stopping))
            self.log.close(time.process_time_ns() - cpu, time.perf_counter_ns() - wall)
            if not gate.is_orphaned:
                if unsent := self._load.unsent(given_up):
                    client.errors["unsent"] += unsent
                channel.send((dict(client.errors), client.examples))


class ClientProcesses:
    """Owns the client processes of one run. Make it before any thread exists: it forks."""

    def __init__(self, load: Load, endpoint: Endpoint, wire: Wire, payload: Payload) -> None:
        """Forks; `CannotRunError` where the system has not enough descriptors, memory or processes for all of them."""
        self._load = load
        self._gate = Gate()
        self._clients: list[ClientProcess] = []
        gc.freeze()  # what exists now stays shared: no collection in a client touches it
        try:
            for plan in load.plans:
                self._clients.append(ClientProcess(plan, load, endpoint, wire, payload, self._gate))
        except OSError as error:
            self.stop()
            raise CannotRunError(
                f"only {len(self._clients)} of {counted(len(load.plans), 'client process')} can be started: "
                f"{error.strerror or error}; start fewer (--request_client), or allow more (ulimit -n, ulimit -u)"
            ) from error

    @property
    def pids(self) -> list[int]:
        return [client.process.pid for client in self._clients if client.process.pid]

    def wait_ready(self) -> None:
        """Until every client is connected and warm; `CannotRunError` with the first reason why one is not."""
        waiting: dict[Any, ClientProcess] = {client.channel: client for client in self._clients}
        while waiting:
            for channel in wait(list(waiting)):
                client = waiting.pop(channel)
                word = client.receive()
                if word != READY:
                    raise CannotRunError(word or f"client {client.plan.index} died before the start")

    def run(self, progress: Callable[[int], None]) -> Outcome:
        """Opens the gate and waits for all clients; `progress` gets the number of images sent, now and then.

        KeyboardInterrupt ends the run early: what was done until then is the outcome.
        """
        start = time.perf_counter_ns() + self._load.head_start
        outcome = Outcome(start, [client.log for client in self._clients])
        try:  # NOTE: before the gate opens, for an interrupt from then on must find someone to report the part done
            self._gate.open(start)
            waiting: list[Any] = [client.channel for client in self._clients]
            while waiting:  # until every client has spoken its last word, or died
                for channel in wait(waiting, _LOOK_S):
                    waiting.remove(channel)
                progress(sum(client.log.sent for client in self._clients))
        except KeyboardInterrupt:
            outcome.interrupted = True
            self.stop()
        for client in self._clients:
            errors, examples = client.last_errors(outcome.interrupted)
            outcome.errors += errors
            outcome.examples |= examples
        return outcome

    def stop(self) -> None:
        """Ends every client, after a grace by force. May be called again, and at any time."""
        self._gate.stop()
        deadline = time.monotonic() + _GRACE_S
        for client in self._clients:
            client.process.join(max(0.0, deadline - time.monotonic()))
        for client in self._clients:
            client.process.terminate()
        for client in self._clients:
            client.process.join()
        self._gate.close()
