"""Runs both sides on images, compares their results by kind, and keeps only figures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from torchpipe_py.backends.image.files import label_of
from torchpipe_py.errors import counted, describe, nearest
from torchpipe_py.keys import TASK_COLOR_KEY, TASK_DATA_KEY, TASK_RESULT_KEY
from torchpipe_py.results import Detections
from torchpipe_py.tools.compare_models import figures, measures
from torchpipe_py.tools.compare_models.figures import Compared, Prediction
from torchpipe_py.tools.compare_models.images import (
    Data,
    Pictures,
    PipeRunner,
    Recorded,
    ResultSource,
    Runner,
    read_images,
)
from torchpipe_py.tools.compare_models.measures import KINDS, MEASURES
from torchpipe_py.tools.compare_models.results import Pixels, Result, Unusable, kinds_of, read, refusal
from torchpipe_py.tools.compare_models.tolerance import Finding, Judge, Tolerance, Verdict
from torchpipe_py.tools.report import ToolError

OnPair = Callable[[Compared, np.ndarray, np.ndarray], None]
"""Called with an image whose pixels were compared, and with those of both sides, float32 H×W×C."""

NORMALISED_BELOW, IMAGE_ABOVE = 8.0, 32.0
"""If one side's largest value is below the first, and the other's above the second, the scales differ."""

ROUNDING = 1e-9
"""Tolerance in points, so that a loss equal to the limit passes."""


@dataclass(frozen=True)
class Unlike:
    """An image that was not compared: its shape on each side, or why a side has no result, ``""`` if it has one."""

    name: str
    a: Any
    b: Any


@dataclass(frozen=True)
class Bar:
    """A limit from the command line, and the ``value`` over ``images`` images; ``None`` without any."""

    option: str
    limit: float
    value: float | None
    images: int
    ok: bool


@dataclass
class Comparison:
    """The outcome for some images.

    ``kinds`` are those of the results: one of ``measures.KINDS``, or ``pixels`` and that of the model. ``worst`` has
    the images that differ most first. ``verdict`` and ``findings``, one for each limit, are of the tolerance, if there
    is one; ``seen`` counts the images until it was decided, or all ``found``. ``choices`` are the candidate's, see
    ``pipe.setup_choices``.
    """

    reference: ResultSource | Recorded
    candidate: ResultSource | Recorded
    pictures: Pictures
    model: ResultSource | None
    tolerance: Tolerance | None
    found: int
    seen: int = 0
    kinds: tuple[str, ...] = ()
    compared: list[Compared] = field(default_factory=list)
    refused: list[Unlike] = field(default_factory=list)
    shapes_differ: list[Unlike] = field(default_factory=list)
    unclassified: list[Unlike] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    worst: list[Compared] = field(default_factory=list)
    verdict: Verdict | None = None
    findings: list[Finding] = field(default_factory=list)
    choices: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def judge(
        self, max_mean: float | None = None, min_agreement: float | None = None, max_drop: float | None = None
    ) -> None:
        """Set the requested bars; one without a value counts as missed."""
        spreads = figures.spreads(self.compared)
        agreed, right = figures.agreement(self.compared), figures.accuracy(self.compared)
        mean = spreads["mean"].mean if spreads else None
        share, classified = (agreed.share, agreed.total) if agreed else (None, 0)
        drop, with_truth = (right.drop, right.a.total) if right else (None, 0)
        for option, limit, value, images, sign in (
            ("--max-mean", max_mean, mean, len(self.compared), 1),
            ("--min-agreement", min_agreement, share, classified, -1),
            ("--max-drop", max_drop, drop, with_truth, 1),
        ):
            if limit is not None:
                slack = ROUNDING if option == "--max-drop" else 0.0
                ok = value is not None and sign * value <= sign * limit + slack
                self.bars.append(Bar(option, limit, value, images, ok))


def compare(
    reference: ResultSource | Recorded,
    candidate: ResultSource | Recorded,
    pictures: Pictures,
    tolerance: Tolerance | None = None,
    *,
    model: ResultSource | None = None,
    worst: int = 10,
    on_pair: OnPair | None = None,
    until: float = math.inf,
) -> Comparison:
    """Compare the results of two sources, or those that ``model`` gives for their pixels, on images.

    The results' kind is found from the first ones. With a ``tolerance``, images are taken in a random order, and no
    more once the interval of each limit lies within what it allows, or that of one lies beyond, or after the
    time ``until`` of ``time.monotonic``. The ``worst`` images are listed.

    Raises ``ConfigError``, ``BackendUnavailable`` or ``BackendError`` for a pipe that cannot be built, ``ToolError``
    for a directory without images, for results that cannot be compared and for limits of another kind. Failures of
    single images are part of the outcome.
    """
    paths = pictures.listed() if tolerance is None else pictures.shuffled()
    outcome = Comparison(reference, candidate, pictures, model, tolerance, len(paths))
    judge = None if tolerance is None else Judge(tolerance)
    with ExitStack() as stack:
        sides = _Side("A", reference.open(stack)), _Side("B", candidate.open(stack))
        outcome.choices = sides[1].runner.choices
        pair = _Pair(*sides, tolerance, kind="" if model is None else "pixels", on_pair=on_pair)
        classify = None if model is None else _Model(model.open_pipe(stack), tolerance)
        size = min(side.runner.batch for side in (*sides, *(classify.pair.sides if classify else ())))
        for start in range(0, len(paths), size):
            batch, unread = read_images(pictures.img_dir, paths[start : start + size])
            outcome.refused += [Unlike(name, reason, reason) for name, reason in unread]
            finished = list(zip(batch, *(side.runner.run(batch) for side in sides), strict=True))
            images = [(pair.compare(picture.name, a, b), a, b) for picture, a, b in finished]
            rated = [image for image, _, _ in images] if classify is None else classify(outcome, images)
            outcome.seen = min(start + size, len(paths))
            outcome.kinds = tuple(filter(None, [pair.kind, classify.pair.kind if classify else ""]))
            _sort(outcome, rated)
            if judge is not None and (_is_decided(outcome, judge, rated) or monotonic() >= until):
                break
    if judge is not None:
        outcome.verdict, outcome.findings = judge.verdict(), judge.findings()
    outcome.compared = figures.labelled(outcome.compared)
    outcome.notes += _notes(outcome.compared, *sides)
    ranked = sorted(outcome.compared, key=_severity, reverse=True)
    outcome.worst = [image for image in ranked[:worst] if any(part > 0 for part in _severity(image))]
    return outcome


def _severity(image: Compared) -> tuple[float, ...]:
    return measures.severity(image.figures) if image.difference is None else (image.difference.mean,)


def _sort(outcome: Comparison, images: Sequence[Compared | Unlike]) -> None:
    for image in images:
        if isinstance(image, Compared):
            outcome.compared.append(image)
        else:
            (outcome.shapes_differ if isinstance(image.a, tuple) else outcome.refused).append(image)


def _is_decided(outcome: Comparison, judge: Judge, images: Sequence[Compared | Unlike]) -> bool:
    """Let the judge see the images, and whether it has seen enough.

    Raises ``ToolError`` for a limit of another kind of results.
    """
    _check_limits(outcome)
    unlike = {image.name: image for image in outcome.unclassified}
    for image in images:
        failed = unlike.get(image.name) or image
        if isinstance(failed, Compared):
            judge.add(failed.figures)
        elif isinstance(failed.a, tuple) or not (failed.a and failed.b):  # else neither side has a result
            judge.add(None)
    return judge.verdict() is not Verdict.UNDECIDED


def _check_limits(outcome: Comparison) -> None:
    if outcome.tolerance is None or len(outcome.kinds) < (1 if outcome.model is None else 2):
        return
    valid = [name for name, measure in MEASURES.items() if set(measure.kinds) & set(outcome.kinds)]
    for name in outcome.tolerance.names:
        if name not in valid:
            of = " and ".join(outcome.kinds)
            raise ToolError(
                f"--tolerance: {name!r} is not measured on {of}, which the results are; {nearest(name, valid)}"
            )


class _Side:
    """One side: what runs it, and sources and range of its pixels so far."""

    def __init__(self, letter: str, runner: Runner) -> None:
        self.letter, self.runner = letter, runner
        self.origins: Counter[str] = Counter()
        self.low, self.high = np.inf, -np.inf

    def read(self, kind: str, item: Data) -> Result:
        """The result of a finished request. Raises like ``results.read``."""
        result = read(kind, item, self.runner.config)
        if isinstance(result, Pixels):
            self.origins[result.origin] += 1
            self.low = min(self.low, float(result.values.min()))
            self.high = max(self.high, float(result.values.max()))
        return result

    @cached_property
    def labels(self) -> Sequence[str]:
        return self.runner.labels()


class _Pair:
    """Both sides, and the kind of their results once the first ones are known."""

    def __init__(
        self, a: _Side, b: _Side, tolerance: Tolerance | None, kind: str = "", on_pair: OnPair | None = None
    ) -> None:
        self.sides = (a, b)
        self.kind = kind
        self._tolerance = tolerance
        self._on_pair = on_pair

    def compare(self, name: str, *items: Data) -> Compared | Unlike:
        """Compare the results of one image on both sides."""
        reasons = [refusal(item) for item in items]
        results = list[Result]()
        if not any(reasons):
            self.kind = self.kind or self._find_kind(items)
        for at, (side, item) in enumerate(zip(self.sides, items, strict=True)):
            try:
                if not reasons[at]:
                    results.append(side.read(self.kind or kinds_of(item, side.runner.config)[0], item))
            except Unusable as error:
                reasons[at] = str(error)
        if any(reasons):
            return Unlike(name, *reasons)
        return self._compare(name, *results)

    def _compare(self, name: str, a: Result, b: Result) -> Compared | Unlike:
        if isinstance(a, Prediction) and isinstance(b, Prediction):
            a, b = self._with_labels(a, b)
            return Compared(name, None, a, b, figures=measures.of_classes(a, b))
        if isinstance(a, Detections) and isinstance(b, Detections):
            import cv2

            a, b = self._with_names(a, b)
            try:
                found, objects = measures.of_detections(a, b)
            except (ValueError, cv2.error) as error:
                raise ToolError(f"{name}: masks that cannot be compared: {describe(error)}") from error
            return Compared(name, None, figures=found, objects=objects)
        one, other = (each.values if isinstance(each, Pixels) else each for each in (a, b))
        assert isinstance(one, np.ndarray)
        assert isinstance(other, np.ndarray)
        if one.shape != other.shape:
            return Unlike(name, one.shape, other.shape)
        if self.kind != "pixels":
            measure = measures.of_maps if self.kind == "masks" else measures.of_vectors
            return Compared(name, None, figures=measure(one, other))
        difference = figures.difference(one, other)
        image = Compared(name, difference, figures=measures.of_pixels(difference))
        if self._on_pair is not None:
            self._on_pair(image, one, other)
        return image

    def _find_kind(self, items: Sequence[Data]) -> str:
        """The kind as which both results can be read; of several, one that the tolerance limits, or the likeliest."""
        likely = [kinds_of(item, side.runner.config) for side, item in zip(self.sides, items, strict=True)]
        common = [kind for kind in KINDS if all(kind in kinds for kinds in likely)]
        if not common:
            (a, b), (of_a, of_b) = (side.runner.config for side in self.sides), (kinds[0] for kinds in likely)
            raise ToolError(f"{a} gives {of_a}, {b} gives {of_b}: only results of one kind can be compared")
        limited = {kind for name in (self._tolerance.names if self._tolerance else ()) for kind in MEASURES[name].kinds}
        common = [kind for kind in common if kind in limited] or common
        return min(common, key=lambda kind: sum(kinds.index(kind) for kinds in likely))

    def _with_names(self, a: Detections, b: Detections) -> tuple[Detections, Detections]:
        """Both with the names of classes if only one side has them."""
        if bool(a.names) == bool(b.names) or not (len(a) and len(b)):
            return a, b
        named, other = self.sides if a.names else self.sides[::-1]
        if named.runner.is_function:  # texts of objects: the order of its classes is unknown
            raise _unlike_labels(named, (a if a.names else b).labels[0], other)
        names = a.names or b.names
        return replace(a, names=names), replace(b, names=names)

    def _with_labels(self, a: Prediction, b: Prediction) -> tuple[Prediction, Prediction]:
        """Both with labels if one side gives these and the other numbers."""
        named = [isinstance(each.label, str) for each in (a, b)]
        if named[0] == named[1] or None in (a.label, b.label):
            return a, b
        labels, numbers = (self.sides[named.index(is_named)] for is_named in (True, False))
        if not labels.labels:
            raise _unlike_labels(labels, (a, b)[named.index(True)].label, numbers)
        names = labels.labels
        return (a if named[0] else a.with_labels(names)), (b if named[1] else b.with_labels(names))


def _unlike_labels(named: _Side, label: Any, other: _Side) -> ToolError:
    return ToolError(
        f"{named.runner.config} gives labels ({label!r}), {other.runner.config} numbers of classes, and only its "
        "labels file would say which is which: let both give labels"
    )


class _Model:
    """A model that gives a result for the pixels of each side."""

    def __init__(self, runner: PipeRunner, tolerance: Tolerance | None) -> None:
        self._runner = runner
        self.pair = _Pair(_Side("A", runner), _Side("B", runner), tolerance)

    def __call__(
        self, outcome: Comparison, images: Sequence[tuple[Compared | Unlike, Data, Data]]
    ) -> list[Compared | Unlike]:
        """The images with the figures of the model's results; records those for which it has none."""
        pairs = [(image, a, b) for image, a, b in images if isinstance(image, Compared)]
        of_a, of_b = (self._run([items[side] for _, *items in pairs]) for side in (0, 1))
        rated = {}
        for (image, _, _), a, b in zip(pairs, of_a, of_b, strict=True):
            found = self.pair.compare(image.name, a, b)
            if isinstance(found, Unlike):
                outcome.unclassified.append(found)
                continue
            merged = {**image.figures, **found.figures}
            rated[image.name] = replace(image, a=found.a, b=found.b, figures=merged, objects=found.objects)
        return [rated.get(image.name, image) for image, _, _ in images]

    def _run(self, items: Sequence[Data]) -> list[Data]:
        """The finished requests for preprocessed images; keeps the channel order."""
        kept = [{key: item[key] for key in (TASK_COLOR_KEY,) if key in item} for item in items]
        return list(
            self._runner.run_items(
                {TASK_DATA_KEY: item[TASK_RESULT_KEY], **color} for item, color in zip(items, kept, strict=True)
            )
        )


def _notes(compared: Sequence[Compared], a: _Side, b: _Side) -> Iterator[str]:
    """Where pixels come from, and doubts about the comparison."""
    for side in (a, b):
        for origin, count in side.origins.most_common():
            images = f" ({counted(count, 'image')})" if len(side.origins) > 1 else ""
            yield f"{side.letter}: {origin}{images}"
    for side, other in ((a, b), (b, a)):
        if side.high < NORMALISED_BELOW and other.high > IMAGE_ABOVE:
            yield (
                f"{side.letter}: values within {side.low:.3g}..{side.high:.3g}, those of {other.letter} within "
                f"{other.low:.3g}..{other.high:.3g}: compared as they are, although the scales differ"
            )
        if any(", BGR" in origin for origin in side.origins) and any(", RGB" in origin for origin in other.origins):
            orders = f"{side.letter} gives BGR, {other.letter} RGB"
            yield f"{orders}: compared in RGB, but a model sees red and blue swapped"
    if compared and compared[0].truth is None and any(image.a is not None for image in compared):
        label = label_of(Path(compared[0].name), Path())
        yield f"no accuracy: the images are not labelled; {label!r} of {compared[0].name} is not a class"
