"""``torchpipe parity``: reports as text, HTML and JSON, with an exit status for CI."""

from __future__ import annotations

import argparse
import base64
import sys
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from typing import Any

import numpy as np

from torchpipe_py import registry
from torchpipe_py.errors import counted, nearest
from torchpipe_py.tools import report
from torchpipe_py.tools.compare_models.figures import FIGURES, accuracy, agreement, disagreeing, measured, spreads
from torchpipe_py.tools.compare_models.images import Function, Pictures, ResultSource
from torchpipe_py.tools.compare_models.measures import MEASURES
from torchpipe_py.tools.compare_models.report import (
    TITLES,
    TOLERANCE_HEADS,
    answer,
    bar_line,
    class_rows,
    facts,
    figure_rows,
    figure_text,
    lists,
    measure_rows,
    object_rows,
    stop_reason,
    text_report,
    tolerance_rows,
    worst_rows,
)
from torchpipe_py.tools.compare_models.run import Comparison, Unlike, compare
from torchpipe_py.tools.compare_models.tolerance import Verdict
from torchpipe_py.tools.parity.pictures import AMPLIFICATION, WorstViews
from torchpipe_py.tools.parity.torchvision import TorchvisionTransform, before_model
from torchpipe_py.tools.report import ToolError, check_outputs, finite, write_json, write_text

SCHEMA = 1
"""Version of the JSON file; raised by incompatible changes."""

BINS = 24


def run_parity(args: argparse.Namespace) -> int:
    """0 if all is well, 1 for a missed bar or nothing to compare. Raises ``TorchpipeError`` if it cannot run."""
    code = args.against.rpartition(":")[0] if args.against is not None else None
    check_outputs({"html": args.html, "json": args.json}, [args.a, args.b, args.model, code])
    reference, candidate, notes = _sides(args)
    model = None if args.model is None else ResultSource(args.model, args.model)
    views = WorstViews(args.worst) if args.html is not None else None
    parity = compare(
        reference,
        candidate,
        Pictures(args.img_dir),
        args.tolerance,
        model=model,
        worst=args.worst,
        on_pair=None if views is None else views.keep,
    )
    parity.notes += notes
    parity.judge(args.max_mean, args.min_agreement, args.max_drop)
    print("\n".join(text_report(parity)))
    if views is not None:
        write_text(args.html, html_report(parity, views))
    if args.json is not None:
        write_json(args.json, finite(to_json(parity)))
    problem = ""
    if not parity.compared:
        refused = f"{counted(len(parity.refused), 'image')} refused, {len(parity.shapes_differ)} of different shapes"
        problem = f"nothing could be compared: {refused}"
    elif args.model is not None and len(parity.kinds) < 2:
        problem = f"{args.model}: no image has a result on both sides"
    if problem:
        print(f"torchpipe: {problem}", file=sys.stderr)
    is_kept = parity.verdict in (None, Verdict.WITHIN) and all(bar.ok for bar in parity.bars)
    return 0 if not problem and is_kept else 1


def _sides(args: argparse.Namespace) -> tuple[ResultSource, ResultSource, list[str]]:
    """The reference, what is compared with it, and notes."""
    config = ResultSource(args.a, args.a)
    if args.against is not None:
        return ResultSource(args.against, find_function(args.against)), config, []
    if args.torchvision is None:
        return config, ResultSource(args.b, args.b), []
    backend = registry.default.register_backend(TorchvisionTransform).__name__
    tables, notes = before_model(args.a, args.torchvision)
    name = f"torchvision's {args.torchvision}"
    return ResultSource(args.a, tables), ResultSource(name, {"backend": backend, "weights": args.torchvision}), notes


def find_function(name: str) -> Function:
    """The function ``file.py:function`` or ``package.module:function``.

    Code is found as for ``--import``: ``ConfigError`` if it cannot be imported, ``ToolError`` without such a function.
    """
    module_name, _, function_name = name.rpartition(":")
    if not module_name or not function_name:
        hint = f"; for example {name}:predict" if name.endswith(".py") else ""
        raise ToolError(f"--against {name}: expected file.py:function or package.module:function{hint}")
    module = registry.import_code(module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ToolError(
            f"--against {name}: {module_name} has no function {function_name!r}; {nearest(function_name, names)}"
        )
    return function  # type: ignore[no-any-return]


# --- the page


def html_report(parity: Comparison, views: WorstViews) -> str:
    """The HTML file; names, labels and reasons are escaped, pictures are inlined."""
    parts = [report.verdict(answer(parity), parity.verdict is Verdict.WITHIN)] if parity.findings else []
    parts += [report.table(TOLERANCE_HEADS, tolerance_rows(parity), numbers=(1, 2, 3, 4))] if parity.findings else []
    parts.append(report.table((), [*facts(parity), *object_rows(parity), *class_rows(parity)]))
    parts += [report.verdict(bar_line(bar), bar.ok) for bar in parity.bars]
    if rows := figure_rows(parity):
        heads = ("", "median", "mean", "worst", "worst image")
        parts.append(report.table(heads, rows, "Differences per image, on the 0..255 scale", numbers=(1, 2, 3)))
        parts.append(_histogram([image.difference.mean for image in parity.compared if image.difference]))
    if rows := measure_rows(parity):
        heads = ("", "median", "mean", "worst", "worst image")
        parts.append(report.table(heads, rows, "Differences per image", numbers=(1, 2, 3)))
    if rows := worst_rows(parity):
        parts.append(report.table(rows[0], rows[1:], numbers=tuple(range(1, len(rows[0])))))
    if views.pictures:
        parts.append(
            f"<h2>Worst images, by mean absolute difference ({len(views.pictures)})</h2>"
            f'<p class="hint">The third picture is the absolute difference, amplified {AMPLIFICATION} times. Large '
            "results are shrunk; the difference keeps the largest value of each block.</p>"
        )
    for image in parity.worst if views.pictures else ():
        figures = [f"{TITLES[key]} {figure_text(key, getattr(image.difference, key))}" for key in FIGURES]
        figures += [f"class {image.a} in A, {image.b} in B"] if image.a and image.b else []
        captions = ("A", "B", f"|B - A| × {AMPLIFICATION}")
        shown = "".join(
            f'<figure><img src="{_data_url(picture)}" alt="{escape(f"{image.name}: {caption}")}"/>'
            f"<figcaption>{caption}</figcaption></figure>"
            for picture, caption in zip(views.pictures[image.name], captions, strict=True)
        )
        head = f'<h3>{escape(image.name)}</h3><p class="hint">{escape(", ".join(figures))}</p>'
        parts.append(f'<section class="pair">{head}<div class="views">{shown}</div></section>')
    for title, images in lists(parity):
        parts.append(report.table(("image", "A", "B"), images, f"{title.capitalize()} ({len(images)})"))
    return report.page("torchpipe parity", parts)


def _data_url(picture: np.ndarray) -> str:
    """A picture as a PNG, which keeps exact values."""
    import cv2

    done, encoded = cv2.imencode(".png", np.ascontiguousarray(picture[:, :, ::-1]))
    if not done:
        raise ToolError("OpenCV cannot encode a PNG")
    return "data:image/png;base64," + base64.b64encode(encoded.tobytes()).decode("ascii")


def _histogram(means: Sequence[float]) -> str:
    top = max(means)
    if top == 0:
        return f'<p class="hint">0 for {counted(len(means), "image")}.</p>'
    counts, edges = np.histogram(means, BINS, (0.0, top))
    bars = [(float(edges[at]), float(edges[at + 1]), int(count)) for at, count in enumerate(counts)]
    x = report.linear_axis("mean absolute difference", 0.0, top, exact=True)
    y = report.linear_axis("images", 0, int(counts.max()), least_step=1)
    title = "Mean absolute difference: how many images"
    return report.charts([report.chart(title, x, y, [report.Bars("images", bars, "blue")])])


# --- JSON


def to_json(parity: Comparison) -> dict[str, Any]:
    """Everything, for JSON; a reason is ``null`` if that side has a result."""
    agreed, right = agreement(parity.compared), accuracy(parity.compared)
    differing = [{"name": name, "a": asdict(a), "b": asdict(b)} for name, a, b in disagreeing(parity.compared)]

    def unlike(images: Sequence[Unlike]) -> list[dict[str, Any]]:
        return [{"name": image.name, "a": image.a or None, "b": image.b or None} for image in images]

    images = []
    for image in parity.compared:
        figures = {**image.figures, **(asdict(image.difference) if image.difference else {})}
        classes = {"a": asdict(image.a), "b": asdict(image.b)} if image.a and image.b else {}
        truth = {"truth": image.truth} if image.truth is not None else {}
        objects = {"objects": asdict(image.objects)} if image.objects else {}
        images.append({"name": image.name, **figures, **classes, **truth, **objects})
    measures = {name: measured(parity.compared, name, each.is_best_high) for name, each in MEASURES.items()}
    return {
        "schema": SCHEMA,
        "answer": answer(parity),
        "a": parity.reference.name,
        "b": parity.candidate.name,
        "model": parity.model.name if parity.model else None,
        "img_dir": parity.pictures.img_dir,
        "kinds": parity.kinds,
        "tolerance": tolerance_json(parity),
        "notes": parity.notes,
        "counts": {
            "found": parity.found,
            "seen": parity.seen,
            **{name: len(getattr(parity, name)) for name in ("compared", "refused", "shapes_differ", "unclassified")},
        },
        "summary": {key: asdict(figure) for key, figure in spreads(parity.compared).items()},
        "measures": {name: asdict(spread) for name, spread in measures.items() if spread is not None},
        "agreement": {"same": agreed.hits, **asdict(agreed), "disagreeing": differing} if agreed else None,
        "accuracy": asdict(right) if right else None,
        "bars": [asdict(bar) for bar in parity.bars],
        "worst": [image.name for image in parity.worst],
        "images": images,
        "refused": unlike(parity.refused),
        "unclassified": unlike(parity.unclassified),
        "shapes_differ": unlike(parity.shapes_differ),
    }


def tolerance_json(parity: Comparison) -> dict[str, Any] | None:
    """The tolerance, its verdict and the finding of each limit; shares are from 0 to 1. ``None`` without one."""
    if parity.verdict is None:
        return None
    limits = [
        {
            "name": finding.limit.measure.name,
            "limit": finding.limit.value,
            "allowed": finding.limit.allowed,
            "beyond": finding.found,
            "low": finding.low,
            "high": finding.high,
            "images": finding.images,
            "verdict": finding.verdict.value,
            "needed": finding.needed,
        }
        for finding in parity.findings
    ]
    verdict = parity.verdict.value
    return {"text": str(parity.tolerance), "verdict": verdict, "stopped": stop_reason(parity), "limits": limits}
