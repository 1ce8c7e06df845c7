"""What a worker may say. It has read bytes from clients: nothing it says is taken unseen.

A shape is a type, ``[shape]`` for a list, ``{str: shape}`` for an object of any keys, ``{"key": shape, …}`` for one
that has these keys at least (but for ``_OPTIONAL`` ones), or a function that says whether a value fits.
"""

from __future__ import annotations

from typing import Any

from torchpipe_py.runtime.statistics import COUNTS
from torchpipe_server.supervisor.figures import HAND_OVER, HISTOGRAMS, NOW, TOTALS

_MOST = 2**63
_MOST_KEYS = 4096
_OPTIONAL = ("hand_over",)  # of a worker whose shared nodes an engine process runs


class UnexpectedMessageError(Exception):
    """A worker said what none says."""


def check_message(message: Any) -> None:
    """``UnexpectedMessageError`` unless it is a worker's message, and all that is read of it is what it should be."""
    kind = message.get("type")
    shape = _MESSAGES.get(kind) if isinstance(kind, str) else None
    if shape is None:
        raise UnexpectedMessageError(f"no message of a worker is called {str(kind)[:40]!r}")
    _check(message, shape, kind)


def _check(value: Any, shape: Any, place: str) -> None:
    if isinstance(shape, list):
        _require(isinstance(value, list), place)
        for item in value:
            _check(item, shape[0], f"{place}[]")
    elif isinstance(shape, dict) and str in shape:
        _require(isinstance(value, dict) and len(value) <= _MOST_KEYS, place)
        for item in value.values():
            _check(item, shape[str], f"{place}{{}}")
    elif isinstance(shape, dict):
        _require(isinstance(value, dict), place)
        for key, inner in shape.items():
            _require(key in value or key in _OPTIONAL, f"{place}.{key}")
            if key in value:
                _check(value[key], inner, f"{place}.{key}")
    elif isinstance(shape, type):
        _require(type(value) is shape, place)
    else:
        _require(shape(value), place)


def _require(is_right: bool, place: str) -> None:
    if not is_right:
        raise UnexpectedMessageError(f"a worker's {place} is not what it should be")


def _number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < _MOST  # no NaN either


def _histogram(value: Any) -> bool:
    return isinstance(value, list) and len(value) == COUNTS and all(map(_number, value))


def _size(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**31


def _sizes(value: Any) -> bool:
    return isinstance(value, dict) and all(
        len(size) < 10 and size.isascii() and size.isdigit() and int(size) and _number(count)
        for size, count in value.items()
    )


_NODE = {
    **dict.fromkeys((*NOW, *TOTALS, "oldest_batch_s"), _number),
    **{"min": _size, "max": _size, "batch_sizes": _sizes, "instance_compute_ms": [_number]},
    "histograms": dict.fromkeys(HISTOGRAMS, _histogram),
}
_STATS = {
    "inflight": _number,
    "nodes": {str: _NODE},
    "requests": {"by_method": {str: {str: _number}}, "latency": {"counts": _histogram, "sum_ms": _number}},
    "hand_over": dict.fromkeys(HAND_OVER, _number),
    "log_lines_dropped": _number,
    "gpus": [{"index": _number, "name": str, "used_bytes": _number, "total_bytes": _number}],
}
_MESSAGES: dict[str, Any] = {
    "ready": {"graph": str},
    "failed": {"message": str},
    "closed": {"slot": int},
    "released": {"slot": int},
    "stats": {"stats": _STATS},
    "end": {"answered": bool, "stats": _STATS},
}
