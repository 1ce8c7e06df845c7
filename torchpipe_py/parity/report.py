"""A comparison as a table for a terminal and as a dict for ``--json``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from torchpipe_py.backends.signature import shown_dims
from torchpipe_py.errors import counted
from torchpipe_py.parity.compare import Share, accuracy, agreement, disagreeing, spreads
from torchpipe_py.parity.record import ACCEPTED, Bar, Compared, Difference, Parity, Prediction, Refused

WIDTH = 120
LISTED = 20
"""Lines of one list in the terminal; the files have them all."""

SCHEMA = 1
"""Of the JSON file; raised when a reader would have to change."""

TITLES = {
    "max": "largest difference",
    "mean": "mean absolute difference",
    "share": "values more than 1 apart",
    "shift": "mean of B - A, signed",
}


def clip(text: str, width: int) -> str:
    """``text`` in at most ``width`` columns, its middle left out."""
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def figure_text(figure: str, value: float) -> str:
    """One figure of ``Difference`` with the digits that matter."""
    if figure == "share":
        return f"{value:.2%}"
    return f"{value:+.3f}" if figure == "shift" else f"{value:.3f}"


def facts(parity: Parity) -> list[tuple[str, str]]:
    """Name and value of what stands above the table."""
    counts = (
        (parity.found, "found"),
        (len(parity.compared), "compared"),
        (len(parity.refused), "refused"),
        (len(parity.shapes_differ), "of different shapes"),
    )
    rows = [("A", parity.a), ("B", parity.b)]
    rows += [("model", parity.model)] if parity.model else []
    rows += [("images", ", ".join(f"{count} {what}" for count, what in counts)), ("directory", parity.img_dir)]
    return rows + [("note", note) for note in parity.notes]


def figure_rows(parity: Parity) -> list[tuple[str, ...]]:
    """Title, median, mean, worst and the worst image's name of each figure."""
    return [
        (
            TITLES[key],
            *(figure_text(key, x) for x in (figure.median, figure.mean, figure.worst)),
            figure.worst_name,
        )
        for key, figure in spreads(parity.compared).items()
    ]


def model_rows(parity: Parity) -> list[tuple[str, str]]:
    """What is said of classes, as name and value; empty where pixels are compared without a model."""
    agreed = agreement(parity.compared)
    if agreed is None:
        return [] if parity.model is None else [("top-1 agreement", "no image has a class on both sides")]
    interval = f"95 % interval {agreed.low:.4f} to {agreed.high:.4f}"
    rows = [("top-1 agreement", f"{agreed.share:.4f} ({agreed.same} of {agreed.total}; {interval})")]
    if agreed.score_mean is not None and agreed.score_max is not None:
        scores = f"mean {agreed.score_mean:.5f}, largest {agreed.score_max:.5f} (images with the same class)"
        rows.append(("score difference", scores))
    right = accuracy(parity.compared)
    if right is not None:
        rows += [("accuracy of A", _share_text(right.a)), ("accuracy of B", _share_text(right.b))]
        drop = f"{right.drop:.2f} points (95 % interval {right.low:.2f} to {right.high:.2f}, of the same images)"
        rows.append(("B loses", drop))
    if parity.unclassified:
        rows.append(("without a class", counted(len(parity.unclassified), "image")))
    return rows


def _share_text(right: Share) -> str:
    interval = f"95 % interval {right.low:.4f} to {right.high:.4f}"
    return f"{right.share:.4f} ({right.hits} of {right.total}; {interval})"


def bar_text(bar: Bar) -> str:
    """``--max-mean 1: 0.8120 over 200 images, ok``."""
    value = "nothing to compare" if bar.value is None else f"{bar.value:.4f} over {counted(bar.images, 'image')}"
    return f"{bar.option} {bar.limit:g}: {value}, {'ok' if bar.ok else 'missed'}"


def text_report(parity: Parity) -> Iterator[str]:
    """Lines of at most ``WIDTH`` columns."""
    for line in _lines(parity):
        yield clip(line, WIDTH)


def _lines(parity: Parity) -> Iterator[str]:
    yield from _aligned(facts(parity))
    rows = figure_rows(parity)
    if rows:
        yield ""
        yield f"{'per image, 0..255 scale':26} {'median':>10} {'mean':>10} {'worst':>10}  worst image"
        for title, *values, name in rows:
            yield f"{title:26} " + " ".join(f"{value:>10}" for value in values) + f"  {clip(name, WIDTH - 62)}"
    classes = model_rows(parity)
    if classes:
        yield ""
        yield from _aligned(classes)
    worst = [_worst_line(image.name, image.difference) for image in parity.worst if image.difference is not None]
    yield from _section("worst images, by mean absolute difference", worst)
    yield from _section("different classes", [_classes_line(*row) for row in disagreeing(parity.compared)])
    yield from _section("refused", list(map(_refused_line, parity.refused)))
    yield from _section("without a class", list(map(_refused_line, parity.unclassified)))
    shapes = [
        f"{clip(image.name, 60):60}  A {shown_dims(image.a)}, B {shown_dims(image.b)}" for image in parity.shapes_differ
    ]
    yield from _section("of different shapes, HxWxC", shapes)
    if parity.bars:
        yield ""
        yield from _aligned([("bar", bar_text(bar)) for bar in parity.bars])


def _aligned(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    for name, value in rows:
        yield f"{name:16} {clip(value, WIDTH - 17)}"


def _section(title: str, lines: Sequence[str]) -> Iterator[str]:
    if not lines:
        return
    yield ""
    yield f"{title} ({len(lines)}):"
    for line in lines[:LISTED]:
        for part in line.split("\n"):
            yield f"  {clip(part, WIDTH - 2)}"
    if len(lines) > LISTED:
        yield f"  and {len(lines) - LISTED} more, which --html and --json list"


def _worst_line(name: str, figures: Difference) -> str:
    return (
        f"{clip(name, 60):60}  mean {figures.mean:8.3f}  max {figures.max:7.2f}"
        f"  >1 {figures.share:7.2%}  B-A {figures.shift:+8.3f}"
    )


def _classes_line(name: str, a: Prediction, b: Prediction) -> str:
    return f"{clip(name, 60):60}  A {clip(str(a), 25)}, B {clip(str(b), 25)}"


def reason_text(reason: str) -> str:
    return "gives a result" if reason == ACCEPTED else reason


def _refused_line(image: Refused) -> str:
    """Name and reason; a line for each side where the sides differ."""
    if image.a == image.b:
        return f"{image.name}\n  A and B: {image.a}"
    return f"{image.name}\n  A: {reason_text(image.a)}\n  B: {reason_text(image.b)}"


def to_json(parity: Parity) -> dict[str, Any]:
    """Everything; a reason is ``null`` where that side gave a result."""
    return {
        "schema": SCHEMA,
        "a": parity.a,
        "b": parity.b,
        "model": parity.model,
        "img_dir": parity.img_dir,
        "notes": parity.notes,
        "counts": {
            "found": parity.found,
            "compared": len(parity.compared),
            "refused": len(parity.refused),
            "shapes_differ": len(parity.shapes_differ),
            "unclassified": len(parity.unclassified),
        },
        "summary": {key: asdict(figure) for key, figure in spreads(parity.compared).items()},
        "agreement": _agreement_json(parity),
        "accuracy": asdict(right) if (right := accuracy(parity.compared)) else None,
        "bars": [asdict(bar) for bar in parity.bars],
        "worst": [image.name for image in parity.worst],
        "images": [_compared_json(image) for image in parity.compared],
        "refused": [_refused_json(image) for image in parity.refused],
        "unclassified": [_refused_json(image) for image in parity.unclassified],
        "shapes_differ": [
            {"name": image.name, "a": list(image.a), "b": list(image.b)} for image in parity.shapes_differ
        ],
    }


def _agreement_json(parity: Parity) -> dict[str, Any] | None:
    agreed = agreement(parity.compared)
    if agreed is None:
        return None
    differing = [{"name": name, "a": asdict(a), "b": asdict(b)} for name, a, b in disagreeing(parity.compared)]
    return {**asdict(agreed), "disagreeing": differing}


def _compared_json(image: Compared) -> dict[str, Any]:
    figures = asdict(image.difference) if image.difference else {}
    classes = {"a": asdict(image.a), "b": asdict(image.b)} if image.a and image.b else {}
    truth = {"truth": image.truth} if image.truth is not None else {}
    return {"name": image.name, **figures, **classes, **truth}


def _refused_json(image: Refused) -> dict[str, Any]:
    return {"name": image.name, "a": image.a or None, "b": image.b or None}
