"""What the benchmark of shared nodes makes of what it has measured."""

from __future__ import annotations

import json
import os
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest
from benchmarks.bare import nodes_alone
from benchmarks.common import Attempts, Load, Report
from benchmarks.gpu import against_mosec
from benchmarks.gpu.against_mosec import Tried
from benchmarks.gpu.in_process import Engines
from benchmarks.gpu.mosec_split import Batching, Decoders, read_split, route
from benchmarks.gpu.sharing import CPU, GPU, READ_BY, add_choice, check_choice, choice_of, judge
from benchmarks.service.observed import hand_over
from benchmarks.service.peer import started
from benchmarks.service.sharing import Answer, Service, difference, in_child, named, sharing


def _service(what: str, workers: int, is_shared: bool, qps: float, gpu_mib: float = 0.0) -> Service:
    service = Service(named(what, workers, is_shared), {}, workers, is_shared)
    for clients in (20, 100):
        service.loads[clients] = [Load(0.5 * qps, 1, 2), Load(qps, 5, 9), Load(2 * qps, 9, 20)]
    service.gpu_mib = [gpu_mib]
    return service


def test_the_best_shared_service_is_held_against_the_best_separate_one() -> None:
    report = Report("")
    services = [
        _service(CPU, 4, False, 4000), _service(CPU, 8, False, 5000), _service(CPU, 8, True, 6000),
        _service(GPU, 1, False, 2000, 1000), _service(GPU, 8, False, 6000, 8000), _service(GPU, 8, True, 12000, 1250),
    ]  # fmt: skip
    judge(report, services)
    assert [(round(measured, 3), met) for _, measured, _, met in report.targets] == [
        (1.2, False), (1.2, True), (2.0, True), (12000, True), (9, True), (1.25, True)
    ]  # fmt: skip


def test_what_was_not_measured_has_no_target() -> None:
    report = Report("")
    judge(report, [Service(named(CPU, 8, True), {}, 8, True), _service(CPU, 8, False, 5000)])
    assert not report.targets


def test_a_service_is_started_as_its_name_says() -> None:
    assert Service("", {}, 8, False, 2).options == ["--workers", "8"]
    assert Service("", {}, 8, True, 2).options == ["--workers", "8", "--engines", "2"]
    assert named(GPU, 8, True, 2) == "GPU decode, 8 workers, shared, 2 engine processes"
    assert named(GPU, 1, False, 2) == "GPU decode, 1 worker, separate"


def test_labels_and_scores_are_compared() -> None:
    answers = [Answer("cat", 0.5), Answer("dog", 0.25)]
    assert difference(answers, answers) == (0, 0.0)
    assert difference(answers, [Answer("cat", 0.75), Answer("cat", 0.25)]) == (1, 0.25)


def test_a_configuration_is_shared_without_a_change_of_itself() -> None:
    config = {"global": {"max": 8}, "decode": {"next": "model"}, "model": {}}
    assert sharing(config, ["model"]) == {**config, "model": {"shared": True}}
    assert config["model"] == {}


def test_the_hand_over_is_told_for_a_request_where_there_is_one() -> None:
    before = {"hand_over": {"requests": 10, "slot_wait_ms": 0, "there_ms": 5, "in_engine_ms": 100, "back_ms": 2}}
    after = {"hand_over": {"requests": 20, "slot_wait_ms": 1, "there_ms": 10, "in_engine_ms": 150, "back_ms": 4}}
    assert hand_over(before, after) == ["slot+there+engine+back 0.10+0.50+5.00+0.20 ms"]
    assert hand_over(before, before) == []


def parser() -> ArgumentParser:
    made = ArgumentParser()
    add_choice(made)
    return made


def test_options() -> None:
    choice = choice_of(parser().parse_args(["--quick", "--clients", "1,7,200", "--only", "8 workers, shared"]))
    assert choice.only in named(GPU, 8, True)
    assert choice.only not in named(GPU, 8, False)
    assert choice.is_quick
    assert choice.clients == (1, 7, 200)


def test_an_option_of_another_benchmark_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert {action.dest for action in parser()._actions} - {"help"} == set(READ_BY)
    made = parser()
    made.add_argument("name")
    check_choice(made, made.parse_args(["mosec", "--clients", "7"]))
    with pytest.raises(SystemExit):
        check_choice(made, made.parse_args(["sizes", "--clients", "7"]))
    assert "--clients is an option of shared, mosec, not of sizes" in capsys.readouterr().err


def test_a_child_returns_raises_or_crashes() -> None:
    assert in_child(len, [1, 2]) == 2
    with pytest.raises(RuntimeError, match="ValueError: invalid literal"):
        in_child(int, "x")
    with pytest.raises(RuntimeError, match="_exit: the process crashed"):
        in_child(os._exit, 3)


def test_ours_is_held_against_mosec_at_its_best() -> None:
    report = Report("")
    tried = Tried(Decoders(12), Batching(8, 1), [Load(4000, 5, 9), Load(3000, 5, 9), Load(5000, 5, 9)])
    against_mosec.judge(report, [_service(CPU, 8, True, 6000), Service("later", {}, 8, True)], {20: tried})
    assert [(measured, met) for _, measured, _, met in report.targets] == [(1.5, True)]
    assert str(tried) == "mosec, 12 decode to bytes, 1 with batches of 8 in 1 ms"


def test_every_setting_of_mosec_has_a_route_and_none_is_beyond_the_engine(tmp_path: Path) -> None:
    choice = choice_of(parser().parse_args(["--model-max", "16"]))
    (tmp_path / "resnet50.onnx").touch()  # so that none is made
    split = against_mosec.split_of(Engines(str(tmp_path)), choice)
    assert read_split(json.dumps(split)) == split
    assert max(batching.most for batching in split.batchings) == 16
    routes = [route(decoders, batching) for decoders in split.decoders for batching in split.batchings]
    assert len({*routes}) == len(routes) >= 8


def test_what_fails_or_comes_too_late_is_a_remark() -> None:
    report, ran = Report(""), []
    attempt = Attempts(report, 60)
    attempt("first", lambda: ran.append(1))
    attempt("second", lambda: int("x"))
    Attempts(report, 0)("third", lambda: ran.append(3))
    assert ran == [1]
    assert [remark.split(":")[0] for remark in report.remarks] == ["second", "third"]


def test_a_peer_that_does_not_start_says_why() -> None:
    with (
        pytest.raises(RuntimeError, match=r"(?s)timeit did not start: .*NameError: name 'missing'"),
        started(["timeit", "missing"], {}, 1, ["/"]),
    ):
        pass


def test_nodes_run_alone_in_processes_and_in_batches_that_they_take() -> None:
    config = {"decode": {"backend": "DecodeMat", "next": "end"}, "end": {"backend": "Identity"}}
    load = nodes_alone(config, 2, 3, 0.01, 1)
    assert load.qps > 0
    assert load.p50 > 0


@pytest.mark.parametrize(
    "config",
    [
        {"decode": {"backend": "DecodeMat", "next": "resize"}, "resize": {"backend": "ResizeMat[Identity]"}},
        {"decode": {"backend": "DecodeMat", "max_pixels": 1}},
    ],
)
def test_nodes_that_cannot_run_alone_are_no_limit(config: dict[str, dict[str, Any]]) -> None:
    with pytest.raises(RuntimeError, match=r"benchmarks\.bare .* did not start"):
        nodes_alone(config, 1, 1, 0.01, 1)
