"""Streams in a service: shared out among workers, shown while monitoring, whatever becomes of sources and workers."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kit.monitored import Monitored
from kit.services import LIGHT, Process, turn
from kit.videos import TURNS, picture, turn_clip, web_server, write_clip, write_video
from kit.waits import WAIT, eventually
from torchpipe_server.front.loop import new_loop
from torchpipe_server.options import Options
from torchpipe_server.supervisor import streams as module
from torchpipe_server.supervisor.messages import Event
from torchpipe_server.supervisor.streams import SharedStreams, Subscriber
from torchpipe_server.supervisor.supervisor import Supervisor
from torchpipe_server.worker import streams as worker_module

from torchpipe_py import cli, parse_toml, pipe
from torchpipe_py.streams import Frame

pytest.importorskip("av")

CONFIG = 'backend = "ResizeMat"\nresize_h = 1\nresize_w = 2\n'
SECRET = "s3cret-of-a-camera"
QUARTERS = ("as stored", "90 clockwise", "180", "90 counterclockwise")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration, and a video of a second."""
    folder = tmp_path_factory.mktemp("streams")
    write_video(folder / "a.ts", [0] * 25)
    for number, name in enumerate(QUARTERS):
        turn_clip(write_clip(folder / f"phone{number}.mp4", picture(64, 48), frames=25), TURNS[name][0])
    (folder / "small.toml").write_text(CONFIG)
    return folder


# -- who reads what -------------------------------------------------------------------------------------------------


class Reader:
    """What is asked of a worker."""

    def __init__(self) -> None:
        self.stats: dict[str, Any] = {}
        self.given: list[str] | None = None
        self.watched: list[str] = []
        self.has_streams = False

    def send(self, type_: str, **fields: Any) -> None:
        if type_ == "streams":
            self.given = sorted(fields["tables"])
        else:
            self.watched = fields["names"]


def test_each_stream_stays_with_one_worker() -> None:
    loop, names, readers = new_loop(is_fast=False), list("abcde"), [Reader() for _ in range(3)]
    tables: dict[str, Any] = {name: {} for name in names}
    shared: Any = SharedStreams(loop, "cameras.toml", tables)
    first, following = SimpleNamespace(streams=tables), SimpleNamespace(streams=tables)
    one, two, three = readers

    for generation, workers, count in (
        (first, (one, two), 2),
        (first, (one, two), 0),  # nothing has changed
        (first, (two,), 1),
        (first, (two, three), 2),
        (first, (), 0),
        (following, (one, three), 2),
    ):
        for reader in readers:
            reader.given = None
        shared.share_out(generation, dict.fromkeys(workers, 0))
        given = [reader.given for reader in readers if reader.given is not None]
        assert len(given) == count
        assert sorted(chain(*given)) == (names if count else [])
        assert max(map(len, given), default=3) - min(map(len, given), default=3) <= 1
        assert {each["worker"] for each in shared.figures({}).values()} == ({0} if workers else {None})
    assert all(reader.has_streams for reader in readers)
    loop.close()


def test_a_generation_brings_its_streams() -> None:
    loop, reader = new_loop(is_fast=False), Reader()
    shared: Any = SharedStreams(loop, "cameras.toml", {"a": {}})
    for names in (["a"], ["a", "b"], ["b"], []):
        shared.share_out(SimpleNamespace(streams={name: {} for name in names}), {reader: 0})
        assert reader.given == names
    loop.close()


def test_reads_no_stream_before_all_workers_have_started(folder: Path) -> None:
    """Otherwise the next worker that is ready would begin the first one's streams anew."""
    (folder / "one.toml").write_text('[a]\nsource = "a.ts"\n')
    options = Options(str(folder / "small.toml"), streams=str(folder / "one.toml"), workers=2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        tables = parse_toml(folder / "small.toml")
        supervisor = Supervisor(listener, options, tables, lambda: tables, None)
        reader: Any = Reader()
        reader.is_ready = True
        supervisor._fleet.generation.workers[0].child = reader
        for has_begun, given in ((False, None), (True, ["a"])):
            supervisor._fleet.has_begun = has_begun
            supervisor._step()
            assert reader.given == given
        supervisor.loop.close()


class SlowStream:
    """A client that takes what it ``has_room`` for."""

    def __init__(self) -> None:
        self.has_room = True
        self.written = b""

    def begin(self, head: bytes) -> None:
        self.write(head)

    def write(self, data: bytes) -> bool:
        self.written += data
        return self.has_room

    def end(self, method: str) -> None:
        self.written += b"(ended)"


def test_slow_client_loses_oldest_events_and_gets_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVENTS_WAITING", 2)
    loop, reader, stream = new_loop(is_fast=False), Reader(), SlowStream()
    shared: Any = SharedStreams(loop, "cameras.toml", {"a": {}})
    shared.share_out(SimpleNamespace(streams={"a": {}}), {reader: 0})
    subscriber: Subscriber = shared.subscribe("a", b"head\n")
    subscriber.attach(stream)
    assert reader.watched == ["a"]
    shared.receive(reader, Event("a", "0", 0))
    shared.receive(Reader(), Event("a", "of who does not read it", 0))
    stream.has_room = False
    for number in range(1, 6):
        shared.receive(reader, Event("a", str(number), int(number == 4)))
    assert stream.written == b"head\n: results of frames\n\ndata: 0\n\n"
    stream.has_room, stream.written = True, b""
    subscriber.write_more()
    assert stream.written == b'event: lost\ndata: {"lost": 4}\n\ndata: 4\n\ndata: 5\n\n'
    monkeypatch.setattr(module, "MOST_SUBSCRIBERS", 1)
    with pytest.raises(module.NoStreamError, match="1 client follow"):
        shared.subscribe("a", b"")
    subscriber.cancel()
    assert reader.watched == []
    shared.subscribe("a", b"").attach(stream)
    shared.close()
    assert stream.written.endswith(b"event: end\ndata: {}\n\n(ended)")
    turn(loop)
    loop.close()


def test_counts_events_lost_between_worker_and_supervisor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_module, "EVENTS_WAITING", 3)
    loop, sent = new_loop(is_fast=False), []
    channel: Any = SimpleNamespace(unsent=0, send=sent.append)
    with pipe({"backend": "Identity"}) as run:
        subject = worker_module.WorkerStreams(run, loop, channel)
        subject._reports["a"] = worker_module._Report()
        subject.watch(["a"])
        for channel.unsent, frames in ((0, 5), (3, 2), (0, 1)):
            for number in range(frames):
                subject._take(Frame("a", number, None, 0))
            turn(loop)
        subject.close()
        subject._streams.close()
    eventually(lambda: "torchpipe-stream-results" not in {thread.name for thread in threading.enumerate()})
    loop.close()
    assert [(json.loads(each["data"])["number"], each["missed"]) for each in sent] == [(2, 2), (3, 0), (4, 0), (0, 2)]


def test_a_worker_reads_the_other_streams_if_one_cannot_be_started(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop, channel = new_loop(is_fast=False), SimpleNamespace(unsent=0, send=lambda message: None)
    given = {"a": {"source": "a"}, "b": {"source": "b"}, "c": {"source": "c"}}
    with pipe({"backend": "Identity"}) as run:
        subject: Any = worker_module.WorkerStreams(run, loop, channel)  # type: ignore[arg-type]
        started: dict[str, dict[str, int]] = {}
        counts = dict.fromkeys((*worker_module.OUTCOMES.values(), "decoded", "reconnects"), 0)

        def add(name: str, **options: Any) -> None:
            if name == "b":
                raise RuntimeError("can't start new thread")
            started[name] = counts

        monkeypatch.setattr(subject._streams, "add", add)
        monkeypatch.setattr(subject._streams, "stats", lambda: dict(started))
        monkeypatch.setattr(subject._streams, "remove", lambda name, wait: started.pop(name))
        subject.set(given, "cameras.toml")
        assert set(started) == {"a", "c"}
        assert subject._reports["b"].problem == "RuntimeError: can't start new thread"
        assert caplog.messages == ["cannot read stream 'b'"]
        subject.set({"a": given["a"]}, "cameras.toml")
        assert set(started) == {"a"}
        monkeypatch.undo()
        subject.close()
        subject._streams.close()
    eventually(lambda: "torchpipe-stream-results" not in {thread.name for thread in threading.enumerate()})
    loop.close()


# -- the whole service ----------------------------------------------------------------------------------------------


class Followed(Monitored):
    """A service with streams."""

    @property
    def streams(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.get("streams")[1])["streams"]
        return found

    def ok(self, name: str) -> int:
        return int(self.streams.get(name, {}).get("frames", {}).get("ok", 0))

    @contextmanager
    def ask(self, path: str) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=WAIT)
        connection.request("GET", path)
        with closing(connection), closing(connection.getresponse()) as answer:
            yield answer


def sends(data: bytes, then: Callable[[], object] = lambda: None) -> Callable[[Any, int], None]:
    """An answer that begins with ``data``, and ends after ``then``."""

    def respond(handler: Any, number: int) -> None:
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(data)
        then()

    return respond


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Followed]:
    video = (folder / "a.ts").read_bytes()
    garbage = np.random.default_rng(0).bytes(20_000)
    over = threading.Event()
    with web_server(sends(video, over.wait)) as frozen, web_server(sends(garbage)) as garbled:
        (folder / "cameras.toml").write_text(
            '["front door"]\nsource = "a.ts"\nrepeat = true\n[yard]\nsource = "a.ts"\nrepeat = true\nfps = 5\n'
            + "".join(f'[phone{number}]\nsource = "phone{number}.mp4"\nrepeat = true\nfps = 5\n' for number in range(4))
            + f'[frozen]\nsource = "http://viewer:${{CAMERA}}@127.0.0.1:{frozen}/live"\ntimeout = 0.3\n'
            f'[garbled]\nsource = "http://viewer:{SECRET}@127.0.0.1:{garbled}/live?token={SECRET}"\n'
        )
        arguments = ("--workers", "2", "--streams", str(folder / "cameras.toml"))
        with Followed(*arguments, config=str(folder / "small.toml"), env={"CAMERA": SECRET}) as service:
            yield service.wait_started()
            service.signal()
            assert service.wait() == 0, service.stderr
        over.set()


def next_event(answer: http.client.HTTPResponse) -> dict[str, Any]:
    while not (line := answer.readline()).startswith(b"data: "):
        assert line, "the events have ended"
    found: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
    return found


def test_sends_results_as_they_arrive(service: Followed) -> None:
    with service.ask("/streams/front%20door/events") as answer:
        assert (answer.status, answer.getheader("Content-Type")) == (200, "text/event-stream")
        assert answer.readline() == b": results of frames\n"
        events = [next_event(answer) for _ in range(5)]
        assert service.streams["front door"]["subscribers"] == 1
    assert [event["number"] for event in events] == sorted({event["number"] for event in events})
    assert all(event["stream"] == "front door" and event["result"]["shape"] == [1, 2, 3] for event in events)
    eventually(lambda: service.streams["front door"]["subscribers"] == 0, "a client that left is followed")


def test_snapshot_is_a_jpeg_of_the_last_frame(service: Followed) -> None:
    cv2 = pytest.importorskip("cv2")
    eventually(lambda: service.ok("yard") > 0)
    with service.ask("/streams/yard/snapshot.jpg") as answer:
        assert (answer.status, answer.getheader("Content-Type")) == (200, "image/jpeg")
        assert cv2.imdecode(np.frombuffer(answer.read(), np.uint8), cv2.IMREAD_COLOR).shape == (48, 64, 3)
    for number, name in enumerate(QUARTERS):
        eventually(lambda number=number: service.ok(f"phone{number}") > 0)  # type: ignore[misc]
        with service.ask(f"/streams/phone{number}/snapshot.jpg") as answer:
            shown = cv2.imdecode(np.frombuffer(answer.read(), np.uint8), cv2.IMREAD_COLOR)
        upright = TURNS[name][1](picture(64, 48))
        assert shown.shape == upright.shape
        assert np.abs(shown.astype(int) - upright).mean() < 8, name
    for path, status, text in (
        ("streams/yord/snapshot.jpg", 404, "no stream 'yord'; did you mean 'yard'?\n"),
        ("streams/yord/events", 404, "no stream 'yord'; did you mean 'yard'?\n"),
        ("streams/garbled/snapshot.jpg", 503, "'garbled': no frame has arrived yet\n"),
    ):
        assert service.get(path) == (status, text)


def test_frozen_and_garbled_sources_are_reported_and_disturb_no_other(service: Followed) -> None:
    eventually(lambda: all(service.streams[name]["reconnects"] for name in ("frozen", "garbled")))
    streams = service.streams
    assert streams["frozen"]["decoded"] > 0
    for name in ("frozen", "garbled"):
        assert "opening it again" in streams[name]["last_error"]
    before = service.ok("front door")
    eventually(lambda: service.ok("front door") > before)
    frames = service.streams["front door"]["frames"]
    assert frames["error"] == frames["stale"] == 0
    metrics = service.get("metrics")[1]
    assert 'torchpipe_stream_frames_total{outcome="ok",stream="front door"}' in metrics
    assert 'torchpipe_stream_playing{stream="front door"} 1.0' in metrics
    shown = metrics + str(service.stats) + str(service.streams) + service.stderr
    assert SECRET not in shown
    assert "***" in shown


def test_streams_move_when_a_worker_is_killed(service: Followed) -> None:
    with service.ask("/streams/front%20door/events") as answer:
        # Far enough on that what the next worker reads first is sure to be lower.
        first = next(number for _ in range(500) if (number := next_event(answer)["number"]) >= 50)
        before = service.ok("front door")
        eventually(lambda: service.ok("front door") > before)
        worker = service.stats["workers"][service.streams["front door"]["worker"]]
        os.kill(worker["pid"], signal.SIGKILL)
        eventually(lambda: service.stats["restarts"] == 1 and len(service.pids()) == 2)
        eventually(lambda: all(service.streams[name]["state"] == "playing" for name in ("front door", "yard")))
        assert service.ok("front door") >= before, "the counts fall"
        assert any(next_event(answer)["number"] < first for _ in range(500)), "it is not read anew"


def test_sighup_reads_the_streams_again(service: Followed, folder: Path) -> None:
    cameras, tables = folder / "cameras.toml", '[new]\nsource = "a.ts"\nrepeat = true\n'
    with service.ask("/streams/yard/events") as answer:
        cameras.write_text(tables + '[wrong]\nsource = "b.ts"\n')
        service.signal(signal.SIGHUP)
        eventually(lambda: "stream 'wrong': key 'source': no such file: 'b.ts'" in service.stderr)
        assert "yard" in service.streams
        cameras.write_text(tables)
        service.signal(signal.SIGHUP)
        eventually(lambda: list(service.streams) == ["new"] and service.ok("new") > 0)
        assert answer.read().endswith(b"event: end\ndata: {}\n\n")


def test_refuses_an_invalid_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong, config = folder / "wrong.toml", str(folder / "small.toml")
    wrong.write_text('[a]\nsource = "a.ts"\nwieght = 2\n')
    said = f"{wrong}: stream 'a': key 'wieght': unknown; did you mean 'weight'?"
    with Process("--streams", str(wrong), config=config, env={"PYTHONPATH": LIGHT}) as process:
        assert process.wait() == 1
        assert process.stderr == f"torchpipe-serve: {said}\n"
    assert cli.main(["check", config, "--streams", str(wrong)]) == 1
    assert said in capsys.readouterr().err
    wrong.write_text('[a]\nsource = "a.ts"\nnode_name = "root"\n')
    assert cli.main(["check", config, "--streams", str(wrong)]) == 1
    assert "key 'node_name': 'root' is not a root; " in capsys.readouterr().err
