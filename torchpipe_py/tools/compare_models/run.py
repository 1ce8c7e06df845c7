"""Runs the pipes batch by batch, compares the results, and keeps only figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from torchpipe_py.backends.image.files import label_of
from torchpipe_py.errors import counted
from torchpipe_py.keys import TASK_COLOR_KEY, TASK_DATA_KEY, TASK_RESULT_KEY
from torchpipe_py.tools.compare_models import figures
from torchpipe_py.tools.compare_models.figures import Compared, Prediction
from torchpipe_py.tools.compare_models.images import Data, PipeRunner, images_of, read_images
from torchpipe_py.tools.compare_models.results import (
    Pixels,
    Unusable,
    is_class,
    read_pixels,
    read_prediction,
    refusal,
)

OnPair = Callable[[Compared, np.ndarray, np.ndarray], None]
"""Called with an image whose pixels were compared, and with those of both sides, float32 H×W×C."""

NORMALISED_BELOW, IMAGE_ABOVE = 8.0, 32.0
"""If one side's largest value is below the first, and the other's above the second, the scales differ."""

ROUNDING = 1e-9
"""Tolerance in points, so that a loss equal to the limit passes."""


@dataclass(frozen=True)
class Settings:
    """What to compare. The ``worst`` images are listed.

    ``paths`` are images of ``img_dir``, relative to it; without them all are compared. ``tables`` has configurations
    without a file, by the names that ``a``, ``b`` and ``model`` give them.
    """

    a: str
    b: str
    img_dir: str
    model: str | None = None
    worst: int = 10
    paths: Sequence[Path] | None = None
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


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
    """The outcome for one directory; ``worst`` has the images with the largest mean difference first."""

    settings: Settings
    found: int
    compared: list[Compared] = field(default_factory=list)
    refused: list[Unlike] = field(default_factory=list)
    shapes_differ: list[Unlike] = field(default_factory=list)
    unclassified: list[Unlike] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    worst: list[Compared] = field(default_factory=list)

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


def compare_configs(settings: Settings, on_pair: OnPair | None = None) -> Comparison:
    """Compare two configurations, perhaps with a model, on the images of a directory.

    Raises ``ConfigError``, ``BackendUnavailable`` or ``BackendError`` for a pipe that cannot be built, ``ToolError``
    for a directory without images and for unusable results. Failures of single images are part of the outcome.
    """
    paths = images_of(settings.img_dir) if settings.paths is None else settings.paths
    with ExitStack() as stack:
        runners = [
            PipeRunner(config, settings.tables.get(config, config), stack)
            for config in (settings.a, settings.b, settings.model)
            if config is not None
        ]
        outcome = Comparison(settings, len(paths))
        sides = [_Side(letter, runner, settings.model is None) for letter, runner in zip("AB", runners, strict=False)]
        size = min(runner.batch for runner in runners)
        for start in range(0, len(paths), size):
            matched = _compare_batch(outcome, sides, paths[start : start + size], on_pair)
            if settings.model is None:
                outcome.compared += [image for image, _, _ in matched]
            else:
                _classify(outcome, runners[2], matched)
    outcome.compared = figures.labelled(outcome.compared)
    outcome.notes += _notes(outcome.compared, *sides)
    differing = [(each.difference.mean, each) for each in outcome.compared if each.difference is not None]
    by_mean = sorted(differing, key=lambda pair: -pair[0])
    outcome.worst = [image for mean, image in by_mean[: settings.worst] if mean > 0]
    return outcome


class _Side:
    """The results of one configuration so far: sources and range of its pixels.

    With ``takes_classes`` a result may be a class, which is not passed to a model.
    """

    def __init__(self, letter: str, runner: PipeRunner, takes_classes: bool) -> None:
        self.letter, self.runner, self._takes_classes = letter, runner, takes_classes
        self.origins: Counter[str] = Counter()
        self.low, self.high = np.inf, -np.inf

    def read(self, item: Data) -> Pixels | Prediction | str:
        """The pixels or the class of a finished request, or why there are none."""
        if reason := refusal(item):
            return reason
        try:
            if self._takes_classes and is_class(item[TASK_RESULT_KEY]):
                return read_prediction(item[TASK_RESULT_KEY], self.runner.config)
            pixels = read_pixels(item, self.runner.config)
        except Unusable as error:
            return str(error)
        self.origins[pixels.origin] += 1
        self.low = min(self.low, float(pixels.values.min()))
        self.high = max(self.high, float(pixels.values.max()))
        return pixels


Matched = list[tuple[Compared, Data, Data]]


def _compare_batch(
    outcome: Comparison, sides: Sequence[_Side], paths: Sequence[Path], on_pair: OnPair | None
) -> Matched:
    """Run one batch through both sides at once; returns the images that have comparable results, with these."""
    names, requests, unread = read_images(outcome.settings.img_dir, paths)
    outcome.refused += [Unlike(name, reason, reason) for name, reason in unread]
    matched = []
    for name, *items in zip(names, *(side.runner.run(requests) for side in sides), strict=True):
        a, b = (side.read(item) for side, item in zip(sides, items, strict=True))
        if isinstance(a, str) or isinstance(b, str):
            outcome.refused.append(Unlike(name, *_reasons(a, b)))
            continue
        if isinstance(a, Prediction) and isinstance(b, Prediction):
            matched.append((Compared(name, None, a, b), *items))
            continue
        # If one side gives a class and the other pixels, report the class.
        a, b = (
            read_pixels(item, side.runner.config) if isinstance(read, Prediction) else read
            for read, item, side in zip((a, b), items, sides, strict=True)
        )
        if a.values.shape != b.values.shape:
            outcome.shapes_differ.append(Unlike(name, a.values.shape, b.values.shape))
            continue
        image = Compared(name, figures.difference(a.values, b.values))
        if on_pair is not None:
            on_pair(image, a.values, b.values)
        matched.append((image, *items))
    return matched


def _classify(outcome: Comparison, model: PipeRunner, matched: Matched) -> None:
    """Add the images with the classes that a model gives for both results."""
    classes = [_predict(model, [items[side] for _, *items in matched]) for side in (0, 1)]
    for (image, _, _), a, b in zip(matched, *classes, strict=True):
        if isinstance(a, str) or isinstance(b, str):
            outcome.unclassified.append(Unlike(image.name, *_reasons(a, b)))
            outcome.compared.append(image)
        else:
            outcome.compared.append(replace(image, a=a, b=b))


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


def _reasons(a: object, b: object) -> tuple[str, str]:
    return a if isinstance(a, str) else "", b if isinstance(b, str) else ""


def _predict(model: PipeRunner, items: Sequence[Data]) -> list[Prediction | str]:
    """The model's class for each preprocessed image, or why it has none; keeps the channel order."""
    predictions: list[Prediction | str] = []
    requests = []
    for item in items:
        color = {TASK_COLOR_KEY: item[TASK_COLOR_KEY]} if TASK_COLOR_KEY in item else {}
        requests.append({TASK_DATA_KEY: item[TASK_RESULT_KEY], **color})
    for item in model.run(requests):
        try:
            predictions.append(refusal(item) or read_prediction(item[TASK_RESULT_KEY], model.config))
        except Unusable as error:
            predictions.append(str(error))
    return predictions
