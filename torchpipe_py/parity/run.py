"""Drives the pipes: images go in batch by batch, what comes out is compared and only its figures are kept."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from torchpipe_py.errors import TorchpipeError, UnknownNode, counted
from torchpipe_py.images.files import find_images, label_of
from torchpipe_py.keys import TASK_COLOR_KEY, TASK_DATA_KEY, TASK_ERROR_KEY, TASK_RESULT_KEY
from torchpipe_py.parity.compare import difference, labelled, pictures
from torchpipe_py.parity.record import (
    ACCEPTED,
    Compared,
    Parity,
    ParityError,
    Prediction,
    Refused,
    ShapesDiffer,
    View,
)
from torchpipe_py.parity.results import Pixels, Unusable, is_class, read_pixels, read_prediction, refusal
from torchpipe_py.runtime.pipe import pipe

Data = dict[str, Any]

BATCH = 16
"""Images in flight at once; with the results of both sides they bound the memory."""

NORMALISED_BELOW, IMAGE_ABOVE = 8.0, 32.0
"""Where one side's largest value stays below the first and the other's is above the second, the scales differ."""


@dataclass(frozen=True)
class Settings:
    """What to compare. ``worst`` pairs are kept for display, their pictures only ``with_views``.

    ``paths`` are images of ``img_dir``, relative to it; without them all are compared. ``tables`` has configurations
    that lie in no file, by the names that ``a``, ``b`` and ``model`` give them.
    """

    a: str
    b: str
    img_dir: str
    model: str | None = None
    limit: int | None = None
    worst: int = 10
    with_views: bool = False
    paths: Sequence[Path] | None = None
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def compare_configs(settings: Settings) -> Parity:
    """Everything two configurations, and a model, say about the images of a directory.

    Raises ``ConfigError``, ``BackendUnavailable`` or ``BackendError`` for a pipe that cannot be built, ``ParityError``
    for a directory without images and for results that are of no use. What fails for one image is in the outcome.
    """
    paths = images_of(settings.img_dir) if settings.paths is None else settings.paths
    parity = Parity(settings.img_dir, settings.a, settings.b, settings.model, len(paths))
    with ExitStack() as stack:
        runners = [
            PipeRunner(config, settings.tables.get(config, config), stack)
            for config in (settings.a, settings.b, settings.model)
            if config is not None
        ]
        comparison = Comparison(parity, settings, runners)
        for batch in _batches(paths[: settings.limit], min(runner.batch for runner in runners)):
            comparison.add(batch)
    comparison.finish()
    return parity


def images_of(img_dir: str) -> list[Path]:
    """The images of a folder, relative to it; ``ParityError`` where there are none."""
    try:
        return [path.relative_to(img_dir) for path in find_images(img_dir)]
    except OSError as error:
        raise ParityError(f"--img_dir {error}") from error


def shown_name(path: Path) -> str:
    """The path with '/', on one line, and without what UTF-8 cannot say."""
    text = path.as_posix().encode("utf-8", "replace").decode("utf-8")
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _batches(paths: Sequence[Path], size: int) -> Iterator[Sequence[Path]]:
    for start in range(0, len(paths), size):
        yield paths[start : start + size]


class PipeRunner:
    """A pipe and the name of the configuration it is built from; closed with ``stack``."""

    def __init__(self, config: str, source: str | Mapping[str, Any], stack: ExitStack) -> None:
        self.config = config
        self._pipe = stack.enter_context(pipe(source))
        self.batch = min(BATCH, int(self._pipe.stats()["max_inflight"]))

    def start(self, requests: list[Data]) -> Callable[[], list[Data]]:
        """Start up to ``batch`` requests; what is returned waits for them and returns their dicts, all finished."""
        items = [dict(request) for request in requests]
        try:
            future = self._pipe.submit(items)
        except UnknownNode as error:
            raise ParityError(f"{self.config}: {error}; parity takes a configuration with one root") from error

        def finish() -> list[Data]:
            try:
                future.result()
            except TorchpipeError:
                return [
                    item if TASK_RESULT_KEY in item else self._alone(request)
                    for item, request in zip(items, requests, strict=True)
                ]
            return items

        return finish

    def _alone(self, request: Data) -> Data:
        """The finished dict of one request, with what it raised as its ``error``."""
        item = dict(request)
        try:
            self._pipe(item)
        except TorchpipeError as error:
            return {TASK_ERROR_KEY: error}
        return item


class Side:
    """What one configuration gave so far: where its pixels come from, and their range.

    A result may be a class where ``takes_classes``, which no model is to be given.
    """

    def __init__(self, letter: str, runner: PipeRunner, takes_classes: bool) -> None:
        self.letter, self.runner, self._takes_classes = letter, runner, takes_classes
        self.origins: Counter[str] = Counter()
        self.low, self.high = np.inf, -np.inf

    def read(self, item: Data) -> Pixels | Prediction | str:
        """The pixels or the class of a finished request, or why there are none."""
        reason = refusal(item)
        if reason:
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

    def notes(self) -> Iterator[str]:
        """A line for each origin, with a count where there are several."""
        for origin, count in self.origins.most_common():
            yield f"{self.letter}: {origin}" + (f" ({counted(count, 'image')})" if len(self.origins) > 1 else "")


class Comparison:
    """Takes images batch by batch and writes what it finds into ``parity``."""

    def __init__(self, parity: Parity, settings: Settings, runners: Sequence[PipeRunner]) -> None:
        self._parity, self._settings = parity, settings
        self._root = Path(settings.img_dir)
        takes_classes = settings.model is None
        self._a, self._b = Side("A", runners[0], takes_classes), Side("B", runners[1], takes_classes)
        self._model = runners[2] if settings.model is not None else None
        self._views = Views(settings.worst if settings.with_views else 0)

    def add(self, paths: Sequence[Path]) -> None:
        """Run one batch through both sides at once, then through the model what both gave."""
        names, requests = self._read_files(paths)
        wait_a, wait_b = self._a.runner.start(requests), self._b.runner.start(requests)
        triples = list(zip(names, wait_a(), wait_b(), strict=True))
        pairs = [(self._compare(name, a, b), a, b) for name, a, b in triples]
        matched = [(image, a, b) for image, a, b in pairs if image is not None]
        if self._model is None:
            self._parity.compared += [image for image, _, _ in matched]
        else:
            self._parity.compared += self._classify(self._model, matched)

    def finish(self) -> None:
        """What can only be said at the end: notes and the worst images."""
        parity, worst = self._parity, self._settings.worst
        parity.compared = labelled(parity.compared)
        parity.notes += [*self._limit_note(), *self._a.notes(), *self._b.notes(), *self._scale_note()]
        parity.notes += [*self._order_note(), *self._label_note()]
        differing = [(each.difference.mean, each) for each in parity.compared if each.difference is not None]
        by_mean = sorted(differing, key=lambda pair: -pair[0])
        parity.worst = [image for mean, image in by_mean[:worst] if mean > 0]
        parity.views = self._views.sorted()

    def _read_files(self, paths: Sequence[Path]) -> tuple[list[str], list[Data]]:
        names, requests = [], []
        for path in paths:
            name = shown_name(path)
            try:
                encoded = (self._root / path).read_bytes()
            except OSError as error:
                reason = f"the file cannot be read: {error.strerror}"
                self._parity.refused.append(Refused(name, reason, reason))
                continue
            names.append(name)
            requests.append({TASK_DATA_KEY: encoded})
        return names, requests

    def _compare(self, name: str, item_a: Data, item_b: Data) -> Compared | None:
        a, b = self._a.read(item_a), self._b.read(item_b)
        if isinstance(a, str) or isinstance(b, str):
            reasons = [side if isinstance(side, str) else ACCEPTED for side in (a, b)]
            self._parity.refused.append(Refused(name, *reasons))
            return None
        if isinstance(a, Prediction) and isinstance(b, Prediction):
            return Compared(name, None, a, b)
        # Of a class and pixels, the class is what is wrong, and is told.
        a = read_pixels(item_a, self._a.runner.config) if isinstance(a, Prediction) else a
        b = read_pixels(item_b, self._b.runner.config) if isinstance(b, Prediction) else b
        if a.values.shape != b.values.shape:
            self._parity.shapes_differ.append(ShapesDiffer(name, a.values.shape, b.values.shape))
            return None
        compared = Compared(name, difference(a.values, b.values))
        self._views.offer(compared, a.values, b.values)
        return compared

    def _classify(self, model: PipeRunner, matched: Sequence[tuple[Compared, Data, Data]]) -> Iterator[Compared]:
        """The same images with the model's classes; where it has none for one side, the image is listed."""
        predictions_a = _predict(model, [a for _, a, _ in matched])
        predictions_b = _predict(model, [b for _, _, b in matched])
        for (image, _, _), a, b in zip(matched, predictions_a, predictions_b, strict=True):
            if isinstance(a, str) or isinstance(b, str):
                reasons = [side if isinstance(side, str) else ACCEPTED for side in (a, b)]
                self._parity.unclassified.append(Refused(image.name, *reasons))
                yield image
            else:
                yield replace(image, a=a, b=b)

    def _limit_note(self) -> Iterator[str]:
        limit = self._settings.limit
        if limit is not None and limit < self._parity.found:
            yield f"--limit: the first {limit} of {self._parity.found} images"

    def _label_note(self) -> Iterator[str]:
        compared = self._parity.compared
        if compared and compared[0].truth is None and any(image.a is not None for image in compared):
            label = label_of(Path(compared[0].name), Path())
            yield f"no accuracy: the images are not labelled; {label!r} of {compared[0].name} is no class"

    def _order_note(self) -> Iterator[str]:
        for side, other in ((self._a, self._b), (self._b, self._a)):
            if any(", BGR" in origin for origin in side.origins) and any(", RGB" in origin for origin in other.origins):
                orders = f"{side.letter} gives BGR, {other.letter} RGB"
                yield f"{orders}: compared in RGB, but a model sees red and blue swapped"

    def _scale_note(self) -> Iterator[str]:
        for side, other in ((self._a, self._b), (self._b, self._a)):
            if side.high < NORMALISED_BELOW and other.high > IMAGE_ABOVE:
                yield (
                    f"{side.letter}: values within {side.low:.3g}..{side.high:.3g}, those of {other.letter} within "
                    f"{other.low:.3g}..{other.high:.3g}: compared as they are, though not on one scale"
                )


class Views:
    """The pictures of the ``count`` pairs with the largest mean difference so far; equal pairs are not shown."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._heap: list[tuple[float, int, View]] = []
        self._offered = 0

    def offer(self, image: Compared, a: np.ndarray, b: np.ndarray) -> None:
        """Keep this pair's pictures if it is among the worst; of equals the first."""
        self._offered += 1
        mean = image.difference.mean if image.difference is not None else 0.0
        rank = (mean, -self._offered)
        if not self._count or mean == 0:
            return
        if len(self._heap) == self._count and rank < self._heap[0][:2]:
            return
        entry = (*rank, View(image.name, *pictures(a, b)))
        if len(self._heap) < self._count:
            heapq.heappush(self._heap, entry)
        else:
            heapq.heapreplace(self._heap, entry)

    def sorted(self) -> list[View]:
        """The worst first."""
        return [view for *_, view in sorted(self._heap, key=lambda entry: entry[:2], reverse=True)]


def _predict(model: PipeRunner, items: Sequence[Data]) -> list[Prediction | str]:
    finish = model.start([_as_request(item) for item in items])
    return [_prediction(item, model.config) for item in finish()]


def _as_request(item: Data) -> Data:
    """A model's request from a preprocessing's outcome; the channel order travels along."""
    request = {TASK_DATA_KEY: item[TASK_RESULT_KEY]}
    if TASK_COLOR_KEY in item:
        request[TASK_COLOR_KEY] = item[TASK_COLOR_KEY]
    return request


def _prediction(item: Data, config: str) -> Prediction | str:
    reason = refusal(item)
    if reason:
        return reason
    try:
        return read_prediction(item[TASK_RESULT_KEY], config)
    except Unusable as error:
        return str(error)
