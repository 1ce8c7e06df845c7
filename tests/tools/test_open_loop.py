"""The load tester in open loops, sweeps and searches, against toy servers; and its reports."""

from __future__ import annotations

import csv
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_servers import IDL, SCRIPTS, Images, Serve, command, load, refused, toy_servers
from fakes import WAIT, eventually
from thriftpy2.server import TThreadedServer
from thriftpy2.thrift import TProcessor
from thriftpy2.transport import TServerSocket

from torchpipe_py.tools.load.measure import find_server

ONE_CALL = ("--rate", 2, "--total_number", 1)
"""An open loop that is stable on the busiest machine: of one call there is no rate that could fall behind."""
FOUR_CALLS = ("--total_number", 4)


@pytest.fixture
def serve() -> Iterator[Serve]:
    with toy_servers() as start:
        yield start


def run(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    whole = {**os.environ, **environment}
    return subprocess.run(arguments, capture_output=True, text=True, timeout=4 * WAIT, env=whole)


# --- what is sent and what is reported


def test_stall_shows_only_from_when_calls_were_due(serve: Serve, images: Images) -> None:
    """Two connections wait for the second that the server stands still: two calls of 600, and 200 that were due."""
    options = ("--rate", 200, "--total_number", 600, "--warmup", 0)
    _, report = load(images(a="ok:a"), serve(freeze_at=200).port, *options)
    assert report["images_ok"] == 600
    assert report["latency_ms"]["p99"] > 500
    assert report["latency_actual_ms"]["p99"] < 900
    assert report["latency_actual_ms"]["max"] > 900
    assert report["late_sends"]["share"] > 0.1
    if report["valid"]:  # the machine has not held up the tester itself
        assert report["late_sends"]["share_by_waiting"] > 0.1
        assert any("still waited for a reply" in warning for warning in report["warnings"])
    assert max(row["p99_ms"] for row in report["per_second"] if row["p99_ms"] is not None) > 500


def test_sends_late_by_the_testers_own_fault_make_a_run_invalid(serve: Serve, images: Images, tmp_path: Path) -> None:
    """The client is stopped while it has nothing to wait for but its schedule, until most of that is over."""
    replay = tmp_path / "times.txt"
    replay.write_text("\n".join(["0", *(f"{1.5 + number / 100:.2f}" for number in range(50))]))
    options = ("--replay", replay, "--request_client", 1, "--warmup", 0)
    done, report = load(images(a="pause"), serve().port, *options)
    assert report["images_ok"] == 51
    assert report["late_sends"]["share_by_tester"] > 0.1
    assert (report["valid"], report["tester_limited"]) == (False, True)
    assert "INVALID" in done.stdout
    assert "although their client was free" in done.stderr


def test_open_loop_sends_its_total(serve: Serve, images: Images) -> None:
    server = serve()
    options = ("--rate", 400, "--arrivals", "poisson", "--total_number", 101, "--request_batch", 4, "--warmup", 0)
    done, report = load(images(a="ok:a"), server.port, *options, "--request_client", 3)
    assert sum(server.call_sizes) == 101
    assert sorted(server.call_sizes) == [1] + [4] * 25
    assert (report["images_ok"], report["calls"], report["images_unsent"]) == (101, 26, 0)
    assert sum(row["offered"] for row in report["per_second"]) == 101
    assert sum(row["ok"] for row in report["per_second"]) == 101
    assert sum(row["failed"] for row in report["per_second"]) == 0
    assert "poisson arrivals at 400 images/s, seed 0" in done.stdout


def test_duration_of_open_and_closed_loops(serve: Serve, images: Images) -> None:
    directory, server = images(a="ok:a"), serve()
    _, report = load(directory, server.port, "--rate", 100, "--duration", 0.5, "--warmup", 0)
    assert report["images_sent"] == 50
    assert report["settings"]["total_number"] is None
    server.uuids.clear()
    done, report = load(directory, server.port, "--duration", 0.3, "--warmup", 0)
    assert done.returncode == 0
    assert report["images_sent"] == report["images_ok"] == len(server.uuids)
    assert "stable" not in report


def test_clients_that_cannot_keep_up_are_not_blamed_on_the_tester(serve: Serve, images: Images) -> None:
    """One connection, answers after 0.1 s at best, 100 of them wanted in a second."""
    server = serve()
    server.delay_s = 0.1
    options = ("--rate", 100, "--duration", 1, "--request_client", 1, "--warmup", 0)
    done, report = load(images(a="ok:a"), server.port, *options, is_patient=False)
    assert done.returncode == 2
    assert report["stable"] is False
    assert report["achieved_rate"] < report["offered_rate"] / 2
    assert report["images_unsent"] > 0
    assert report["late_sends"]["share_by_waiting"] > 0.5
    assert "UNSTABLE" in done.stdout
    assert "raise --request_client" in done.stderr


def test_unreached_images_of_a_broken_server_are_errors(serve: Serve, images: Images) -> None:
    options = ("--rate", 500, "--total_number", 100, "--request_client", 1, "--warmup", 0)
    done, report = load(images(a="close"), serve().port, *options)
    assert done.returncode == 2
    assert report["errors"] == {"ConnectionClosed": 10, "unsent": 90}
    assert report["latency_actual_ms"] is None


def test_interrupt_while_nothing_is_due(serve: Serve, images: Images, tmp_path: Path) -> None:
    replay = tmp_path / "times.txt"
    replay.write_text("0\n500\n")
    server, path = serve(), tmp_path / "report.json"
    options = ("--replay", replay, "--request_client", 1, "--warmup", 0, "--json", path)
    with subprocess.Popen(command(images(a="ok:a"), server.port, *options), stdout=-1, stderr=-1, text=True) as process:
        eventually(lambda: server.uuids)
        process.terminate()
        _, complaints = process.communicate(timeout=WAIT)
    assert process.returncode == 130, complaints
    assert json.loads(path.read_text())["images_ok"] == 1


# --- judgement


@pytest.mark.parametrize("pace", [ONE_CALL, FOUR_CALLS])
@pytest.mark.parametrize(("limit", "status"), [(100_000, 0), (0.0001, 3)])
def test_slo(pace: tuple[object, ...], limit: float, status: int, serve: Serve, images: Images) -> None:
    done, report = load(images(a="ok:a"), serve().port, "--slo-p99", limit, *pace)
    assert done.returncode == status, done.stdout
    assert report["slo"]["met"] is (status == 0)
    assert report["slo"]["p99_ms"] == report["latency_ms"]["p99"]
    assert "SLO" in done.stdout


def test_sweep(serve: Serve, images: Images, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("runs.csv", "runs.html")]
    options = ("--sweep", "clients=1:3:2,4", "--total_number", 20, "--csv", files[0], "--html", files[1])
    done, report = load(images(a="ok:a"), serve().port, *options)
    assert done.returncode == 0, done.stderr
    assert [run["settings"]["request_client"] for run in report["runs"]] == [1, 3, 4]
    assert [run["images_ok"] for run in report["runs"]] == [20, 20, 20]
    assert [row["point"] for row in csv.DictReader(files[0].read_text().splitlines())] == [
        "clients 1",
        "clients 3",
        "clients 4",
    ]
    assert "Latency by throughput" in files[1].read_text()
    assert all(f"clients {count} " in done.stdout for count in (1, 3, 4))


def test_sweep_of_rates_has_the_worst_status(serve: Serve, images: Images) -> None:
    options = ("--sweep", "rate=2,4", "--total_number", 1, "--slo-p99", 0.0001)
    done, report = load(images(a="ok:a"), serve().port, *options)
    assert done.returncode == 3
    assert [run["settings"]["rate"] for run in report["runs"]] == [2, 4]
    assert {run["settings"]["arrivals"] for run in report["runs"]} == {"constant"}


def test_search_reports_every_probe(serve: Serve, images: Images) -> None:
    options = ("--search", "--slo-p99", 0.0001, "--duration", 0.5, "--warmup", 0)
    done, report = load(images(a="ok:a"), serve().port, *options)
    assert done.returncode == 3
    assert report["search"]["best_rate"] is None
    assert report["runs"][0]["point"] == "closed loop"
    assert len(report["runs"]) > 3
    assert "no rate holds" in done.stdout


# --- files


@pytest.mark.parametrize("closed", ["sys.stdout = None", "sys.stderr = None", "sys.stdout = sys.stderr = None"])
def test_a_load_whose_output_is_closed_writes_its_reports(
    closed: str, serve: Serve, images: Images, tmp_path: Path
) -> None:
    """So Python has it where a shell has closed it: ``>&-``."""
    path = tmp_path / "report.json"
    code = f"import sys; from torchpipe_py.cli import main\nif __name__ == '__main__':\n {closed}\n sys.exit(main())"
    arguments = ["load", "--img_dir", str(images(a="ok:a")), "--port", str(serve().port), "--json", str(path)]
    done = run([sys.executable, "-c", code, *arguments, "--total_number", "4", "--warmup", "0"])
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert json.loads(path.read_text())["images_ok"] == 4


def test_page_needs_nothing_but_itself(serve: Serve, images: Images, tmp_path: Path) -> None:
    path, rows = tmp_path / "run.html", tmp_path / "run.csv"
    directory = images(**{"a": "ok:a", "<b>": "refuse"})
    options = ("--rate", 60, "--total_number", 150, "--html", path, "--csv", rows, "--slo-p99", 50)
    done, report = load(directory, serve().port, *options)
    assert done.returncode == 2
    text = path.read_text(encoding="utf-8")
    assert text.count("<svg") == text.count("</svg>") == 4
    assert not re.search(r"<script|<link|<img|https?://|@import|NaN|nan,|None<", text)
    assert "InferenceError:overloaded" in text
    assert "prefers-color-scheme: dark" in text
    (row,) = csv.DictReader(rows.read_text().splitlines())
    assert row["errors"] == "InferenceError:overloaded=75"
    assert (row["images_ok"], row["arrivals"], row["exit_status"]) == ("75", "constant", "2")
    assert float(row["latency_p99_ms"]) == report["latency_ms"]["p99"]


def test_page_of_a_run_without_a_single_answer(serve: Serve, images: Images, tmp_path: Path) -> None:
    path = tmp_path / "\udcff.html"
    load(images(a="close"), serve().port, "--total_number", 4, "--warmup", 0, "--html", path)
    text = path.read_text(encoding="utf-8")
    assert "4 failed" in text
    assert "\\udcff.html" in text
    assert "Latency by percentile" not in text


def test_compare(serve: Serve, images: Images, tmp_path: Path) -> None:
    directory, server = images(a="ok:a"), serve()
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, clients in zip(paths, (1, 2), strict=True):
        options = ("--total_number", 10, "--request_client", clients, "--json", path)
        assert run(command(directory, server.port, *options)).returncode == 0
    compare = [sys.executable, str(SCRIPTS / "client_qps.py"), "compare", *map(str, paths)]
    done = run(compare)
    assert done.returncode == 0, done.stderr
    assert "DIFFERENT settings: request_client is 1 in A, 2 in B" in done.stdout
    slower = json.loads(paths[0].read_text())
    slower["latency_ms"]["p99"] *= 3
    paths[1].write_text(json.dumps(slower))
    assert run([*compare, "--max-regression", "100"]).returncode == 2
    assert run([*compare, "--max-regression", "300"]).returncode == 0
    missing = run([*compare[:-1], str(tmp_path / "none.json")])
    assert missing.returncode == 1
    assert "No such file" in missing.stderr


# --- other servers, other machines


class Ping:
    """`ping` and `infer_batch` are all that it has."""

    def ping(self) -> None: ...

    def infer_batch(self, params: Any) -> Any:
        return IDL.InferenceResult(label="1", score=0.5)


@pytest.mark.parametrize("pace", [ONE_CALL, FOUR_CALLS])
def test_server_with_ping_and_infer_batch_only(pace: tuple[object, ...], images: Images) -> None:
    """As `scripts/baseline_server.py` is: thriftpy2's own server, and nothing else of the IDL."""
    listener = socket.create_server(("127.0.0.1", 0))
    transport = TServerSocket(client_timeout=None)
    transport.sock, transport.listen = listener, lambda: None
    server = TThreadedServer(TProcessor(IDL.InferenceService, Ping()), transport, daemon=True)
    thread = threading.Thread(target=server.serve)
    thread.start()
    done, report = load(images(a="jpeg"), listener.getsockname()[1], *pace)
    server.closed = True
    socket.create_connection(listener.getsockname()).close()  # it looks once more
    thread.join()
    listener.close()
    assert done.returncode == 0, done.stderr
    assert report["images_ok"] == pace[-1]


_WORKERS = """
import os, socket, sys
listener = socket.create_server(("127.0.0.1", 0))
workers = []
for _ in range(2):
    pid = os.fork()
    if not pid:
        sys.stdin.read()
        os._exit(0)
    workers.append(pid)
port = listener.getsockname()[1]
listener.close()
print(port, *workers, flush=True)
sys.stdin.read()
"""


def test_workers_with_one_socket_are_all_found() -> None:
    with subprocess.Popen([sys.executable, "-c", _WORKERS], stdin=-1, stdout=-1, text=True) as supervisor:
        assert supervisor.stdout is not None
        port, *workers = map(int, supervisor.stdout.readline().split())
        assert find_server("127.0.0.1", port, None) == sorted(workers)
        supervisor.communicate()


def test_gpus_are_sampled_where_there_is_a_program_for_it(serve: Serve, images: Images, tmp_path: Path) -> None:
    directory, tools, sampled = images(a="ok:a"), tmp_path / "bin", tmp_path / "sampled"
    tools.mkdir()
    program = tools / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '0, NVIDIA H200, 30, 1000, 143771'\n: > '{sampled}'\nexec sleep 60\n")
    program.chmod(0o755)
    path = tmp_path / "report.json"

    def wait_sampled() -> None:
        while not (sampled.exists() or server.ended.is_set()):
            time.sleep(0.005)

    server = serve(before_answer=wait_sampled)
    options = ("--total_number", 4, "--warmup", 0, "--json", path)
    arguments = command(directory, server.port, *options)
    done = run(arguments, PATH=f"{tools}{os.pathsep}{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    (gpu,) = json.loads(path.read_text())["gpus"]
    assert (gpu["name"], gpu["utilization_mean"], gpu["memory_used_max_mib"]) == ("NVIDIA H200", 30, 1000)
    assert "GPU 0" in done.stdout
    _, report = load(directory, server.port, "--total_number", 4)
    assert report["gpus"] is None or "NVIDIA" in report["gpus"][0]["name"]


# --- refusals


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (("--rate", 5, "--arrivals", "closed"), "--rate: a closed loop has no rate"),
        (("--arrivals", "poisson"), "--arrivals poisson: needs a --rate"),
        (("--arrivals", "replay"), "--arrivals replay: needs a --replay FILE"),
        (("--replay", "x", "--arrivals", "poisson"), "--replay: does not go with"),
        (("--duration", 1, "--total_number", 5), "--duration: takes the place of --total_number"),
        (("--search",), "--search: needs the --slo-p99 MS"),
        (("--search", "--slo-p99", 5, "--rate", 5), "--rate: the rate is what"),
        (("--search", "--slo-p99", 5, "--sweep", "clients=1"), "does not go with --sweep"),
        (("--sweep", "rate=5", "--arrivals", "closed"), "need --arrivals constant or poisson"),
        (("--sweep", "batch=5"), "--sweep batch=5: valid are clients="),
        (("--html", "/nowhere/x.html"), "--html /nowhere/x.html: cannot be written"),
        (("--json", "same", "--csv", "./same"), "--json and --csv: both would write same, one over the other"),
        (("--html", "same", "--csv", "same"), "--csv and --html: both would write same, one over the other"),
        (("--replay", "/nowhere/times"), "--replay /nowhere/times: No such file"),
        (("--transport", "http", "--request_batch", 2), "--request_batch: over HTTP a request has one image"),
        (("--path", "/x"), "--path: is for --transport http"),
    ],
)
def test_contradictions_are_named(
    wrong: tuple[object, ...], why: str, serve: Serve, images: Images, capsys: pytest.CaptureFixture[str]
) -> None:
    assert why in refused(capsys, "--img_dir", images(a="ok:a"), "--port", serve().port, *wrong)
