"""SyncTensor and friends: one stream for each instance, one wait at the end, tensors safe across streams."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from conftest import Register
from kit.gpu import backend_of, forward, needs_gpu, photo, two_devices
from kit.waits import in_threads

from torchpipe_py import Backend, ItemBackend, pipe

pytestmark = needs_gpu


class Stream(ItemBackend):
    """Result is the handle of the stream that PyTorch would use now."""

    def forward_item(self, item: dict[str, Any]) -> None:
        item["result"] = torch.cuda.current_stream().cuda_stream


class Slow(Backend):
    """Result is data plus one, after GPU work of some milliseconds; nothing waits for it here."""

    def max(self) -> int:
        return 4

    def forward(self, items: list[dict[str, Any]]) -> None:
        for item in items:
            torch.cuda._sleep(3_000_000)
            item["result"] = item["data"] + 1


class Looker(ItemBackend):
    """Notes whether the stream's work is done; result is data."""

    def forward_item(self, item: dict[str, Any]) -> None:
        item.setdefault("idle", []).append(torch.cuda.current_stream().query())
        item["result"] = item["data"]


@pytest.mark.parametrize("backend", ["SyncTensor[{0}]", "S[{0},SyncTensor]", "StreamGuard[S[{0}]]", "Torch[{0}]"])
def test_every_instance_has_a_stream_of_its_own(register: Register, backend: str) -> None:
    node = {"backend": backend.format(register(Stream))}
    seen = set()
    with pipe(node) as one, pipe(node) as two:
        for run in (one, two, one, two):
            seen.add(run({"data": 0})["result"])
    assert len(seen) == 2
    assert torch.cuda.default_stream().cuda_stream not in seen


def test_neighbours_in_a_sequence_wait_each_for_its_own(register: Register) -> None:
    slow, look = register(type("SlowSingle", (Slow,), {"max": Backend.max})), register(Looker)
    config = {"backend": f"S[SyncTensor[{slow}],{look},SyncTensor[{slow}],{look}]"}
    with pipe(config) as run:
        assert run({"data": torch.zeros(1, 3, 8, 8, device="cuda")})["idle"] == [True, True]


def test_a_nested_one_uses_the_outer_ones_stream(register: Register) -> None:
    name = register(Stream)
    inner = f"SyncTensor[{name}]"
    keep = register(type("Keep", (ItemBackend,), {"forward_item": _keep, "__doc__": "Collects streams."}))
    config = {"backend": f"SyncTensor[S[{name},{keep},{inner},{keep},S[{name},SyncTensor]]]"}
    with backend_of(config) as backend:
        (item,) = forward(backend, [0])
    assert item["kept"] == [item["result"], item["result"]]


def _keep(self: Any, item: dict[str, Any]) -> None:
    item.setdefault("kept", []).append(item["data"])
    item["result"] = item["data"]


def test_results_are_complete_when_they_leave(register: Register) -> None:
    name = register(Slow)
    with pipe({"backend": f"SyncTensor[{name}]", "instance_num": 2}) as run:
        for number in range(20):
            item = run({"data": torch.full((1, 3, 64, 64), float(number), device="cuda")})
            with torch.cuda.stream(torch.cuda.Stream()):  # ordered with nothing
                assert item["result"].sum().item() == (number + 1) * 3 * 64 * 64


def test_memory_dropped_on_the_way_is_not_used_again_too_soon(register: Register) -> None:
    """Producer, slow consumer, many requests: every tensor is dropped while others are made."""
    name = register(Slow)
    config = {
        "make": {"backend": "SyncTensor[S[Mat2Tensor,ResizeTensor]]", "resize_h": 64, "resize_w": 64, "next": "slow"},
        "slow": {"backend": f"SyncTensor[{name}]", "instance_num": 3, "batching_timeout": 1, "next": "loose"},
        "loose": {"backend": "ResizeTensor", "resize_h": 32, "resize_w": 32, "instance_num": 2},  # guards itself
    }
    wrong: list[Any] = []
    with pipe(config) as run:

        def client(seed: int) -> None:
            for number in range(60):
                value = (seed * 60 + number) % 250
                item = run({"data": np.full((64, 64, 3), value, np.uint8)})
                if not bool((item["result"] == value + 1).all()):
                    wrong.append((value, item["result"].unique().tolist()))

        in_threads(8, client)
    assert wrong[:3] == []


def test_a_tensor_still_in_the_making_on_the_default_stream_is_waited_for() -> None:
    with pipe({"backend": "SyncTensor[ResizeTensor]", "resize_h": 8, "resize_w": 8}) as run:
        for number in range(10):
            torch.cuda._sleep(20_000_000)
            item = run({"data": torch.full((1, 3, 64, 64), float(number), device="cuda")})
            assert bool((item["result"] == number).all())


def test_mat2tensor_goes_to_the_gpu_and_to_the_cpu_if_told() -> None:
    mat = photo(20, 30, 0)
    for device, expected in (("", "cuda"), ("cuda", "cuda"), ("cpu", "cpu")):
        with backend_of({"backend": "Mat2Tensor", "device": device}) as backend:
            (item,) = forward(backend, [mat])
        assert item["result"].device.type == expected
        assert item["result"].is_contiguous()
        assert np.array_equal(item["result"][0].permute(1, 2, 0).cpu().numpy(), mat)


@two_devices
def test_device_id_is_where_the_work_is_done() -> None:
    config = {"backend": "SyncTensor[S[Mat2Tensor,ResizeTensor]]", "resize_h": 8, "resize_w": 8, "device_id": 1}
    with pipe(config) as run:
        result = run({"data": photo(20, 30, 0)})["result"]
        assert result.device == torch.device("cuda", 1)
    with pipe({**config, "backend": "SyncTensor[ResizeTensor]", "device_id": 0}) as run:
        moved = run({"data": result})["result"]
        assert moved.device == torch.device("cuda", 0)
        assert torch.equal(moved.cpu(), result.cpu())
