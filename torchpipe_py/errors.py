"""Every exception the package raises on purpose; each carries the ``code`` that goes over the wire.

And how any exception comes out of a worker process.
"""

from __future__ import annotations

import difflib
import logging
import pickle
import traceback
from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger("torchpipe_py")


@contextmanager
def without_warnings() -> Iterator[None]:
    """A context in which only errors are logged: a plan that is made again would repeat its warnings."""
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


class TorchpipeError(Exception):
    """Root of all exceptions of this package; ``code`` names the kind, for programs."""

    code = "internal"
    retry_after_ms: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """A dict for JSON: ``code`` and ``message``, and ``retry_after_ms`` if known."""
        wait = {} if self.retry_after_ms is None else {"retry_after_ms": self.retry_after_ms}
        return {"code": self.code, "message": message_of(self), **wait}


class ConfigError(TorchpipeError, ValueError, RuntimeError):
    """A configuration that cannot be built; the message names file, node, key and the nearest valid name."""

    code = "config"


class TooManyProblems(ConfigError):
    """A configuration with more than ``MOST_PROBLEMS`` mistakes; the message has the first ones."""


MOST_PROBLEMS = 100
"""Mistakes that are reported together: a suggestion for each takes time, and nobody reads more."""


class Problems:
    """Collects configuration errors and reports them together."""

    def __init__(self) -> None:
        self._errors: dict[str, ConfigError] = {}  # by their text
        self._warned: set[str] = set()
        self.count = 0
        """Number of ``add`` calls, duplicates included."""

    def add(self, error: ConfigError) -> None:
        """Add an error unless recorded: a bad default occurs in every node.

        Raises ``TooManyProblems`` after ``MOST_PROBLEMS``.
        """
        self.count += 1
        self._errors.setdefault(str(error), error)
        if len(self._errors) >= MOST_PROBLEMS:
            raise TooManyProblems("\n".join([*self._errors, f"checked no further after {MOST_PROBLEMS} mistakes"]))

    def warn_once(self, text: str) -> None:
        """Log a warning, once."""
        if text not in self._warned:
            self._warned.add(text)
            logger.warning("%s", text)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Add a ``ConfigError`` that is raised inside, and continue."""
        try:
            yield
        except TooManyProblems:
            raise
        except ConfigError as error:
            self.add(error)

    def raise_all(self) -> None:
        """Raise the collected errors as one ``ConfigError``."""
        if len(self._errors) == 1:
            raise next(iter(self._errors.values()))
        if self._errors:
            raise ConfigError("\n".join(self._errors))


class BackendUnavailable(TorchpipeError, ValueError, RuntimeError):
    """A backend that cannot be set up on this machine: a missing library or device.

    ``FirstAvailable`` then tries its next choice; any other error in a ``setup`` is a defect.
    """

    code = "backend_unavailable"


class InvalidRequest(TorchpipeError, ValueError):
    """A request that is not a dict, lacks ``data``, or has a value of a wrong type, shape or size."""

    code = "invalid_request"


class UnknownNode(TorchpipeError, IndexError):
    """``node_name`` is not a root, or is missing although there are several."""

    code = "unknown_node"


class ModelUnavailable(UnknownNode):
    """``node_name`` is a model of the service's folder that could not be loaded, or was unloaded."""

    code = "unavailable"


class BackendError(TorchpipeError, RuntimeError):
    """An exception in a backend's ``forward``, kept as ``__cause__``; the message names node and backend."""

    code = "backend_error"


class SetupError(BackendError, ValueError):
    """An exception in a backend's ``setup``, kept as ``__cause__``: the pipe is not built."""


class NoResult(TorchpipeError):
    """The reason for a missing ``result``: ``"error"`` in the request's dict; never raised by a pipe."""

    code = "no_result"


class DecodeError(NoResult, ValueError):
    """Bytes that are not a readable image."""

    code = "decode_error"


class Overloaded(TorchpipeError, RuntimeError):
    """Refused at the entry: ``max_inflight`` requests are in flight, or the queue rules the deadline out. Nothing was
    started; ``retry_after_ms`` is the estimated wait, if known. ``deadline`` is the request's, by ``perf_counter``.
    """

    code = "overloaded"

    def __init__(self, message: str, retry_after_ms: int | None = None, deadline: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_ms, self.deadline = retry_after_ms, deadline


class DeadlineExceeded(TorchpipeError, TimeoutError):
    """The request was not finished within its ``timeout``."""

    code = "deadline_exceeded"


class WorkerDied(TorchpipeError, RuntimeError):
    """The process that had the request ended, or cannot be started again: the process of a ``Process``, an isolated
    decoder, a shared node, or the service's worker.
    """

    code = "worker_died"


class EngineUnavailable(TorchpipeError, RuntimeError):
    """The engine process that runs a shared node has died, and the next one is not ready yet."""

    code = "unavailable"
    retry_after_ms = 500


class PipeClosed(TorchpipeError, RuntimeError):
    """The pipe was closed before the request was finished or received."""

    code = "closed"


@dataclass(frozen=True)
class Failure:
    """An exception of a worker; ``pickled`` is empty if unpickling would not restore the exception."""

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
        """The exception, or another of its kind; its ``__cause__`` is the worker's traceback.

        ``otherwise``: the class to raise if the exception could not be pickled and its kind is unknown.
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
"""Maximum characters of a message, since a backend's exception may quote a client's data."""


def message_of(error: BaseException, limit: int = MESSAGE_LIMIT) -> str:
    """An exception's message as valid UTF-8, cut at ``limit`` characters; its type if the message is empty.

    Never raises, even if the exception's own methods do.
    """
    try:
        # NOTE: `str` may return an object of a subclass, whose methods may raise too.
        text = str.__getitem__(str(error), slice(limit + 1))
        if len(text) > limit:
            text = f"{text[:limit]} …"
        return text.encode("utf-8", "replace").decode() or _type_name(error)
    except BaseException:
        return f"an exception of type {_type_name(error)} whose message cannot be read"


def describe(error: BaseException, limit: int = MESSAGE_LIMIT) -> str:
    """An exception's type, and its ``message_of`` unless empty."""
    name, message = _type_name(error), message_of(error, limit)
    return name if message == name else f"{name}: {message}"


def prefixed(prefix: str, error: BaseException) -> BaseException:
    """An exception of the same class and ``code`` with ``prefix`` before its message; ``error`` is its cause.

    ``error`` itself if its class does not keep a message as it is.
    """
    kind, text = type(error), f"{prefix}{message_of(error)}"
    try:
        copy: BaseException = kind.__new__(kind, text)  # NOTE: its ``__init__`` may take any arguments
        vars(copy).update(vars(error))
        copy.__cause__ = error
        return copy if str(copy) == text else error
    except Exception:
        return error


def log_failure(what: str, error: BaseException) -> None:
    """Log an exception that is handled here, with its traceback. Never raises."""
    try:
        # Attribute the line to the caller: a service limits the lines of each place.
        logger.error("%s", what, exc_info=error, stacklevel=2)
    except BaseException:
        logger.error("%s: %s", what, describe(error), stacklevel=2)


def _type_name(error: BaseException) -> str:
    name = type.__dict__["__name__"].__get__(type(error))  # not what a metaclass may return
    return str(name)


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or its type if the message is empty."""
    return message_of(error).strip().split("\n", 1)[0] or _type_name(error)


_MOST_SHOWN = 64
_MOST_ELEMENTS = 8


def shown(value: object, depth: int = 2) -> str:
    """A client's value for a message: a number, a text in quotes, shortened; otherwise its type.

    A short list is shown with its elements, ``depth`` levels deep.
    """
    if isinstance(value, (list, tuple)) and len(value) <= _MOST_ELEMENTS and depth:
        return f"[{', '.join([shown(element, depth - 1) for element in value])}]"
    if value is None or isinstance(value, float) or (isinstance(value, int) and value.bit_length() <= _MOST_SHOWN):
        return repr(value)
    if not isinstance(value, str):
        return f"a {type(value).__name__}"
    return repr(value) if len(value) <= _MOST_SHOWN else f"{value[:_MOST_SHOWN]!r}…"


_MOST_QUOTED = 200


def quoted(value: object) -> str:
    """A configuration's value for a message: its ``repr``, without the middle if long."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to format an integer of more than 4300 digits
        return f"an integer of {value.bit_length()} bits" if isinstance(value, int) else shown(value)
    return text if len(text) <= _MOST_QUOTED else f"{text[: _MOST_QUOTED // 2]}…{text[-_MOST_QUOTED // 2 :]}"


def counted(count: int, noun: str) -> str:
    """A number with its noun, for a message: ``1 class``, ``2 classes``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{'es' if noun.endswith('s') else 's'}"


_MOST_NAMES = 16
"""Maximum names that a message lists."""
_MOST_COMPARED = 500
"""Maximum names that are compared; of more, those beside the name in the alphabet."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """A clause for an error message: the valid name closest to ``name``, or all; of many, the three closest."""
    return _nearest(name, valid)[1]


def nearest_name(name: str, valid: Iterable[str]) -> str:
    """The valid name that ``name`` probably means; empty if there is none."""
    return _nearest(name, valid)[0]


def _nearest(name: str, valid: Iterable[str]) -> tuple[str, str]:
    names = sorted(set(valid))
    count = len(names)
    if count > _MOST_COMPARED:
        place = bisect(names, name) - _MOST_COMPARED // 2
        names = names[max(0, place) :][:_MOST_COMPARED]
    lowered = {candidate.lower(): candidate for candidate in reversed(names)}
    # Shortened: the time grows with the product of the lengths, and a client may have sent the name.
    word = name[:_MOST_SHOWN].lower()
    # Half of a short word may be wrong; longer unrelated words have half of their letters in common.
    cutoff = 0.7 if len(names) > _MOST_NAMES else 0.6 if len(word) > 4 else 0.5
    close = difflib.get_close_matches(word, lowered, n=1, cutoff=cutoff)
    if close:
        return lowered[close[0]], f"did you mean {lowered[close[0]]!r}?"
    if not names:
        return "", "none is valid here"
    if len(names) <= _MOST_NAMES:
        return "", "valid: " + ", ".join(names)
    bare = {each.lstrip("-"): valid for each, valid in lowered.items()}  # all flags would match by their dashes
    near = difflib.get_close_matches(word.lstrip("-"), bare, n=3, cutoff=0.5)
    three = ", ".join(bare[each] for each in near)
    return "", f"the nearest of {count}: {three}" if near else f"none of the {count} valid names is near"


def listed(names: Sequence[str]) -> str:
    """Names for an error message; of many, the first ones and the number of the others."""
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
