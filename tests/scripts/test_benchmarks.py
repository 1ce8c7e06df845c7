"""The benchmark runner, and what the benchmarks make of what they measured. Nothing here depends on a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bench
import bench_gpu
import pytest
from benchmarks import io_cost
from benchmarks.bare import measure_nodes
from benchmarks.common import Load, Report, Subject, run
from benchmarks.gpu import mosec, sharing
from benchmarks.gpu.engines import Engines
from benchmarks.gpu.sharing import CPU, GPU
from benchmarks.peers import serving_module
from benchmarks.sharing import Service

from torchpipe_py.plan.build import plan_pipeline
from torchpipe_py.plan.sharing import sections


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


def test_a_peer_that_does_not_start_says_why() -> None:
    reason = r"(?s)timeit did not start: .*--address not recognized"
    with pytest.raises(RuntimeError, match=reason), serving_module("mosec", "timeit", {}):
        pass


# -- services -------------------------------------------------------------------------------------------------------


def gpu_args() -> Any:
    return bench_gpu.make_parser().parse_args(["shared", "--engines", "1,3", "--clients", "7"])


def test_the_best_shared_service_is_held_against_the_best_separate_one() -> None:
    report, services_ = Report("judged"), []
    for what, workers, is_shared, qps, gpu_mib in (
        (CPU, 4, False, 4000, 0), (CPU, 8, False, 5000, 0), (CPU, 8, True, 6000, 0),
        (GPU, 1, False, 2000, 1000), (GPU, 8, False, 6000, 8000), (GPU, 8, True, 12000, 1250),
    ):  # fmt: skip
        service = Service(what, {}, workers, is_shared, gpu_mib=[gpu_mib])
        services_.append(service)
        for clients in (20, 100):
            report.add(service.name, clients, Load(qps, 5, 9))
    sharing.judge(report, [*services_, Service(CPU, {}, 12, True)])
    assert [(round(target.measured, 3), target.met) for target in report.targets] == [
        (1.2, False), (1.2, True), (2.0, True), (12000, True), (9, True), (1.25, True)
    ]  # fmt: skip
    mosec.judge(report, services_, {20: mosec.Setting(12, 1, 8, 1)})
    assert len(report.targets) == 6
    report.add("mosec, 12 decode, 1 with batches of 8 in 1 ms", 20, Load(4000, 5, 9))
    mosec.judge(report, services_[2:3], {20: mosec.Setting(12, 1, 8, 1)})
    assert report.targets[-1][1:] == (1.5, ">= 1.5", True)


@pytest.mark.parametrize(("what", "shared"), [(CPU, [("model",)]), (GPU, [("model",)])])
def test_gpu_services_can_be_planned_and_share_what_they_should(
    what: str, shared: list[tuple[str, ...]], tmp_path: Path
) -> None:
    (tmp_path / "resnet50.onnx").write_bytes(b"\x08")  # so that none is made
    for is_shared, nodes in ((False, []), (True, shared)):
        services_ = sharing.services_of(Engines(str(tmp_path), version_compatible=True), gpu_args(), what, 2, is_shared)
        assert [service.engines for service in services_] == ([1, 3] if is_shared else [1])
        for service in services_:
            assert service.config["model"]["model::cache"].endswith("resnet50_8_compatible.trt")
            plan = plan_pipeline(service.config)
            assert [section.nodes for section in sections(plan)] == nodes
