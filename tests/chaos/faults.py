"""Defects to be planted in a service, each of which a judge has to find; and the launcher that plants them.

``python tests/chaos/faults.py NAME CONFIG ...`` is ``torchpipe-serve`` with the fault in its supervisor; those in
workers come with ``chaos_backends.py``.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from itertools import count
from typing import Any


def plant_in_worker(name: str) -> None:
    _IN_WORKER.get(name, lambda: None)()


def plant_in_supervisor(name: str) -> None:
    _IN_SUPERVISOR.get(name, lambda: None)()


def _lose_replies() -> None:
    """Every 200th is not written."""
    _change_replies(lambda reply: b"")


def _repeat_replies() -> None:
    """Every 200th is written twice."""
    _change_replies(lambda reply: reply * 2)


def _change_replies(change: Callable[[bytes], bytes]) -> None:
    from torchpipe_server.front.server import Server

    answer, numbers = Server.answer, count(1)

    def changed(self: Any, call: Any, data: bytes, method: str, outcome: str) -> None:
        answer(self, call, data if next(numbers) % 200 else change(data), method, outcome)

    Server.answer = changed  # type: ignore[method-assign]


def _cross_results() -> None:
    """Every 200th request over Thrift gets the result of the one before it; if that is its own, the next one does."""
    owed = 0

    def cross(number: int, outcome: Any, last: Any) -> Any:
        nonlocal owed
        owed += number % 200 == 0
        if not owed or last == outcome:
            return outcome
        owed -= 1
        return last

    _change_outcomes(cross)


def _spoil_neighbours() -> None:
    """Whoever shares a list with an item that fails gets a slightly different score."""

    def spoil(number: int, outcome: Any, last: Any) -> Any:
        result, failure = outcome
        if result is not None and last[1] is not None:
            result.score += 1e-9
        return result, failure

    _change_outcomes(spoil)


def _change_outcomes(change: Callable[[int, Any, Any], Any]) -> None:
    """Requests that end at once on several threads take turns, so that none is left out of the count."""
    from torchpipe_server.methods.thrift import InferenceHandler

    of, lock = InferenceHandler._outcome, threading.Lock()
    number, last = 0, None

    def changed(self: Any, data: Any, error: Any) -> Any:
        nonlocal number, last
        outcome = of(self, data, error)
        with lock:
            number += 1
            before, last = last or outcome, outcome
            return change(number, outcome, before)

    InferenceHandler._outcome = changed  # type: ignore[method-assign]


def _die_of_garbage() -> None:
    """The 100th broken stream ends the process."""
    numbers = count(1)
    _on_garbage(lambda: next(numbers) < 100 or os._exit(5))


def _keep_garbage() -> None:
    """16 KiB stay of each broken stream."""
    kept: list[bytes] = []
    _on_garbage(lambda: kept.append(os.urandom(2**14)))


def _on_garbage(do: Callable[[], object]) -> None:
    from torchpipe_server.front.connection import Connection

    refuse = Connection.refuse

    def changed(self: Any, error: Any) -> None:
        do()
        refuse(self, error)

    Connection.refuse = changed  # type: ignore[method-assign]


def _keep_connections() -> None:
    """A client that goes is not noticed, each second time."""
    from torchpipe_server.front.connection import Connection

    drop, numbers = Connection.drop, count()

    def dropping(self: Any) -> None:
        if next(numbers) % 2:
            drop(self)

    Connection.drop = dropping  # type: ignore[method-assign]


def _drain_hastily() -> None:
    """At the stop connections are closed, whatever they wait for."""
    from torchpipe_server.front.server import Server

    def drain(self: Any) -> None:
        self._ending_until = 1e-9

    Server.drain = drain  # type: ignore[method-assign]


def _outlive_the_supervisor() -> None:
    from torchpipe_server.worker.worker import Worker

    Worker._orphaned = lambda self: None  # type: ignore[method-assign]


def _forget_deaths() -> None:
    """A dead worker's requests stay unanswered, its connections open."""
    from torchpipe_server.supervisor.connections import Connections

    Connections._take_over = lambda self, slot: False  # type: ignore[method-assign]


def _leave_workers_dead() -> None:
    """No worker is started in place of a dead one."""
    from torchpipe_server.supervisor.fleet import Fleet

    Fleet._replace = lambda self, worker, child: None  # type: ignore[method-assign]


def _restart_without_end() -> None:
    """No pause between attempts."""
    from torchpipe_server.supervisor.fleet import Fleet

    Fleet._pause = lambda self, slot: self._start(slot)  # type: ignore[method-assign]


def _reload_anything() -> None:
    """The old generation goes before the new one has started."""
    from torchpipe_server.supervisor.fleet import Fleet

    def reload(self: Any) -> None:
        for child in self.ready:
            child.kill()

    Fleet.reload = reload  # type: ignore[method-assign]


_IN_WORKER: dict[str, Callable[[], None]] = {
    "lose_replies": _lose_replies,
    "repeat_replies": _repeat_replies,
    "cross_results": _cross_results,
    "spoil_neighbours": _spoil_neighbours,
    "die_of_garbage": _die_of_garbage,
    "keep_garbage": _keep_garbage,
    "keep_connections": _keep_connections,
    "drain_hastily": _drain_hastily,
    "outlive_the_supervisor": _outlive_the_supervisor,
}
_IN_SUPERVISOR: dict[str, Callable[[], None]] = {
    "forget_deaths": _forget_deaths,
    "leave_workers_dead": _leave_workers_dead,
    "restart_without_end": _restart_without_end,
    "reload_anything": _reload_anything,
}

if __name__ == "__main__":
    from torchpipe_server import cli

    plant_in_supervisor(sys.argv[1])
    sys.exit(cli.main(sys.argv[2:]))
