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
from torchpipe_py.errors import counted
from torchpipe_py.tools import report
from torchpipe_py.tools.compare_models.figures import FIGURES, accuracy, agreement, disagreeing, spreads
from torchpipe_py.tools.compare_models.report import (
    TITLES,
    bar_line,
    class_rows,
    facts,
    figure_rows,
    figure_text,
    lists,
    text_report,
)
from torchpipe_py.tools.compare_models.run import Comparison, Settings, Unlike, compare_configs
from torchpipe_py.tools.parity.pictures import AMPLIFICATION, WorstViews
from torchpipe_py.tools.parity.torchvision import TorchvisionTransform, before_model
from torchpipe_py.tools.report import ToolError, write_json, write_text

SCHEMA = 1
"""Version of the JSON file; raised by incompatible changes."""

BINS = 24


def run_parity(args: argparse.Namespace) -> int:
    """0 if all is well, 1 for a missed bar or nothing to compare. Raises ``TorchpipeError`` if it cannot run."""
    b, tables, notes = _against(args)
    settings = Settings(args.a, b, args.img_dir, args.model, args.worst, tables=tables)
    views = WorstViews(args.worst) if args.html is not None else None
    parity = compare_configs(settings, None if views is None else views.keep)
    parity.notes += notes
    parity.judge(args.max_mean, args.min_agreement, args.max_drop)
    print("\n".join(text_report(parity)))
    if views is not None:
        write_text(args.html, html_report(parity, views))
    if args.json is not None:
        write_json(args.json, to_json(parity))
    problem = ""
    if not parity.compared:
        refused = f"{counted(len(parity.refused), 'image')} refused, {len(parity.shapes_differ)} of different shapes"
        problem = f"nothing could be compared: {refused}"
    elif args.model is not None and agreement(parity.compared) is None:
        problem = f"{args.model}: no image has a class on both sides"
    if problem:
        print(f"torchpipe: {problem}", file=sys.stderr)
    return 0 if not problem and all(bar.ok for bar in parity.bars) else 1


def _against(args: argparse.Namespace) -> tuple[str, dict[str, dict[str, Any]], list[str]]:
    """The second configuration's name, tables that replace files, and notes."""
    if args.torchvision is None:
        return args.b, {}, []
    backend = registry.default.register_backend(TorchvisionTransform).__name__
    name = f"torchvision's {args.torchvision}"
    tables, notes = before_model(args.a, args.torchvision)
    return name, {args.a: tables, name: {"backend": backend, "weights": args.torchvision}}, notes


# --- the page


def html_report(parity: Comparison, views: WorstViews) -> str:
    """The HTML file; names, labels and reasons are escaped, pictures are inlined."""
    parts = [report.table((), [*facts(parity), *class_rows(parity)])]
    parts += [report.verdict(bar_line(bar), bar.ok) for bar in parity.bars]
    if rows := figure_rows(parity):
        heads = ("", "median", "mean", "worst", "worst image")
        parts.append(report.table(heads, rows, "Differences per image, on the 0..255 scale", numbers=(1, 2, 3)))
        parts.append(_histogram([image.difference.mean for image in parity.compared if image.difference]))
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
    settings, agreed, right = parity.settings, agreement(parity.compared), accuracy(parity.compared)
    differing = [{"name": name, "a": asdict(a), "b": asdict(b)} for name, a, b in disagreeing(parity.compared)]

    def unlike(images: Sequence[Unlike]) -> list[dict[str, Any]]:
        return [{"name": image.name, "a": image.a or None, "b": image.b or None} for image in images]

    images = []
    for image in parity.compared:
        figures = asdict(image.difference) if image.difference else {}
        classes = {"a": asdict(image.a), "b": asdict(image.b)} if image.a and image.b else {}
        truth = {"truth": image.truth} if image.truth is not None else {}
        images.append({"name": image.name, **figures, **classes, **truth})
    return {
        "schema": SCHEMA,
        "a": settings.a,
        "b": settings.b,
        "model": settings.model,
        "img_dir": settings.img_dir,
        "notes": parity.notes,
        "counts": {
            "found": parity.found,
            **{name: len(getattr(parity, name)) for name in ("compared", "refused", "shapes_differ", "unclassified")},
        },
        "summary": {key: asdict(figure) for key, figure in spreads(parity.compared).items()},
        "agreement": {"same": agreed.hits, **asdict(agreed), "disagreeing": differing} if agreed else None,
        "accuracy": asdict(right) if right else None,
        "bars": [asdict(bar) for bar in parity.bars],
        "worst": [image.name for image in parity.worst],
        "images": images,
        "refused": unlike(parity.refused),
        "unclassified": unlike(parity.unclassified),
        "shapes_differ": unlike(parity.shapes_differ),
    }
