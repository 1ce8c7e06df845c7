"""The output of a compilation: a table of changes, the content of the certificate, and its page."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from typing import Any

from torchpipe_py import certificate
from torchpipe_py.plan.build import plan_pipeline
from torchpipe_py.plan.config import Tables
from torchpipe_py.tools import report as shared
from torchpipe_py.tools.compile.changes import Outcome
from torchpipe_py.tools.load.measure import cpu_model
from torchpipe_py.tools.report import aligned, finite
from torchpipe_py.tools.tune import report as tuned

HEADS = ("change", "", "saves", "95 % interval", "gain", "lost, 95 % interval, allowed")

FIGURES = ("shape", "processes", "settings", "measured", "gain", "interval", "rate", "p99")
"""Figures of a measured file that a certificate has."""


# --- text


def loss_text(loss: Mapping[str, Any] | None) -> str:
    """``top1: 0.231 % (0 to 0.95 %, 1 %)`` for each limit."""
    parts = []
    for limit in loss["limits"] if loss else ():
        low, high, allowed = (f"{100 * limit[key]:.3g}" for key in ("low", "high", "allowed"))
        beyond = "-" if not limit["images"] else f"{100 * limit['beyond']:.3g} %"
        parts.append(f"{limit['name']}: {beyond} ({low} to {high} %, {allowed} %)")
    return "; ".join(parts)


def rows_of(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A row under ``HEADS`` for each change: those that are used, then the others that were measured."""
    rows = list[tuple[str, ...]]()
    order = [outcome.value for outcome in (Outcome.USED, Outcome.NOT_USED, Outcome.REFUSED)]
    measured = [change for change in report["changes"] if change["outcome"] in order]
    for change in sorted(measured, key=lambda change: (order.index(change["outcome"]), -(change["gain"] or 0))):
        ms, interval, gain = change["ms"], change["ms_interval"], change["gain"]
        between = "-" if interval is None or None in interval else "{:.2f} to {:.2f}".format(*interval)
        saves = "-" if ms is None else f"{ms:.2f} ms"
        last = ", ".join(filter(None, (loss_text(change["loss"]), change["why"])))
        factor = "-" if gain is None else f"{gain:.2f}"
        rows.append((change["name"], change["outcome"], saves, between, factor, last))
    return rows


def lines_of(report: Mapping[str, Any]) -> list[str]:
    """The whole report as text."""
    unit = "of the p99" if report["rate"] is not None else "of a core for each request"
    halves = report["halves"]
    facts = [("tolerance", report["tolerance"]), ("saves", f"ms {unit}")]
    facts += [("pictures", f"{halves['choosing']} to choose by, {halves['certifying']} others to certify with")]
    facts += [("certified", loss_text(report["loss"]))] if report["loss"] else []
    lines = [*aligned(facts), *aligned(rows_of(report), HEADS)] if report["changes"] else aligned(facts)
    others: dict[str, list[str]] = {}
    for change in report["changes"]:
        if change["outcome"] == Outcome.NOT_POSSIBLE.value:
            others.setdefault(change["why"], []).append(change["name"])
    lines += [f"not possible: {', '.join(names)}: {why}" for why, names in others.items()]
    return [*tuned.lines_of(report), *lines]


def verdict_line(report: Mapping[str, Any]) -> str:
    """The verdict in one line."""
    return tuned.verdict_line(report) + "; certified within the tolerance" * bool(report["certified"])


# --- the certificate


def new_certificate(
    report: Mapping[str, Any], tables: Tables, sha256: str, commands: Mapping[str, str], code: Sequence[str]
) -> Any:
    """The content of the certificate of ``tables``; the TOML file with this hash need not be written yet."""
    figures = {
        "goal": tuned.goal_text(report),
        "gain": report["gain"],
        "gain_interval": report["gain_interval"],
        **{name: {key: report[name][key] for key in FIGURES} for name in ("yours", "best")},
    }
    compiled = certificate.described(plan_pipeline(tables), tables.source, sha256, code)
    content = {
        "schema": certificate.SCHEMA,
        "made": report["date"],
        "compiled": compiled | {"choices": report["choices"]},
        "reference": report["reference"],
        "pictures": report["pictures"],
        "tolerance": report["tolerance"],
        "loss": report["loss"],
        "figures": figures,
        "changes": report["changes"],
        "versions": certificate.versions(tables),
        "machine": machine(report),
        "commands": dict(commands),
    }
    content = json.loads(json.dumps(finite(content)))  # as it will be read
    return content | {certificate.DIGEST: certificate.digest(content)}


def machine(report: Mapping[str, Any]) -> dict[str, Any]:
    """Where it was measured."""
    return {
        "cpu": cpu_model(),
        "cores": report["cores"],
        "gpu": report["gpu"],
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def page(content: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    """The certificate as an HTML file, with the measurements behind it."""
    compiled, pictures, reference = content["compiled"], content["pictures"], content["reference"]
    files = [(compiled["path"], compiled["sha256"]), (f"made of {reference['path']}", reference["sha256"])]
    files += [(f"{each['path']} ({each['key']} of {each['node']})", each["sha256"]) for each in compiled["files"]]
    files += [(each["path"], each["sha256"]) for each in compiled["code"]]
    files.append((f"{pictures['count']} pictures of {pictures['folder']}", pictures["sha256"]))
    choices = [(node, ", ".join(chosen)) for node, chosen in compiled["choices"].items()]
    limits = [
        (
            limit["name"],
            *(f"{100 * limit[key]:.3g} %" for key in ("beyond", "low", "high", "allowed")),
            str(limit["images"]),
        )
        for limit in content["loss"]["limits"]
    ]
    about = [("made", content["made"]), ("tolerance", content["tolerance"])]
    about += [(name, str(value)) for name, value in content["machine"].items() if value]
    about += [(f"to {name} it", command) for name, command in content["commands"].items()]
    about.append(("digest", f"{content[certificate.DIGEST]}: no signature; it shows that figures were edited"))
    parts = [
        shared.verdict(verdict_line(report), is_good=True),
        shared.table(("limit", "beyond it", "at least", "at most", "allowed", "pictures"), limits, "Loss, within 95 %"),
        shared.table(HEADS, rows_of(report), "Changes"),
        shared.table((), about, "Certificate"),
        shared.table(("file", "SHA-256"), files, "Files"),
        shared.table(("node", "chosen at set-up"), choices, "Choices"),
        shared.table(("library", "version"), [*content["versions"].items()], "Versions"),
    ]
    return shared.page(f"Certificate of {compiled['path']}", [*parts, *tuned.page_parts(report)[1:]])
