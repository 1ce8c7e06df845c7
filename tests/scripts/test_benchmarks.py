"""The benchmark runner, and what the benchmarks make of what they measured. Nothing here depends on a time."""

from __future__ import annotations

import json
from pathlib import Path

import bench
import pytest
from benchmarks import io_cost
from benchmarks.bare import measure_nodes
from benchmarks.common import Load, Report, Subject, run


def report_of(**loads: list[float]) -> Report:
    """A report of rounds with so many calls per second, each by one client."""
    report = Report("figures")
    for name, rounds in loads.items():
        for qps in rounds:
            report.add(name, 1, Load(qps, p50=1000 / qps, p99=1, note=f"{qps:g}"))
    return report


# -- the runner -----------------------------------------------------------------------------------------------------


def test_each_round_has_all_subjects_with_their_clients() -> None:
    asked: list[tuple[str, int]] = []

    def subject(name: str, *clients: int) -> Subject:
        return Subject(name, lambda count, seconds: asked.append((name, count)) or Load(1.0), clients)

    report = Report("order")
    report.measure([subject("limit", 2), subject("ours")], (1, 10), 0.0, 2)
    assert asked == 2 * [("ours", 1), ("ours", 10), ("limit", 2)]
    assert {key: len(rounds) for key, rounds in report.loads.items()} == dict.fromkeys(asked, 2)


def test_medians_are_of_each_figure_and_ratios_of_each_round() -> None:
    report = report_of(ours=[10, 40, 20], theirs=[5, 40, 5])
    assert report.median("ours", 1) == Load(20, 50, 1, note="20")
    assert report.ratio(("ours", 1), ("theirs", 1)) == 2


def test_a_missed_target_is_the_exit_status_and_in_the_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def benchmark() -> Report:
        report = report_of(ours=[10], **{"limit: {} threads": [20]})
        report.require("reached", 0.5, low=0.5)
        report.require("missed", 0.5, high=0.5)
        return report

    args = bench.make_parser().parse_args(["decode", "--json", str(tmp_path / "figures.json")])
    assert run({"decode": benchmark}, args) == 1
    printed = capsys.readouterr().out.splitlines()
    assert [line.split() for line in printed if "10" in line][-1] == [
        "ours,",
        "1",
        "client",
        "10",
        "100.00",
        "1.00",
        "10",
    ]
    assert any(line.startswith("  limit: 1 threads ") for line in printed)
    assert "  ok     reached: 0.50 (>= 0.5)" in printed
    assert "  MISSED missed: 0.50 (< 0.5)" in printed
    (written,) = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))["reports"]
    assert written["rows"][0]["rounds"][0]["qps"] == 10


def test_a_part_that_fails_or_comes_too_late_is_a_remark() -> None:
    report, ran = Report("parts"), []
    report.attempt("first", lambda: ran.append(1))
    report.attempt("second", lambda: int("x"))
    report.until = 0.0
    report.attempt("third", lambda: ran.append(3))
    assert ran == [1]
    assert [remark.split(":")[0] for remark in report.remarks] == ["second", "third"]


def test_io_cost_measures_service_and_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_cost, "CLIENTS", (2,))
    report = io_cost.io_cost(bench.make_parser().parse_args(["io_cost", "--rounds", "1", "--seconds", "0.6"]))
    assert {name for name, _ in report.loads} == set(io_cost.TRANSPORTS)
    for key in report.loads:
        assert "µs service" in report.median(*key).note


# -- processes ------------------------------------------------------------------------------------------------------


def test_nodes_run_alone_in_processes_and_in_batches_that_they_take() -> None:
    config = {"decode": {"backend": "DecodeMat", "next": "end"}, "end": {"backend": "Identity"}}
    report = Report("alone")
    measure_nodes(report, "limit", config, 2, 3, 0.01, 1)
    assert report.median("limit", 2).qps > 0


# -- services -------------------------------------------------------------------------------------------------------
