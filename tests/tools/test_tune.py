"""``torchpipe tune``: simulated queues against those computed by hand, search, verdict, bad inputs, a whole run."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import psutil
import pytest
from kit.services import LIGHT
from kit.waits import eventually, is_alive

from torchpipe_py.cli import main
from torchpipe_py.plan.build import plan_pipeline
from torchpipe_py.plan.config import Tables
from torchpipe_py.proc import child
from torchpipe_py.tools.load.measure import CpuMeter, CpuUse
from torchpipe_py.tools.report import ToolError
from torchpipe_py.tools.tune import tune
from torchpipe_py.tools.tune.command import _Tuning
from torchpipe_py.tools.tune.pixels import ALTERNATIVES, changed, parity_of
from torchpipe_py.tools.tune.profile import Cell, Figures, Profile, Profiler
from torchpipe_py.tools.tune.report import rows_of, trial_fields, verdict_line
from torchpipe_py.tools.tune.search import (
    Calibration,
    Goal,
    Point,
    Prediction,
    Predictor,
    Search,
    calibrate,
    quantile,
    starts_of,
)
from torchpipe_py.tools.tune.shapes import WRITTEN, Candidate, Shape, knobs_of, shapes_of
from torchpipe_py.tools.tune.simulate import Cost, Machine, Simulation
from torchpipe_py.tools.tune.verify import NEVER_S, Service, Trial, gains_of, judge, limit_of, pairs_of
from torchpipe_py.tools.tune.worker import Captured, Team, TeamDied

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "configs" / "demo" / "images"
FREE = Machine(cores=2)
DEMO_MODEL = {"model": str(ROOT / "configs/demo/model.onnx"), "labels": str(ROOT / "configs/demo/labels.txt")}
DEMO_MODEL["postprocessor"] = "SoftmaxMax"


def tables(**nodes: dict[str, Any]) -> Tables:
    return Tables({"global": {}, **nodes})


def model(**keys: Any) -> dict[str, Any]:
    return {"backend": "OnnxTensor", "model": DEMO_MODEL["model"], "max": 4, **keys}


def simulation(
    config: Tables, costs: dict[str, Cost], machine: Machine = FREE, workers: int = 1, engines: int = 0
) -> Simulation:
    return Simulation(Candidate(Shape.of("x", config), workers, engines=engines).plans(), costs, machine)


# --- simulation: queues computed by hand, in milliseconds

ALONE = Cost([[0.010]])
BATCHES = Cost([[0.010]], (0.0, 1.0), limits=(1, 4))
ONE, TWO = (tables(n={"backend": "Identity", "instance_num": count}) for count in (1, 2))
PAIR = tables(one={"backend": "Identity", "next": "two"}, two={"backend": "Identity"})
EACH = tables(all={"backend": "MapReduce", "jump": "each"}, each={"backend": "Identity"})
UNEVEN = {"one": Cost([[0.002], [0.020]]), "n": BATCHES}


def behind_two(timeout: int) -> Tables:
    """A node that batches, behind two instances of another."""
    return tables(one={"backend": "Identity", "instance_num": 2, "next": "n"}, n=model(batching_timeout=timeout))


BY_HAND = {
    "one queue": (ONE, {"n": ALONE}, FREE, (0, 4, 50), (10, 16, 10)),
    "two instances": (TWO, {"n": ALONE}, FREE, (0, 0, 0), (10, 10, 20)),
    "two instances share one core": (TWO, {"n": ALONE}, Machine(1), (0, 0), (20, 20)),
    "two instances share a lock": (TWO, {"n": Cost([[0.010]], lock=0.5)}, FREE, (0, 0), (15, 15)),
    "of three on two cores, one runs beside another": (
        tables(n={"backend": "Identity", "instance_num": 3}),
        {"n": Cost([[0.010]], slowing=0.5)},
        FREE,
        (0, 0, 0),
        (22.5, 22.5, 22.5),
    ),
    "an instance that slept is woken": (ONE, {"n": ALONE}, Machine(2, handover=0.001), (0, 4, 50), (11, 17, 11)),
    "a pipeline": (PAIR, {"one": ALONE, "two": Cost([[0.020]])}, FREE, (0, 0), (30, 50)),
    "an image skips a node": (PAIR, {"one": Cost([[0.010], []]), "two": ALONE}, FREE, (0, 0), (20, 10)),
    "what waits for an instance is a batch": (tables(n=model()), {"n": BATCHES}, FREE, (0, 1, 2), (10, 19, 18)),
    "a batch waits as long as its timeout for one under way": (behind_two(6), UNEVEN, FREE, (0, 0), (18, 30)),
    "and for its company where that comes in time": (behind_two(60), UNEVEN, FREE, (0, 0), (30, 30)),
    "graphs one after the other": (
        tables(all={"backend": "S[Jump,Jump]", "jump": "a|b"}, a={"backend": "Identity"}, b={"backend": "Identity"}),
        *({"a": ALONE, "b": Cost([[0.020]])}, FREE, (0,), (30,)),
    ),
    "elements of a list, and an empty list": (EACH, {"each": Cost([[0.010, 0.020], []])}, FREE, (0, 1), (30, 0)),
}


@pytest.mark.parametrize(("config", "costs", "machine", "dues", "latencies"), BY_HAND.values(), ids=BY_HAND)
def test_latencies_are_those_computed_by_hand(
    config: Tables, costs: dict[str, Cost], machine: Machine, dues: tuple[int, ...], latencies: tuple[int, ...]
) -> None:
    found = simulation(config, costs, machine).open_loop([due / 1000 for due in dues])
    assert [round(1000 * each, 6) for each in found] == list(latencies)


def test_a_closed_loop_is_bound_by_the_slowest_node() -> None:
    found = simulation(PAIR, {"one": ALONE, "two": Cost([[0.020]])}).closed_loop(clients=4, calls=100)
    assert found == pytest.approx(50)


def test_a_closed_loop_counts_enough_calls_for_its_clients() -> None:
    assert simulation(ONE, {"n": ALONE}).closed_loop(clients=200, calls=100) == pytest.approx(100)


def test_workers_take_turns() -> None:
    assert simulation(ONE, {"n": ALONE}, workers=2).open_loop([0, 0, 0, 0]) == pytest.approx([0.01, 0.01, 0.02, 0.02])


def test_requests_of_two_workers_are_one_batch_of_their_engine_process() -> None:
    shared = simulation(tables(n=model(shared=True)), {"n": BATCHES}, Machine(4), workers=2, engines=1)
    assert shared.open_loop([0, 0.004, 0.004]) == pytest.approx([0.010, 0.016, 0.016])


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
def test_decoder_and_model_are_one_node_and_apart(nodes: dict[str, Any], shape: str, other: dict[str, Any]) -> None:
    found = {each.name: filled(each.config) for each in shapes_of(tables(**nodes)) if not each.heads}
    assert found == {WRITTEN: filled(nodes), shape: filled(other)}


@pytest.mark.parametrize(("one", "other"), [({"resize_h": 96}, {}), ({}, {"interpolation": "area"})])
def test_nodes_that_mean_other_values_by_a_key_are_not_joined(one: dict[str, Any], other: dict[str, Any]) -> None:
    for first, second in ((one, other), (other, one), ({}, {})):
        nodes = {
            "large": {"backend": "S[DecodeMat,ResizeMat]", **PREPARE, **first, "next": "small"},
            "small": {"backend": "ResizeMat", **PREPARE, **second},
        }
        names = [each.name for each in shapes_of(tables(**nodes))]
        assert names == ([WRITTEN] if first or second else [WRITTEN, "joined"])


def test_other_pairs_of_a_chain_are_joined_all_the_same() -> None:
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
def test_models_are_shared_and_not_shared(nodes: dict[str, Any], shared: dict[str, list[str]]) -> None:
    shapes = shapes_of(tables(**nodes))
    assert {shape.name: shape.heads for shape in shapes} == shared
    starts = starts_of(shapes, cores=2)
    processes = {(each.shape.name, each.workers, each.engines) for each in starts}
    assert processes == {(WRITTEN, 1, 0)} | {
        (name, *numbers)
        for name, heads in shared.items()
        for numbers in ([(2, 1), (2, 2)] if heads else [(1, 0), (2, 0)])
    }


def test_workers_share_the_cores_among_their_instances() -> None:
    config = tables(a={"backend": "DecodeMat", "instance_num": 8, "next": "m"}, m=model(instance_num=2))
    starts = starts_of(shapes_of(config), cores=16)
    assert [str(start) for start in starts if start.shape.name == WRITTEN and start.workers > 4] == [
        "as written, --workers 8, a.instance_num 2, m.instance_num 1",  # the likely one first
        "as written, --workers 16, a.instance_num 1, m.instance_num 1",
    ]
    assert "as written, shared, --workers 8 --engines 2, a.instance_num 2" in map(str, starts)


def test_a_setting_that_changes_nothing_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the file would be compared with itself."""
    monkeypatch.setattr("torchpipe_py.plan.build.usable_cores", lambda: 4)
    shape = Shape.of(WRITTEN, tables(n={"backend": "DecodeMat"}))
    one, four = Candidate(shape), Candidate(shape, 4)
    assert [each.value("n", "instance_num") for each in (one, four)] == [4, 1]  # the cores of each process
    changed = one.with_knob("n", "instance_num", 1)
    assert changed != one
    assert [changed.with_knob("n", "instance_num", 4), four.with_knob("n", "instance_num", 1)] == [one, four]


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
def test_nodes_that_would_compute_something_else_stay_as_they_are(nodes: dict[str, Any]) -> None:
    assert [shape.name for shape in shapes_of(tables(**nodes))] == [WRITTEN]


def test_a_node_alone_takes_only_the_defaults_that_it_knows() -> None:
    config = Tables({"global": {"mean": "1", "color": "rgb"}, "a": {"backend": "DecodeMat", "next": "b"}, "b": model()})
    shape = Shape.of("x", config)
    assert shape.alone("a", instance_num=2) == {
        "global": {"color": "rgb"},
        "node": {"backend": "DecodeMat", "instance_num": 2},
    }
    assert shape.alone("b")["global"] == {"mean": "1"}


def test_an_engine_keeps_its_batches() -> None:
    (plan,) = Shape.of(
        "x", tables(n={"backend": "FirstAvailable[TensorrtTensor,OnnxTensor]", **DEMO_MODEL})
    ).pipeline.plans.values()
    assert {"max", "threads"} <= set(knobs_of(plan, has_gpu=False))
    assert {"max", "threads"} & set(knobs_of(plan, has_gpu=True)) == set()


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
        (TOGETHER, "fp16", None),
        (CACHED, "fp16", {"precision": "fp16", "model::cache": "a.trt.fp16"}),
    ],
)
def test_alternatives_change_what_a_file_has(nodes: dict[str, Any], name: str, other: dict[str, Any] | None) -> None:
    (alternative,) = [each for each in ALTERNATIVES if each.name == name]
    found = changed(Shape.of("x", tables(**nodes)), alternative)
    expected = other and {key: value for key, value in {**nodes["n"], **other}.items() if value is not None}
    assert (found and found.config["n"]) == expected


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
def test_parity_says_how_results_differ(nodes: dict[str, Any], keys: dict[str, str], words: str, passes: bool) -> None:
    written, other = Shape.of("yours", tables(n=nodes)), Shape.of("other", tables(n={**nodes, **keys}))
    found, is_passed = parity_of(written, other, str(IMAGES))
    assert (found.startswith(words), is_passed) == (True, passes)


@pytest.mark.parametrize("failed", [(1, "no CUDA"), None], ids=["an image", "all"])
def test_an_alternative_that_cannot_run_is_left_out(failed: tuple[int, str] | None) -> None:
    shape = Shape.of(WRITTEN, tables(n={"backend": "DecodeMat"}))
    other = replace(shape, name="other", config=tables(n={"backend": "X"}), twin="other", alternative="GPU decode")
    shapes = [shape, other, replace(other, name="other, shared")]

    class OneCore(Team):
        def __init__(self) -> None:
            self._workers, self.has_gpu = 1, False

        def all(self, name: str, *arguments: Any, most: int | None = None) -> list[Any]:
            if name == "start":
                self.is_other = arguments[0] != shape.config
                if self.is_other and failed is None:
                    raise ToolError("no CUDA")
            return [Captured({"n": [1]}, [0.1], 0.0, failed if self.is_other else None)]

        def gpu_free(self) -> int:
            return 0

        def each(self, name: str, arguments: Any, first: int = 0) -> list[Any]:
            return []

    left_out = Profiler(shapes, OneCore(), 1.0, ["a.jpg", "b.jpg"]).capture()
    assert left_out == {"other": "b.jpg has no result: no CUDA" if failed else "no CUDA"}
    assert shapes == [shape]


@pytest.mark.parametrize(("most", "sizes"), [(1, [1]), (8, [1, 2, 4])], ids=["fixed", "too much memory"])
def test_a_node_is_measured_with_the_batches_that_it_can_run(most: int, sizes: list[int]) -> None:
    shape = Shape.of(WRITTEN, tables(n=model(max=1, threads=1)))

    class TwoCores(Team):
        def __init__(self) -> None:
            self._workers, self.has_gpu = 2, False

        def each(self, name: str, arguments: Any, first: int = 0) -> list[Any]:
            if name == "prepare":
                batches = int(arguments[0][1]["node"].get("max", 1))
                if batches > most:
                    raise ToolError("a fixed batch of 1")
                return [(1, 8 if most > 1 else 1)] * 2
            size = arguments[0][2]
            if size > 4:
                raise ToolError("out of memory")
            return [([([(0, 0)] * size, 0.001)], 0.001)] * len(arguments)

    profiler = Profiler([shape], TwoCores(), 0.1, ["a.jpg"])
    profiler.profile.captured[WRITTEN] = Captured({"n": [1]}, [0.1], 0.0, None)
    profiler.profile.names |= dict.fromkeys(shape.units.values(), "n")
    profiler.measure(profiler.prepare(has_gpu=False), lambda *_: None)
    (unit,) = profiler.profile.limits
    assert profiler.profile.sizes_of(unit, 1) == sizes


# --- the search


def profile_of(config: Tables, each_ms: dict[tuple[int, int], float], **more: Any) -> tuple[Profile, list[Shape]]:
    """Of a node that takes so many milliseconds an image, by threads and batch."""
    shape = Shape.of(WRITTEN, config)
    (unit,) = shape.units.values()
    profile = Profile(cores=2, limits={unit: (1, 8)}, names={unit: "n"})
    for (threads, size), ms in each_ms.items():
        cell = Cell(unit, threads, size)
        names = [(0, 0)] * size
        profile.cells[cell] = Figures([ms / 1000], [float(threads)], [(names, size * ms / 1000)])
    for instances, processes, ms in more.get("together", [(2, 1, each_ms[1, 1] / 2), (1, 2, each_ms[1, 1] / 2)]):
        profile.cells[Cell(unit, 1, 1, instances, processes)] = Figures([ms / 1000], [1.0])
    captured = Captured({"n": [1]}, [0.001], more.get("handover", 0.0), None)
    profile.captured[WRITTEN] = captured
    return profile, [shape]


def one_by_one(predictor: Predictor) -> Any:
    return lambda asked: [predictor.predict(*each) for each in asked]


EVEN = [float(number) for number in range(4000)]
"""Arrivals at a constant rate."""


A_LOCK = {(1, 1): 10, (1, 2): 10, (2, 1): 9, (2, 2): 9}
A_GAIN = {(1, 1): 10, (1, 8): 2.5, (2, 1): 9, (2, 8): 2.4}


@pytest.mark.parametrize(
    ("each_ms", "together", "best"),
    [
        (A_LOCK, [(2, 1, 10), (1, 2, 5)], {"workers": 2, "max": 1, "threads": 1}),
        (A_GAIN, [(2, 1, 5), (1, 2, 5)], {"max": 8, "threads": 1}),
    ],
    ids=["a lock: a worker for each core", "batches gain"],
)
def test_the_search_finds_what_was_planted(
    each_ms: dict[tuple[int, int], float], together: Any, best: dict[str, int]
) -> None:
    profile, shapes = profile_of(tables(n=model(max=4, threads=1)), each_ms, together=together)
    fitted = Calibration(FREE, FREE, 0.0)
    predictor = Predictor(profile, fitted, Goal(slo=0.2, rate=None, times=EVEN, seconds=4.0))
    search = Search(profile, one_by_one(predictor), has_gpu=False)
    first = search.run(starts_of(shapes, 2), 60.0, lambda *_: None)[0]
    settings = {key: first.candidate.value("n", key) for key in ("max", "threads")}
    settings["workers"] = first.candidate.workers
    assert best.items() <= settings.items()
    ideal = 2000 / min(each_ms.values())
    assert first.limit >= 0.85 * ideal


@pytest.mark.parametrize(
    ("p99", "tail"), [(0.0132, 0.002), (0.0112, 0.0), (math.inf, 0.15)], ids=["a tail", "none", "no answer"]
)
def test_calibration_finds_what_the_pipe_adds(p99: float, tail: float) -> None:
    """A node that takes 8 ms alone takes 10 ms in the pipe, more at a low rate, and 1 ms more where it slept."""
    each_ms = {(1, 1): 8, (1, 2): 8, (1, 4): 8}
    profile, (shape,) = profile_of(tables(n=model(max=4, threads=1)), each_ms, handover=0.001)
    full, light = Point(80.0, 0.0110, 0.0130), Point(50.0, 0.0112, p99)
    fitted = calibrate(profile, Goal(0.2, None, EVEN, 2.0), Candidate(shape), (4, 110.0), full, light)
    assert fitted.machine == Machine(2, pytest.approx(1.25, abs=0.02), 0.001, pytest.approx(0.002, abs=5e-4))
    assert fitted.light == Machine(2, pytest.approx(1.27, abs=0.02), 0.001, pytest.approx(tail, abs=5e-4))
    assert fitted.residual == pytest.approx(0.09, abs=0.02)


def predictor_of(profile: Profile) -> Predictor:
    return Predictor(profile, Calibration(FREE, FREE, 0.0), Goal(slo=0.2, rate=None, times=EVEN, seconds=4.0))


def test_settings_for_which_no_time_was_left_are_said() -> None:
    profile, shapes = profile_of(tables(n=model(max=4, threads=1)), A_LOCK)
    search = Search(profile, one_by_one(predictor_of(profile)), has_gpu=False)
    assert search.run(starts_of(shapes, 2), 0.0, lambda *_: None) == []
    assert search.not_tried == {"further settings": "the time for simulations was over"}


def test_predictions_are_fitted_to_the_measured_rate_of_each_number_of_processes() -> None:
    """One worker answers 100 requests a second, as simulated; two answer 75 in place of 200, four 100."""
    profile, shapes = profile_of(tables(n=model(max=1, threads=1)), A_LOCK, together=[(2, 1, 5), (1, 2, 5)])

    class Planned:
        def build(self, candidate: Candidate) -> None:
            self.workers = candidate.workers
            if candidate.shape.name == "broken":
                raise ToolError("no memory")

        def closed_loop(self, clients: int, seconds: float) -> float:
            return {1: 100.0, 2: 75.0, 4: 100.0}[self.workers]

    class Alone:
        """Predicts in this process."""

        def __init__(self, predictor: Predictor) -> None:
            self._predictor = predictor

        def __len__(self) -> int:
            return 1

        def all(self, *_: Any) -> None:
            """Nobody has to be taught."""

        def each(self, name: str, arguments: Any) -> list[float]:
            ((_, workers, knobs, engines, clients, rate),) = arguments
            return [self._predictor.fit(Candidate(shapes[0], workers, knobs, engines), clients, rate)]

    run: Any = _Tuning(ONE, {}, [0, 1, 2, 3], 60.0, None)
    run._shapes = [*shapes, replace(shapes[0], name="broken")]
    run._profile, run._service, run._predictor = profile, Planned(), predictor_of(profile)
    run._goal, run._clients, run._base, run._loop_s, run._closed = MOST, 8, Candidate(shapes[0]), 0.3, 100.0
    run._each_s = 1.0
    run._team = Alone(run._predictor)
    run.compare()
    assert {each: round(slower, 1) for each, slower in run._slower.items()} == {
        "as written, --workers 1": 1.0,
        "as written, --workers 2": 2.7,
        "as written, --workers 4": 2.0,
    }
    assert set(run.report["not_tried"][1:]) == {f"broken, --workers {workers}: no memory" for workers in (1, 2, 4)}


# --- the verdict


MOST = Goal(0.02, None, EVEN, 1.0)


def trial(*gains: float, limit: float = 100.0) -> Trial:
    """Measured beside the file, so many times as good."""
    candidate = Candidate(Shape.of("x", ONE))
    prediction = Prediction(candidate, 100.0, 0.0, 0.01, (), 0.0)
    return Trial(candidate, prediction, 100.0, [], [limit], [0.01], [math.log(gain) for gain in gains])


@pytest.mark.parametrize(
    ("ranked", "kind", "number"),
    [
        ([trial(1.20, 1.19, 1.22), trial(0.90, 0.91, 0.92)], "better", 0),
        ([trial(1.01, 0.99, 1.00)], "as good", None),
        ([trial(1.30, 0.80, 1.25)], "cannot tell", None),
        ([trial(0.60, 0.75, 0.55)], "as good", None),  # it varies, but surely gains nothing
        ([trial(1.20, 1.19, 1.22, limit=80), trial(1.10, 1.11, 1.12)], "better", 1),  # the first holds less in time
        ([trial(1.20, 1.19, 1.22, limit=80)], "cannot tell", None),
        ([trial(1.10, 1.11, 1.09), trial(1.50, 0.90)], "better", 0),  # the order is that of halving
    ],
)
def test_a_gain_counts_only_beyond_the_noise(ranked: list[Trial], kind: str, number: int | None) -> None:
    yours = trial()
    found, best, *_ = judge(yours, ranked, MOST)
    assert (found, best) == (kind, yours if number is None else ranked[number])


def test_candidates_are_measured_beside_the_file() -> None:
    """Each is first in turn, on a machine that slows down between any two measurements."""
    served, speed = [], 1000.0

    class Slowing(Service):
        def __init__(self) -> None:
            """Builds nothing."""

        def build(self, candidate: Candidate) -> None:
            served.append(candidate.workers)

    def figure(_: int) -> float:
        nonlocal speed
        speed *= 0.9
        return speed * served[-1]

    two, base = (Candidate(Shape.of("x", ONE), workers) for workers in (2, 1))
    pairs = pairs_of(Slowing(), two, base, range(4), figure)
    assert served == [1, 2, 2, 1, 1, 2, 2, 1]
    assert math.exp(sum(gains_of(pairs)) / 4) == pytest.approx(2.0)


def test_candidates_stay_built_while_there_is_room() -> None:
    built, dropped = list[tuple[int, int]](), list[int]()

    class NoTeam(Team):
        def __init__(self) -> None:
            self._workers, self.has_gpu, self.free = 2, True, 10

        def gpu_free(self) -> int:
            return self.free

        def drop(self, slot: int) -> None:
            dropped.append(slot)

        def build(self, slot: int, config: Any, workers: int, engines: int) -> None:
            if workers == 9:
                raise ToolError("out of memory")
            built.append((slot, workers))
            self.free = 10 - workers

        def each(self, name: str, arguments: Any, first: int = 0) -> list[Any]:
            return [[] for _ in arguments]

    service, shape = Service(NoTeam()), Shape.of("x", ONE)
    candidates = [Candidate(shape, workers) for workers in range(1, 7)]
    for number in (0, 1, 0, 2, 3, 0, 4, 0, 1):
        service.build(candidates[number])
    assert built == [(0, 1), (1, 2), (2, 3), (3, 4), (1, 5), (2, 2)]  # in place of the one not used for longest
    with pytest.raises(ToolError, match="out of memory"):
        service.build(Candidate(shape, 9))
    service.build(candidates[5])
    assert built[-1] == (3, 6)  # in the slot of the one that failed
    assert dropped[-2:] == [3, 3]  # for its sake, and what had been built of it
    dropped.clear()
    small = Service(NoTeam(), lambda candidate: candidate.workers)
    for number in (0, 2, 0, 1, 5):
        small.build(candidates[number])
    assert dropped == [1, 0, 1]  # 1 and 3 fit into half of what is free, and 1 and 2, but 6 only alone
    built.clear()
    for_two = Service(NoTeam(), lambda _: 2)
    for each in candidates[1:4]:
        pairs_of(for_two, each, candidates[0], range(2), lambda _: 1.0)
    assert [workers for _, workers in built] == [1, 2, 3, 4]  # the file stays
    for bytes_of, count in ((lambda candidate: candidate.workers, 4), (lambda _: 0, 5)):
        with pytest.raises(ToolError, match="over --gpu-memory"):
            Service(NoTeam(), bytes_of, gpu_memory=3).build(candidates[3])
        assert len(built) == count  # where that was not predicted, it is measured


@pytest.mark.parametrize(("left", "count"), [(50.0, 12), (9.0, 8), (4.5, 2)])
def test_pairs_end_with_the_time(left: float, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run: Any = _Tuning(ONE, {}, [0, 1], 60.0, None)
    monkeypatch.setattr("torchpipe_py.tools.tune.verify.pairs_of", lambda *asked: [(1.0, 1.0)] * len(asked[3]))
    monkeypatch.setattr(run, "_left", lambda: left)
    run._goal, run._pair_s, run._service, run._base = MOST, 0.6, None, None
    (ranked,) = run._ranked([trial()], reserve_s=4.0)
    assert len(ranked.gains) == count


@pytest.mark.parametrize(("centre", "start"), [(100.0, 8.0), (6.0, 6.0), (0.1, 4.0)])
def test_open_loops_begin_near_what_closed_ones_answer(
    centre: float, start: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was predicted: the search for the limit would end before it is enclosed."""
    run: Any = _Tuning(ONE, {}, [0, 1], 60.0, None)
    monkeypatch.setattr("torchpipe_py.tools.tune.verify.pairs_of", lambda *asked: [(8.0, 4.0)])
    run._goal, run._pair_s, run._service, run._base = MOST, 0.6, None, None
    (ranked,) = run._ranked([replace(trial(), centre=centre)], reserve_s=4.0)
    assert ranked.centre == start


def test_each_pair_of_open_loops_has_other_arrivals() -> None:
    goal = Goal(0.02, 2.0, [1.0, 3.0, 4.0, 9.0, 9.5], 1.0)
    assert [goal.dues(2.0, 3, turn) for turn in (0, 1)] == [[0.0, 2 / 3, 1.0], [0.0, 1 / 6, 1.0]]


def test_a_quantile_is_the_least_value_that_so_many_reach() -> None:
    assert [quantile(range(1, 1 + count), 0.99) for count in (1, 50, 100, 200)] == [1, 50, 99, 198]


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
def test_the_limit_lies_where_p99_passes_the_slo(p99s: tuple[float, ...], limit: float) -> None:
    points = [Point(rate, 0.001, p99 / 1000) for rate, p99 in zip((90, 100, 110), p99s, strict=True)]
    assert limit_of(points, slo=0.02) == pytest.approx(limit, rel=1e-3)


def test_candidates_are_halved_by_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of workers stand for candidates; 1 is the original file, 7 cannot be built."""
    gain = {2: 1.1, 3: 1.25, 4: 0.9, 5: 1.4, 6: 1.05}
    asked, turns = list[tuple[int, int]](), list[int]()

    def measured(service: Any, candidate: Candidate, base: Any, numbers: range, _: Any) -> list[tuple[float, float]]:
        asked.append((candidate.workers, len(numbers)))
        if asked[-1] in ((7, 2), (3, 6)):
            raise ToolError("out of memory")
        return [(gain[candidate.workers], 1.0)] * len(numbers)

    def measure(service: Any, trial: Trial, goal: Goal) -> None:
        trial.figures.append(100.0)
        turns.append(trial.candidate.workers)

    monkeypatch.setattr("torchpipe_py.tools.tune.verify.pairs_of", measured)
    monkeypatch.setattr("torchpipe_py.tools.tune.verify.turn", measure)
    run: Any = _Tuning(ONE, {}, [0, 1], 60.0, None)
    monkeypatch.setattr(run, "is_disturbed", lambda: False)
    monkeypatch.setattr(run, "_left", lambda: 50.0 if len(asked) < 12 else 0.0)
    run._goal, run._turn_s, run._pair_s, run._service, run._calibrated = MOST, 1.0, 0.6, None, trial()
    run._trials = [
        replace(trial(), candidate=Candidate(Shape.of("x", ONE), workers), figures=[]) for workers in range(1, 8)
    ]
    run._base = run._trials[0].candidate
    run.verify()
    assert asked[:9] == [*((workers, 2) for workers in range(2, 8)), (5, 4), (3, 4), (2, 4)]
    assert asked[9:] == [(5, 6), (3, 6), (5, 12)]
    assert turns == [1, 5, 2, 6]
    assert (run.report["verdict"], run.report["best"]["workers"]) == ("better", 5)
    assert [(each.candidate.workers, len(each.gains)) for each in run._trials] == [
        (1, 0),
        (5, 22),  # without the first ones, by which it was chosen
        (2, 4),
        (6, 2),
        (4, 2),
    ]
    assert run.report["notes"] == [f"x, --workers {workers} was left out: out of memory" for workers in (7, 3)]


def test_a_candidate_whose_gain_was_luck_is_followed_by_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    gains, asked = {2: iter([1.5, 1.0]), 3: iter([1.2, 1.2, 1.19])}, list[int]()

    def measured(service: Any, candidate: Candidate, base: Any, numbers: range, _: Any) -> list[tuple[float, float]]:
        asked.append(candidate.workers)
        return [(next(gains[candidate.workers]), 1.0)] * len(numbers)

    monkeypatch.setattr("torchpipe_py.tools.tune.verify.pairs_of", measured)
    monkeypatch.setattr("torchpipe_py.tools.tune.verify.turn", lambda _, trial, goal: trial.figures.append(100.0))
    run: Any = _Tuning(ONE, {}, [0, 1], 60.0, None)
    monkeypatch.setattr(run, "is_disturbed", lambda: False)
    monkeypatch.setattr(run, "_left", lambda: 50.0 if len(asked) < 5 else 0.0)
    run._goal, run._turn_s, run._pair_s, run._service, run._calibrated = MOST, 1.0, 0.6, None, trial()
    run._trials = [
        replace(trial(), candidate=Candidate(Shape.of("x", ONE), workers), figures=[]) for workers in (1, 2, 3)
    ]
    run._base = run._trials[0].candidate
    run.verify()
    assert asked == [2, 3, 2, 3, 3]
    assert (run.report["verdict"], run.report["best"]["workers"]) == ("better", 3)


@pytest.mark.parametrize(
    ("workers", "goal", "why"),
    [
        ([1], MOST, "no other settings could be measured"),
        ([1, 2], replace(MOST, rate=9e5), "at 900000 requests/s nothing answers in time"),
    ],
)
def test_a_verdict_needs_figures(workers: list[int], goal: Goal, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(service: Any, trial: Trial, goal: Goal) -> None:
        trial.figures.append(NEVER_S)

    monkeypatch.setattr("torchpipe_py.tools.tune.verify.pairs_of", lambda *_: [(1.0, 1.0)] * 12)
    monkeypatch.setattr("torchpipe_py.tools.tune.verify.turn", measure)
    run: Any = _Tuning(ONE, {}, [0, 1], 60.0, None)
    monkeypatch.setattr(run, "is_disturbed", lambda: False)
    run._goal, run._turn_s, run._pair_s, run._service, run._base = goal, 100.0, 0.6, None, None
    run._calibrated = trial()
    run._trials = [
        replace(trial(), candidate=Candidate(Shape.of("x", ONE), number), figures=[], gains=[]) for number in workers
    ]
    run.verify()
    assert verdict_line(run.finish()) == f"cannot tell: {why}"


@pytest.mark.parametrize(
    ("p99s", "gain"),
    [((0.02, 0.03), 1.5), ((0.03, 0.02), 1 / 1.5), ((0.02, math.inf), 50)],  # no answer: at least the loop's time
)
def test_a_shorter_p99_is_a_gain_at_a_given_rate(p99s: tuple[float, float], gain: float) -> None:
    class Planned:
        def build(self, candidate: Candidate) -> None:
            self.p99 = p99s[0] if candidate.workers == 2 else p99s[1]

        def measure(self, goal: Goal, rate: float, turn: int) -> Point:
            return Point(rate, 0.001, self.p99)

    run: Any = _Tuning(ONE, {}, [0, 1], 60.0, None)
    run._service, run._goal, run._base = Planned(), replace(MOST, rate=50.0), Candidate(Shape.of("x", ONE))
    pairs = run._pairs(Candidate(run._base.shape, 2), range(2), run._shortness)
    assert gains_of(pairs) == [pytest.approx(math.log(gain))] * 2


def test_an_slo_that_short_loops_cannot_miss_is_said() -> None:
    run: Any = _Tuning(ONE, {}, [0, 1], 60.0, None)
    run.report |= {"lone": 0.01, "rate": None}
    run.set_goal(1000.0, EVEN)
    assert (run.report["slo_p99"], run._goal.slo) == (0.4, 0.4)
    assert run.report["notes"] == ["open loops are too short for an SLO of 1000000 ms"]


def test_a_verdict_that_is_open_has_a_reason() -> None:
    report = {"verdict": "cannot tell", "gain": 1.4, "gain_interval": (0.4, 5.0), "best": None, "other_programs": None}
    report["failed"] = ""
    assert verdict_line(report).startswith(
        "cannot tell: measurements vary too much (95 % interval of the gain: 0.40 to 5.00)"
    )


def test_two_gains_give_no_interval() -> None:
    """Of two it would reach from almost nothing to many times the gain."""
    report = {"rate": None, "others": []}
    intervals = []
    for gains in ((1.0, 1.3), (1.0, 1.01, 0.99)):
        fields = trial_fields(trial(*gains), MOST)
        intervals.append(rows_of(report | {"yours": fields})[0][4])
    assert intervals == ["-", "0.98 to 1.03"]


# --- the command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ok.toml", "--img_dir", "none"], "--img_dir none: no image in it (looked for .jpg"),
        (["missing.toml", "--img_dir", "bad"], "missing.toml: no such file (working directory: "),
        (["ok.toml", "--img_dir", "bad"], "bad/one.jpg has no result: DecodeError: "),
        (["fails.toml", "--img_dir", "images"], "fails.toml: node 'n': S[DecodeMat,OnnxTensor]: "),
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
        (["ok.toml", "--img_dir", "images", "--out", "ok.toml"], "--out ok.toml: would replace the file to tune"),
        (["ok.toml", "--img_dir", "images", "--json", "ok.toml"], "--json ok.toml: would replace the file to tune"),
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
            "node n alone: ValueError: flaky",
        ),
        (
            ["beside/model.toml", "--img_dir", "images", "--out", "t.toml"],
            "t.toml: node 'n': key 'model': no such file: own.onnx",
        ),
        (["ok.toml", "--img_dir", "images", "--replay", "one.txt"], "the times of --replay are all the same"),
        (["ok.toml", "--img_dir", "images", "--replay", "tiny.txt"], "the times of --replay are all the same"),
        (["ok.toml", "--img_dir", "images", "--json", "link"], "--json link: would replace the file to tune"),
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


def test_python_imports_custom_backends(folder: Path) -> None:
    (folder / "python.py").write_text((folder / "own.py").read_text().replace("TuneOwn", "TunePython"))
    with pytest.raises(ToolError, match=r"images\[0\] has no result: DecodeError"):
        tune({"backend": "S[DecodeMat,TunePython]"}, [b"no image"], imports=["python.py"])


@pytest.mark.parametrize("given", [{"rate": math.nan}, {"slo_p99": math.inf}, {"budget": 0}, {"cores": -1}])
def test_python_takes_only_numbers_above_zero(given: Any) -> None:
    with pytest.raises(ToolError, match=f"{next(iter(given))}: expected a number above 0, got "):
        tune({"backend": "DecodeMat"}, [b"an image"], **given)


def test_ctrl_c_without_a_report_gets_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a second one while the processes are ended."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("torchpipe_py.tools.tune.command.load_images", interrupt)
    assert main(["tune", "ok.toml", "--img_dir", "images"]) == 130
    assert capsys.readouterr().err == "torchpipe: interrupted\n"


BUSY_TEAM = """
from time import perf_counter
from torchpipe_py.tools.tune.worker import Team
team = Team("t.toml", [], [], [0])
team._channels[0].send(("open_loop", (0, [(0, 3600.0)], perf_counter(), 0.0)))
print(team.pids[0], flush=True)
input()
"""


def test_nothing_runs_on_when_the_tuner_is_killed() -> None:
    command = [sys.executable, "-c", BUSY_TEAM]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as tuner:
        assert tuner.stdout is not None
        process = psutil.Process(int(tuner.stdout.readline()))
        assert is_alive(process)
        tuner.kill()
        eventually(lambda: not is_alive(process))


def test_a_process_that_does_not_answer_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Team("t.toml", [], [], [0], seconds=0.1)) as team:
        monkeypatch.setattr("torchpipe_py.tools.tune.worker._WAIT_S", 0.1)
        with pytest.raises(TeamDied, match=r"has not answered for 0\.3 s"):
            team.all("open_loop", 0, [(0, 3600.0)], perf_counter(), 0.0)


def test_what_backends_have_started_ends_with_the_tuner(tmp_path: Path) -> None:
    starts = tmp_path / "starts_another.py"
    starts.write_text("import subprocess\nsubprocess.Popen(['sleep', '60'])\n", encoding="utf-8")
    with closing(Team("t.toml", [], [str(starts)], [0])) as team:
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
        "class TuneHangs(ItemBackend):\n    def forward_item(self, item):\n        time.sleep(9)\n",
        "flaky.toml": '[n]\nbackend = "TuneFlaky"\ninstance_num = 1\n',
        "flaky.py": "from torchpipe_py import ItemBackend, register_backend\n@register_backend\n"
        "class TuneFlaky(ItemBackend):\n    runs = 0\n    def forward_item(self, item):\n"
        "        TuneFlaky.runs += 1\n        item['result'] = 1\n"
        "        if TuneFlaky.runs > 5:\n            raise ValueError('flaky')\n",  # images, and the first to warm up
        "two.toml": '[a]\nbackend = "DecodeMat"\n[b]\nbackend = "DecodeMat"\n',
        "bad.onnx": "no model",
        "beside/model.toml": '[n]\nbackend = "OnnxTensor"\nmodel = "own.onnx"\n',
        "beside/own.onnx": "no model",
        "one.txt": "1.5\n",
        "tiny.txt": "0\n1e-320\n",
        "bad/one.jpg": "no image",
        "none/readme": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "link").hardlink_to(tmp_path / "ok.toml")
    (tmp_path / "images").mkdir()
    for path in sorted(IMAGES.glob("*.jpg"))[:4]:
        (tmp_path / "images" / path.name).write_bytes(path.read_bytes())
    monkeypatch.chdir(tmp_path)
    path = child.import_path()
    monkeypatch.setattr(child, "import_path", lambda: f"{LIGHT}\n{path}")  # for the processes of the tuner
    return tmp_path


def others_take(cores: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs keep so many cores busy, whatever runs beside this test."""
    use = CpuUse(wall=10.0, parent=1.0, server=2.0, machine=3.0 + 10.0 * cores)
    monkeypatch.setattr(CpuMeter, "stop", lambda self: use)


def test_with_a_busy_neighbour_it_cannot_tell(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    others_take(0.4 * (os.cpu_count() or 1), monkeypatch)
    arguments = ["ok.toml", "--img_dir", "images", "--budget", "5", "--json", "r.json", "--allow-pixels"]
    assert main(["tune", *arguments]) == 0
    report = json.loads((folder / "r.json").read_text(encoding="utf-8"))
    known = [report[key] for key in ("verdict", "tuned", "yours", "other_programs")]
    assert known == ["cannot tell", None, None, pytest.approx(0.4)]
    printed = capsys.readouterr().out
    assert "cannot tell: other programs took 40% of the cores; measure on a quiet" in printed
    assert "not tried: GPU decode: there is no GPU" in printed
    assert not (folder / "ok.tuned.toml").exists()


@pytest.mark.slow
def test_shared_nodes_are_measured_in_an_engine_process() -> None:
    config = tables(n={"backend": "S[DecodeMat,ResizeMat]", **PREPARE, "next": "m"}, m=model(shared=True, **DEMO_MODEL))
    bodies = [path.read_bytes() for path in sorted(IMAGES.glob("*.jpg"))[:4]]
    team = Team("x", bodies, [], sorted(os.sched_getaffinity(0))[:2], engines=1)
    try:
        shape = Shape.of(WRITTEN, config)
        team.all("start", config, shape.units, 60.0)
        assert team.all("capture", 60.0)[0].failed is None
        for slot in (0, 1):
            team.build(slot, config, 2, 1)
        for slot in (1, 0):
            latencies = team.all("open_loop", slot, [(0, 0.0), (1, 0.0)], perf_counter(), 60.0, most=2)
            assert all(math.isfinite(latency) for each in latencies for latency in each)
    finally:
        team.close()


@pytest.mark.slow
def test_a_whole_run_reports_what_it_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    others_take(0.0, monkeypatch)
    files = ["own.toml", "--import", "own.py", "--img_dir", "images", "--json", "r.json", "--html", "r.html"]
    assert main(["tune", *files, "--budget", "5", "--cores", "2"]) == 0
    report = json.loads((folder / "r.json").read_text(encoding="utf-8"))
    printed, phases = capsys.readouterr()
    assert report["verdict"] in ("better", "as good", "cannot tell")
    assert [line.partition(": about ")[0] for line in phases.splitlines()] == [
        "profile",
        "calibrate",
        "compare",
        "simulate",
        "verify",
    ]
    assert report["images"] == 4
    assert report["simulated"] > 0
    assert report["yours"]["turns"]
    assert {(cell["batch"], cell["instances"], cell["processes"]) for cell in report["profile"]["cells"]} >= {
        (1, 1, 1),
        (1, 2, 1),
        (1, 1, 2),
    }
    assert "the most requests/s with p99 within " in printed
    assert "<svg" in (folder / "r.html").read_text(encoding="utf-8")
    tuned = folder / "own.tuned.toml"
    assert tuned.exists() == (report["verdict"] == "better") == ("torchpipe-serve own.tuned.toml" in printed)
    if tuned.exists():
        assert plan_pipeline(tuned).plans["n"].label == "S[DecodeMat,TuneOwn]"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "end", "verdict"),
    [
        ("profile", KeyboardInterrupt, "interrupted"),
        ("calibrate", KeyboardInterrupt, "interrupted"),
        ("verify", KeyboardInterrupt, "interrupted"),
        ("verify", TeamDied("it died"), "cannot tell"),
    ],
)
def test_what_is_known_at_an_early_end_is_given(
    phase: str, end: Any, verdict: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others_take(0.0, monkeypatch)

    def stop(now: str, share: float, left: float) -> None:
        if now == phase:
            raise end

    report = tune("ok.toml", "images", budget=5, slo_p99=0.3, progress=stop)
    assert (report["verdict"], report["slo_p99"]) == (verdict, 0.3)
    known = [key for key in ("profile", "calibration") if report[key]]
    assert known == {"profile": [], "calibrate": ["profile"], "verify": ["profile", "calibration"]}[phase]
    assert (report["yours"] is not None) == (phase == "verify")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"cores": 1.5}, "cores: expected a whole number, got 1.5"),
        ({"cores": True}, "cores: expected a number above 0, got True"),
        ({"rate": "fast"}, "rate: expected a number above 0, got 'fast'"),
        ({"times": "abc"}, "times: expected numbers of seconds, got 'abc'"),
        ({"times": [0.5]}, "times: the times of --replay are all the same, or fewer than two"),
        ({"times": [1.0, 1.0]}, "times: the times of --replay are all the same, or fewer than two"),
        ({"times": [0.0, float("nan")]}, "times: the times of --replay are all the same, or fewer than two"),
    ],
)
def test_wrong_arguments_from_python_are_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ToolError, match=re.escape(message)):
        tune({"backend": "Identity"}, [b"image"], **wrong)
