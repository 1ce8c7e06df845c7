"""``torchpipe tune``: shapes and candidates, halving and the verdict by a fake measurer, bad inputs, whole runs."""

from __future__ import annotations

import inspect
import json
import math
import os
import re
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from conftest import Register
from kit.backends import returns
from kit.cells import check_each
from kit.measurer import FakeMeasurer, others_take, use_measurer
from kit.models import one_node
from kit.services import LIGHT
from kit.waits import eventually, is_alive

from torchpipe_py import Detections
from torchpipe_py.cli import main
from torchpipe_py.plan.build import plan_pipeline
from torchpipe_py.plan.config import Tables
from torchpipe_py.proc import child
from torchpipe_py.tools.compile import compile_config
from torchpipe_py.tools.report import ToolError
from torchpipe_py.tools.team import Team, TeamDied
from torchpipe_py.tools.tune import tune
from torchpipe_py.tools.tune.candidates import (
    WRITTEN,
    Candidate,
    as_served,
    knobs_of,
    process_candidates,
    setting_candidates,
    shapes_of,
    unkept_engines,
)
from torchpipe_py.tools.tune.measure import NEVER_S, WARM_UP_CLIENTS, Goal, Loops, Point, Profile, Service, profile
from torchpipe_py.tools.tune.pixels import ALTERNATIVES, alternatives_of, parity_of, with_alternative
from torchpipe_py.tools.tune.report import Report, lines_of, rows_of, verdict_line
from torchpipe_py.tools.tune.search import Trial, best_first, halve, search
from torchpipe_py.tools.tune.verify import judge, limit_of, verify

ROOT = Path(__file__).resolve().parents[3]
IMAGES = ROOT / "configs" / "demo" / "images"
DEMO_MODEL = {"model": str(ROOT / "configs/demo/model.onnx"), "labels": str(ROOT / "configs/demo/labels.txt")}
DEMO_MODEL["postprocessor"] = "SoftmaxMax"


def tables(**nodes: dict[str, Any]) -> Tables:
    return Tables({"global": {}, **nodes})


def model(**keys: Any) -> dict[str, Any]:
    return {"backend": "OnnxTensor", "model": DEMO_MODEL["model"], "max": 4, **keys}


ONE = tables(n={"backend": "Identity"})

# --- shapes


PREPARE = {"resize_h": 64, "resize_w": 64}
TOGETHER = {"n": {"backend": "S[DecodeMat,ResizeMat,OnnxTensor]", **PREPARE, **DEMO_MODEL}}
APART = {
    "n": {"backend": "S[DecodeMat,ResizeMat]", **PREPARE, "next": "n_model"},
    "n_model": {"backend": "OnnxTensor", **DEMO_MODEL},
}


BOTH_RESIZE = {"n": {**TOGETHER["n"], "backend": "S[DecodeMat,ResizeMat,OnnxTensor,ResizeTensor]"}}
BOTH_RESIZE_APART = {
    "n": APART["n"],
    "n_model": {**APART["n_model"], **PREPARE, "backend": "S[OnnxTensor,ResizeTensor]"},
}


@pytest.mark.parametrize(
    ("nodes", "shape", "other"),
    [(TOGETHER, "apart", APART), (APART, "joined", TOGETHER), (BOTH_RESIZE, "apart", BOTH_RESIZE_APART)],
    ids=["one node", "apart", "a key of both"],
)
def test_decoder_and_model_are_joined_or_apart(nodes: dict[str, Any], shape: str, other: dict[str, Any]) -> None:
    found = {each.shape: filled(each.config) for each in shapes_of(tables(**nodes)) if not each.heads}
    assert found == {WRITTEN: filled(nodes), shape: filled(other)}


@pytest.mark.parametrize(("one", "other"), [({"resize_h": 96}, {}), ({}, {"interpolation": "area"})])
def test_nodes_with_different_values_of_a_key_are_not_joined(one: dict[str, Any], other: dict[str, Any]) -> None:
    for first, second in ((one, other), (other, one), ({}, {})):
        nodes = {
            "large": {"backend": "S[DecodeMat,ResizeMat]", **PREPARE, **first, "next": "small"},
            "small": {"backend": "ResizeMat", **PREPARE, **second},
        }
        names = [each.shape for each in shapes_of(tables(**nodes))]
        assert names == ([WRITTEN] if first or second else [WRITTEN, "joined"])


def test_joins_the_other_pairs_of_a_chain() -> None:
    nodes = {
        "decode": {"backend": "DecodeMat", "next": "large"},
        "large": {"backend": "ResizeMat", **PREPARE, "next": "small"},
        "small": {"backend": "ResizeMat", **PREPARE, "resize_h": 32},
    }
    _, joined = shapes_of(tables(**nodes))
    assert {name: table["backend"] for name, table in filled(joined.config).items()} == {
        "decode": "S[DecodeMat,ResizeMat]",
        "small": "ResizeMat",
    }


@pytest.mark.parametrize(
    ("nodes", "shared"),
    [
        (TOGETHER, {WRITTEN: [], "apart": [], "as written, shared": ["n"], "apart, shared": ["n_model"]}),
        (
            {**APART, "n_model": {**APART["n_model"], "shared": True}},
            {WRITTEN: ["n_model"], "as written, not shared": []},
        ),
        ({"n": {"backend": "DecodeMat"}}, {WRITTEN: []}),
    ],
    ids=["models", "as written", "no model"],
)
def test_models_are_shared_or_not_with_several_numbers_of_processes(
    nodes: dict[str, Any], shared: dict[str, list[str]]
) -> None:
    shapes = shapes_of(tables(**nodes))
    assert {shape.shape: shape.heads for shape in shapes} == shared
    candidates = process_candidates(shapes, cores=2)
    processes = {(each.shape, each.workers, each.engines) for each in candidates}
    assert processes == {(WRITTEN, 1, 0)} | {
        (name, *numbers)
        for name, heads in shared.items()
        for numbers in ([(2, 1), (2, 2)] if heads else [(1, 0), (2, 0)])
    }


def filled(nodes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: dict(table) for name, table in nodes.items() if table}


@pytest.mark.parametrize(
    "nodes",
    [
        {"a": {"backend": "Identity", "next": "b,c"}, "b": {"backend": "Identity"}, "c": {"backend": "Identity"}},
        {"a": {"backend": "DecodeMat", "next": "b"}, "b": {"backend": "Identity", "filter": "or"}},
        {"a": {"backend": "DecodeMat", "next": "b"}, "b": {"backend": "Identity", "map": "a[result:data]"}},
    ],
    ids=["a fork", "a filter", "a map"],
)
def test_nodes_whose_results_would_differ_stay_as_written(nodes: dict[str, Any]) -> None:
    assert [shape.shape for shape in shapes_of(tables(**nodes))] == [WRITTEN]


# --- alternatives with other results

PILLOW = {"n": {"backend": "S[DecodeMat,PillowResizeMat]", "PillowResizeMat::resize_h": 64, "resize_w": 64}}
CACHED = {
    "n": {"backend": "TensorrtTensor", "precision": "fp32", "model::cache": "a.trt", "model": DEMO_MODEL["model"]}
}


@pytest.mark.parametrize(
    ("nodes", "name", "other"),
    [
        (TOGETHER, "nearest interpolation", {"interpolation": "nearest"}),
        (
            {"n": {**TOGETHER["n"], "ResizeMat::interpolation": "area"}},
            "nearest interpolation",
            {"ResizeMat::interpolation": "nearest"},
        ),
        ({"n": {**TOGETHER["n"], "interpolation": "nearest"}}, "nearest interpolation", None),
        (TOGETHER, "OpenCV's resize", None),
        (
            PILLOW,
            "OpenCV's resize",
            {"backend": "S[DecodeMat,ResizeMat]", "ResizeMat::resize_h": 64, "PillowResizeMat::resize_h": None},
        ),
        (
            TOGETHER,
            "GPU decode",
            {"backend": "SyncTensor[S[DecodeTensor,ResizeTensor,OnnxTensor]]", "DecodeTensor::color": "bgr"},
        ),
        (TOGETHER, 'at_least = "1x"', {"at_least": "1x"}),
        (
            PILLOW,
            "OpenCV's area resize",
            {
                **{"backend": "S[DecodeMat,ResizeMat]", "ResizeMat::resize_h": 64, "PillowResizeMat::resize_h": None},
                "ResizeMat::interpolation": "area",
            },
        ),
        ({"n": {**TOGETHER["n"], "interpolation": "bicubic"}}, "bilinear interpolation", {"interpolation": "bilinear"}),
        (TOGETHER, "CPU decode", None),
        (
            {"n": {"backend": "SyncTensor[S[DecodeTensor,ResizeTensor,OnnxTensor]]", **PREPARE, **DEMO_MODEL}},
            "CPU decode",
            {"backend": "SyncTensor[S[DecodeMat,ResizeMat,OnnxTensor]]", "DecodeMat::color": "rgb"},
        ),
        (
            {"n": {"backend": "S[DecodeTensor,ResizeTensor,SyncTensor]", **PREPARE, "max": 8}},
            "CPU decode",
            {"backend": "S[DecodeMat,ResizeMat,SyncTensor]", "DecodeMat::color": "rgb", "max": None},
        ),
        (TOGETHER, "fp16", None),
        (CACHED, "fp16", {"precision": "fp16", "model::cache": "a.trt.fp16"}),
    ],
)
def test_alternative_changes_only_keys_and_backends_of_the_file(
    nodes: dict[str, Any], name: str, other: dict[str, Any] | None
) -> None:
    (alternative,) = [each for each in ALTERNATIVES if each.name == name]
    file = Candidate("x", tables(**nodes))
    if other is None:
        with pytest.raises(ToolError, match="no node of the file can change to it"):
            with_alternative(file, alternative)
    else:
        expected = {key: value for key, value in {**nodes["n"], **other}.items() if value is not None}
        assert with_alternative(file, alternative).config["n"] == expected


SCALE = {"color": "rgb", "mean": "123.675, 116.28, 103.53", "std": "58.395, 57.12, 57.375"}
CLASSES = {**TOGETHER["n"], **SCALE, "backend": "S[DecodeMat,ResizeMat,cvtColorMat,OnnxTensor]"}
PIXELS = {"backend": "S[DecodeMat,ResizeMat]", **PREPARE}


@pytest.mark.parametrize(
    ("nodes", "keys", "words", "passes"),
    [
        (CLASSES, {"interpolation": "nearest"}, "the same class for 47 of 48 images, accuracy 97.9% before", True),
        (CLASSES, {"mean": "255"}, "the same class for ", False),
        (PIXELS, {"interpolation": "nearest"}, "pixels differ by ", True),
    ],
    ids=["classes", "too few of them", "pixels"],
)
def test_parity_reports_how_results_differ(
    nodes: dict[str, Any], keys: dict[str, str], words: str, passes: bool
) -> None:
    written, other = Candidate("yours", tables(n=nodes)), Candidate("other", tables(n={**nodes, **keys}))
    if passes:
        assert parity_of(written, other, str(IMAGES)).startswith(words)
    else:
        with pytest.raises(ToolError, match=words):
            parity_of(written, other, str(IMAGES))


def test_alternative_that_loses_objects_is_not_tried(register: Register) -> None:
    boxes = Detections([[0, 0, 9, 9], [20, 0, 29, 9]], [0.9, 0.8], [0, 1])
    written, same, other = (
        Candidate(name, tables(n={"backend": register(returns(found))}))
        for name, found in (("a", boxes), ("b", boxes), ("c", boxes[:1]))
    )
    assert parity_of(written, same, str(IMAGES)) == "96 of 96 objects are found again, and 0 others"
    with pytest.raises(ToolError, match="48 of 96 objects are found again, and 0 others"):
        parity_of(written, other, str(IMAGES))


def test_alternatives_with_other_results_are_not_tried() -> None:
    shapes = [Candidate(WRITTEN, tables(n={**CLASSES, "interpolation": "bicubic"}))]
    found, parity, not_tried = alternatives_of(shapes, str(IMAGES), [], has_gpu=False)
    resizes = ["as written, bilinear interpolation", "as written, nearest interpolation"]
    assert [each.shape for each in found if "resize" in each.shape or "interpolation" in each.shape] == resizes
    assert parity["nearest interpolation"].startswith("the same class for ")
    assert "OpenCV's resize: no node of the file can change to it" in not_tried
    assert "fp16: there is no GPU" in not_tried


def test_alternative_without_a_result_is_not_tried(tmp_path: Path) -> None:
    """Too small a limit of pixels stands for an image that the other decoder refuses."""
    (tmp_path / "one.jpg").write_bytes(next(IMAGES.glob("*.jpg")).read_bytes())
    written, other = (
        Candidate(name, tables(n={**PIXELS, "max_pixels": most})) for name, most in (("a", 10**6), ("b", 9))
    )
    with pytest.raises(ToolError, match=r"one.jpg has no result: "):
        parity_of(written, other, str(tmp_path))


# --- candidates


def test_file_is_measured_as_it_is_served() -> None:
    plain, shared = Candidate(WRITTEN, tables(n=model())), Candidate(WRITTEN, tables(n=model(shared=True)))
    assert as_served(plain, cores=4, uses_gpu=False).processes == "--workers 4"
    assert as_served(plain, cores=4, uses_gpu=True).processes == "--workers 1"
    assert as_served(shared, cores=64, uses_gpu=True).processes == "--workers 8 --engines 1"


def test_workers_share_the_cores_among_their_instances() -> None:
    config = tables(a={"backend": "DecodeMat", "instance_num": 8, "next": "m"}, m=model(instance_num=2))
    candidates = process_candidates(shapes_of(config), cores=16)
    assert [str(each) for each in candidates if each.shape == WRITTEN and each.workers > 4] == [
        "as written, --workers 8, a.instance_num = 2, m.instance_num = 1",  # the likely one first
        "as written, --workers 16, a.instance_num = 1, m.instance_num = 1",
    ]
    assert "as written, shared, --workers 8 --engines 2, a.instance_num = 2" in map(str, candidates)


def test_setting_that_changes_nothing_is_not_a_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchpipe_py.plan.build.usable_cores", lambda: 4)
    one, four = (Candidate(WRITTEN, tables(n={"backend": "DecodeMat"}), workers) for workers in (1, 4))
    assert [each.value("n", "instance_num") for each in (one, four)] == [4, 1]  # the cores of each process
    assert one.changed("n", "instance_num", 4) is one
    assert one.changed("n", "instance_num", 1).config["n"] == {"backend": "DecodeMat", "instance_num": 1}


def test_settings_are_changed_one_at_a_time_of_busy_nodes_first() -> None:
    config = tables(
        a={"backend": "DecodeMat", "instance_num": 2, "next": "m"},
        m=model(threads=1, batching_timeout=2, instance_num=1, next="z"),
        z={"backend": "Identity", "instance_num": 1},
    )
    base = Candidate(WRITTEN, config)
    found = setting_candidates(base, {"a": 40.0, "m": 60.0, "z": 1.0}, cores=4, uses_gpu=False)
    assert [" ".join(f"{key} {value:g}" for key, value in each.settings) for each in found] == [
        *("m.instance_num 2", "m.threads 4", "m.max 1", "m.max 8", "m.max 32"),
        *("m.batching_timeout 0", "m.batching_timeout 5", "a.instance_num 1", "a.instance_num 4"),
    ]


def test_setting_is_not_changed_back() -> None:
    base = Candidate(WRITTEN, tables(n=model(threads=1, batching_timeout=2, instance_num=1)))
    best = base.changed("n", "max", 32)
    settings = [dict(each.settings) for each in setting_candidates(best, {"n": 1.0}, cores=2, uses_gpu=False)]
    assert settings
    assert all(each["n.max"] == 32 for each in settings)


@pytest.mark.parametrize(("workers", "instances", "threads"), [(2, 2, {4}), (1, 1, {1}), (1, 2, {1, 4})])
def test_threads_that_are_the_default_are_not_a_candidate(workers: int, instances: int, threads: set[int]) -> None:
    """Without a setting, the instances of all workers share the cores, which are four."""
    base = Candidate(WRITTEN, tables(n=model(instance_num=instances)), workers)
    found = [dict(each.settings) for each in setting_candidates(base, {"n": 1.0}, cores=4, uses_gpu=False)]
    assert {each["n.threads"] for each in found if "n.threads" in each} == threads


def test_single_images_wait_for_no_batch() -> None:
    base = Candidate(WRITTEN, tables(n=model(max=1, threads=1)))
    keys = {key for each in setting_candidates(base, {"n": 1.0}, cores=2, uses_gpu=False) for key, _ in each.settings}
    assert keys == {"n.max", "n.threads", "n.instance_num"}


def test_engine_keeps_its_batches() -> None:
    config = tables(n={"backend": "FirstAvailable[TensorrtTensor,OnnxTensor]", **DEMO_MODEL})
    (plan,) = Candidate("x", config).pipeline.plans.values()
    assert {"max", "threads"} <= set(knobs_of(plan, has_gpu=False))
    assert {"max", "threads"} & set(knobs_of(plan, has_gpu=True)) == set()


@pytest.mark.parametrize(
    ("backend", "more", "found"),
    [
        ("TensorrtTensor", {}, ["n"]),
        ("S[DecodeMat,SyncTensor[S[Mat2Tensor,TensorrtTensor]]]", {}, ["n"]),
        ("TensorrtTensor&TensorrtTensor", {"max": "1&4"}, ["n"]),
        ("TensorrtTensor", {"model::cache": "kept.trt"}, []),
        ("OnnxTensor", {}, []),
    ],
)
def test_names_the_nodes_whose_engines_no_file_keeps(backend: str, more: dict[str, str], found: list[str]) -> None:
    config = tables(n={"backend": backend, "max": 4, **DEMO_MODEL, **more})
    assert unkept_engines(Candidate(WRITTEN, config).pipeline) == found


# --- search and verdict, by a fake measurer


MOST = Goal(0.02, None, [float(number) for number in range(4000)], 1.0)
BASE = Candidate(WRITTEN, ONE)


def by_workers(speeds: Mapping[int, float]) -> Callable[[Candidate], float]:
    """The speed by the number of workers, which tells candidates apart; 1 is the file; 0 cannot run."""

    def speed(candidate: Candidate) -> float:
        if not (found := speeds[candidate.workers]):
            raise ToolError("out of memory")
        return found

    return speed


def with_workers(*numbers: int) -> list[Trial]:
    return [Trial(Candidate(WRITTEN, ONE, number)) for number in numbers]


def measured(trials: Sequence[Trial]) -> list[tuple[int, int]]:
    return [(trial.candidate.workers, len(trial.gains)) for trial in trials]


def test_candidate_and_file_are_measured_in_turns() -> None:
    """On a machine that slows down between any two loops, the gain is right nevertheless."""
    measurer = FakeMeasurer(by_workers({1: 100.0, 2: 200.0}), slowing=0.9)
    (trial,) = with_workers(2)
    trial.measure(measurer, BASE, range(4))
    one, two = str(BASE), str(trial.candidate)
    assert measurer.asked == [one, two, two, one, one, two, two, one]
    assert math.exp(trial.gain) == pytest.approx(2.0)


def test_halving_keeps_the_better_half_and_measures_it_twice_as_often() -> None:
    speeds = {1: 100.0, 2: 110.0, 3: 125.0, 4: 90.0, 5: 140.0, 6: 105.0, 7: 0.0, 8: 95.0, 9: 130.0, 10: 85.0}
    measurer, trials = FakeMeasurer(by_workers(speeds)), with_workers(*range(2, 11))
    ranked = halve(trials, BASE, measurer, measurer.budget, "verify")
    assert measured(ranked) == [(5, 14), (9, 14), (3, 14), (2, 6), (6, 2), (8, 2), (4, 2), (10, 2)]
    assert trials[5].failed == "out of memory"


def test_halving_ends_when_no_time_for_a_round_is_left() -> None:
    measurer = FakeMeasurer(by_workers({1: 100.0, **{number: 90.0 + number for number in range(2, 10)}}), budget_s=50.0)
    ranked = halve(with_workers(*range(2, 10)), BASE, measurer, measurer.budget, "verify")
    assert measured(ranked) == [(number, 2) for number in range(9, 1, -1)]
    assert measurer.now < 50


def test_candidates_without_time_are_left_out_but_for_the_first() -> None:
    measurer, trials = (
        FakeMeasurer(by_workers(dict.fromkeys(range(1, 9), 100.0)), budget_s=15.0),
        with_workers(*range(2, 9)),
    )
    assert len(halve(trials, BASE, measurer, measurer.budget, "verify")) == 3
    assert {trial.failed for trial in trials[3:]} == {"no time was left to measure it"}
    late = FakeMeasurer(by_workers({1: 1.0, 2: 1.0, 3: 1.0}), budget_s=1.0)
    assert measured(halve(with_workers(2, 3), BASE, late, late.budget, "profile")) == [(2, 2)]


@pytest.mark.parametrize(("gain", "first"), [(1.009, "few"), (1.011, "many")])
def test_fewer_settings_win_unless_more_gain_over_one_percent(gain: float, first: str) -> None:
    few = Trial(Candidate("few", ONE), gains=[math.log(1.5)])
    many = Trial(Candidate("many", ONE, settings=(("n.max", 8.0),)), gains=[math.log(1.5 * gain)])
    assert best_first([many, few])[0].candidate.shape == first


CHAIN = tables(n=model(threads=1, batching_timeout=2, instance_num=1))


def known(base: Candidate) -> Profile:
    return Profile(base, cores=2, uses_gpu=False, lone=0.001, answers=100.0, clients=4, loop_s=0.3)


def planted(candidate: Candidate) -> float:
    """Two workers are better, then larger batches, then no waiting for them."""
    settings = dict(candidate.settings)
    speed = 130.0 if candidate.workers == 2 and not candidate.engines else 100.0
    speed *= {32.0: 1.2, 8.0: 1.1}.get(settings.get("n.max", 0), 1.0)
    return speed * (1.1 if "n.max" in settings and settings.get("n.batching_timeout") == 0 else 1.0)


def test_search_finds_the_planted_settings() -> None:
    measurer, trials, base = FakeMeasurer(planted), list[Trial](), Candidate(WRITTEN, CHAIN)
    found = search(shapes_of(CHAIN), known(base), measurer, measurer.budget, trials)
    assert str(found[0].candidate) == "as written, --workers 2, n.max = 32, n.batching_timeout = 0"
    assert str(found[1].candidate) == "as written, --workers 2, n.max = 32"
    assert len(trials) == len({str(trial.candidate) for trial in trials})
    assert str(base) not in [str(trial.candidate) for trial in trials]


def test_search_varies_written_settings_if_no_other_is_better() -> None:
    measurer, trials, base = FakeMeasurer(lambda each: 100.0 - each.workers), list[Trial](), Candidate(WRITTEN, CHAIN)
    search(shapes_of(CHAIN), known(base), measurer, measurer.budget, trials)
    assert "as written, --workers 1, n.max = 8" in [str(trial.candidate) for trial in trials]


def test_shape_in_place_of_the_file_is_measured_first() -> None:
    measurer, trials = FakeMeasurer(lambda each: 100.0, budget_s=1.0), list[Trial]()
    base, other = Candidate(WRITTEN, CHAIN, workers=2), Candidate("other", CHAIN)
    ranked = search([other], known(base), measurer, measurer.budget, trials)
    assert [str(each.candidate) for each in ranked] == ["other, --workers 2"]


def test_search_ends_with_its_time() -> None:
    measurer, trials, base = FakeMeasurer(planted, budget_s=60.0), list[Trial](), Candidate(WRITTEN, CHAIN)
    search(shapes_of(CHAIN), known(base), measurer, measurer.budget, trials)
    assert measurer.now <= 0.6 * 60 + 4


def test_interrupted_search_leaves_its_trials() -> None:
    def speed(candidate: Candidate) -> float:
        if measurer.now > 10:
            raise KeyboardInterrupt
        return 100.0

    measurer, trials, base = FakeMeasurer(speed), list[Trial](), Candidate(WRITTEN, CHAIN)
    with pytest.raises(KeyboardInterrupt):
        search(shapes_of(CHAIN), known(base), measurer, measurer.budget, trials)
    assert any(trial.gains for trial in trials)


def trial(*gains: float, limit: float = 100.0, p99: float = 0.01) -> Trial:
    """Measured beside the file, so many times as good."""
    return Trial(BASE, [math.log(gain) for gain in gains], [100.0], [Point(75.0, 0.001, p99)], limit, p99)


@pytest.mark.parametrize(
    ("ranked", "kind", "number"),
    [
        ([trial(1.20, 1.19, 1.22), trial(0.90, 0.91, 0.92)], "better", 0),
        ([trial(1.01, 0.99, 1.00)], "as good", None),
        ([trial(1.30, 0.80, 1.25)], "cannot tell", None),
        ([trial(0.60, 0.75, 0.55)], "as good", None),  # it varies, but surely gains nothing
        ([trial(1.20, 1.19, 1.22, limit=80), trial(1.10, 1.11, 1.12)], "better", 1),  # the first holds less in time
        ([trial(1.20, 1.19, 1.22, limit=80)], "cannot tell", None),
        ([trial(0.90, 0.91, 0.92), trial(1.10, 1.11, 1.09)], "better", 1),
        ([], "cannot tell", None),
    ],
)
def test_gain_counts_only_beyond_the_noise(ranked: list[Trial], kind: str, number: int | None) -> None:
    yours = trial()
    found = judge(yours, ranked, MOST)
    assert (found.kind, found.best) == (kind, yours if number is None else ranked[number])


@pytest.mark.parametrize(("p99", "kind"), [(0.011, "better"), (0.013, "cannot tell")])
def test_gain_at_a_rate_counts_only_with_a_p99_that_is_no_longer(p99: float, kind: str) -> None:
    goal = Goal(0.02, 50.0, MOST.times, 1.0)
    assert judge(trial(p99=0.01), [trial(1.20, 1.19, 1.22, p99=p99)], goal).kind == kind


def test_rate_that_nothing_holds_has_no_verdict() -> None:
    goal = Goal(0.02, 9e5, MOST.times, 1.0)
    found = judge(trial(p99=NEVER_S), [trial(1.2, 1.2, 1.2, p99=NEVER_S)], goal)
    assert (found.kind, found.why) == ("cannot tell", "at 900000 requests/s nothing answers in time")


def yours(speed: float = 100.0) -> Trial:
    return Trial(BASE, figures=[speed])


def chosen(*numbers: int) -> list[Trial]:
    """With gains by which halving chose them, which are too good."""
    trials = with_workers(*numbers)
    for each in trials:
        each.gains, each.figures = [math.log(9.0)] * 6, [100.0]
    return trials


def test_verdict_rests_on_new_measurements_alone() -> None:
    measurer, ranked = FakeMeasurer(by_workers({1: 100.0, 2: 100.0})), chosen(2)
    found = verify(yours(), ranked, measurer, MOST, measurer.budget)
    assert (found.kind, found.gain) == ("as good", pytest.approx(1.0))


def test_three_finalists_are_measured_in_open_loops_and_beside_the_file() -> None:
    measurer, ranked = FakeMeasurer(by_workers({1: 100.0, 2: 110.0, 3: 130.0, 4: 120.0, 5: 200.0})), chosen(2, 3, 4, 5)
    found = verify(yours(), ranked, measurer, MOST, measurer.budget)
    assert (found.kind, found.best) == ("better", ranked[1])
    assert measured(ranked) == [(2, 16), (3, 16), (4, 16), (5, 6)]
    assert [bool(each.points) for each in ranked] == [True, True, True, False]
    for each, speed in zip(ranked[:3], (110.0, 130.0, 120.0), strict=True):
        assert each.limit == pytest.approx(0.9 * speed, rel=0.03)  # where the p99 of the queue is 20 ms
        assert each.points[-1].rate == pytest.approx(0.75 * each.limit)


def test_verdict_has_some_gains_when_the_time_is_over() -> None:
    measurer, ranked = FakeMeasurer(by_workers({1: 100.0, 2: 120.0}), budget_s=1.0), chosen(2)
    assert verify(yours(), ranked, measurer, MOST, measurer.budget).kind == "better"
    assert measured(ranked) == [(2, 4)]


def test_finalist_that_no_longer_runs_is_left_out() -> None:
    measurer, ranked = FakeMeasurer(by_workers({1: 100.0, 2: 0.0, 3: 130.0})), chosen(2, 3)
    assert verify(yours(), ranked, measurer, MOST, measurer.budget).best is ranked[1]
    assert ranked[0].failed == "out of memory"
    found = verify(yours(), chosen(2), measurer, MOST, measurer.budget)
    assert (found.kind, found.why) == ("cannot tell", "no other settings could be measured")


@pytest.mark.parametrize(
    ("p99s", "limit"),
    [
        ((5, 10, 40), 105),  # in log p99 half way between the last two
        ((5, 6, 7), 1.15 * 110),
        ((30, 40, 50), 90 / 1.15),
        ((10, math.inf, math.inf), 94.1),  # an overload counts as e times the SLO
        ((30, 10, 80), 104.1),  # a stall at the lowest rate
    ],
)
def test_limit_is_where_the_p99_crosses_the_slo(p99s: tuple[float, ...], limit: float) -> None:
    points = [Point(rate, 0.001, p99 / 1000) for rate, p99 in zip((90, 100, 110), p99s, strict=True)]
    assert limit_of(points, slo=0.02) == pytest.approx(limit, rel=1e-3)


# --- the goal


def test_each_open_loop_has_other_arrivals_at_the_same_rate() -> None:
    goal = Goal(0.02, None, [float(number**1.1) for number in range(200)], 1.0)
    one, two = goal.send_times(20.0, 0), goal.send_times(20.0, 1)
    assert one != two
    assert one[0] == two[0] == 0
    assert [one[-1], two[-1]] == pytest.approx([19 / 20] * 2)


@pytest.mark.parametrize(
    ("slo", "lone", "expected"),
    [(None, 0.001, 0.02), (None, 0.01, 0.1), (0.3, 0.01, 0.3), (1000.0, 0.01, 0.4), (3.0, 1.0, 3.0)],
)
def test_slo_is_one_that_open_loops_can_miss(slo: float | None, lone: float, expected: float) -> None:
    goal = Goal.of(slo, None, [0.0, 1.0], lone, 0.1)
    assert goal.slo == pytest.approx(expected)
    assert goal.seconds >= min(2.0, 5 * goal.slo)


def test_replayed_times_are_repeated() -> None:
    goal = Goal.of(None, None, [0.0, 0.5, 3.0], 0.001, 1.0)
    assert goal.times[:7] == [0.0, 0.5, 3.0, 4.0, 4.5, 7.0, 8.0]


@pytest.mark.parametrize(("lone", "seconds"), [(0.001, 0.5), (0.1, 2.0), (0.2, 3.0), (1.0, 4.0)])
def test_first_loop_is_long_enough_for_whole_batches_of_large_images(lone: float, seconds: float) -> None:
    asked: list[float] = []

    class Recording(Service):
        uses_gpu = False

        def __init__(self) -> None:
            """Starts nothing."""

        def one_by_one(self, candidate: Candidate, seconds: float) -> Any:
            return [lone] * 3, None

        def closed_loop(self, candidate: Candidate, clients: int, seconds: float) -> float:
            asked.append(seconds)
            return 1 / lone

    profile(Recording(), BASE, 2, ["image"], 10.0)
    assert asked == [pytest.approx(seconds)]


@pytest.mark.parametrize(("latency", "figure"), [(0.02, 50.0), (math.inf, 1 / 1.02)], ids=["answered", "no answer"])
def test_figure_at_a_rate_is_the_inverse_of_the_p99(latency: float, figure: float) -> None:
    class OpenLoops(Service):
        def __init__(self) -> None:
            """Starts nothing."""

        def open_loop(self, candidate: Candidate, send_times: Sequence[float], grace_s: float) -> list[float]:
            return [latency] * len(send_times)

    loops = Loops(OpenLoops(), Goal(0.02, 49.0, MOST.times, 1.0), 1, 1.0)
    assert loops.figure(BASE, 0) == pytest.approx(figure, rel=0.03)


# --- the processes


class FakeTeam:
    """Records calls; ``free`` bytes of a GPU are left, of which a build takes ``takes`` for each worker."""

    def __init__(self, free: int = 0, takes: int = 0) -> None:
        self.pids, self.free, self.takes = [1, 2, 3], free, takes
        self.calls: list[tuple[str, Any]] = []
        self.built: dict[int, int] = {}
        self.answers: dict[str, Any] = {"closed_loop": ([0.2] * 20, None), "open_loop": [0.001]}

    def call(self, calls: Sequence[tuple[int, str, Sequence[Any]]], seconds: float) -> list[Any]:
        self.calls += [(name, arguments) for _, name, arguments in calls[:1]]
        for _, name, arguments in calls[:1]:
            if name == "build":
                slot, _, workers, _ = arguments
                self.built[slot] = workers
                if workers == 9 or (self.free and self.takes * sum(self.built.values()) > self.free):
                    raise ToolError("out of memory")
            elif name == "drop":
                self.built.pop(arguments[0], None)
        left = self.free - self.takes * sum(self.built.values())
        answers = {**self.answers, "gpu_free": left}
        return [answers.get(name) for _, name, _ in calls]

    def close(self) -> None:
        """Nothing was started."""

    def names(self, *names: str) -> list[tuple[str, int]]:
        return [(name, arguments[0]) for name, arguments in self.calls if name in names]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[Service, FakeTeam]]]:
    """Starts a service with a fake team."""
    stack = ExitStack()

    def started(gpu_memory: float = math.inf, **keys: int) -> tuple[Service, FakeTeam]:
        team = FakeTeam(**keys)
        monkeypatch.setattr("torchpipe_py.tools.tune.measure.Team", lambda *_: team)
        return stack.enter_context(closing(Service([b""], [], [0, 1], 1, gpu_memory))), team

    with stack:
        yield started


Start = Callable[..., "tuple[Service, FakeTeam]"]


def test_pipes_are_warmed_up_before_they_are_measured(start: Start) -> None:
    service, team = start()
    service.closed_loop(BASE, 5, 1.0)
    service.closed_loop(BASE, 6, 1.0)
    clients = [arguments[1] for name, arguments in team.calls if name == "closed_loop"]
    assert clients == [1, WARM_UP_CLIENTS, 20, 5, 6]  # small batches and large ones, once


def test_slow_pipe_is_warmed_up_by_few_clients(start: Start) -> None:
    service, team = start()
    team.answers["closed_loop"] = ([0.2], None)
    service.closed_loop(BASE, 5, 1.0)
    assert [arguments[1] for name, arguments in team.calls if name == "closed_loop"] == [1, 2, 2, 5]


def test_pipe_that_hangs_is_refused(start: Start) -> None:
    service, team = start()
    team.answers["closed_loop"] = ([], None)
    with pytest.raises(ToolError, match=r"nothing was answered within 60 s: does a backend hang\?"):
        service.closed_loop(BASE, 5, 1.0)


def test_pipe_whose_requests_fail_reports_why(start: Start) -> None:
    service, team = start()
    team.answers["closed_loop"] = ([], (3, "ValueError: no"))
    with pytest.raises(ToolError, match="nothing was answered within 1 s: ValueError: no"):
        service.closed_loop(BASE, 5, 1.0)


def test_pipes_used_last_stay_built(start: Start) -> None:
    service, team = start()
    candidates = [Candidate(WRITTEN, ONE, workers) for workers in range(1, 7)]
    for number in (0, 1, 0, 2, 3, 0, 4, 0, 1):
        service.closed_loop(candidates[number], 1, 1.0)
    assert team.names("build") == [("build", slot) for slot in (0, 1, 2, 3, 1, 2)]


def test_pipe_that_cannot_be_built_is_dropped(start: Start) -> None:
    service, team = start()
    with pytest.raises(ToolError, match="out of memory"):
        service.closed_loop(Candidate(WRITTEN, ONE, 9), 1, 1.0)
    assert team.names("build", "drop") == [("build", 0), ("drop", 0)]


def test_pipes_that_do_not_fit_together_on_a_gpu_are_built_alone(start: Start) -> None:
    service, team = start(free=10, takes=2)
    for workers in (2, 3, 4):
        service.closed_loop(Candidate(WRITTEN, ONE, workers), 1, 1.0)
    assert team.built == {0: 4}
    with pytest.raises(ToolError, match="out of memory"):
        service.closed_loop(Candidate(WRITTEN, ONE, 6), 1, 1.0)
    assert team.built == {}


def test_pipe_over_the_gpu_memory_is_refused(start: Start) -> None:
    service, team = start(gpu_memory=2 * 2**30, free=8 * 2**30, takes=2**30)
    service.closed_loop(Candidate(WRITTEN, ONE, 2), 1, 1.0)
    assert service.uses_gpu
    with pytest.raises(ToolError, match=r"needs 3.0 GiB, over --gpu-memory"):
        service.closed_loop(Candidate(WRITTEN, ONE, 3), 1, 1.0)
    assert team.built == {}


# --- the report


def report_of(*trials: Trial) -> Report:
    report = Report("x.toml", 0.02, None, slo_given=True)
    report.complete(trials)
    return report


def test_open_verdict_gives_a_reason() -> None:
    report = replace(report_of(), verdict="cannot tell", gain=1.4, gain_interval=(0.4, 5.0))
    between = "cannot tell: measurements vary too much (95 % interval of the gain: 0.40 to 5.00)"
    assert verdict_line(report).startswith(between)
    assert verdict_line(replace(report, failed="it died")) == "cannot tell: it died"
    assert verdict_line(replace(report, other_programs=0.4)).startswith("cannot tell: no other settings were tried, as")
    tried = replace(report_of(trial(), trial(1.1, 1.1)), verdict="cannot tell", other_programs=0.4)
    assert verdict_line(tried).startswith("cannot tell: other programs took 40% of the cores")


def test_end_before_a_limit_is_chosen_is_reported() -> None:
    """Ctrl-C during the profile, without ``--slo-p99``."""
    report = Report("x.toml", None, None, slo_given=False)
    report.complete([])
    goal = "the most requests/s with p99 within a limit that was not chosen yet, as no --slo-p99 was given"
    assert lines_of(report)[0].split(maxsplit=1) == ["goal", goal]


def test_json_has_null_for_what_is_not_finite() -> None:
    report = report_of(trial(limit=math.nan)).to_json()
    assert (report["yours"]["measured"], report["gain_interval"], report["slo_given"]) == (None, [0.0, None], True)
    assert "command" not in report


def test_two_gains_have_no_interval() -> None:
    """It would reach from almost nothing to many times the gain."""
    for gains, interval in (((1.0, 1.3), "-"), ((1.0, 1.01, 0.99), "0.98 to 1.03")):
        report = report_of(trial(), trial(*gains))
        assert rows_of(report)[1][3] == interval


def test_report_names_omitted_candidates() -> None:
    failed, late = (Trial(Candidate(WRITTEN, ONE, workers)) for workers in (2, 3))
    failed.failed = "out of memory"
    report = report_of(trial(), trial(1.1, 1.1), failed, late, late)
    assert report.notes == ["as written, --workers 2 was left out: out of memory"]
    assert report.not_tried[1:] == ["2 further settings: no time was left to measure it"]
    assert len(report.others) == 1


# --- phases, with a fake measurer


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeMeasurer:
    """Runs of ``tune`` measure by this; two workers, in which the file is served, gain from batches of 32."""
    measurer = FakeMeasurer(lambda each: 130.0 if dict(each.settings).get("n.max") == 32 else 50.0 * each.workers)
    base = Candidate(WRITTEN, CHAIN, workers=2)
    use_measurer(measurer, lambda written: known(base), monkeypatch)
    return measurer


def test_better_settings_are_the_tuned_file(fake: FakeMeasurer) -> None:
    report = tune(CHAIN, [b"image"], slo_p99=0.02, budget=600, cores=2)
    assert (report["verdict"], report["tuned"]["n"]["max"]) == ("better", 32)
    assert report["best"]["settings"] == {"n.max": 32}
    assert report["gain_interval"] == [pytest.approx(1.3)] * 2
    assert (report["yours"]["processes"], report["yours"]["measured"]) == ("--workers 2", pytest.approx(90, rel=0.03))


def test_budget_that_would_do_is_named_if_there_was_time_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def speed(candidate: Candidate) -> float:
        if str(candidate) != str(base):
            raise ToolError("nothing was answered within 0.3 s")
        return 50.0

    def profiled(written: Candidate) -> Profile:
        measurer.now += 11.5
        return known(base)

    base, measurer = Candidate(WRITTEN, CHAIN, workers=2), FakeMeasurer(speed)
    use_measurer(measurer, profiled, monkeypatch)
    report = tune(CHAIN, [b"image"], slo_p99=0.02, budget=25, cores=2)
    assert (report["verdict"], report["others"]) == ("cannot tell", [])
    assert report["failed"] == "no other settings could be measured; --budget 115 leaves time for them"


@pytest.mark.parametrize(
    ("phase", "end", "verdict", "failed"),
    [
        ("profile", KeyboardInterrupt(), "interrupted", ""),
        ("settings", KeyboardInterrupt(), "interrupted", ""),
        ("verify", KeyboardInterrupt(), "interrupted", ""),
        ("verify", TeamDied("it died"), "cannot tell", "it died"),
    ],
)
def test_early_end_reports_results_so_far(
    phase: str, end: BaseException, verdict: str, failed: str, fake: FakeMeasurer
) -> None:
    def stop(now: str, share: float, left: float) -> None:
        if now == phase:
            raise end

    report = tune(CHAIN, [b"image"], slo_p99=0.02, budget=600, cores=2, progress=stop)
    assert (report["verdict"], report["failed"], report["tuned"]) == (verdict, failed, None)
    assert (report["yours"] is not None) == bool(report["others"]) == (phase != "profile")


def test_early_death_of_a_process_is_raised(fake: FakeMeasurer) -> None:
    def stop(*_: Any) -> None:
        raise TeamDied("it died")

    with pytest.raises(TeamDied):
        tune(CHAIN, [b"image"], progress=stop)


# --- the command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ok.toml", "--img_dir", "none"], "--img_dir none: no image in it (looked for .jpg"),
        (["missing.toml", "--img_dir", "bad"], "missing.toml: no such file (working directory: "),
        (["ok.toml", "--img_dir", "bad"], "bad/one.jpg has no result: DecodeError: "),
        (["fails.toml", "--img_dir", "images"], "fails.toml: node 'n': key 'model': model bad.onnx: not an ONNX"),
        (
            ["lines.toml", "--import", "lines.py", "--img_dir", "images"],
            ".jpg has no result: BackendError: node 'n': TuneLines: ValueError: one",
        ),
        (["two.toml", "--img_dir", "images"], "two.toml: requests enter at a, b; only a file with one root"),
        (["ok.toml", "--img_dir", "images", "--slo-p99", "0.001"], "p99 within 0.001 ms: a single request already "),
        (
            ["slow.toml", "--import", "slow.py", "--img_dir", "images", "--budget", "5"],
            "requests/s: measuring candidates needs --budget ",
        ),
        (["ok.toml", "--img_dir", "images", "--cores", "1"], "one core: there is nothing to tune; "),
        (["ok.toml", "--img_dir", "images", "--cores", "9999"], "--cores 9999: only "),
        (["ok.toml", "--img_dir", "images", "--rate", "9", "--slo-p99", "9"], "--slo-p99 and --rate: give one goal, "),
        (
            ["ok.toml", "--img_dir", "images", "--rate", "1", "--budget", "5"],
            "1 requests/s: measuring candidates ",
        ),
        (["ok.toml", "--img_dir", "images", "--out", "ok.toml"], "--out ok.toml: would replace the input ok.toml"),
        (["ok.toml", "--img_dir", "images", "--json", "ok.toml"], "--json ok.toml: would replace the input ok.toml"),
        (
            ["ok.toml", "--img_dir", "images", "--json", "r", "--html", "./r"],
            "--json and --html: both would write r, one over the other",
        ),
        (
            ["hangs.toml", "--import", "hangs.py", "--img_dir", "images", "--budget", "5"],
            "one at a time, the images take too long: give fewer, or a longer --budget",
        ),
        (
            ["flaky.toml", "--import", "flaky.py", "--img_dir", "images", "--budget", "5"],
            ".jpg has no result: BackendError: node 'n': TuneFlaky: ValueError: flaky",
        ),
        (
            ["beside/model.toml", "--img_dir", "images", "--out", "t.toml"],
            "t.toml: node 'n': key 'model': no such file: own.onnx",
        ),
        (["ok.toml", "--img_dir", "images", "--replay", "one.txt"], "those of --replay: the first 20000 are all the"),
        (["ok.toml", "--img_dir", "images", "--replay", "tiny.txt"], "those of --replay: the first 20000 are all the"),
        (["ok.toml", "--img_dir", "images", "--out", f"{'n' * 218}"], "n cannot be written: File name too long"),
        (["ok.toml", "--img_dir", "images", "--json", "link"], "--json link: would replace the input ok.toml"),
        (["ok.toml", "--img_dir", "images", "--replay", "no.txt"], "--replay no.txt: No such file or directory"),
        (["ok.toml", "--img_dir", "images", "--gpu-memory", "6G"], "--gpu-memory: there is no GPU here"),
        (["ok.toml", "--img_dir", "images", "--gpu-memory", "6 G"], "expected bytes, as 6G or 800M, got '6 G'"),
        (["ok.toml", "--img_dir", "images", "--budget", "1"], "expected a number of seconds from 5 to 3600, got '1'"),
    ],
)
def test_bad_input_gets_one_clear_line(
    arguments: list[str], message: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["tune", *arguments])
    except SystemExit as end:
        status = int(end.code or 0)
    printed = capfd.readouterr().err.splitlines()
    assert (status in (1, 2), [message in line for line in printed if line.startswith("torchpipe")]) == (True, [True])


def test_images_without_a_result_are_named_together(folder: Path) -> None:
    good = (IMAGES / "checker_00.jpg").read_bytes()
    for images, message in (
        (
            [good, b"bad"],
            "images[1] has no result: DecodeError: 3 bytes: not a JPEG, PNG, WebP or BMP image; remove it",
        ),
        ([b"bad", good, b"", b"x"], "; remove it from the images, and images[2], images[3], which have none either"),
        ([b"bad", b"x"], "image; the other images have none either"),
    ):
        with pytest.raises(ToolError, match=re.escape(message)):
            tune("ok.toml", images)


def test_imports_custom_backends_from_python(folder: Path) -> None:
    (folder / "python.py").write_text((folder / "own.py").read_text().replace("TuneOwn", "TunePython"))
    with pytest.raises(ToolError, match=r"images\[0\] has no result: DecodeError"):
        tune({"backend": "S[DecodeMat,TunePython]"}, [b"no image"], imports=["python.py"])


@pytest.mark.parametrize("given", [{"rate": math.nan}, {"slo_p99": math.inf}, {"cores": -1}])
def test_refuses_numbers_that_are_not_above_zero(given: Any) -> None:
    with pytest.raises(ToolError, match=f"{next(iter(given))}: expected a number above 0, got "):
        tune({"backend": "DecodeMat"}, [b"an image"], **given)


def test_ctrl_c_without_a_report_gets_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("torchpipe_py.tools.tune.engine.load_images", interrupt)
    assert main(["tune", "ok.toml", "--img_dir", "images"]) == 130
    assert capsys.readouterr().err == "torchpipe: interrupted\n"


TEAM = """
import os, sys
from torchpipe_py.tools.team import Team
team = Team("torchpipe_py.tools.tune.worker", 1)
team.call([(0, "open", ([], [], [min(os.sched_getaffinity(0))]))], 60)
team._children[0].send(("closed_loop", (0, 1, 3600.0)))
print(team.pids[0], flush=True)
input()
"""


def team_of_one(imports: Sequence[str] = ()) -> Team:
    team = Team("torchpipe_py.tools.tune.worker", 1)
    team.call([(0, "open", ([], imports, [min(os.sched_getaffinity(0))]))], 60.0)
    return team


def test_processes_end_when_the_tuner_is_killed() -> None:
    command = [sys.executable, "-c", TEAM]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as tuner:
        assert tuner.stdout is not None
        process = psutil.Process(int(tuner.stdout.readline()))
        assert is_alive(process)
        tuner.kill()
        eventually(lambda: not is_alive(process))


def test_process_that_does_not_answer_ends_the_run(tmp_path: Path) -> None:
    hangs = tmp_path / "hangs.py"
    hangs.write_text("import threading\nthreading.Event().wait()\n", encoding="utf-8")
    with closing(Team("torchpipe_py.tools.tune.worker", 1)) as team:
        arguments = [], [str(hangs)], [min(os.sched_getaffinity(0))]
        with pytest.raises(TeamDied, match=r"has not answered for 0\.3 s \(open\): does a backend hang\?"):
            team.call([(0, "open", arguments)], 0.3)


def test_process_that_dies_ends_the_run() -> None:
    with closing(team_of_one()) as team:
        psutil.Process(team.pids[0]).kill()
        with pytest.raises(TeamDied, match=r"died \(killed by signal 9 \(SIGKILL\)\)"):
            team.call([(0, "gpu_free", ())], 60.0)


def test_failing_call_reports_the_first_line() -> None:
    with closing(team_of_one()) as team, pytest.raises(ToolError, match=r"^KeyError: 3$"):
        team.call([(0, "busy", (3,))], 60.0)


def test_processes_that_backends_start_end_with_the_tuner(tmp_path: Path) -> None:
    starts = tmp_path / "starts_another.py"
    starts.write_text("import subprocess\nsubprocess.Popen(['sleep', '60'])\n", encoding="utf-8")
    with closing(team_of_one([str(starts)])) as team:
        (started,) = psutil.Process(team.pids[0]).children()
        assert is_alive(started)
    eventually(lambda: not is_alive(started))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: configurations, four images, and a folder with bytes that are none."""
    files = {
        "ok.toml": '[n]\nbackend = "DecodeMat"\ninstance_num = 1\n',
        "fails.toml": '[n]\nbackend = "S[DecodeMat,OnnxTensor]"\nmodel = "bad.onnx"\n',
        "slow.toml": '[n]\nbackend = "TuneSlow"\n',
        "slow.py": "import time\nfrom torchpipe_py import ItemBackend, register_backend\n@register_backend\n"
        "class TuneSlow(ItemBackend):\n    def forward_item(self, item):\n        time.sleep(0.2)\n"
        "        item['result'] = 1\n",
        "own.toml": '[n]\nbackend = "S[DecodeMat,TuneOwn]"\ninstance_num = 1\n',
        "own.py": "from torchpipe_py import ItemBackend, register_backend\n@register_backend\n"
        "class TuneOwn(ItemBackend):\n    def forward_item(self, item):\n        item['result'] = item['data']\n",
        "lines.toml": '[n]\nbackend = "TuneLines"\n',
        "lines.py": "from torchpipe_py import register_backend\n@register_backend\nclass TuneLines:\n"
        "    def forward(self, items):\n        raise ValueError('one\\ntwo')\n",
        "hangs.toml": '[n]\nbackend = "TuneHangs"\n',
        "hangs.py": "import time\nfrom torchpipe_py import ItemBackend, register_backend\n@register_backend\n"
        "class TuneHangs(ItemBackend):\n    def forward_item(self, item):\n        time.sleep(3)\n",
        "flaky.toml": '[n]\nbackend = "TuneFlaky"\ninstance_num = 1\n',
        "flaky.py": "from torchpipe_py import ItemBackend, register_backend\n@register_backend\n"
        "class TuneFlaky(ItemBackend):\n    runs = 0\n    def forward_item(self, item):\n"
        "        TuneFlaky.runs += 1\n        item['result'] = 1\n"
        "        if TuneFlaky.runs > 5:\n            raise ValueError('flaky')\n",  # images, and the first to warm up
        "two.toml": '[a]\nbackend = "DecodeMat"\n[b]\nbackend = "DecodeMat"\n',
        "bad.onnx": "no model",
        "beside/model.toml": '[n]\nbackend = "OnnxTensor"\nmodel = "own.onnx"\n',
        "one.txt": "1.5\n",
        "tiny.txt": "0\n1e-320\n",
        "bad/one.jpg": "no image",
        "none/readme": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    one_node(tmp_path / "beside" / "own.onnx", ["n", 3])
    (tmp_path / "link").hardlink_to(tmp_path / "ok.toml")
    (tmp_path / "images").mkdir()
    for path in sorted(IMAGES.glob("*.jpg"))[:4]:
        (tmp_path / "images" / path.name).write_bytes(path.read_bytes())
    monkeypatch.chdir(tmp_path)
    path = child.import_path()
    monkeypatch.setattr(child, "import_path", lambda: f"{LIGHT}\n{path}")  # for the processes of the tuner
    return tmp_path


def test_with_a_busy_neighbour_it_cannot_tell(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    others_take(0.4 * (os.cpu_count() or 1), monkeypatch)
    arguments = ["ok.toml", "--img_dir", "images", "--budget", "5", "--json", "r.json", "--allow-pixels"]
    assert main(["tune", *arguments]) == 1
    report = json.loads((folder / "r.json").read_text(encoding="utf-8"))
    known = [report[key] for key in ("verdict", "tuned", "yours", "other_programs")]
    assert known == ["cannot tell", None, None, pytest.approx(0.4)]
    printed = capsys.readouterr().out
    assert "cannot tell: no other settings were tried, as other programs took 40% of the cores; measure" in printed
    assert "not tried: GPU decode: there is no GPU" in printed
    assert not (folder / "ok.tuned.toml").exists()


@pytest.mark.slow
def test_shared_nodes_are_measured_in_engine_processes() -> None:
    config = tables(n={"backend": "S[DecodeMat,ResizeMat]", **PREPARE, "next": "m"}, m=model(shared=True, **DEMO_MODEL))
    bodies = [path.read_bytes() for path in sorted(IMAGES.glob("*.jpg"))[:4]]
    cores = sorted(os.sched_getaffinity(0))[:2]
    one, two = (Candidate(WRITTEN, config, workers=2, engines=engines) for engines in (1, 2))
    with closing(Service(bodies, [], cores, engines=2)) as service:
        for candidate in (one, two, one):
            latencies = service.open_loop(candidate, [0.0] * 4, 60.0)
            assert len(latencies) == 4
            assert all(map(math.isfinite, latencies))
        busy = service.busy(one)
        assert busy.keys() == {"n", "m"}
        assert min(busy.values()) > 0


@pytest.mark.slow
def test_whole_run_reports_its_measurements(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    others_take(0.0, monkeypatch)
    files = ["own.toml", "--import", "own.py", "--img_dir", "images", "--json", "r.json", "--html", "r.html"]
    assert main(["tune", *files, "--budget", "5", "--cores", "2"]) == 0
    report = json.loads((folder / "r.json").read_text(encoding="utf-8"))
    printed, phases = capsys.readouterr()
    assert report["verdict"] in ("better", "as good", "cannot tell")
    names = [line.partition(": about ")[0] for line in phases.splitlines()]
    assert [names[0], names[-1]] == ["profile", "verify"]
    assert report["images"] == 4
    assert report["others"]
    assert report["yours"]["points"]
    assert "the most requests/s with p99 within " in printed
    assert "<svg" in (folder / "r.html").read_text(encoding="utf-8")
    tuned = folder / "own.tuned.toml"
    assert tuned.exists() == (report["verdict"] == "better") == ("torchpipe-serve own.tuned.toml" in printed)
    if tuned.exists():
        assert plan_pipeline(tuned).plans["n"].label == "S[DecodeMat,TuneOwn]"


ABOVE_ZERO = "expected a number above 0, got "
NO_NUMBERS = ["fast", "2", True, False, 0, -1, 0.0, -0.5, math.nan, math.inf, -math.inf, 10**400, 1j, [1], np.int64(2)]
SAME_TIMES = "times, those of --replay: the first 20000 are all the same, or fewer than two"
NO_TIMES: dict[str, list[Any]] = {
    "times: expected a list of ascending numbers of seconds, got ": [
        5, True, "abc", b"abc", "", object(), 1.0, {0.0, 1.0}, {0.0: 1.0}, iter([0.0, 1.0]), np.arange(2.0),
        [0.0, None], [0.0, "1"], [False, True], [0.0, math.nan, 1.0], [math.nan, 0.0, 1.0], [0.0, math.inf],
        [0, 10**400], [1.0, 0.0], [0.0, 5.0, 0.0], (1.0, 0.0), [[0.0], [1.0]], deque([1.0, 0.0]),
    ],
    SAME_TIMES: [[], (), [0.5], [1.0, 1.0], [0.0, 1e-320], [0.0] * 20000 + [1.0], deque([0.5])],
}  # fmt: skip
NO_PATHS = [None, 5, True, b"p.toml", ["p.toml"], object()]
WRONG: dict[str, dict[str, list[Any]]] = {
    **{name: {f"{name}: {ABOVE_ZERO}": NO_NUMBERS} for name in ("slo_p99", "rate")},
    "budget": {"budget: expected a number of seconds from 0.001 to 1e+06, got ": [None, *NO_NUMBERS, 5e-324, 2**70]},
    **{
        name: {f"{name}: {ABOVE_ZERO}": NO_NUMBERS, f"{name}: expected a whole number, got ": [1.5, 2.0]}
        for name in ("cores", "gpu_memory")
    },
    "imports": {
        "imports: expected a list of modules or files, got ": [
            None,
            "own.py",
            "",
            b"own.py",
            5,
            [5],
            [b"own.py"],
            {"own"},
        ]
    },
    "progress": {"progress: expected a function, got ": [True, 5, "bar"]},
}
"""For each argument of both functions, by the message: values that are wrong."""

WRONG_FOR_TUNE = WRONG | {
    "config": {"config: expected a file or a dict, got ": NO_PATHS},
    "images": {
        "images: expected a folder, or a list of encoded images, got ": [
            *(None, 5, b"image", {"a": b"image"}, np.array(1.5), torch.tensor(1.5)),
        ],
        "images[0]: expected the bytes of an encoded image, got ": [[None], ["a.jpg"], [5], np.zeros((1, 2, 2))],
        "images[1]: expected the bytes of an encoded image, got ": [(b"image", 5)],
        "no images": [[], ()],
    },
    "allow_pixels": {"allow_pixels: expected True or False, got ": [None, "no", 0, 1, []]},
    "times": NO_TIMES,
}
WRONG_FOR_COMPILE = WRONG | {
    **{name: {f"{name}: expected a path, got ": NO_PATHS} for name in ("config", "img_dir")},
    "out": {"out: expected a path, got ": NO_PATHS, "cannot be written: ": ["a\0b", "\ud800"]},
    "tolerance": {
        "tolerance: expected limits, as 'top1=0.999, score=0.01', got ": [None, 5, 0.01, {"top1": 0.99}, b"top1=0.9"],
        "tolerance: ": ["", "top9=0.9", "top1", "top1=1", "top1=x", "top1=0.9, top1=0.9", "mean=-1"],
    },
}
COMPILED = {"config": "p.toml", "img_dir": str(IMAGES), "tolerance": "top1=0.9", "out": "out.toml"}


@pytest.mark.parametrize(
    ("function", "given", "wrong"),
    [
        (tune, {"config": {"backend": "Identity"}, "images": [b"image"]}, WRONG_FOR_TUNE),
        (compile_config, COMPILED, WRONG_FOR_COMPILE),
    ],
)
def test_wrong_arguments_from_python_are_named(
    function: Callable[..., Any], given: dict[str, Any], wrong: dict[str, dict[str, list[Any]]]
) -> None:
    assert wrong.keys() == inspect.signature(function).parameters.keys()

    def check(cell: tuple[str, str, Any]) -> None:
        name, message, value = cell
        with pytest.raises(ToolError, match=re.escape(message)):
            function(**{**given, name: value})

    check_each([(name, *each) for name in wrong for each in flat(wrong[name])], check)


def flat(values: Mapping[str, Sequence[Any]]) -> Iterator[tuple[str, Any]]:
    for message, some in values.items():
        for value in some:
            yield message, value


@pytest.mark.parametrize("out", ["t.toml", "beside/t.toml"])
def test_warning_of_the_configuration_is_given_once(folder: Path, out: str, caplog: pytest.LogCaptureFixture) -> None:
    text = '[n]\nbackend = "S[DecodeMat,NormalizeMat]"\nmean = 0.5\nstd = 0.2\n'
    (folder / "std.toml").write_text(text, encoding="utf-8")
    assert main(["tune", "std.toml", "--img_dir", "bad", "--out", out]) == 1  # it has no image, which is seen later
    assert sum("key 'std'" in record.getMessage() for record in caplog.records) == 1


def test_compiled_file_is_checked_before_long_work(folder: Path) -> None:
    (folder / "a.certificate.json").mkdir()
    for out, message in {
        "missing/out.toml": "no such folder",
        "ok.toml": "would replace the input",
        "a.toml": "a.certificate.json cannot be written: is a directory",
        f"{'n' * 213}.toml": "File name too long",
        f"{'n' * 210}.toml": "n.certificate.json cannot be written: File name too long",
    }.items():
        with pytest.raises(ToolError, match=f"--out {out}.*{message}"):
            compile_config("ok.toml", "images", "top1=0.9", out)
