"""Runs the pipes batch by batch, compares the results, and keeps only figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from torchpipe_py.backends.image.files import find_images, label_of
from torchpipe_py.backends.signature import shown_dims
from torchpipe_py.errors import UnknownNode, counted
from torchpipe_py.keys import TASK_COLOR_KEY, TASK_DATA_KEY, TASK_RESULT_KEY
from torchpipe_py.runtime.pipe import pipe
from torchpipe_py.tools.parity import figures
from torchpipe_py.tools.parity.figures import Compared, Prediction
from torchpipe_py.tools.parity.results import Pixels, Unusable, is_class, read_pixels, read_prediction, refusal
from torchpipe_py.tools.report import ToolError, printable

Data = dict[str, Any]

BATCH = 16
"""Images in flight at once, which bounds the memory."""

NORMALISED_BELOW, IMAGE_ABOVE = 8.0, 32.0
"""If one side's largest value is below the first, and the other's above the second, the scales differ."""

ROUNDING = 1e-9
"""Tolerance in points, so that a loss equal to the limit passes."""


@dataclass(frozen=True)
class Settings:
    """What to compare. ``worst`` pairs are kept for display, their pictures only ``with_views``.

    ``paths`` are images of ``img_dir``, relative to it; without them all are compared. ``tables`` has configurations
    without a file, by the names that ``a``, ``b`` and ``model`` give them.
    """

    a: str
    b: str
    img_dir: str
    model: str | None = None
    worst: int = 10
    with_views: bool = False
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
class Parity:
    """The outcome for one directory.

    ``worst`` has the images with the largest mean difference first; ``views`` has their pictures by name: of A, of B
    and of the difference.
    """

    settings: Settings
    found: int
    compared: list[Compared] = field(default_factory=list)
    refused: list[Unlike] = field(default_factory=list)
    shapes_differ: list[Unlike] = field(default_factory=list)
    unclassified: list[Unlike] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    worst: list[Compared] = field(default_factory=list)
    views: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=dict)

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


def compare_configs(settings: Settings) -> Parity:
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
        comparison = _Comparison(Parity(settings, len(paths)), runners)
        size = min(runner.batch for runner in runners)
        for start in range(0, len(paths), size):
            comparison.add(paths[start : start + size])
    return comparison.finish()


def images_of(img_dir: str) -> list[Path]:
    """The images of a folder, relative to it; ``ToolError`` if there are none."""
    try:
        return [path.relative_to(img_dir) for path in find_images(img_dir)]
    except OSError as error:
        raise ToolError(f"--img_dir {error}") from error


def read_images(img_dir: str, paths: Sequence[Path]) -> tuple[list[str], list[Data], list[tuple[str, str]]]:
    """Names and requests of the images; and name and reason for each unreadable one."""
    names: list[str] = []
    requests: list[Data] = []
    unread: list[tuple[str, str]] = []
    for path in paths:
        try:
            requests.append({TASK_DATA_KEY: Path(img_dir, path).read_bytes()})
            names.append(shown_name(path))
        except OSError as error:
            unread.append((shown_name(path), f"the file cannot be read: {error.strerror}"))
    return names, requests, unread


def shown_name(path: Path) -> str:
    """The path with '/', on one line."""
    return printable(path.as_posix())


class PipeRunner:
    """A pipe and the name of the configuration it is built from; closed with ``stack``."""

    def __init__(self, config: str, source: str | Mapping[str, Any], stack: ExitStack) -> None:
        self.config = config
        self._pipe = stack.enter_context(pipe(source))
        self.batch = min(BATCH, int(self._pipe.stats()["max_inflight"]))
        try:
            self._pipe.signature()
        except UnknownNode as error:
            raise ToolError(f"{config}: {error}; parity takes a configuration with one root") from error

    def run(self, requests: Iterable[Data]) -> Iterator[Data]:
        """The finished dicts of copies of the requests, in order; ``batch`` are in the pipe at once."""
        return self._pipe.map(map(dict, requests), self.batch, return_errors=True)


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


class _Comparison:
    """Compares images batch by batch and writes the outcome into ``parity``."""

    def __init__(self, parity: Parity, runners: Sequence[PipeRunner]) -> None:
        self._parity, self._settings = parity, parity.settings
        self._a, self._b = (_Side(letter, runners[at], len(runners) == 2) for at, letter in enumerate("AB"))
        self._model = runners[2] if len(runners) == 3 else None

    def add(self, paths: Sequence[Path]) -> None:
        """Run one batch through both sides at once, then both results through the model."""
        names, requests, unread = read_images(self._settings.img_dir, paths)
        self._parity.refused += [Unlike(name, reason, reason) for name, reason in unread]
        triples = zip(names, self._a.runner.run(requests), self._b.runner.run(requests), strict=True)
        pairs = [(self._compare(name, a, b), a, b) for name, a, b in triples]
        matched = [(image, a, b) for image, a, b in pairs if image is not None]
        if self._model is None:
            self._parity.compared += [image for image, _, _ in matched]
            return
        predictions_a = _predict(self._model, [a for _, a, _ in matched])
        predictions_b = _predict(self._model, [b for _, _, b in matched])
        for (image, _, _), a, b in zip(matched, predictions_a, predictions_b, strict=True):
            if isinstance(a, str) or isinstance(b, str):
                self._parity.unclassified.append(Unlike(image.name, *_reasons(a, b)))
                self._parity.compared.append(image)
            else:
                self._parity.compared.append(replace(image, a=a, b=b))

    def finish(self) -> Parity:
        """The outcome, completed with notes and the worst images."""
        parity = self._parity
        parity.compared = figures.labelled(parity.compared)
        parity.notes += self._notes()
        differing = [(each.difference.mean, each) for each in parity.compared if each.difference is not None]
        by_mean = sorted(differing, key=lambda pair: -pair[0])
        parity.worst = [image for mean, image in by_mean[: self._settings.worst] if mean > 0]
        return parity

    def _compare(self, name: str, item_a: Data, item_b: Data) -> Compared | None:
        a, b = self._a.read(item_a), self._b.read(item_b)
        if isinstance(a, str) or isinstance(b, str):
            self._parity.refused.append(Unlike(name, *_reasons(a, b)))
            return None
        if isinstance(a, Prediction) and isinstance(b, Prediction):
            return Compared(name, None, a, b)
        # If one side gives a class and the other pixels, report the class.
        a = read_pixels(item_a, self._a.runner.config) if isinstance(a, Prediction) else a
        b = read_pixels(item_b, self._b.runner.config) if isinstance(b, Prediction) else b
        if a.values.shape != b.values.shape:
            self._parity.shapes_differ.append(Unlike(name, a.values.shape, b.values.shape))
            return None
        image = Compared(name, figures.difference(a.values, b.values))
        if self._settings.with_views:
            self._keep_view(image, a.values, b.values)
        return image

    def _keep_view(self, image: Compared, a: np.ndarray, b: np.ndarray) -> None:
        """Keep this pair's pictures if it is among the worst so far; earlier ones win ties."""
        found = [*self._parity.worst, image] if image.difference and image.difference.mean else self._parity.worst
        worst = sorted(found, key=lambda each: -each.difference.mean if each.difference else 0.0)
        self._parity.worst = worst[: self._settings.worst]
        if image in self._parity.worst:
            self._parity.views[image.name] = figures.pictures(a, b)
        kept = {each.name for each in self._parity.worst}
        self._parity.views = {name: view for name, view in self._parity.views.items() if name in kept}

    def _notes(self) -> Iterator[str]:
        compared = self._parity.compared
        for side in (self._a, self._b):
            for origin, count in side.origins.most_common():
                images = f" ({counted(count, 'image')})" if len(side.origins) > 1 else ""
                yield f"{side.letter}: {origin}{images}"
        for side, other in ((self._a, self._b), (self._b, self._a)):
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


def lists(parity: Parity) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """Title and rows (name, A, B) of each list of differing images."""
    yield "different classes", [(name, str(a), str(b)) for name, a, b in figures.disagreeing(parity.compared)]
    for title, images in (("refused", parity.refused), ("without a class", parity.unclassified)):
        yield title, [(image.name, image.a or "gives a result", image.b or "gives a result") for image in images]
    shapes = [(image.name, shown_dims(image.a), shown_dims(image.b)) for image in parity.shapes_differ]
    yield "of different shapes, HxWxC", shapes
