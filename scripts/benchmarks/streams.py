"""Video on a model that is too slow for it: age of results, fairness, and the cost of broken sources for others.

The model sleeps, and takes half of the frames. Files are played as live; broken sources come over HTTP.
"""

from __future__ import annotations

import argparse
import random
import socket
import statistics
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from benchmarks.common import Load, Report, load_of, progress
from torchpipe_py import Registry, pipe
from torchpipe_py.malloc import keep_freed_memory
from torchpipe_py.streams import Streams
from torchpipe_py.streams.config import read_streams
from torchpipe_py.streams.source import read_pictures

COUNTS, FPS, INSTANCES = (2, 16, 64), 25, 2
FRAMES_PER_FILE = 250
COMPUTE_MS = (1.0, 20.0)  # compute times of the model, for a file at full speed
FILE = "a file of 720p, model of {:g} ms: {}"
LATE_FRAMES = 2
WARM_UP_SECONDS = 2.0
BROKEN = ("killed", "frozen", "garbled")
BREAK_SECONDS = (0.5, 2.0)  # range of the time until a source breaks


def streams(args: argparse.Namespace) -> Report:
    """Measure live streams in growing numbers, some of them broken, and files at full speed."""
    keep_freed_memory()  # as ``torchpipe watch`` and the service do
    report = Report(f"streams: {FPS} fps each, for a model that takes half of them; QPS are frames, latency their age")
    with tempfile.TemporaryDirectory() as folder:
        video, short, file = (Path(folder, name) for name in ("a.ts", "b.ts", "c.ts"))
        # NOTE: files long enough that none is reopened: all would be at once, and lose turns.
        _write_video(video, 160, 120, round(FPS * (args.seconds + WARM_UP_SECONDS + 10)))
        _write_video(short, 160, 120, FRAMES_PER_FILE)
        _write_video(file, 1280, 720, FRAMES_PER_FILE)
        deviations: dict[int, list[float]] = {count: [] for count in COUNTS}
        late: list[int] = []
        for number in range(args.rounds):
            for count in COUNTS:
                deviations[count].append(_live(report, video, count, args.seconds))
            late.append(_broken(report, video, short, args.seconds))
            for compute_ms in COMPUTE_MS:
                _file(report, file, compute_ms / 1000)
            progress(f"round {number + 1} of {args.rounds}")
    for count in COUNTS:
        p99, bound = report.median("{} streams", count).p99, 1000 * _late_s(count)
        report.require(f"{count} streams: p99 of the age, ms", p99, high=bound)
        unfair = 100 * statistics.median(deviations[count])
        report.require(f"{count} streams: most that one is from its share, %", unfair, high=5)
    report.require("late frames of others beside broken streams, beyond those beside whole ones", max(late), high=1)
    for compute_ms in COMPUTE_MS:
        both, *alone = ((FILE.format(compute_ms, what), 1) for what in ("both", "decoding", "model"))
        slower = min(alone, key=lambda key: report.median(*key).qps)
        report.require(f"{FILE.format(compute_ms, 'both')}, against the slower", report.ratio(both, slower), low=0.9)
    return report


@contextmanager
def _model(compute_s: float) -> Iterator[pipe]:
    class Sleep:
        def forward(self, items: list[dict[str, Any]]) -> None:
            time.sleep(compute_s)
            for item in items:
                item["result"] = 1

    registry = Registry()
    registry.register_backend(Sleep, "Sleep")
    with pipe({"backend": "Sleep", "instance_num": INSTANCES}, registry=registry) as run:
        yield run


def _live(report: Report, video: Path, count: int, seconds: float) -> float:
    """The largest relative deviation of a stream from its share.

    Every other stream weighs twice as much, where they compete for an instance.
    """
    compute_s = _compute_s(count)
    tables: dict[str, dict[str, Any]] = {
        f"{index:02}": {"source": str(video), "repeat": True, "weight": 1 + index % 2 if count > INSTANCES else 1}
        for index in range(count)
    }
    with _model(compute_s) as run, Streams(run, tables) as frames:
        _take(frames, WARM_UP_SECONDS)
        before = _holds()
        ages = _take(frames, seconds)
        growth = _holds() - before
    results = {name: len(ages.get(name, ())) / table["weight"] for name, table in tables.items()}
    fair = sum(results.values()) / count
    deviation: float = max(abs(each - fair) for each in results.values()) / fair
    grown = "memory {:+.1f} MiB, descriptors {:+.0f}, threads {:+.0f}".format(*growth)
    note = f"{1000 * _late_s(count):.0f} ms is late; {100 * deviation:.1f} % from its share; {grown}"
    report.add("{} streams", count, _load(ages, seconds, note))
    return deviation


def _holds() -> NDArray[np.float64]:
    """MiB of memory, descriptors and threads of this process."""
    process = psutil.Process()
    return np.array([process.memory_info().rss / 2**20, process.num_fds(), process.num_threads()])


def _compute_s(count: int) -> float:
    """The compute time, in seconds, of a model that can process half of the frames of ``count`` streams."""
    return INSTANCES / (FPS * count / 2)


def _late_s(count: int) -> float:
    return LATE_FRAMES / FPS + _compute_s(count)


def _broken(report: Report, video: Path, short: Path, seconds: float) -> int:
    """Some sources among 16 that break at random, and in turn the same that do not; late frames of others due to it."""
    count, late = 16, {}
    for is_broken in (False, True):
        with closing(_Source(short.read_bytes(), is_broken)) as source, _model(_compute_s(count)) as run:
            tables: dict[str, dict[str, Any]] = {
                f"{index:02}": {"source": str(video), "repeat": True} for index in range(count - len(BROKEN))
            }
            for kind in BROKEN:
                tables[kind] = {"source": f"http://127.0.0.1:{source.port}/{kind}", "timeout": 1}
            with Streams(run, tables) as frames:
                _take(frames, WARM_UP_SECONDS)
                ages = _take(frames, seconds)
                stats = frames.stats()
        healthy = {name: of_stream for name, of_stream in ages.items() if name not in BROKEN}
        late[is_broken] = sum(age > _late_s(count) for of_stream in healthy.values() for age in of_stream)
        note = ", ".join(f"{kind} {stats[kind]['reconnects']} times opened again" for kind in BROKEN)
        name = "the others of {} streams, three " + ("broken" if is_broken else "over HTTP")
        report.add(name, count, _load(healthy, seconds, f"{late[is_broken]} late; {note}"))
    return late[True] - late[False]


def _file(report: Report, video: Path, compute_s: float) -> None:
    """A file in order as fast as it goes, against decoding it alone and the model alone."""
    table = {"source": str(video), "keep": "all"}
    (options,) = read_streams({"a": table})
    start = monotonic()
    for picture in read_pictures(options, threading.Event()):
        image = picture.to_image()
    decoding = Load(FRAMES_PER_FILE / (monotonic() - start))
    with _model(compute_s) as run:
        start = monotonic()
        deque(run.map({"data": image} for _ in range(FRAMES_PER_FILE)), maxlen=0)
        model = Load(FRAMES_PER_FILE / (monotonic() - start))
        start = monotonic()
        with Streams(run, {"a": table}) as frames:
            numbers = [frame.number for frame in frames]
        both = Load(FRAMES_PER_FILE / (monotonic() - start))
    assert numbers == list(range(FRAMES_PER_FILE)), "frames are missing, or out of order"
    for what, load in (("decoding", decoding), ("model", model), ("both", both)):
        report.add(FILE.format(1000 * compute_s, what), 1, load)


def _take(frames: Streams, seconds: float) -> dict[str, list[float]]:
    """The ages of the frames of so many seconds, by stream."""
    ages: dict[str, list[float]] = {}
    until = monotonic() + seconds
    while monotonic() < until:
        frame = next(frames)
        ages.setdefault(frame.stream, []).append(frame.age)
    return ages


def _load(ages: dict[str, list[float]], seconds: float, note: str) -> Load:
    return replace(load_of([age for each in ages.values() for age in each], seconds), note=note)


class _Source:
    """Sends two seconds of the video, and the rest at its own pace, again and again.

    Where it ``is_broken``, each path breaks in its way.
    """

    def __init__(self, video: bytes, is_broken: bool) -> None:
        self._video, self._is_broken = video, is_broken
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._random = random.Random(0)
        self._is_closed = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Accept no more, and send no more."""
        self._is_closed.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=self._serve, args=(self._listener.accept()[0],), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with suppress(OSError), sock:
            kind = sock.recv(4096).split()[1].decode().strip("/")
            sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: video/mp2t\r\nConnection: close\r\n\r\n")
            breaks_at = monotonic() + self._random.uniform(*BREAK_SECONDS) if self._is_broken else float("inf")
            step = len(self._video) // FRAMES_PER_FILE
            at = 2 * FPS * step
            sock.sendall(self._video[:at])
            while not self._is_closed.wait(1 / FPS):
                piece, at = self._video[at : at + step], (at + step) % len(self._video)
                if monotonic() > breaks_at:
                    if kind == "killed":
                        return
                    if kind == "frozen":
                        continue
                    piece = self._random.randbytes(len(piece))
                sock.sendall(piece)


def _write_video(path: Path, width: int, height: int, frames: int) -> None:
    import av
    import cv2

    few = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    picture = cv2.resize(few, (width, height), interpolation=cv2.INTER_CUBIC)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=FPS)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"  # type: ignore[attr-defined]
        for index in range(frames):
            frame = av.VideoFrame.from_ndarray(np.roll(picture, 2 * index, axis=1), format="bgr24")
            container.mux(stream.encode(frame))  # type: ignore[attr-defined]
        container.mux(stream.encode())  # type: ignore[attr-defined]
