"""The pure parts of the load tester: schedules, judgements, the search, comparisons, plots."""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from torchpipe_py import files
from torchpipe_py.loadtest import arrivals, sweep
from torchpipe_py.loadtest.arrivals import (
    CallTime,
    ClosedLoop,
    OpenLoop,
    constant_times,
    cut,
    deal,
    make_load,
    poisson_times,
    rate_of,
    read_replay,
    rescale,
)
from torchpipe_py.loadtest.errors import CannotRunError
from torchpipe_py.loadtest.measure import statistics, verdict
from torchpipe_py.loadtest.measure.gpu import summarize_gpus
from torchpipe_py.loadtest.plans import make_plans
from torchpipe_py.loadtest.records import NO_REPLY, CallLog, Records, collect, shared_words
from torchpipe_py.loadtest.report import compare, plots
from torchpipe_py.loadtest.report.summary import write_json

MS = 1_000_000
SECOND = 1000 * MS


# --- schedules


def test_constant_rate_is_staggered_over_the_clients() -> None:
    times = cut(constant_times(10), None, 1.0)
    assert list(times) == [tenth * 100 * MS for tenth in range(10)]
    assert [list(share)[:2] for share in deal(times, 4)] == [
        [0, 400 * MS],
        [100 * MS, 500 * MS],
        [200 * MS, 600 * MS],
        [300 * MS, 700 * MS],
    ]


@pytest.mark.parametrize("clients", [1, 3, 20])
def test_shares_are_the_schedule_whatever_the_number_of_clients(clients: int) -> None:
    times = cut(poisson_times(50, seed=4), 100, None)
    assert sorted(time for share in deal(times, clients) for time in share) == list(times)


def test_poisson_times_have_the_rate_and_the_spread_of_a_poisson_process() -> None:
    times = cut(poisson_times(200, seed=1), 20_000, None)
    gaps = [(after - before) / SECOND for before, after in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert mean == pytest.approx(1 / 200, rel=0.03)
    assert deviation == pytest.approx(mean, rel=0.03)  # as of exponential gaps
    per_second = [0] * (times[-1] // SECOND + 1)
    for time in times:
        per_second[time // SECOND] += 1
    whole = per_second[:-1]
    variance = sum((count - 200) ** 2 for count in whole) / len(whole)
    assert 120 < variance < 300  # of a Poisson count: its mean


def test_poisson_times_follow_the_seed() -> None:
    first, same, other = (cut(poisson_times(50, seed), 50, None) for seed in (1, 1, 2))
    assert first == same != other
    assert list(first) == sorted(first)


def test_a_schedule_ends_by_number_or_by_time() -> None:
    assert len(cut(poisson_times(1000, 0), 7, None)) == 7
    assert max(cut(poisson_times(1000, 0), None, 0.5)) < SECOND / 2
    assert len(cut(constant_times(10), 100, 1.0)) == 10


def test_replay_at_another_rate() -> None:
    times = rescale([1.0, 1.5, 3.0], rate=4.0)
    assert times == [0.25, 0.375, 0.75]
    assert rate_of(cut(times, None, None)) == pytest.approx(4.0)
    with pytest.raises(CannotRunError, match="--rate: the times of --replay are all the same"):
        rescale([2.0, 2.0], 1.0)


def options(**changes: Any) -> argparse.Namespace:
    usual = {"arrivals": "constant", "rate": 100.0, "seed": 0, "replay": None, "replay_column": None}
    usual |= {"request_client": 3, "request_batch": 1, "total_number": None, "duration": None, "warmup": 0}
    return argparse.Namespace(**{**usual, "timeout": 10.0, "slo_p99": None, **changes})


@pytest.mark.parametrize("arrivals", ["constant", "poisson"])
@pytest.mark.parametrize(("total", "batch"), [(103, 8), (100, 1), (2, 5), (8, 8)])
def test_open_loads_have_their_total(arrivals: str, total: int, batch: int) -> None:
    load = make_load(options(arrivals=arrivals, total_number=total, request_batch=batch), 5)
    assert load.total == sum(plan.share for plan in load.plans) == sum(load.offered_images()) == total
    assert load.times is not None
    assert len(load.times) == -(-total // batch)
    assert [plan.calls for plan in load.plans] == [len(share) for share in deal(load.times, 3)]


def test_rate_is_in_images() -> None:
    load = make_load(options(rate=100.0, request_batch=4, duration=2.0), 1)
    assert load.times is not None
    assert len(load.times) == 50
    assert load.offered_rate == pytest.approx(100.0)
    assert load.offered_images() == [100, 100]


@pytest.mark.parametrize("rate", [1e-300, 5e-324, 1e-9])
@pytest.mark.parametrize("arrivals", ["constant", "poisson", "replay"])
def test_a_call_that_is_never_due_is_refused(rate: float, arrivals: str, tmp_path: Path) -> None:
    path = tmp_path / "times"
    path.write_text("0\n1\n2\n")
    with pytest.raises(CannotRunError, match="a call is due more than 116 days after the start: the rate is too low"):
        make_load(options(rate=rate, arrivals=arrivals, total_number=20, replay=path, request_batch=2), 1)
    path.write_text("0\n1e300\n")
    with pytest.raises(CannotRunError, match="more than 116 days"):
        make_load(options(rate=None, arrivals="replay", replay=path), 1)


def test_records_of_a_run_of_days_take_no_memory_in_advance() -> None:
    words = shared_words(2**40)
    words[2**39] = 7
    assert (words[0], words[2**39]) == (0, 7)


def test_closed_load_by_time_owes_nothing() -> None:
    load = make_load(options(arrivals="closed", rate=None, duration=2.0), 1)
    assert (load.total, load.unsent(7), load.until) == (None, 0, 2 * SECOND)
    load = make_load(options(arrivals="closed", rate=None, total_number=10), 1)
    assert (load.total, load.unsent(7), load.until) == (10, 7, None)


# --- replay files


def test_replay_of_lines_and_of_a_column(tmp_path: Path) -> None:
    path = tmp_path / "times"
    path.write_text("# a comment\n0\n\n0.5  # half\n0.5\n2e0\n")
    assert read_replay(path, None) == [0, 0.5, 0.5, 2.0]
    path.write_text("id,at\nx,0.25\ny,1\n")
    assert read_replay(path, "at") == [0.25, 1.0]


@pytest.mark.parametrize(
    ("text", "column", "why"),
    [
        ("0\nhalf\n", None, r"times, line 2: 'half' is not a number of seconds"),
        ("0\nnan\n", None, r"times, line 2: 'nan' is not a number"),
        ("0\n2\n1\n", None, r"times, line 3: 1 is before 2"),
        ("-1\n", None, r"times, line 1: -1 is before 0"),
        ("# nothing\n", None, r"times: no time in it"),
        ("1700000000\n", None, r"times: the first time is 1700000000 s; times count from the start"),
        ("id,at\nx,\n", "at", r"times, line 2: '' is not a number"),
        ("id,at\nx,1\n", "when", r"--replay_column when: .*it has: id, at"),
        ("", "when", r"it has: none"),
        ('id,at\n"x,1\n' + "y" * 200_000, "at", r"times, after line 1: field larger than field limit"),
    ],
)
def test_replay_errors_name_file_and_line(text: str, column: str | None, why: str, tmp_path: Path) -> None:
    path = tmp_path / "times"
    path.write_text(text)
    with pytest.raises(CannotRunError, match=why):
        read_replay(path, column)


# --- arrivals


def test_open_loop_sends_late_calls_at_once_and_gives_up_in_the_end() -> None:
    started = 1  # long ago
    late = OpenLoop([0, 5], started, until=2**62, is_stopping=lambda: False)
    turn = late.wait_next()
    assert turn is not None
    assert turn.due == 1 < turn.sent
    assert late.wait_next() is not None
    assert late.wait_next() is None
    assert OpenLoop([0], started, until=5, is_stopping=lambda: False).wait_next() is None
    assert OpenLoop([2**61], started, until=2**62, is_stopping=lambda: True).wait_next() is None


def test_closed_loop_ends_by_time() -> None:
    assert ClosedLoop(until=5).wait_next() is None
    turn = ClosedLoop(until=None).wait_next()
    assert turn is not None
    assert turn.due == turn.sent


# --- late sends


def lags(*calls: tuple[int, int, int]) -> list[tuple[int, int]]:
    """`(late, lag)` of calls that were due, sent and done at these times."""
    meter, measured = arrivals.LagMeter(), []
    for due, sent, done in calls:
        measured.append(meter.sent(CallTime(due, sent)))
        meter.free(done)
    return measured


def test_waiting_for_a_reply_is_no_fault_of_the_tester() -> None:
    assert lags((0, 0, 90), (10, 90, 95), (20, 95, 96), (200, 200, 201)) == [(0, 0), (80, 0), (75, 0), (0, 0)]


def test_own_delay_lasts_until_it_is_made_up_for() -> None:
    assert lags((0, 50, 51), (10, 51, 52), (20, 52, 53), (60, 60, 61)) == [(50, 50), (41, 41), (32, 32), (0, 0)]


def made_records(*rows: tuple[int, int]) -> Records:
    """From `(late, lag)` in ms: calls that took 1 ms."""
    count = len(rows)
    late, lag = ([row[at] * MS for row in rows] for at in (0, 1))
    due = [number * 10 * MS for number in range(count)]
    end = [at + wait + MS for at, wait in zip(due, late, strict=True)]
    return Records(due, end, [wait + MS for wait in late], [MS] * count, [1] * count, [1] * count, late, lag)


def test_late_sends_are_blamed_on_the_greater_part() -> None:
    lateness = verdict.judge_lateness(made_records((0, 0), (1, 1), (5, 5), (5, 1), (2, 2), (100, 0)))
    assert (lateness.calls, lateness.by_tester, lateness.by_waiting, lateness.worst_ms) == (6, 2, 2, 100)
    assert "33.3% of the sends" in lateness.limits[0]
    assert "raise --request_client" in lateness.warnings(4, 400, 10.0)[0]
    assert "single answers took long" in lateness.warnings(4, 40, 1.0)[0]


def test_few_late_sends_are_nothing_to_speak_of() -> None:
    lateness = verdict.judge_lateness(made_records(*[(0, 0)] * 200, (5, 5), (5, 0)))
    assert (lateness.limits, lateness.warnings(4, 400, 10.0)) == ([], [])
    empty = verdict.judge_lateness(made_records())
    assert (empty.limits, empty.warnings(4, 0, 0)) == ([], [])


# --- stability


NOISE = random.Random(0)


@pytest.mark.parametrize(
    ("latencies_ms", "changes", "reason"),
    [
        ([NOISE.uniform(5, 15) for _ in range(1000)], {}, None),
        ([5.0] * 450 + [1000.0 - 10 * call for call in range(100)] + [5.0] * 450, {}, None),  # a stall in the middle
        ([5 + call / 10 for call in range(1000)], {}, "a queue builds up"),
        ([5.0] * 1000, {"window": 11.0}, "90.9 images/s were answered of 100.0 offered"),
        ([5.0] * 1000, {"window": 10.4}, None),
        ([5.0] * 1000, {"unsent": 3}, "never sent: 3 images"),
        ([1.0, 1000.0], {}, None),  # two calls are no trend
        ([0.1] * 50 + [5.0] * 50, {}, None),  # a growth of less than 10 ms is none
    ],
    ids=["steady", "stall", "growth", "slow", "a little slow", "unsent", "two calls", "small growth"],
)
def test_stability(latencies_ms: list[float], changes: dict[str, float], reason: str | None) -> None:
    figures: dict[str, Any] = {"offered": 100.0, "answered": 1000, "window": 10.0, "unsent": 0, **changes}
    stability = verdict.judge_stability([int(ms * MS) for ms in latencies_ms], **figures)
    assert stability.is_stable is (reason is None)
    assert [reason in text for text in stability.reasons if reason is not None] == [True] * (reason is not None)


# --- series


def test_per_second_counts_images_where_they_belong() -> None:
    logs, plans = [CallLog(3), CallLog(1)], make_plans(2, 2, 7, 1, 0)
    logs[0].delay(100 * MS, 0)
    logs[0].record(1200 * MS, SECOND + 1100 * MS, 2)  # due at -0.1 s of the second second, sent in it, done later
    logs[0].record(100 * MS, SECOND + 1300 * MS, NO_REPLY)
    logs[1].record(50 * MS, SECOND + 100 * MS, 1)
    records = collect(logs, plans, start=SECOND)
    assert records.due == [-100 * MS, 50 * MS, 1200 * MS]
    assert records.actual == [1100 * MS, 50 * MS, 100 * MS]
    rows = statistics.per_second(records, [4, 3])
    assert [(row["offered"], row["sent"], row["ok"], row["failed"]) for row in rows] == [(4, 4, 1, 1), (3, 2, 2, 2)]


def test_percentile_curve_goes_to_the_longest_call() -> None:
    curve = statistics.percentile_curve([call * MS for call in range(1, 1001)])
    assert curve[0] == (0, 1.0)
    assert curve[-1][0] == pytest.approx(99.9)
    assert [percent for percent, _ in curve] == sorted(percent for percent, _ in curve)
    assert statistics.percentile_curve([]) == []
    assert statistics.percentile_curve([5 * MS]) == [(0.0, 5.0)]


def test_histogram_has_every_call() -> None:
    latencies = [random.Random(0).randrange(1, 10**9) for _ in range(500)]
    bins = statistics.histogram(latencies)
    assert sum(count for *_, count in bins) == 500
    assert bins[0][0] == pytest.approx(min(latencies) / MS)
    assert sum(count for *_, count in statistics.histogram([5 * MS] * 9)) == 9


# --- sweeps and searches


@pytest.mark.parametrize(
    ("text", "name", "values"),
    [
        ("clients=1,2,5", "clients", [1, 2, 5]),
        ("rate=100:400:100", "rate", [100, 200, 300, 400]),
        ("rate=0.1:0.3:0.1,5", "rate", [0.1, 0.2, 0.3, 5]),
        ("clients=2:7:2", "clients", [2, 4, 6]),
    ],
)
def test_points_of_a_sweep(text: str, name: str, values: list[float]) -> None:
    points = sweep.parse_sweep(text)
    assert points.name == name
    assert points.values == pytest.approx(values)


@pytest.mark.parametrize(
    "text",
    [
        "clients",
        "clients=",
        "batch=1",
        "clients=0",
        "clients=1.5",
        "rate=-1",
        "rate=5:1:1",
        "rate=1:5:0",
        "rate=1:100000:0.001",
    ],
)
def test_sweeps_that_are_none(text: str) -> None:
    with pytest.raises(CannotRunError, match=r"--sweep "):
        sweep.parse_sweep(text)


@pytest.mark.parametrize("limit", [1.0, 40.0, 95.0, 101.0, 400.0])
@pytest.mark.parametrize("estimate", [100.0, 120.0])
def test_search_finds_the_limit(limit: float, estimate: float) -> None:
    search = sweep.search_rate(lambda rate: rate <= limit, estimate)
    assert search.best is not None
    assert search.best <= limit <= search.best * (1 + sweep.TOLERANCE) + 1e-9
    assert len({rate for rate, _ in search.probes}) == len(search.probes) <= sweep.MOST_PROBES


def test_search_without_a_limit_ends() -> None:
    assert sweep.search_rate(lambda _: False, 100.0).best is None
    search = sweep.search_rate(lambda _: True, 100.0)
    assert search.too_much is None
    assert search.best == max(rate for rate, _ in search.probes)


def test_search_survives_noise() -> None:
    noise = random.Random(3)
    search = sweep.search_rate(lambda rate: rate * noise.uniform(0.9, 1.1) <= 100, 130.0)
    assert search.best is not None
    assert 80 < search.best < 120


class FakeRunner:
    """Runs that cost nothing: latency follows from the load, up to a limit of 100 images a second."""

    def __init__(self, interrupted_at: int | None = None) -> None:
        self.seen: list[argparse.Namespace] = []
        self._interrupted_at = interrupted_at

    def __call__(self, settings: argparse.Namespace) -> dict[str, Any]:
        self.seen.append(settings)
        rate = settings.rate or 100.0
        interrupted = len(self.seen) == self._interrupted_at
        report = made_report(p99=rate, interrupted=interrupted, goodput=min(rate, 100.0), stable=rate <= 100)
        return verdict.judge(report, settings.slo_p99)


def made_report(p99: float = 10.0, **changes: Any) -> dict[str, Any]:
    latency = dict.fromkeys(("mean", "p50", "p90", "p99", "p99_9", "max", "min"), p99)
    usual = {"qps": 100.0, "calls_per_s": 100.0, "goodput": 100.0, "latency_ms": latency, "errors": {}, "warnings": []}
    usual |= {"images_ok": 100, "images_failed": 0, "images_ok_per_second": [100] * 12, "interrupted": False}
    usual |= {"valid": True, "machine": {"cores": 2}, "versions": {"python": "3.11"}, "settings": {"request_client": 5}}
    return {**usual, "image_files": 4, "image_bytes_mean": 10.0, **changes}


def test_search_of_a_rate_that_holds_the_slo() -> None:
    runner, told = FakeRunner(), []
    report = sweep.run_search(runner, options(rate=None, slo_p99=60.0), lambda name, _: told.append(name))
    assert report["exit_status"] == verdict.EXIT_OK
    assert report["search"]["best_rate"] == pytest.approx(60.0, rel=0.03)
    assert runner.seen[0].arrivals == "closed"
    assert {settings.arrivals for settings in runner.seen[1:]} == {"constant"}
    assert len(report["runs"]) == len(runner.seen) == len(told)


def test_search_that_finds_nothing_or_is_interrupted() -> None:
    report = sweep.run_search(FakeRunner(), options(rate=None, slo_p99=0.001), lambda *_: None)
    assert (report["exit_status"], report["search"]["best_rate"]) == (verdict.EXIT_SLO_MISSED, None)
    report = sweep.run_search(FakeRunner(interrupted_at=3), options(rate=None, slo_p99=60.0), lambda *_: None)
    assert (report["exit_status"], len(report["runs"])) == (verdict.EXIT_INTERRUPTED, 3)


def test_sweep_ends_at_an_interrupt() -> None:
    points = sweep.parse_sweep("rate=10,20,30")
    report = sweep.run_sweep(FakeRunner(interrupted_at=2), options(), points, lambda *_: None)
    assert (report["exit_status"], len(report["runs"])) == (verdict.EXIT_INTERRUPTED, 2)
    assert report["stopped"] == "interrupted at rate 20"


@pytest.mark.parametrize(("error", "status"), [(CannotRunError("gone"), 1), (KeyboardInterrupt(), 130)])
def test_runs_that_are_done_survive_one_that_cannot_start(error: BaseException, status: int) -> None:
    runner = FakeRunner()

    def run(settings: argparse.Namespace) -> dict[str, Any]:
        if len(runner.seen) == 2:
            raise error
        return runner(settings)

    report = sweep.run_sweep(run, options(), sweep.parse_sweep("rate=10,20,30"), lambda *_: None)
    assert (report["exit_status"], len(report["runs"])) == (status, 2)
    assert "before rate 30" in report["stopped"]
    with pytest.raises(type(error)):
        sweep.run_search(run, options(rate=None, slo_p99=60.0), lambda *_: None)  # of it there is nothing yet


@pytest.mark.parametrize(
    ("slo_ms", "changes", "status"),
    [
        (None, {}, 0),
        (1, {"errors": {"timeout": 1}}, 2),
        (None, {"stable": False}, 2),
        (9.9, {}, 3),
        (10, {}, 0),
        (10, {"latency_ms": None}, 3),
        (10, {"images_unsent": 1}, 3),
        (None, {"interrupted": True, "errors": {"timeout": 1}}, 130),
    ],
)
def test_exit_status(slo_ms: float | None, changes: dict[str, Any], status: int) -> None:
    assert verdict.judge(made_report(**changes), slo_ms)["exit_status"] == status


def test_the_worst_status_of_several_runs() -> None:
    assert (verdict.worst([0, 3, 2]), verdict.worst([])) == (2, 0)


# --- comparisons


def test_interval_shows_a_difference_that_is_there() -> None:
    noise = random.Random(0)
    base = [noise.randrange(90, 110) for _ in range(30)]
    faster = [round(1.3 * images) for images in base]
    interval = compare.ratio_interval(base, faster)
    assert interval is not None
    low, high = interval
    assert 1.2 < low < 1.3 < high < 1.4
    assert interval == compare.ratio_interval(base, faster)
    same = compare.ratio_interval(base, base[::-1])
    assert same is not None
    assert same[0] < 1 < same[1]
    assert compare.ratio_interval([1, 2], base) is None


def test_comparison_says_what_is_different() -> None:
    other = made_report(p99=20.0, settings={"request_client": 6}, machine={"cores": 4}, image_files=5, valid=False)
    text = compare.comparison(made_report(), other)
    for line in (
        "DIFFERENT settings: request_client is 5 in A, 6 in B",
        "DIFFERENT machine: cores is 2 in A, 4 in B",
        "DIFFERENT images: image_files is 4 in A, 5 in B",
        "B: the run is not valid",
        "includes 1: no difference is shown",
    ):
        assert line in text
    assert "DIFFERENT" not in compare.comparison(made_report(), made_report())


@pytest.mark.parametrize(
    ("changes", "count"),
    [({}, 0), ({"qps": 94.0}, 1), ({"goodput": 50.0}, 1), ({"p99": 10.6}, 1), ({"qps": 96.0, "p99": 10.4}, 0)],
)
def test_regressions(changes: dict[str, Any], count: int) -> None:
    assert len(compare.regressions(made_report(), made_report(**changes), 5.0)) == count


def test_a_server_that_answers_nothing_any_more_is_a_regression() -> None:
    lines = compare.regressions(made_report(), made_report(latency_ms=None, goodput=0.0), 5.0)
    assert any("no result" in line for line in lines)
    assert "n/a" in compare.comparison(made_report(), made_report(latency_ms=None))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "not a JSON file"),
        ("[" * 200_000, "not a JSON file"),
        ("\ufeff[]", "not a report"),
        ('{"runs": [], "kind": "sweep"}', "of a sweep"),
    ],
)
def test_files_that_are_no_report(text: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(CannotRunError, match=why):
        compare.read_report(path)


@pytest.mark.parametrize("read", [compare.read_report, lambda path: read_replay(path, None)])
def test_a_file_without_an_end_is_no_report(read: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_READ", 2**20)
    with pytest.raises(CannotRunError, match="/dev/zero: it has more than 1 MiB"):
        read(Path("/dev/zero"))


# --- GPUs and plots


def test_gpu_samples() -> None:
    lines = ["1, NVIDIA X, 10, 500, 1000", "0, NVIDIA Y, [N/A], 5, 10", "1, NVIDIA X, 30, 700, 1000", "1, NVIDIA X, 9"]
    first, second = summarize_gpus(lines)
    assert (first["name"], first["utilization_mean"], first["memory_used_max_mib"]) == ("NVIDIA Y", None, 5)
    assert (second["samples"], second["utilization_mean"], second["utilization_max"]) == (2, 20, 30)
    assert summarize_gpus([]) == []


@pytest.mark.parametrize(
    "axis",
    [
        plots.linear_axis("x", [3, 17]),
        plots.linear_axis("x", [], whole=True),
        plots.linear_axis("x", [5, 5], from_zero=False),
        plots.span_axis("x", 0, 7, step_at_least=1),
        plots.log_axis("x", 0.3, 5000),
        plots.log_axis("x", 2, 3),
        plots.percentile_axis("x", 99.95),
        plots.value_axis("x", [1, 1, 1, 1000]),
    ],
    ids=lambda axis: str([text for _, text in axis.ticks]),
)
def test_ticks_are_on_their_axis(axis: plots.Axis) -> None:
    places = [axis.place(value) for value, _ in axis.ticks]
    assert len(places) >= 2
    assert places == sorted(places)
    assert all(-0.01 <= place <= 1.01 for place in places)
    assert len({text for _, text in axis.ticks}) == len(places)


def test_charts_escape_names_and_stay_in_their_frame() -> None:
    x, y = plots.linear_axis("<x>", [0, 10]), plots.linear_axis("y", [0, 10])
    line = plots.Line("<b>", [(0, 1), None, (20, 50)], "blue", labels=["one", "", "two"])
    text = plots.chart("a & b", x, y, [line, plots.Rule("limit", 500, "red"), plots.Bars("n", [(0, 1, 5)], "teal")])
    assert "<b>" not in text
    assert "a &amp; b" in text
    assert 'class="rule"' not in text  # above the plot
    assert text.count("<circle") == 2  # points without a neighbour


def test_a_report_is_utf_8_whatever_its_paths_are(tmp_path: Path) -> None:
    report, file = {"images": "größe/\udcff"}, tmp_path / "report.json"
    write_json(report, file)
    assert '"images": "größe/\\udcff"' in file.read_text(encoding="utf-8")
    assert json.loads(file.read_text(encoding="utf-8")) == report
