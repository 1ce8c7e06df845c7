"""The load tester in a closed loop, against toy servers whose answer is written in the image."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import socketserver
import struct
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest
from fake_servers import IDL, Serve, ToyServer, command, load, refused, toy_servers
from fakes import WAIT, eventually, is_alive

from torchpipe_py.tools.load import wire
from torchpipe_py.tools.load.client import Answer
from torchpipe_py.tools.load.run import main


@pytest.fixture
def serve() -> Iterator[Serve]:
    with toy_servers() as start:
        yield start


@pytest.mark.parametrize("framed", [False, True])
@pytest.mark.parametrize("method", ["infer_batch", "infer_many"])
def test_bytes_of_calls_are_what_thriftpy2_would_send(method: str, framed: bool) -> None:
    data = [b"\x00first", b"second" * 9][: 1 if method == "infer_batch" else 2]
    thrift = wire.ThriftWire(IDL, framed, len(data))
    sent = b"".join(thrift.request(3, 77, data))
    params = [IDL.InferenceParams(uuid=f"0003-0000004d-{n:04x}", data=body) for n, body in enumerate(data)]
    argument = params[0] if method == "infer_batch" else params
    expected = wire.encode_call(IDL, method, {"params": argument}, sequence=77)
    assert sent == (struct.pack(">i", len(expected)) + expected if framed else expected)


# --- whole runs


def test_every_image_is_sent_once_and_the_report_is_complete(serve: Serve, images: Callable[..., Path]) -> None:
    server = serve()
    options = ("--total_number", 103, "--request_client", 4, "--warmup", 3)
    done, result = load(images(a="ok:a", b="ok:b"), server.port, *options)
    assert done.returncode == 0, done.stderr
    counts = Counter(uuid[:4] for uuid in server.uuids)  # three calls of each client are for warming up
    assert counts == {"0000": 29, "0001": 29, "0002": 29, "0003": 28}
    assert len(set(server.uuids)) == 115
    assert (result["images_sent"], result["images_ok"], result["calls"]) == (103, 103, 103)
    assert sum(result["images_ok_per_second"]) == result["latency_ms"]["count"] == 103
    assert set(result) >= {"command", "started_at", "settings", "versions", "machine", "window_s", "qps", "calls_per_s"}
    assert set(result) >= {"goodput", "errors", "server_cpu_percent", "tester_cpu_percent", "tester_cpu_us_per_call"}
    assert set(result["latency_ms"]) == {"count", "mean", "p50", "p90", "p99", "p99_9", "max", "min"}
    assert result["tester_limited"] is (not result["valid"])
    assert result["server_pids"] == [os.getpid()]
    assert (result["settings"]["request_client"], result["accuracy"]) == (4, None)
    assert all(name in done.stdout for name in ("QPS", "goodput", "latency", "p99.9", "server CPU", "tester CPU"))


@pytest.mark.parametrize("transport", ["buffered", "framed"])
def test_batches_and_their_rest(transport: str, serve: Callable[..., ToyServer], images: Callable[..., Path]) -> None:
    server = serve(framed=transport == "framed")
    options = ("--total_number", 21, "--request_batch", 4, "--transport", transport, "--warmup", 0)
    done, result = load(images(a="ok:a", b="ok:b" + "x" * 70_000), server.port, *options)
    assert done.returncode == 0, done.stderr
    assert Counter(server.call_sizes) == {4: 4, 3: 1, 2: 1}  # 11 and 10 images
    assert len(set(server.uuids)) == 21
    assert (result["images_ok"], result["calls"]) == (21, 6)


ONE_BY_ONE = ("--total_number", 4, "--request_client", 1, "--warmup", 0)
HALF = {"images_sent": 4, "images_answered": 2, "images_ok": 2}
ONE_TIMEOUT = ("--total_number", 2, "--request_client", 1, "--warmup", 0, "--timeout", 2)
THEN_OK = {"images_sent": 2, "images_answered": 1, "images_ok": 1}


@pytest.mark.parametrize(
    ("words", "options", "errors", "figures"),
    [
        (
            ("ok:a", "refuse", "defect", "ok:d"),
            ("--total_number", 16, "--request_client", 4),
            {"InferenceError:overloaded": 4, "TApplicationException:internal_error": 4},
            {"images_answered": 16, "images_ok": 8, "images_failed": 8, "latency_ms": 8, "latency_failed_ms": 8},
        ),
        (
            ("ok:a", "refuse"),
            ("--total_number", 16, "--request_batch", 4),
            {"InferenceError:overloaded": 8},
            {"images_ok": 8},
        ),
        (("ok:a", "lose"), (*ONE_BY_ONE, "--request_batch", 2), {"ReplyError": 4}, {}),
        (("ok:a", "close"), ONE_BY_ONE, {"ConnectionClosed": 2}, HALF),
        (("ok:a", "reset"), ONE_BY_ONE, {"ConnectionResetError": 2}, HALF),
        (("stall", "ok:a"), ONE_TIMEOUT, {"timeout": 1}, THEN_OK),
        (("half", "ok:a"), ONE_TIMEOUT, {"timeout": 1}, THEN_OK),
        (("trickle", "ok:a"), ONE_TIMEOUT, {"timeout": 1}, THEN_OK),
        (("close",), ("--total_number", 1000), {"ConnectionClosed": 20, "unsent": 980}, {"latency_ms": 0}),
    ],
)
def test_errors_are_counted_by_type(
    words: tuple[str, ...],
    options: tuple[object, ...],
    errors: dict[str, int],
    figures: dict[str, int],
    serve: Callable[..., ToyServer],
    images: Callable[..., Path],
) -> None:
    """Latencies are counted in calls."""
    done, result = load(images(**dict(zip("abcd", words, strict=False))), serve().port, *options)
    assert done.returncode == 2
    assert result["errors"] == errors
    assert all(f"{kind} {count}" in done.stderr for kind, count in errors.items())
    assert set(result["error_examples"]) <= set(errors)
    for kind, message in result["error_examples"].items():
        assert f"{kind}, for example: {message}" in done.stderr
    if "InferenceError:overloaded" in errors:
        assert result["error_examples"]["InferenceError:overloaded"] == "try later"
    for name, figure in figures.items():
        assert (result[name] if name.startswith("images") else (result[name] or {"count": 0})["count"]) == figure


def test_server_that_reads_nothing(serve: Callable[..., ToyServer], images: Callable[..., Path]) -> None:
    more_than_the_kernel_buffers = b"ok:" + b"x" * 16_000_000
    options = ("--total_number", 1, "--request_client", 1, "--warmup", 0, "--timeout", 2)
    done, result = load(images(a=more_than_the_kernel_buffers), serve(deaf=True).port, *options)
    assert done.returncode == 2
    assert result["errors"] == {"timeout": 1}


def test_dead_client_is_counted(serve: Callable[..., ToyServer], images: Callable[..., Path]) -> None:
    options = ("--total_number", 20, "--request_client", 2, "--warmup", 0)
    done, result = load(images(a="kill", b="ok:b"), serve().port, *options)
    assert done.returncode == 2
    assert result["errors"] == {"ClientProcessDied": 20 - result["images_ok"]}


def test_labels(serve: Callable[..., ToyServer], images: Callable[..., Path]) -> None:
    directory = images(circle_01="ok:circle", red_square_02="ok:red_square", disc_03="ok:circle", star="ok:star")
    _, result = load(directory, serve().port, "--total_number", 40, "--labels_from_names")
    assert result["accuracy"] == 0.75


def test_interrupt_reports_what_was_done(serve: Callable[..., ToyServer], images: Callable[..., Path]) -> None:
    stalled = threading.Event()
    server = serve(on_stall=stalled.set)
    directory = images(a="ok:a", b="stall")
    path = directory.parent / "report.json"
    options = ("--request_client", 1, "--total_number", 9, "--warmup", 0, "--json", path)
    with subprocess.Popen(command(directory, server.port, *options), stdout=-1, stderr=-1, text=True) as process:
        assert stalled.wait(WAIT)
        process.send_signal(signal.SIGINT)
        _, complaints = process.communicate(timeout=WAIT)
    assert process.returncode == 130, complaints
    assert path.exists(), complaints
    assert "Traceback" not in complaints
    result = json.loads(path.read_text())
    assert (result["interrupted"], result["valid"], result["images_ok"]) == (True, False, 1)


def test_clients_do_not_outlive_a_killed_parent(serve: Callable[..., ToyServer], images: Callable[..., Path]) -> None:
    stalled = threading.Event()
    server = serve(on_stall=stalled.set)
    options = ("--request_client", 3, "--total_number", 3_000_000, "--warmup", 0)
    # One client starts with the image that stalls: when it does, all are at work.
    with subprocess.Popen(command(images(a="ok:a", b="ok:b", c="stall"), server.port, *options), stderr=-1) as process:
        assert stalled.wait(WAIT)
        clients = psutil.Process(process.pid).children()
        process.kill()
    server.ended.set()
    assert len(clients) == 3
    eventually(lambda: not any(map(is_alive, clients)))


# --- refusals


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--port", "SILENT", "--timeout", 0.2), "does not answer ping (buffered transport): timeout"),
        (("--port", "DEAD"), "cannot connect to 127.0.0.1:DEAD: Connection refused; start the service first, or say"),
        (("--img_dir", "ROOT/empty"), "no image in it"),
        (("--img_dir", "ROOT/missing"), "no such directory"),
        (("--json", "ROOT/none/x.json"), "cannot be written"),
    ],
)
def test_runs_that_cannot_start(
    options: tuple[object, ...],
    why: str,
    images: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("no image")
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))  # bound, not listening: refuses
        names = {"SILENT": silent.getsockname()[1], "DEAD": dead.getsockname()[1], "ROOT": tmp_path}

        def named(text: object) -> str:
            for name, value in names.items():
                text = str(text).replace(name, str(value))
            return str(text)

        assert named(why) in refused(capsys, "--img_dir", images(a="ok:a"), *map(named, options))


LOAD = "import sys; from torchpipe_py.cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (LOAD, "torchpipe load: --img_dir DIR: no such directory\n"),
        (
            "import importlib.util as util; util.find_spec = lambda _: None; " + LOAD,
            "torchpipe load: thriftpy2 is not installed (pip install 'torchpipe_py[server]')\n",
        ),
    ],
)
def test_the_same_as_a_command_of_the_package(code: str, said: str, tmp_path: Path) -> None:
    directory = tmp_path / "missing"
    (tmp_path / "x.json").write_text("[]")
    options = ["--img_dir", str(directory)], ["compare", *[str(tmp_path / "x.json")] * 2]
    runs = [[sys.executable, "-c", code, "load", *more] for more in options]
    done = [subprocess.run(run, capture_output=True, text=True, timeout=WAIT) for run in runs]
    assert done[0].stderr == said.replace("DIR", str(directory))
    assert done[1].stderr.startswith("torchpipe load: compare")
    assert [(run.returncode, run.stdout, run.stderr.count("\n")) for run in done] == [(1, "", 1)] * 2


@pytest.mark.parametrize(
    "wrong",
    [
        *[("--request_client", 0), ("--port", 70000), ("--timeout", 0), ("--total_number", "x")],
        *[("--total_number", 10**20), ("--request_batch", 10**20), ("--warmup", 10**20)],
    ],
)
def test_wrong_arguments(wrong: tuple[str, object], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--img_dir", "x", *map(str, wrong)])
    assert wrong[0] in capsys.readouterr().err


def test_more_clients_than_there_are_descriptors_for(serve: Serve, images: Callable[..., Path]) -> None:
    run = command(images(a="ok:a"), serve().port, "--request_client", 100)
    done = subprocess.run(
        ["bash", "-c", 'ulimit -n 40; exec "$@"', "bash", *run], capture_output=True, text=True, timeout=4 * WAIT
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(
        r"client_qps\.py: only \d+ of 100 client processes can be started: Too many open files; "
        r"start fewer \(--request_client\), or allow more \(ulimit -n, ulimit -u\)\n",
        done.stderr,
    )


# --- over HTTP


class HttpToy(BaseHTTPRequestHandler):
    """Answers as the images say: `ok:<label>`, else the body of an error 429."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        word, _, label = data.decode().partition(":")
        if word == "ok" and self.path == "/other":
            self._answer(200, json.dumps({"label": label}).encode())
        else:
            self._answer(429, b'{"error": "full", "code": "overloaded"}')

    def do_OPTIONS(self) -> None:
        self._answer(404, b"no JSON")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-LENGTH", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:1])
        self.wfile.write(body[1:])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def http_port() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), HttpToy) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_images_over_http(http_port: int, images: Callable[..., Path]) -> None:
    folder = images(circle_1="ok:circle", square_1="ok:circle", full="refuse")
    options = ("--transport", "http", "--path", "/other", "--total_number", 30, "--request_client", 3, "--warmup", 1)
    done, result = load(folder, http_port, *options, "--labels_from_names")
    assert done.returncode == 2
    assert (result["images_ok"], result["errors"]) == (20, {"HttpStatusError:overloaded": 10})
    assert result["error_examples"] == {"HttpStatusError:overloaded": "full"}
    assert result["accuracy"] == pytest.approx(1 / 3), "of 30 answers"


def test_what_answers_no_http_is_told(serve: Serve, images: Callable[..., Path], capsys) -> None:
    why = refused(capsys, "--img_dir", images(a="ok:a"), "--port", serve().port, "--transport", "http")
    assert "does not answer OPTIONS /infer over HTTP: ConnectionClosed: closed by the server" in why


class OnlyHttp(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request.recv(1)
        self.request.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        self.request.recv(2**16)


@pytest.mark.parametrize("transport", ["buffered", "framed"])
def test_what_answers_http_is_told(transport: str, images: Callable[..., Path], capsys) -> None:
    with socketserver.TCPServer(("127.0.0.1", 0), OnlyHttp) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        port = server.server_address[1]
        why = refused(capsys, "--img_dir", images(a="ok:a"), "--port", port, "--transport", transport)
        thread.join()
    assert f"127.0.0.1:{port} does not answer ping ({transport} transport): ReplyError: it answers HTTP: " in why
    assert "--transport http" in why


class Pieces:
    """A connection on which this arrives, a byte at a time."""

    def __init__(self, data: bytes) -> None:
        self._data = iter(data)

    def read(self, size: int) -> bytes:
        return bytes([next(self._data)])


def test_answers_in_pieces() -> None:
    data = b'HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\n{"label": "a"}HTTP/1.1 200 OK\r\n\r\n'
    read = wire.HttpWire("host", "/infer").reader(Pieces(data))
    assert read(1, 1) == [Answer("a")]
    with pytest.raises(wire.ReplyError, match="Content-Length"):
        read(2, 1)
