"""What the benchmark of shared nodes makes of what it has measured."""

from __future__ import annotations

import os
from argparse import ArgumentParser

import pytest
from benchmarks.common import Load, Report
from benchmarks.gpu.sharing import CPU, GPU, add_choice, choice_of, judge
from benchmarks.service.observed import hand_over
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
    assert hand_over({}, {}) == hand_over(before, before) == []


def test_options() -> None:
    parser = ArgumentParser()
    add_choice(parser)
    choice = choice_of(parser.parse_args(["--quick", "--clients", "1,7,200"]))
    assert choice.is_quick
    assert choice.clients == (1, 7, 200)


def test_a_child_returns_raises_or_crashes() -> None:
    assert in_child(len, [1, 2]) == 2
    with pytest.raises(RuntimeError, match="ValueError: invalid literal"):
        in_child(int, "x")
    with pytest.raises(RuntimeError, match="_exit: the process crashed"):
        in_child(os._exit, 3)
