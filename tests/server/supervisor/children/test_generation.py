"""Which engine process a worker uses, and what is said of an ``--engines`` that is not followed."""

from __future__ import annotations

import logging
from unittest import mock

import pytest
from torchpipe_server.options import parse_options
from torchpipe_server.supervisor.children.generation import Generation

SHARED = {"global": {}, "model": {"backend": "Identity", "shared": True}}


@pytest.mark.parametrize(
    ("args", "engines"),
    [
        ("--workers=1", []),
        ("--workers=3", [0, 0, 0]),
        ("--workers=5 --engines=2", [0, 1, 0, 1, 0]),
        ("--workers=2 --engines=4", [0, 1]),
        ("--workers=4 --devices=0,1", [0, 1, 0, 1]),
        ("--workers=6 --devices=0,1 --engines=2", [0, 1, 2, 3, 0, 1]),
    ],
)
def test_workers_share_the_engine_processes_of_their_device(args: str, engines: list[int]) -> None:
    options = parse_options(["x.toml", *args.split()])
    generation = Generation(SHARED, options)
    used = [generation.engine_of(worker) for worker in generation.workers]
    assert [engine.index for engine in used if engine is not None] == engines
    devices = len(options.device_numbers) or 1
    for worker, engine in zip(generation.workers, used, strict=True):
        assert engine is None or engine.index % devices == worker.index % devices


@pytest.mark.parametrize(
    ("args", "shared", "line"),
    [
        (
            "--workers=2 --engines=4",
            True,
            "--engines 4: 2 engine processes instead of 4, one for each worker (--workers)",
        ),
        ("--workers=3 --engines=2", False, "--engines 2 does nothing: no node has shared = true"),
        ("--engines=2", True, "--engines 2 does nothing: it takes --workers of 2 or more"),
        ("--workers=3 --engines=2", True, ""),
        ("--workers=3", False, ""),
    ],
)
def test_engines_that_are_not_started_are_told(
    args: str, shared: bool, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    tables = {"global": {}, "model": {"backend": "Identity", "shared": shared}}
    Generation(tables, parse_options(["x.toml", *args.split()]))
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == ([line] if line else [])


@pytest.mark.parametrize(
    ("args", "lines"),
    [
        ("--workers=1", []),
        ("--workers=2", ["shared nodes (model, rank) run in 1 engine process for 2 workers: engine process 0"]),
        (
            "--workers=4 --devices=3,5",
            [
                "shared nodes (model, rank) run in 2 engine processes for 4 workers: "
                "engine process 0 on CUDA device 3, engine process 1 on CUDA device 5"
            ],
        ),
    ],
)
def test_the_log_names_the_engine_processes(args: str, lines: list[str], caplog: pytest.LogCaptureFixture) -> None:
    shared = {"shared": True}
    tables = {"global": {}, "decode": {"next": "model"}, "model": {**shared, "next": "rank"}, "rank": shared}
    caplog.set_level(logging.INFO, "torchpipe_server")
    options = parse_options(["x.toml", *args.split()])
    first = Generation(tables, options)
    assert caplog.messages == [], "it may never serve"
    first.tell_engines(options)
    assert caplog.messages == lines
    for engine in first.engines:
        engine.child = mock.Mock(is_ready=True)
    caplog.clear()
    Generation(tables, options, first).tell_engines(options, first)
    assert caplog.messages == [f"{line}, as before" for line in lines]
