"""The output of a compilation: a table of changes, the content of the certificate, and its page."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchpipe_py import certificate
from torchpipe_py.plan.build import plan_pipeline
from torchpipe_py.plan.config import Tables
from torchpipe_py.tools import report as shared
from torchpipe_py.tools.compare_models.run import Comparison
from torchpipe_py.tools.compare_models.tolerance import Tolerance
from torchpipe_py.tools.compile.changes import ChangeOutcome, MeasuredChange
from torchpipe_py.tools.compile.losses import Halves
from torchpipe_py.tools.load.measure import cpu_model
from torchpipe_py.tools.parity.command import tolerance_json
from torchpipe_py.tools.report import aligned, finite
from torchpipe_py.tools.tune import report as tuned
from torchpipe_py.tools.tune.report import Report

HEADS = ("change", "", "saves", "95 % interval", "gain", "lost, 95 % interval, allowed")

FIGURES = ("shape", "processes", "settings", "measured", "gain", "interval", "rate", "p99")
"""Figures of a measured file that a certificate has."""


@dataclass
class CompileReport:
    """The outcome of a compilation, completed step by step: that of the tuner's ``search``, and what is added to it.

    ``loss`` is that of the best file on the pictures that certify, ``choices`` are those of its ``pipe.setup_choices``.
    If it is ``certified``, ``reference`` describes the user's file and its models, ``pictures`` the pictures, and
    ``written`` are the paths of the new files.
    """

    search: Report
    tolerance: Tolerance
    halves: Halves
    gpu: list[str]
    changes: list[MeasuredChange] = field(default_factory=list)
    loss: Comparison | None = None
    certified: bool = False
    written: list[str] = field(default_factory=list)
    choices: dict[str, Sequence[str]] = field(default_factory=dict)
    reference: dict[str, Any] | None = None
    pictures: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """The JSON file: the members of the tuner's and these, ``reference`` and ``pictures`` only if certified."""
        own = {
            "tolerance": str(self.tolerance),
            "halves": {"choosing": len(self.halves.choosing), "certifying": len(self.halves.certifying)},
            "gpu": self.gpu,
            "changes": [change.to_json() for change in self.changes],
            "loss": None if self.loss is None else tolerance_json(self.loss),
            "certified": self.certified,
            "written": self.written,
            "choices": self.choices,
        }
        described = {"reference": self.reference, "pictures": self.pictures} if self.certified else {}
        members: dict[str, Any] = finite(self.search.to_json() | own | described)
        return members


# --- text


def loss_text(loss: Comparison | None) -> str:
    """``top1: 0.231 % (0 to 0.95 %, 1 %)`` for each limit."""
    parts = []
    for finding in () if loss is None else loss.findings:
        shares = finding.low, finding.high, finding.limit.allowed
        low, high, allowed = (f"{100 * share:.3g}" for share in shares)
        beyond = f"{100 * finding.found:.3g} %" if finding.images else "-"
        parts.append(f"{finding.limit.measure.name}: {beyond} ({low} to {high} %, {allowed} %)")
    return "; ".join(parts)


def rows_of(report: CompileReport) -> list[tuple[str, ...]]:
    """A row under ``HEADS`` for each change: those that are used, then the others that were measured."""
    rows = list[tuple[str, ...]]()
    order = [ChangeOutcome.USED, ChangeOutcome.NOT_USED, ChangeOutcome.REFUSED]
    measured = [change for change in report.changes if change.outcome in order]
    for change in sorted(measured, key=lambda change: (order.index(change.outcome), -(change.gain or 0))):
        low, high = change.ms_interval or (math.nan, math.nan)
        between = f"{low:.2f} to {high:.2f}" if math.isfinite(low) and math.isfinite(high) else "-"
        saves = "-" if change.ms is None else f"{change.ms:.2f} ms"
        last = ", ".join(filter(None, (loss_text(change.loss), change.why)))
        factor = "-" if change.gain is None else f"{change.gain:.2f}"
        rows.append((change.name, change.outcome.value, saves, between, factor, last))
    return rows


def lines_of(report: CompileReport) -> list[str]:
    """The whole report as text."""
    unit = "of the p99" if report.search.rate is not None else "of a core for each request"
    choosing, certifying = len(report.halves.choosing), len(report.halves.certifying)
    facts = [("tolerance", str(report.tolerance)), ("saves", f"ms {unit}")]
    facts += [("pictures", f"{choosing} to choose by, {certifying} others to certify with")]
    facts += [("certified", loss_text(report.loss))] if report.loss is not None else []
    lines = [*aligned(facts), *aligned(rows_of(report), HEADS)] if report.changes else aligned(facts)
    others: dict[str, list[str]] = {}
    for change in report.changes:
        if change.outcome is ChangeOutcome.NOT_POSSIBLE:
            others.setdefault(change.why, []).append(change.name)
    lines += [f"not possible: {', '.join(names)}: {why}" for why, names in others.items()]
    return [*tuned.lines_of(report.search), *lines]


def verdict_line(report: CompileReport) -> str:
    """The verdict in one line."""
    return tuned.verdict_line(report.search) + "; certified within the tolerance" * report.certified


# --- the certificate


def new_certificate(
    report: CompileReport, tables: Tables, sha256: str, commands: Mapping[str, str], code: Sequence[str]
) -> Any:
    """The content of the certificate of ``tables``; the TOML file with this hash need not be written yet."""
    found = report.to_json()
    figures = {
        "goal": tuned.goal_text(report.search),
        "gain": found["gain"],
        "gain_interval": found["gain_interval"],
        **{name: {key: found[name][key] for key in FIGURES} for name in ("yours", "best")},
    }
    compiled = certificate.described(plan_pipeline(tables), tables.source, sha256, code)
    content = {
        "schema": certificate.SCHEMA,
        "made": report.search.date,
        "compiled": compiled | {"choices": report.choices},
        "reference": report.reference,
        "pictures": report.pictures,
        "tolerance": str(report.tolerance),
        "loss": found["loss"],
        "figures": figures,
        "changes": found["changes"],
        "versions": certificate.versions(tables),
        "machine": machine(report.search.cores, report.gpu),
        "commands": dict(commands),
    }
    content = json.loads(json.dumps(finite(content)))  # as it will be read
    return content | {certificate.DIGEST: certificate.digest(content)}


def machine(cores: int, gpu: Sequence[str]) -> dict[str, Any]:
    """Where it was measured."""
    return {
        "cpu": cpu_model(),
        "cores": cores,
        "gpu": gpu,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def page(content: Mapping[str, Any], report: CompileReport) -> str:
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
    return shared.page(f"Certificate of {compiled['path']}", [*parts, *tuned.page_parts(report.search)[1:]])
