from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from torchpipe_server.supervisor import metrics as service

from torchpipe_py import pipe
from torchpipe_py.ray.metrics import Metrics
from torchpipe_py.ray.scaling import FIGURE, QueueTime, request_ms


class Library:
    """In place of ``ray.serve.metrics``: ``told`` has what a metric comes to."""

    def __init__(self) -> None:
        self.told: Counter[Any] = Counter()
        self.names: set[str] = set()

    def _metric(self, name: str, **options: Any) -> Any:
        told = self.told
        self.names.add(name)

        class Metric:
            def inc(self, value: float, tags: dict[str, str]) -> None:
                told[name, tags["node"]] += value  # type: ignore[assignment]

            def set(self, value: float, tags: dict[str, str]) -> None:
                told[name, tags["node"]] = value  # type: ignore[assignment]

            def observe(self, value: float, tags: dict[str, str]) -> None:
                told[name, tags["node"], value] += 1

        return Metric()

    Counter = Gauge = Histogram = _metric


def test_the_names_are_those_of_the_service() -> None:
    library = Library()
    Metrics(library)
    families = (*service._NODE_COUNTERS, *service._NODE_GAUGES, *service._NODE_TIMES)
    assert library.names <= {name for _, name, _ in families} | {"torchpipe_node_batch_size"}
    assert len(library.names) > 10


def test_only_what_is_new_is_told() -> None:
    library = Library()
    metrics = Metrics(library)
    with pipe({"a": {"next": "b"}, "b": {}}) as p:
        p([{"data": 1}, {"data": 2}])
        metrics.tell(p)
        assert library.told["torchpipe_node_requests", "b"] == 2
        assert library.told["torchpipe_node_batch_size", "a", 1] == 2
        metrics.tell(p)
        p({"data": 3})
        metrics.tell(p)
        assert library.told["torchpipe_node_requests", "b"] == 3
        assert library.told["torchpipe_node_batch_size", "a", 1] == 3
        seconds = p.stats()["nodes"]["a"]["compute_ms"] / 1000
        assert library.told["torchpipe_node_compute_seconds", "a"] == pytest.approx(seconds)
        assert library.told["torchpipe_node_pending", "a"] == 0


def test_an_exchanged_pipe_counts_on() -> None:
    library = Library()
    metrics = Metrics(library)
    for _ in range(2):
        with pipe({"backend": "Identity"}) as p:
            p([{"data": 1}, {"data": 2}])
            metrics.tell(p)
    assert library.told["torchpipe_node_requests", "node"] == 4


def test_the_slowest_node_says_how_long_a_request_keeps_it() -> None:
    fast = {"compute_ms": 10.0, "requests": 10, "instances": 1}
    slow = {"compute_ms": 80.0, "requests": 10, "instances": 2}
    idle = {"compute_ms": 0.0, "requests": 0, "instances": 1}
    assert request_ms({"nodes": {"a": fast, "b": slow, "c": idle}}) == 4.0
    assert request_ms({"nodes": {"c": idle}}) == 0.0


class Context:
    """What Serve tells a policy."""

    total_num_requests, target_num_replicas = 100.0, 3

    def __init__(self, **request_ms: float) -> None:
        self.aggregated_metrics = {FIGURE: request_ms}


def test_replicas_for_a_queue_time() -> None:
    # 100 requests of 4 ms each are 400 ms of work, which eight replicas do in 50 ms.
    assert QueueTime(target_ms=50.0)(Context(a=3.0, b=5.0, new=0.0)) == (8.0, {})


def test_as_many_as_there_are_while_nothing_is_known() -> None:
    assert QueueTime(target_ms=50.0)(Context(new=0.0)) == (3, {})
