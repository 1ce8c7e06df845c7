"""Errors as clients see them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any, NamedTuple

from torchpipe_py.errors import InvalidRequest, NoResult, TorchpipeError, log_failure, message_of, nearest
from torchpipe_py.keys import TASK_RESULT_KEY

_TEXT_CHARACTERS = 1024
_FOLDERS = re.compile(
    r"""(?<=['"])/(?:[^'"/\n]*/)*"""  # in quotes, where a name may hold a space
    r"""|(?<![\w.~/-])/(?:[^\s/'":;,<>()\[\]]+/)+"""
)
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,16}\b")
_DEFECTS = frozenset({"backend_error", "internal"})
_CODE = re.compile(r"[ -~]{1,64}")  # what metadata of gRPC may hold, and a counter's label should
_MOST_RETRY_MS = 2**31 - 1  # Thrift's field has 32 bits


class Bound(NamedTuple):
    """A limit in bytes; ``name`` is the setting's name for the operator."""

    bytes: int
    name: str


class RequestTooLargeError(InvalidRequest):
    """A part of a request that is larger than it may be."""

    code = "too_large"


class UnsupportedEncodingError(InvalidRequest):
    """A body in a content coding other than gzip and deflate."""

    code = "unsupported_encoding"


class RouteError(TorchpipeError):
    """A request that no route takes; ``allowed`` are the methods that the path has."""

    code = "not_found"

    def __init__(self, text: str, allowed: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.allowed = allowed
        if allowed:
            self.code = "method_not_allowed"


class ReplyTooLargeError(NoResult):
    """A result that is too large to be sent, so that its client has to ask for less, or in another form.

    ``size`` is what is known of it, at least so many bytes as they would be sent.
    """

    code = "too_large"

    def __init__(self, size: int, bound: Bound, hint: str = "") -> None:
        hint = hint or "ask for fewer outputs or smaller ones"
        super().__init__(
            f"the result has {size} bytes or more; the limit of a reply is {bound.bytes} ({bound.name}); {hint}"
        )


def code_of(error: BaseException) -> str:
    """The error's code, for programs; ``internal`` if it has none, or one that not every protocol can send.

    NOTE: a code of another library's exception means something else. Whatever a backend's own exception has, this and
    ``retry_after_ms_of`` never raise: there would be no answer.
    """
    if isinstance(error, CancelledError):
        return "cancelled"
    with suppress(Exception):
        code = error.code if isinstance(error, TorchpipeError) else ""
        if isinstance(code, str) and _CODE.fullmatch(code) is not None and code != "ok":
            return code
    return "internal"


def retry_after_ms_of(error: BaseException) -> int | None:
    """Whole milliseconds after which the request may be repeated; ``None`` if the error has no such number."""
    with suppress(Exception):
        given = getattr(error, "retry_after_ms", None)
        if isinstance(given, (int, float)) and not isinstance(given, bool):
            return min(max(0, math.ceil(given)), _MOST_RETRY_MS)
    return None


def restated(error: TorchpipeError, text: str) -> TorchpipeError:
    """The error with another text: the same for programs."""
    made = TorchpipeError(text)
    made.code, made.__cause__ = code_of(error), error
    made.retry_after_ms = retry_after_ms_of(error)
    return made


def reason(data: Mapping[str, Any], key: str, others: Iterable[str] = ()) -> BaseException:
    """The reason why a finished request has no value under ``key``; backends write anything under ``error``."""
    error = data.get("error")
    if isinstance(error, BaseException):
        return error
    if error is not None:
        return NoResult(str(error))
    if key == TASK_RESULT_KEY:
        return NoResult(f"the request has no {key!r}")
    known = (*others, *[name for name in data if isinstance(name, str)])
    whole = f"; {TASK_RESULT_KEY!r} is the whole answer" if TASK_RESULT_KEY in data else ""
    return InvalidRequest(f"the request has no {key!r}; {nearest(key, known)}{whole}")


def report(error: BaseException) -> tuple[str, str]:
    """Code and text for the client of an error that ended a request. Logs a defect, and drops the error's frames.

    NOTE: called once for each failure, or the log has it twice.
    """
    log_defect(error)
    code, text = code_of(error), describe_error(error)
    _forget_frames(error)
    return code, text


def _forget_frames(error: BaseException | None) -> None:
    """Drop the tracebacks of the error and of what led to it.

    NOTE: their frames hold the request, and that the error: garbage of megabytes that waits for the collector.
    """
    seen = 0
    while error is not None and seen < 16:
        error.__traceback__ = None
        error, seen = error.__cause__ or error.__context__, seen + 1


def log_defect(error: BaseException) -> None:
    """Log the error with its traceback, and that of its cause, unless the request is to blame."""
    if code_of(error) in _DEFECTS:
        log_failure(f"a request failed: {describe_error(error)}", error)


def describe_error(error: BaseException) -> str:
    """The error's text for a client: its first line, cut where it is long, without folders and addresses."""
    line = message_of(error, 2 * _TEXT_CHARACTERS).strip().split("\n", 1)[0]
    line = _ADDRESS.sub("0x…", _FOLDERS.sub("", line))
    if len(line) > _TEXT_CHARACTERS:
        line = f"{line[:_TEXT_CHARACTERS]}…"
    return line
