"""Clients in threads: each asks, waits for its own answer, and asks again. Every second one speaks HTTP.

What became of their requests is a ``Tally``; ``check_answers`` and its like fail where something is wrong with it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kit.clients import IDL, HttpClient, Response, connect, pack_batch
from kit.waits import WAIT
from torchpipe_client import Client, ClientError

TYPED = ("ok", "overloaded", "unavailable", "worker_died")
_OWN_END = ("abandoned", "connection_lost")  # of a request that has no answer, and may have none

Answer = tuple[str, float]
Ask = Callable[[int, int], tuple[bytes, Answer]]
"""Client and number of the request to the data and its answer."""


def echo(client: int, number: int) -> tuple[bytes, Answer]:
    """No two are the same."""
    data = f"{client}/{number}/".ljust(20 + number % 50, ".")
    return data.encode(), (data, float(len(data)))


class HttpAsker(HttpClient):
    """Connects anew where an answer says that it is the connection's last, as that in place of a dead worker's does."""

    path = b"/infer"

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self._port = port

    def read(self, is_head: bool = False) -> Response:
        response = super().read(is_head)
        if response.fields.get("connection") == "close":
            self.end()
            self.close()
            super().__init__(self._port)
        return response

    def send_batch(self, data: bytes) -> None:
        self.send(self.pack(data).replace(b"/infer", self.path, 1))


class NamedClient(Client):
    """Asks the model ``name`` by the method that takes any."""

    name = ""

    def infer_batch(self, image: bytes, **more: Any) -> Any:
        answer = self.infer({"data": image}, node_name=self.name, **more)
        return answer["label"], answer["score"]


# -- what became of them --------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """ends: of requests, by ``ok``, the error's code, ``abandoned`` by the client, ``crossed`` with another's answer.
    closed: when those of ``connection_lost`` were sent, and when it was noticed that the server had closed the
    connection. seconds: by end, from sending to the answer. hints: of ``overloaded``, how long to wait.
    """

    ends: Counter[str] = field(default_factory=Counter)
    closed: list[tuple[float, float]] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    hints: set[int | None] = field(default_factory=set)

    @property
    def sent(self) -> int:
        return self.ends.total()

    def add(self, end: str, began: float) -> None:
        self.ends[end] += 1
        self.seconds.setdefault(end, []).append(time.monotonic() - began)
        if end == "connection_lost":
            self.closed.append((began, time.monotonic()))

    def percentile(self, end: str, share: float) -> float:
        """Nearest rank; 0 of none."""
        values = sorted(self.seconds.get(end, [])) or [0.0]
        return values[min(len(values) - 1, int(share * len(values)))]

    @property
    def longest(self) -> float:
        return max((max(values) for end, values in self.seconds.items() if end not in _OWN_END), default=0.0)

    def figures(self) -> dict[str, Any]:
        return {"sent": self.sent, **self.ends, "longest_s": round(self.longest, 3)}


def check_answers(tally: Tally, within: float, codes: Iterable[str] = ("ok",)) -> None:
    """Every request has its own answer, of these codes and in time, or its connection was closed."""
    strange = {end: count for end, count in tally.ends.items() if end not in (*codes, *_OWN_END)}
    assert tally.ends["ok"], "no request was served"
    assert not strange, f"answers {strange}"
    assert tally.longest <= within, f"{tally.longest:g} seconds to an answer, {within:g} are allowed"


def check_closed(tally: Tally, kills: Sequence[tuple[float, float]] = ()) -> None:
    """A connection may be closed where a worker had it that was killed, and nowhere else.

    kills: when, and by when another worker was there. What is sent later is not sent to the killed one.
    """
    lost = [one for one in tally.closed if not any(kill <= one[1] and one[0] <= back for kill, back in kills)]
    assert not lost, f"{len(lost)} connections closed though nothing was killed"


def growth(samples: Sequence[int]) -> int:
    """From the median of the second half's first quarter to that of its last: a leak, not a warm-up."""
    half = samples[len(samples) // 2 :]
    quarter = len(half) // 4
    first, last = (sorted(part)[quarter // 2] for part in (half[:quarter], half[-quarter:]))
    return last - first


# -- the load -------------------------------------------------------------------------------------------------------


class Load:
    """``clients`` threads that ask until ``total`` requests are sent, or the ``with`` block ends.

    rate: requests a second of each client, 0 as many as it can. model: which one they ask, where there are several.
    abandon_every: it goes without waiting, each so-many-th time, and in the middle of a message every second time of
    those. judge: what an answer counts as.
    """

    def __init__(
        self,
        port: int,
        clients: int,
        ask: Ask = echo,
        total: int = 0,
        rate: float = 0.0,
        abandon_every: int = 0,
        model: str = "",
        judge: Callable[[Answer, Answer], str] = lambda answer, expected: "ok" if answer == expected else "crossed",
    ) -> None:
        self._port, self._ask, self._rate, self._judge = port, ask, rate, judge
        self._abandon_every, self._model = abandon_every, model
        self._each = -(-total // clients) if total else 2**62
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(index,), daemon=True) for index in range(clients)]
        self.tally = Tally()

    @property
    def ok(self) -> int:
        """How many were answered so far."""
        return self.tally.ends["ok"]

    def served(self, end: str = "ok", count: int = 50) -> Callable[[], bool]:
        """Whether so many more have ended like that."""
        until = self.tally.ends[end] + count
        return lambda: self.tally.ends[end] >= until

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
        made: Any
        if client % 2:
            made = HttpAsker(self._port)
            made.path = f"/infer?node_name={self._model}".encode() if self._model else HttpAsker.path
        else:
            kind = NamedClient if self._model else Client
            made = kind(f"127.0.0.1:{self._port}", timeout=WAIT, retries=0, idempotent=False)
            made.name = self._model
        began = time.monotonic()
        try:
            for number in range(self._each):
                if self._rate:
                    # Spread over the interval, so that the clients do not come all at once.
                    due = began + (number + (client * 0.618) % 1) / self._rate
                    self._is_over.wait(max(0.0, due - time.monotonic()))
                if self._is_over.is_set():
                    break
                self._request(made, client, number)
        except BaseException as error:
            self._errors.append(error)
        finally:
            made.close()

    def _request(self, made: Any, client: int, number: int) -> None:
        data, expected = self._ask(client, number)
        sent_at = time.monotonic()
        hint: int | None = 1
        if self._abandon_every and number % self._abandon_every == self._abandon_every - 1:
            message = HttpClient.pack(data) if client % 2 else pack_batch(data)
            is_half = (number // self._abandon_every) % 2
            with connect(self._port) as sock:
                sock.sendall(message[: len(message) // 2] if is_half else message)
            end = "abandoned"
        else:
            try:
                end = self._judge(tuple(made.infer_batch(data)), expected)
            except (ClientError, IDL.InferenceError) as error:
                end, hint = error.code, error.retry_after_ms
            except (ConnectionError, EOFError):  # over HTTP
                made.close()
                made.__init__(self._port)
                end = "connection_lost"
        with self._lock:
            self.tally.add(end, sent_at)
            if end == "overloaded":
                self.tally.hints.add(hint)
