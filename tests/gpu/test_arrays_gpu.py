"""Arrays of other libraries on a GPU: without a copy, in the order of their streams; PyCUDA beside PyTorch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.gpu import needs_gpu

from torchpipe_py import import_code, pipe
from torchpipe_py.backends.arrays import to_tensor

pytestmark = needs_gpu

ROOT = Path(__file__).resolve().parents[2]
SIDE = 2048


class OnStream:
    """An array that has only ``__cuda_array_interface__``, written by work that is still queued on ``stream``."""

    def __init__(self, tensor: torch.Tensor, stream: Any) -> None:
        self._tensor, self._stream = tensor, stream

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self._tensor.__cuda_array_interface__, "stream": self._stream, "version": 3}


class ByDlpack:
    """An array that speaks DLPack alone."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **options: Any) -> Any:
        return self._tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()


def slowly_filled(value: float) -> torch.Tensor:
    """A Tensor that the current stream fills with ``value`` after work of some milliseconds."""
    busy = torch.rand(SIDE, SIDE, device="cuda")
    for _ in range(20):
        busy = busy @ busy
        busy /= busy.norm()
    return torch.zeros(1, 3, 64, 64, device="cuda").fill_(value).add_(busy[0, 0] * 0)


@pytest.mark.parametrize("form", ["own stream", "default stream", "no stream", "dlpack"])
def test_backend_waits_for_the_arrays_stream(form: str) -> None:
    own = torch.cuda.Stream()
    with pipe({"backend": "ResizeTensor", "resize_h": 64, "resize_w": 64}) as run:
        run({"data": torch.zeros(1, 3, 64, 64, device="cuda")})
        for value in (3.0, 5.0, 7.0):
            with torch.cuda.stream(own if form in ("own stream", "dlpack") else torch.cuda.default_stream()):
                tensor = slowly_filled(value)
                stream = {"own stream": own.cuda_stream, "default stream": 1, "no stream": None}.get(form)
                given = ByDlpack(tensor) if form == "dlpack" else OnStream(tensor, stream)
                if form == "dlpack":
                    own.synchronize()  # a producer that is read on another thread has to be complete, or to know it
            result = run({"data": given})["result"]
            assert result.is_cuda
            assert torch.equal(result, torch.full_like(result, value))


def test_memory_is_shared() -> None:
    tensor = torch.rand(1, 3, 8, 8, device="cuda")
    for given in (ByDlpack(tensor), OnStream(tensor, None)):
        assert to_tensor(given).data_ptr() == tensor.data_ptr()


def test_pycuda_arrays_and_a_kernel_between_two_nodes() -> None:
    pytest.importorskip("pycuda", reason="PyCUDA is not installed: pip install 'torchpipe_py[pycuda]'")
    import pycuda.autoprimaryctx  # noqa: F401
    from pycuda import gpuarray

    array = np.random.default_rng(0).random((1, 3, 16, 16), np.float32)
    with pipe({"backend": "ResizeTensor", "resize_h": 16, "resize_w": 16}) as run:
        result = run({"data": gpuarray.to_gpu(array)})["result"]
    assert result.is_cuda
    assert np.array_equal(result.cpu().numpy(), array)
    sys.path.append(str(ROOT / "configs" / "examples"))
    import_code(str(ROOT / "configs" / "examples" / "pycuda_kernel.py"))
    image = (ROOT / "configs" / "demo" / "images" / "ring_00.jpg").read_bytes()
    plain = {"backend": "SyncTensor[S[DecodeMat,Mat2Tensor]]"}
    with pipe(plain) as run, pipe(str(ROOT / "configs" / "examples" / "pycuda_kernel.toml")) as bright:
        pixels = run({"data": image})["result"].float()
        results = [item["result"] for item in bright([{"data": image} for _ in range(8)])]
    wanted = torch.nn.functional.interpolate(255 * (pixels / 255) ** 0.5, (224, 224), mode="bilinear")
    for result in results:
        assert result.is_cuda
        torch.testing.assert_close(result, wanted, rtol=1e-4, atol=0.05)
