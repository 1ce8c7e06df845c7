"""What the benchmark of int8 on a GPU says of an engine's layers."""

from __future__ import annotations

from benchmarks.gpu.int8 import where

from torchpipe_py.backends.models.engine.precision import Layer


def test_times_add_up_by_what_layers_compute_in() -> None:
    times = {"conv1": 0.2, "conv2": 0.1, "fc": 0.05, "pool": 0.01, "Reformatting CopyNode for Input Tensor 0": 0.3}
    layers = [Layer("conv1", "int8", ""), Layer("conv2", "int8", ""), Layer("fc", "fp16", "")]
    assert where(times, layers) == [
        "layers: 0.660 ms: 2 int8 0.300, 1 copies 0.300, 1 fp16 0.050, 1 other layers 0.010",
        "longest: Reformatting CopyNode for Input Tensor 0 0.300, conv1 0.200, conv2 0.100",
    ]
