"""Every exception the package raises on purpose; each carries the ``code`` that goes over the wire.

And how any exception comes out of a worker process.
"""

from __future__ import annotations

import difflib
import logging
import pickle
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger("torchpipe_py")


class TorchpipeError(Exception):
    """Root of all exceptions of this package; ``code`` names the kind, for programs."""

    code = "internal"
    retry_after_ms: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON: ``code`` and ``message``, and ``retry_after_ms`` where that is known."""
        wait = {} if self.retry_after_ms is None else {"retry_after_ms": self.retry_after_ms}
        return {"code": self.code, "message": message_of(self), **wait}


class ConfigError(TorchpipeError, ValueError, RuntimeError):
    """A configuration that cannot be built; the message names file, node, key and the nearest valid name."""

    code = "config"


class Problems:
    """What is wrong with a configuration, gathered so that all of it is told at once."""

    def __init__(self) -> None:
        self._errors: list[ConfigError] = []
        self._doubts: set[str] = set()
        self.count = 0
        """How often one was added, known or not: unchanged where all in between was right."""

    def add(self, error: ConfigError) -> None:
        """One more, told only once: a default may be wrong for every node."""
        self.count += 1
        if str(error) not in map(str, self._errors):
            self._errors.append(error)

    def doubt(self, text: str) -> None:
        """What is probably wrong, or means nothing: a line in the log, once."""
        if text not in self._doubts:
            self._doubts.add(text)
            logger.warning("%s", text)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """A ``ConfigError`` inside is added, and what follows goes on."""
        try:
            yield
        except ConfigError as error:
            self.add(error)

    def raise_all(self) -> None:
        """Raise the one there is, or one that has a line for each; nothing if there is none."""
        if len(self._errors) == 1:
            raise self._errors[0]
        if self._errors:
            raise ConfigError("\n".join(map(str, self._errors)))


class BackendUnavailable(TorchpipeError, ValueError, RuntimeError):
    """A backend that cannot be set up on this machine: a missing library or device.

    ``FirstAvailable`` goes on to its next choice when it meets this one; any other error of a ``setup`` is a defect.
    """

    code = "backend_unavailable"


class InvalidRequest(TorchpipeError, ValueError):
    """A request that is no dict, has no ``data``, or holds what the pipeline cannot take: by type, shape or size."""

    code = "invalid_request"


class UnknownNode(TorchpipeError, IndexError):
    """``node_name`` names no root, or is missing where there are several."""

    code = "unknown_node"


class BackendError(TorchpipeError, RuntimeError):
    """An exception in a backend's ``forward``, kept as ``__cause__``; the message names node and backend."""

    code = "backend_error"


class SetupError(BackendError, ValueError):
    """An exception in a backend's ``setup``, kept as ``__cause__``: the pipe is not built."""


class NoResult(TorchpipeError):
    """Why a request has no ``result``; found under ``"error"`` in its dict, never raised by a pipe."""

    code = "no_result"


class DecodeError(NoResult, ValueError):
    """Bytes that are no readable image."""

    code = "decode_error"


class Overloaded(TorchpipeError, RuntimeError):
    """Refused at the entry: ``max_inflight`` requests are in flight, or the queue rules the deadline out. Nothing was
    started; ``retry_after_ms`` says when it may be, if known. ``deadline`` is the request's, by ``perf_counter``.
    """

    code = "overloaded"

    def __init__(self, message: str, retry_after_ms: int | None = None, deadline: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_ms, self.deadline = retry_after_ms, deadline


class DeadlineExceeded(TorchpipeError, TimeoutError):
    """The request was not finished within its ``timeout``."""

    code = "deadline_exceeded"


class WorkerDied(TorchpipeError, RuntimeError):
    """The process that had the request ended: that of a ``Process``, of an isolated decoder, of a shared node, or the
    service's worker. Or it cannot be started again.
    """

    code = "worker_died"


class EngineUnavailable(TorchpipeError, RuntimeError):
    """The engine process that runs a shared node has died, and the next one is not ready yet."""

    code = "unavailable"
    retry_after_ms = 500


class PipeClosed(TorchpipeError, RuntimeError):
    """The pipe was closed before the request was finished, or before it came."""

    code = "closed"


@dataclass(frozen=True)
class Failure:
    """An exception of a worker; ``pickled`` is empty where the exception itself would not arrive as it is."""

    kind: str
    name: str
    message: str
    trace: str
    pickled: bytes

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        kind = next((cls.code for cls in (BackendUnavailable, ConfigError) if issubclass(type(error), cls)), "")
        message = message_of(error)
        try:
            trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        except BaseException:
            trace = describe(error)
        try:
            pickled = pickle.dumps(error)
            if str(pickle.loads(pickled)) != str(error):
                pickled = b""
        except BaseException:
            pickled = b""
        return cls(kind, _type_name(error), message, trace, pickled)

    def error(self, otherwise: type[TorchpipeError] = BackendError) -> BaseException:
        """The exception again, or one of its kind; its ``__cause__`` tells where in the worker it was raised.

        ``otherwise``: what it becomes where it did not arrive and is of no kind that is known here.
        """
        error: Any = None
        if self.pickled:
            try:
                error = pickle.loads(self.pickled)
            except Exception:
                error = None
        if not isinstance(error, BaseException):
            kinds = {cls.code: cls for cls in (BackendUnavailable, ConfigError)}
            known = kinds.get(self.kind)
            error = known(self.message) if known else otherwise(f"{self.name}: {self.message}")
        error.__cause__ = WorkerTraceback(self.trace)
        return error  # type: ignore[no-any-return]


class WorkerTraceback(Exception):
    """The text of a traceback in another process."""

    def __str__(self) -> str:
        return f"in the other process:\n{self.args[0]}"


MESSAGE_LIMIT = 4000
"""Characters of a message that are kept: a client may have sent what a backend puts into its exceptions."""


def message_of(error: BaseException, limit: int = MESSAGE_LIMIT) -> str:
    """An exception's message, which can be encoded and is cut at ``limit`` characters; its type where it has none.

    Raises nothing, whatever the exception's own methods do.
    """
    try:
        # NOTE: `str` may give an object of a subclass, whose methods are somebody else's too.
        text = str.__getitem__(str(error), slice(limit + 1))
        if len(text) > limit:
            text = f"{text[:limit]} …"
        return text.encode("utf-8", "replace").decode() or _type_name(error)
    except BaseException:
        return f"an exception of type {_type_name(error)} whose message cannot be read"


def describe(error: BaseException, limit: int = MESSAGE_LIMIT) -> str:
    """An exception's type and ``message_of`` it, where it has one."""
    name, message = _type_name(error), message_of(error, limit)
    return name if message == name else f"{name}: {message}"


def prefixed(prefix: str, error: BaseException) -> BaseException:
    """An exception of the same class and ``code`` that says ``prefix`` before its message; ``error`` is its cause.

    ``error`` itself where its class makes something else of a message.
    """
    kind, text = type(error), f"{prefix}{message_of(error)}"
    try:
        made: BaseException = kind.__new__(kind, text)  # NOTE: its ``__init__`` may take anything
        vars(made).update(vars(error))
        made.__cause__ = error
        return made if str(made) == text else error
    except Exception:
        return error


def log_failure(what: str, error: BaseException) -> None:
    """Log an exception that goes no further, with its traceback; raises nothing."""
    try:
        # Whoever calls this is the place of the line: of each place a service writes only so many.
        logger.error("%s", what, exc_info=error, stacklevel=2)
    except BaseException:
        logger.error("%s: %s", what, describe(error), stacklevel=2)


def _type_name(error: BaseException) -> str:
    name = type.__dict__["__name__"].__get__(type(error))  # past what a metaclass says
    return str(name)


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or its type where it has none."""
    return message_of(error).strip().split("\n", 1)[0] or _type_name(error)


_SHOWN = 64
_ELEMENTS = 8


def shown(value: object, depth: int = 2) -> str:
    """What somebody sent, for a message: a number, a text in quotes, cut where it is long, else its type.

    Of a short list its elements, where it is no deeper than ``depth``.
    """
    if isinstance(value, (list, tuple)) and len(value) <= _ELEMENTS and depth:
        return f"[{', '.join([shown(element, depth - 1) for element in value])}]"
    if value is None or isinstance(value, float) or (isinstance(value, int) and value.bit_length() <= _SHOWN):
        return repr(value)
    if not isinstance(value, str):
        return f"a {type(value).__name__}"
    return repr(value) if len(value) <= _SHOWN else f"{value[:_SHOWN]!r}…"


_QUOTED = 200


def quoted(value: object) -> str:
    """What stands in a configuration, for a message: its ``repr``, without its middle where that is long."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than 4300 digits
        return f"an integer of {value.bit_length()} bits" if isinstance(value, int) else shown(value)
    return text if len(text) <= _QUOTED else f"{text[: _QUOTED // 2]}…{text[-_QUOTED // 2 :]}"


def counted(count: int, noun: str) -> str:
    """How many of something, for a message: ``1 class``, ``2 classes``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{'es' if noun.endswith('s') else 's'}"


_LISTED = 16
"""The most names that a message lists."""

_NEAR = 0.5  # of the letters of two names, in common


def nearest(name: str, valid: Iterable[str]) -> str:
    """A clause for an error message: the valid name that ``name`` may stand for, or all; of many, three near ones."""
    names = sorted(set(valid))
    lowered = {candidate.lower(): candidate for candidate in reversed(names)}
    # Cut: the time grows with the product of the lengths, and the name may be a client's.
    word = name[:_SHOWN].lower()
    # Of a few letters half may be wrong; of more, chance alone has half in common.
    cutoff = 0.7 if len(names) > _LISTED else 0.6 if len(word) > 4 else 0.5
    close = difflib.get_close_matches(word, lowered, n=1, cutoff=cutoff)
    if close:
        return f"did you mean {lowered[close[0]]!r}?"
    if not names:
        return "none is valid here"
    if len(names) <= _LISTED:
        return "valid: " + ", ".join(names)
    bare = {each.lstrip("-"): valid for each, valid in lowered.items()}  # or all flags would have that in common
    near = difflib.get_close_matches(word.lstrip("-"), bare, n=3, cutoff=_NEAR)
    listed = ", ".join(bare[each] for each in near)
    return f"the nearest of {len(names)}: {listed}" if near else f"none of the {len(names)} valid names is near"
