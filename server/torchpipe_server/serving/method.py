"""What the server knows of a method of the service."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from torchpipe_py.errors import NoResult

OK = "ok"

Done = Callable[[Any], None]
"""Takes the result struct, or the exception there is in its place; called exactly once, from any thread."""


class Cancellable(Protocol):
    """Work under way that can be ended; its ``deadline`` is in seconds of ``time.perf_counter``."""

    @property
    def deadline(self) -> float | None: ...

    def cancel(self, error: BaseException | None = None) -> object: ...


class Method(NamedTuple):
    """One method of the service.

    ``start`` calls ``done`` once, or raises. ``fail`` makes a result of an error, or raises it where the method
    declares none for it. ``outcome`` says what a result is counted as, ``request_id`` what the client calls a request.
    """

    args: type
    start: Callable[[Any, Done], Cancellable | None]
    fail: Callable[[BaseException], Any]
    outcome: Callable[[Any], str] = lambda result: OK
    request_id: Callable[[Any], str] = lambda args: ""


def reason(data: Mapping[str, Any], key: str) -> BaseException:
    """Why a finished request has no value under ``key``; backends write what they like under ``error``."""
    error = data.get("error")
    if isinstance(error, BaseException):
        return error
    return NoResult(f"the request has no {key!r}" if error is None else str(error))


def describe_error(error: BaseException) -> str:
    """The error's text as something that can be encoded, whatever its ``__str__`` does."""
    try:
        text = str(error)
    except Exception:
        text = ""
    return (text or type(error).__name__).encode("utf-8", "replace").decode()
