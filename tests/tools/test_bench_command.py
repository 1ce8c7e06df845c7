"""``torchpipe bench``: what is sent, counted and reported, and the exit status."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import Register
from kit.backends import Gate

from torchpipe_py import Backend
from torchpipe_py.cli import main
from torchpipe_py.tools.load import measure
from torchpipe_py.tools.load import run as command
from torchpipe_py.tools.load.measure import node_figures, node_rows
from torchpipe_py.tools.load.records import CallLog

ROOT = Path(__file__).resolve().parents[2]
DEMO_IMAGES = ROOT / "configs" / "demo" / "images"

IDENTITY = 'backend = "Identity"\n'


class Run(NamedTuple):
    status: int
    out: str
    err: str
    report: dict[str, Any]


Bench = Callable[..., Run]


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Bench:
    """Runs the command on a configuration, given as text, and a directory."""

    def run(config: str, directory: Path, *options: object) -> Run:
        toml, path = tmp_path / "bench.toml", tmp_path / "report.json"
        toml.write_text(config, encoding="utf-8")
        fixed = [str(toml), "--img_dir", str(directory), "--json", str(path), "--request_client", "2"]
        status = main(["bench", *fixed, *map(str, options)])
        printed = capsys.readouterr()
        return Run(status, printed.out, printed.err, json.loads(path.read_text()) if path.exists() else {})

    return run


class Seen:
    """A backend that remembers what it was given."""

    def __init__(self, most: int = 1) -> None:
        self.data: list[bytes] = []
        lock, data = threading.Lock(), self.data

        class Recorder(Backend):
            """Result is ``(label, score)``, the label being the data; ``bad`` is a defect, ``none`` has no result."""

            def forward(self, items: list[dict[str, Any]]) -> None:
                with lock:
                    data.extend(item["data"] for item in items)
                if any(item["data"] == b"bad" for item in items):
                    raise ValueError("a defect\nand its second line")
                for item in items:
                    if item["data"] != b"none":
                        item["result"] = (item["data"].decode(), 0.5)

            def max(self) -> int:
                return most

        self.backend = Recorder


# --- what is sent


ALONE = "--request_client 1 --warmup 0"


@pytest.mark.parametrize(
    ("files", "options", "most", "seen", "figures"),
    [  # with three clients, which start apart, 11 of the images from a on, and 10 each from b and c on
        ("abc", "--total_number 31 --request_client 3 --warmup 0", 1, {b"a": 10, b"b": 11, b"c": 10}, (31, 31, 31)),
        ("a", "--total_number 10 --warmup 3", 1, {b"a": 16}, (10, 10, 10)),
        (
            "ab",
            "--total_number 21 --request_batch 4 --request_client 1 --warmup 0",
            4,
            {b"a": 11, b"b": 10},
            (21, 21, 6),
        ),
    ],
    ids=["in turn", "warm-up is not counted", "several images a call"],
)
def test_what_is_sent(
    files: str,
    options: str,
    most: int,
    seen: dict[bytes, int],
    figures: tuple[int, ...],
    bench: Bench,
    images: Callable[..., Path],
    register: Register,
) -> None:
    backend = Seen(most)
    run = bench(
        f'backend = "{register(backend.backend)}"\n', images(**{name: name for name in files}), *options.split()
    )
    assert run.status == 0, run.err
    assert Counter(backend.data) == seen
    assert tuple(run.report[name] for name in ("images_sent", "images_ok", "calls")) == figures
    assert sum(run.report["images_ok_per_second"]) == figures[1]
    (node,) = run.report["nodes"].values()
    assert (node["requests"], node["max"]) == (figures[1], most)
    assert 1 <= node["mean_batch"] <= most


# --- what is reported


def test_clients_that_are_the_limit(bench: Bench, images: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    log = CallLog(2)
    for latency in (30, 45):
        log.enter(0, latency, end=0, ok=1, late=0, lag=0, size=1)
    log.close(cpu_ns=0, wall_ns=100)
    assert command.time_outside([log, CallLog(1)]) == 0.25
    assert command.time_outside([]) == 0.0
    monkeypatch.setattr(command, "time_outside", lambda logs: 0.25)
    run = bench(IDENTITY, images(a="a"), "--total_number", 10)
    assert (run.status, run.report["valid"]) == (0, False)
    assert "clients spent 25% of their time between calls" in run.err


def test_without_psutil(bench: Bench, images: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "psutil", None)
    run = bench(IDENTITY, images(a="a"), "--total_number", 10)
    assert run.status == 0
    assert run.report["process_cpu_percent"] > 0
    assert run.report["other_cpu_percent"] is run.report["machine_busy"] is None


def test_demo(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    path = tmp_path / "report.json"
    options = ["--img_dir", str(DEMO_IMAGES), "--total_number", "200", "--labels_from_names", "--json", str(path)]
    assert main(["bench", "configs/demo_nodes.toml", *options]) == 0
    lines = {line.split("  ")[0]: line for line in capsys.readouterr().out.splitlines()}
    report = json.loads(path.read_text())
    assert report["accuracy"] > 0.9
    assert {name: node["requests"] for name, node in report["nodes"].items()} == {"decode": 200, "model": 200}
    assert "ms each; 2 instances" in lines["node decode"]
    assert "ms each; 1 instance," in lines["node model"]
    assert lines["load"].endswith("20 clients, closed loop, 1 image per call")


def stats(**changes: Any) -> dict[str, Any]:
    """The stats of a pipe with one node of two instances that has seen 10 requests in 5 batches."""
    node = {"instances": 2, "min": 1, "max": 4, "requests": 10, "batches": 5, "failed": 1, "expired": 0}
    times = {"queue_ms": 100.0, "batch_wait_ms": 10.0, "compute_ms": 50.0}
    return {"nodes": {"crop": node | times | {"batch_sizes": {1: 1, 2: 4}} | changes}}


def test_node_figures_are_of_the_run_alone() -> None:
    after = stats(
        requests=18, batches=7, queue_ms=104.0, batch_wait_ms=10.0, compute_ms=850.0, batch_sizes={1: 1, 2: 4, 4: 2}
    )
    nodes = node_figures(stats(), after, seconds=1.0)
    expected = {"requests": 8, "batches": 2, "failed": 0, "mean_batch": 4.0, "batch_sizes": {4: 2}, "busy": 0.4}
    expected |= {"queue_ms": 0.5, "batch_wait_ms": 0.0, "compute_ms": 100.0}  # busy: 800 ms of two instances' second
    assert expected.items() <= nodes["crop"].items()
    line = "8 requests, mean batch 4.00; queue 0.50  batch wait 0.00  compute 100.00  ms each; 2 instances, 40% busy"
    assert node_rows(nodes) == [("node crop", line)]


# --- errors


@pytest.mark.parametrize("batch", [1, 4])
def test_images_that_fail_are_counted_by_type(
    batch: int, bench: Bench, images: Callable[..., Path], register: Register
) -> None:
    config = f'backend = "{register(Seen(most=batch).backend)}"\n'
    options = ("--total_number", 16, "--request_batch", batch)
    folder = images(a="a", b="bad", c="none", d="d")
    run = bench(config, folder, *options)
    assert (run.status, run.report["errors"]) == (0, {"BackendError:ValueError": 4, "NoResult": 4})
    assert (run.report["images_answered"], run.report["images_ok"], run.report["images_failed"]) == (16, 8, 8)
    if batch == 1:
        assert (run.report["latency_ms"]["count"], run.report["latency_failed_ms"]["count"]) == (8, 8)
    assert "8 images failed" in run.err
    assert (run.err.count("a defect"), "second line" in run.err) == (1, False)
    run = bench('backend = "DecodeMat"\n', folder, *options)  # of which none is an image
    assert (run.status, run.report["errors"], run.report["latency_ms"]) == (1, {"DecodeError": 16}, None)
    assert "DecodeError, for example: " in run.err


def test_interrupt_reports_what_was_done(
    bench: Bench, images: Callable[..., Path], register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(blocks=lambda data: data == b"stall")

    @contextmanager
    def interrupted(total: int, wanted: bool) -> Iterator[Callable[[int], None]]:
        def on_progress(sent: int) -> None:
            gate.wait_entered()
            gate.opened.set()  # the call under way ends, and no other begins
            raise KeyboardInterrupt

        yield on_progress

    monkeypatch.setattr(command, "progress_bar", interrupted)
    options = ("--total_number", 1_000_000, "--request_client", 1, "--warmup", 0)
    with gate:
        run = bench(f'backend = "{register(gate.backend)}"\n', images(a="a", b="stall"), *options)
    assert run.status == 130
    assert (run.report["interrupted"], run.report["valid"]) == (True, False)
    assert 1 <= run.report["images_ok"] < 1_000_000
    assert "INTERRUPTED" in run.out


# --- refusals


@pytest.mark.parametrize(
    ("config", "options", "why"),
    [
        (IDENTITY, ("--img_dir", "ROOT"), "no image in it"),
        (IDENTITY, ("--img_dir", "ROOT/missing"), "torchpipe: --img_dir ROOT/missing: no such directory"),
        (IDENTITY, ("--json", "ROOT/no/x.json"), "--json ROOT/no/x.json: cannot be written: no such folder: ROOT/no"),
        ('backend = "Identty"\n', (), "key 'backend': no backend 'Identty'; did you mean 'Identity'?"),
    ],
)
def test_runs_that_cannot_start(
    config: str, options: tuple[str, ...], why: str, bench: Bench, images: Callable[..., Path], tmp_path: Path
) -> None:
    root = str(tmp_path / "root")
    Path(root).mkdir()
    run = bench(config, images(a="a"), *(text.replace("ROOT", root) for text in options))
    assert (run.status, run.out, run.report, run.err.count("\n")) == (2, "", {}, 1)
    assert why.replace("ROOT", root) in run.err


def test_a_report_that_cannot_be_written_is_printed(bench: Bench, images: Callable[..., Path], tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    run = bench(IDENTITY, images(a="a"), "--total_number", 4, "--json", loop)
    assert run.status == 2
    assert "4 sent, 4 answered" in run.out
    assert run.err.endswith(f"torchpipe: {loop}: cannot be written: {os.strerror(errno.ELOOP)}\n")
