"""What a worker and an engine process make of the configuration, and of the process that they run in."""

from __future__ import annotations

from typing import Any

import pytest
from torchpipe_server.options import parse_options
from torchpipe_server.worker import worker
from torchpipe_server.worker.service import engine_processes, make_plan

import torchpipe_py.malloc


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done to the process."""
    names: list[str] = []
    monkeypatch.setattr(worker, "limit_threads", lambda: names.append("threads"))
    monkeypatch.setattr(torchpipe_py.malloc, "keep_freed_memory", lambda: names.append("malloc"))
    return names


def test_a_plan_is_made_without_a_change_of_the_process(done: list[str]) -> None:
    options = parse_options(["x.toml", "--max-inflight", "7", "--import", "no_such_module"])
    tables: Any = {"global": {}, "a": {"backend": "Identity"}}
    assert list(make_plan(options, tables, 1).plans) == ["a"]
    assert tables["global"]["max_inflight"] == 7
    assert done == []


@pytest.mark.parametrize(
    ("flags", "shared", "workers", "engines"),
    [("--workers=1", False, 1, 1), ("--workers=4", False, 4, 1), ("--workers=4 --engines=2", True, 4, 2)],
)
def test_the_cores_are_divided_among_the_processes_that_run_a_node(
    flags: str, shared: bool, workers: int, engines: int
) -> None:
    options = parse_options(["x.toml", *flags.split()])
    tables: Any = {"global": {}, "a": {"backend": "Identity", "shared": shared}}
    assert make_plan(options, tables, options.workers).plans["a"].processes == workers
    assert engine_processes(options, tables) == engines


@pytest.mark.parametrize(
    ("flags", "backend", "expected"),
    [
        ("--workers=3 --engines=2 --devices=0,1", "Identity", 3),  # no more than workers
        ("--workers=8 --engines=2 --devices=0,1", "Identity", 4),
        ("--workers=8", "S[ResizeTensor,TensorrtTensor]", 1),
        ("--workers=8", "SyncTensor[S[DecodeTensor,ResizeTensor]]", 2),
        ("--workers=8 --engines=1", "DecodeTensor", 1),
    ],
)
def test_engine_processes_by_default(flags: str, backend: str, expected: int) -> None:
    options = parse_options(["x.toml", *flags.split()])
    assert engine_processes(options, {"a": {"backend": backend, "shared": True}}) == expected
