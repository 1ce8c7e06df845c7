from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from torchpipe_py.plan.build import plan_pipeline
from torchpipe_py.ray.resources import UNKNOWN_BATCH, Resources, resources_of

ROOT = Path(__file__).parents[2]


def needed(config: dict[str, Any] | str) -> Resources:
    return resources_of(plan_pipeline(config))


def test_resources_of_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert needed("configs/demo_nodes.toml") == Resources(
        num_cpus=2.0, num_gpus=0.0, max_ongoing_requests=20_000, max_queued_requests=10_000, busy_requests=20
    )
    found = needed({"backend": "Identity", "instance_num": 100, "max_inflight": 30})
    assert (found.busy_requests, found.max_ongoing_requests, found.max_queued_requests) == (30, 10_030, 30)


@pytest.mark.parametrize(
    ("node", "cpus", "gpus"),
    [
        ({"backend": "DecodeTensor", "instance_num": 8}, 1.0, 1.0),
        ({"backend": "SyncTensor[DecodeTensor]", "device_id": 1}, 1.0, 2.0),
        ({"backend": "Mat2Tensor"}, 1.0, 0.0),
        ({"backend": "Mat2Tensor", "device": "cuda"}, 1.0, 1.0),
        ({"backend": "FirstAvailable[DecodeTensor,DecodeMat]", "instance_num": 1}, 1.0, 0.0),
        ({"backend": "FirstAvailable[DecodeTensor,Mat2Tensor]", "device": "cuda"}, 1.0, 1.0),
        ({"backend": "OnnxTensor", "providers": "CPUExecutionProvider"}, 1.0, 0.0),
        ({"backend": "OnnxTensor", "providers": "CUDAExecutionProvider"}, 1.0, 1.0),
        ({"backend": "OnnxTensor", "threads": 3, "instance_num": 2}, 6.0, 0.0),
    ],
)
def test_cpus_and_gpus_of_a_node(classifier: str, node: dict[str, Any], cpus: float, gpus: float) -> None:
    model = {"model": classifier} if node["backend"] == "OnnxTensor" else {}
    found = needed({**node, **model})
    assert (found.num_cpus, found.num_gpus) == (cpus, gpus)


def test_assumes_large_batch_if_known_only_after_setup(register: Any) -> None:
    class Own:
        def forward(self, items: list[dict[str, Any]]) -> None: ...

        def max(self) -> int:
            return 4

    assert needed({"backend": register(Own), "instance_num": 2}).busy_requests == 2 * 2 * UNKNOWN_BATCH
