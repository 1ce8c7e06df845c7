"""Cheap clients in threads: each asks, waits for its own answer, and asks again. Every second one speaks HTTP."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from chaos.tally import Tally
from chaos.wire import ClosedError, HttpWire, Reply, Wire, connect

ANSWER_WITHIN = 60.0  # seconds after which an answer counts as lost
Answer = tuple[str, float]
Ask = Callable[[int, int], tuple[bytes, Answer]]
"""Client and number of the request to the data and its answer."""


def echo(client: int, number: int) -> tuple[bytes, Answer]:
    """No two are the same."""
    data = f"{client}/{number}/".ljust(20 + number % 50, ".")
    return data.encode(), (data, float(len(data)))


@dataclass
class Manners:
    """How a client behaves. rate: requests a second, 0 as many as it can. abandon_every: it goes without waiting, each
    so-many-th time, and in the middle of a message every second time of those. reconnect_every: requests."""

    rate: float = 0.0
    abandon_every: int = 0
    reconnect_every: int = 0
    answer_within: float = ANSWER_WITHIN


class Load:
    """``clients`` threads that ask until ``total`` requests are sent, or the ``with`` block ends."""

    def __init__(
        self, port: int, clients: int, ask: Ask = echo, manners: Manners | None = None, total: int = 0
    ) -> None:
        self._port, self._ask, self._manners = port, ask, manners or Manners()
        self.retry_hints: set[int | None] = set()
        self._each = -(-total // clients) if total else 2**62
        self._is_over = threading.Event()
        self._tallies = [Tally() for _ in range(clients)]
        self._errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(index,), daemon=True) for index in range(clients)]

    @property
    def tally(self) -> Tally:
        """Of all clients, once they have ended."""
        whole = Tally()
        for tally in self._tallies:
            whole += tally
        return whole

    @property
    def sent(self) -> int:
        return sum(tally.sent for tally in self._tallies)

    @property
    def ok(self) -> int:
        """Of all clients, so far."""
        return sum(tally.ok for tally in self._tallies)

    @property
    def is_running(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def join(self) -> None:
        """Until each has its answers, and what has gone wrong with a client itself is raised."""
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self.join()

    def _run(self, client: int) -> None:
        try:
            Caller(self._port, client, self._ask, self._manners, self._tallies[client], self.retry_hints).run(
                self._each, self._is_over
            )
        except BaseException as error:
            self._errors.append(error)


class Caller:
    """One client, on its own thread."""

    def __init__(self, port: int, client: int, ask: Ask, manners: Manners, tally: Tally, hints: set) -> None:
        self._port, self._client, self._ask, self._manners = port, client, ask, manners
        self._tally, self._hints = tally, hints
        self._wire: Wire | None = None

    def run(self, count: int, is_over: threading.Event) -> None:
        began = time.monotonic()
        for number in range(count):
            if self._manners.rate:
                # Spread over the interval, so that the clients do not come all at once.
                due = began + (number + (self._client * 0.618) % 1) / self._manners.rate
                is_over.wait(max(0.0, due - time.monotonic()))
            if is_over.is_set():
                break
            if self._manners.reconnect_every and number % self._manners.reconnect_every == 0:
                self._hang_up()
            if self._wire is not None or self._connect():
                self._request(number, self._wire)  # type: ignore[arg-type]
        self._hang_up()

    def _connect(self) -> bool:
        try:
            wire = HttpWire if self._client % 2 else Wire
            self._wire = connect(self._port, self._manners.answer_within, wire=wire)
            return True
        except OSError:
            self._tally.refused += 1
            return False

    def _request(self, number: int, wire: Wire) -> None:
        data, expected = self._ask(self._client, number)
        message = wire.pack(data, number)
        self._tally.sent += 1
        began = time.monotonic()
        try:
            if self._manners.abandon_every and number % self._manners.abandon_every == self._manners.abandon_every - 1:
                self._abandon(wire, message, number)
                return
            wire.send(message)
            reply = wire.receive()
        except ClosedError:
            self._tally.closed.append((began, time.monotonic()))
            self._drop()
        except TimeoutError:
            self._tally.lost += 1
            self._drop()
        except ValueError:
            self._tally.crossed += 1
            self._drop()
        else:
            self._note(reply, number, expected, time.monotonic() - began)

    def _note(self, reply: Reply, number: int, expected: Answer, spent: float) -> None:
        if reply.seqid != number or (reply.code == "ok" and reply.answers != [expected]):
            self._tally.crossed += 1
            self._drop()
            return
        self._tally.add(reply.code, spent)
        if self._wire is not None and self._wire.is_over:
            self._drop()
        if reply.code == "overloaded":
            self._hints.add(reply.retry_after_ms)

    def _abandon(self, wire: Wire, message: bytes, number: int) -> None:
        half = (number // self._manners.abandon_every) % 2
        self._tally.abandoned += 1
        try:
            wire.send(message[: len(message) // 2] if half else message)
        except ClosedError:
            pass
        self._drop()

    def _hang_up(self) -> None:
        """Nothing may have come beyond the answers."""
        if self._wire is not None and self._wire.has_more() and self._tally.ok:
            self._tally.crossed += 1
            self._tally.codes["ok"] -= 1
        self._drop()

    def _drop(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None
