"""Counters, gauges and histograms of custom backends, in ``pipe.stats()``."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from conftest import Register
from kit import process_backends

from torchpipe_py import SetupError, WorkerDied, pipe
from torchpipe_py.metrics import (
    DEFAULT_BUCKETS,
    MOST_LABEL_SETS,
    MOST_METRICS,
    OTHER,
    Counter,
    Gauge,
    Histogram,
    Metrics,
    collect_in,
    summed,
    totals,
)


class Measured:
    """Runs what ``data`` is, with its metrics."""

    max: int = 2
    made: ClassVar[list[Measured]] = []

    def init(self, config: dict[str, Any]) -> None:
        self.found = Counter("faces_total", "Faces found", ["camera"])
        self.level = Gauge("level", "Fill level")
        self.seconds = Histogram("match_seconds", "Time of a match", buckets=[0.1, 1.0])

    def forward(self, items: list[dict[str, Any]]) -> None:
        for item in items:
            item["data"](self)
            item["result"] = True


def values(metrics: dict[str, Any], name: str) -> dict[tuple[str, ...], Any]:
    """The samples of a metric by the values of their labels."""
    return {
        tuple(sample["labels"].values()): sample.get("value", (sample.get("counts"), sample.get("sum")))
        for sample in metrics[name]["samples"]
    }


def measure(restored: Register, *steps: Callable[[Measured], object], backend: str = "Measured") -> dict[str, Any]:
    restored.register_backend(Measured, "Measured")
    with pipe({"backend": backend, "instance_num": 3}) as run:
        for step in steps:
            run({"data": step})
        metrics: dict[str, Any] = run.stats()["metrics"]
        return metrics


def test_stats_have_what_all_instances_counted(restored: Register) -> None:
    def step(own: Measured) -> None:
        own.found.labels("door").inc()
        own.found.labels(camera="yard").inc(2.5)
        own.level.inc(7)
        own.level.dec()
        for value in (0.1, 0.2, 5):
            own.seconds.observe(value)

    metrics = measure(restored, step, step, lambda own: own.level.inc(3))
    assert metrics["faces"] == {
        "kind": "counter",
        "help": "Faces found",
        "labels": ["camera"],
        "samples": [{"labels": {"camera": "door"}, "value": 2.0}, {"labels": {"camera": "yard"}, "value": 5.0}],
    }
    assert values(metrics, "level") == {(): 15.0}  # the sum, whichever instances ran the steps
    assert metrics["match_seconds"]["bounds"] == [0.1, 1.0]
    assert values(metrics, "match_seconds") == {(): ([2, 2, 2], pytest.approx(10.6))}


def test_metrics_without_labels_are_there_before_the_first_value(restored: Register) -> None:
    metrics = measure(restored)
    assert (values(metrics, "level"), values(metrics, "match_seconds")) == ({(): 0.0}, {(): ([0, 0, 0], 0.0)})
    assert metrics["faces"]["samples"] == []


def test_two_pipes_do_not_share_metrics(restored: Register) -> None:
    counted = measure(restored, lambda own: own.level.set(1))
    assert (values(counted, "level"), values(measure(restored), "level")) == ({(): 1.0}, {(): 0.0})


def test_label_sets_beyond_the_limit_count_as_other(restored: Register, caplog: pytest.LogCaptureFixture) -> None:
    steps = [lambda own, index=index: own.found.labels(index).inc() for index in range(MOST_LABEL_SETS + 5)]
    found = values(measure(restored, *steps), "faces")
    assert (len(found), found[OTHER,], sum(found.values())) == (MOST_LABEL_SETS + 1, 5.0, MOST_LABEL_SETS + 5)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert line == f"metric 'faces' has more than {MOST_LABEL_SETS} label sets: further ones count as 'other'"


def test_values_that_are_not_finite_are_ignored_and_logged_once(
    restored: Register, caplog: pytest.LogCaptureFixture
) -> None:
    def step(own: Measured) -> None:
        for value in (math.nan, math.inf, -math.inf):
            own.level.set(value)
            own.seconds.observe(value)

    metrics = measure(restored, step)
    assert (values(metrics, "level"), values(metrics, "match_seconds")) == ({(): 0.0}, {(): ([0, 0, 0], 0.0)})
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["metric 'level' ignores nan", "metric 'match_seconds' ignores nan"]


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda own: own.found.inc(), r"has labels \(camera\): use .labels\(\)"),
        (lambda own: own.found.labels(), "the labels of metric 'faces' are: camera"),
        (lambda own: own.found.labels("a", "b"), "the labels of metric 'faces' are: camera"),
        (lambda own: own.found.labels(cam="a"), "the labels of metric 'faces' are: camera"),
        (lambda own: own.level.labels("a"), "the labels of metric 'level' are: none"),
        (lambda own: own.found.labels("a").inc(-1), "a counter only grows"),
    ],
)
def test_refuses_wrong_labels_and_amounts(restored: Register, step: Any, message: str) -> None:
    def check(own: Measured) -> None:
        with pytest.raises(ValueError, match=message):
            step(own)

    assert values(measure(restored, check), "level") == {(): 0.0}


DECLARED: dict[str, Callable[[], object]] = {
    "a name has letters": lambda: Counter("a name", "x"),
    "not torchpipe_ in front": lambda: Gauge("torchpipe_mine", "x"),
    "no label can be named 'le'": lambda: Gauge("mine", "x", ["le"]),
    "no label can be named '__a'": lambda: Gauge("mine", "x", ["__a"]),
    "no label can be named '1'": lambda: Gauge("mine", "x", ["1"]),
    "a list of at most 10 different names": lambda: Gauge("mine", "x", ["a", "a"]),
    "at most 10 different": lambda: Gauge("mine", "x", "camera"),
    "in ascending order": lambda: Histogram("mine", "x", buckets=[2, 1]),
    "1 to 64 numbers": lambda: Histogram("mine", "x", buckets=[math.inf]),
    "declared already, as a counter": lambda: (Counter("mine", "x"), Gauge("mine", "x")),
    "with other buckets or labels": lambda: (Counter("mine", "x"), Counter("mine", "x", ["a"])),
    "the same names for 'mine'": lambda: (Histogram("mine", "x"), Gauge("mine_sum", "x")),
    f"at most {MOST_METRICS} metrics": lambda: [Gauge(f"mine_{index}", "x") for index in range(MOST_METRICS + 1)],
}


@pytest.mark.parametrize("message", DECLARED)
def test_refuses_invalid_declarations_when_the_pipe_is_built(restored: Register, message: str) -> None:
    class Wrong:
        def init(self, config: dict[str, Any]) -> None:
            DECLARED[message]()

        def forward(self, items: list[dict[str, Any]]) -> None:
            pass

    restored.register_backend(Wrong, "Wrong")
    with pytest.raises(SetupError, match=message):
        pipe({"backend": "Wrong"})


def test_refuses_declarations_outside_of_a_backend() -> None:
    with pytest.raises(RuntimeError, match="in `init` or `setup` of a backend or filter"):
        Counter("mine", "x")


def test_default_buckets_and_an_infinite_one() -> None:
    collect_in(metrics := Metrics())
    try:
        Histogram("mine", "x").observe(0.005)
        Histogram("other", "x", buckets=(1, math.inf))
    finally:
        collect_in(None)
    stats = metrics.stats()
    assert stats["mine"]["bounds"] == list(DEFAULT_BUCKETS)
    assert values(stats, "mine")[()][0][0] == 1
    assert stats["other"]["bounds"] == [1.0]


def test_process_brings_its_metrics_to_the_pipe(restored: Register) -> None:
    restored.register_backend(process_backends.Remote, "Remote")
    with pipe({"backend": "Process[Remote]", "instance_num": 2}) as run:
        for value in (0, 5, 0, 5):
            run({"data": value})
        metrics = run.stats()["metrics"]
    assert values(metrics, "faces") == {("0",): 2.0, ("5",): 2.0}
    assert values(metrics, "match_seconds") == {(): ([2, 0, 2], 10.0)}


def gauges(run: Any) -> tuple[dict[Any, Any], dict[Any, Any]]:
    metrics = run.stats()["metrics"]
    return values(metrics, "level"), values(metrics, "by_size")


@pytest.mark.parametrize("backend", ["Levelled", "Process[Levelled]"])
def test_gauge_is_the_sum_over_instances(restored: Register, tmp_path: Path, backend: str) -> None:
    restored.register_backend(process_backends.Levelled, "Levelled")
    with pipe({"backend": backend, "instance_num": 2}) as run:
        run([{"data": level, "path": str(tmp_path)} for level in (5, 40)])
        assert gauges(run) == ({(): 45.0}, {("False",): 5.0, ("True",): 40.0})


def test_gauge_of_a_process_that_died_no_longer_counts(restored: Register, tmp_path: Path) -> None:
    restored.register_backend(process_backends.Levelled, "Levelled")
    with pipe({"backend": "Process[Levelled]", "instance_num": 2}) as run:
        run([{"data": level, "path": str(tmp_path)} for level in (5, 40)])
        with pytest.raises(WorkerDied):
            run({"data": -1})
        assert gauges(run) in [
            ({(): 5.0}, {("False",): 5.0}),
            ({(): 40.0}, {("True",): 40.0}),
        ]


def test_changes_that_arrive_after_their_process_died_count_but_for_gauges() -> None:
    own = Metrics()
    sent = {"level": family("gauge", (("x",), 3)), "faces": family("counter", (("x",), 1))}
    own.enter("first")
    own.merge(sent, "first")
    own.enter("second")
    own.merge(sent, "second")
    assert values(own.stats(), "level") == {("x",): 6.0}
    own.leave("first")
    own.merge(sent, "first")
    assert (values(own.stats(), "level"), values(own.stats(), "faces")) == ({("x",): 3.0}, {("x",): 3.0})


# -- sums -----------------------------------------------------------------------------------------------------------


def family(kind: str, *samples: Any, labels: tuple[str, ...] = ("camera",), **more: Any) -> dict[str, Any]:
    found = [{"labels": dict(zip(labels, key, strict=True)), "value": value} for key, value in samples]
    return {"kind": kind, "help": "x", "labels": list(labels), "samples": found, **more}


def test_sums_add_samples_with_the_same_labels() -> None:
    some = {"a": family("counter", (("x",), 1), (("y",), 2)), "b": family("gauge", (("x",), 3))}
    more = {"a": family("counter", (("y",), 4), (("z",), 8)), "b": family("gauge", (("x",), -1))}
    assert values(summed([some, more]), "a") == {("x",): 1, ("y",): 6, ("z",): 8}
    assert values(summed([some, more]), "b") == {("x",): 2}
    assert totals(some).keys() == {"a"}


def test_sums_take_the_last_of_different_declarations() -> None:
    some, more = {"a": family("counter", (("x",), 1))}, {"a": family("gauge", (("x",), 5))}
    assert summed([some, more]) == more
    assert summed([{"a": family("counter")}, {"a_total": family("gauge")}]).keys() == {"a"}


def test_sums_stay_within_the_limits_of_one_process() -> None:
    parts = [{"a": family("counter", ((f"{part} {index}",), 1.0))} for part in range(20) for index in range(20)]
    found = values(summed(parts), "a")
    assert (len(found), sum(found.values())) == (MOST_LABEL_SETS + 1, 400)
    many = [{f"m{index}": family("gauge")} for index in range(2 * MOST_METRICS)]
    assert len(summed(many)) == MOST_METRICS
