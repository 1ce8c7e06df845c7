"""Figures as a worker reports them."""

from __future__ import annotations

from typing import Any

from torchpipe_py.runtime.record.statistics import COUNTS


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
        **{"requests": 10 * factor, "batches": 4 * factor, "failed": factor, "expired": 2 * factor, "shed": 3 * factor},
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


def stream(factor: int = 1) -> dict[str, Any]:
    """What a worker says of a stream."""
    frames = {"ok": 5 * factor, "dropped": 4 * factor}
    age = {"counts": counts(b12=5 * factor), "sum_ms": 15.0 * factor}
    return {"decoded": 9 * factor, "reconnects": factor, "frames": frames, "age": age, "now": {"state": "playing"}}


def of_method(outcomes: dict[str, int]) -> dict[str, Any]:
    """What a worker says of the requests to a model by one method."""
    total = sum(outcomes.values())
    return {"outcomes": outcomes, "latency_ms": 3.0 * total, "latency": counts(b12=total)}


def family(count: int = 1) -> dict[str, Any]:
    """What a worker says of a counter of a custom backend."""
    samples = [{"labels": {"camera": "door"}, "value": float(count)}]
    return {"kind": "counter", "help": "Faces found", "labels": ["camera"], "samples": samples}


MODEL = dict.fromkeys(("success_count", "success_ns", "fail_count", "fail_ns", "items", "admitted", "last_ms"), 2)


def worker(
    nodes: dict[str, Any], by_method: dict[str, Any], inflight: int = 1, model: str = "a/1", **more: Any
) -> dict[str, Any]:
    requests = {"by_model": {model: {method: of_method(outcomes) for method, outcomes in by_method.items()}}}
    rest = {
        "hand_over": {},
        "log_lines_dropped": 0,
        "gpus": [],
        "streams": {"yard": stream(inflight)},
        "models": {"a/1": MODEL},
        "metrics": {"faces": family(inflight)},
    }
    return {"inflight": inflight, "nodes": nodes, "requests": requests, **rest, **more}


ONE = worker({"model": node()}, {"infer_batch": {"ok": 9, "overloaded": 1}})
