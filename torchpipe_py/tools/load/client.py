"""Clients: each sends its share of the images, over its own connection or, for a pipe, on its own thread."""

from __future__ import annotations

import asyncio
import errno
import gc
import select
import selectors
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import islice, repeat
from multiprocessing.connection import Connection as Channel
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from torchpipe_py.cores import usable_cores
from torchpipe_py.errors import WorkerDied
from torchpipe_py.keys import TASK_DATA_KEY, TASK_ERROR_KEY, TASK_NODE_NAME_KEY, TASK_RESULT_KEY
from torchpipe_py.proc.child import ChildProcess
from torchpipe_py.runtime.pipe import pipe
from torchpipe_py.tools.load.arrivals import NS_PER_S, Load, Payload, Plan, deal
from torchpipe_py.tools.load.records import NO_REPLY, Answer, CallLog, Outcome, Tally, error_name
from torchpipe_py.tools.report import ToolError

if TYPE_CHECKING:
    from torchpipe_py.tools.load.wire import Endpoint

_BROKEN_CALLS_IN_A_ROW = 10
_LOOK_S = 0.25
_GRACE_S = 1.0
_NAP_S = 0.001
_HEAD_START_NS = NS_PER_S // 10  # for all client processes to be awake when an open loop starts


class LagMeter:
    """Measures how much of a late send is the client's own fault, including delays left over from earlier sends.

    All times are in ns. ``starved`` is the total time that the client's process had no CPU, if known.
    """

    def __init__(self) -> None:
        self._free = self._lag = self._starved = 0

    def sent(self, due: int, sent: int, starved: int = 0) -> tuple[int, int]:
        """How late a send was, and by how much a client that never waits for a CPU would have been earlier.

        The delay since the client was free and the call due is added to the rest of earlier delays, but a client cannot
        lag further behind an ideal one than behind its schedule.
        """
        late = sent - due
        self._lag, self._starved = min(late, self._lag + sent - max(due, self._free)), starved
        return late, self._lag

    def free(self, now: int, starved: int = 0) -> None:
        """Note that the client finished a call, at ``now`` of ``perf_counter_ns``; its reply may have waited."""
        self._free = now
        self._lag += starved - self._starved


class Client:
    """Takes the images of a plan in turn, and records the outcomes in log and tally."""

    def __init__(self, plan: Plan, payload: Payload, log: CallLog, tally: Tally) -> None:
        self.plan, self.log, self.tally = plan, log, tally
        self.left = plan.share
        self._payload = payload
        self._sequence, self._next_image = 0, plan.first_image
        self._picks: list[int] = []

    def next_call(self, count: int) -> tuple[int, list[bytes]]:
        """Sequence number and bodies of the next ``count`` images."""
        bodies = self._payload.bodies
        self._picks = [(self._next_image + offset) % len(bodies) for offset in range(count)]
        self._next_image = (self._next_image + count) % len(bodies)
        self._sequence += 1
        return self._sequence, [bodies[pick] for pick in self._picks]

    def next_counted(self) -> tuple[int, list[bytes]]:
        """``next_call`` with the next images of its share, at most a batch."""
        count = min(self.plan.batch, self.left)
        self.left -= count
        return self.next_call(count)

    def enter(self, due: int, outcome: list[Any] | Exception, late: int = 0, lag: int = 0, own: int = 0) -> None:
        """Record the end of the last call: an answer or error for each image, or an exception. Times in ns."""
        ended, size, ok, correct = time.perf_counter_ns(), len(self._picks), NO_REPLY, 0
        if isinstance(outcome, Exception):
            self.tally.count(error_name(outcome), outcome, size)
        else:
            ok = 0
            for answer, pick in zip(outcome, self._picks, strict=True):
                if isinstance(answer, Answer):
                    ok += 1
                    correct += answer.label is not None and answer.label == self._payload.labels[pick]
                else:
                    self.tally.count(error_name(answer), answer, 1, f"{self._payload.paths[pick]}: ")
        self.log.enter(correct, ended - due, ended, ok, late, lag, size, own)


# --- clients of a pipe


class ClientThreads:
    """Owns the client threads of one run on a pipe, in a closed loop."""

    def __init__(self, plans: Sequence[Plan], run: pipe, payload: Payload, node_name: str | None = None) -> None:
        self._pipe, self._is_stopping = run, False
        self._root = {} if node_name is None else {TASK_NODE_NAME_KEY: node_name}
        self._clients = [Client(plan, payload, CallLog(plan.calls), Tally()) for plan in plans]
        self._threads: list[threading.Thread] = []

    def warm_up(self) -> None:
        """Make the warm-up calls of all clients."""
        for thread in self._start(self._warm_up):
            thread.join()

    def run(self, progress: Callable[[int], None]) -> Outcome:
        """Start all clients and wait for them; ``progress`` is called now and then with the number of images sent.

        KeyboardInterrupt ends the run early, with the outcome so far.
        """
        outcome = Outcome(time.perf_counter_ns(), [client.log for client in self._clients])
        try:
            for thread in self._start(self._work):
                while thread.is_alive():
                    thread.join(_LOOK_S)
                    progress(sum(client.log.sent for client in self._clients))
        except KeyboardInterrupt:
            outcome.interrupted = True
            self.stop()
        for client in self._clients:
            outcome.tally.add(client.tally)
        return outcome

    def stop(self) -> None:
        """End each client after its current call, and wait briefly. May be called at any time, and again."""
        self._is_stopping = True
        deadline = time.monotonic() + _GRACE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _start(self, work: Callable[[Client], None]) -> list[threading.Thread]:
        """Start a daemon thread for each client: a backend may never return."""
        for index, client in enumerate(self._clients):
            name = f"torchpipe-bench-{index}"
            thread = threading.Thread(target=work, args=(client,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)
        return self._threads[-len(self._clients) :]

    def _warm_up(self, client: Client) -> None:
        for _ in range(client.plan.warmup):
            if not self._is_stopping:
                self._call(client.next_call(client.plan.batch)[1], client.plan.batch)

    def _work(self, client: Client) -> None:
        began, cpu = time.perf_counter_ns(), time.thread_time_ns()
        while client.left and not self._is_stopping:
            due, (_, bodies) = time.perf_counter_ns(), client.next_counted()
            client.enter(due, self._call(bodies, client.plan.batch))
        client.log.close(time.thread_time_ns() - cpu, time.perf_counter_ns() - began)

    def _call(self, bodies: Sequence[bytes], batch: int) -> list[Any]:
        """Run a call; if several images fail with a defect, the pipe raises the first, which counts for each."""
        items: list[dict[str, Any]] = [{TASK_DATA_KEY: body, **self._root} for body in bodies]
        raised: Exception | None = None
        try:
            self._pipe(items[0] if batch == 1 else items)
        except Exception as error:  # any exception is a result, counted by type
            raised = error
        return [
            Answer(_label(item[TASK_RESULT_KEY])) if TASK_RESULT_KEY in item else item.get(TASK_ERROR_KEY, raised)
            for item in items
        ]


def _label(result: Any) -> str | None:
    """The label of a ``(label, score)`` result, or None."""
    return str(result[0]) if isinstance(result, tuple) and len(result) == 2 else None


# --- clients of a service


class _Selector(selectors.DefaultSelector):
    """Wakes within microseconds of the time that asyncio asks for; epoll would round it up to milliseconds.

    ``starved`` is the total time without a CPU, in ns: preempted, or asleep for too long. It sleeps in short naps, to
    measure the latter.
    """

    def __init__(self) -> None:
        super().__init__()
        self.starved = 0
        self._woke, self._ran = time.perf_counter_ns(), time.process_time_ns()

    def select(self, timeout: float | None = None) -> Any:
        now, nap = time.perf_counter_ns(), _NAP_S if timeout is None else min(max(0.0, timeout), _NAP_S)
        self.starved += max(0, now - self._woke - (time.process_time_ns() - self._ran))
        if nap:
            select.select([self], (), (), nap)  # its descriptor is low, hence below FD_SETSIZE
        events = super().select(0)
        self._woke, self._ran = time.perf_counter_ns(), time.process_time_ns()
        self.starved += max(0, self._woke - now - round(nap * NS_PER_S)) if nap else 0
        return events


class _ServiceClient(Client):
    """A client with a connection, which is reopened when it breaks.

    It gives up after ``_BROKEN_CALLS_IN_A_ROW`` calls without a reply, or if it cannot reconnect.
    """

    def __init__(self, endpoint: Endpoint, selector: _Selector, *shared: Any) -> None:
        """``shared`` are the arguments of ``Client``."""
        super().__init__(*shared)
        self._endpoint, self._selector = endpoint, selector
        self._connection: Any = None

    async def warm_up(self, seconds: float) -> int:
        """Connect and make the plan's calls that are not counted, until one fails or ``seconds`` are over.

        Returns how many were made. Raises ``OSError`` without a connection.
        """
        await self._connect()
        made, until = 0, time.perf_counter() + seconds
        while made < self.plan.warmup and (not made or time.perf_counter() < until):
            made += 1
            try:
                await self._call(*self.next_call(self.plan.batch))
            except Exception:
                await self._connect()
                break
        return made

    async def work(self, times: Iterable[int] | None, start: int, until: int | None) -> int:
        """Send the plan's share, as far as possible before ``until``; returns how many images it gave up.

        In a closed loop (``times`` is None) a call is due once the previous one is answered. In an open loop calls are
        due at ``times``, in ns since ``start``, regardless of earlier ones: a call that became due during the previous
        one is sent right after it, late. ``start`` and ``until`` are in ns of ``perf_counter_ns``.
        """
        broken_in_a_row, lag = 0, LagMeter()
        for time_due in islice(repeat(None) if times is None else times, self.plan.calls):
            due = sent = time.perf_counter_ns()
            if time_due is not None:
                due = start + time_due
                if sent < due:
                    await asyncio.sleep((due - sent) / NS_PER_S)
                    sent = max(due, time.perf_counter_ns())
            if until is not None and sent >= until:
                break
            delay = (0, 0) if times is None else lag.sent(due, sent, self._selector.starved)
            sequence, bodies = self.next_counted()
            starved = self._selector.starved
            try:
                outcome: list[Any] | Exception = await self._call(sequence, bodies)
                broken_in_a_row = 0
            except Exception as error:  # any failure of a connection is a result, counted by type
                outcome = error
                broken_in_a_row += 1
            self.enter(due, outcome, *delay, delay[1] + self._selector.starved - starved)
            if broken_in_a_row:
                try:
                    if broken_in_a_row == _BROKEN_CALLS_IN_A_ROW:
                        return self.left
                    await self._connect()
                except OSError:
                    return self.left
            lag.free(time.perf_counter_ns(), self._selector.starved)
        return 0

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    async def _call(self, sequence: int, bodies: Sequence[bytes]) -> list[Any]:
        request = self._endpoint.wire.request(self.plan.index, sequence, bodies)
        answers: list[Any] = await self._connection.call(sequence, len(bodies), request)
        endpoint = self._endpoint.fitting(answers)
        if endpoint is None:
            return answers
        self._endpoint = endpoint
        await self._connect()
        return await self._call(sequence, bodies)

    async def _connect(self) -> None:
        self.close()
        self._connection = await self._endpoint.connect(self._endpoint.timeout)


class ClientProcesses:
    """Owns the client processes of one run, one for two cores, each with its share of the clients on an asyncio loop.

    Create it before any thread exists, since it forks. A process receives the start time; any other message, or the end
    of its channel, ends it.
    """

    def __init__(self, load: Load, endpoint: Endpoint, payload: Payload) -> None:
        """Fork the processes; ``ToolError`` if the system lacks descriptors, memory or processes."""
        self._load, self._endpoint, self._payload = load, endpoint, payload
        self._children: list[ChildProcess] = []
        self._plans: list[Sequence[Plan]] = []
        self._logs: list[CallLog] = []
        gc.freeze()  # keeps existing objects shared: collections in clients do not touch them
        count = min(len(load.plans), max(1, usable_cores() // 2))
        try:
            for index in range(count):
                plans = load.plans[index::count]
                log = CallLog(sum(plan.calls for plan in plans))
                self._children.append(ChildProcess.fork("client process", self._main, plans, log))
                self._plans.append(plans)
                self._logs.append(log)
        except OSError as error:
            self.stop()
            raise ToolError(f"cannot start {count} client processes: {error.strerror or error}") from error

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self._children]

    def wait_ready(self) -> int:
        """Wait until every client is connected and warm; returns the calls made for that.

        Raises ``ToolError`` with the first reason why one is not.
        """
        calls = 0
        for child in self._children:
            try:
                message = child.receive()
            except WorkerDied as error:
                raise ToolError(f"a {error} before the start") from error
            if not isinstance(message, int):
                raise ToolError(message)
            calls += message
        return calls

    def run(self, progress: Callable[[int], None]) -> Outcome:
        """Start the clients and wait for them; ``progress`` is called now and then with the number of images sent.

        KeyboardInterrupt ends the run early, with the outcome so far.
        """
        start = time.perf_counter_ns() + (_HEAD_START_NS if self._load.is_open else 0)
        outcome = Outcome(start, self._logs)
        waiting: dict[Any, int] = {child.channel: index for index, child in enumerate(self._children)}
        try:  # NOTE: begins before they start, so that an interrupt from then on is reported
            self._send_all(start)
            while waiting:
                for channel in wait(list(waiting), _LOOK_S):
                    self._take(waiting.pop(channel), outcome)
                progress(sum(log.sent for log in self._logs))
        except KeyboardInterrupt:
            outcome.interrupted = True
            self._send_all(None)
            for index in waiting.values():
                self._take(index, outcome)
        return outcome

    def _take(self, index: int, outcome: Outcome) -> None:
        """Add the tally of a process, or count what it owes if it died."""
        log = self._logs[index]
        try:
            tally = self._children[index].receive(_GRACE_S if outcome.interrupted else None)
        except (WorkerDied, TimeoutError):  # everything without a result counts as failed
            owed = log.sent - log.images_ok
            if not outcome.interrupted:
                owed += self._load.unsent(sum(plan.share for plan in self._plans[index]) - log.sent)
            tally = Tally()
            tally.errors["interrupted" if outcome.interrupted else "ClientProcessDied"] += max(1, owed)
        outcome.tally.add(tally)

    def stop(self) -> None:
        """End every client, by force after a grace period. May be called at any time, and again."""
        self._send_all(None)
        deadline = time.monotonic() + _GRACE_S
        for child in self._children:
            child.end(max(0.0, deadline - time.monotonic()))

    def _send_all(self, start: int | None) -> None:
        for child in self._children:
            with suppress(WorkerDied):
                child.send(start)

    # --- in a client process

    def _main(self, channel: Channel, plans: Sequence[Plan], log: CallLog) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it and stops the clients
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        selector = _Selector()
        loop = asyncio.SelectorEventLoop(selector)
        with suppress(EOFError, OSError):  # the parent is gone
            loop.run_until_complete(self._run(plans, log, channel, selector))

    async def _run(self, plans: Sequence[Plan], log: CallLog, channel: Channel, selector: _Selector) -> None:
        tally, loop = Tally(), asyncio.get_running_loop()
        clients = [_ServiceClient(self._endpoint, selector, plan, self._payload, log, tally) for plan in plans]
        try:
            calls = await asyncio.gather(*(client.warm_up(self._load.warmup_s) for client in clients))
        except OSError as error:
            hint = "; use fewer clients (--request_client), or allow more files (ulimit -n)"
            more = hint if error.errno in (errno.EMFILE, errno.ENFILE) else ""
            channel.send(f"{len(plans)} clients cannot all connect to the service: {error.strerror}{more}")
            return
        channel.send(sum(calls))
        start = channel.recv()
        if start is None:
            return
        began, cpu = time.perf_counter_ns(), time.process_time_ns()
        until = None if self._load.until is None else start + self._load.until
        due = (
            [None] * len(self._load.plans)
            if self._load.times is None
            else deal(self._load.times, len(self._load.plans))
        )
        work = asyncio.gather(*(client.work(due[client.plan.index], start, until) for client in clients))
        loop.add_reader(channel.fileno(), work.cancel)
        with suppress(asyncio.CancelledError):
            if unsent := self._load.unsent(sum(await work)):
                tally.errors["unsent"] += unsent
        loop.remove_reader(channel.fileno())
        log.close(time.process_time_ns() - cpu, time.perf_counter_ns() - began)
        for client in clients:
            client.close()
        channel.send(tally)
