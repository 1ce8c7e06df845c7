"""The visits of requests at nodes, and their file."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from conftest import Register
from kit.backends import Company, Echo, EchoFour
from kit.waits import WAIT

from torchpipe_py import pipe
from torchpipe_py.runtime.record.statistics import BOUNDS_MS, COUNTS, Record, summed


def test_a_batch_that_waits_for_company(register: Register) -> None:
    company = Company(register)
    with pipe(company.nodes) as p:
        p({"data": "untraced"})
        with p.trace() as trace:
            company.meet(p)
        p({"data": "untraced"})
    assert {(visit.node, visit.request) for visit in trace.visits} == {
        (n, r) for n in ("first", "second") for r in (1, 2)
    }
    for visit in trace.visits:
        assert 0 <= visit.arrived <= visit.collected <= visit.started <= visit.ended
    together = [visit for visit in trace.visits if visit.node == "second"]
    assert {(visit.size, visit.batch, visit.instance) for visit in together} == {(2, together[0].batch, 0)}
    assert max(visit.started - visit.collected for visit in together) > 0


def test_branches_and_jumps_belong_to_their_request() -> None:
    nodes = {
        "a": {"next": "b,c"},
        "b": {"next": "d"},
        "c": {"backend": "MapReduce", "jump": "e", "next": "d"},
        "d": {"map": "b[result:data],c[result:other]"},
        "e": {},
    }
    with pipe(nodes) as p, p.trace() as trace:
        for _ in range(2):
            p({"data": [1, 2], "node_name": "a"})
    seen = sorted((visit.request, visit.node) for visit in trace.visits)
    assert seen == sorted((number, node) for number in (1, 2) for node in ("a", "b", "c", "d", "e", "e"))


def test_the_file_is_what_perfetto_reads(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with pipe({"one": {"next": "two", "instance_num": 2}, "two": {}}) as p:
        with p.trace() as trace:
            for number in range(5):
                p({"data": number})
        trace.save(path)
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    batches = [event for event in events if event["ph"] == "X"]
    assert len(batches) == 10
    assert all(event["dur"] >= 0 and event["args"]["batch size"] == 1 for event in batches)
    begins = [(event["id"], event["name"]) for event in events if event["ph"] == "b"]
    ends = [(event["id"], event["name"]) for event in events if event["ph"] == "e"]
    assert sorted(begins) == sorted(ends)
    assert ("1.1", "one: compute") in begins
    assert len(set(begins)) == len(begins)
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"two 0"} <= names <= {"one 0", "one 1", "two 0"}


def test_one_trace_at_a_time_and_a_limit() -> None:
    with pipe({"backend": "Identity"}) as p:
        with p.trace(limit=3) as trace:
            with pytest.raises(RuntimeError, match="already"), p.trace():
                pass
            for number in range(5):
                p({"data": number})
        assert (len(trace.visits), trace.dropped) == (3, 2)
        with p.trace() as trace:
            p({"data": 1})
        p({"data": 1})
        assert len(trace.visits) == 1


# -- the histograms of `pipe.stats()` ---------------------------------------------------------------------------------


def counted(seconds: float) -> int:
    """Which of the counters a time is counted by."""
    record = Record("node", 0)
    record.computed(seconds)
    counts: list[int] = summed([record])["histograms"]["compute"]
    assert len(counts) == COUNTS
    return counts.index(1)


def test_a_counter_is_bounded_by_powers_of_two_of_a_microsecond():
    assert [counted(us / 1e6) for us in (0.2, 1.5, 2.5, 3.5, 4.5, 1000.5)] == [0, 1, 2, 2, 3, 10]
    for seconds in (0.3e-6, 5e-6, 0.02, 60.0):
        place = counted(seconds)
        assert seconds * 1000 < BOUNDS_MS[place]
        assert place == 0 or seconds * 1000 >= BOUNDS_MS[place - 1]


def test_times_beyond_every_bound_and_below_zero():
    assert counted(1e9) == COUNTS - 1 == len(BOUNDS_MS)
    assert 0 <= counted(-1e-9) < COUNTS


@pytest.mark.parametrize("backend", [Echo, EchoFour])
def test_requests_and_batches_are_counted_once_each(register: Register, backend: type) -> None:
    with pipe({"backend": register(backend), "instance_num": 2, "batching_timeout": 5}) as run:
        for _ in range(7):
            run({"data": 1})
        run([{"data": 1} for _ in range(43)], timeout=WAIT)
        node = run.stats()["nodes"]["node"]
    histograms = node["histograms"]
    assert sum(histograms["queue"]) == 50
    assert sum(histograms["compute"]) == node["batches"]
    assert sum(histograms["batch_wait"]) == (50 if backend is EchoFour else 0)
    assert len(node["instance_compute_ms"]) == node["instances"]
    assert sum(node["instance_compute_ms"]) == pytest.approx(node["compute_ms"])


def test_the_time_of_one_request_among_others_is_recorded() -> None:
    config = {
        "first": {"backend": "Identity", "next": "jump"},
        "jump": {"backend": "MapReduce", "jump": "inner", "split": "data", "merge": "result"},
        "inner": {"backend": "Identity"},
    }
    with pipe(config) as run:
        with run.timed() as timelines:
            timed = run.submit({"data": [1, 2], "node_name": "first"})
        run({"data": [3], "node_name": "first"})
        timed.result(WAIT)
        (timeline,) = timelines
        assert Counter(visit.node for visit in timeline.all_visits()) == {"first": 1, "jump": 1, "inner": 2}
        assert all(one.arrived <= one.collected <= one.started <= one.ended for one in timeline.all_visits())
