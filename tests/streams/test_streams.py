"""Streams: which frames come, in what order, and what becomes of sources that fail."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import Counter
from contextlib import closing, contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from kit.videos import web_server, write_video
from kit.waits import WAIT, eventually

from torchpipe_py import ConfigError, DecodeError, ItemBackend, Registry, pipe
from torchpipe_py.plan.config import Place
from torchpipe_py.streams import Streams
from torchpipe_py.streams import source as source_module
from torchpipe_py.streams import stream as stream_module
from torchpipe_py.streams import streams as streams_module
from torchpipe_py.streams.config import read_stream, read_streams
from torchpipe_py.streams.source import Picture, SourceError, read_pictures
from torchpipe_py.streams.stream import LAST_SECONDS, State, Stream

pytest.importorskip("av")
cv2 = pytest.importorskip("cv2")

FRAMES = 50


@pytest.fixture(scope="module")
def video(tmp_path_factory):
    """Two seconds, 25 frames each; a frame's brightness is its number."""
    return write_video(tmp_path_factory.mktemp("video") / "a.ts", [4 * number for number in range(FRAMES)])


class Bright(ItemBackend):
    """The mean brightness of an image, after a pause."""

    pause = 0.0

    def forward_item(self, item):
        time.sleep(self.pause)
        if item["stream"] == "bad":
            raise ValueError("a bad frame")
        item["result"] = float(item["data"].mean())


class Slow(Bright):
    pause = 0.1


@contextmanager
def bright(backend="Bright", **keys):
    registry = Registry()
    registry.register_backend(Bright)
    registry.register_backend(Slow)
    with pipe({"backend": backend, "instance_num": 2, **keys}, registry=registry) as run:
        yield run


@pytest.fixture(scope="module")
def shots(tmp_path_factory):
    """A folder of three images, one of them in another folder, and of a file that is not an image."""
    folder = tmp_path_factory.mktemp("shots")
    (folder / "b").mkdir()
    for name, brightness in {"a.png": 10, "b/c.png": 20, "d.png": 30}.items():
        cv2.imwrite(str(folder / name), np.full((8, 8, 3), brightness, np.uint8))
    (folder / "e.png").write_bytes(b"no image")
    return folder


@pytest.mark.parametrize(("source", "names"), [("", ["a", "b/c", "d", "e"]), ("/*.png", ["a", "d", "e"])])
def test_folder_and_pattern_give_every_image(shots, source, names):
    with bright() as run, Streams(run, {"a": {"source": f"{shots}{source}"}}) as streams:
        frames = list(streams)
        state = streams.stats()["a"]["state"]
    assert state == "ended"
    assert [frame.path for frame in frames] == [f"{shots}/{name}.png" for name in names]
    assert [frame.result for frame in frames[:-1]] == [{"a": 10, "b/c": 20, "d": 30}[name] for name in names[:-1]]
    assert isinstance(frames[-1].error, DecodeError)
    assert json.loads(frames[0].to_line())["path"] == f"{shots}/a.png"


def test_relative_folder_is_beside_the_configuration(shots):
    assert read_stream("a", {"source": "b"}, Place(f"{shots}/streams.toml")).source == f"{shots}/b"
    assert read_stream("a", {"source": "b/*"}, Place(f"{shots}/streams.toml")).source == f"{shots}/b/*"
    kept = [
        read_stream("a", table, Place(f"{shots}/x")).keep for table in ({"source": "b"}, {"source": "b", "keep": 3})
    ]
    assert kept == ["all", 3]
    with pytest.raises(ConfigError, match=r"no such file: 'c/\*'"):
        read_stream("a", {"source": "c/*"}, Place(f"{shots}/streams.toml"))


@pytest.mark.parametrize("decoder", ["pyav", "opencv"])
def test_gives_every_frame_in_order(video, decoder):
    with bright() as run, Streams(run, {"a": {"source": str(video), "keep": "all", "decoder": decoder}}) as streams:
        frames = list(streams)
    assert [frame.number for frame in frames] == list(range(FRAMES))
    assert [frame.dropped_before for frame in frames] == [0] * FRAMES
    assert [frame.result for frame in frames] == pytest.approx([4 * number for number in range(FRAMES)], abs=7)
    assert frames[25].pts == pytest.approx(1.0, abs=0.05)
    assert frames[0].image.shape == (48, 64, 3)


def test_streams_are_converted_side_by_side_and_each_enters_in_order(video, monkeypatch):
    """With cores for four feeders: the first conversions of both wait for each other."""
    monkeypatch.setattr(streams_module, "usable_cores", lambda: 8)
    entered = {name: [] for name in "ab"}
    both = threading.Barrier(2, timeout=WAIT)
    dispatch = pipe.dispatch

    def entering(run, data, on_done, **keys):
        entered[data["stream"]].append(round(float(data["data"].mean()) / 4))
        dispatch(run, data, on_done, **keys)

    def reading(*args):
        with closing(read(*args)) as pictures:
            first = next(pictures)
            yield first._replace(to_image=lambda: both.wait() >= 0 and first.to_image())
            yield from pictures

    monkeypatch.setattr(pipe, "dispatch", entering)
    read = stream_module.read_pictures
    monkeypatch.setattr(stream_module, "read_pictures", reading)
    with bright() as run, Streams(run, {name: {"source": str(video), "keep": "all"} for name in "ab"}) as streams:
        frames = list(streams)
    assert [frame.error for frame in frames] == [None] * 2 * FRAMES
    assert all(numbers == sorted(numbers) and len(numbers) == FRAMES for numbers in entered.values())


@contextmanager
def unread(video, **keys):
    """``Streams`` without frames, and a stream that is not read."""
    with bright() as run:
        streams = Streams(run, in_flight=2)
        streams.close()
        read = read_stream("a", {"source": str(video), **keys}, Place("streams"))
        stream = streams._streams["a"] = Stream(read, streams._lock, streams._has_work, streams._has_result)
        yield streams, stream


def test_reports_due_frames(video):
    with unread(video) as (streams, stream):
        assert not streams._is_due(-1, 1)
        for seen in (time.monotonic() - 50, time.monotonic()):
            stream._offer(SimpleNamespace(pts=None), seen, threading.Event())
        stream.waiting.clear()
        assert [streams._is_due(-1, until) for until in (1, 500)] == [False, True]
        stream.in_flight = 1
        assert not streams._is_due(-1, 500), "its next frame waits for the one in the pipe"
        stream.in_flight, stream.due = 0, time.monotonic() - 2
        assert not streams._is_due(-1, 500), "it is late"


def test_drops_older_frames_if_pipe_is_too_slow(video):
    with bright("Slow") as run, Streams(run, {"a": {"source": str(video)}}) as streams:
        frames = list(streams)
        counts = streams.stats()["a"]
    assert len(frames) < FRAMES
    assert all(frame.age >= Slow.pause for frame in frames)
    assert [frame.dropped_before for frame in frames] == list(np.diff([-1, *(frame.number for frame in frames)]) - 1)
    assert counts["decoded"] == FRAMES
    assert counts["results"] == len(frames)
    assert counts["decoded"] == counts["results"] + counts["dropped"]


def test_serves_streams_by_their_weight(video):
    table = {"source": str(video), "keep": "all", "repeat": True}
    tables = {"a": {**table, "weight": 2}, "b": table, "c": table}
    with bright("Slow") as run, Streams(run, tables, in_flight=2) as streams:
        taken = Counter(next(streams).stream for _ in range(60))
    # A stream whose reader gets no processor for a while misses turns. Equal shares would be 20.
    assert taken["a"] == pytest.approx(30, abs=6)
    assert taken["b"] == pytest.approx(15, abs=6)


def test_makes_up_for_one_missed_turn(video):
    with unread(video, weight=2) as (streams, stream):
        streams._used = 10
        for used, turn in ((3, 9.5), (9.7, 9.7), (10.5, 10.5)):
            stream.used = used
            assert streams._turn(stream) == turn


def test_a_frame_that_fails_has_an_error(video):
    tables = {"bad": {"source": str(video), "keep": "all"}, "good": {"source": str(video), "keep": "all"}}
    with bright() as run, Streams(run, tables) as streams:
        frames = list(streams)
    assert Counter(frame.stream for frame in frames if frame.error is None) == {"good": FRAMES}
    failed = [frame for frame in frames if frame.stream == "bad"]
    assert len(failed) == FRAMES
    assert all("a bad frame" in str(frame.error) and frame.result is None for frame in failed)


@pytest.mark.parametrize(
    ("outcome", "result", "error"),
    [
        ({"error": "too dark"}, None, "NoResult: too dark"),
        ({"error": ValueError("too dark")}, None, "ValueError: too dark"),
        ({"result": 3, "error": "too dark"}, 3, None),
    ],
)
def test_a_frame_has_the_outcome_that_other_callers_get(video, outcome, result, error):
    class Writes(ItemBackend):
        def forward_item(self, item):
            item.update(outcome)

    registry = Registry()
    registry.register_backend(Writes)
    tables = {"a": {"source": str(video), "keep": "all"}}
    with pipe({"backend": "Writes"}, registry=registry) as run, Streams(run, tables) as streams:
        frame = next(iter(streams))
    line = json.loads(frame.to_line())
    assert (frame.result, line.get("result"), line.get("error")) == (result, result, error)


def test_drops_stale_frames(video):
    options = {"source": str(video), "keep": "all", "live": True, "stale_ms": 50}
    with bright("Slow") as run, Streams(run, {"a": options}, in_flight=1) as streams:
        frames = list(streams)
        counts = streams.stats()["a"]
    assert counts["stale"] > 0
    assert counts["stale"] + len(frames) == FRAMES


def test_adds_and_removes_streams(video):
    forever = {"source": str(video), "keep": "all", "repeat": True}
    with bright() as run, Streams(run, {"a": forever}) as streams:
        assert next(streams).stream == "a"
        streams.add("b", **forever)
        with pytest.raises(ConfigError, match="'b'"):
            streams.add("b", **forever)
        eventually(lambda: next(streams).stream == "b")
        streams.remove("a")
        streams.remove("b")
        list(streams)  # what is in the pipe comes, and then it ends
        assert streams.stats() == {}
        with pytest.raises(KeyError):
            streams.remove("a")


def test_removed_streams_leave_no_state(video):
    def open_files():
        return len(os.listdir("/proc/self/fd"))

    with bright() as run, Streams(run, {"a": {"source": str(video), "keep": "all", "repeat": True}}) as streams:
        next(streams)
        files, threads = open_files(), threading.active_count()
        for number in range(30):
            streams.add(name := f"stream {number}", source=str(video), keep="all", repeat=True)
            eventually(lambda name=name: next(streams).stream == name)
            streams.remove(name)
        eventually(lambda: open_files() <= files and threading.active_count() <= threads, "files or threads are left")
        eventually(lambda: len(streams._order) == 1)  # the last frame of the last one may be in the pipe


def test_failed_thread_start_affects_only_its_stream(video, monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    with unread(video) as (streams, stream), monkeypatch.context() as patch:
        stream._thread, stream._overdue_at = threading.current_thread(), 0
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            streams.add("b", source=str(video))
        assert list(streams.stats()) == ["a"]
        stream.replace_blocked_thread(time.monotonic())
        assert stream.state is State.BLOCKED


def test_close_ends_the_iteration(video):
    with bright() as run:
        streams = Streams(run, {"a": {"source": str(video), "keep": "all", "repeat": True}})
        next(streams)
        streams.close()
        streams.close()
        assert not list(streams)
    assert not [thread for thread in threading.enumerate() if thread.name == "torchpipe-streams"]


def test_opens_a_network_stream_again(video, caplog):
    def respond(handler, number):
        if number == 1:
            handler.send_error(503)
            return
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(video.read_bytes() if number != 2 else b"no video at all" * 100)

    caplog.set_level(logging.INFO, "torchpipe_py")
    with web_server(respond) as port, bright() as run:
        source = f"http://user:secret@127.0.0.1:{port}/a.ts?token=hidden"
        with Streams(run, {"a": {"source": source, "keep": "all"}}) as streams:
            numbers = [next(streams).number for _ in range(2 * FRAMES)]
            shown = str(streams.stats())
    assert numbers == list(range(2 * FRAMES))
    for secret in ("secret", "hidden", "user"):
        assert secret not in shown
        assert secret not in caplog.text
    assert "5XX" in caplog.text


def test_blocked_read_affects_only_its_stream(video, monkeypatch):
    stuck = threading.Event()
    read = stream_module.read_pictures

    def read_or_hang(options, stop):
        if options.name == "stuck":
            stuck.wait()
            return
        yield from read(options, stop)

    monkeypatch.setattr(stream_module, "read_pictures", read_or_hang)
    monkeypatch.setattr(stream_module, "_GRACE_SECONDS", 0.1)
    good = {"source": str(video), "keep": "all", "repeat": True}
    tables = {"stuck": {"source": "rtsp://h/", "timeout": 0.1}, "good": good}
    with bright() as run, Streams(run, tables) as streams:
        while streams.stats()["stuck"]["reconnects"] < stream_module.MOST_BLOCKED - 1:
            assert next(streams).error is None
        looks, look = threading.Semaphore(0), Stream.replace_blocked_thread

        def look_later(stream: Stream, now: float) -> None:
            """As if time had passed for the one that hangs."""
            is_stuck = stream.options.name == "stuck"
            look(stream, now + 10 * is_stuck)
            if is_stuck:
                looks.release()

        monkeypatch.setattr(Stream, "replace_blocked_thread", look_later)
        assert all(looks.acquire(timeout=WAIT) for _ in range(3))
        assert streams.stats()["stuck"]["reconnects"] == stream_module.MOST_BLOCKED - 1
        stuck.set()
    eventually(lambda: not any(thread.name.endswith(" stuck") for thread in threading.enumerate()))


def test_replaces_blocked_threads_up_to_a_limit_until_they_end(video, monkeypatch, caplog):
    over, started = threading.Event(), []

    def start(stream):
        stream._thread, stream._overdue_at = threading.Thread(target=over.wait, daemon=True), 0.0
        stream._thread.start()
        started.append(stream._thread)

    monkeypatch.setattr(Stream, "start", start)
    with unread(video) as (_, stream), stream._lock:
        stream.start()
        for now in range(1, 6):
            stream.replace_blocked_thread(now)
        assert len(started) == stream_module.MOST_BLOCKED
        assert caplog.text.count("blocked") == 1
        over.set()
        for thread in started:
            thread.join()
        stream.replace_blocked_thread(5 + stream_module.LONGEST_PAUSE)
        assert len(started) == stream_module.MOST_BLOCKED + 1


def test_stopped_stream_has_no_further_frame(video):
    with unread(video) as (_, stream):
        stream._offer(Picture(0.0, lambda: None), 0.0, threading.Event())
        assert stream.waiting
        with stream._lock:
            stream.stop()
        assert stream.is_over


def test_waits_for_absent_device_and_fails_without_frames(monkeypatch):
    with bright() as run, Streams(run, {"a": {"source": "/dev/no-such-camera"}}) as streams:
        eventually(lambda: "; opening it again in" in streams.stats()["a"].get("last_error", ""))
        monkeypatch.setattr(stream_module, "read_pictures", lambda options, stop: (each for each in ()))
        streams.add("b", source="/dev/no-such-camera", reconnect=False)
        eventually(lambda: streams.stats()["b"]["state"] == "failed")


def test_a_file_whose_clock_jumps_plays_on(tmp_path):
    path = write_video(tmp_path / "jump.mp4", [(0, number + 25 * 3600 * (number >= 5)) for number in range(10)])
    with bright() as run, Streams(run, {"a": {"source": str(path), "keep": 10}}) as streams:
        assert [frame.number for frame in streams] == list(range(10))


def test_clock_step_back_makes_no_frame_stale(video, monkeypatch):
    pictures = [Picture(pts, lambda: None) for pts in (0, 0.02, 7200, 7200.02, 0, 0.02)]
    monkeypatch.setattr(stream_module, "read_pictures", lambda options, stop: (each for each in pictures))
    seen = []
    with unread(video) as (_, stream):
        monkeypatch.setattr(stream, "_offer", lambda picture, at, stop: seen.append(at))
        assert stream._read_once(threading.Event()) is None
    assert len(seen) == len(pictures)
    assert seen == sorted(seen)


def arrivals(monkeypatch, video, times, **keys):
    """The seconds ``pts`` of the frames that a live source keeps, whose frames arrive at these times."""
    clock = [0.0]

    def reading(options, stop):
        for clock[0] in times:
            yield Picture(None, lambda: None)

    monkeypatch.setattr(stream_module, "monotonic", lambda: clock[0])
    monkeypatch.setattr(stream_module, "read_pictures", reading)
    with unread(video, keep=1000, **keys) as (_, stream):
        stream.options.is_file = False
        assert stream._read_once(threading.Event()) is None
        assert stream.counts["decoded"] == len(times)
        return [waiting.picture.pts for waiting in stream.waiting]


def test_live_frames_count_from_the_first_arrival(monkeypatch, video):
    assert arrivals(monkeypatch, video, [70.5, 71.0, 75.0]) == [0, 0.5, 4.5]


@pytest.mark.parametrize(("rate", "fps", "kept"), [(5, 3, 3), (5, 5, 5), (5, 10, 5), (30, 1, 1), (29.97, 10, 10)])
def test_fps_of_live_source_counts_arrivals(monkeypatch, video, rate, fps, kept):
    """A minute of a camera whose frames come a little early or late."""
    rng = np.random.default_rng(0)
    times = [(number + rng.uniform(-0.1, 0.1)) / rate for number in range(round(60 * rate))]
    assert len(arrivals(monkeypatch, video, times, fps=fps)) == pytest.approx(60 * kept, abs=2)


def test_live_fps_continues_after_a_pause(monkeypatch, video):
    times = [*(number / 10 for number in range(100)), *(3600 + number / 10 for number in range(100))]
    assert len(arrivals(monkeypatch, video, times, fps=2)) == 40


def test_images_without_a_clock_have_no_time_and_are_all_kept(monkeypatch, video):
    pictures = [Picture(None, lambda: None)] * 3
    monkeypatch.setattr(stream_module, "read_pictures", lambda options, stop: (each for each in pictures))
    with unread(video, keep=1000, fps=1) as (_, stream):
        assert stream._read_once(threading.Event()) is None
        assert [waiting.picture.pts for waiting in stream.waiting] == [None] * 3


def test_fps_continues_after_a_jump_of_the_clock(monkeypatch, video):
    """Two seconds each at 25 frames, with times as FFmpeg rounds them: forwards, backwards, and on."""
    starts = (0, 7200, 30, 31.99)
    pictures = [Picture(round(start + number / 25, 3), lambda: None) for start in starts for number in range(50)]
    monkeypatch.setattr(stream_module, "read_pictures", lambda options, stop: (each for each in pictures))
    for fps, kept in ((25, 200), (5, 40), (1000, 200)):
        with unread(video, keep=1000, live=False, fps=fps) as (_, stream):
            assert stream._read_once(threading.Event()) is None
            assert len(stream.waiting) == pytest.approx(kept, abs=1)


class Pauses(threading.Event):
    """Notes how long it is waited for, and is set after some waits."""

    def __init__(self, most):
        super().__init__()
        self.most, self.waits = most, []

    def wait(self, timeout=None):
        self.waits.append(timeout)
        if len(self.waits) == self.most:
            self.set()
        return self.is_set()


def test_pauses_double_up_to_a_limit_until_a_frame_arrives(monkeypatch, video):
    stop = Pauses(10)

    def reading(options, stop_):
        if len(stop.waits) == 8:
            yield Picture(None, lambda: None)
        raise SourceError("no route")

    monkeypatch.setattr(stream_module, "read_pictures", reading)
    with unread(video) as (_, stream):
        stream.options.is_file = False
        stream._read(stop)
        assert stream.counts["reconnects"] == 9
    for wait, pause in zip(stop.waits, [0.5, 1, 2, 4, 8, 16, 30, 30, 0.5, 1], strict=True):
        assert 0.75 * pause <= wait <= 1.25 * pause
    assert len({wait / pause for wait, pause in zip(stop.waits, [0.5, 1, 2, 4], strict=False)}) > 1, "no jitter"


def test_a_gap_in_a_file_is_not_a_blocked_read(monkeypatch, video):
    stop = Pauses(2)
    wait = stop.wait

    def wait_and_look(timeout=None):
        if not stop.waits:  # for the second frame
            stream.replace_blocked_thread(time.monotonic() + 1e6)
        return wait(timeout)

    stop.wait = wait_and_look
    pictures = [Picture(pts, lambda: None) for pts in (0.0, 50.0)]
    monkeypatch.setattr(stream_module, "read_pictures", lambda options, stop: (each for each in pictures))
    with unread(video, keep=2) as (_, stream):
        stream._thread = threading.current_thread()
        assert stream._read_once(stop) is None
        assert stop.waits[0] == pytest.approx(50, abs=WAIT)
        assert (stream.state, len(stream.waiting)) == (State.PLAYING, 2)


def test_unknown_accelerator_is_not_tried_again():
    with bright() as run, Streams(run, {"a": {"source": "rtsp://127.0.0.1:1/", "hwaccel": "nonsense"}}) as streams:
        eventually(lambda: streams.stats()["a"]["state"] == "failed")
        stats = streams.stats()["a"]
    assert stats["last_error"].startswith("hwaccel = 'nonsense': not in this PyAV; ")
    assert stats["reconnects"] == 0


@pytest.mark.parametrize(
    ("source", "settings"),
    [
        ("rtsp://h/", {"options": {"rtsp_flags": "prefer_tcp"}}),
        ("/dev/video9", {"format": "v4l2"}),
        ("http://h/", {}),
    ],
)
def test_opens_each_kind_of_source_within_the_time_limit(monkeypatch, source, settings):
    calls = []

    def refuse(source, **settings):
        calls.append((source, settings))
        raise OSError("not here")

    monkeypatch.setattr("av.open", refuse)
    (options,) = read_streams({"a": {"source": source, "timeout": 7}})
    with pytest.raises(SourceError, match="not here"):
        next(read_pictures(options, threading.Event()))
    assert calls == [(source, {"timeout": 7, "metadata_errors": "replace", **settings})]


def test_silent_source_is_reported_with_its_time_limit():
    over = threading.Event()
    with web_server(lambda handler, number: handler.send_response(200) or over.wait()) as port, bright() as run:
        table = {"source": f"http://127.0.0.1:{port}/", "timeout": 0.1, "reconnect": False}
        with Streams(run, {"a": table}) as streams:
            eventually(lambda: streams.stats()["a"]["state"] == "failed")
            assert streams.stats()["a"]["last_error"] == "no data for 0.1 s"
        over.set()


def test_keeps_within_the_limit_of_the_pipe(video):
    table = {"source": str(video), "keep": "all", "fps": 5}
    with bright("Slow", max_inflight=1) as run, Streams(run, {"a": table, "b": table}) as streams:
        frames = list(streams)
    assert [frame.error for frame in frames] == [None] * 20


@pytest.mark.parametrize("decoder", ["pyav", "opencv"])
def test_refuses_large_frames_and_stops_between_frames(video, decoder, monkeypatch):
    monkeypatch.setattr(source_module, "MOST_PIXELS", 64 * 48 - 1)
    table = {"source": str(video), "decoder": decoder}
    with bright() as run, Streams(run, {"a": table}) as streams:
        assert not list(streams)
        assert "frames of 64x48 pixels" in streams.stats()["a"]["last_error"]
    monkeypatch.undo()
    (options,), stop = read_streams({"a": table}), threading.Event()
    pictures = read_pictures(options, stop)
    next(pictures)
    stop.set()
    assert not list(pictures)


def test_a_file_of_one_frame_is_not_repeated_without_a_pause(tmp_path):
    path, began = tmp_path / "one.jpg", time.monotonic()
    path.write_bytes(cv2.imencode(".jpg", np.zeros((48, 64, 3), np.uint8))[1].tobytes())
    with bright() as run, Streams(run, {"a": {"source": str(path), "repeat": True}}) as streams:
        for _ in range(3):
            next(streams)
        decoded = streams.stats()["a"]["decoded"]
        assert decoded <= 1 + (time.monotonic() - began) / LAST_SECONDS


def test_broken_bytes_end_their_own_stream(video, tmp_path):
    whole = video.read_bytes()
    rng = np.random.default_rng(0)
    tables = {"good": {"source": str(video), "keep": "all"}}
    for index in range(10):
        broken = bytearray(whole[: rng.integers(100, len(whole))])
        for _ in range(30):
            broken[rng.integers(len(broken))] = rng.integers(256)
        path = tmp_path / f"{index}.ts"
        path.write_bytes(broken)
        tables[f"broken{index}"] = {"source": str(path), "keep": "all"}
    with bright() as run, Streams(run, tables) as streams:
        taken = Counter(frame.stream for frame in streams)
    assert taken["good"] == FRAMES


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"a": {}}, "streams: stream 'a': needs the key 'source'"),
        ({"a": {"source": "/no/such.mp4"}}, "key 'source': no such file: '/no/such.mp4'"),
        ({"a": {"source": "rtsp://x:${NO_SUCH_VARIABLE}@h/"}}, "no variable NO_SUCH_VARIABLE"),
        ({"a": {"source": "rtsp://h/", "keep": "newest"}}, "key 'keep': expected 'latest', 'all' or a number"),
        (
            {"a": {"source": "rtsp://h/", "keep": 1001}},
            "key 'keep': expected 'latest', 'all' or a number of frames from",
        ),
        ({"a": {"source": "rtsp://h/", "wieght": 2}}, "key 'wieght': unknown; did you mean 'weight'"),
        ({"a": {"source": "rtsp://h/", "fps": -1}}, "key 'fps': expected at least 0"),
        ({"a": {"source": "rtsp://h/", "decoder": "ffmpeg"}}, "key 'decoder': expected one of auto, pyav, opencv"),
        ({"a": {"source": "rtsp://u:p[a@h/"}}, "key 'source': not a URL"),
        ({"a": {"source": "rtsp://u:p/s@h/"}}, "key 'source': not a URL; within a password write %40 for @, %2F for /"),
        ({"a": {"source": "rtsp://h/", "node_name": "nod"}}, "'node_name': 'nod' is not a root; did you mean 'node'?"),
        ({"a": {"source": ""}}, "key 'source': no such file: ''"),
        ({"a": {"source": "x" * 5000}}, "key 'source': no such file"),
        ({"a": 3}, "stream 'a': expected a table"),
        ({"global": {"fps": 3}}, "no stream in it"),
        ({"node": {"fps": 3}}, "streams: no stream in it: each is a table with a source"),  # a file without tables
    ],
)
def test_refuses_mistakes(tables, message):
    with bright() as run, pytest.raises(ConfigError) as refused:
        Streams(run, tables)
    assert message in str(refused.value)


def test_reads_a_file_with_defaults_and_variables(video, tmp_path, monkeypatch):
    monkeypatch.setenv("VIDEO_FOLDER", str(video.parent))
    config = tmp_path / "cameras.toml"
    config.write_text('keep = "all"\n[a]\nsource = "${VIDEO_FOLDER}/a.ts"\n[b]\nsource = "copy.ts"\nfps = 1\n')
    (tmp_path / "copy.ts").write_bytes(video.read_bytes())
    with bright() as run, Streams(run, config) as streams:
        assert Counter(frame.stream for frame in streams) == {"a": FRAMES, "b": 2}


@pytest.mark.parametrize("password", ["secret", "1/secret", "1?secret", "se@cret"])
def test_masks_passwords_in_urls(password):
    (options,) = read_streams({"a": {"source": f"rtsp://u:{password}@h/live?token=secret"}})
    assert "cret" not in options.masked(options.shown) + options.masked(f"cannot open {options.source}")


def test_masks_values_of_environment_variables(monkeypatch):
    monkeypatch.setenv("TOKEN", "s3cr3tTOKEN")
    (options,) = read_streams({"a": {"source": "https://h/live/${TOKEN}/index.m3u8"}})
    assert options.masked("404 of https://h/live/s3cr3tTOKEN/seg-17.ts") == "404 of https://h/live/***/seg-17.ts"
    assert options.masked(f"cannot open {options.source}") == "cannot open https://h/live/${TOKEN}/index.m3u8"
