"""The preprocessing of the experiments: JPEG bytes to float32 1×3×size×size of 0..255, RGB, on the CPU or the GPU."""

from __future__ import annotations

from typing import Any

Config = dict[str, dict[str, Any]]


def pipe_on_cpu(size: int, instances: int) -> Config:
    """Decoded and resized by OpenCV, in so many threads."""
    backend = "S[DecodeMat,ResizeMat,cvtColorMat,Mat2Tensor]"
    return _preprocess(backend, size, color="rgb", device="cpu", instance_num=instances)


def pipe_on_gpu(size: int, most: int, instances: int = 1, decoder: str = "torchvision") -> Config:
    """Decoded and resized in batches of up to ``most``; with two instances one prepares while the other one decodes."""
    backend = "S[DecodeTensor,ResizeTensor,SyncTensor]"
    return _preprocess(backend, size, decoder=decoder, max=most, instance_num=instances)


def _preprocess(backend: str, size: int, **more: Any) -> Config:
    return {"preprocess": {"backend": backend, "resize_h": size, "resize_w": size, **more}}
