"""What a module of tests with processes of its own must not leave behind."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import psutil
import pytest

from kit.waits import eventually


@pytest.fixture(scope="module", autouse=True)
def nothing_left() -> Iterator[None]:
    """In each module that imports it: every child is gone and reaped, with its descriptors and what it shared."""
    gc.collect()  # what earlier tests left behind must not go in the middle of this one
    fds, shared = len(os.listdir("/proc/self/fd")), _shared_memory()
    children = set(psutil.Process().children())
    yield
    gc.collect()
    eventually(lambda: set(psutil.Process().children()) <= children, "a process is left")
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= fds, "a descriptor is left")
    eventually(lambda: _shared_memory() <= shared, "shared memory is left")


def _shared_memory() -> set[str]:
    """But for what other programs beside the tests have of ``multiprocessing`` and PyTorch, and no backend here."""
    mine = f"torch_{os.getpid()}_"
    names = os.listdir("/dev/shm")
    return {name for name in names if name.startswith(mine) or not name.startswith(("sem.mp-", "torch_"))}
