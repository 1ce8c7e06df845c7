"""The benchmarks: their runner, the loaders and the drawn images. Nothing here depends on a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bench
import cv2
import numpy as np
import pytest
from benchmarks.common import Load, Report, Subject, in_threads, run
from kit.training_data import FORKS

from examples import shapes

pytestmark = FORKS

# -- the runner -----------------------------------------------------------------------------------------------------


def test_each_round_has_all_subjects_with_their_clients() -> None:
    asked: list[tuple[str, int]] = []

    def subject(name: str, *clients: int) -> Subject:
        return Subject(name, lambda count, seconds: asked.append((name, count)) or Load(1.0), clients)

    report = Report("order")
    report.measure([subject("limit", 2), subject("ours")], (1, 10), 0.0, 2)
    assert asked == 2 * [("ours", 1), ("ours", 10), ("limit", 2)]
    assert {key: len(rounds) for key, rounds in report.loads.items()} == dict.fromkeys(asked, 2)


def test_error_of_a_call_ends_the_measurement() -> None:
    def call() -> None:
        raise MemoryError("no memory is left")

    with pytest.raises(MemoryError, match="no memory is left"):
        in_threads(call)(2, 0.01)


def test_a_missed_target_is_the_exit_status_and_in_the_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def benchmark() -> Report:
        report = Report("figures")
        for name, qps in (("ours", 10), ("limit: {} threads", 20)):
            report.add(name, 1, Load(qps, p50=1000 / qps, p99=1, note=f"{qps:g}"))
        report.require("reached", 0.5, low=0.5)
        report.require("missed", 0.5, high=0.5)
        return report

    args = bench.make_parser().parse_args(["decode", "--json", str(tmp_path / "figures.json")])
    assert run({"decode": benchmark}, args) == 1
    printed = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["ours,", "1", "client", "10", "100.00", "1.00", "10"] for line in printed)
    assert any(line.startswith("  limit: 1 threads ") for line in printed)
    assert "  ok     reached: 0.50 (>= 0.5)" in printed
    assert "  MISSED missed: 0.50 (< 0.5)" in printed
    (written,) = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))["reports"]
    assert written["rows"][0]["rounds"][0]["qps"] == 10


def test_refuses_unwritable_json_before_measuring(tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.make_parser().parse_args(["decode", "--json", str(tmp_path / "none" / "figures.json")])
    assert "cannot be written: no such folder: " in capsys.readouterr().err


@pytest.mark.parametrize(("measured", "status"), [(1, 3), (0, 1)], ids=["others are met", "another is missed"])
def test_a_target_that_is_left_open_is_the_exit_status(measured: float, status: int) -> None:
    report = Report("open")
    report.require("another", measured, low=1)
    report.leave_open("CANNOT TELL: the machine varies")
    assert run({"decode": lambda: report}, bench.make_parser().parse_args(["decode"])) == status


def test_a_case_that_was_not_measured_is_open() -> None:
    assert bench.main(["tune", "--case", "demo", "--most-seconds", "0"]) == 3


# -- drawn images ------------------------------------------------------------------------------------------------------


ROOT = Path(__file__).resolve().parents[2]


def test_demo_images_equal_newly_drawn_ones(tmp_path: Path) -> None:
    folder = ROOT / "configs" / "demo"
    assert (folder / "labels.txt").read_text(encoding="utf-8").split() == list(shapes.LABELS)
    for index, label in enumerate(shapes.LABELS):
        kept = cv2.imread(str(folder / "images" / f"{label}_00.jpg")).astype(int)
        drawn = cv2.imdecode(np.frombuffer(shapes.draw_jpeg(0, shapes.HELD_OUT, index, 0), np.uint8), cv2.IMREAD_COLOR)
        assert np.abs(kept - drawn).mean() < 1  # other versions of OpenCV round otherwise
