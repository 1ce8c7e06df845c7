"""A CPU in place of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from torchpipe_py.backends import cuda
from torchpipe_py.backends.model.tensorrt import TensorrtTensor


class FakeStream:
    """Stands in for a ``torch.cuda.Stream``."""

    cuda_stream = 0

    def query(self) -> bool:
        return False

    def synchronize(self) -> None: ...


class FakeGuard:
    """Stands in for a ``StreamGuard``; its device is the CPU."""

    is_cuda = True
    device = torch.device("cpu")
    stream = FakeStream()

    def __init__(self, config: Any) -> None: ...

    @contextmanager
    def active(self) -> Iterator[None]:
        yield

    def synchronize(self, batch: int = 1) -> None: ...

    def run(self, forward: Callable[[list[Any]], None], items: list[Any]) -> None:
        forward(items)

    def close(self) -> None: ...


def cpu_as_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets backends that need a GPU run on the CPU, without CUDA graphs: their logic on the host can be tested."""
    empty = torch.empty
    monkeypatch.setattr(cuda, "StreamGuard", FakeGuard)
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory=False, **more: empty(*args, **more))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: FakeStream())
    monkeypatch.setattr(TensorrtTensor, "use_graphs", False)
