"""The pure parts of the load tester: schedules, judgements, sweeps and searches, comparisons, files."""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from torchpipe_py.idl import load_idl
from torchpipe_py.tools.load import client, compare, judge, run, wire
from torchpipe_py.tools.load.arrivals import constant_times, cut, deal, make_load, poisson_times, rate_of, read_replay
from torchpipe_py.tools.load.client import LagMeter, _Selector
from torchpipe_py.tools.load.measure import CpuMeter, cpu_limits, summarize_gpus
from torchpipe_py.tools.load.records import NO_REPLY, Answer, CallLog, Records, Tally, collect, error_name
from torchpipe_py.tools.load.report import search_line
from torchpipe_py.tools.report import ToolError

MS = 1_000_000
SECOND = 1000 * MS


# --- schedules


def test_schedules_are_dealt_out_whole_and_end_by_number_or_time() -> None:
    times = cut(constant_times(10), None, 1.0)
    assert list(times) == [tenth * 100 * MS for tenth in range(10)]
    assert [share[0] // MS for share in deal(times, 4)] == [0, 100, 200, 300]
    for clients in (1, 3, 20):
        times = cut(poisson_times(50, seed=4), 100, None)
        assert sorted(time for share in deal(times, clients) for time in share) == list(times)
    assert len(cut(poisson_times(1000, 0), 7, None)) == 7
    assert max(cut(poisson_times(1000, 0), None, 0.5)) < SECOND / 2
    assert len(cut(constant_times(10), 100, 1.0)) == 10
    first, same, other = (cut(poisson_times(50, seed), 50, None) for seed in (1, 1, 2))
    assert first == same != other
    assert rate_of(cut(poisson_times(200, 1), 20_000, None)) == pytest.approx(200, rel=0.03)


def options(**changes: Any) -> argparse.Namespace:
    usual = {"arrivals": "constant", "rate": 100.0, "seed": 0, "replay": None, "replay_column": None}
    usual |= {"request_client": 3, "request_batch": 1, "total_number": None, "duration": None, "warmup": 0}
    return argparse.Namespace(**{**usual, "timeout": 10.0, "slo_p99": None, **changes})


def test_loads_by_rate_and_by_time() -> None:
    load = make_load(options(rate=100.0, request_batch=4, duration=2.0), 1)
    assert load.times is not None
    assert len(load.times) == 50
    assert load.offered_rate == pytest.approx(100.0)
    assert load.offered_images() == [100, 100]
    load = make_load(options(arrivals="closed", rate=None, duration=2.0), 1)
    assert (load.total, load.unsent(7), load.until, load.warmup_s) == (None, 0, 2 * SECOND, inf)
    load = make_load(options(arrivals="closed", rate=None, duration=2.0, warmup=None), 1)
    assert (load.plans[0].warmup, load.warmup_s) == (50, 0.1)
    load = make_load(options(arrivals="closed", rate=None, total_number=10), 1)
    assert (load.total, load.unsent(7), load.until, load.warmup_s) == (10, 7, None, inf)


@pytest.mark.parametrize("rate", [5e-324, 1e-9])
@pytest.mark.parametrize("arrivals", ["constant", "poisson", "replay"])
def test_refuses_a_call_that_is_never_due(rate: float, arrivals: str, tmp_path: Path) -> None:
    path = tmp_path / "times"
    path.write_text("0\n1\n2\n")
    with pytest.raises(ToolError, match="a call is due more than 116 days after the start: the rate is too low"):
        make_load(options(rate=rate, arrivals=arrivals, total_number=20, replay=path, request_batch=2), 1)
    path.write_text("0\n1e300\n")
    with pytest.raises(ToolError, match="more than 116 days"):
        make_load(options(rate=None, arrivals="replay", replay=path), 1)
    path.write_text("2\n2\n")
    with pytest.raises(ToolError, match="--rate: the times of --replay are all the same"):
        make_load(options(arrivals="replay", replay=path), 1)


# --- answers of a service


REPLY = b"\x80\x01\x00\x02\x00\x00\x00\x0binfer_batch\x00\x00\x00\x07\x0c\x00\x00\x0b\x00\x01\x00\x00\x00\x01a\x00\x00"
OVER_HTTP = b'HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\n{"label": "a"}'


@pytest.mark.parametrize(
    ("speaks", "reply"),
    [
        (wire.ThriftWire(load_idl(), False, 1), REPLY),
        (wire.ThriftWire(load_idl(), True, 1), len(REPLY).to_bytes(4, "big") + REPLY),
        (wire.HttpWire("host", "/infer"), OVER_HTTP),
    ],
    ids=str,
)
def test_answers_in_pieces(speaks: Any, reply: bytes) -> None:
    assert [speaks.answers(reply[:count], 7, 1) for count in range(len(reply))] == [None] * len(reply)
    assert speaks.answers(reply, 7, 1) == [Answer("a")]


@pytest.mark.parametrize(
    ("speaks", "reply", "why"),
    [
        (wire.ThriftWire(load_idl(), False, 1), REPLY, "infer_batch number 7 instead of infer_batch number 8"),
        (wire.ThriftWire(load_idl(), False, 2), REPLY, "instead of infer_many number 8"),
        (wire.HttpWire("host", "/infer"), OVER_HTTP + b"more", "4 bytes after the answer"),
        (wire.HttpWire("host", "/infer"), b"HTTP/1.1 200 OK\r\n\r\n", "no answer with a Content-Length"),
    ],
)
def test_replies_to_something_else_are_refused(speaks: Any, reply: bytes, why: str) -> None:
    with pytest.raises(wire.ReplyError, match=why):
        speaks.answers(reply, 8, 1)


@pytest.mark.parametrize(
    ("make", "sent"),
    [
        (lambda priority: wire.ThriftWire(load_idl(), False, 1, priority), b"\x08\x00\x05\x00\x00\x00\x01"),
        (lambda priority: wire.HttpWire("host", "/infer", priority), b"\r\nX-Priority: 1\r\n"),
    ],
)
def test_sends_priority_unless_normal(make: Any, sent: bytes) -> None:
    low, normal = (make(priority).request(0, 1, [b"a"]) for priority in (1, 0))
    assert sent in low
    assert sent not in normal
    assert b"infer_many" not in normal


@pytest.mark.parametrize("body", [b"\x1b[2Jgone\n", rb'{"code": "\u001b[2Jgone", "error": "\u001b[2Jgone"}'])
def test_escapes_texts_of_a_service(body: bytes) -> None:
    reply = b"HTTP/1.1 500 \r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    (error,), tally = wire.HttpWire("host", "/infer").answers(reply, 0, 1), Tally()
    tally.count(error_name(error), error, 1)
    assert list(tally.examples.values()) == ["?[2Jgone"]
    assert "\x1b" not in "".join(tally.errors)


# --- replay files


@pytest.mark.parametrize(
    ("text", "column", "why"),
    [
        ("0\nhalf\n", None, r"times, line 2: 'half' is not a number of seconds"),
        ("0\nnan\n", None, r"times, line 2: 'nan' is not a number"),
        ("0\n2\n1\n", None, r"times, line 3: 1 is before 2"),
        ("-1\n", None, r"times, line 1: -1 is before 0"),
        ("# nothing\n", None, r"times: it contains no times"),
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
    with pytest.raises(ToolError, match=why):
        read_replay(path, column)


# --- late sends


@pytest.mark.parametrize(
    ("calls", "lags"),
    [  # due, sent, done and starved meanwhile; waiting for a reply is not the tester's fault, but one that it is kept
        # from; its own delay lasts until it is made up for
        (((0, 0, 90, 0), (10, 90, 95, 0), (20, 95, 96, 0), (200, 200, 201, 0)), [(0, 0), (80, 0), (75, 0), (0, 0)]),
        (((0, 50, 51, 0), (10, 51, 52, 0), (20, 52, 53, 0), (60, 60, 61, 0)), [(50, 50), (41, 41), (32, 32), (0, 0)]),
        (((0, 0, 90, 60), (10, 90, 95, 0), (20, 95, 96, 0), (200, 200, 201, 0)), [(0, 0), (80, 60), (75, 60), (0, 0)]),
    ],
)
def test_lag_of_late_sends(calls: tuple[tuple[int, int, int, int], ...], lags: list[tuple[int, int]]) -> None:
    meter, measured, starved = LagMeter(), [], 0
    for due, sent, done, more in calls:
        measured.append(meter.sent(due, sent, starved))
        starved += more
        meter.free(done, starved)
    assert measured == lags


def test_measures_time_without_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"wall": 0, "cpu": 0}
    clocks = SimpleNamespace(perf_counter_ns=lambda: now["wall"], process_time_ns=lambda: now["cpu"])
    monkeypatch.setattr(client, "time", clocks)
    selector = _Selector()
    assert selector.select(0) == selector.select(60) == []  # it naps
    assert selector.starved == 0
    now.update(wall=50 * MS, cpu=20 * MS)
    selector.select(0)
    assert selector.starved == 30 * MS
    selector.close()


def made_records(*rows: tuple[int, int]) -> Records:
    """Records of calls that took 1 ms, from ``(late, lag)`` in ms."""
    count = len(rows)
    late, lag = ([row[at] * MS for row in rows] for at in (0, 1))
    due = [number * 10 * MS for number in range(count)]
    end = [at + wait + MS for at, wait in zip(due, late, strict=True)]
    columns = (due, end, [wait + MS for wait in late], [MS] * count, [1] * count, [1] * count, late, lag, lag)
    return Records(*(np.array(column, int) for column in columns))


def test_late_sends_are_blamed_on_the_greater_part() -> None:
    rows = ((0, 0), (1, 1), (5, 5), (5, 1), (2, 2), (100, 0))
    fast, faster = (make_load(options(rate=rate, request_client=4, duration=1.0), 1) for rate in (4000.0, 4300.0))
    late = judge.late_sends(made_records(*rows), fast)
    assert (late["share_by_tester"], late["share_by_waiting"], late["worst_ms"]) == (2 / 6, 2 / 6, 100)
    assert "33.3% of the sends" in judge.late_limits(late)[0]
    assert "raise --request_client" in judge.late_warnings(late, 4, 400, 10.0)[0]
    assert "some answers took long" in judge.late_warnings(late, 4, 40, 1.0)[0]
    assert judge.late_sends(made_records(*rows), faster)["share_by_tester"] == 0, "4 clients send 4000/s"
    for records in (made_records(*[(0, 0)] * 200, (5, 5), (5, 0)), made_records()):
        late = judge.late_sends(records, fast)
        assert (judge.late_limits(late), judge.late_warnings(late, 4, 400, 10.0)) == ([], [])


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
def test_verdict_of_stability(latencies_ms: list[float], changes: dict[str, float], reason: str | None) -> None:
    figures: dict[str, Any] = {"offered": 100.0, "answered": 1000, "window": 10.0, "unsent": 0, **changes}
    fields = judge.stability(np.array(latencies_ms) * MS, **figures)
    assert fields["stable"] is (reason is None)
    assert [reason in text for text in fields["unstable_because"] if reason is not None] == [True] * (
        reason is not None
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"tester_busiest_client_percent": 91.0}, "a client process used 91%"),
        ({"tester_share_of_cpu": 0.6}, "saturated"),
        ({"tester_share_of_cpu": 0.6, "machine_busy": 0.7}, ""),
    ],
)
def test_the_tester_reports_when_it_is_the_limit(changes: dict[str, float], reason: str) -> None:
    usual = {"tester_busiest_client_percent": 50.0, "tester_share_of_cpu": 0.4, "machine_busy": 1.0}
    limits = cpu_limits({**usual, **changes})
    assert len(limits) == bool(reason)
    assert reason in "".join(limits)


# --- percentiles and series


def test_per_second_counts_images_where_they_belong() -> None:
    logs = [CallLog(3), CallLog(1)]
    logs[0].enter(0, 1200 * MS, SECOND + 1100 * MS, 2, 100 * MS, 0, 2)  # due 0.1 s before the start, done in second 1
    logs[0].enter(0, 100 * MS, SECOND + 1300 * MS, NO_REPLY, 0, 0, 2)
    logs[1].enter(0, 50 * MS, SECOND + 100 * MS, 1, 0, 0, 2)
    records = collect(logs, start=SECOND)
    assert records.due.tolist() == [-100 * MS, 50 * MS, 1200 * MS]
    assert records.actual.tolist() == [1100 * MS, 50 * MS, 100 * MS]
    rows = judge.per_second(records, [4, 3])
    assert [(row["offered"], row["sent"], row["ok"], row["failed"]) for row in rows] == [(4, 4, 1, 1), (3, 2, 2, 2)]


def test_percentile_curve_and_histogram_have_every_call() -> None:
    curve = judge.percentile_curve(np.arange(1, 1001) * MS)
    assert curve[0] == (0, 1.0)
    assert curve[-1][0] == pytest.approx(99.9)
    assert [percent for percent, _ in curve] == sorted(percent for percent, _ in curve)
    assert judge.percentile_curve(np.array([])) == judge.histogram(np.array([])) == []
    assert judge.percentile_curve(np.array([5 * MS])) == [(0.0, 5.0)]
    latencies = np.random.default_rng(0).integers(1, 10**9, 500)
    bins = judge.histogram(latencies)
    assert sum(count for *_, count in bins) == 500
    assert bins[0][0] == pytest.approx(latencies.min() / MS)
    assert sum(count for *_, count in judge.histogram(np.array([5 * MS] * 9))) == 9


PARENT = """
import subprocess, sys
input()
subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < 0.3: pass"])
print("done", flush=True)
input()
"""


def test_cpu_time_of_children_that_have_ended_counts() -> None:
    """Such as decoders, and workers that were restarted; other programs would be blamed for it."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", PARENT], bufsize=0, **pipes) as parent:  # type: ignore[call-overload]
        meter = CpuMeter([parent.pid], [])
        meter.start()
        parent.stdin.write(b"\n")
        assert parent.stdout.readline() == b"done\n"
        use = meter.stop()
        parent.kill()
    assert use.server is not None
    assert use.server > 0.25


@pytest.mark.parametrize(
    ("before", "after", "server"),
    [
        ({1: (10.0, 0.0), 2: (1.0, 0.0)}, {2: (3.0, 0.0)}, 2.0),  # one has ended, and its parent is not of the server
        ({1: (0.0, 0.0), 2: (5.0, 0.0)}, {1: (1.0, 6.0), 3: (2.0, 0.0)}, 4.0),  # one was replaced by its parent
        ({1: (1.0, 0.0)}, {}, None),
    ],
)
def test_cpu_time_of_processes_that_come_and_go(
    before: Any, after: Any, server: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter = CpuMeter([], [])
    for clocks, read in ((before, meter.start), (after, meter.stop)):
        monkeypatch.setattr(meter, "_clocks", lambda clocks=clocks: (0.0, 0.0, 0.0, clocks))
        use = read()
    assert use is not None
    assert use.server == server


def test_reads_gpu_samples() -> None:
    lines = ["1, NVIDIA X, 10, 500, 1000", "0, NVIDIA Y, [N/A], 5, 10", "1, NVIDIA X, 30, 700, 1000", "1, NVIDIA X, 9"]
    first, second = summarize_gpus(lines)
    assert (first["name"], first["utilization_mean"], first["memory_used_max_mib"]) == ("NVIDIA Y", None, 5)
    assert (second["samples"], second["utilization_mean"], second["utilization_max"]) == (2, 20, 30)
    assert summarize_gpus([]) == []


# --- sweeps and searches


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("clients=1,2,5", [1, 2, 5]),
        ("rate=100:400:100", [100, 200, 300, 400]),
        ("rate=0.1:0.3:0.1,5", [0.1, 0.2, 0.3, 5]),
        ("clients=2:7:2", [2, 4, 6]),
        *((text, None) for text in ("clients", "clients=", "batch=1", "clients=0", "clients=1.5", "rate=-1")),
        *(
            (text, None)
            for text in ("rate=5:1:1", "rate=5:4:10", "rate=1:5:0", "rate=1:100000:0.001", "rate=nan", "rate=1:inf:1")
        ),
    ],
)
def test_points_of_a_sweep(text: str, values: list[float] | None) -> None:
    if values is None:
        with pytest.raises(ToolError, match=r"--sweep "):
            run.parse_sweep(text)
    else:
        name, points = run.parse_sweep(text)
        assert name == text.partition("=")[0]
        assert points == pytest.approx(values)


def made_report(p99: float = 10.0, **changes: Any) -> dict[str, Any]:
    latency = dict.fromkeys(("mean", "p50", "p90", "p99", "p99_9", "max", "min"), p99)
    usual = {"qps": 100.0, "calls_per_s": 100.0, "goodput": 100.0, "latency_ms": latency, "errors": {}, "warnings": []}
    usual |= {"images_ok": 100, "images_failed": 0, "images_ok_per_second": [100] * 12, "interrupted": False}
    usual |= {"valid": True, "machine": {"cores": 2}, "versions": {"python": "3.11"}, "settings": {"request_client": 5}}
    return {**usual, "image_files": 4, "image_bytes_mean": 10.0, **changes}


class FakeRunner:
    """Runs that cost nothing: latency follows from the load, up to a limit of 100 images a second."""

    def __init__(self, interrupted_at: int | None = None, fails_after: int = 1000, error: Any = None) -> None:
        self.seen: list[argparse.Namespace] = []
        self._interrupted_at, self._fails_after, self._error = interrupted_at, fails_after, error

    def __call__(self, settings: argparse.Namespace) -> dict[str, Any]:
        if len(self.seen) == self._fails_after:
            raise self._error
        self.seen.append(settings)
        rate = settings.rate or 100.0
        interrupted = len(self.seen) == self._interrupted_at
        report = made_report(p99=rate, interrupted=interrupted, goodput=min(rate, 100.0), stable=rate <= 100)
        return judge.judge(report, settings.slo_p99)


def test_search_of_a_rate_that_holds_the_slo(capsys: pytest.CaptureFixture[str]) -> None:
    runner = FakeRunner()
    report = run.run_search(runner, options(rate=None, slo_p99=60.0))
    assert report["exit_status"] == judge.EXIT_OK
    assert report["search"]["best_rate"] == pytest.approx(60.0, rel=0.03)
    assert runner.seen[0].arrivals == "closed"
    assert {settings.arrivals for settings in runner.seen[1:]} == {"constant"}
    assert len(report["runs"]) == len(runner.seen) == len(capsys.readouterr().err.splitlines())
    report = run.run_search(FakeRunner(), options(rate=None, slo_p99=0.001))
    assert (report["exit_status"], report["search"]["best_rate"]) == (judge.EXIT_SLO_MISSED, None)
    report = run.run_search(FakeRunner(interrupted_at=3), options(rate=None, slo_p99=60.0))
    assert (report["exit_status"], len(report["runs"])) == (judge.EXIT_INTERRUPTED, 3)
    with pytest.raises(ToolError, match="no image has a result in a closed loop"):
        run.run_search(lambda _: judge.judge(made_report(images_ok=0), None), options(rate=None, slo_p99=60.0))


@pytest.mark.parametrize(
    ("slo", "own", "valid", "exit_status"),
    [(60.0, 5.0, True, 0), (9.0, 0.0, True, 3), (9.0, 5.0, False, 4)],
    ids=["met with its share", "missed without it", "between the two"],
)
def test_a_run_that_the_tester_limits_is_judged_by_bounds(
    slo: float, own: float, valid: bool, exit_status: int
) -> None:
    bounds = {"tester_limited": True, "p99_bounds_ms": (10.0 - own, 10.0), "tester_share_of_cpu": 0.3}
    report = judge.judge(made_report(10.0, valid=False, **bounds), slo)
    assert (report["valid"], report["exit_status"]) == (valid, exit_status)
    assert f"took 30% of what was used: p99 between {10 - own:.1f} and 10.0 ms" in report["warnings"][0]


def test_a_search_on_shared_cores_has_a_verdict_and_says_where_it_cannot_tell() -> None:
    def runner(settings: argparse.Namespace) -> dict[str, Any]:
        rate = settings.rate or 100.0
        bounds = (rate - 15, rate) if settings.rate else None
        limited = made_report(rate, valid=False, tester_limited=True, p99_bounds_ms=bounds, tester_share_of_cpu=0.3)
        return judge.judge(limited, settings.slo_p99)

    search = run.run_search(runner, options(rate=None, slo_p99=60.0))
    about = search["search"]
    assert about["valid"]
    assert about["best_rate"] == pytest.approx(60.0, rel=0.03)
    assert about["lowest_rate_that_failed"] == 80.0
    assert about["undecided_rates"][-1] == 70.0
    assert "the tester, on shared cores, cannot tell" in search_line(search)


def test_bounds_of_p99_exclude_time_without_a_cpu() -> None:
    assert judge.p99_bounds(made_records(*[(4, 3)] * 200)) == pytest.approx((2.0, 5.0))
    assert judge.p99_bounds(made_records()) is None


@pytest.mark.parametrize(("error", "status"), [(ToolError("gone"), 1), (KeyboardInterrupt(), 130)])
def test_runs_that_are_done_survive_one_that_cannot_start(error: BaseException, status: int) -> None:
    report = run.run_sweep(FakeRunner(fails_after=2, error=error), options(), "rate", [10, 20, 30])
    assert (report["exit_status"], len(report["runs"])) == (status, 2)
    assert "before rate 30" in report["stopped"]
    report = run.run_sweep(FakeRunner(interrupted_at=2), options(), "rate", [10, 20, 30])
    assert (report["exit_status"], report["stopped"]) == (judge.EXIT_INTERRUPTED, "interrupted at rate 20")
    with pytest.raises(type(error)):
        run.run_search(FakeRunner(fails_after=0, error=error), options(rate=None, slo_p99=60.0))


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
        (1, {"valid": False, "errors": {"timeout": 1}, "stable": False}, 4),
        (None, {"valid": False, "interrupted": True}, 130),
    ],
)
def test_exit_status(slo_ms: float | None, changes: dict[str, Any], status: int) -> None:
    assert judge.judge(made_report(**changes), slo_ms)["exit_status"] == status
    assert (judge.worst([0, 3, 2]), judge.worst([3, 4, 2]), judge.worst([])) == (2, 4, 0)


# --- comparisons and files


def test_comparison_reports_differences() -> None:
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
    for priority, count in ((0, 0), (1, 1)):  # the other report is older than the option
        newer = made_report(settings={"request_client": 5, "priority": priority})
        assert compare.comparison(made_report(), newer).count("DIFFERENT") == count
    assert "n/a" in compare.comparison(made_report(), made_report(latency_ms=None))
    none = made_report(latency_ms=None, images_ok=0, images_failed=9, errors={"timeout": 9})
    assert "B: no image has a result" in compare.comparison(made_report(), none)
    assert judge.verdict({**none, "slo": None}) == "FAILED: no image has a result"


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        *[({}, 0), ({"qps": 94.0}, 1), ({"goodput": 50.0}, 1), ({"p99": 10.6}, 1), ({"qps": 96.0, "p99": 10.4}, 0)],
        ({"latency_ms": None, "goodput": 0.0}, 2),
    ],
)
def test_a_regression_is_the_exit_status(changes: dict[str, Any], count: int, tmp_path: Path) -> None:
    reports = made_report(), made_report(**changes)
    assert len(compare.regressions(*reports, 5.0)) == count
    paths = [str(tmp_path / name) for name in "ab"]
    for path, report in zip(paths, reports, strict=True):
        Path(path).write_text(json.dumps(report))
    assert run.main(["compare", *paths, "--max-regression", "5"]) == (2 if count else 0)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "not a JSON file"),
        ("[" * 200_000, "not a JSON file"),
        ("\ufeff[]", "not a report"),
        ('{"runs": [], "kind": "sweep"}', "of a sweep"),
    ],
)
def test_compare_refuses_files_without_a_report(text: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ToolError, match=why):
        compare.read_report(path)
