"""Reads the streams that the supervisor gave this worker, runs them through its pipe, and reports results."""

from __future__ import annotations

import base64
import logging
import threading
from collections import Counter, deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import TYPE_CHECKING, Any

from torchpipe_py import TorchpipeError
from torchpipe_py.serving import PLACES, Frame, Streams, call_from_any_thread, describe, draw_boxes, folded
from torchpipe_server.front.loop import Inbox, Loop
from torchpipe_server.worker.channel import Channel

if TYPE_CHECKING:
    from torchpipe_py import pipe

logger = logging.getLogger("torchpipe_server")

OUTCOMES = {"ok": "results", "error": "errors", "dropped": "dropped", "stale": "stale", "skipped": "skipped"}
"""Outcomes of frames, and their keys in ``Streams.stats``."""
SNAPSHOT_SIDE = 1920  # pixels; a larger frame is shrunk after its boxes are drawn
EVENT_BYTES = 2**16
EVENTS_WAITING = 256  # for the loop, and as many for the supervisor; others are dropped
TEXT_CHARACTERS = 500
RATE_POINTS, RATE_SECONDS = 6, 1.0  # samples, and seconds between them, from which the frame rate is taken


class _Report:
    """Records of this worker about a stream, besides ``Streams.stats``."""

    def __init__(self) -> None:
        self.before: Counter[str] = Counter()  # totals of earlier readers of the stream
        self.last: Frame | None = None
        self.problem = ""
        self.is_failing = False
        self.ages, self.age_sum = [0] * PLACES, 0.0
        self.events = self.sent = 0  # events so far, and the number of the last one sent
        self.rate: deque[tuple[float, int]] = deque(maxlen=RATE_POINTS)

    def frames_per_second(self, results: int) -> float:
        """The rate over the last seconds; each call may take a sample of ``results``."""
        now = monotonic()
        if not self.rate or now - self.rate[-1][0] >= RATE_SECONDS:
            self.rate.append((now, results))
        since, first = self.rate[0]
        return max(0, results - first) / (now - since) if now > since else 0.0


class WorkerStreams:
    """Streams on the pipe ``run``; ``channel`` leads to the supervisor.

    A thread takes the results. ``set``, ``watch``, ``snapshot`` and ``close`` are for the loop's thread.
    """

    def __init__(self, run: pipe, loop: Loop, channel: Channel) -> None:
        self._loop, self._channel = loop, channel
        self._streams = Streams(run)
        self._tables: Mapping[str, Any] = {}
        self._reports: dict[str, _Report] = {}
        self._watched: frozenset[str] = frozenset()
        self._put_event = Inbox(loop, self._send_event, EVENTS_WAITING).put
        self._is_closed = False
        self._has_changed = threading.Event()
        self._draws = ThreadPoolExecutor(1, "torchpipe-snapshot")
        threading.Thread(target=self._take_results, name="torchpipe-stream-results", daemon=True).start()

    def set(self, tables: Mapping[str, Any], file: str) -> None:
        """Read exactly these streams; those with an unchanged table continue. ``file`` is where they are defined."""
        reading = self._streams.stats()
        for name in list(reading):
            if tables.get(name) != self._tables[name]:
                report, ended = self._reports[name], reading[name]
                report.before.update({key: ended[key] for key in (*OUTCOMES.values(), "decoded", "reconnects")})
                report.rate.clear()
                report.last = None
                self._streams.remove(name, wait=False)
                del reading[name]
        for name in tables.keys() - reading.keys():
            report = self._reports.setdefault(name, _Report())
            try:
                self._streams.add(name, beside=file, **tables[name])
                report.problem = ""
            except TorchpipeError as error:  # its file was removed meanwhile
                report.problem = str(error)
                logger.error("%s", error)
            except Exception as error:  # no thread can be started, say; the others are read
                report.problem = describe(error)
                logger.exception("cannot read stream %r", name)
        self._tables = tables
        self._has_changed.set()

    def watch(self, names: list[str]) -> None:
        """Send the results of exactly these streams."""
        self._watched = frozenset(names)

    def snapshot(self, name: str) -> None:
        """Send the last frame of the stream, with its boxes, as JPEG; nothing after ``close``."""
        if not self._is_closed:
            self._draws.submit(self._draw, name)

    def close(self) -> None:
        """Stop reading; frames in the pipe are finished."""
        self._is_closed = True
        self.set({}, "")
        self._draws.shutdown(wait=False, cancel_futures=True)

    def figures(self) -> dict[str, Any]:
        """Totals and current state of each stream that this worker reads or has read."""
        reading = self._streams.stats()
        figures = {}
        for name, report in list(self._reports.items()):
            now, before = reading.get(name), report.before
            counts = {key: before[key] + (now[key] if now else 0) for key in ("decoded", "reconnects")}
            frames = {outcome: before[key] + (now[key] if now else 0) for outcome, key in OUTCOMES.items()}
            age = {"counts": folded(report.ages), "sum_ms": 1000 * report.age_sum}
            figures[name] = {**counts, "frames": frames, "age": age, "now": self._now(report, now, frames["ok"])}
        return figures

    def _now(self, report: _Report, now: dict[str, Any] | None, results: int) -> dict[str, Any]:
        if now is None:
            return {"state": "failed", "last_error": _text(report.problem)} if report.problem else {}
        last = report.last
        return {
            **{key: now[key] for key in ("state", "source", "silent_s", "waiting", "in_flight")},
            "fps": report.frames_per_second(results),
            "age_ms": 1000 * last.age if last is not None else 0.0,
            "last_error": _text(report.problem if report.is_failing else now.get("last_error", "")),
        }

    # -- results ------------------------------------------------------------------------------------------------------

    def _take_results(self) -> None:
        while not self._is_closed:
            for frame in self._streams:
                try:
                    self._take(frame)
                except Exception:
                    logger.exception("cannot report a result of stream %r", frame.stream)
            self._has_changed.wait()  # NOTE: the iteration ends with the last stream; others may follow later
            self._has_changed.clear()

    def _take(self, frame: Frame) -> None:
        report = self._reports[frame.stream]
        report.ages[int(frame.age * 1e6).bit_length()] += 1
        report.age_sum += frame.age
        is_failing, report.is_failing = report.is_failing, frame.error is not None
        if frame.error is not None:
            report.problem = describe(frame.error)
            if not is_failing:
                logger.warning("stream %r: a frame has no result: %s", frame.stream, report.problem)
        if frame.image is not None and frame.stream in self._tables:
            frame.data = {}  # only the image and the result are shown
            report.last = frame
        if frame.stream in self._watched:
            line = frame.to_line().rstrip(b"\n")
            if len(line) > EVENT_BYTES:
                frame.error, frame.result = ValueError(f"a result of {len(line)} bytes is too large for an event"), None
                line = frame.to_line().rstrip(b"\n")
            report.events += 1
            self._put_event(report, frame.stream, line.decode(), report.events)

    def _send_event(self, report: _Report, name: str, line: str, number: int) -> None:
        if self._channel.unsent < EVENTS_WAITING:
            missed, report.sent = number - report.sent - 1, number
            self._channel.send({"type": "event", "stream": name, "data": line, "missed": missed})

    def _draw(self, name: str) -> None:
        import cv2

        report = self._reports.get(name)
        frame = report.last if report is not None else None
        message = {"type": "snapshot", "stream": name, "jpeg": "", "problem": "no frame has arrived yet"}
        if frame is not None and frame.image is not None:
            try:
                image = draw_boxes(frame.image, frame.result)
                scale = SNAPSHOT_SIDE / max(image.shape)
                if scale < 1:
                    image = cv2.resize(image, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)
                jpeg = base64.b64encode(cv2.imencode(".jpg", image)[1].tobytes()).decode()
                message.update(jpeg=jpeg, problem="")
            except Exception as error:
                logger.exception("cannot draw the boxes of stream %r", name)
                message["problem"] = _text(f"its boxes cannot be drawn: {describe(error)}")
        call_from_any_thread(self._loop, self._channel.send, message)


def _text(text: str) -> str:
    """The text, shortened and encodable as UTF-8."""
    return text[:TEXT_CHARACTERS].encode("utf-8", "replace").decode()
