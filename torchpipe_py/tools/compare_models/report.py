"""A comparison as text."""

from __future__ import annotations

from collections.abc import Iterator

from torchpipe_py.backends.signature import shown_dims
from torchpipe_py.errors import counted
from torchpipe_py.tools.compare_models.figures import FIGURES, Share, accuracy, agreement, disagreeing, spreads
from torchpipe_py.tools.compare_models.run import Bar, Comparison
from torchpipe_py.tools.report import WIDTH, aligned, clip

LISTED = 20
"""Lines of each list in the terminal; the files have all."""

TITLES = {
    "max": "largest difference",
    "mean": "mean absolute difference",
    "share": "values more than 1 apart",
    "shift": "mean of B - A, signed",
}


def facts(outcome: Comparison) -> list[tuple[str, str]]:
    """Rows about what was compared."""
    settings = outcome.settings
    counts = (
        (outcome.found, "found"),
        (len(outcome.compared), "compared"),
        (len(outcome.refused), "refused"),
        (len(outcome.shapes_differ), "of different shapes"),
    )
    rows = [("A", settings.a), ("B", settings.b)]
    rows += [("model", settings.model)] if settings.model else []
    rows += [("images", ", ".join(f"{count} {what}" for count, what in counts)), ("directory", settings.img_dir)]
    return rows + [("note", note) for note in outcome.notes]


def figure_text(figure: str, value: float) -> str:
    """A figure of ``Difference``, suitably rounded."""
    if figure == "share":
        return f"{value:.2%}"
    return f"{value:+.3f}" if figure == "shift" else f"{value:.3f}"


def figure_rows(outcome: Comparison) -> list[tuple[str, ...]]:
    """Title, median, mean, worst and the worst image's name of each figure."""
    return [
        (TITLES[key], *(figure_text(key, x) for x in (figure.median, figure.mean, figure.worst)), figure.worst_name)
        for key, figure in spreads(outcome.compared).items()
    ]


def class_rows(outcome: Comparison) -> list[tuple[str, str]]:
    """Rows about classes; empty if pixels are compared without a model."""
    agreed = agreement(outcome.compared)
    if agreed is None:
        return [] if outcome.settings.model is None else [("top-1 agreement", "no image has a class on both sides")]

    def text(share: Share) -> str:
        interval = f"95 % interval {share.low:.4f} to {share.high:.4f}"
        return f"{share.share:.4f} ({share.hits} of {share.total}; {interval})"

    rows = [("top-1 agreement", text(agreed))]
    if agreed.score_mean is not None and agreed.score_max is not None:
        scores = f"mean {agreed.score_mean:.5f}, largest {agreed.score_max:.5f} (images with the same class)"
        rows.append(("score difference", scores))
    if (right := accuracy(outcome.compared)) is not None:
        rows += [("accuracy of A", text(right.a)), ("accuracy of B", text(right.b))]
        drop = f"{right.drop:.2f} points (95 % interval {right.low:.2f} to {right.high:.2f}, of the same images)"
        rows.append(("B loses", drop))
    if outcome.unclassified:
        rows.append(("without a class", counted(len(outcome.unclassified), "image")))
    return rows


def bar_line(bar: Bar) -> str:
    """``--max-mean 1: 0.8120 over 200 images, ok``."""
    value = "nothing to compare" if bar.value is None else f"{bar.value:.4f} over {counted(bar.images, 'image')}"
    return f"{bar.option} {bar.limit:g}: {value}, {'ok' if bar.ok else 'missed'}"


def text_report(outcome: Comparison) -> Iterator[str]:
    """Lines of at most ``WIDTH`` columns."""
    parts = [aligned(facts(outcome), least=16)]
    heads = ("per image, 0..255 scale", "median", "mean", "worst", "worst image")
    if rows := figure_rows(outcome):
        parts.append(aligned(rows, heads))
    parts.append(aligned(class_rows(outcome), least=16))
    worst = [
        (clip(image.name, 60), *(figure_text(key, getattr(image.difference, key)) for key in FIGURES))
        for image in outcome.worst
    ]
    if worst:
        parts.append(aligned(worst, (f"worst images ({len(worst)})", "max", "mean", "more than 1", "B - A")))
    for title, images in lists(outcome):
        lines = [f"{title} ({len(images)}):"] if images else []
        for name, a, b in images[:LISTED]:
            sides = [f"A and B: {a}"] if a == b else [f"A: {a}", f"B: {b}"]
            line = f"  {name}  {', '.join(sides)}"
            lines += [line] if len(line) <= WIDTH else [f"  {name}", *(f"    {side}" for side in sides)]
        if len(images) > LISTED:
            lines.append(f"  and {len(images) - LISTED} more, which --html and --json list")
        parts.append(lines)
    parts.append(aligned([("bar", bar_line(bar)) for bar in outcome.bars], least=16))
    for index, lines in enumerate(part for part in parts if part):
        yield from [""] if index else []
        yield from map(clip, lines)


def summary(outcome: Comparison) -> str:
    """How results differ, in a few words; empty if nothing was compared."""
    agreed, right = agreement(outcome.compared), accuracy(outcome.compared)
    if not outcome.compared:
        return ""
    if agreed is None:
        mean = spreads(outcome.compared)["mean"]
        return f"pixels differ by {mean.mean:.2f} of 255 on average, by {mean.worst:.2f} in the worst image"
    words = f"the same class for {agreed.hits} of {agreed.total} images"
    if right is not None:
        words += f", accuracy {right.a.share:.1%} before and {right.b.share:.1%} after"
    return words


def lists(outcome: Comparison) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """Title and rows (name, A, B) of each list of differing images."""
    yield "different classes", [(name, str(a), str(b)) for name, a, b in disagreeing(outcome.compared)]
    for title, images in (("refused", outcome.refused), ("without a class", outcome.unclassified)):
        yield title, [(image.name, image.a or "gives a result", image.b or "gives a result") for image in images]
    shapes = [(image.name, shown_dims(image.a), shown_dims(image.b)) for image in outcome.shapes_differ]
    yield "of different shapes, HxWxC", shapes
