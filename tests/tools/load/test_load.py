"""Whole runs of the load tester, with reports, against toy servers whose answers are given by the images."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import socket
import socketserver
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from conftest import Register
from kit.backends import returns
from kit.fake_servers import FRAMED, Images, Serve, ToyServer, command, http_server, load, refused, running, status_of
from kit.services import LocalServer
from kit.waits import WAIT, eventually, is_alive, run

from torchpipe_py import Detections, pipe

"""An open loop of one call, which is stable on the busiest machine."""


@pytest.fixture
def serve() -> Iterator[Serve]:
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(ToyServer(**options))


# --- what is sent and counted


def test_every_image_is_sent_once_and_the_report_is_complete(serve: Serve, images: Images) -> None:
    server = serve()
    directory = images(circle_01="ok:circle", red_square_02="ok:red_square", disc_03="ok:circle", star="ok:star")
    options = ("--total_number", 103, "--request_client", 4, "--warmup", 3, "--labels_from_names")
    done, report = load(directory, server.port, *options)
    assert done.returncode == status_of(report), done.stderr
    counts = Counter(uuid[:4] for uuid in server.uuids)  # three calls of each client are for warming up
    assert counts == {"0000": 29, "0001": 29, "0002": 29, "0003": 28}
    assert len(set(server.uuids)) == 115
    assert "12 calls before it, not counted (--warmup)" in done.stdout
    assert (report["images_sent"], report["images_answered"], report["images_ok"], report["calls"]) == (103,) * 4
    assert sum(report["images_ok_per_second"]) == report["latency_ms"]["count"] == 103
    assert report["accuracy"] == pytest.approx(0.75, abs=0.02)
    assert set(report) >= {"command", "started_at", "settings", "versions", "machine", "window_s", "qps", "calls_per_s"}
    assert set(report) >= {"goodput", "errors", "server_cpu_percent", "tester_cpu_percent", "tester_cpu_us_per_call"}
    assert set(report["latency_ms"]) == {"count", "mean", "p50", "p90", "p99", "p99_9", "max", "min"}
    assert report["tester_limited"] is (not report["valid"])
    assert (report["server_pids"], report["settings"]["request_client"]) == ([os.getpid()], 4)
    assert all(name in done.stdout for name in ("QPS", "results", "latency", "p99.9", "server CPU", "tester CPU"))


def test_batches_and_their_rest(serve: Serve, images: Images) -> None:
    server = serve()
    options = ("--total_number", 21, "--request_batch", 4)
    done, report = load(images(a="ok:a", b="ok:b" + "x" * 70_000), server.port, *options)
    assert done.returncode == status_of(report), done.stderr
    assert Counter(server.call_sizes) == {4: 4, 3: 1, 2: 1}  # 11 and 10 images
    assert (len(set(server.uuids)), report["images_ok"], report["calls"]) == (21, 21, 6)


ALONE = ("--request_client", 1)
SLOW = "trickle:" + 600 * "x"  # 10 ms for each byte
HALF = {"images_sent": 4, "images_answered": 2, "images_ok": 2}


@pytest.mark.parametrize(
    ("words", "options", "errors", "figures"),
    [
        (
            ("ok:a", "refuse", "defect", "ok:d"),
            ("--total_number", 16, "--request_client", 4),
            {"InferenceError:overloaded": 4, "TApplicationException:internal_error": 4},
            {"images_answered": 16, "images_ok": 8, "images_failed": 8, "latency_ms": 8, "latency_failed_ms": 8},
        ),
        (("ok:a", "lose"), (*ALONE, "--total_number", 4, "--request_batch", 2), {"ReplyError": 4}, {}),
        (("ok:a", "close"), (*ALONE, "--total_number", 4), {"ConnectionClosed": 2}, HALF),
        ((SLOW, "ok:a"), (*ALONE, "--total_number", 2, "--timeout", 2), {"timeout": 1}, {"images_ok": 1}),
        (("close",), ("--total_number", 1000), {"ConnectionClosed": 20, "unsent": 980}, {"latency_ms": 0}),
        (("kill", "ok:b"), (*ALONE, "--total_number", 20), {"ClientProcessDied": 20}, {"images_sent": 0}),
    ],
)
def test_errors_are_counted_by_type(
    words: Any, options: Any, errors: dict[str, int], figures: dict[str, int], serve: Serve, images: Images
) -> None:
    """Latencies are counted in calls."""
    done, report = load(images(**dict(zip("abcd", words, strict=False))), serve().port, *options)
    assert done.returncode == status_of(report, 2)
    assert report["errors"] == errors
    assert all(
        re.search(rf"^  {re.escape(kind)} +{count}\b", done.stdout, re.MULTILINE) for kind, count in errors.items()
    )
    assert set(report["error_examples"]) <= set(errors)
    for kind, message in report["error_examples"].items():
        assert f", for example: {message}" in done.stdout
        assert kind != "InferenceError:overloaded" or message.endswith("/images/b.jpg: on purpose")
    for name, figure in figures.items():
        assert (report[name] if name.startswith("images") else (report[name] or {"count": 0})["count"]) == figure


@pytest.mark.parametrize("batch", [1, 4])
def test_results_without_a_label_count_as_good(images: Images, register: Register, batch: int) -> None:
    detections = Detections(np.ones((1, 4)), [0.5], [0])
    backend = register(returns(detections))
    with pipe({"detector": {"backend": backend}}) as run, LocalServer(run) as server:
        options = ("--total_number", 12, "--request_client", 2, "--request_batch", batch, "--warmup", 0)
        done, report = load(images(a="a", b="b"), server.port, *options)
    assert done.returncode == status_of(report), done.stderr
    assert (report["images_ok"], report["images_sent"], report["errors"]) == (12, 12, {})


@pytest.mark.parametrize("transport", ["buffered", "http"])
def test_node_name_says_which_root_images_enter(images: Images, register: Register, transport: str) -> None:
    first, second = register(returns(("first", 0.5))), register(returns(("second", 0.5)))
    folder, options = images(second_1="a"), ("--transport", transport, "--total_number", 4, "--request_client", 2)
    with pipe({"first": {"backend": first}, "second": {"backend": second}}) as run, LocalServer(run) as server:
        done, report = load(folder, server.port, *options, "--labels_from_names", "--node-name", "second")
        assert (report["images_ok"], report["accuracy"]) == (4, 1), done.stdout
        assert "--node_name second" in done.stdout
        for name, hint, message in (
            ((), "give the one to load as --node_name", "must name one of the roots: first, second"),
            (("--node_name", "secnd"), "", "no root 'secnd'; did you mean 'second'?"),
        ):
            done, report = load(folder, server.port, *options, *name)
            assert done.returncode == status_of(report, 2)
            assert done.stdout.splitlines()[0].split(maxsplit=1)[1].startswith("FAILED: no image has a result")
            assert message in done.stdout
            assert hint in done.stdout


def test_images_over_http(images: Images) -> None:
    def answer(path: str, body: bytes) -> tuple[int, object]:
        word, _, label = body.decode().partition(":")
        ok = word == "ok" and path == "/other"
        return (200, {"label": label}) if ok else (429, {"error": "full", "code": "overloaded"})

    folder = images(circle_1="ok:circle", square_1="ok:circle", full="refuse")
    options = ("--transport", "http", "--path", "/other", "--total_number", 30, "--request_client", 3)
    with http_server(answer) as port:
        done, report = load(folder, port, *options, "--labels_from_names")
    assert done.returncode == status_of(report, 2)
    assert (report["images_ok"], report["errors"]) == (20, {"HttpStatusError:overloaded": 10})
    assert report["error_examples"] == {"HttpStatusError:overloaded": f"{folder}/full.jpg: full"}
    assert report["accuracy"] == pytest.approx(1 / 3), "of 30 answers"


# --- ends


@pytest.mark.parametrize(("is_open", "ending"), [(False, signal.SIGINT), (True, signal.SIGTERM)])
def test_interrupt_reports_finished_calls(
    is_open: bool, ending: signal.Signals, serve: Serve, images: Images, tmp_path: Path
) -> None:
    server, path, times = serve(), tmp_path / "report.json", tmp_path / "times.txt"
    times.write_text("0\n0\n500\n")
    options = (*ALONE, "--json", path, *(("--replay", times) if is_open else ("--total_number", 9)))
    arguments = command(images(a="ok:a", b="stall"), server.port, *options)
    with subprocess.Popen(arguments, stdout=-1, stderr=-1, text=True) as process:
        eventually(lambda: len(server.uuids) == 2)  # the first is answered and counted
        process.send_signal(ending)
        _, complaints = process.communicate(timeout=WAIT)
    assert (process.returncode, "Traceback" in complaints) == (130, False), complaints
    report = json.loads(path.read_text())
    assert (report["interrupted"], report["valid"]) == (True, False)
    assert report["images_ok"] in ((1, 2) if is_open else (1,))


def test_clients_do_not_outlive_a_killed_parent(serve: Serve, images: Images) -> None:
    server = serve()
    options = ("--request_client", 3, "--total_number", 3_000_000)
    with subprocess.Popen(command(images(a="ok:a", b="stall"), server.port, *options), stderr=-1) as process:
        assert server.has_stalled.wait(WAIT)
        clients = psutil.Process(process.pid).children()
        process.kill()
    assert len(clients) >= 1
    eventually(lambda: not any(map(is_alive, clients)))


def test_more_clients_than_there_are_descriptors_for(serve: Serve, images: Images) -> None:
    arguments = command(images(a="ok:a"), serve().port, "--request_client", 100, "--timeout", 3)
    done = run("bash", "-c", 'ulimit -n 40; exec "$@"', "bash", *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(
        r"client_qps\.py: \d+ clients cannot all connect to the service: Too many open files; "
        r"use fewer clients \(--request_client\), or allow more files \(ulimit -n\)\n",
        done.stderr,
    )


def test_a_load_whose_output_is_closed_writes_its_report(serve: Serve, images: Images, tmp_path: Path) -> None:
    """So Python has it where a shell has closed it: ``>&-``. A limit that is missed is the exit status."""
    path = tmp_path / "report.json"
    code = (
        "import sys; from torchpipe_py.cli import main\n"
        "if __name__ == '__main__':\n sys.stdout = None\n sys.exit(main())"
    )
    arguments = ["load", "--img_dir", str(images(a="ok:a")), "--port", str(serve().port), *FRAMED, "--json", str(path)]
    limit = ["--slo-p99", "0.0001", "--total_number", "4", "--warmup", "0"]
    done = run(sys.executable, "-c", code, *arguments, *limit)
    report = json.loads(path.read_text())
    assert (done.returncode, "Traceback" in done.stderr) == (status_of(report, 3), False), done.stderr
    assert (report["images_ok"], report["slo"]["met"], report["goodput"]) == (4, False, 0.0)


# --- open loops


def test_open_loop_sends_its_total(serve: Serve, images: Images) -> None:
    server = serve()
    options = ("--rate", 400, "--arrivals", "poisson", "--total_number", 101, "--request_batch", 4)
    done, report = load(images(a="ok:a"), server.port, *options, "--request_client", 3)
    assert sorted(server.call_sizes) == [1] + [4] * 25
    assert (report["images_ok"], report["calls"], report["images_unsent"]) == (101, 26, 0)
    assert [sum(row[name] for row in report["per_second"]) for name in ("offered", "ok", "failed")] == [101, 101, 0]
    assert "poisson arrivals at 400 images/s, seed 0" in done.stdout


def test_stall_counts_from_due_time(serve: Serve, images: Images) -> None:
    """Two connections wait for the second that the server stands still: two calls of 600, and 200 that were due."""
    until = [0.0]

    def freeze(number: int) -> None:
        if number == 200:
            until[0] = time.monotonic() + 1.0
        time.sleep(max(0.0, until[0] - time.monotonic()))

    _, report = load(images(a="ok:a"), serve(before_answer=freeze).port, "--rate", 200, "--total_number", 600)
    assert report["images_ok"] == 600
    assert report["latency_ms"]["p99"] > 500
    assert report["latency_actual_ms"]["p99"] < 900 < report["latency_actual_ms"]["max"]
    assert report["late_sends"]["share"] > 0.1
    if report["valid"]:  # the machine has not held up the tester itself
        assert report["late_sends"]["share_by_waiting"] > 0.1
        assert any("still waited for a reply" in warning for warning in report["warnings"])
    assert max(row["p99_ms"] for row in report["per_second"] if row["p99_ms"] is not None) > 500


def test_clients_that_cannot_keep_up_are_not_blamed_on_the_tester(serve: Serve, images: Images) -> None:
    """One connection, answers after 0.1 s at best, 100 of them wanted in a second."""
    server = serve(before_answer=lambda _: time.sleep(0.1))
    options = ("--rate", 100, "--duration", 1, *ALONE)
    done, report = load(images(a="ok:a"), server.port, *options, is_patient=False)
    assert (done.returncode, report["stable"]) == (status_of(report, 2), False)
    assert report["achieved_rate"] < report["offered_rate"] / 2
    assert report["images_unsent"] > 0
    assert report["late_sends"]["share_by_waiting"] > 0.5 or not report["valid"]  # the machine has held up the tester
    assert "UNSTABLE" in done.stdout
    assert done.stdout.count("raise --request_client") == 1
    assert done.stderr == ""


# --- judgement, several runs, files


def test_sweep_of_clients(serve: Serve, images: Images, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("runs.csv", "runs.html")]
    options = ("--sweep", "clients=1:3:2,4", "--total_number", 20, "--csv", files[0], "--html", files[1])
    done, report = load(images(a="ok:a"), serve().port, *options)
    assert done.returncode == status_of(report), done.stderr
    assert [(run["settings"]["request_client"], run["images_ok"]) for run in report["runs"]] == [
        (1, 20),
        (3, 20),
        (4, 20),
    ]
    points = [row["point"] for row in csv.DictReader(files[0].read_text().splitlines())]
    assert points == ["clients 1", "clients 3", "clients 4"]
    assert "Latency by throughput" in files[1].read_text()
    assert all(point in done.stdout for point in points)


def test_page_needs_nothing_but_itself(serve: Serve, images: Images, tmp_path: Path) -> None:
    path, rows = tmp_path / "run.html", tmp_path / "run.csv"
    options = ("--rate", 60, "--total_number", 150, "--html", path, "--csv", rows, "--slo-p99", 50)
    done, report = load(images(**{"a": "ok:a", "<b>": "refuse"}), serve().port, *options)
    assert done.returncode == status_of(report, 2)
    assert f"{report['goodput']:.1f} images/s within 50 ms" in done.stdout
    assert re.search(rf"^results +{75 / report['window_s']:.1f} images/s$", done.stdout, re.MULTILINE)
    text = path.read_text(encoding="utf-8")
    assert text.count("<svg") == text.count("</svg>") == 4
    assert not re.search(r"<script|<link|<img|https?://|@import|NaN|nan,|None<", text)
    assert "InferenceError:overloaded" in text
    assert "prefers-color-scheme: dark" in text
    (row,) = csv.DictReader(rows.read_text().splitlines())
    assert (row["errors"], row["images_ok"]) == ("InferenceError:overloaded=75", "75")
    assert row["exit_status"] == str(done.returncode)
    assert float(row["latency_p99_ms"]) == report["latency_ms"]["p99"]


# --- the service: its processes, nodes and GPUs


def service_stats(number: int) -> dict[str, Any]:
    """The answer of ``/stats`` when it is asked for the ``number``th time."""
    node = dict.fromkeys(("requests", "queue_ms", "batch_wait_ms"), 100 * number)
    node |= {"instances": 2, "min": 1, "max": 8, "batches": 25 * number, "failed": 0, "expired": 0, "shed": 0}
    node |= {"compute_ms": 1500 * number, "batch_sizes": {"4": 25 * number}}
    times = {"slot_wait_ms": 10, "there_ms": 50, "in_engine_ms": 500, "back_ms": 20}
    return {
        "time": float(number),
        "nodes": {"model": node},
        "engines": [{"index": 0, "pid": os.getpid(), "cpu_s": 0.5 * number}],
        "hand_over": {key: value * number for key, value in {"requests": 100, **times}.items()},
    }


def test_figures_of_nodes_and_gpus_are_reported(serve: Serve, images: Images, tmp_path: Path) -> None:
    """No proxy is asked."""
    tools, sampled, page = tmp_path / "bin", tmp_path / "sampled", tmp_path / "run.html"
    tools.mkdir()
    program = tools / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '0, NVIDIA H200, 30, 1000, 143771'\n: > '{sampled}'\nexec sleep 60\n")
    program.chmod(0o755)
    path, asked = tmp_path / "report.json", []
    environment = {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "no_proxy": "", "NO_PROXY": ""}
    environment |= dict.fromkeys(("http_proxy", "HTTP_PROXY"), "http://127.0.0.1:1")

    def answer(where: str, body: bytes) -> tuple[int, Any]:
        asked.append(where)
        return 200, service_stats(len(asked))

    server = serve(before_answer=lambda _: eventually(lambda: sampled.exists() or server.ended.is_set()))
    with http_server(answer) as port:
        options = ("--total_number", 4, "--json", path, "--html", page, "--http-port", port)
        done = run(*command(images(a="ok:a"), server.port, *options), env={**os.environ, **environment})
    report = json.loads(path.read_text())
    assert done.returncode == status_of(report), done.stderr
    assert set(asked) == {"/stats"}
    assert report["service"]["hand_over"]["in_engine_ms"] == 5.0
    assert report["service"]["engines"][0]["cpu_percent"] >= 0
    (gpu,) = report["gpus"]
    assert (gpu["name"], gpu["utilization_mean"], gpu["memory_used_max_mib"]) == ("NVIDIA H200", 30, 1000)
    for text in (done.stdout, page.read_text(encoding="utf-8")):
        assert all(part in text for part in ("node model", "engine process 0", "in engine 5.00", "GPU 0"))


@pytest.mark.parametrize(
    ("status", "answer", "why"),
    [
        *((200, answer, "it is not a torchpipe-serve of this version\n") for answer in ({}, [], {"nodes": {}})),
        (404, {}, "it answers 404, as the port that takes images does (torchpipe-serve --port); give the port of "),
        (0, None, "Connection refused>\n"),
    ],
)
def test_refuses_statistics_of_another_server(
    status: int, answer: Any, why: str, serve: Serve, images: Images, capsys: pytest.CaptureFixture[str]
) -> None:
    with http_server(lambda path, body: (status, answer)) as answering, socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = answering if status else bound.getsockname()[1]
        said = refused(capsys, "--img_dir", images(a="ok:a"), "--port", serve().port, *FRAMED, "--http-port", port)
    assert f"--http-port: http://127.0.0.1:{port}/stats does not answer with statistics: " in said
    assert why in said


# --- refusals


BUFFERED = ("--transport", "buffered")


class OnlyHttp(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        head = b""
        while b"\n\n" not in head:
            head += self.request.recv(1)
        self.request.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        self.request.recv(2**16)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ((*BUFFERED, "--port", "SILENT", "--timeout", 0.2), "does not answer ping (buffered transport): timeout"),
        (("--port", "DEAD"), "cannot connect to 127.0.0.1:DEAD: Connection refused; start the service first, or give"),
        ((*BUFFERED, "--port", "WEB"), "does not answer ping (buffered transport): ReplyError: it answers HTTP: "),
        (("--port", "WEB", "--transport", "framed"), "it answers HTTP: give --transport http, or the service's --por"),
        (
            ("--transport", "http", "--port", "SILENT", "--timeout", 0.2),
            "OPTIONS /infer over HTTP: timeout",
        ),
        (("--img_dir", "ROOT/empty"), "no image in it"),
        (("--img_dir", "ROOT/missing"), "no such directory"),
        (("--json", "same", "--csv", "./same"), "--json and --csv: both would write same, one over the other"),
        (("--replay", "/nowhere/times"), "--replay /nowhere/times: No such file"),
        (("--rate", 5, "--arrivals", "closed"), "--rate: a closed loop has no rate"),
        (("--arrivals", "poisson"), "--arrivals poisson: needs a --rate"),
        (("--arrivals", "replay"), "--arrivals replay: needs a --replay FILE"),
        (("--replay", "x", "--arrivals", "poisson"), "--replay: does not go with"),
        (("--replay_column", "x"), "--replay_column: needs a --replay FILE"),
        (("--duration", 1, "--total_number", 5), "--duration: takes the place of --total_number"),
        (("--search",), "--search: needs the --slo-p99 MS"),
        (("--search", "--slo-p99", 5, "--rate", 5), "--rate: --search and --sweep"),
        (("--search", "--slo-p99", 5, "--total_number", 5), "--search: give --duration for its probes"),
        (("--search", "--slo-p99", 5, "--sweep", "clients=1"), "does not go with --sweep"),
        (("--sweep", "rate=5", "--arrivals", "closed"), "need --arrivals constant or poisson"),
        (("--sweep", "batch=5"), "--sweep batch=5: valid are clients="),
        (("--transport", "http", "--request_batch", 2), "--request_batch: over HTTP a request has one image"),
        (("--path", "/x"), "--path: is for --transport http"),
        (("--server_pid", 2**31 - 1), f"--server_pid {2**31 - 1}: no such process"),
        (("compare", "/nowhere/a.json", "/nowhere/b.json"), "compare /nowhere/a.json: No such file"),
    ],
)
def test_refuses_invalid_arguments(
    options: tuple[object, ...], why: str, serve: Serve, images: Images, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("no image")
    usual = () if options[0] == "compare" else ("--img_dir", images(a="ok:a"), "--port", serve().port, *FRAMED)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        socket.socket() as dead,
        running(socketserver.TCPServer(("127.0.0.1", 0), OnlyHttp)) as http,
    ):
        dead.bind(("127.0.0.1", 0))  # bound, not listening: refuses
        names = {"SILENT": silent.getsockname()[1], "DEAD": dead.getsockname()[1], "ROOT": tmp_path}
        names["WEB"] = http.server_address[1]

        def named(text: object) -> str:
            return re.sub("SILENT|DEAD|ROOT|WEB", lambda match: str(names[match[0]]), str(text))

        assert named(why) in refused(capsys, *usual, *map(named, options))


def test_missing_thriftpy2_is_named(
    images: Images, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec: Any = lambda name: None  # noqa: E731
    monkeypatch.setattr("torchpipe_py.tools.load.run.importlib.util.find_spec", find_spec)
    said = refused(capsys, "--img_dir", images(a="ok:a"))
    assert said == "torchpipe load: thriftpy2 is not installed (pip install 'torchpipe_py[server]')\n"
