"""The experiments' figures as tables in Markdown and as plots."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchpipe_py.training import TrainingError
from torchpipe_py.training.errors import library

Figures = dict[str, Any]


def report(folder: Path, only: str | None = None) -> str:
    """Tables of what ``folder`` holds; without ``only`` they go to ``report.md`` there, with a plot each."""
    parts = []
    for name, (title, table, plot) in PARTS.items():
        path = folder / f"{name}.json"
        if (only not in (None, name)) or not path.exists():
            continue
        try:
            figures: Figures = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise TrainingError(f"{path}: no figures of an experiment: {error}") from error
        machine = figures.get("machine", "")
        machine = machine.get("device", "") if isinstance(machine, dict) else machine
        parts.append(f"## {title}\n\n{machine}\n\n{table(figures)}")
        if only is None:
            picture = folder / f"{name}.png"
            picture.unlink(missing_ok=True)
            try:
                plot(figures, picture)
            except TrainingError as error:
                parts[-1] += f"\nNo plot: {error}\n"
            if picture.exists():
                parts[-1] += f"\n![{title}]({picture.name})\n"
    if not parts:
        raise TrainingError(f"{folder}: no figures there; run accuracy, throughput or epochs first")
    text = "\n".join(parts)
    if only is None:
        (folder / "report.md").write_text(text, encoding="utf-8")
    return text


def _markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


@contextmanager
def _axes(path: Path, width: float, height: float) -> Iterator[Any]:
    """To draw a plot on, of so many inches, which is written to ``path``."""
    pyplot = library("matplotlib.pyplot", "matplotlib", "a plot of the report")
    pyplot.switch_backend("agg")
    figure, axes = pyplot.subplots(figsize=(width, height), layout="constrained")
    yield axes
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


# -- accuracy -------------------------------------------------------------------------------------------------------


def _accuracy(figures: Figures) -> str:
    rows = []
    for row in figures["rows"]:
        if "not_measured" in row:
            rows.append([row["name"], f"not measured: {row['not_measured']}", *[""] * 5])
            continue
        cells = [f"{row['accuracy']:.2%} ({row['low']:.2%} to {row['high']:.2%})"]
        cells += [f"{row['recall']:.2%}", f"{row['precision']:.2%}"]
        gap = row.get("difference")
        cells += ["", "", ""] if gap is None else _gap(row, gap)
        rows.append([row["name"], *cells])
    header = ["", "top-1 (95 % interval)", "recall", "precision", "difference (95 %)", "same class", "score differs by"]
    return _markdown(header, rows)


def _gap(row: Figures, gap: Figures) -> list[str]:
    interval = f"{100 * gap['value']:+.2f} ({100 * gap['low']:+.2f} to {100 * gap['high']:+.2f}) points"
    return [interval, f"{row['agreement']['share']:.2%}", f"{row['agreement']['largest']:.2g}"]


def _plot_accuracy(figures: Figures, path: Path) -> None:
    rows = [row for row in figures["rows"] if "accuracy" in row][::-1]
    with _axes(path, 9, 0.6 * len(rows) + 1.2) as axes:
        for place, row in enumerate(rows):
            value, low, high = (100 * row[key] for key in ("accuracy", "low", "high"))
            axes.errorbar(value, place, xerr=[[value - low], [high - value]], fmt="o", capsize=4, color="tab:blue")
        axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
        axes.set_xlabel(f"top-1 accuracy of {figures['images']} images, %, with 95 % intervals")
        axes.grid(axis="x", alpha=0.3)


# -- throughput -----------------------------------------------------------------------------------------------------


def _throughput(figures: Figures) -> str:
    workers, sizes = (sorted({row[key] for row in figures["rows"]}) for key in ("workers", "batch_size"))
    rows = []
    for name in dict.fromkeys(row["name"] for row in figures["rows"]):
        for size in sizes:
            by_workers = {
                row["workers"]: row for row in figures["rows"] if (row["name"], row["batch_size"]) == (name, size)
            }
            if by_workers:
                rows.append([f"{name}, batches of {size}", *(_rate(by_workers.get(count)) for count in workers)])
    return _markdown(["images/s", *(f"{count} workers" for count in workers)], rows)


def _rate(row: Figures | None) -> str:
    if row is None:
        return ""
    return f"{row['images_per_s']:.0f}" if row.get("images_per_s") else "not measured"


def _plot_throughput(figures: Figures, path: Path) -> None:
    rows = [row for row in figures["rows"] if row.get("images_per_s")]
    if not rows:
        return
    size, workers = max(row["batch_size"] for row in rows), sorted({row["workers"] for row in rows})
    with _axes(path, 9, 5) as axes:
        for name in dict.fromkeys(row["name"] for row in rows):
            mine = [row for row in rows if (row["name"], row["batch_size"]) == (name, size)]
            points = sorted((row["workers"], row["images_per_s"]) for row in mine)
            axes.plot(*zip(*points, strict=True), marker="o", label=name)
        axes.set_xscale("log", base=2)
        axes.set_xticks(workers, list(map(str, workers)))
        axes.set_xlabel(f"workers (threads of DALI); batches of {size}")
        axes.set_ylabel("images/s")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


# -- epochs ---------------------------------------------------------------------------------------------------------


def _epochs(figures: Figures) -> str:
    rows = []
    for row in figures["rows"]:
        if "not_measured" in row:
            rows.append([row["name"], f"not measured: {row['not_measured']}", "", "", "", ""])
            continue
        scaling = f"{row['scaling']:.2f}" if "scaling" in row else ""
        memory = " / ".join(map(str, row["memory_mib"]))
        cells = [
            f"{row['seconds']:.2f}",
            f"{row['images_per_s']:.0f}",
            scaling,
            f"{row['waited_for_data']:.0%}",
            memory,
        ]
        rows.append([row["name"], *cells])
    header = ["", "s per epoch", "images/s", "against one GPU", "waited for data", "MiB on each GPU"]
    return _markdown([f"{figures['arch']}, batches of {figures['batch']} a GPU", *header[1:]], rows)


def _plot_epochs(figures: Figures, path: Path) -> None:
    rows = [row for row in figures["rows"] if "images_per_s" in row][::-1]
    with _axes(path, 8, 0.5 * len(rows) + 1.2) as axes:
        axes.barh([row["name"] for row in rows], [row["images_per_s"] for row in rows])
        axes.set_xlabel(f"images/s, {figures['arch']}")
        axes.grid(axis="x", alpha=0.3)


PARTS: dict[str, tuple[str, Callable[[Figures], str], Callable[[Figures, Path], None]]] = {
    "accuracy": ("Trained and served on the same pixels, and not", _accuracy, _plot_accuracy),
    "throughput": ("Loaders", _throughput, _plot_throughput),
    "epochs": ("An epoch", _epochs, _plot_epochs),
}
