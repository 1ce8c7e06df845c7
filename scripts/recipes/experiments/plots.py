"""The plots of the comparison of loaders, as SVG files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import Load, Report
from benchmarks.gpu.usage import GpuSample

from torchpipe_py.training.errors import library

COLOURS = {"torchvision": "tab:gray", "dali": "tab:green", "ours": "tab:blue"}
STYLES = (("-", "o"), ("--", "s"), (":", "^"), ("-.", "D"), ((0, (5, 1)), "v"))
"""Line and marker of the loaders of one colour, in turn."""


class Row(NamedTuple):
    """The medians of a loader with one batch size and number of workers."""

    name: str
    batch_size: int
    workers: int
    load: Load


def rows_of(report: Report) -> list[Row]:
    """The measured rows of a report."""
    rows = []
    for name, workers in report.loads:
        match = re.fullmatch(r"(.+), batches of (\d+), \{\} workers", name)
        if match is not None:
            rows.append(Row(match[1], int(match[2]), workers, report.median(name, workers)))
    return rows


def plot_all(reports: Mapping[str, Report], usage: Mapping[str, Sequence[GpuSample]], folder: Path) -> list[Path]:
    """Write a plot for each kind of figures: ``time``, ``validation``, ``throughput``, ``gpu``; return their paths.

    ``usage``: samples of the GPU's use by row of ``epochs``.
    """
    paths = []
    if "epochs" in reports and (rows := rows_of(reports["epochs"])):
        paths += [plot_time(rows, folder / "time.svg"), plot_validation(rows, folder / "validation.svg")]
        if any(usage.values()):
            paths.append(plot_gpu(rows, usage, folder / "gpu.svg"))
    if "throughput" in reports and (rows := rows_of(reports["throughput"])):
        paths.append(plot_throughput(rows, folder / "throughput.svg"))
    return paths


def plot_time(rows: Sequence[Row], path: Path) -> Path:
    """Seconds over workers: training above, training and validation below; a column for each batch size."""
    sizes = sorted({row.batch_size for row in rows})
    parts: dict[str, Callable[[Load], float]] = {
        "training": lambda load: load.more["train s"],
        "training and validation": lambda load: load.more["train s"] + load.more["val s"],
    }
    with _figure(path, 2, len(sizes)) as axes:
        for line, (title, seconds) in enumerate(parts.items()):
            for column, size in enumerate(sizes):
                mine = [row for row in rows if row.batch_size == size]
                _lines(axes[line][column], mine, seconds, f"{title}, batches of {size}", "seconds of an epoch")
    return path


def plot_validation(rows: Sequence[Row], path: Path) -> Path:
    """Training by torchvision, validation by each loader: seconds over batch sizes, at the most workers."""
    most = max(row.workers for row in rows)
    by = {(row.name, row.batch_size): row.load for row in rows if row.workers == most}
    sizes = sorted({size for _, size in by})
    with _figure(path, 1, 1) as axes:
        names = list(dict.fromkeys(name for name, _ in by))
        for name in names:
            points = [
                (size, by["torchvision", size].more["train s"] + by[name, size].more["val s"])
                for size in sizes
                if ("torchvision", size) in by and (name, size) in by
            ]
            if points:
                axes[0][0].plot(*zip(*points, strict=True), label=name, **_style(name, names))
        axes[0][0].set_title(f"training by torchvision, validation by …, {most} workers")
        axes[0][0].set_xlabel("batch size")
        _finish(axes[0][0], sizes, "seconds of an epoch")
    return path


def plot_throughput(rows: Sequence[Row], path: Path) -> Path:
    """Images per second over workers, of loaders alone."""
    size = max(row.batch_size for row in rows)
    with _figure(path, 1, 1) as axes:
        mine = [row for row in rows if row.batch_size == size]
        _lines(axes[0][0], mine, lambda load: load.qps, f"loaders alone, batches of {size}", "images/s")
    return path


def plot_gpu(rows: Sequence[Row], usage: Mapping[str, Sequence[GpuSample]], path: Path) -> Path:
    """The GPU's use over the time of an epoch and its validation, and memory, of each loader at its fastest."""
    fastest = {
        name: max((row for row in rows if row.name == name), key=lambda row: row.load.qps)
        for name in dict.fromkeys(row.name for row in rows)
    }
    with _figure(path, 1, 2) as axes:
        for name, row in fastest.items():
            samples = usage.get(f"{name}, batches of {row.batch_size}, {row.workers} workers", ())
            points = [(sample.seconds, sample.busy) for sample in samples]
            if points:
                style = {**_style(name, list(fastest)), "marker": ""}
                axes[0][0].plot(*zip(*points, strict=True), label=name, **style)
        axes[0][0].set_title("GPU use in an epoch and its validation")
        axes[0][0].set_xlabel("seconds")
        axes[0][0].set_ylabel("percent of the time with a kernel")
        axes[0][0].grid(alpha=0.3)
        names = list(fastest)
        axes[0][1].barh(names, [fastest[name].load.more["GPU MiB"] for name in names])
        axes[0][1].set_title("most GPU memory in use")
        axes[0][1].set_xlabel("MiB")
    return path


def _lines(axes: Any, rows: Sequence[Row], value: Callable[[Load], float], title: str, unit: str) -> None:
    workers = sorted({row.workers for row in rows})
    names = list(dict.fromkeys(row.name for row in rows))
    for name in names:
        points = sorted((row.workers, value(row.load)) for row in rows if row.name == name)
        axes.plot(*zip(*points, strict=True), label=name, **_style(name, names))
    axes.set_title(title)
    axes.set_xlabel("workers (threads of DALI)")
    _finish(axes, workers, unit)


def _finish(axes: Any, ticks: Sequence[int], unit: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, list(map(str, ticks)))
    axes.set_ylabel(unit)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _style(name: str, names: Sequence[str]) -> dict[str, Any]:
    """The look of one loader among ``names``: a colour for each library, lines and markers that differ within it."""
    library_of = name.partition("-")[0]
    same = [other for other in dict.fromkeys(names) if other.partition("-")[0] == library_of]
    line, marker = STYLES[same.index(name) % len(STYLES)]
    return {"color": COLOURS.get(library_of, "tab:red"), "linestyle": line, "marker": marker, "markersize": 5}


@contextmanager
def _figure(path: Path, lines: int, columns: int) -> Iterator[Any]:
    """Axes in a grid, with one legend for all, written to ``path``."""
    pyplot = library("matplotlib.pyplot", "matplotlib", "a plot")
    pyplot.switch_backend("agg")
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(5.5 * columns + 1.5, 3.6 * lines), layout="constrained", squeeze=False
    )
    yield axes
    handles: dict[str, Any] = {}
    for each in axes.flat:
        handles |= dict(zip(*each.get_legend_handles_labels()[::-1], strict=True))
    if handles:
        figure.legend(list(handles.values()), list(handles), loc="outside right upper")
    figure.savefig(path)
    pyplot.close(figure)
