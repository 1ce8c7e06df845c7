"""One stream: a thread that reads it, its waiting frames, and counts of the others."""

from __future__ import annotations

import random
import threading
from collections import deque
from contextlib import closing, suppress
from enum import Enum
from time import monotonic
from typing import Any, NamedTuple

from torchpipe_py.errors import BackendUnavailable, ConfigError, describe, logger
from torchpipe_py.streams.config import ALL, LATEST, StreamOptions
from torchpipe_py.streams.source import Picture, SourceError, read_pictures

AHEAD = 8
"""Maximum waiting frames of a stream that keeps all frames."""

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds until a stream is opened again: doubled each time, with jitter."""

MOST_BLOCKED = 3
"""Maximum threads of a stream that never return from its source."""

LONGEST_GAP = 60.0
"""Maximum seconds between two frames by a file's clock; after a larger step, or one back, the clock is reset."""

LAST_SECONDS = 0.04
"""Seconds for which the last frame of a file is shown before it ends or is repeated."""

_GRACE_SECONDS = 2.0  # a read counts as blocked so long after its time limits


class State(Enum):
    """State of a stream, by the name that statistics and the log show."""

    CONNECTING = "connecting"
    PLAYING = "playing"
    WAITING = "waiting"
    """For the next attempt to open it."""
    BLOCKED = "blocked"
    """Its read does not return; another thread tries again."""
    ENDED = "ended"
    FAILED = "failed"

    @property
    def is_final(self) -> bool:
        """Whether the stream reads no further frame."""
        return self in (State.ENDED, State.FAILED)


class Waiting(NamedTuple):
    """A frame that waits for the pipe."""

    picture: Picture
    number: int
    seen: float
    """Arrival or due time in seconds of ``time.monotonic``."""
    dropped_before: int


class Stream:
    """Reads a stream on its own thread and keeps the frames that ``keep`` selects.

    ``lock`` is shared by all streams of a ``Streams``, and guards what is read outside this thread. ``has_frame`` and
    ``has_ended``, its conditions, are notified when a frame arrives and when the stream ends.
    """

    def __init__(
        self,
        options: StreamOptions,
        lock: threading.RLock,
        has_frame: threading.Condition,
        has_ended: threading.Condition,
    ) -> None:
        self.options = options
        self.state = State.CONNECTING
        self.waiting: deque[Waiting] = deque()
        self.in_flight = 0
        self.is_converting = self.is_entering = False
        """Whether one of its frames is being converted; whether one is entering the pipe: then the next must wait."""
        self.used = 0.0
        """Its share of the pipe so far, divided by its weight."""
        self.counts = dict.fromkeys(("decoded", "skipped", "dropped", "stale", "results", "errors", "reconnects"), 0)
        self.last_error = ""
        self.due = float("inf")
        """Expected arrival of a clocked stream's next frame, from the last two, in seconds of ``time.monotonic``."""
        self._lock, self._has_frame, self._has_ended = lock, has_frame, has_ended
        self._has_room = threading.Condition(lock)
        self._dropped_before = 0
        self._last_seen = float("-inf")
        self._next_pts: float | None = None
        self._pause = FIRST_PAUSE
        self._blocked: list[threading.Thread] = []
        self._overdue_at = float("inf")
        self._last_at = monotonic()
        self._first_at: float | None = None
        """Arrival of a live source's first frame, from which ``pts`` of the others count."""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to read, on a new thread."""
        self._overdue_at = monotonic() + self.options.timeout + _GRACE_SECONDS
        name = f"torchpipe-stream {self.options.name}"
        thread = threading.Thread(target=self._read, args=(self._stop,), name=name, daemon=True)
        thread.start()
        self._thread = thread

    def stop(self) -> None:
        """Read no further; under the lock."""
        self._stop.set()
        self.waiting.clear()
        if self.state is not State.FAILED:
            self.state = State.ENDED
        self._has_room.notify_all()
        self._has_ended.notify_all()

    def join(self, until: float) -> None:
        """Wait for its thread, at most until ``until`` in seconds of ``time.monotonic``."""
        if self._thread is not None:
            self._thread.join(max(0.0, until - monotonic()))

    @property
    def is_over(self) -> bool:
        """Whether the stream has no further frame."""
        return self.state.is_final and not self.waiting

    def take(self) -> Waiting:
        """Remove and return the oldest waiting frame; under the lock."""
        waiting = self.waiting.popleft()
        if len(self.waiting) <= AHEAD // 2:  # a wake-up costs as much as a small frame
            self._has_room.notify_all()
        return waiting

    def drop(self, waiting: Waiting, reason: str) -> None:
        """Count a frame that is not delivered; under the lock."""
        self.counts[reason] += 1
        self._dropped_before += 1 + waiting.dropped_before

    def replace_blocked_thread(self, now: float) -> None:
        """Abandon a thread whose read is overdue, and read on another one; under the lock."""
        if now < self._overdue_at or self._thread is None or self._stop.is_set():
            return
        self._stop.set()
        self._stop = threading.Event()
        self._blocked = [thread for thread in (*self._blocked, self._thread) if thread.is_alive()]
        self._overdue_at = float("inf")
        problem = f"no frame for {self.options.timeout:g} s, and the read does not return"
        if not self.options.reconnect:
            self._set_state(State.FAILED, problem)
            return
        if self.state is not State.BLOCKED:
            self._set_state(State.BLOCKED, problem)
        if len(self._blocked) < MOST_BLOCKED:
            self.counts["reconnects"] += 1
            with suppress(RuntimeError):  # no thread available: tried again when it is overdue again
                self.start()
        else:
            self._overdue_at = now + LONGEST_PAUSE  # one of them may have ended by then

    def stats(self) -> dict[str, Any]:
        """Counts since the start, and the seconds since the last frame; under the lock."""
        is_unreached = self.state is State.ENDED and not self.counts["decoded"]
        return {
            "source": self.options.masked(self.options.shown),
            "state": "never reached" if is_unreached else self.state.value,
            "waiting": len(self.waiting),
            "in_flight": self.in_flight,
            "silent_s": max(0.0, monotonic() - self._last_at),
            **self.counts,
            **({"last_error": self.last_error} if self.last_error else {}),
        }

    # -- the thread -----------------------------------------------------------------------------------------------

    def _read(self, stop: threading.Event) -> None:
        """Read until the stream ends or is stopped; open it again if ``reconnect`` or ``repeat`` says so."""
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
                    self._set_state(State.ENDED)
                    return
                text = "the stream ended" if error is None else str(error)
                if self.options.is_file or not self.options.reconnect or isinstance(error, Exception):
                    self._set_state(State.ENDED if error is None else State.FAILED, text)
                    return
                pause = self._pause * random.uniform(0.75, 1.25)
                self._pause = min(2 * self._pause, LONGEST_PAUSE)
                self._set_state(State.WAITING, f"{text}; opening it again in {pause:.1f} s")
            if stop.wait(pause):
                return
            with self._lock:
                self.counts["reconnects"] += 1
                self._overdue_at = monotonic() + self.options.timeout + _GRACE_SECONDS

    def _read_once(self, stop: threading.Event) -> str | Exception | None:
        """Read to the end; return the problem, if any."""
        began = 0.0
        last_pts: float | None = None
        self._next_pts = None
        try:
            with closing(read_pictures(self.options, stop)) as pictures:  # type: ignore[type-var]
                for picture in pictures:
                    now = seen = monotonic()
                    if picture.pts is None and not self.options.is_file:  # a live source
                        self._first_at = now if self._first_at is None else self._first_at
                        picture = picture._replace(pts=now - self._first_at)
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
        except Exception as error:  # FFmpeg, on untrusted data
            return self.options.masked(describe(error))
        return None

    def _offer(self, picture: Picture, seen: float, stop: threading.Event) -> None:
        """Queue a frame, in place of an older one or once there is room."""
        keep = self.options.keep
        with self._lock:
            if stop.is_set():
                return
            self._pause = FIRST_PAUSE
            self._overdue_at = monotonic() + self.options.timeout + _GRACE_SECONDS
            self._last_at = monotonic()
            self._set_state(State.PLAYING)
            number = self.counts["decoded"]
            self.counts["decoded"] += 1
            if not self._passes_fps(picture.pts):
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
            self._overdue_at = monotonic() + self.options.timeout + _GRACE_SECONDS
            if len(self.waiting) == 1:  # otherwise a frame could be fetched before
                self._has_frame.notify()

    def _passes_fps(self, pts: float | None) -> bool:
        """Whether ``fps`` selects a frame of this time; if so, the next one is due a step later."""
        if not self.options.fps or pts is None:
            return True
        step = 1 / self.options.fps
        if self._next_pts is None or not -1 < self._next_pts - pts < step + 1:  # the first, or the clock has jumped
            self._next_pts = pts
        if pts < self._next_pts - 0.001:
            return False
        self._next_pts += step
        return True

    def _set_state(self, state: State, problem: str = "") -> None:
        """Change the state and log it; under the lock."""
        if problem:
            self.last_error = problem
        if state is not self.state or problem:
            with suppress(Exception):
                log = logger.warning if problem else logger.info
                log("stream %r: %s%s", self.options.name, state.value, problem and f": {problem}")
        self.state = state
        if state.is_final:
            self._has_ended.notify_all()
