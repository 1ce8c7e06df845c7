"""One client: a process with one connection, which sends its share of the images."""

from __future__ import annotations

import signal
import time
from collections import Counter
from multiprocessing.connection import Connection as Channel
from types import ModuleType
from typing import Any

from torchpipe_py.loadtest.client.arrivals import Arrivals, Turn
from torchpipe_py.loadtest.client.connection import Endpoint, connect_patiently
from torchpipe_py.loadtest.client.gate import Gate
from torchpipe_py.loadtest.client.loads import Load
from torchpipe_py.loadtest.client.wire import CallTemplate, answers_of, error_name
from torchpipe_py.loadtest.images import Payload
from torchpipe_py.loadtest.ledger import NO_REPLY, Ledger
from torchpipe_py.loadtest.measure.lateness import LagMeter
from torchpipe_py.loadtest.plans import Plan, Rotation

READY = "ready"

_BROKEN_CALLS_IN_A_ROW = 10


class Client:
    """Sends calls and enters them in its ledger; errors are counted in images, by `error_name`.

    A call is `infer_batch` where the plan has one image per call, else `infer_many`.

    After `_BROKEN_CALLS_IN_A_ROW` calls without a reply, or when no new connection can be had within the endpoint's
    timeout, it gives up: the images that it has not sent are errors named `unsent`.
    """

    def __init__(
        self, plan: Plan, endpoint: Endpoint, idl: ModuleType, payload: Payload, ledger: Ledger, gate: Gate
    ) -> None:
        """Connects; raises `OSError`."""
        self.errors: Counter[str] = Counter()
        self._plan, self._endpoint, self._idl = plan, endpoint, idl
        self._payload, self._ledger, self._gate = payload, ledger, gate
        self._method = "infer_batch" if plan.batch == 1 else "infer_many"
        self._templates: dict[int, CallTemplate] = {}
        self._sequence = 0
        self._rotation = Rotation(plan.first_image, len(payload.bodies))
        self._broken_in_a_row = 0
        self._connection = connect_patiently(idl, endpoint)

    def warm_up(self) -> None:
        """The plan's calls, not counted; ends early when one of them breaks the connection. Raises `OSError`."""
        for _ in range(self._plan.warmup):
            try:
                self._exchange(self._plan.batch)
            except Exception:
                self._connection.close()
                self._connection = connect_patiently(self._idl, self._endpoint)
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
            turn = arrivals.wait_turn()
            if turn is None:
                break
            if arrivals.is_open:
                self._ledger.delay(*lag.sent(turn))
            count = min(self._plan.batch, left)
            left -= count
            if not self._one_call(count, turn) and not self._recover():
                given_up = left
                break
            if arrivals.is_open:
                lag.free(time.perf_counter_ns())
        self._connection.close()
        return given_up

    def _one_call(self, count: int, turn: Turn) -> bool:
        """Whether the call was answered, be it with an error."""
        try:
            answers, labels = self._exchange(count)
        except Exception as error:  # whatever a server does to a connection is a finding, by type
            ended = time.perf_counter_ns()
            self.errors[error_name(error)] += count
            self._ledger.count(count, 0, 0, 0)
            self._ledger.record(ended - turn.due, ended, NO_REPLY)
            return False
        ended = time.perf_counter_ns()
        ok, correct = self._judge(answers, labels)
        self._ledger.count(count, count, ok, correct)
        self._ledger.record(ended - turn.due, ended, ok)
        self._broken_in_a_row = 0
        return True

    def _exchange(self, count: int) -> tuple[list[Any], list[str | None]]:
        """Sends the next `count` images; one answer and one expected label for each."""
        payload, picks = self._payload, self._rotation.take(count)
        self._sequence += 1
        buffers = self._template(count).fill(self._sequence, [payload.bodies[pick] for pick in picks])
        result = self._connection.call(self._method, self._sequence, buffers)
        return answers_of(result, count), [payload.labels[pick] for pick in picks]

    def _template(self, count: int) -> CallTemplate:
        template = self._templates.get(count)
        if template is None:
            template = CallTemplate(self._idl, self._method, count, self._plan.index, self._endpoint.framed)
            self._templates[count] = template
        return template

    def _judge(self, answers: list[Any], labels: list[str | None]) -> tuple[int, int]:
        """How many images have a result, and how many the expected label; counts the errors."""
        ok = correct = 0
        for answer, label in zip(answers, labels, strict=True):
            if isinstance(answer, Exception):
                self.errors[error_name(answer)] += 1
            else:
                ok += 1
                correct += answer.label == label
        return ok, correct

    def _recover(self) -> bool:
        """A new connection after a broken call; False when there is no point in going on."""
        self._connection.close()
        self._broken_in_a_row += 1
        if self._broken_in_a_row >= _BROKEN_CALLS_IN_A_ROW:
            return False
        try:
            self._connection = connect_patiently(self._idl, self._endpoint)
        except OSError:
            return False
        return True


def client_main(
    plan: Plan,
    load: Load,
    endpoint: Endpoint,
    idl: ModuleType,
    payload: Payload,
    ledger: Ledger,
    gate: Gate,
    channel: Channel,
) -> None:
    """A client process: sends `READY`, or the reason why it is not; then, its work done, its errors."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, and stops the clients by the gate
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gate.enter_client()
    try:
        client = Client(plan, endpoint, idl, payload, ledger, gate)
        client.warm_up()
    except OSError as error:
        channel.send(f"client {plan.index} cannot connect to {endpoint}: {error.strerror or error}")
        return
    try:
        channel.send(READY)
    except BrokenPipeError:  # the parent is gone
        return
    if gate.wait():
        wall, cpu = time.perf_counter_ns(), time.process_time_ns()
        given_up = client.work(load.arrivals(plan.index, gate.start, lambda: gate.is_stopping))
        ledger.close(time.process_time_ns() - cpu, time.perf_counter_ns() - wall)
        if not gate.is_orphaned:
            if unsent := load.unsent(given_up):
                client.errors["unsent"] += unsent
            channel.send(dict(client.errors))
