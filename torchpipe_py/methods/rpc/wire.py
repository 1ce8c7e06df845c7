"""Messages of gRPC, read within their bounds, and the forms of answers and errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torchpipe_py.errors import InvalidRequest
from torchpipe_py.methods.routes import OK, Method
from torchpipe_py.wire import answers
from torchpipe_py.wire.errors import Bound, ReplyTooLargeError, code_of
from torchpipe_py.wire.protobuf import check_fields

_CODES = {
    400: "INVALID_ARGUMENT",
    404: "NOT_FOUND",
    413: "INVALID_ARGUMENT",
    422: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
    500: "INTERNAL",
}
"""Names of ``grpc.StatusCode`` by the status of the error over HTTP."""
_OWN_CODES = {"not_served": "UNIMPLEMENTED", "cancelled": "CANCELLED"}
PUSHBACK, ERROR_CODE = "grpc-retry-pushback-ms", "error-code"
"""Trailing metadata of an error: when to retry, as gRPC's clients read it, and its code over HTTP."""


class WireAnswer(NamedTuple):
    """An answer as it is sent.

    ``code`` is ``None`` for a message, else the name of the error's ``grpc.StatusCode``, and ``text`` its message.
    ``is_compressed``: whether grpc is to compress it.
    """

    data: bytes
    headers: Mapping[str, str]
    outcome: str = OK
    code: str | None = None
    text: str = ""
    is_compressed: bool = False

    @classmethod
    def of(cls, method: Method, result: Any, most: Bound) -> WireAnswer:
        """Encode a method's result, or the exception in its place."""
        try:
            if isinstance(result, BaseException):
                result = method.fail(result)
            data = result.message.SerializeToString()
            if len(data) > most.bytes:
                raise ReplyTooLargeError(len(data), most)
            return cls(data, result.headers, method.outcome(result))
        except BaseException as error:
            return _refusal(error)


def _refusal(error: BaseException) -> WireAnswer:
    failed = answers.failure(error)
    code, after = failed.body["code"], failed.body.get("retry_after_ms")
    headers = {ERROR_CODE: code} if after is None else {ERROR_CODE: code, PUSHBACK: str(after)}
    return WireAnswer(b"", headers, code_of(error), status_of(code), answers.utf8_text(failed.body["error"]).decode())


def status_of(code: str) -> str:
    """The name of the ``grpc.StatusCode`` of an error with this code."""
    return _OWN_CODES.get(code) or _CODES.get(answers.STATUSES.get(code, 400), "INVALID_ARGUMENT")


def parse_message(kind: Any, data: bytes, most: int, text: Bound) -> Any:
    """The message of this class; ``InvalidRequest`` if the bytes are not one. See ``check_fields``."""
    if len(data) > text.bytes:
        check_fields(data, kind.DESCRIPTOR, most, text)
    try:
        return kind.FromString(data)
    except Exception:
        raise InvalidRequest(f"the message is not a {kind.DESCRIPTOR.full_name}") from None
