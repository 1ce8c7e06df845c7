"""Many streams through one pipe: frames are fetched when the pipe has room, in turn and by weight."""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from time import monotonic
from types import TracebackType
from typing import Any

from torchpipe_py.cores import usable_cores
from torchpipe_py.errors import ConfigError, NoResult, PipeClosed, describe
from torchpipe_py.keys import (
    TASK_COLOR_KEY,
    TASK_DATA_KEY,
    TASK_IMAGE_SIZE_KEY,
    TASK_NODE_NAME_KEY,
    TASK_RESULT_KEY,
)
from torchpipe_py.plan.config import Place
from torchpipe_py.runtime.pipe import pipe
from torchpipe_py.streams.config import ALL, StreamOptions, read_stream, read_streams
from torchpipe_py.streams.stream import Stream, Waiting
from torchpipe_py.wire.errors import reason
from torchpipe_py.wire.json_values import json_line, to_json

STREAM_KEY = "stream"
"""Key of a request: its stream's name."""

CLOSE_SECONDS = 2.0
"""Longest wait of ``close`` and ``remove`` for a read to return; its thread then ends by itself later."""

MOST_FEEDERS = 8
"""Maximum threads that convert frames and submit them to the pipe: one for two cores."""

_CHECK_SECONDS = 0.25  # between two checks for blocked streams


@dataclass(eq=False, slots=True)
class Frame:
    """A frame that went through the pipe."""

    stream: str
    number: int
    """Number among the decoded frames, from 0."""
    pts: float | None
    """Seconds since the start of the stream; of a live source, since its first frame arrived."""
    dropped_before: int
    """Frames left out since the one before: replaced by newer ones, or stale."""
    image: Any = field(default=None, repr=False)
    """Decoded image, upright: H×W×3 ``uint8`` BGR, or with ``pynvvideocodec`` a Tensor 1×3×H×W ``uint8`` RGB."""
    data: dict[str, Any] = field(default_factory=dict, repr=False)
    """The request's dict as the pipe left it."""
    result: Any = None
    error: BaseException | None = None
    age: float = 0.0
    """Seconds from its arrival, or its due time by a file's clock, to its result."""
    seen: float = field(default=0.0, repr=False)
    is_done: bool = field(default=False, repr=False)
    path: str = ""
    """Of an image that is a file of its own."""

    def to_line(self) -> bytes:
        """A line of JSON: stream, file and number of the frame, times in seconds, and the result or the error."""
        members = {
            "stream": json.dumps(self.stream),
            **({"path": json.dumps(self.path)} if self.path else {}),
            "number": str(self.number),
            "pts": "null" if self.pts is None else f"{self.pts:.4f}",
            "age": f"{self.age:.4f}",
            "dropped_before": str(self.dropped_before),
        }
        error = self.error
        if error is None:
            try:
                members.update(to_json("result", self.result))
            except NoResult as problem:
                error = problem
        if error is not None:
            members["error"] = json.dumps(describe(error))
        return json_line(members)


class Streams:
    """Runs the frames of streams through a pipe, and yields them with their results.

    ``streams`` is a TOML file or a dict of dicts, each a table with a ``source``; see ``StreamOptions`` for the keys.
    Iterate over it: frames of one stream are in order, frames of several in order of completion. The iteration ends
    with the last stream. A frame is fetched and converted when the pipe has room for it. ``in_flight`` is the most
    frames in the pipe at once, by default one more than its widest node can run (instances × ``max``). No frame enters
    while that many results wait to be taken. Streams take turns by ``weight``.
    A frame whose request fails has ``error`` in place of ``result``. ``ConfigError`` for streams that cannot be read.
    A request is ``{"data": image, "color": "bgr" or "rgb", "stream": name}``.
    """

    def __init__(
        self,
        run: pipe,
        streams: str | os.PathLike[str] | Mapping[str, Any] = {},  # noqa: B006 - never changed
        *,
        in_flight: int | None = None,
    ) -> None:
        self._run = run
        # Two conditions, so that a frame wakes only a feeder, and a result only the iterating thread.
        self._lock = threading.RLock()
        self._has_work, self._has_result = threading.Condition(self._lock), threading.Condition(self._lock)
        self._streams: dict[str, Stream] = {}
        self._removed: set[Stream] = set()
        self._order: dict[Stream, deque[Frame]] = {}
        self._finished: deque[Frame] = deque()
        self._under_way = 0
        self._used = self._check_at = 0.0
        self._is_closing = False
        stats = run.stats()
        most = in_flight or 1 + max(node["instances"] * node["max"] for node in stats["nodes"].values())
        self._most = min(most, stats["max_inflight"])
        with self._lock:
            for options in read_streams(streams, run) if streams else ():
                self._start(options)
        feeds = [self._expect_and_feed, *[self._feed] * (min(usable_cores() // 2, MOST_FEEDERS) - 1)]
        self._feeders = [threading.Thread(target=feed, name="torchpipe-streams", daemon=True) for feed in feeds]
        for feeder in self._feeders:
            feeder.start()

    def add(self, name: str, *, beside: str | os.PathLike[str] = "streams", **options: Any) -> None:
        """Read one more stream; ``options`` are the keys of its table. ``ConfigError`` if the name is taken.

        A relative file is looked for in the working directory, then in the folder of the file ``beside``, which
        messages name.
        """
        read = read_stream(name, options, Place(os.fspath(beside)), self._run)
        with self._lock:
            if name in self._streams:
                raise ConfigError(f"there is a stream {name!r} already")
            self._start(read)

    def remove(self, name: str, wait: bool = True) -> None:
        """Stop reading a stream; results of frames in the pipe still arrive. ``KeyError`` if it does not exist.

        ``wait``: for a running read to return, at most two seconds.
        """
        with self._lock:
            stream = self._streams.pop(name)
            stream.stop()
            if stream.in_flight:
                self._removed.add(stream)
            else:
                self._order.pop(stream, None)
        if wait:
            stream.join(monotonic() + CLOSE_SECONDS)

    def stats(self) -> dict[str, Any]:
        """For each stream: its state, counts of frames by outcome, attempts to connect, and the last error."""
        with self._lock:
            return {name: stream.stats() for name, stream in self._streams.items()}

    def close(self) -> None:
        """Stop every stream; frames in the pipe are finished, but not yielded. Idempotent."""
        with self._lock:
            self._is_closing = True
            streams = [*self._streams.values(), *self._removed]
            for stream in streams:
                stream.stop()
            self._has_work.notify_all()
            self._has_result.notify_all()
        for feeder in self._feeders:
            feeder.join()
        until = monotonic() + CLOSE_SECONDS
        for stream in streams:
            stream.join(until)

    def __enter__(self) -> Streams:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Frame]:
        return self

    def __next__(self) -> Frame:
        """Wait for the next finished frame."""
        with self._lock:
            while self._is_closing or not self._finished:
                if self._is_closing or (not self._under_way and all(each.is_over for each in self._streams.values())):
                    raise StopIteration
                self._has_result.wait()
            frame = self._finished.popleft()
            if len(self._finished) == self._most - 1:
                self._has_work.notify()
            return frame

    # -- from stream to result -------------------------------------------------------------------------------------

    def _start(self, options: StreamOptions) -> None:
        stream = Stream(options, self._lock, self._has_work, self._has_result)
        stream.used = self._used
        stream.start()
        self._streams[options.name] = stream

    def _expect_and_feed(self) -> None:
        with self._run.expecting(self._is_due):
            self._feed()

    def _is_due(self, since: float, until: float) -> bool:
        """Whether a frame for which there is room has arrived, or will by then; an estimate, without the lock."""
        now = monotonic()
        has_room = self._under_way < self._most
        return any(
            stream.is_converting
            or (
                has_room
                and stream.in_flight < self._room(stream)
                and (stream.waiting or now + since <= stream.due < now + until)
            )
            for stream in list(self._streams.values())
        )

    def _feed(self) -> None:
        """Submit the next frame whenever there is room; runs on each feeder thread."""
        while True:
            with self._lock:
                self._replace_blocked_threads()
                while (stream := self._next()) is None and not self._is_closing:
                    self._has_work.wait(_CHECK_SECONDS)
                    self._replace_blocked_threads()
                if stream is None:
                    return
                waiting = stream.take()
                stale_ms = stream.options.stale_ms
                if stale_ms and 1000 * (monotonic() - waiting.seen) > stale_ms:
                    stream.drop(waiting, "stale")
                    self._has_result.notify_all()  # it may have been the last frame
                    continue
                turn = self._turn(stream)
                self._used = max(self._used, turn)
                stream.used = turn + 1 / stream.options.weight
                stream.in_flight += 1
                self._under_way += 1
                stream.is_converting = stream.is_entering = True
                name = stream.options.name
                frame = Frame(name, waiting.number, waiting.picture.pts, waiting.dropped_before, seen=waiting.seen)
                frame.path = waiting.picture.path
                self._order.setdefault(stream, deque()).append(frame)
            self._submit(stream, waiting, frame)

    def _replace_blocked_threads(self) -> None:
        now = monotonic()
        if now >= self._check_at:
            self._check_at = now + _CHECK_SECONDS
            for stream in self._streams.values():
                stream.replace_blocked_thread(now)

    def _next(self) -> Stream | None:
        """The stream whose turn it is, if one has a frame and the pipe has room."""
        if self._is_closing or self._under_way >= self._most or len(self._finished) >= self._most:
            return None
        ready = [
            stream
            for stream in self._streams.values()
            if stream.waiting and not stream.is_entering and stream.in_flight < self._room(stream)
        ]
        return min(ready, key=self._turn, default=None)

    def _turn(self, stream: Stream) -> float:
        """A stream's place in the order; one turn that it missed, because its frame was late, is made up for."""
        missed: float = self._used - 1 / stream.options.weight
        return max(stream.used, missed)

    def _room(self, stream: Stream) -> int:
        return stream.options.in_flight or (self._most if stream.options.keep == ALL else 1)

    def _submit(self, stream: Stream, waiting: Waiting, frame: Frame) -> None:
        """Convert a frame and submit it to the pipe."""
        on_done: Callable[[Any, BaseException | None], None] = lambda _, error: self._finish(stream, frame, error)  # noqa: E731
        try:
            try:
                frame.image = waiting.picture.to_image()
            finally:
                stream.is_converting = False  # NOTE: before `dispatch`: waiters on it are not woken again
            shape = frame.image.shape  # of a Mat, or of a Tensor 1xCxHxW
            frame.data = {
                TASK_DATA_KEY: frame.image,
                TASK_COLOR_KEY: waiting.picture.color,
                TASK_IMAGE_SIZE_KEY: tuple(shape[:2] if len(shape) == 3 else shape[2:]),
                STREAM_KEY: frame.stream,
            }
            if stream.options.node_name:
                frame.data[TASK_NODE_NAME_KEY] = stream.options.node_name
            self._run.dispatch(frame.data, on_done)
        except PipeClosed as error:
            with self._lock:
                self._is_closing = True
                for each in self._streams.values():
                    each.stop()
            self._finish(stream, frame, error)
        except Exception as error:
            self._finish(stream, frame, error)
        finally:
            stream.is_entering = False

    def _finish(self, stream: Stream, frame: Frame, error: BaseException | None) -> None:
        """Record a frame's outcome, and release the frames that waited for it to keep their order."""
        if error is None and TASK_RESULT_KEY not in frame.data:
            error = reason(frame.data, TASK_RESULT_KEY)
        frame.error, frame.result = error, None if error is not None else frame.data[TASK_RESULT_KEY]
        frame.age = monotonic() - frame.seen
        with self._lock:
            frame.is_done = True
            stream.in_flight -= 1
            self._under_way -= 1
            stream.counts["results" if frame.error is None else "errors"] += 1
            order = self._order[stream]
            while order and order[0].is_done:
                self._finished.append(order.popleft())
            if not order and stream in self._removed:
                self._removed.discard(stream)
                del self._order[stream]
            if stream.waiting or self._under_way == self._most - 1:  # one feeder takes all waiting frames
                self._has_work.notify()
            if self._finished or not self._under_way:
                self._has_result.notify_all()
