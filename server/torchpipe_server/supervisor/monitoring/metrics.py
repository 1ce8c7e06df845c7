"""Statistics as Prometheus metrics, named after those of Triton where it has an equivalent."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from torchpipe_py.serving import NODE_COUNTERS, NODE_GAUGES, NODE_TIMES, add, answers, protocol_of

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_COUNTER, _GAUGE, _HISTOGRAM = CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

_Row = tuple[Any, str, str, str, dict[Any, Any]]
"""A metric: kind, name, help, labels, and values by label; for a histogram, the arguments of ``add_metric``."""


def render(figures: dict[str, Any]) -> bytes:
    """The content of ``/metrics``, from that of ``/stats``."""
    collector: Any = SimpleNamespace(collect=lambda: _families(figures))
    return generate_latest(collector)


def _families(figures: dict[str, Any]) -> Iterator[Metric]:
    streams = _streams(figures["streams"], figures["bounds_ms"])
    rows = [*_service(figures), *_nodes(figures), *streams, *_own(figures["metrics"])]
    for kind, name, text, label, values in rows:
        family = kind(name, text, labels=label.split())
        for key, value in values.items():
            labels = key if isinstance(key, tuple) else (str(key),)
            family.add_metric(labels, *(value if kind is _HISTOGRAM else (value,)))
        yield family


def _service(figures: dict[str, Any]) -> Iterable[_Row]:
    requests, connections, hand_over = figures["requests"], figures["connections"], figures["hand_over"]
    workers = {worker["index"]: worker for worker in figures["workers"]}
    gpus = {gpu["index"]: gpu for gpu in figures["gpus"]}
    answered = {
        (*_asked(model, method), method, answers.utf8_text(outcome).decode()): count  # a handler's code may be any text
        for model, methods in requests["by_model"].items()
        for method, each in methods.items()
        for outcome, count in each["outcomes"].items()
    }
    parts = {part: hand_over[f"{part}_ms"] / 1000 for part in ("slot_wait", "there", "in_engine", "back")}
    return [
        (_COUNTER, "torchpipe_requests", "Calls answered, by outcome: ok or the error's code",
            "model version protocol method outcome", answered),
        (_HISTOGRAM, "torchpipe_request_seconds", "Time of a call that runs the pipe, in a worker",
            "model version protocol", _latencies(requests["by_model"], figures["bounds_ms"])),
        (_GAUGE, "torchpipe_requests_pending", "Requests in flight in the pipelines", "", {(): requests["inflight"]}),
        (_GAUGE, "torchpipe_connections", "Open connections", "", {(): connections["open"]}),
        (_COUNTER, "torchpipe_connections_accepted", "Accepted connections", "", {(): connections["accepted"]}),
        (_COUNTER, "torchpipe_connections_refused", "Refused at the limit", "", {(): connections["refused"]}),
        (_COUNTER, "torchpipe_connections_evicted", "Idle ones closed for new ones", "", {(): connections["evicted"]}),
        (_COUNTER, "torchpipe_worker_restarts", "Restarts of workers and engine processes, by reason",
            "reason", {"died": 0, **figures["restarts_by_reason"]}),
        (_COUNTER, "torchpipe_reloads", "Reloads, loads and unloads, by outcome", "outcome", figures["reloads"]),
        (_GAUGE, "torchpipe_reload_successful", "0 if the last of them failed", "", {(): figures["reload_successful"]}),
        (_COUNTER, "torchpipe_log_lines_dropped", "Log lines dropped because the reader was too slow", "",
            {(): figures["log_lines_dropped"]}),
        (_GAUGE, "torchpipe_workers", "Worker processes, by state", "state", _states(figures["workers"])),
        (_GAUGE, "torchpipe_worker_resident_bytes", "Memory of a worker", "worker", _column(workers, "rss_bytes")),
        (_GAUGE, "torchpipe_worker_responding", "1 if a worker makes progress", "worker",
            _column(workers, "responding")),
        (_GAUGE, "torchpipe_ready", "1 if requests are accepted", "", {(): figures["ready"]}),
        (_GAUGE, "torchpipe_uptime_seconds", "Since the start", "", {(): figures["uptime_s"]}),
        (_GAUGE, "torchpipe_engine_processes", "Processes that run shared nodes, by state", "state",
            _states(figures["engines"])),
        (_COUNTER, "torchpipe_hand_over_requests", "Answers of engine processes", "", {(): hand_over["requests"]}),
        (_COUNTER, "torchpipe_hand_over_seconds",
            "Their time: waiting for a slot, on the way there, inside, on the way back", "part", parts),
        (_GAUGE, "torchpipe_gpu_memory_used_bytes", "Memory of a GPU used by all processes", "gpu",
            _column(gpus, "used_bytes")),
        (_GAUGE, "torchpipe_gpu_memory_bytes", "Memory of a GPU", "gpu", _column(gpus, "total_bytes")),
    ]  # fmt: skip


def _asked(model: str, method: str) -> tuple[str, str, str]:
    """The labels of a model's requests: its name, its version, the protocol."""
    name, _, version = model.rpartition("/")
    return name, version, protocol_of(method)


def _latencies(by_model: dict[str, Any], bounds_ms: list[float]) -> dict[tuple[str, ...], Any]:
    """The times of calls that run the pipe."""
    sums: dict[tuple[str, ...], Any] = {}
    for model, methods in by_model.items():
        for method, each in methods.items():
            if "latency" in each:
                labels, times = _asked(model, method), {"counts": each["latency"], "sum_ms": each["latency_ms"]}
                sums[labels] = add(sums.get(labels, {}), times)
    return {labels: _times(times["counts"], times["sum_ms"], bounds_ms) for labels, times in sums.items()}


def _nodes(figures: dict[str, Any]) -> Iterator[_Row]:
    nodes = figures["nodes"]
    for kind, rows in ((_COUNTER, NODE_COUNTERS), (_GAUGE, NODE_GAUGES)):
        for key, name, text in rows:
            yield kind, name, text, "node", _column(nodes, key)
    for key, name, text in NODE_TIMES:
        times = {
            node: _times(each["histograms"][key], each[f"{key}_ms"], figures["bounds_ms"])
            for node, each in nodes.items()
        }
        yield _HISTOGRAM, name, text, "node", times
    sizes = {node: _sizes(each["batch_sizes"], each["max"]) for node, each in nodes.items()}
    yield _HISTOGRAM, "torchpipe_node_batch_size", "Requests in a batch", "node", sizes


def _streams(streams: dict[str, Any], bounds_ms: list[float]) -> Iterable[_Row]:
    frames = {(name, outcome): count for name, one in streams.items() for outcome, count in one["frames"].items()}
    playing = {name: one["state"] == "playing" for name, one in streams.items()}
    read = {name: one for name, one in streams.items() if one["age"] is not None}
    ages = {name: _times(one["age"]["counts"], one["age"]["sum_ms"], bounds_ms) for name, one in read.items()}
    reconnects = _column(streams, "reconnects")
    return [
        (_COUNTER, "torchpipe_stream_frames", "Frames of a stream, by outcome", "stream outcome", frames),
        (_COUNTER, "torchpipe_stream_reconnects", "Times that a stream was opened again", "stream", reconnects),
        (_GAUGE, "torchpipe_stream_playing", "1 if a stream delivers frames", "stream", playing),
        (_HISTOGRAM, "torchpipe_stream_age_seconds", "Time from a frame's arrival to its result", "stream", ages),
    ]


def _own(metrics: dict[str, Any]) -> Iterator[_Row]:
    """The metrics of custom backends."""
    kinds = {"counter": _COUNTER, "gauge": _GAUGE, "histogram": _HISTOGRAM}
    for name, family in metrics.items():
        bounds = family.get("bounds", ())
        values = {
            tuple(sample["labels"].values()): (_cumulated(bounds, sample["counts"]), sample["sum"])
            if family["kind"] == "histogram"
            else sample["value"]
            for sample in family["samples"]
        }
        yield kinds[family["kind"]], name, family["help"], " ".join(family["labels"]), values


def _column(rows: dict[Any, Any], key: str) -> dict[Any, Any]:
    return {name: row[key] for name, row in rows.items()}


def _states(processes: list[dict[str, Any]]) -> dict[str, int]:
    return {"ready": 0, **Counter(process["state"] for process in processes)}


def _times(counts: list[int], sum_ms: float, bounds_ms: list[float]) -> tuple[list[tuple[str, float]], float]:
    """Cumulative counts by upper bound in seconds, and the sum in seconds."""
    return _cumulated([bound / 1000 for bound in bounds_ms], counts), sum_ms / 1000


def _sizes(batch_sizes: dict[int, int], most: int) -> tuple[list[tuple[str, float]], float]:
    """Buckets by powers of two, the same from the start: one that appeared later would lack its past."""
    bounds = [2**power for power in range((max([most, *batch_sizes]) - 1).bit_length() + 1)]
    counts = [0] * (len(bounds) + 1)
    for size, count in batch_sizes.items():
        counts[bisect_left(bounds, size)] += count
    return _cumulated(bounds, counts), sum(size * count for size, count in batch_sizes.items())


def _cumulated(bounds: Iterable[float], counts: list[int]) -> list[tuple[str, float]]:
    names = [*(repr(float(bound)) for bound in bounds), "+Inf"]
    return list(zip(names, accumulate(counts), strict=True))
