from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from torchpipe_py.plan.build import plan_pipeline
from torchpipe_py.ray.resources import UNKNOWN_BATCH, Resources, resources_of

ROOT = Path(__file__).parents[2]


def needed(config: dict[str, Any] | str) -> Resources:
    return resources_of(plan_pipeline(config))


def test_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert needed("configs/demo_nodes.toml") == Resources(
        num_cpus=2.0, num_gpus=0.0, max_ongoing_requests=20_000, max_queued_requests=10_000, busy_requests=20
    )


def test_the_node_with_most_threads_says_how_many_cpus(classifier: str) -> None:
    model = {"backend": "OnnxTensor", "model": classifier, "threads": 3, "instance_num": 2}
    decode = {"backend": "DecodeMat", "color": "rgb", "instance_num": 4, "next": "m"}
    assert needed({"decode": decode, "m": model}).num_cpus == 6.0


@pytest.mark.parametrize(
    ("backend", "gpus"),
    [
        ({"backend": "DecodeTensor"}, 1.0),
        ({"backend": "SyncTensor[DecodeTensor]", "device_id": 1}, 2.0),
        ({"backend": "Mat2Tensor"}, 0.0),
        ({"backend": "Mat2Tensor", "device": "cuda"}, 1.0),
        ({"backend": "FirstAvailable[DecodeTensor,DecodeMat]"}, 0.0),
        ({"backend": "FirstAvailable[DecodeTensor,Mat2Tensor]", "device": "cuda"}, 1.0),
    ],
)
def test_gpus_are_for_what_cannot_do_without(backend: dict[str, Any], gpus: float) -> None:
    assert needed(backend).num_gpus == gpus


@pytest.mark.parametrize(("providers", "gpus"), [("CPUExecutionProvider", 0.0), ("CUDAExecutionProvider", 1.0)])
def test_a_provider_may_need_one(classifier: str, providers: str, gpus: float) -> None:
    assert needed({"backend": "OnnxTensor", "model": classifier, "providers": providers}).num_gpus == gpus


def test_a_node_that_needs_cuda_takes_no_cpus() -> None:
    assert needed({"backend": "DecodeTensor", "instance_num": 8}).num_cpus == 1.0


def test_a_batch_that_only_set_up_tells_is_taken_for_large(register: Any) -> None:
    class Own:
        def forward(self, items: list[dict[str, Any]]) -> None: ...

        def max(self) -> int:
            return 4

    assert needed({"backend": register(Own), "instance_num": 2}).busy_requests == 2 * 2 * UNKNOWN_BATCH


def test_max_inflight_bounds_them() -> None:
    found = needed({"backend": "Identity", "instance_num": 100, "max_inflight": 30})
    assert (found.busy_requests, found.max_ongoing_requests, found.max_queued_requests) == (30, 10_030, 30)
