"""One stream: a thread that reads it, the frames that wait, and what became of the others."""

from __future__ import annotations

import random
import threading
from collections import deque
from contextlib import closing, suppress
from time import monotonic
from typing import Any, NamedTuple

from torchpipe_py.errors import BackendUnavailable, ConfigError, describe, logger
from torchpipe_py.streams.config import ALL, LATEST, StreamOptions
from torchpipe_py.streams.source import Picture, SourceError, read_pictures

AHEAD = 8
"""Frames that wait at most where all of them are wanted."""

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds until a stream is opened again: doubled each time, with jitter."""

MOST_BLOCKED = 3
"""Threads of a stream that its source may keep for good."""

LONGEST_GAP = 60.0
"""Seconds between two frames of a file by its clock; after more, or back, the clock is set anew."""

LAST_SECONDS = 0.04
"""For the last frame of a file, after which it ends or is repeated."""

_GRACE = 2.0  # seconds beyond its time limits after which a read is taken for blocked


class Waiting(NamedTuple):
    """A frame that waits for the pipe."""

    picture: Picture
    number: int
    seen: float
    """Seconds of ``time.monotonic``: when it came, or was due."""
    dropped_before: int


class Stream:
    """Reads a stream on a thread of its own and keeps the frames that are wanted.

    ``lock`` is that of all streams of a ``Streams``, and guards what is read outside this thread. ``has_frame`` and
    ``has_ended``, conditions of it, are notified when a frame comes and when the stream ends.
    """

    def __init__(
        self,
        options: StreamOptions,
        lock: threading.RLock,
        has_frame: threading.Condition,
        has_ended: threading.Condition,
    ) -> None:
        self.options = options
        self.state = "connecting"
        """``connecting``, ``playing``, ``waiting`` (for the next attempt), ``blocked``, ``ended`` or ``failed``."""
        self.waiting: deque[Waiting] = deque()
        self.in_flight = 0
        self.is_converting = self.is_entering = False
        """Whether a frame of it is converted; whether one is on its way to the pipe, and the next must wait."""
        self.used = 0.0
        """Its share of the pipe so far, divided by its weight."""
        self.counts = dict.fromkeys(("decoded", "skipped", "dropped", "stale", "results", "errors", "reconnects"), 0)
        self.last_error = ""
        self.due = float("inf")
        """Seconds of ``time.monotonic``: when the next frame is wanted that comes by a clock, by the last two."""
        self._lock, self._has_frame, self._has_ended = lock, has_frame, has_ended
        self._has_room = threading.Condition(lock)
        self._dropped_before = 0
        self._last_seen = float("-inf")
        self._next_pts: float | None = None
        self._pause = FIRST_PAUSE
        self._blocked: list[threading.Thread] = []
        self._overdue_at = float("inf")
        self._last_at = monotonic()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to read, on a new thread."""
        self._overdue_at = monotonic() + self.options.timeout + _GRACE
        name = f"torchpipe-stream {self.options.name}"
        thread = threading.Thread(target=self._read, args=(self._stop,), name=name, daemon=True)
        thread.start()
        self._thread = thread

    def stop(self) -> None:
        """Read no further; under the lock."""
        self._stop.set()
        self.waiting.clear()
        if self.state != "failed":
            self.state = "ended"
        self._has_room.notify_all()
        self._has_ended.notify_all()

    def join(self, until: float) -> None:
        """Wait for its thread, no longer than ``until`` in seconds of ``time.monotonic``."""
        if self._thread is not None:
            self._thread.join(max(0.0, until - monotonic()))

    @property
    def is_over(self) -> bool:
        """Whether no frame will come any more."""
        return self.state in ("ended", "failed") and not self.waiting

    def take(self) -> Waiting:
        """The oldest frame that waits; under the lock."""
        waiting = self.waiting.popleft()
        if len(self.waiting) <= AHEAD // 2:  # NOTE: a wake-up costs as much as a small frame
            self._has_room.notify_all()
        return waiting

    def drop(self, waiting: Waiting, why: str) -> None:
        """Count a frame that nobody gets; under the lock."""
        self.counts[why] += 1
        self._dropped_before += 1 + waiting.dropped_before

    def look_after(self, now: float) -> None:
        """Give up a thread that its source does not let go, and read on another one; under the lock."""
        if now < self._overdue_at or self._thread is None or self._stop.is_set():
            return
        self._stop.set()
        self._stop = threading.Event()
        self._blocked = [thread for thread in (*self._blocked, self._thread) if thread.is_alive()]
        self._overdue_at = float("inf")
        problem = f"nothing came for {self.options.timeout:g} s, and the read does not end"
        if not self.options.reconnect:
            self._note("failed", problem)
            return
        if self.state != "blocked":
            self._note("blocked", problem)
        if len(self._blocked) < MOST_BLOCKED:
            self.counts["reconnects"] += 1
            with suppress(RuntimeError):  # the system has no thread left; tried again when it is overdue again
                self.start()
        else:
            self._overdue_at = now + LONGEST_PAUSE  # one of them may have ended by then

    def stats(self) -> dict[str, Any]:
        """Counts since the start, and for how many seconds no frame has come; under the lock."""
        return {
            "source": self.options.masked(self.options.shown),
            "state": "never reached" if self.state == "ended" and not self.counts["decoded"] else self.state,
            "waiting": len(self.waiting),
            "in_flight": self.in_flight,
            "silent_s": max(0.0, monotonic() - self._last_at),
            **self.counts,
            **({"last_error": self.last_error} if self.last_error else {}),
        }

    # -- the thread -----------------------------------------------------------------------------------------------

    def _read(self, stop: threading.Event) -> None:
        """Read until the stream ends or is stopped; open it again where that is wanted."""
        while not stop.is_set():
            decoded = self.counts["decoded"]
            error = self._read_once(stop)
            with self._lock:
                if stop.is_set():
                    return
                self._overdue_at = float("inf")
                if error is None and self.counts["decoded"] == decoded:
                    error = "no frame in it"
                if error is None and self.options.is_file:
                    if self.options.repeat:
                        continue
                    self._note("ended")
                    return
                text = "the stream ended" if error is None else str(error)
                if self.options.is_file or not self.options.reconnect or isinstance(error, Exception):
                    self._note("ended" if error is None else "failed", text)
                    return
                pause = self._pause * random.uniform(0.75, 1.25)
                self._pause = min(2 * self._pause, LONGEST_PAUSE)
                self._note("waiting", f"{text}; opening it again in {pause:.1f} s")
            if stop.wait(pause):
                return
            with self._lock:
                self.counts["reconnects"] += 1
                self._overdue_at = monotonic() + self.options.timeout + _GRACE

    def _read_once(self, stop: threading.Event) -> str | Exception | None:
        """Read to the end; what went wrong, if something did."""
        began = 0.0
        last_pts: float | None = None
        self._next_pts = None
        try:
            with closing(read_pictures(self.options, stop)) as pictures:  # type: ignore[type-var]
                for picture in pictures:
                    now = seen = monotonic()
                    if self.options.is_file and self.options.live and picture.pts is not None:
                        if last_pts is None or not -1 < picture.pts - last_pts < LONGEST_GAP:  # or the clock jumps
                            began = now - picture.pts
                        last_pts = picture.pts
                        seen = began + picture.pts
                        if seen > now and not stop.is_set():
                            self._overdue_at = float("inf")
                            stop.wait(seen - now)
                    if stop.is_set():
                        return None
                    self._offer(picture, seen, stop)
            if self.options.is_file and self.options.live:
                stop.wait(LAST_SECONDS)
        except SourceError as error:
            return self.options.masked(str(error))
        except (BackendUnavailable, ConfigError) as error:  # another attempt would fail in the same way
            return error
        except Exception as error:  # of a library that reads what strangers send
            return self.options.masked(describe(error))
        return None

    def _offer(self, picture: Picture, seen: float, stop: threading.Event) -> None:
        """Let a frame wait, in the place of an older one or until there is room."""
        keep = self.options.keep
        with self._lock:
            if stop.is_set():
                return
            self._pause = FIRST_PAUSE
            self._overdue_at = monotonic() + self.options.timeout + _GRACE
            self._last_at = monotonic()
            self._note("playing")
            number = self.counts["decoded"]
            self.counts["decoded"] += 1
            if not self._is_due(picture.pts):
                self.counts["skipped"] += 1
                return
            if keep == ALL:
                self._overdue_at = float("inf")
                while len(self.waiting) >= AHEAD and not stop.is_set():
                    self._has_room.wait()
            else:
                while len(self.waiting) >= (1 if keep == LATEST else int(keep)):
                    self.drop(self.waiting.popleft(), "dropped")
            if stop.is_set():
                return
            if self.options.live or not self.options.is_file:
                self.due, self._last_seen = 2 * seen - self._last_seen, seen
            self.waiting.append(Waiting(picture, number, seen, self._dropped_before))
            self._dropped_before = 0
            self._overdue_at = monotonic() + self.options.timeout + _GRACE
            if len(self.waiting) == 1:  # before, there was a frame to fetch already
                self._has_frame.notify()

    def _is_due(self, pts: float | None) -> bool:
        """Whether ``fps`` lets a frame of that time through."""
        if not self.options.fps or pts is None:
            return True
        step = 1 / self.options.fps
        if self._next_pts is None or not -1 < self._next_pts - pts < step + 1:  # the first, or the clock has jumped
            self._next_pts = pts
        if pts < self._next_pts - 0.001:
            return False
        self._next_pts += step
        return True

    def _note(self, state: str, problem: str = "") -> None:
        """Another state, and the line in the log that it is worth; under the lock."""
        if problem:
            self.last_error = problem
        if state != self.state or problem:
            with suppress(Exception):
                log = logger.warning if problem else logger.info
                log("stream %r: %s%s", self.options.name, state, problem and f": {problem}")
        self.state = state
        if state in ("ended", "failed"):
            self._has_ended.notify_all()
