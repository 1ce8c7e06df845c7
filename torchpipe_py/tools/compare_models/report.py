"""A comparison as text."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torchpipe_py.backends.signature import shown_dims
from torchpipe_py.errors import counted
from torchpipe_py.tools.compare_models.figures import (
    FIGURES,
    Share,
    accuracy,
    agreement,
    disagreeing,
    measured,
    objects_of,
    spreads,
)
from torchpipe_py.tools.compare_models.measures import MATCHED, MEASURES
from torchpipe_py.tools.compare_models.run import Bar, Comparison
from torchpipe_py.tools.compare_models.tolerance import Verdict
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
    counts = (
        (outcome.found, "found"),
        (len(outcome.compared), "compared"),
        (len(outcome.refused), "refused"),
        (len(outcome.shapes_differ), "of different shapes"),
    )
    rows = [("A", outcome.reference.name), ("B", outcome.candidate.name)]
    rows += [("model", outcome.model.name)] if outcome.model else []
    images = ", ".join(f"{count} {what}" for count, what in counts)
    rows += [("images", images), ("directory", outcome.pictures.img_dir)]
    rows += [("compared as", " and ".join(outcome.kinds))] if outcome.kinds else []
    rows += [("stopped", stop_reason(outcome))] if outcome.verdict else []
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
        return (
            []
            if outcome.model is None or set(outcome.kinds) - {"pixels"}
            else [("top-1 agreement", "no image has a class on both sides")]
        )

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


def measure_rows(outcome: Comparison) -> list[tuple[str, ...]]:
    """A row for each measure (median, mean, worst, the worst image's name) of results but classes and pixels.

    Those have rows of their own.
    """
    rows = []
    for name, measure in MEASURES.items():
        spread = measured(outcome.compared, name, measure.is_best_high)
        has_kind = set(measure.kinds) & set(outcome.kinds) - {"classes", "pixels"}
        if spread is not None and has_kind:
            numbers = (f"{value:.6g}" for value in (spread.median, spread.mean, spread.worst))
            rows.append((f"{name}: {measure.doc}", *numbers, spread.worst_name))
    return rows


def object_rows(outcome: Comparison) -> list[tuple[str, str]]:
    """How many objects were found, or nothing."""
    objects = objects_of(outcome.compared)
    if objects is None:
        return []
    matched = f"{objects.matched} matched (same class, IoU {MATCHED:g} or more)"
    return [("objects", f"{objects.a} in A, {objects.b} in B, {matched}")]


TOLERANCE_HEADS = ("tolerance", "beyond it", "95 % interval", "allowed", "images", "")


def tolerance_rows(outcome: Comparison) -> list[tuple[str, ...]]:
    """Limit, mean of how far images are beyond it, its interval, what is allowed, images, verdict."""
    rows: list[tuple[str, ...]] = []
    for finding in outcome.findings:
        found, low, high, allowed = (
            "-" if math.isnan(share) else f"{100 * share:.3g} %"
            for share in (finding.found, finding.low, finding.high, finding.limit.allowed)
        )
        images = str(finding.images)
        rows.append((str(finding.limit), found, f"{low} to {high}", allowed, images, finding.verdict.value))
    return rows


def answer(outcome: Comparison) -> str:
    """The outcome in one line: whether B is within the tolerance, or how far it differs."""
    if outcome.verdict is None:
        return summary(outcome) or "nothing could be compared"
    images = (
        f"all {outcome.found} images" if outcome.seen == outcome.found else f"{outcome.seen} of {outcome.found} images"
    )
    if outcome.verdict is Verdict.WITHIN:
        return f"B is within the tolerance, as {images} show"
    open_limits = [finding for finding in outcome.findings if finding.verdict is outcome.verdict]
    limits = ", ".join(str(finding.limit) for finding in open_limits)
    if outcome.verdict is Verdict.BEYOND:
        return f"B is beyond the tolerance ({limits}), as {images} show"
    if empty := [str(finding.limit) for finding in open_limits if not finding.images]:
        return f"undecided: {images} have nothing to compare by {', '.join(empty)}"
    needed = [finding.needed for finding in open_limits]
    more = "" if None in needed else f"; about {max(filter(None, needed))} like these would decide"
    return f"undecided: {images} are too few for {limits}{more}"


def stop_reason(outcome: Comparison) -> str:
    """After how many images a comparison with a tolerance stopped, and why; empty without one."""
    if outcome.verdict is None:
        return ""
    limits = ", ".join(str(each.limit) for each in outcome.findings if each.verdict is outcome.verdict)
    no_more = "there are no more" if outcome.seen == outcome.found else "no time was left"
    reason = {
        Verdict.WITHIN: "each interval lies within what is allowed",
        Verdict.BEYOND: f"the interval of {limits} lies beyond what is allowed",
        Verdict.UNDECIDED: f"{no_more}; the interval of {limits} contains what is allowed",
    }[outcome.verdict]
    return f"after {outcome.seen} of {outcome.found} images: {reason}"


def bar_line(bar: Bar) -> str:
    """``--max-mean 1: 0.8120 over 200 images, ok``."""
    value = "nothing to compare" if bar.value is None else f"{bar.value:.4f} over {counted(bar.images, 'image')}"
    return f"{bar.option} {bar.limit:g}: {value}, {'ok' if bar.ok else 'missed'}"


def text_report(outcome: Comparison) -> Iterator[str]:
    """Lines of at most ``WIDTH`` columns."""
    parts = [[answer(outcome)], aligned(tolerance_rows(outcome), TOLERANCE_HEADS) if outcome.findings else []]
    parts.append(aligned([*facts(outcome), *object_rows(outcome)], least=16))
    heads = ("per image, 0..255 scale", "median", "mean", "worst", "worst image")
    if rows := figure_rows(outcome):
        parts.append(aligned(rows, heads))
    if rows := measure_rows(outcome):
        parts.append(aligned(rows, ("per image", "median", "mean", "worst", "worst image")))
    parts.append(aligned(class_rows(outcome), least=16))
    worst = [
        (clip(image.name, 60), *(figure_text(key, getattr(image.difference, key)) for key in FIGURES))
        for image in outcome.worst
        if image.difference is not None
    ]
    if worst:
        parts.append(aligned(worst, (f"worst images ({len(worst)})", "max", "mean", "more than 1", "B - A")))
    if rows := worst_rows(outcome):
        parts.append(aligned(rows[1:], rows[0]))
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


def worst_rows(outcome: Comparison) -> list[tuple[str, ...]]:
    """A row of heads, and one for each of the worst images; empty if pixels were compared, or nothing differs."""
    worst = [image for image in outcome.worst if image.difference is None]
    names = [name for name in MEASURES if any(name in image.figures for image in worst)]
    if not worst:
        return []
    rows = [
        (clip(image.name, 60), *(f"{image.figures[name]:.6g}" if name in image.figures else "" for name in names))
        for image in worst
    ]
    return [(f"worst images ({len(worst)})", *names), *rows]


def summary(outcome: Comparison) -> str:
    """How results differ, in a few words; empty if nothing was compared."""
    agreed, right = agreement(outcome.compared), accuracy(outcome.compared)
    if not outcome.compared:
        return ""
    if (objects := objects_of(outcome.compared)) is not None:
        return f"{objects.matched} of {objects.a} objects are found again, and {objects.b - objects.matched} others"
    for name, text in (("iou", "an IoU of masks of"), ("cosine", "a cosine of")):
        if spread := measured(outcome.compared, name, is_best_high=True):
            return f"{text} {spread.mean:.6f} on average, of {spread.worst:.6f} in the worst image"
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
