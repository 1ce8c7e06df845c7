"""A CPU in place of a GPU; the rest of the names here are those of ``kit``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from kit.backends import Gate as Gate
from kit.waits import PROGRAM_WAIT as PROGRAM_WAIT
from kit.waits import WAIT as WAIT
from kit.waits import error_of as error_of
from kit.waits import eventually as eventually
from kit.waits import in_threads as in_threads
from kit.waits import is_alive as is_alive
from kit.waits import outcome as outcome

from torchpipe_py import pipe
from torchpipe_py.backends import cuda
from torchpipe_py.backends.model.cuda_model import CudaModel
from torchpipe_py.runtime.hand_over import HandOverNode


def idle_count(node: Any) -> int:
    """How many instances of a node of a pipe are idle."""
    if isinstance(node, HandOverNode):
        return len(node.instances) - node.busy()
    return len(node.idle.to_wake) + len(getattr(node.idle, "_followers", ()))


def all_idle(p: pipe) -> pipe:
    """The pipe, once nothing is in flight and all its instances are idle."""
    nodes = p._runtime.nodes.values()
    eventually(
        lambda: not p.stats()["inflight"] and all(idle_count(node) == len(node.instances) for node in nodes), str(p)
    )
    return p


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
    monkeypatch.setattr(CudaModel, "use_graphs", False)
