"""What goes from a worker to the training process, with the Tensors in it by value."""

from __future__ import annotations

import pickle
from io import BytesIO
from typing import Any

import torch

from torchpipe_py.proc.process.transport import reduce_tensor


def pickled(value: Any) -> bytes:
    """``value`` for ``pickle.loads``; raises what cannot be pickled."""
    content = BytesIO()
    _Pickler(content).dump(value)
    return content.getvalue()


class _Pickler(pickle.Pickler):
    """Pickles Tensors by value.

    NOTE: multiprocessing's takes a file descriptor for each, and pickle alone all the memory that one is a part of.
    """

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor:
            return NotImplemented
        try:
            return reduce_tensor(torch, value)
        except (TypeError, RuntimeError):  # on a GPU, sparse, quantised
            return value.detach().clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
