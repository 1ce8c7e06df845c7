"""Pipes inside of other objects, and parts inside of pipes, for tests of what callers cannot see or bring about."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

from torchpipe_py import pipe


def runtime_of(p: pipe) -> Any:
    return p._runtime


def node_of(p: pipe, name: str = "node") -> Any:
    return runtime_of(p).nodes[name]


def backend_of(p: pipe, name: str = "node") -> Any:
    """The backend of a node's first instance."""
    return node_of(p, name).instances[0].backend


@contextmanager
def pipes_of(module: ModuleType) -> Iterator[list[pipe]]:
    """The pipes that ``module`` makes meanwhile."""
    made: list[pipe] = []

    def make(*args: Any, **keys: Any) -> pipe:
        made.append(pipe(*args, **keys))
        return made[-1]

    with mock.patch.object(module, "pipe", make):
        yield made
