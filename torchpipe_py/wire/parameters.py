"""Parameters of a request: those that have a meaning here, and those for its backends."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torchpipe_py.errors import InvalidRequest, nearest
from torchpipe_py.keys import TASK_PARAMETERS_KEY
from torchpipe_py.values import to_strings
from torchpipe_py.wire.errors import Bound, RequestTooLargeError
from torchpipe_py.wire.values import MOST_PARAMETERS, check_names

NO_SHARED_MEMORY = "shared memory is not served: send tensors in the request"
MOST_PARAMETER_VALUES = 2**12
"""Limit of the values in one request's parameters, each member of an object and element of a list counted."""
MOST_PARAMETER_DEPTH = 64
"""Limit of the objects and lists in each other in one request's parameters: Python's own is lower in some places."""
MOST_HEADERS, HEADER_BYTES = 32, 4096
"""Limits of the headers of one request that are forwarded: their number, and the bytes of names and values."""
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_REFUSED = {"sequence_": "a pipe keeps no state between requests", "shared_memory_": NO_SHARED_MEMORY}
_USUAL = {
    **dict.fromkeys(("conf", "confidence", "conf_thres", "conf_threshold", "confidence_threshold", "score_thr",
                     "score_thresh", "score_threshold", "min_score", "threshold"), "threshold"),
    **dict.fromkeys(("iou", "iou_thres", "iou_thresh", "iou_threshold", "nms", "nms_thres", "nms_threshold"), "iou"),
    **dict.fromkeys(("max_det", "max_dets", "max_detections"), "max_det"),
    **dict.fromkeys(("classes", "class_agnostic")),
    **dict.fromkeys(("agnostic", "agnostic_nms"), "class_agnostic"),
    **dict.fromkeys(("imgsz", "img_size", "input_size")),
}  # fmt: skip
"""Names that detectors have for their parameters here and elsewhere, and the one here, if it differs."""
_REFUSED_NAMES = ("sequence_id", "sequence_start", "sequence_end", "shared_memory_region", "shared_memory_byte_size")


def split(where: str, given: Mapping[str, Any], known: Iterable[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters with the names in ``known``, and the others.

    ``InvalidRequest`` for those of sequences and shared memory, and for a name that is nearly a known one.
    """
    check_names(f"{where}parameters", given, MOST_PARAMETERS)
    own, others = {}, {}
    for name, value in given.items():
        if name in known:
            own[name] = value
        else:
            _check_name(where, name, known)
            others[name] = value
    return own, others


def _check_name(where: str, name: str, known: Iterable[str]) -> None:
    plain = _plain(name)
    for prefix, reason in _REFUSED.items():
        if plain.startswith(prefix):
            raise InvalidRequest(f"{where}parameter {name[:40]!r}: {reason}")
    near = next((each for each in (*known, *_REFUSED_NAMES) if each.replace("_", "") == plain.replace("_", "")), "")
    # NOTE: of a longer name that ends like a known one, as of ``my_priority``, the first letter differs.
    near = near or next(
        (each for each in get_close_matches(plain, (*known, *_REFUSED_NAMES), 3, 0.8)
         if each[0] == plain[0] or abs(len(each) - len(plain)) < 2), ""
    )  # fmt: skip
    if near:
        reason = next((reason for prefix, reason in _REFUSED.items() if near.startswith(prefix)), "")
        hint = f"; {reason}" if reason else ""
        raise InvalidRequest(f"{where}unknown parameter {name[:40]!r}; did you mean {near!r}?{hint}")


def check_near(given: Iterable[str], known: Collection[str]) -> None:
    """``InvalidRequest`` for a parameter whose name is nearly one of those ``known`` to be read."""
    for name in given if known else ():
        if name not in known:
            for near in get_close_matches(_plain(name), known, 1, 0.8):
                raise InvalidRequest(f"unknown parameter {name[:40]!r}; did you mean {near!r}?")


def check_usual(given: Iterable[str], known: Collection[str]) -> None:
    """``InvalidRequest`` for a parameter that detectors usually have, unless it is one of those ``known`` to be read.

    For pipes without custom backends, which may read any.
    """
    for name in given:
        if name not in known and _plain(name) in _USUAL:
            raise InvalidRequest(f"unknown parameter {name[:40]!r}; {hint_of(name, known)}")


def hint_of(name: str, known: Collection[str], own: Collection[str] = ()) -> str:
    """The clause of an error that names what was meant: a parameter of backends, ``known``, or one of the service's."""
    if (meant := _USUAL.get(_plain(name))) in known:
        return f"did you mean {meant!r}?"
    return nearest(name, (*own, *known)) if known or own else "the model reads none"


def _plain(name: str) -> str:
    return name[:64].lower().replace("-", "_")


def too_deep() -> InvalidRequest:
    """The error of parameters with too many levels."""
    return InvalidRequest(f"parameters of more than {MOST_PARAMETER_DEPTH} levels of objects and lists")


def check_values(given: Mapping[str, Any], text: Bound) -> None:
    """``RequestTooLargeError`` for parameters with more than ``MOST_PARAMETER_VALUES`` values, or more than ``text``.

    ``InvalidRequest`` for NaN and infinity, and for more than ``MOST_PARAMETER_DEPTH`` levels.
    """
    values = characters = 0
    left: list[tuple[Any, int]] = [(given, 0)]
    while left:
        value, depth = left.pop()
        if depth > MOST_PARAMETER_DEPTH:
            raise too_deep()
        if isinstance(value, Mapping):
            values += len(value)
            characters += sum(map(len, value))
            left += [(each, depth + 1) for each in value.values()]
        elif isinstance(value, list):
            values += len(value)
            left += [(each, depth + 1) for each in value]
        elif isinstance(value, str):
            characters += len(value)
        elif isinstance(value, float) and not math.isfinite(value):
            raise InvalidRequest("parameters: a number that is NaN or infinity")
        elif value is not None and not isinstance(value, (int, float)):  # of JSON, a long list of numbers
            values += MOST_PARAMETER_VALUES + 1
        if values > MOST_PARAMETER_VALUES:
            raise RequestTooLargeError(f"parameters of more than {MOST_PARAMETER_VALUES} values: send them as an input")
        if characters > text.bytes:
            raise RequestTooLargeError(f"parameters of more than {text.bytes} characters ({text.name})")


class ForwardedHeaders:
    """The headers that backends get as parameters: those with a name that matches one of ``patterns``.

    ``patterns`` are separated by commas, ``*`` stands for anything; empty for none. Case is ignored.
    """

    def __init__(self, patterns: str = "") -> None:
        self._patterns = [pattern.lower() for pattern in to_strings(patterns)]

    def add_to(self, parameters: dict[str, Any], fields: Mapping[str, str]) -> dict[str, Any]:
        """The parameters with the matching headers of ``fields``, whose names are in lower case.

        ``InvalidRequest`` for a parameter whose name is that of a forwarded header, or a client could forge one that a
        proxy sets, and for a header with control characters. ``RequestTooLargeError`` for too many of them.
        """
        if not self._patterns:
            return parameters
        for name in parameters:
            if self._matches(name.lower()):
                raise InvalidRequest(f"parameter {name[:40]!r}: it is a header here (--forward-headers)")
        found = {name: value for name, value in fields.items() if self._matches(name)}
        for name, value in found.items():
            if _CONTROL.search(value) is not None:  # HTTP does not take them, gRPC does
                raise InvalidRequest(f"header {name[:40]!r}: its value has a control character")
        size = sum(len(name) + len(value) for name, value in found.items())
        if len(found) > MOST_HEADERS or size > HEADER_BYTES:
            limits = f"{MOST_HEADERS} and {HEADER_BYTES}"
            raise RequestTooLargeError(f"{len(found)} headers to forward, of {size} bytes; the limits are {limits}")
        return {**parameters, **found}

    def _matches(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._patterns)


def give(data: dict[str, Any], parameters: Mapping[str, Any]) -> None:
    """Put a copy of the parameters into a request's dict. ``InvalidRequest`` if an input has their key."""
    if TASK_PARAMETERS_KEY in data:
        raise InvalidRequest(f"both an input {TASK_PARAMETERS_KEY!r} and parameters, which come under this key")
    data[TASK_PARAMETERS_KEY] = dict(parameters)
