"""The service over Thrift on a GPU, against the classic recipe behind the same contract."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks.common import REPOSITORY, Load, Report, interleave, median_load, test_jpeg
from benchmarks.gpu.engines import SIDE, Engines
from benchmarks.gpu.in_process import WARM_UP, cores, cpu_pipe, gpu_pipe
from benchmarks.service.observed import observed
from benchmarks.service.servers import free_port, run_clients, serving, started
from torchpipe_py.tools.export.config import to_toml

WORKERS = (4, 8, 2, 1)
FEW, MANY = 20, 100


def served(engines: Engines, seconds: float, rounds: int) -> list[Report]:
    """A report without CUDA MPS and, where the machine has it, one with; both over 1 to 8 workers."""
    reports = [_sweep(engines, seconds, rounds, "without MPS", {})]
    with mps() as environment:
        if environment is None:
            reports[0].remarks.append("with MPS: not measured, nvidia-cuda-mps-control is not there or does not start")
        else:
            reports.append(_sweep(engines, seconds, rounds, "with MPS", environment))
    best = [load for report in reports for load in report.rows]
    base = max(row.qps for row in best if row.what.startswith("baseline"))
    few = [row for row in best if row.what.endswith(f"{FEW} clients") and not row.what.startswith("baseline")]
    many = [row for row in best if row.what.endswith(f"{MANY} clients")]
    last = reports[-1]
    alone = max(row.qps for row in few if ", 1 worker" in row.what)
    last.require(f"one worker, {FEW} clients, QPS against the baseline's", alone / base, low=5)
    last.require(
        f"the best number of workers, {FEW} clients, QPS against the baseline's",
        max(row.qps for row in few) / base,
        low=8,
    )
    quickest = max(many, key=lambda row: row.qps)
    last.require(f"QPS at {MANY} clients ({quickest.what})", quickest.qps, low=10_000)
    last.require("its p99, ms", quickest.p99 or 0.0, high=15)
    return reports


def _sweep(engines: Engines, seconds: float, rounds: int, how: str, environment: Mapping[str, str]) -> Report:
    """One service after the other, and the baseline in between: idle ones would still hold memory and contexts."""
    report = Report(f"g3g4: over Thrift, client processes on the same {cores()} cores, {how}")
    classic = [str(REPOSITORY / "scripts" / "baseline_server.py"), "--port", "0", "--engine", engines.engine(1)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "image.jpg").write_bytes(test_jpeg())
        base = stack.enter_context(started([*classic, "--size", str(SIDE)], {}))
        rounds_of: dict[str, list[Load]] = {}
        notes: dict[str, str] = {}
        for workers in WORKERS:
            rounds_of.setdefault(f"baseline, {FEW} clients", []).append(run_clients(base, folder, FEW, seconds))
            for name, config in configs(engines, workers).items():
                path = folder / f"{name}{workers}.toml".replace(" ", "_")
                path.write_text(to_toml(config), encoding="utf-8")
                what = f"{name}, {workers} worker{'s' * (workers > 1)}, {how}"
                subjects = {}
                http, began = free_port(), monotonic()
                options = ["--workers", str(workers), "--http-port", str(http)]
                with serving(str(path), options, environment) as port:
                    print(f"{what}: ready after {monotonic() - began:.1f} s", file=sys.stderr, flush=True)
                    run_clients(port, folder, MANY, WARM_UP)
                    for clients in (FEW, MANY):
                        subject = f"{what}, {clients} clients"
                        subjects[subject] = partial(_observed, notes, subject, http, port, folder, clients, seconds)
                    for subject, load in interleave(subjects, rounds).items():
                        rounds_of.setdefault(subject, []).append(load)
                        print(f"{subject}: {load} {notes.get(subject, '')}", file=sys.stderr, flush=True)
    loads = {name: median_load(values) for name, values in rounds_of.items()}
    report.add(loads, notes)
    return report


def _observed(
    notes: dict[str, str], name: str, http: int, port: int, folder: Path, clients: int, seconds: float
) -> Load:
    load, notes[name] = observed(http, port, folder, clients, seconds)
    return load


def configs(engines: Engines, workers: int, most: int = 8) -> dict[str, dict[str, Any]]:
    """What each of so many workers runs: with CPU decode, threads for three quarters of the cores together.

    A worker has 2 to 8 of them. ``most``: images in a batch of the model.
    """
    decoders = max(2, min(8, 3 * cores() // 4 // workers))
    instances = 2 if workers == 1 else 1
    return {
        "CPU decode": cpu_pipe(engines, decoders=decoders, most=most, instances=instances),
        "GPU decode": gpu_pipe(engines, most=most, instances=instances),
    }


@contextmanager
def mps() -> Iterator[Mapping[str, str] | None]:
    """The environment of processes that share the GPU by CUDA MPS, whose daemon runs meanwhile; ``None`` without."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        mine = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        environment = {**os.environ, **mine}
        if subprocess.run([control, "-d"], env=environment, check=False, capture_output=True).returncode:
            yield None
            return
        try:
            yield mine
        finally:
            subprocess.run([control], input="quit\n", env=environment, text=True, check=False, capture_output=True)
