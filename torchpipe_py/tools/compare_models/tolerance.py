"""How far two versions may differ, and whether images show that they do."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchpipe_py.errors import nearest
from torchpipe_py.tools.compare_models.measures import MEASURES, UNMATCHED, Measure
from torchpipe_py.tools.compare_models.sequence import ConfidenceSequence

IMAGES = "images"
"""The name, in a tolerance, of the share of images that have to keep each limit of an image."""

DEFAULT_IMAGES = 0.99

DIGITS = 12
"""Decimals to which shares count, so that 1 - 0.99 is 0.01; figures of commands have so many digits."""


def number_text(value: float) -> str:
    """A figure of a limit or a goal, as a command takes it."""
    return f"{value:.{DIGITS}g}"


class Verdict(enum.Enum):
    """The verdict of images on a limit: an interval of 95 % lies on one side of it, or contains it."""

    WITHIN = "within"
    BEYOND = "beyond"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Limit:
    """One limit: ``allowed`` is the largest mean, over all images, of how far each is beyond it, from 0 to 1."""

    measure: Measure
    value: float
    allowed: float

    def __str__(self) -> str:
        sign = "≥" if self.measure.is_best_high else "≤"
        return f"{self.measure.name} {sign} {number_text(self.value)}"

    def loss(self, figures: Mapping[str, float], others: Sequence[str]) -> float | None:
        """How far an image is beyond the limit; ``None`` if it has nothing to compare.

        An image on which the sides have not everything in common is beyond a limit of what they have in common, unless
        one of the ``others``, which are limited too, counts that.
        """
        for name in UNMATCHED.get(self.measure.name, ()):
            if name in figures and name not in others and figures[name] != float(MEASURES[name].is_best_high):
                return 1.0
        value = figures.get(self.measure.name)
        if value is None:
            return None
        if self.measure.is_share:
            return 1 - value if self.measure.is_best_high else value
        return float(math.isnan(value) or self.measure.is_beyond(value, self.value))


@dataclass(frozen=True)
class Tolerance:
    """Limits, all of which two versions have to keep."""

    limits: tuple[Limit, ...]

    def __str__(self) -> str:
        shares = sorted({limit.allowed for limit in self.limits if not limit.measure.is_share})
        is_default = not shares or shares[0] == round(1 - DEFAULT_IMAGES, DIGITS)
        images = "" if is_default else f", {IMAGES}={number_text(1 - shares[0])}"
        return ", ".join(f"{limit.measure.name}={number_text(limit.value)}" for limit in self.limits) + images

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(limit.measure.name for limit in self.limits)


def read_tolerance(text: str) -> Tolerance:
    """``top1=0.999, score=0.01`` as a tolerance. ``ValueError`` names what is wrong, and the nearest valid name."""
    given: dict[str, float] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, _, number = (each.strip() for each in part.partition("="))
        if name not in MEASURES and name != IMAGES:
            raise ValueError(f"{name!r} is not measured; {nearest(name, [*MEASURES, IMAGES])}")
        if name in given:
            raise ValueError(f"{name} is there twice")
        try:
            given[name] = float(number)
        except ValueError:
            example = f"{name}=0.99" if name == IMAGES or MEASURES[name].is_best_high else f"{name}=0.01"
            raise ValueError(f"expected {name}=NUMBER, as {example}, got {part!r}") from None
        _check(name, given[name], number)
    images = given.pop(IMAGES, DEFAULT_IMAGES)
    if not given:
        raise ValueError("no limit; for example top1=0.999, score=0.01")
    return Tolerance(tuple(_limit(MEASURES[name], value, images) for name, value in given.items()))


def _check(name: str, value: float, number: str) -> None:
    """``ValueError`` for a limit that is always or never kept, or that no sample of images can show to be kept."""
    if name == IMAGES or MEASURES[name].is_share:
        share = round(value, DIGITS)
        if not 0 < share < 1:
            hint = "; a sample of images can show 0.999, never all" if share == 1 else ""
            hint = "; a sample of images can show 0.001, never none" if share == 0 else hint
            raise ValueError(f"{name}: expected a share above 0 and below 1, got {number}{hint}")
    elif MEASURES[name].is_best_high:
        if not 0 <= value <= 1:
            raise ValueError(f"{name}: expected a number from 0 to 1, got {number}")
    elif not 0 <= value < math.inf:
        raise ValueError(f"{name}: expected a number, at least 0, got {number}")


def _limit(measure: Measure, value: float, images: float) -> Limit:
    allowed = (1 - value if measure.is_best_high else value) if measure.is_share else 1 - images
    return Limit(measure, value, round(allowed, DIGITS))


@dataclass(frozen=True)
class Finding:
    """The evidence of ``images`` images about a limit.

    ``found`` is the mean of how far each is beyond it, within ``low`` to ``high`` with a probability of 95 %;
    ``needed`` is about how many images like these would decide, if they have not.
    """

    limit: Limit
    images: int
    found: float
    low: float
    high: float
    verdict: Verdict
    needed: int | None


class Judge:
    """Whether images show that a tolerance is kept, which may be asked after every image.

    It is valid for images that are drawn at random from those that are to be served.
    """

    def __init__(self, tolerance: Tolerance) -> None:
        self._tolerance = tolerance
        self._sequences = [ConfidenceSequence() for _ in tolerance.limits]

    def add(self, figures: Mapping[str, float] | None) -> None:
        """Take the figures of an image; ``None`` if only one side has a result, or results are not comparable."""
        for limit, sequence in zip(self._tolerance.limits, self._sequences, strict=True):
            loss = 1.0 if figures is None else limit.loss(figures, self._tolerance.names)
            if loss is not None:
                sequence.add([loss])

    def verdict(self) -> Verdict:
        """Of the tolerance: beyond it if one limit is, within it if all are."""
        verdicts = set(map(_verdict, self._tolerance.limits, self._sequences))
        return next(each for each in (Verdict.BEYOND, Verdict.UNDECIDED, Verdict.WITHIN) if each in verdicts)

    def findings(self) -> list[Finding]:
        """One for each limit."""
        return list(map(_finding, self._tolerance.limits, self._sequences))


def _verdict(limit: Limit, sequence: ConfidenceSequence) -> Verdict:
    if sequence.is_below(limit.allowed):
        return Verdict.WITHIN
    return Verdict.BEYOND if sequence.is_above(limit.allowed) else Verdict.UNDECIDED


def _finding(limit: Limit, sequence: ConfidenceSequence) -> Finding:
    verdict = _verdict(limit, sequence)
    needed = sequence.values_needed(limit.allowed) if verdict is Verdict.UNDECIDED else None
    return Finding(limit, sequence.count, sequence.mean, *sequence.interval(), verdict, needed)
