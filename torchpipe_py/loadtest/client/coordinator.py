"""The parent's side of a run: fork the clients, start them together, watch, and collect what they did."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection as Channel
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any

from torchpipe_py.loadtest.client.clients import READY, client_main
from torchpipe_py.loadtest.client.connection import Endpoint
from torchpipe_py.loadtest.client.gate import Gate
from torchpipe_py.loadtest.client.loads import Load
from torchpipe_py.loadtest.errors import CannotRunError
from torchpipe_py.loadtest.images import Payload
from torchpipe_py.loadtest.ledger import Ledger, Outcome
from torchpipe_py.loadtest.plans import Plan

_LOOK_S = 0.25
_GRACE_S = 1.0


@dataclass
class ClientRun:
    """One client as the parent sees it. `errors` is None until its process has sent them."""

    plan: Plan
    ledger: Ledger
    process: BaseProcess
    channel: Channel
    errors: dict[str, int] | None = None

    def final_errors(self, interrupted: bool, load: Load) -> Counter[str]:
        """Errors in images, by type. A process that ended without a word owes all that has no result."""
        if self.errors is not None:
            return Counter(self.errors)
        if interrupted:
            return Counter({"interrupted": self.ledger.sent - self.ledger.images_ok})
        sent = self.ledger.sent
        owed = sent - self.ledger.images_ok + load.unsent(self.plan.share - sent)
        return Counter({"ClientProcessDied": max(1, owed)})


class Coordinator:
    """Owns the client processes of one run. Make it before any thread exists: it forks."""

    def __init__(self, load: Load, endpoint: Endpoint, idl: ModuleType, payload: Payload) -> None:
        self._load = load
        self._gate = Gate()
        self._arguments = (load, endpoint, idl, payload)
        self._context = multiprocessing.get_context("fork")
        gc.freeze()  # what exists now stays shared: no collection in a client touches it
        self._clients = [self._fork(plan) for plan in load.plans]

    def _fork(self, plan: Plan) -> ClientRun:
        ledger = Ledger(plan.calls)
        ours, theirs = self._context.Pipe(duplex=False)
        arguments = (plan, *self._arguments, ledger, self._gate, theirs)
        process = self._context.Process(target=client_main, args=arguments, daemon=True)
        process.start()
        theirs.close()  # NOTE: before the next fork, or its death would not end the channel
        return ClientRun(plan, ledger, process, ours)

    @property
    def pids(self) -> list[int]:
        return [client.process.pid for client in self._clients if client.process.pid]

    def wait_ready(self) -> None:
        """Until every client is connected and warm; `CannotRunError` with the first reason why one is not."""
        waiting: dict[Any, ClientRun] = {client.channel: client for client in self._clients}
        while waiting:
            for channel in wait(list(waiting)):
                client = waiting.pop(channel)
                word = _receive(client.channel)
                if word != READY:
                    raise CannotRunError(word or f"client {client.plan.index} died before the start")

    def run(self, progress: Callable[[int], None]) -> Outcome:
        """Opens the gate and waits for all clients; `progress` gets the number of images sent, now and then.

        KeyboardInterrupt ends the run early: what was done until then is the outcome.
        """
        start = time.perf_counter_ns() + self._load.head_start
        outcome = Outcome(start, [client.ledger for client in self._clients])
        try:  # NOTE: before the gate opens, for an interrupt from then on must find someone to report the part done
            self._gate.open(start)
            self._watch(progress)
        except KeyboardInterrupt:
            outcome.interrupted = True
            self.stop()
        for client in self._clients:
            client.errors = _receive(client.channel)
            outcome.errors += client.final_errors(outcome.interrupted, self._load)
        return outcome

    def _watch(self, progress: Callable[[int], None]) -> None:
        """Until every client has spoken its last word, or died."""
        waiting: list[Any] = [client.channel for client in self._clients]
        while waiting:
            for channel in wait(waiting, _LOOK_S):
                waiting.remove(channel)
            progress(sum(client.ledger.sent for client in self._clients))

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


def _receive(channel: Channel) -> Any:
    """The next word of a client, None when it died."""
    try:
        return channel.recv()
    except (EOFError, OSError):
        return None
