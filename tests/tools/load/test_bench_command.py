"""``torchpipe bench``: requests, counts, report, and exit status."""

from __future__ import annotations

import errno
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import Register
from kit.backends import Gate
from kit.fake_servers import status_of
from kit.steered import steering

from torchpipe_py.cli import main
from torchpipe_py.tools.load import run as command

ROOT = Path(__file__).resolve().parents[3]
DEMO_IMAGES = ROOT / "configs" / "demo" / "images"

IDENTITY = 'backend = "Identity"\n'
STEERED = 'backend = "Steered"\nmost = {}\n'


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


# --- what is sent


ALONE = "--request_client 1 --warmup 0"


@pytest.mark.parametrize(
    ("files", "options", "most", "seen", "figures"),
    [  # with three clients, which start apart, 11 of the images from a on, and 10 each from b and c on
        ("abc", "--total_number 31 --request_client 3 --warmup 0", 1, {b"a": 10, b"b": 11, b"c": 10}, (31, 31, 31)),
        ("a", "--total_number 10 --warmup 3", 1, {b"a": 16}, (10, 10, 10)),
        ("ab", f"--total_number 21 --request_batch 4 {ALONE}", 4, {b"a": 11, b"b": 10}, (21, 21, 6)),
    ],
    ids=["in turn", "warm-up is not counted", "several images a call"],
)
def test_sends_images_in_turn(
    files: str, options: str, most: int, seen: Any, figures: Any, bench: Bench, images: Any
) -> None:
    with steering() as backend:
        run = bench(STEERED.format(most), images(**{name: name for name in files}), *options.split())
    assert run.status == status_of(run.report), run.err
    assert Counter(backend.seen) == seen
    assert tuple(run.report[name] for name in ("images_sent", "images_ok", "calls")) == figures
    assert sum(run.report["images_ok_per_second"]) == figures[1]
    (node,) = run.report["nodes"].values()
    assert (node["requests"], node["max"]) == (figures[1], most)
    assert 1 <= node["mean_batch"] <= most


# --- what is reported


def test_reports_throughput_of_demo(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    path = tmp_path / "report.json"
    options = ["--img_dir", str(DEMO_IMAGES), "--total_number", "200", "--labels_from_names", "--json", str(path)]
    status = main(["bench", "configs/demo_nodes.toml", *options])
    lines = {line.split("  ")[0]: line for line in capsys.readouterr().out.splitlines()}
    report = json.loads(path.read_text())
    assert status == status_of(report)
    assert report["accuracy"] > 0.9
    assert {name: node["requests"] for name, node in report["nodes"].items()} == {"decode": 200, "model": 200}
    assert "ms each; 2 instances" in lines["node decode"]
    assert "ms each; 1 instance," in lines["node model"]
    assert lines["load"].endswith("20 clients, closed loop, 1 image per call")


# --- errors


@pytest.mark.parametrize("batch", [1, 4])
def test_images_that_fail_are_counted_by_type(batch: int, bench: Bench, images: Any) -> None:
    options = ("--total_number", 16, "--request_batch", batch)
    folder = images(a="a", b="raise", c="none", d="d")
    with steering():
        run = bench(STEERED.format(batch), folder, *options)
    failed = {"BackendError:ValueError": 4, "NoResult": 4}
    assert (run.status, run.report["errors"]) == (status_of(run.report), failed)
    assert (run.report["images_answered"], run.report["images_ok"], run.report["images_failed"]) == (16, 8, 8)
    assert run.err == ""
    run = bench('backend = "DecodeMat"\n', folder, *options)  # of which none is an image
    assert (run.report["errors"], run.report["latency_ms"]) == ({"DecodeError": 16}, None)
    assert run.status == status_of(run.report, 1)
    assert "16, for example: " in run.out


def test_interrupt_reports_finished_images(bench: Bench, images: Any, register: Register, monkeypatch: Any) -> None:
    gate = Gate(blocks=lambda data: data == b"stall")

    @contextmanager
    def interrupted(total: int, wanted: bool) -> Iterator[Callable[[int], None]]:
        def on_progress(sent: int) -> None:
            gate.wait_entered()
            gate.opened.set()  # the call under way ends, and no other begins
            raise KeyboardInterrupt

        yield on_progress

    monkeypatch.setattr(command, "progress_of", interrupted)
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
        ('backend = "Identty"\n', (), "key 'backend': no backend 'Identty'; did you mean 'Identity'?"),
    ],
)
def test_refuses_invalid_arguments(
    config: str, options: Any, why: str, bench: Bench, images: Any, tmp_path: Path
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


def test_node_name_says_which_root_images_enter(bench: Bench, images: Callable[..., Path]) -> None:
    folder = images(a="a")
    both = f'[first]\n{IDENTITY}[second]\nbackend = "DecodeMat"\n'
    run = bench(both, folder, "--total_number", 4, "--node_name", "first")
    assert (run.status, run.report["images_ok"]) == (status_of(run.report), 4), run.err
    run = bench(both, folder, "--total_number", 4, "--node_name", "second")
    assert (run.status, run.report["images_ok"]) == (status_of(run.report, 1), 0)
    assert "FAILED: no image has a result" in run.out.splitlines()[0]
    for options, why in (((), "one of the roots: first, second"), (("--node_name", "frst"), "did you mean 'first'?")):
        run = bench(both, folder, *options)
        assert run.status == 2
        assert why in run.err
