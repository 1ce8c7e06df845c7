"""The report as one self-contained HTML file: no script, nothing from elsewhere."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from html import escape
from typing import Any

from torchpipe_py.errors import counted
from torchpipe_py.html import document, table
from torchpipe_py.loadtest.measure.service import service_rows
from torchpipe_py.loadtest.measure.verdict import verdict
from torchpipe_py.loadtest.report.plots import run_plots, runs_plots
from torchpipe_py.loadtest.report.tables import HEADS, describe_arrivals, run_cells, search_line

STYLE = """body { max-width: 84rem; } h1 { margin-bottom: .3rem; }
.about { color: var(--soft); margin: 0 0 1rem; }
.badge { display: inline-block; padding: .15rem .7rem; border-radius: 1rem; color: #fff; font-weight: 600; }
.good { background: #2e7d3c; }
.doubtful { background: #9a5b00; } .bad { background: #b3261e; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .7rem; margin: 1.2rem 0; }
.tile { background: var(--card); border-radius: .5rem; padding: .6rem .9rem; }
.tile b { display: block; white-space: nowrap; font-size: 1.2rem; font-weight: 600;
  font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: .85rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: 1.2rem;
  margin-top: 1.2rem; }
figure { padding: .8rem .8rem .3rem; border: 1px solid var(--line); border-radius: .5rem; min-width: 0; }
figcaption { font-weight: 600; margin: 0 0 .2rem .2rem; } figure svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif; } svg text.number { font-size: 11px; }
svg .grid { stroke: var(--line); stroke-width: 1; } svg .axis, svg .tick { stroke: var(--soft); stroke-width: 1; }
svg .point { paint-order: stroke; stroke: var(--paper); stroke-width: 4px; }
.keys { display: flex; flex-wrap: wrap; gap: 0 1.2rem; margin: 0 0 .3rem .2rem; padding: 0; list-style: none;
  color: var(--soft); font-size: .85rem; }
.keys i { display: inline-block; width: 1.4rem; margin-right: .5rem; vertical-align: middle; }
svg polyline { stroke-width: 2; stroke-linejoin: round; }
svg .rule { stroke-width: 1.5; stroke-dasharray: 6 4; }
.runs td:not(:first-child):not(:last-child), .runs th:not(:first-child):not(:last-child) {
  text-align: right; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: 0 2.5rem; }
.notes li { overflow-wrap: anywhere; }
summary { margin-top: 1.2rem; font-weight: 600; }
"""

_COSTS = {
    "server CPU": "server_cpu_percent",
    "tester CPU": "tester_cpu_percent",
    "busiest client": "tester_busiest_client_percent",
    "other processes": "other_cpu_percent",
}
_LATENCY_NAMES = {name: name.replace("_", ".") for name in ("mean", "p50", "p90", "p99", "p99_9", "max", "min")}


def page(report: dict[str, Any]) -> str:
    """The whole file, of one run or of several; everything that a server or a user named is escaped."""
    runs = report.get("runs", [report])
    last = runs[-1]
    title = f"Load test of {last['settings']['host']}:{last['settings']['port']}"
    parts = [f"<h1>{escape(title)}</h1>", _about(last)]
    if "runs" not in report:
        parts += _run(report)
    else:
        if "search" in report:
            search = report["search"]
            state = "bad" if search["best_rate"] is None else "good" if search["valid"] else "doubtful"
            parts.append(_badge(search_line(report), state))
        elif report["stopped"] is not None:
            parts.append(_badge(report["stopped"], "bad"))
        parts += [f"<h2>Runs ({len(runs)})</h2>", table(HEADS, map(run_cells, runs), kind="runs")]
        parts.append(_plots(runs_plots(runs)))
        for run in runs:
            summary = f"<summary>{escape(run['point'])}: {escape(verdict(run))}</summary>"
            parts += [f"<details>{summary}", *_run(run), "</details>"]
    parts += _circumstances(last)
    return document(title, "\n".join(parts), STYLE)


def _about(report: dict[str, Any]) -> str:
    settings = report["settings"]
    load = f"{counted(settings['request_client'], 'client')}, {describe_arrivals(settings)}"
    if "point" in report:  # what differs from run to run is in the table
        load = "closed loop" if settings["arrivals"] == "closed" else f"{settings['arrivals']} arrivals"
    load += f", {counted(settings['request_batch'], 'image')} per call"
    return f'<p class="about">{escape(load)} · {escape(report["started_at"][:19].replace("T", " "))} UTC</p>'


def _run(report: dict[str, Any]) -> list[str]:
    state = "bad" if report["exit_status"] else "good" if report["valid"] else "doubtful"
    parts = [_badge(verdict(report), state), _tiles(report)]
    notes = [*report["warnings"], *report.get("unstable_because", ())]
    if notes:
        parts.append('<ul class="notes">' + "".join(f"<li>{escape(note)}</li>" for note in notes) + "</ul>")
    parts += [_plots(run_plots(report)), '<div class="pair">', _latency_table(report), _error_table(report), "</div>"]
    service = service_rows(report["service"])
    return [*parts, f"<h2>Service</h2>{table(('', ''), service)}"] if service else parts


def _badge(text: str, state: str) -> str:
    return f'<p><span class="badge {state}">{escape(text)}</span></p>'


def _tiles(report: dict[str, Any]) -> str:
    latency = report["latency_ms"] or {}
    figures = [("images/s answered", f"{report['qps']:.1f}"), ("images/s with a result", f"{report['goodput']:.1f}")]
    if "offered_rate" in report:
        figures.append(("images/s offered", f"{report['offered_rate']:.1f}"))
    names = ("p50", "p99", "p99_9")
    figures += [(f"{_LATENCY_NAMES[name]} latency", f"{latency[name]:.2f} ms") for name in names if name in latency]
    figures.append(("images failed", str(report["images_failed"])))
    if "late_sends" in report:
        figures.append(("late sends", f"{report['late_sends']['share']:.1%}"))
    tiles = (f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value in figures)
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _plots(plots: Sequence[str]) -> str:
    return '<div class="plots">\n' + "\n".join(plots) + "\n</div>"


def _latency_table(report: dict[str, Any]) -> str:
    titles = {
        "latency_ms": "latency" if "stable" not in report else "from when due",
        "latency_actual_ms": "from the send",
        "latency_failed_ms": "failed calls",
    }
    columns = {title: report[key] for key, title in titles.items() if report.get(key)}
    if not columns:
        return "<div><h2>Latency</h2><p>No call has ended.</p></div>"
    rows = [(shown, *(f"{column[name]:.2f}" for column in columns.values())) for name, shown in _LATENCY_NAMES.items()]
    rows.append(("calls", *(str(column["count"]) for column in columns.values())))
    return f"<div><h2>Latency in ms</h2>{table(('', *columns), rows)}</div>"


def _error_table(report: dict[str, Any]) -> str:
    if not report["errors"]:
        return "<div><h2>Errors</h2><p>None.</p></div>"
    rows = [(kind, str(images)) for kind, images in report["errors"].items()]
    return f"<div><h2>Errors</h2>{table(('kind', 'images'), rows)}</div>"


def _circumstances(report: dict[str, Any]) -> list[str]:
    """Machine, what cost CPU time, settings and command; of several runs without what differs from run to run."""
    several = "point" in report
    machine = {**report["machine"], **{f"{name} version": version for name, version in report["versions"].items()}}
    if not several:
        for title, key in _COSTS.items():
            if report[key] is not None:
                machine[title] = f"{report[key]:.0f} % of a core"
        for gpu in report["gpus"] or ():
            use, memory = gpu["utilization_mean"], gpu["memory_used_max_mib"]
            shown = [f"{use:.0f} % busy" if use is not None else "", f"{memory:.0f} MiB" if memory is not None else ""]
            machine[f"GPU {gpu['index']}"] = ", ".join([gpu["name"], *filter(None, shown)])
    varying = {"request_client", "rate"} if several else set()
    settings = {name: value for name, value in report["settings"].items() if value is not None and name not in varying}
    settings["images"] = f"{report['image_files']}, {report['image_bytes_mean'] / 1000:.1f} kB each in the mean"
    tables = [table(("", ""), [(name, str(value)) for name, value in rows.items()]) for rows in (machine, settings)]
    return [
        f'<div class="pair">\n<div><h2>Machine</h2>{tables[0]}</div>',
        f"<div><h2>Settings</h2>{tables[1]}</div>\n</div>",
        f"<h2>Command</h2><p><code>{escape(shlex.join(report['command']))}</code></p>",
    ]
