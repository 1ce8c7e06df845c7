"""The errors of calls. Each has a ``code`` for programs and a message for people."""

from __future__ import annotations

import errno
import os


class ClientError(Exception):
    """Root of all exceptions of this package. ``retry_after_ms``: when a retry may succeed, if known."""

    code = "client_error"
    retry_after_ms: int | None = None


# -- errors of the client -------------------------------------------------------------------------------------------


class NotConnected(ClientError, ConnectionError):
    """No connection to the service could be made; nothing was sent."""

    code = "not_connected"


def not_connected(address: object, error: OSError) -> NotConnected:
    """The error of a failed attempt to connect, with the system's message if there is one."""
    number = error.errno if isinstance(error, ConnectionError) else None
    hint = "; is torchpipe-serve running there?" if number == errno.ECONNREFUSED else ""
    return NotConnected(f"cannot connect to {address}: {error if number is None else os.strerror(number)}{hint}")


class ConnectionLost(ClientError, ConnectionError):
    """The connection ended before the answer; the service may have begun the call."""

    code = "connection_lost"


class TimedOut(ClientError, TimeoutError):
    """No answer within the call's ``timeout``; the service may have begun the call."""

    code = "timeout"


class BadReply(ClientError):
    """An answer that does not follow the contract, or belongs to another call."""

    code = "bad_reply"


class ClientClosed(ClientError):
    """The call came after ``close()``."""

    code = "client_closed"


# -- errors of the service -----------------------------------------------------------------------------------------


class InferenceError(ClientError):
    """An error from the service. Codes without their own class, such as ``too_large``, use this one."""

    code = "internal"


class InvalidRequest(InferenceError, ValueError):
    """The request does not fit the pipeline, or cannot be encoded."""

    code = "invalid_request"


class UnknownNode(InferenceError, IndexError):
    """``node_name`` is not a root, or is missing with several roots."""

    code = "unknown_node"


class NoResult(InferenceError):
    """The pipeline gave no result."""

    code = "no_result"


class DecodeError(NoResult, ValueError):
    """Bytes that are not a readable image."""

    code = "decode_error"


class BackendError(InferenceError):
    """A backend raised an exception, which the service has logged."""

    code = "backend_error"


class Overloaded(InferenceError):
    """Refused before it began: too many requests in flight, or a deadline that cannot be met."""

    code = "overloaded"


class Unavailable(InferenceError):
    """Refused before it began: no worker is ready yet, one is starting."""

    code = "unavailable"


class DeadlineExceeded(InferenceError, TimeoutError):
    """The service did not finish within the deadline."""

    code = "deadline_exceeded"


class WorkerDied(InferenceError):
    """The worker died during the call."""

    code = "worker_died"


class PipeClosed(InferenceError):
    """The service stopped before the call finished."""

    code = "closed"


_ANSWERED = (
    InvalidRequest, UnknownNode, NoResult, DecodeError, BackendError,
    Overloaded, Unavailable, DeadlineExceeded, WorkerDied, PipeClosed,
)  # fmt: skip
_BY_CODE: dict[str, type[InferenceError]] = {cls.code: cls for cls in _ANSWERED}
_BY_NAME: dict[str, type[InferenceError]] = {cls.__name__: cls for cls in _ANSWERED}


def inference_error(code: str, message: str, retry_after_ms: int | None = None) -> InferenceError:
    """The exception for an error of the contract."""
    error = _BY_CODE.get(code, InferenceError)(message)
    error.code, error.retry_after_ms = code, retry_after_ms
    return error


def undeclared_error(code: str, message: str) -> InferenceError:
    """The exception for an undeclared error, whose message may begin with a class name."""
    name, _, text = message.partition(": ")
    if name in _BY_NAME:
        return _BY_NAME[name](text)
    return inference_error(code, message)
