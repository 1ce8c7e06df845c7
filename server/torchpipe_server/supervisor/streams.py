"""Distributes streams among workers, and passes results and statistics on to clients."""

from __future__ import annotations

import logging
from asyncio import TimerHandle
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from torchpipe_py import TorchpipeError, parse_toml
from torchpipe_py.serving import AnswerStream, Done, StreamSource, counted, nearest, read_streams
from torchpipe_server.front.loop import Loop, every
from torchpipe_server.supervisor.child import Child
from torchpipe_server.supervisor.generation import Generation
from torchpipe_server.supervisor.messages import Event, Figures, Snapshot

logger = logging.getLogger("torchpipe_server")

MOST_SUBSCRIBERS = 32
EVENTS_WAITING = 16  # for each subscriber that does not read; at most 32 MiB for all
HEARTBEAT_SECONDS = 10.0
SNAPSHOT_SECONDS = 5.0  # time limit for a worker to draw a frame


def read_tables(file: str) -> Mapping[str, Any]:
    """The checked tables of the streams in a file; none without a file. Raises ``ConfigError``."""
    if not file:
        return {}
    tables = parse_toml(file)
    read_streams(tables)
    defaults = tables.pop("global")
    return {name: {**defaults, **table} for name, table in tables.items()}


class NoStreamError(TorchpipeError):
    """An unknown stream, or one that has nothing to show."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class Subscriber(StreamSource):
    """A client that receives the results of a stream; if it is too slow, it loses the oldest."""

    def __init__(self, stream: str, head: bytes, on_left: Callable[[Subscriber], object]) -> None:
        self.stream = stream
        self._head, self._on_left = head, on_left
        self._answer: AnswerStream | None = None
        self._waiting: deque[bytes] = deque(maxlen=EVENTS_WAITING)
        self._lost = 0

    def attach(self, stream: AnswerStream) -> None:
        """Begin the answer."""
        self._answer = stream
        stream.begin(self._head + b": results of frames\n\n")  # a comment, for clients that wait for the first bytes

    def put(self, event: bytes, missed: int) -> None:
        """Add an event, after ``missed`` that the worker did not send."""
        self._lost += missed + (len(self._waiting) == EVENTS_WAITING)
        self._waiting.append(event)
        self.write_more()

    def write_more(self) -> None:
        """Write waiting events while there is room."""
        answer = self._answer
        while answer is not None and self._waiting and answer.write(b""):
            if self._lost:
                lost, self._lost = self._lost, 0
                answer.write(b'event: lost\ndata: {"lost": %d}\n\n' % lost)
            else:
                answer.write(self._waiting.popleft())

    def beat(self) -> None:
        """Write a comment that keeps the connection alive."""
        if self._answer is not None and self._answer.write(b""):
            self._answer.write(b": heartbeat\n\n")

    def end(self) -> None:
        """End the answer: there are no more events."""
        if self._answer is not None:
            self._answer.write(b"event: end\ndata: {}\n\n")
            self._answer.end("GET /streams/{name}/events")

    def cancel(self, error: BaseException | None = None) -> None:
        """The client has left."""
        self._on_left(self)


class SharedStreams:
    """Distributes the streams of ``file``, with their ``tables``, among the workers; one worker reads each.

    A stream stays with its worker until the worker ends or another worker has at least two fewer.
    """

    def __init__(self, loop: Loop, file: str, tables: Mapping[str, Any]) -> None:
        self._file, self._loop = file, loop
        self._tables = tables  # those of the serving generation
        self._generation: Generation | None = None
        self._readers: dict[str, Child] = {}
        self._workers: dict[Child, int] = {}  # with their numbers
        self._given: dict[Child, Mapping[str, Any]] = {}
        self._subscribers: dict[str, set[Subscriber]] = {}
        self._asked: dict[str, tuple[list[Done], TimerHandle]] = {}
        every(loop, HEARTBEAT_SECONDS, self._beat)

    def close(self) -> None:
        """End the answers of all clients."""
        self._tables = {}
        self._end_removed()

    def share_out(self, generation: Generation, workers: dict[Child, int]) -> None:
        """Give each stream to one of the ready workers; call it again when these or the generation change."""
        if generation is self._generation and workers == self._workers:
            return
        if generation is not self._generation:
            self._generation, self._tables = generation, generation.streams
            self._end_removed()
        self._workers = workers
        given, before = self._given, self._readers
        names = {child: [name for name in given.get(child, {}) if name in self._tables] for child in workers}
        taken = {name for each in names.values() for name in each}
        for name in self._tables if workers else ():
            if name not in taken:
                min(names.values(), key=len).append(name)
        while names and len(most := max(names.values(), key=len)) > len(least := min(names.values(), key=len)) + 1:
            least.append(most.pop())
        self._given = {child: {name: self._tables[name] for name in each} for child, each in names.items()}
        self._readers = {name: child for child, each in names.items() for name in each}
        for name in [name for name in self._asked if self._readers.get(name) is not before.get(name)]:
            self._answer(name, NoStreamError("unavailable", f"its worker no longer reads {name!r}"))
        # NOTE: workers that only lose streams come first, because a device can be opened only once.
        for child in sorted(names, key=lambda child: bool(self._given[child].keys() - given.get(child, {}).keys())):
            tables = self._given[child]
            if tables != given.get(child, {}):
                child.has_streams = True
                child.send("streams", file=self._file, tables=tables)
            if tables:
                self._watch(child)

    def figures(self, totals: Mapping[str, Any]) -> Figures:
        """State and totals of each stream."""
        figures = {}
        nothing = {"decoded": 0, "reconnects": 0, "frames": {}, "age": None}
        for name in self._tables:
            child = self._readers.get(name)
            now = child.stats.get("streams", {}).get(name, {}).get("now") if child else None
            figures[name] = {
                **{key: value for key, value in (totals.get(name) or nothing).items() if key != "now"},
                "state": "starting",
                "last_error": "" if child else "no worker is ready to read it",
                **(now or {}),
                "worker": self._workers[child] if child else None,
                "subscribers": len(self._subscribers.get(name, ())),
            }
        return figures

    # -- clients ------------------------------------------------------------------------------------------------------

    def subscribe(self, name: str, head: bytes) -> Subscriber:
        """Start to send the stream's results to a client; ``NoStreamError`` if it is unknown or too many follow."""
        self._check(name)
        if sum(map(len, self._subscribers.values())) >= MOST_SUBSCRIBERS:
            raise NoStreamError("unavailable", f"{counted(MOST_SUBSCRIBERS, 'client')} follow streams already")
        subscriber = Subscriber(name, head, self._left)
        self._subscribers.setdefault(name, set()).add(subscriber)
        self._watch(self._readers.get(name))
        return subscriber

    def snapshot(self, name: str, done: Done) -> None:
        """Call ``done`` with a JPEG or a ``NoStreamError``. Concurrent callers get the same."""
        self._check(name)
        if name in self._asked:
            self._asked[name][0].append(done)
        elif name not in self._readers:
            done(NoStreamError("unavailable", f"no worker is ready to read {name!r}"))
        else:
            late = NoStreamError("unavailable", f"the worker that reads {name!r} does not answer")
            self._asked[name] = [done], self._loop.call_later(SNAPSHOT_SECONDS, self._answer, name, late)
            self._readers[name].send("snapshot", name=name)

    def receive(self, child: Child, message: Event | Snapshot) -> None:
        """Pass on a worker's message about a stream; ignored if another worker reads the stream by now."""
        name = message.stream
        if self._readers.get(name) is not child:
            return
        if isinstance(message, Snapshot):
            if name in self._asked:
                self._answer(name, message.jpeg or NoStreamError("unavailable", f"{name!r}: {message.problem}"))
            return
        event = f"data: {message.data}\n\n".encode("utf-8", "replace")
        for subscriber in list(self._subscribers.get(name, ())):
            subscriber.put(event, message.missed)

    def _check(self, name: str) -> None:
        if name not in self._tables:
            hint = nearest(name[:80], self._tables) if self._tables else "--streams FILE names them"
            raise NoStreamError("not_found", f"no stream {name[:80]!r}; {hint}")

    def _answer(self, name: str, answer: object) -> None:
        waiting, timer = self._asked.pop(name)
        timer.cancel()
        for done in waiting:
            done(answer)

    def _left(self, subscriber: Subscriber) -> None:
        self._subscribers.get(subscriber.stream, set()).discard(subscriber)
        self._watch(self._readers.get(subscriber.stream))

    def _watch(self, child: Child | None) -> None:
        """Have a worker send the results of its streams that clients follow."""
        if child is not None:
            child.send("watch", names=[name for name in self._given[child] if self._subscribers.get(name)])

    def _end_removed(self) -> None:
        for name in self._subscribers.keys() - self._tables.keys():
            for subscriber in self._subscribers.pop(name):
                subscriber.end()

    def _beat(self) -> None:
        for subscribers in self._subscribers.values():
            for subscriber in list(subscribers):
                subscriber.beat()
