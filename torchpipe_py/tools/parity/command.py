"""``torchpipe parity``: reports as text, HTML and JSON, with an exit status for CI."""

from __future__ import annotations

import argparse
import base64
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from html import escape
from typing import Any

import numpy as np

from torchpipe_py import registry
from torchpipe_py.errors import counted
from torchpipe_py.tools import report
from torchpipe_py.tools.parity.figures import AMPLIFICATION, FIGURES, Share, accuracy, agreement, disagreeing, spreads
from torchpipe_py.tools.parity.run import Bar, Parity, Settings, Unlike, compare_configs, lists
from torchpipe_py.tools.parity.torchvision import TorchvisionTransform, before_model
from torchpipe_py.tools.report import WIDTH, ToolError, aligned, clip, write_json, write_text

LISTED = 20
"""Lines of each list in the terminal; the files have all."""

SCHEMA = 1
"""Version of the JSON file; raised by incompatible changes."""

BINS = 24
TITLES = {
    "max": "largest difference",
    "mean": "mean absolute difference",
    "share": "values more than 1 apart",
    "shift": "mean of B - A, signed",
}


def run_parity(args: argparse.Namespace) -> int:
    """0 if all is well, 1 for a missed bar or nothing to compare. Raises ``TorchpipeError`` if it cannot run."""
    b, tables, notes = _against(args)
    settings = Settings(args.a, b, args.img_dir, args.model, args.worst, args.html is not None, tables=tables)
    parity = compare_configs(settings)
    parity.notes += notes
    parity.judge(args.max_mean, args.min_agreement, args.max_drop)
    print("\n".join(text_report(parity)))
    if args.html is not None:
        write_text(args.html, html_report(parity))
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


# --- what text and page show


def _facts(parity: Parity) -> list[tuple[str, str]]:
    settings = parity.settings
    counts = (
        (parity.found, "found"),
        (len(parity.compared), "compared"),
        (len(parity.refused), "refused"),
        (len(parity.shapes_differ), "of different shapes"),
    )
    rows = [("A", settings.a), ("B", settings.b)]
    rows += [("model", settings.model)] if settings.model else []
    rows += [("images", ", ".join(f"{count} {what}" for count, what in counts)), ("directory", settings.img_dir)]
    return rows + [("note", note) for note in parity.notes]


def _figure(figure: str, value: float) -> str:
    """A figure of ``Difference``, suitably rounded."""
    if figure == "share":
        return f"{value:.2%}"
    return f"{value:+.3f}" if figure == "shift" else f"{value:.3f}"


def _figure_rows(parity: Parity) -> list[tuple[str, ...]]:
    """Title, median, mean, worst and the worst image's name of each figure."""
    return [
        (TITLES[key], *(_figure(key, x) for x in (figure.median, figure.mean, figure.worst)), figure.worst_name)
        for key, figure in spreads(parity.compared).items()
    ]


def _class_rows(parity: Parity) -> list[tuple[str, str]]:
    """Rows about classes; empty if pixels are compared without a model."""
    agreed = agreement(parity.compared)
    if agreed is None:
        return [] if parity.settings.model is None else [("top-1 agreement", "no image has a class on both sides")]

    def text(share: Share) -> str:
        interval = f"95 % interval {share.low:.4f} to {share.high:.4f}"
        return f"{share.share:.4f} ({share.hits} of {share.total}; {interval})"

    rows = [("top-1 agreement", text(agreed))]
    if agreed.score_mean is not None and agreed.score_max is not None:
        scores = f"mean {agreed.score_mean:.5f}, largest {agreed.score_max:.5f} (images with the same class)"
        rows.append(("score difference", scores))
    if (right := accuracy(parity.compared)) is not None:
        rows += [("accuracy of A", text(right.a)), ("accuracy of B", text(right.b))]
        drop = f"{right.drop:.2f} points (95 % interval {right.low:.2f} to {right.high:.2f}, of the same images)"
        rows.append(("B loses", drop))
    if parity.unclassified:
        rows.append(("without a class", counted(len(parity.unclassified), "image")))
    return rows


def _bar(bar: Bar) -> str:
    """``--max-mean 1: 0.8120 over 200 images, ok``."""
    value = "nothing to compare" if bar.value is None else f"{bar.value:.4f} over {counted(bar.images, 'image')}"
    return f"{bar.option} {bar.limit:g}: {value}, {'ok' if bar.ok else 'missed'}"


def text_report(parity: Parity) -> Iterator[str]:
    """Lines of at most ``WIDTH`` columns."""
    parts = [aligned(_facts(parity), least=16)]
    heads = ("per image, 0..255 scale", "median", "mean", "worst", "worst image")
    if rows := _figure_rows(parity):
        parts.append(aligned(rows, heads))
    parts.append(aligned(_class_rows(parity), least=16))
    worst = [
        (clip(image.name, 60), *(_figure(key, getattr(image.difference, key)) for key in FIGURES))
        for image in parity.worst
    ]
    if worst:
        parts.append(aligned(worst, (f"worst images ({len(worst)})", "max", "mean", "more than 1", "B - A")))
    for title, images in lists(parity):
        lines = [f"{title} ({len(images)}):"] if images else []
        for name, a, b in images[:LISTED]:
            sides = [f"A and B: {a}"] if a == b else [f"A: {a}", f"B: {b}"]
            line = f"  {name}  {', '.join(sides)}"
            lines += [line] if len(line) <= WIDTH else [f"  {name}", *(f"    {side}" for side in sides)]
        if len(images) > LISTED:
            lines.append(f"  and {len(images) - LISTED} more, which --html and --json list")
        parts.append(lines)
    parts.append(aligned([("bar", _bar(bar)) for bar in parity.bars], least=16))
    for index, lines in enumerate(part for part in parts if part):
        yield from [""] if index else []
        yield from map(clip, lines)


# --- the page


def html_report(parity: Parity) -> str:
    """The HTML file; names, labels and reasons are escaped, pictures are inlined."""
    parts = [report.table((), [*_facts(parity), *_class_rows(parity)])]
    parts += [report.verdict(_bar(bar), bar.ok) for bar in parity.bars]
    if rows := _figure_rows(parity):
        heads = ("", "median", "mean", "worst", "worst image")
        parts.append(report.table(heads, rows, "Differences per image, on the 0..255 scale", numbers=(1, 2, 3)))
        parts.append(_histogram([image.difference.mean for image in parity.compared if image.difference]))
    if parity.views:
        parts.append(
            f"<h2>Worst images, by mean absolute difference ({len(parity.views)})</h2>"
            f'<p class="hint">The third picture is the absolute difference, amplified {AMPLIFICATION} times. Large '
            "results are shrunk; the difference keeps the largest value of each block.</p>"
        )
    for image in parity.worst if parity.views else ():
        figures = [f"{TITLES[key]} {_figure(key, getattr(image.difference, key))}" for key in FIGURES]
        figures += [f"class {image.a} in A, {image.b} in B"] if image.a and image.b else []
        captions = ("A", "B", f"|B - A| × {AMPLIFICATION}")
        shown = "".join(
            f'<figure><img src="{_data_url(picture)}" alt="{escape(f"{image.name}: {caption}")}"/>'
            f"<figcaption>{caption}</figcaption></figure>"
            for picture, caption in zip(parity.views[image.name], captions, strict=True)
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


def to_json(parity: Parity) -> dict[str, Any]:
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
