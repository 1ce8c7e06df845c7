"""Outcomes over HTTP: a status, JSON, header fields."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from torchpipe_py.errors import ModelUnavailable
from torchpipe_py.wire.errors import RouteError, UnsupportedEncodingError, report, retry_after_ms_of

encode_plain = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
"""JSON of values that it has; ``ValueError`` for NaN and infinity, ``TypeError`` for other types."""


def fast_encoder(slow: Callable[[Any], str]) -> Callable[[Any], bytes]:
    """msgspec's, where it is installed, which is ten times as fast; else ``slow``, as UTF-8.

    Of NaN it makes ``null``. Either raises ``UnicodeEncodeError`` for half of a surrogate pair.
    """
    try:
        import msgspec
    except ImportError:
        return lambda value: slow(value).encode()
    return msgspec.json.encode


STATUSES = {
    "config": 400,
    "forbidden": 403,
    "not_found": 404,
    "unknown_node": 404,
    "method_not_allowed": 405,
    "not_acceptable": 406,
    "too_slow": 408,
    "too_large": 413,
    "unsupported_encoding": 415,
    "no_result": 422,
    "overloaded": 429,
    "cancelled": 503,
    "closed": 503,
    "unavailable": 503,
    "worker_died": 503,
    "deadline_exceeded": 504,
    "backend_error": 500,
    "backend_unavailable": 500,
    "internal": 500,
}
"""Statuses by an error's code; other codes, of faulty requests, are 400."""


class Failure(NamedTuple):
    """``{"error": …, "code": …, "retry_after_ms": …}`` under the status that belongs to the code."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str]


def failure(error: BaseException) -> Failure:
    """The answer to a request that ended with an error; a defect is logged."""
    code, text = report(error)
    if isinstance(error, RouteError):  # its text has the path of a URL, not of a folder
        failed = failure_of(STATUSES[code], code, str(error))
        if error.allowed:
            failed.headers["Allow"] = ", ".join(error.allowed)
        return failed
    status = STATUSES.get(code, 400)
    if code == "internal":
        text = f"{type(error).__name__}: {text}"
    failed = failure_of(status, code, text, retry_after_ms_of(error))
    if isinstance(error, ModelUnavailable):  # until someone loads it
        return Failure(status, {"error": text, "code": code}, {})
    if isinstance(error, UnsupportedEncodingError):
        failed.headers["Accept-Encoding"] = "gzip, deflate"
    return failed


def failure_of(status: int, code: str, text: str, retry_after_ms: int | None = None) -> Failure:
    """Build a Failure from status, code and text."""
    body: dict[str, Any] = {"error": text, "code": code}
    if retry_after_ms is None and status in (429, 503):
        retry_after_ms = 1000
    if retry_after_ms is None:
        return Failure(status, body, {})
    body["retry_after_ms"] = retry_after_ms
    return Failure(status, body, {"Retry-After": str(math.ceil(retry_after_ms / 1000))})


def to_line(value: Any) -> bytes:
    """``value`` as a line of JSON. ``ValueError`` for NaN and infinity, which JSON cannot represent."""
    return utf8_json(f"{encode_plain(value)}\n")


def utf8_json(text: str) -> bytes:
    """JSON as bytes. Half of a surrogate pair, which UTF-8 cannot encode, is escaped: ``\\ud800``."""
    return text.encode("utf-8", "backslashreplace")


def utf8_text(text: str) -> bytes:
    """Plain text as bytes. Half of a surrogate pair becomes ``?``, as in an error's message."""
    return text.encode("utf-8", "replace")
