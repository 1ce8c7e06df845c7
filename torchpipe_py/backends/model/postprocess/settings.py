"""The settings of a detector: those of the configuration, and a request's own within its bounds."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchpipe_py.backends.base import Data
from torchpipe_py.errors import ConfigError, InvalidRequest, nearest, quoted, shown
from torchpipe_py.keys import TASK_PARAMETERS_KEY
from torchpipe_py.values import to_bool, to_float, to_int, to_list

PARAMETERS = ("threshold", "iou", "max_det", "classes", "class_agnostic")
"""The parameters of a request that a detector reads."""

_MOST_TEXT = 2**20
_MOST_CLASSES = 2**16
_MOST_REQUESTED = 2**12  # classes in a request


@dataclass(frozen=True)
class Settings:
    """``classes`` are the indices to keep, ``None`` for all."""

    threshold: float
    iou: float
    max_det: int
    classes: frozenset[int] | None
    class_agnostic: bool


class Bounds:
    """The settings of the configuration, which are also the bounds of a request's.

    A request may raise ``threshold`` and lower it to ``least_threshold``, lower ``max_det``, and name fewer
    ``classes``; ``iou`` and ``class_agnostic`` are free.
    """

    def __init__(self, settings: Settings, least_threshold: float | None, names: Sequence[str]) -> None:
        least = settings.threshold if least_threshold is None else least_threshold
        if least > settings.threshold:
            raise ConfigError(f"least_threshold = {least:g} is larger than threshold = {settings.threshold:g}")
        self._settings, self._least, self._names = settings, least, names
        self._readers: dict[str, Callable[[Any], Any]] = {
            "threshold": self._threshold,
            "iou": self._iou,
            "max_det": self._max_det,
            "classes": self._classes,
            "class_agnostic": to_bool,
        }

    def of(self, item: Data) -> Settings:
        """The settings for a request; ``InvalidRequest`` for a parameter of the wrong type or out of its bounds."""
        given = item.get(TASK_PARAMETERS_KEY)
        if not isinstance(given, Mapping) or given.keys().isdisjoint(PARAMETERS):
            return self._settings
        own = {}
        for key, read in self._readers.items():
            if key in given:
                try:
                    own[key] = read(given[key])
                except ValueError as error:
                    raise InvalidRequest(f"parameter {key!r}: {error}") from None
        return replace(self._settings, **own)

    def _threshold(self, value: Any) -> float:
        return _between(
            to_float(value), self._least, 1, below="key least_threshold of the model's node lowers the bound"
        )

    def _iou(self, value: Any) -> float:
        return _between(to_float(value), 0, 1)

    def _max_det(self, value: Any) -> int:
        most = to_int(int(value) if isinstance(value, float) and value.is_integer() else value)
        return int(_between(most, 1, self._settings.max_det, above="key max_det of the model's node raises the bound"))

    def _classes(self, value: Any) -> frozenset[int] | None:
        if not isinstance(value, (str, int, list, tuple)) or isinstance(value, bool):
            raise ValueError(f"expected a list of labels or indices, got {shown(value)}")
        values = to_list(value)
        if len(values) > _MOST_REQUESTED:  # a text with many commas
            raise ValueError(f"{len(values)} labels and indices; the limit is {_MOST_REQUESTED}")
        chosen, allowed = class_indices(values, self._names), self._settings.classes
        if allowed is not None and not (chosen or allowed) <= allowed:
            others = ", ".join(map(str, sorted((chosen or allowed) - allowed)[:5]))
            raise ValueError(
                f"only classes {', '.join(map(str, sorted(allowed)[:20]))} are answered here, not {others}"
            )
        return allowed if chosen is None else chosen


def _between(value: float, low: float, high: float, below: str = "", above: str = "") -> float:
    """The value; ``ValueError`` out of its bounds, with what changes the one that it misses."""
    if not low <= value <= high:
        got = quoted(value) if isinstance(value, int) else f"{value:g}"  # an integer may be beyond floats
        hint = below if 0 <= value < low else above if value > high else ""
        raise ValueError(f"must be from {low:g} to {high:g}, got {got}{hint and f'; {hint}'}")
    return value


def class_indices(values: Sequence[Any], names: Sequence[str]) -> frozenset[int] | None:
    """The indices of labels and indices, ``None`` for an empty list; ``ValueError`` for one that does not exist."""
    found, by_name = set(), {name: index for index, name in reversed([*enumerate(names)])}
    for value in values:
        if isinstance(value, str) and value in by_name:
            found.add(by_name[value])
            continue
        try:
            index = to_int(value)
        except ValueError:
            known = nearest(value, names) if isinstance(value, str) and names else "without labels, give indices"
            raise ValueError(f"no class {shown(value)}; {known}") from None
        if not 0 <= index < (len(names) or _MOST_CLASSES):
            raise ValueError(f"no class {index}; there are {len(names) or _MOST_CLASSES}")
        found.add(index)
    return frozenset(found) or None


def names_of(text: str) -> tuple[str, ...]:
    """The labels that Ultralytics writes into a model's metadata: a dict or list as a Python literal; else none."""
    try:
        value = ast.literal_eval(text) if len(text) <= _MOST_TEXT else None
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return ()
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    if not isinstance(value, dict) or not value:
        return ()
    if not all(type(key) is int and 0 <= key < _MOST_CLASSES for key in value):
        return ()
    return tuple(str(value.get(index, index)) for index in range(max(value) + 1))
