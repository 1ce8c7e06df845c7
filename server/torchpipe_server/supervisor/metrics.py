"""The figures as Prometheus metrics; names follow those of Triton where there is one of the kind."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from torchpipe_py.wire import answers

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Of a node, as counters: the key of its totals, the metric, what it says.
_NODE_COUNTERS = (
    ("requests", "torchpipe_node_requests", "Requests that a node's backend was run on"),
    ("batches", "torchpipe_node_batches", "Batches that a node has run"),
    ("failed", "torchpipe_node_failures", "Requests whose backend raised"),
    ("expired", "torchpipe_node_expired", "Requests whose deadline passed in a node's queue"),
)
_NODE_GAUGES = (
    ("queued", "torchpipe_node_pending", "Requests in a node's queue"),
    ("instances", "torchpipe_node_instances", "Instances of a node, of all workers"),
    ("alive", "torchpipe_node_instances_alive", "Instances of a node whose thread runs"),
    ("busy", "torchpipe_node_instances_busy", "Instances of a node that are computing"),
    ("oldest_batch_s", "torchpipe_node_oldest_batch_seconds", "For how long the oldest batch of a node runs"),
)
# Of requests to engine processes: the key of the totals, the label.
_HAND_OVER = (("slot_wait_ms", "slot_wait"), ("there_ms", "there"), ("in_engine_ms", "in_engine"), ("back_ms", "back"))
_NODE_TIMES = (
    ("queue", "torchpipe_node_queue_seconds", "Time of a request from its arrival at a node until it was taken"),
    ("batch_wait", "torchpipe_node_batch_wait_seconds", "Time of a request from then until its batch was closed"),
    ("compute", "torchpipe_node_compute_seconds", "Time of a batch in a node's backend"),
)


def render(figures: dict[str, Any]) -> bytes:
    """What ``/metrics`` answers, of what ``/stats`` does."""
    registry = CollectorRegistry()
    registry.register(_FiguresCollector(figures))
    return generate_latest(registry)


class _FiguresCollector(Collector):
    def __init__(self, figures: dict[str, Any]) -> None:
        self._figures = figures

    def collect(self) -> Iterable[Metric]:
        """Every family, once."""
        yield from _service(self._figures)
        yield from _nodes(self._figures["nodes"], self._figures["bounds_ms"])
        yield from _engines(self._figures)
        yield from _gpus(self._figures["gpus"])


def _service(figures: dict[str, Any]) -> Iterator[Metric]:
    requests, connections = figures["requests"], figures["connections"]
    answered = CounterMetricFamily(
        "torchpipe_requests",
        "Calls answered, by method and outcome: ok or the error's code",
        labels=("method", "outcome"),
    )
    for method, outcomes in requests["by_method"].items():
        for outcome, count in outcomes.items():
            answered.add_metric((method, answers.utf8_text(outcome).decode()), count)  # a handler's own code
    yield answered
    latency = requests["latency"]
    duration = HistogramMetricFamily("torchpipe_request_seconds", "Time of a call that runs the pipe, in a worker")
    duration.add_metric((), *_histogram(latency["counts"], latency["sum_ms"], figures["bounds_ms"]))
    yield duration
    yield _gauge("torchpipe_requests_pending", "Requests in flight in the pipelines", requests["inflight"])
    yield _gauge("torchpipe_connections", "Connections that are open", connections["open"])
    yield CounterMetricFamily("torchpipe_connections_accepted", "Since the start", value=connections["accepted"])
    yield CounterMetricFamily("torchpipe_connections_refused", "For want of room", value=connections["refused"])
    yield CounterMetricFamily("torchpipe_connections_evicted", "Idle, for a newcomer", value=connections["evicted"])
    restarts = CounterMetricFamily(
        "torchpipe_worker_restarts", "Workers and engine processes started again, by why they ended", labels=("reason",)
    )
    for reason, count in sorted({"died": 0, **figures["restarts_by_reason"]}.items()):
        restarts.add_metric((reason,), count)
    yield restarts
    dropped = figures["log_lines_dropped"]
    yield CounterMetricFamily("torchpipe_log_lines_dropped", "Log lines that nobody took in time", value=dropped)
    yield _states("torchpipe_workers", "Worker processes, by state", figures["workers"])
    memory = GaugeMetricFamily("torchpipe_worker_resident_bytes", "Memory of a worker", labels=("worker",))
    responding = GaugeMetricFamily("torchpipe_worker_responding", "1 where a worker makes progress", labels=("worker",))
    for worker in figures["workers"]:
        memory.add_metric((str(worker["index"]),), worker["rss_bytes"])
        responding.add_metric((str(worker["index"]),), int(worker["responding"]))
    yield memory
    yield responding
    yield _gauge("torchpipe_ready", "1 where requests are taken", int(figures["ready"]))
    yield _gauge("torchpipe_uptime_seconds", "Since the start", figures["uptime_s"])


def _nodes(nodes: dict[str, Any], bounds_ms: list[float]) -> Iterator[Metric]:
    for key, name, text in _NODE_COUNTERS:
        counter = CounterMetricFamily(name, text, labels=("node",))
        for node, figures in nodes.items():
            counter.add_metric((node,), figures[key])
        yield counter
    for key, name, text in _NODE_GAUGES:
        gauge = GaugeMetricFamily(name, text, labels=("node",))
        for node, figures in nodes.items():
            gauge.add_metric((node,), figures[key])
        yield gauge
    for key, name, text in _NODE_TIMES:
        times = HistogramMetricFamily(name, text, labels=("node",))
        for node, figures in nodes.items():
            times.add_metric((node,), *_histogram(figures["histograms"][key], figures[f"{key}_ms"], bounds_ms))
        yield times
    sizes = HistogramMetricFamily("torchpipe_node_batch_size", "Requests in a batch", labels=("node",))
    for node, figures in nodes.items():
        sizes.add_metric((node,), *_sizes(figures["batch_sizes"], figures["max"]))
    yield sizes


def _engines(figures: dict[str, Any]) -> Iterator[Metric]:
    yield _states("torchpipe_engine_processes", "Processes that run shared nodes, by state", figures["engines"])
    totals = figures["hand_over"]
    requests = totals["requests"]
    yield CounterMetricFamily("torchpipe_hand_over_requests", "Answers of engine processes", value=requests)
    seconds = CounterMetricFamily(
        "torchpipe_hand_over_seconds",
        "Time of these: waiting for a slot, on their way there, in there, on their way back",
        labels=("part",),
    )
    for key, part in _HAND_OVER:
        seconds.add_metric((part,), totals[key] / 1000)
    yield seconds


def _states(name: str, text: str, processes: list[dict[str, Any]]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=("state",))
    states = [process["state"] for process in processes]
    for state in sorted({"ready", *states}):
        family.add_metric((state,), states.count(state))
    return family


def _gpus(gpus: list[dict[str, Any]]) -> Iterator[Metric]:
    for key, name in (("used_bytes", "torchpipe_gpu_memory_used_bytes"), ("total_bytes", "torchpipe_gpu_memory_bytes")):
        gauge = GaugeMetricFamily(name, "Memory of a GPU, by all processes", labels=("gpu",))
        for gpu in gpus:
            gauge.add_metric((str(gpu["index"]),), gpu[key])
        yield gauge


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _histogram(counts: list[int], sum_ms: float, bounds_ms: list[float]) -> tuple[list[tuple[str, float]], float]:
    """Cumulated counts by upper bound in seconds, and the sum in seconds."""
    return _cumulated([bound / 1000 for bound in bounds_ms], counts), sum_ms / 1000


def _sizes(batch_sizes: dict[str, int], most: int) -> tuple[list[tuple[str, float]], float]:
    """By powers of two, and always the same: of a bound that appears later, nobody knows what it was before."""
    counted = {int(size): count for size, count in batch_sizes.items()}
    bounds = [2**power for power in range((max([most, *counted]) - 1).bit_length() + 1)]
    counts = [0] * (len(bounds) + 1)
    for size, count in counted.items():
        counts[bisect_left(bounds, size)] += count
    return _cumulated(bounds, counts), sum(size * count for size, count in counted.items())


def _cumulated(bounds: Iterable[float], counts: list[int]) -> list[tuple[str, float]]:
    buckets: list[tuple[str, float]] = []
    running = 0
    for bound, count in zip([*map(float, bounds), float("inf")], counts, strict=True):
        running += count
        buckets.append(("+Inf" if bound == float("inf") else repr(bound), running))
    return buckets
