"""A service under load: what its clients measure, and what its nodes, its processes and the machine do meanwhile."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil

from benchmarks.common import Load
from benchmarks.service.servers import client_report, load_in
from torchpipe_py.tools.load.measure import HAND_OVER_TIMES, hand_over_figures, node_figures

MIB = 2**20


def observed(http: int, port: int, images: Path, clients: int, seconds: float) -> tuple[Load, str]:
    """A run, and a note of what the nodes and the machine did meanwhile; ``http`` is the port of ``/stats``."""
    before = stats(http)
    report = client_report(port, images, clients, seconds)
    after = stats(http)
    parts = [f"machine {100 * (report['machine_busy'] or 0):.0f}% busy"]
    for node, figures in node_figures(before, after, after["time"] - before["time"]).items():
        if figures["requests"]:
            batch = f" in {figures['mean_batch']:.1f}s" if figures["mean_batch"] > 1 else ""
            times = "+".join(f"{figures[key]:.1f}" for key in ("queue_ms", "batch_wait_ms", "compute_ms"))
            parts.append(f"{node}{batch} {times} ms")
    parts += hand_over(before, after)
    return load_in(report), ", ".join(parts)


def stats(http: int) -> dict[str, Any]:
    """The answer of ``/stats``."""
    with urlopen(f"http://127.0.0.1:{http}/stats", timeout=10) as answer:
        told: dict[str, Any] = json.load(answer)
    return told


def hand_over(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Milliseconds of a request on its way to an engine process and back, where there is one that tells."""
    figures = hand_over_figures(before["hand_over"], after["hand_over"])
    if figures is None:
        return []
    return ["slot+there+engine+back " + "+".join(f"{figures[key]:.2f}" for key in HAND_OVER_TIMES) + " ms"]


def pss_mib(pid: int) -> float:
    """Memory of a process and all its descendants; what several of them map counts once."""
    total = 0
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        with suppress(psutil.Error):
            memory = process.memory_full_info()
            total += getattr(memory, "pss", memory.rss)  # not every kernel tells PSS
    return total / MIB


def gpu_mib() -> float:
    """Memory in use on the first GPU, all processes' together; 0 where no ``nvidia-smi`` tells it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0.0
    query = [program, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    told = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30).stdout.split()
    return float(told[0]) if told and told[0].isdigit() else 0.0
