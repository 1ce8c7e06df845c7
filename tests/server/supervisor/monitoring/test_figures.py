"""What workers report: which messages are taken, several workers' figures as one service's, and those as metrics."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
from kit.figures import MODEL, ONE, counts, family, node, of_method, stream, worker
from prometheus_client.parser import text_string_to_metric_families
from torchpipe_server.supervisor.messages import parse_message
from torchpipe_server.supervisor.monitoring.figures import NOTHING, add_past, request_figures, service_figures
from torchpipe_server.supervisor.monitoring.metrics import CONTENT_TYPE, render

from torchpipe_py.runtime.record.statistics import BOUNDS_MS

TWO = worker({"model": node(2)}, {"infer_batch": {"ok": 20}, "ping": {"ok": 3}}, inflight=2)
SHARED = {"requests": 2, "slot_wait_ms": 0.5, "there_ms": 1.0, "in_engine_ms": 8.0, "back_ms": 1.5}


# -- messages -------------------------------------------------------------------------------------------------------


def end(**changes: Any) -> dict[str, Any]:
    return {"type": "end", "answered": True, "stats": {**ONE, **changes}}


def of_node(**changes: Any) -> dict[str, Any]:
    return end(nodes={"model": node(**changes)})


def own_histogram(factor: int = 1) -> dict[str, Any]:
    samples = [{"labels": {}, "counts": [factor, 0, 2 * factor], "sum": 9.5 * factor}]
    return {"kind": "histogram", "help": "Time of a match", "labels": [], "bounds": [1.0, 2.0], "samples": samples}


REFUSED: dict[str, Any] = {
    "no JSON": b"\xff\xfe",
    "no object": b"[1]",
    "nested": b'{"type": "gone", "slot": 1, "is_closed": true, "more": ' + b"[" * 100_000,
    "no type": {},
    "a type that is none": {"type": ["ready"]},
    "unknown": {"type": "connection", "slot": 1},
    "slot of a wrong type": {"type": "gone", "slot": [3], "is_closed": True},
    "no figures": {"type": "end", "answered": True, "stats": {}},
    "NaN": of_node(queue_ms=float("nan")),
    "negative": of_node(requests=-1),
    "a short histogram": of_node(histograms={"queue": [], "batch_wait": [], "compute": []}),
    "a size out of bounds": of_node(batch_sizes={"9" * 4000: 1}),
    "max out of bounds": of_node(max=2**60),
    "too many nodes": end(nodes=dict.fromkeys(map(str, range(5000)), node())),
    "an event of two lines": {"type": "event", "stream": "yard", "data": "{}\n", "missed": 0},
    "an event that is too long": {"type": "event", "stream": "yard", "data": "x" * 2**18, "missed": 0},
    "a picture that is none": {"type": "snapshot", "stream": "yard", "jpeg": "%", "problem": ""},
    "a metric named as the service's": end(metrics={"torchpipe_ready": family()}),
    "a metric whose name is none": end(metrics={"a b": family()}),
    "a metric of an unknown kind": end(metrics={"a": {**family(), "kind": "summary"}}),
    "a metric without a value": end(metrics={"a": {**family(), "samples": [{"labels": {"camera": "a"}}]}}),
    "a metric with other labels": end(metrics={"a": {**family(), "labels": ["door"]}}),
    "a metric with too many label sets": end(metrics={"a": {**family(), "samples": 300 * family()["samples"]}}),
    "a histogram with too few counts": end(metrics={"a": {**own_histogram(), "bounds": [1.0]}}),
    "a histogram whose bounds descend": end(metrics={"a": {**own_histogram(), "bounds": [2.0, 1.0]}}),
    "too many metrics": end(metrics={f"m{index}": family() for index in range(101)}),
    "too large": end(hand_over={**SHARED, "in_engine_ms": 2.0**63}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_invalid_messages(name: str) -> None:
    said = REFUSED[name]
    with pytest.raises((ValueError, RecursionError)):
        parse_message(said if isinstance(said, bytes) else json.dumps(said).encode())


def test_reads_statistics_and_leaves_out_unknown_keys() -> None:
    message: Any = parse_message(json.dumps(end(hand_over=SHARED, more=1)).encode())
    assert (message.answered, message.stats) == (True, {**ONE, "hand_over": SHARED})


# -- sums -----------------------------------------------------------------------------------------------------------


def test_sums_the_statistics_of_workers() -> None:
    before = copy.deepcopy((ONE, TWO))
    figures = service_figures([ONE, TWO], NOTHING)
    by_method = {"infer_batch": {"ok": 29, "overloaded": 1}, "ping": {"ok": 3}}
    by_model = {"a/1": {method: of_method(outcomes) for method, outcomes in by_method.items()}}
    assert figures["requests"] == {"inflight": 3, "by_model": by_model}
    now = {"instances": 4, "alive": 4, "busy": 2, "oldest_batch_s": 1.0}
    assert figures["nodes"] == {"model": node(3, **now, instance_compute_ms=[30.0, 10.0, 60.0, 20.0])}
    assert figures["streams"] == {"yard": {**stream(3), "now": {}}}
    assert before == (ONE, TWO), "what the workers said stays theirs"


def test_sums_requests_over_models() -> None:
    other = worker({}, {"infer_batch": {"ok": 4}}, model="b/2")
    requests = service_figures([ONE, TWO, other], NOTHING)["requests"]
    assert request_figures(requests) == {
        **requests,
        "by_method": {"infer_batch": {"ok": 33, "overloaded": 1}, "ping": {"ok": 3}},
        "latency_ms": 111.0,
        "histograms": {"latency": counts(b12=37)},
    }
    assert request_figures({"by_model": {"": {"ping": {"outcomes": {"ok": 1}}}}})["latency_ms"] == 0.0


# -- metrics --------------------------------------------------------------------------------------------------------


def parsed(*workers: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The families that ``/metrics`` has for what ``/stats`` says of these workers."""
    told = [
        {"index": index, "state": "ready" if index else "starting", "rss_bytes": 1000, "responding": bool(index)}
        for index in range(len(workers))
    ]
    figures = {
        **{"ready": True, "uptime_s": 12.5, "restarts": 3, "restarts_by_reason": {"died": 1, "hung_batch": 2}},
        **{"reloads": {"ok": 2, "failed": 1}, "reload_successful": False},
        **{"bounds_ms": BOUNDS_MS, "workers": told, "engines": []},
        "connections": {"open": 5, "max": 9, "accepted": 7, "refused": 2, "evicted": 3},
        **service_figures(workers, NOTHING),
        **changes,
    }
    for name, one in figures["streams"].items():
        figures["streams"][name] = {**one, "state": "playing"}
    return {family.name: family for family in text_string_to_metric_families(render(figures).decode())}


VALUES = {
    "requests": (
        "counter",
        {"infer_batch a ok thrift 1": 29, "infer_batch a overloaded thrift 1": 1, "ping a ok thrift 1": 3},
    ),
    "request_seconds": ("histogram", None),
    "requests_pending": ("gauge", {"": 3}),
    "connections": ("gauge", {"": 5}),
    "connections_accepted": ("counter", {"": 7}),
    "connections_refused": ("counter", {"": 2}),
    "connections_evicted": ("counter", {"": 3}),
    "worker_restarts": ("counter", {"died": 1, "hung_batch": 2}),
    "reloads": ("counter", {"ok": 2, "failed": 1}),
    "reload_successful": ("gauge", {"": 0}),
    "log_lines_dropped": ("counter", {"": 8}),
    "workers": ("gauge", {"ready": 1, "starting": 1}),
    "worker_resident_bytes": ("gauge", {"0": 1000, "1": 1000}),
    "worker_responding": ("gauge", {"0": 0, "1": 1}),
    "ready": ("gauge", {"": 1}),
    "uptime_seconds": ("gauge", {"": 12.5}),
    "node_requests": ("counter", {"model": 30}),
    "node_batches": ("counter", {"model": 12}),
    "node_failures": ("counter", {"model": 3}),
    "node_expired": ("counter", {"model": 6}),
    "node_shed": ("counter", {"model": 9}),
    "node_pending": ("gauge", {"model": 9}),
    "node_instances": ("gauge", {"model": 4}),
    "node_instances_alive": ("gauge", {"model": 4}),
    "node_instances_busy": ("gauge", {"model": 2}),
    "node_oldest_batch_seconds": ("gauge", {"model": 1.0}),
    "node_queue_seconds": ("histogram", None),
    "node_batch_wait_seconds": ("histogram", None),
    "node_compute_seconds": ("histogram", None),
    "node_batch_size": ("histogram", None),
    "stream_frames": ("counter", {"ok yard": 15, "dropped yard": 12}),
    "stream_reconnects": ("counter", {"yard": 3}),
    "stream_playing": ("gauge", {"yard": 1}),
    "stream_age_seconds": ("histogram", None),
    "engine_processes": ("gauge", {"ready": 2, "waiting": 1}),
    "hand_over_requests": ("counter", {"": 2}),
    "hand_over_seconds": ("counter", {"slot_wait": 0.0005, "there": 0.001, "in_engine": 0.008, "back": 0.0015}),
    "gpu_memory_used_bytes": ("gauge", {"1": 4}),
    "gpu_memory_bytes": ("gauge", {"1": 9}),
}


def test_metrics_have_names_types_and_values() -> None:
    gpu = {"index": 1, "name": "GPU", "used_bytes": 4, "total_bytes": 9}
    engines = [{"state": "ready"}, {"state": "waiting"}, {"state": "ready"}]
    one = {**ONE, "log_lines_dropped": 8, "hand_over": SHARED}
    families = parsed(one, {**TWO, "gpus": [gpu]}, engines=engines)
    assert families.keys() == {"faces", *(f"torchpipe_{name}" for name in VALUES)}
    for name, (kind, values) in VALUES.items():
        family = families[f"torchpipe_{name}"]
        assert (family.type, bool(family.documentation)) == (kind, True)
        found = {" ".join(sample.labels.values()): sample.value for sample in family.samples}
        assert values is None or found == values, name
    assert CONTENT_TYPE.startswith("text/plain; version=0.0.4")


def histogram(family: Any) -> tuple[dict[float, float], float, float]:
    """Buckets by upper bound, count and sum; cumulated, and consistent."""
    buckets = {float(one.labels["le"]): one.value for one in family.samples if one.name.endswith("_bucket")}
    count, total = (
        next(one.value for one in family.samples if one.name == family.name + end) for end in ("_count", "_sum")
    )
    assert list(buckets) == sorted(buckets)
    assert list(buckets.values()) == sorted(buckets.values())
    assert buckets[math.inf] == count
    return buckets, count, total


def test_requests_have_model_version_and_protocol() -> None:
    sent = {"infer": {"ok": 1}, "POST /infer": {"ok": 2}, "http": {"not_found": 3}, "gRPC ModelInfer": {"ok": 4}}
    two, none = (worker({}, sent, model=model) for model in ("an/odd name/2", ""))
    families = parsed(two, none)
    found = {
        tuple(sample.labels[name] for name in ("model", "version", "protocol", "method")): sample.value
        for sample in families["torchpipe_requests"].samples
    }
    protocols = {"infer": "thrift", "POST /infer": "http", "http": "http", "gRPC ModelInfer": "grpc"}
    models = [("an/odd name", "2"), ("", "")]
    assert found == {
        (*model, protocols[method], method): sum(sent[method].values()) for model in models for method in sent
    }
    counted = {
        (sample.labels["model"], sample.labels["protocol"]): sample.value
        for sample in families["torchpipe_request_seconds"].samples
        if sample.name.endswith("_count")
    }
    by_protocol = {"thrift": 1, "http": 5, "grpc": 4}
    assert counted == {(name, each): count for name, _ in models for each, count in by_protocol.items()}


def test_counts_of_models_are_totals_and_the_last_request_is_the_latest() -> None:
    gone = {**ONE, "models": {"a/1": {**MODEL, "last_ms": 900}, "b/1": MODEL}}
    models = service_figures([ONE, TWO], add_past(NOTHING, gone))["models"]
    assert models == {"a/1": {**dict.fromkeys(MODEL, 6), "last_ms": 900}, "b/1": MODEL}
    assert NOTHING["models"] == {}


def test_metrics_of_custom_backends_are_summed_over_workers() -> None:
    level = {"kind": "gauge", "help": "Fill level", "labels": [], "samples": [{"labels": {}, "value": -2.0}]}
    one = {**ONE, "metrics": {"faces": family(1), "level": level, "match_seconds": own_histogram()}}
    two = {**TWO, "metrics": {"faces": family(4), "level": level, "match_seconds": own_histogram(2)}}
    families = parsed(one, two)
    kinds = {"faces": "counter", "level": "gauge", "match_seconds": "histogram"}
    assert {name: families[name].type for name in kinds} == kinds
    (faces,), (level,) = families["faces"].samples, families["level"].samples
    assert (faces.name, faces.labels, faces.value) == ("faces_total", {"camera": "door"}, 5.0)
    assert (level.value, families["level"].documentation) == (-4.0, "Fill level")
    assert histogram(families["match_seconds"]) == ({1.0: 3, 2.0: 3, math.inf: 9}, 9, 28.5)


def test_totals_of_ended_workers_stay_but_for_gauges_and_metrics_that_are_gone() -> None:
    level = {"kind": "gauge", "help": "Fill level", "labels": [], "samples": [{"labels": {}, "value": 2.0}]}
    gone = {**ONE, "metrics": {"faces": family(8), "level": level, "old": family()}}
    alive = {**TWO, "metrics": {"faces": family(1), "level": level}}
    metrics = service_figures([alive], add_past(NOTHING, gone))["metrics"]
    assert metrics == {"faces": family(9), "level": level}
    assert NOTHING["metrics"] == {}


def test_histograms_are_cumulative_and_in_seconds() -> None:
    families = parsed(ONE, TWO)
    buckets, count, total = histogram(families["torchpipe_request_seconds"])
    assert (count, total) == (33, pytest.approx(0.099))
    assert list(buckets)[:-1] == pytest.approx([bound / 1000 for bound in BOUNDS_MS])
    assert (buckets[0.002048], buckets[0.004096]) == (0, 33)
    buckets, count, total = histogram(families["torchpipe_node_compute_seconds"])
    assert (count, total) == (12, pytest.approx(0.12))
    assert [buckets[bound] for bound in (0.008192, 0.016384, 2**26 / 1e6, math.inf)] == [0, 9, 9, 12]
    assert [histogram(families[f"torchpipe_node_{name}_seconds"])[1] for name in ("queue", "batch_wait")] == [30, 30]
