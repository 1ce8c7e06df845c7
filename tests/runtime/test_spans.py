"""OpenTelemetry's spans of a pipe's requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from conftest import Register
from kept_spans import KeptSpans
from kit.backends import Company, Gate
from kit.waits import WAIT, outcome
from opentelemetry import trace
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased

from torchpipe_py import BackendError, Overloaded, pipe
from torchpipe_py.runtime.record import spans as module

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


def test_a_call_is_a_child_of_the_span_that_is_current(memory: KeptSpans) -> None:
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


def test_the_phases_of_a_batch(register: Register, memory: KeptSpans) -> None:
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


def test_elements_branches_jumps_and_spans_of_a_backend(register: Register, memory: KeptSpans) -> None:
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


def test_errors_have_their_code_at_the_node_and_at_the_request(register: Register, memory: KeptSpans) -> None:
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


def test_a_refused_call_has_a_span(register: Register, memory: KeptSpans) -> None:
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


def test_what_is_not_sampled_is_not_recorded() -> None:
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


def test_what_is_kept_is_bounded(memory: KeptSpans, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 0)
    with instrumented({"all": {"backend": "MapReduce", "jump": "each"}, "each": {}}, memory) as run:
        run({"data": [1], "node_name": "all"})
        monkeypatch.undo()
        run({"data": list(range(300)), "node_name": "all"})
    assert len(memory.named("pipe all")) == 1
    assert len(memory.named("each")) == 256
