"""Pure: several workers' figures as one service's, and those as Prometheus metrics."""

from __future__ import annotations

import copy
import math
from collections import Counter
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from torchpipe_server.supervisor.figures import add_lists, add_past, add_requests, service_figures
from torchpipe_server.supervisor.metrics import CONTENT_TYPE, render

from torchpipe_py.runtime.statistics import BOUNDS_MS, COUNTS


def counts(**places: int) -> list[int]:
    """``b3=2``: two in the third counter; ``beyond``: in the last one."""
    made = [0] * COUNTS
    for name, count in places.items():
        made[-1 if name == "beyond" else int(name[1:])] = count
    return made


def node(factor: int = 1, **changes: Any) -> dict[str, Any]:
    """What ``pipe.stats()`` says of a node that is ``factor`` times as busy as another one."""
    return {
        **{"instances": 2, "alive": 2, "min": 1, "max": 4, "queued": 3 * factor, "busy": 1},
        "oldest_batch_s": 0.5 * factor,
        **{"requests": 10 * factor, "batches": 4 * factor, "failed": factor, "expired": 2 * factor},
        **{"batch_sizes": {1: 2 * factor, 4: 2 * factor}},
        **{"queue_ms": 5.0 * factor, "batch_wait_ms": 1.0 * factor, "compute_ms": 40.0 * factor},
        "instance_compute_ms": [30.0 * factor, 10.0 * factor],
        "histograms": {
            "queue": counts(b3=10 * factor),
            "batch_wait": counts(b0=10 * factor),
            "compute": counts(b14=3 * factor, beyond=factor),
        },
        **changes,
    }


def worker(nodes: dict[str, Any], by_method: dict[str, Any], inflight: int = 1, **more: Any) -> dict[str, Any]:
    total = sum(count for found in by_method.values() for count in found.values())
    requests = {"by_method": by_method, "latency": {"counts": counts(b12=total), "sum_ms": 3.0 * total}}
    return {"inflight": inflight, "nodes": nodes, "requests": requests, **more}


ONE = worker({"model": node()}, {"infer_batch": {"ok": 9, "overloaded": 1}})
SHARED = {"requests": 2, "slot_wait_ms": 0.5, "there_ms": 1.0, "in_engine_ms": 8.0, "back_ms": 1.5}
NOTHING_SHARED = dict.fromkeys(SHARED, 0)
TWO = worker({"model": node(2)}, {"infer_batch": {"ok": 20}, "ping": {"ok": 3}}, inflight=2)


def test_two_workers_are_summed():
    before = copy.deepcopy((ONE, TWO))
    figures = service_figures([ONE, TWO], {})
    assert figures["requests"] == {
        "inflight": 3,
        "by_method": {"infer_batch": {"ok": 29, "overloaded": 1}, "ping": {"ok": 3}},
        "latency": {"counts": counts(b12=33), "sum_ms": 99.0},
    }
    assert figures["nodes"] == {
        "model": node(
            3,
            instances=4,
            alive=4,
            busy=2,
            oldest_batch_s=1.0,
            batch_sizes={"1": 6, "4": 6},
            instance_compute_ms=[30.0, 10.0, 60.0, 20.0],
        )
    }
    assert before == (ONE, TWO), "what the workers said stays theirs"


def test_totals_of_workers_that_ended_are_added_and_what_is_now_is_not():
    past = add_past({}, TWO)
    assert "inflight" not in past
    assert (
        not {"queued", "busy", "alive", "oldest_batch_s", "instances", "instance_compute_ms"}
        & past["nodes"]["model"].keys()
    )
    figures = service_figures([ONE], past)
    both = service_figures([ONE, TWO], {})
    assert figures["requests"] == {**both["requests"], "inflight": 1}
    model = figures["nodes"]["model"]
    now = ("instances", "alive", "queued", "busy", "oldest_batch_s", "instance_compute_ms", "min", "max")
    assert {key: model[key] for key in now} == {key: ONE["nodes"]["model"][key] for key in now}
    assert {key: model[key] for key in model if key not in now} == {
        key: value for key, value in both["nodes"]["model"].items() if key not in now
    }


def test_a_worker_may_end_in_any_order_of_others():
    one_after_the_other = add_past(add_past({}, ONE), TWO)
    assert one_after_the_other == add_past(add_past({}, TWO), ONE)
    again = add_past(one_after_the_other, ONE)
    assert again["requests"]["by_method"]["infer_batch"] == {"ok": 38, "overloaded": 2}
    assert again["nodes"]["model"]["batch_sizes"] == {"1": 8, "4": 8}
    assert service_figures([], again)["requests"]["latency"]["sum_ms"] == 3.0 * 43


def test_a_node_that_a_reload_took_away_is_forgotten_and_counts_on_when_it_comes_back():
    past = add_past({}, worker({"old": node(), "model": node()}, {}))
    figures = service_figures([worker({"model": node(), "new": node()}, {})], past)
    assert list(figures["nodes"]) == ["model", "new"]
    assert figures["nodes"]["model"]["requests"] == 20
    assert figures["nodes"]["new"]["requests"] == 10
    back = service_figures([worker({"old": node()}, {})], past)
    assert back["nodes"]["old"]["requests"] == 20


def test_during_a_reload_both_generations_are_there():
    old, new = worker({"old": node(), "model": node()}, {}), worker({"model": node(2)}, {})
    figures = service_figures([old, new], {})
    assert {name: found["requests"] for name, found in figures["nodes"].items()} == {"old": 10, "model": 30}


def test_nobody_there_and_nothing_told():
    assert service_figures([], {}) == {
        "requests": {"inflight": 0, "by_method": {}, "latency": {"counts": [0] * COUNTS, "sum_ms": 0}},
        "nodes": {},
        "hand_over": NOTHING_SHARED,
        "log_lines_dropped": 0,
        "gpus": [],
    }


def test_dropped_log_lines_are_those_of_all_who_were_there():
    past = add_past(add_past({}, {**ONE, "log_lines_dropped": 2}), TWO)
    assert service_figures([{**ONE, "log_lines_dropped": 5}, TWO], past)["log_lines_dropped"] == 7


def test_times_of_requests_to_engine_processes_are_those_of_all_who_were_there():
    some = {**ONE, "hand_over": SHARED}
    past = add_past(add_past({}, some), TWO)
    assert service_figures([some, TWO], past)["hand_over"] == {key: 2 * value for key, value in SHARED.items()}
    assert service_figures([ONE], add_past({}, TWO))["hand_over"] == NOTHING_SHARED


def test_a_gpu_that_two_workers_use_is_told_once_and_the_latest_counts():
    gpus = [{"index": index, "name": "GPU", "used_bytes": used, "total_bytes": 9} for index, used in ((1, 5), (0, 2))]
    found = service_figures([worker({}, {}, gpus=gpus), worker({}, {}, gpus=[{**gpus[0], "used_bytes": 6}])], {})
    assert [(gpu["index"], gpu["used_bytes"]) for gpu in found["gpus"]] == [(0, 2), (1, 6)]


def test_sums_and_outcomes():
    assert add_lists([[1, 2], [3, 4], [0, 1]]) == [4, 7]
    assert add_lists([]) == add_lists([[], []]) == []
    assert add_lists([[], [1, 2], [], [3, 4]]) == [4, 6]
    with pytest.raises(ValueError, match="zip"):
        add_lists([[1], [1, 2]])
    both = add_requests(ONE["requests"], TWO["requests"])
    outcomes = sum(map(Counter, both["by_method"].values()), Counter())
    assert outcomes == {"ok": 32, "overloaded": 1}


# -- metrics --------------------------------------------------------------------------------------------------------


def figures_of(*workers: dict[str, Any], past: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """As ``/stats`` tells them."""
    told = [
        {
            **{"index": index, "state": "ready" if index else "starting", "rss_bytes": 1000 * (index + 1)},
            "responding": bool(index),
        }
        for index in range(len(workers))
    ]
    return {
        **{"ready": True, "uptime_s": 12.5, "restarts": 3, "restarts_by_reason": {"died": 1, "hung_batch": 2}},
        **{"bounds_ms": BOUNDS_MS, "workers": told, "engines": []},
        "connections": {"open": 5, "max": 9, "accepted": 7, "refused": 2, "evicted": 3},
        **service_figures(workers, past or {}),
        **changes,
    }


def parsed(figures: dict[str, Any]) -> dict[str, Any]:
    return {family.name: family for family in text_string_to_metric_families(render(figures).decode())}


def samples(family: Any) -> dict[tuple[Any, ...], float]:
    return {(sample.name, *sample.labels.values()): sample.value for sample in family.samples}


def test_names_types_and_values():
    gpu = {"index": 1, "name": "GPU", "used_bytes": 4, "total_bytes": 9}
    engines = [{"state": "ready"}, {"state": "waiting"}, {"state": "ready"}]
    one = {**ONE, "log_lines_dropped": 8, "hand_over": SHARED}
    families = parsed(figures_of(one, {**TWO, "gpus": [gpu]}, engines=engines))
    assert {name: family.type for name, family in families.items()} == {
        "torchpipe_requests": "counter",
        "torchpipe_request_seconds": "histogram",
        "torchpipe_requests_pending": "gauge",
        "torchpipe_connections": "gauge",
        "torchpipe_connections_accepted": "counter",
        "torchpipe_connections_refused": "counter",
        "torchpipe_connections_evicted": "counter",
        "torchpipe_worker_restarts": "counter",
        "torchpipe_log_lines_dropped": "counter",
        "torchpipe_workers": "gauge",
        "torchpipe_worker_resident_bytes": "gauge",
        "torchpipe_worker_responding": "gauge",
        "torchpipe_ready": "gauge",
        "torchpipe_uptime_seconds": "gauge",
        "torchpipe_node_requests": "counter",
        "torchpipe_node_batches": "counter",
        "torchpipe_node_failures": "counter",
        "torchpipe_node_expired": "counter",
        "torchpipe_node_pending": "gauge",
        "torchpipe_node_instances": "gauge",
        "torchpipe_node_instances_alive": "gauge",
        "torchpipe_node_instances_busy": "gauge",
        "torchpipe_node_oldest_batch_seconds": "gauge",
        "torchpipe_node_queue_seconds": "histogram",
        "torchpipe_node_batch_wait_seconds": "histogram",
        "torchpipe_node_compute_seconds": "histogram",
        "torchpipe_node_batch_size": "histogram",
        "torchpipe_engine_processes": "gauge",
        "torchpipe_hand_over_requests": "counter",
        "torchpipe_hand_over_seconds": "counter",
        "torchpipe_gpu_memory_used_bytes": "gauge",
        "torchpipe_gpu_memory_bytes": "gauge",
    }
    assert all(family.documentation for family in families.values())
    assert samples(families["torchpipe_requests"]) == {
        ("torchpipe_requests_total", "infer_batch", "ok"): 29,
        ("torchpipe_requests_total", "infer_batch", "overloaded"): 1,
        ("torchpipe_requests_total", "ping", "ok"): 3,
    }
    single = {
        **{"requests_pending": 3, "connections": 5, "connections_accepted": 7, "connections_refused": 2},
        "connections_evicted": 3,
        **{"log_lines_dropped": 8, "ready": 1, "uptime_seconds": 12.5, "hand_over_requests": 2},
    }
    assert {name: families[f"torchpipe_{name}"].samples[0].value for name in single} == single
    assert samples(families["torchpipe_workers"]) == {
        ("torchpipe_workers", "ready"): 1,
        ("torchpipe_workers", "starting"): 1,
    }
    assert samples(families["torchpipe_engine_processes"]) == {
        ("torchpipe_engine_processes", "ready"): 2,
        ("torchpipe_engine_processes", "waiting"): 1,
    }
    assert {one.labels["part"]: one.value for one in families["torchpipe_hand_over_seconds"].samples} == {
        **{"slot_wait": 0.0005, "there": 0.001, "in_engine": 0.008, "back": 0.0015}
    }
    assert samples(families["torchpipe_worker_restarts"]) == {
        ("torchpipe_worker_restarts_total", "died"): 1,
        ("torchpipe_worker_restarts_total", "hung_batch"): 2,
    }
    assert samples(families["torchpipe_worker_responding"]) == {
        ("torchpipe_worker_responding", "0"): 0,
        ("torchpipe_worker_responding", "1"): 1,
    }
    assert samples(families["torchpipe_worker_resident_bytes"]) == {
        ("torchpipe_worker_resident_bytes", "0"): 1000,
        ("torchpipe_worker_resident_bytes", "1"): 2000,
    }
    per_node = {
        **{"node_requests": 30, "node_batches": 12, "node_failures": 3, "node_expired": 6, "node_pending": 9},
        **{"node_instances": 4, "node_instances_alive": 4, "node_instances_busy": 2},
        **{"node_oldest_batch_seconds": 1.0},
    }
    found = {name: families[f"torchpipe_{name}"].samples[0] for name in per_node}
    assert {name: one.value for name, one in found.items()} == per_node
    assert all(one.labels == {"node": "model"} for one in found.values())
    assert samples(families["torchpipe_gpu_memory_bytes"]) == {("torchpipe_gpu_memory_bytes", "1"): 9}
    assert CONTENT_TYPE.startswith("text/plain; version=0.0.4")


def test_half_a_character_in_an_outcome_leaves_the_other_figures():
    families = parsed(figures_of(worker({"model": node()}, {"infer": {"ok": 1, "mine\ud800": 2}})))
    assert samples(families["torchpipe_requests"]) == {
        ("torchpipe_requests_total", "infer", "ok"): 1,
        ("torchpipe_requests_total", "infer", "mine?"): 2,
    }


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


def test_histograms_are_in_seconds_and_cumulated():
    families = parsed(figures_of(ONE, TWO))
    buckets, count, total = histogram(families["torchpipe_request_seconds"])
    assert (count, total) == (33, pytest.approx(0.099))
    assert list(buckets)[:-1] == pytest.approx([bound / 1000 for bound in BOUNDS_MS])
    assert (buckets[0.002048], buckets[0.004096]) == (0, 33)
    buckets, count, total = histogram(families["torchpipe_node_compute_seconds"])
    assert (count, total) == (12, pytest.approx(0.12))
    assert [buckets[bound] for bound in (0.008192, 0.016384, 2**26 / 1e6, math.inf)] == [0, 9, 9, 12]
    for name in ("queue", "batch_wait"):
        assert histogram(families[f"torchpipe_node_{name}_seconds"])[1] == 30


def test_the_bounds_of_batch_sizes_are_there_from_the_start():
    sizes = {"3": 5, "7": 2}
    empty, some = (parsed(figures_of(worker({"model": node(max=7, batch_sizes=one)}, {}))) for one in ({}, sizes))
    name = "torchpipe_node_batch_size"
    assert histogram(empty[name]) == ({1: 0, 2: 0, 4: 0, 8: 0, math.inf: 0}, 0, 0)
    assert histogram(some[name]) == ({1: 0, 2: 0, 4: 5, 8: 7, math.inf: 7}, 7, 29)


@pytest.mark.parametrize(("most", "bounds"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 4]), (8, [1, 2, 4, 8])])
def test_the_bounds_of_batch_sizes_reach_the_largest(most, bounds):
    families = parsed(figures_of(worker({"model": node(max=most, batch_sizes={})}, {})))
    assert [*histogram(families["torchpipe_node_batch_size"])[0]] == [*bounds, math.inf]


def test_a_batch_of_an_earlier_configuration_may_be_larger_than_the_largest_now():
    families = parsed(figures_of(worker({"model": node(max=2, batch_sizes={"9": 1})}, {})))
    assert histogram(families["torchpipe_node_batch_size"])[0] == {1: 0, 2: 0, 4: 0, 8: 0, 16: 1, math.inf: 1}


def test_labels_may_be_anything():
    odd = 'größe "quoted" \\ \n{}'
    families = parsed(figures_of(worker({odd: node()}, {odd: {odd: 1}})))
    assert families["torchpipe_requests"].samples[0].labels == {"method": odd, "outcome": odd}
    assert families["torchpipe_node_requests"].samples[0].labels == {"node": odd}


def test_a_service_that_has_just_begun():
    none = {"by_method": {}, "latency": {"counts": [0] * COUNTS, "sum_ms": 0.0}}
    families = parsed(figures_of(requests={"inflight": 0, **none}))
    assert families["torchpipe_requests"].samples == []
    assert histogram(families["torchpipe_request_seconds"])[1:] == (0, 0)
    assert samples(families["torchpipe_workers"]) == {("torchpipe_workers", "ready"): 0}
