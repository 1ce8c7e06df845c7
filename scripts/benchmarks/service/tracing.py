"""What OpenTelemetry's spans cost: two services without them, and two that trace one request in a hundred."""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from benchmarks.common import Load, Report, in_rounds, medians, test_jpeg
from benchmarks.service.servers import run_clients, serving

CLIENTS = 8
CONFIG = "configs/demo.toml"
_SERVICES: dict[str, list[str]] = {
    "off": [],
    "1 %": ["--trace-ratio", "0.01"],
    "off, another": [],
    "1 %, another": ["--trace-ratio", "0.01"],
}
_FIGURES: dict[str, Callable[[Load], float]] = {
    "QPS": lambda load: load.qps,
    "CPU time for a request": lambda load: load.cpu_ms,
}


def tracing(seconds: float, rounds: int) -> Report:
    """Their ratios in each round. Like services differ too: take many short rounds, ``--rounds 20 --seconds 0.5``."""
    jpeg = test_jpeg()
    report = Report(f"tracing: demo, {len(jpeg) / 1000:.0f} KB JPEG, {CLIENTS} client processes, console exporter")
    if importlib.util.find_spec("opentelemetry") is None:
        report.remarks.append("no OpenTelemetry: not installed (extra 'otel')")
        return report
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "image.jpg").write_bytes(jpeg)
        subjects: dict[str, Callable[[], Load]] = {}
        for name, options in _SERVICES.items():
            port = stack.enter_context(serving(CONFIG, options, {"OTEL_TRACES_EXPORTER": "console"}))
            subjects[name] = partial(run_clients, port, folder, CLIENTS, seconds)
        rows = in_rounds(subjects, max(rounds, 2))
    loads = medians(rows)
    report.add(loads, {name: f"{load.cpu_ms:.3f} ms CPU" for name, load in loads.items()})
    for what, of in _FIGURES.items():
        rounds_of = [[of(load) for load in loads] for loads in zip(*rows.values(), strict=True)]
        traced = [(on + other_on) / (off + other_off) for off, on, other_off, other_on in rounds_of]
        alike = [other_off / off for off, _, other_off, _ in rounds_of]
        report.remarks += [f"{what}, 1 % against off: {_spread(traced)}", f"{what}, off against off: {_spread(alike)}"]
        if what == "QPS":
            report.require("QPS, 1 % against off", statistics.median(traced), low=0.98)
    return report


def _spread(ratios: Sequence[float]) -> str:
    low, median, high = statistics.quantiles(ratios, n=4)
    return f"{median:.3f}, half of the rounds between {low:.3f} and {high:.3f}"
