"""Arrays of other libraries, without a copy: whatever speaks DLPack or the CUDA array interface.

CuPy, Numba, PyCUDA, CV-CUDA, nvImageCodec and JAX do. PyTorch Tensors and NumPy arrays, which every backend takes as
they are, never come here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from torchpipe_py.errors import InvalidRequest

_DEVICES = (1, 2, 3, 13)  # of DLPack: the host, CUDA, pinned and managed memory
_LEGACY, _PER_THREAD = 1, 2  # streams of the CUDA array interface that are no handles


def is_foreign(value: Any) -> bool:
    """Whether ``value`` is an array of another library than PyTorch and NumPy."""
    is_ours = isinstance(value, np.ndarray) or hasattr(value, "detach")
    return not is_ours and (hasattr(value, "__dlpack__") or hasattr(value, "__cuda_array_interface__"))


def to_tensor(value: Any) -> Any:
    """A foreign array as a ``torch.Tensor`` of the same shape and memory, on its own device.

    Work that is queued on the current stream from now on runs after the work of the array's stream. ``value`` must not
    be freed before that has run: keep it in the request's dict. Raises ``InvalidRequest`` for an array that PyTorch
    cannot take: of another kind of device, complex or structured, with a negative stride, or only to be read.
    """
    import torch

    name = type(value).__name__
    device = value.__dlpack_device__()[0] if hasattr(value, "__dlpack_device__") else _DEVICES[0]
    if device not in _DEVICES:
        raise InvalidRequest(f"an array ({name}) on a device of DLPack's type {int(device)}; expected the host or CUDA")
    if any(stride < 0 for stride in _strides(value)):
        raise InvalidRequest(f"an array ({name}) with a negative stride: pass a copy of it")
    try:
        tensor = torch.from_dlpack(value) if hasattr(value, "__dlpack__") else _by_interface(value)
    except Exception as error:  # each library raises its own
        raise InvalidRequest(f"an array ({name}) that PyTorch cannot take: {str(error)[:200]}") from error
    if tensor.is_complex():
        raise InvalidRequest(f"an array ({name}) of {tensor.dtype}; expected real numbers")
    return tensor


def to_host_array(value: Any) -> np.ndarray | None:
    """A foreign array on the host as an array of NumPy with the same memory; ``None`` for one on a GPU."""
    tensor = to_tensor(value)
    array: np.ndarray | None = tensor.numpy() if tensor.is_cpu else None
    return array


def _strides(value: Any) -> Sequence[int]:
    """The array's strides, as far as it tells.

    NOTE: PyTorch ends the process on a negative one that comes by DLPack.
    """
    known = getattr(value, "__cuda_array_interface__", None) or {}
    strides = known.get("strides") or getattr(value, "strides", None)
    if strides is None:
        try:
            strides = np.from_dlpack(value).strides
        except Exception:  # on a GPU, or of a type that NumPy lacks
            return ()
    return tuple(strides) if isinstance(strides, (tuple, list)) else ()


def _by_interface(value: Any) -> Any:
    """A tensor with the memory of an array that has only ``__cuda_array_interface__``."""
    import torch

    tensor = torch.as_tensor(value, device="cuda")
    current = torch.cuda.current_stream(tensor.device)
    stream = value.__cuda_array_interface__.get("stream")
    # NOTE: None asks for no waiting, but PyCUDA's arrays say so while work on the default stream writes them.
    if stream in (None, _LEGACY):
        producer = torch.cuda.default_stream(tensor.device)
    else:
        producer = torch.cuda.ExternalStream(_PER_THREAD if stream == _PER_THREAD else stream, tensor.device)
    if producer != current:
        current.wait_stream(producer)
    return tensor
