"""A CUDA kernel of one's own between two nodes, by PyCUDA (``pip install 'torchpipe_py[pycuda]'``).

    torchpipe check configs/examples/pycuda_kernel.toml --import configs/examples/pycuda_kernel.py

A node's result is a ``GPUArray``, which the next node takes as it is, without a copy. PyCUDA and PyTorch share the
device's primary context, so both see the same memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from torchpipe_py import ItemBackend, Param, register_backend

SOURCE = """
__global__ void to_power(const float *given, float *made, int count, float power) {
    int index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index < count) made[index] = 255.0f * powf(given[index] / 255.0f, power);
}
"""
THREADS = 256  # of a block


@register_backend
class GammaGpu(ItemBackend):
    """A Tensor of 0..255 on the GPU to ``255 * (x / 255) ** power``, float32, a ``GPUArray`` of the same shape."""

    power = Param(float, 0.5, doc="exponent", low=0.01, high=100)

    def setup(self) -> None:
        import pycuda.driver as cuda
        import torch
        from pycuda import gpuarray
        from pycuda.compiler import SourceModule

        cuda.init()
        # PyTorch's context of the device, current on this instance's thread, to which setup, forward and close belong.
        self._context = cuda.Device(torch.cuda.current_device()).retain_primary_context()
        self._context.push()
        self._torch, self._array = torch, gpuarray.GPUArray
        self._kernel = SourceModule(SOURCE).get_function("to_power")

    def forward_item(self, item: dict[str, Any]) -> None:
        given = item["data"].float().contiguous()
        # Memory of PyTorch's: any thread may free it. PyCUDA frees its own only on the thread that made it.
        memory = self._torch.empty_like(given)
        made = self._array(tuple(given.shape), np.float32, base=memory, gpudata=memory.data_ptr())
        # PyCUDA runs it on the default stream: after what made the Tensor, and before its memory is used again.
        # The next node waits for the default stream before it reads `made`.
        default = self._torch.cuda.default_stream()
        default.wait_stream(self._torch.cuda.current_stream())
        given.record_stream(default)
        memory.record_stream(default)
        blocks = -(-given.numel() // THREADS)
        pointer, count, power = np.intp(given.data_ptr()), np.int32(given.numel()), np.float32(self.power)
        self._kernel(pointer, np.intp(memory.data_ptr()), count, power, grid=(blocks, 1), block=(THREADS, 1, 1))
        item["result"] = made

    def close(self) -> None:
        self._context.pop()
