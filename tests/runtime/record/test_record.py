"""What a pipe records of its requests: visits of nodes and their file, OpenTelemetry's spans."""

from __future__ import annotations

import itertools
import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import Register
from kit.backends import Company, Echo, EchoFour, Gate
from kit.inside import node_of, runtime_of
from kit.kept_spans import KeptSpans
from kit.locks import WatchedLock
from kit.waits import WAIT, in_threads, outcome
from opentelemetry import trace
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased

from torchpipe_py import BackendError, Overloaded, pipe
from torchpipe_py.runtime.record import spans as module
from torchpipe_py.runtime.record.statistics import BOUNDS_MS, COUNTS, Record, summed

# -- visits -----------------------------------------------------------------------------------------------------------


def test_visits_of_batch_that_waits_for_company(register: Register) -> None:
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


def test_saved_trace_has_format_of_perfetto(tmp_path: Path) -> None:
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


def test_trace_is_exclusive_and_limited() -> None:
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


def test_histogram_bounds_are_powers_of_two_microseconds():
    assert [counted(us / 1e6) for us in (0.2, 1.5, 2.5, 3.5, 4.5, 1000.5)] == [0, 1, 2, 2, 3, 10]
    for seconds in (0.3e-6, 5e-6, 0.02, 60.0):
        place = counted(seconds)
        assert seconds * 1000 < BOUNDS_MS[place]
        assert place == 0 or seconds * 1000 >= BOUNDS_MS[place - 1]


def test_histogram_counts_negative_and_very_long_times():
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


def test_timeline_records_one_request_among_others() -> None:
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


def test_threads_that_first_ask_for_timelines_together_get_each_visit_once() -> None:
    second_is_there, looks = threading.Event(), itertools.count()

    class Shared(list[Any]):
        """Recorders that two threads look at before either adds one, if they can."""

        def __contains__(self, recorder: object) -> bool:
            is_there = super().__contains__(recorder)
            if next(looks):
                second_is_there.set()
            assert second_is_there.wait(WAIT), "here, or at the lock"
            return is_there

    with pipe({"backend": "Identity"}) as run:
        run._recording = WatchedLock(second_is_there.set)  # type: ignore[assignment]
        runtime_of(run).recorders = shared = Shared()
        node_of(run).instances[0].record.traces = shared
        in_threads(2, lambda _: run.record_timelines())
        with run.timed() as timelines:
            run({"data": 1})
        (timeline,) = timelines
        assert len(timeline.all_visits()) == 1


# -- spans ------------------------------------------------------------------------------------------------------------


Data = dict[str, Any]


@pytest.fixture(autouse=True)
def time_to_close() -> Iterator[None]:
    """A pipe that is closed has made all its spans, on a busy machine too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CLOSE_SECONDS", WAIT)
        yield


@pytest.fixture
def memory() -> Iterator[KeptSpans]:
    memory = KeptSpans()
    yield memory
    memory.provider.shutdown()


def instrumented(nodes: Mapping[str, Any], memory: KeptSpans) -> pipe:
    run = pipe(nodes)
    run.instrument(memory.provider)
    return run


def test_span_of_call_is_child_of_current_span(memory: KeptSpans) -> None:
    with instrumented({"one": {"next": "two"}, "two": {}}, memory) as run:
        with memory.tracer.start_as_current_span("caller") as caller:
            run({"data": 1})
            future = run.submit({"data": 1})
            future.result()
        run({"data": 1})
    assert memory.traces > {caller.get_span_context().trace_id}
    assert [line for line in memory.tree() if line.endswith("pipe one")] == 2 * ["caller > pipe one"] + [
        "root > pipe one"
    ]
    for node in ("one", "two"):
        computed = memory.named(f"{node}: compute")
        assert len(computed) == 3
        for span in computed:
            assert dict(span.attributes or {}) == {
                "torchpipe.node": node,
                "torchpipe.backend": "Identity",
                "torchpipe.instance": 0,
                "torchpipe.batch_size": 1,
            }
    for span in memory.spans:
        assert span.start_time is not None
        assert span.end_time is not None
        assert span.start_time <= span.end_time


def test_spans_of_the_phases_of_a_batch(register: Register, memory: KeptSpans) -> None:
    company = Company(register)
    with instrumented(company.nodes, memory) as run:
        company.meet(run)
    waits = memory.named("second: batch wait")
    computed = memory.named("second: compute")
    assert len(computed) == 2
    assert waits
    assert {(span.attributes or {})["torchpipe.batch_size"] for span in computed} == {2}
    # Both were current around one `forward`: each has a link to the other trace.
    assert {link.context.trace_id for span in computed for link in span.links} == memory.traces


def test_spans_of_elements_branches_jumps_and_backends(register: Register, memory: KeptSpans) -> None:
    class Looks:
        def forward(self, items: list[Data]) -> None:
            with trace.get_tracer("own", tracer_provider=memory.provider).start_as_current_span("look"):
                for item in items:
                    item["result"] = item["data"]

    nodes = {
        "a": {"next": "b,c"},
        "b": {"backend": "Jump", "jump": "f", "next": "d"},
        "c": {"backend": "MapReduce", "jump": "e", "next": "d"},
        "d": {"map": "b[result:data],c[result:other]"},
        "e": {},
        "f": {"backend": register(Looks)},
    }
    with instrumented(nodes, memory) as run:
        run({"data": [1, 2], "node_name": "a"})
    assert memory.tree() == sorted(
        [
            "root > pipe a",
            *[f"pipe a > {node}: compute" for node in "abcd"],
            *2 * ["c: compute > e"],
            *2 * ["e > e: compute"],
            "b: compute > f",
            "f > f: compute",
            "f: compute > look",
        ]
    )
    ends = {span.context.span_id: span.end_time or 0 for span in memory.spans if span.context}
    assert all((span.end_time or 0) <= ends[span.parent.span_id] for span in memory.spans if span.parent)
    assert sorted((span.attributes or {})["torchpipe.element"] for span in memory.named("e")) == [0, 1]
    assert len(memory.traces) == 1


def test_spans_of_node_and_request_have_error_code(register: Register, memory: KeptSpans) -> None:
    class Fails:
        def forward(self, items: list[Data]) -> None:
            raise KeyError("missing")

    nodes = {"decode": {"backend": "DecodeMat", "next": "fails"}, "fails": {"backend": register(Fails)}, "own": {}}
    nodes["own"] = {"backend": register(Fails)}
    with instrumented(nodes, memory) as run:
        run({"data": b"no image", "node_name": "decode"})
        with pytest.raises(BackendError):
            run({"data": 1, "node_name": "own"})

    def seen(name: str) -> tuple[Any, Any]:
        (span,) = memory.named(name)
        return (span.attributes or {}).get("error.type"), span.status.status_code

    error = trace.StatusCode.ERROR
    assert seen("decode: compute") == seen("pipe decode") == ("decode_error", error)
    assert seen("own: compute") == ("KeyError", error)
    assert seen("pipe own") == ("backend_error", error)


def test_refused_call_has_a_span(register: Register, memory: KeptSpans) -> None:
    gate = Gate()
    nodes = {"global": {"max_inflight": 1}, "only": {"backend": register(gate.backend)}}
    with instrumented(nodes, memory) as run, gate:
        first = run.submit({"data": 1})
        gate.wait_entered()
        with pytest.raises(Overloaded):
            run({"data": 2})
        gate.open()
        outcome(first)
    assert memory.errors("pipe only").count("overloaded") == 1


def test_unsampled_requests_have_no_spans() -> None:
    memory = KeptSpans(sampler=ParentBased(ALWAYS_OFF))
    unsampled = trace.SpanContext(1, 1, is_remote=True, trace_flags=trace.TraceFlags(0))
    sampled = trace.SpanContext(2, 2, is_remote=True, trace_flags=trace.TraceFlags(1))
    with instrumented({"backend": "Identity"}, memory) as run:
        run({"data": 1})
        for parent in (unsampled, sampled):
            with trace.use_span(trace.NonRecordingSpan(parent)):
                run([{"data": 1}, {"data": 2}])
    assert memory.traces == {2}
    assert len([span for span in memory.spans if span.name.startswith("pipe")]) == 2
    memory.provider.shutdown()


def test_finished_requests_that_wait_for_spans_are_bounded(memory: KeptSpans, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 0)
    with instrumented({"all": {"backend": "MapReduce", "jump": "each"}, "each": {}}, memory) as run:
        run({"data": [1], "node_name": "all"})
        monkeypatch.undo()
        run({"data": list(range(300)), "node_name": "all"})
    assert len(memory.named("pipe all")) == 1
    assert len(memory.named("each")) == 256
