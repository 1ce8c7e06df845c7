"""The methods that are served, and what Thrift messages make of them: a message starts one, its result is a reply."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from typing import Any, NamedTuple, Protocol

from thriftpy2.thrift import TApplicationException

from torchpipe_py.errors import InvalidRequest, NoResult, Overloaded, TorchpipeError, message_of
from torchpipe_server.wire.codec import BadArgumentsError, Codec
from torchpipe_server.wire.protocol import ONEWAY, Limits, Message, MessageReader

logger = logging.getLogger("torchpipe_server")

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


class UnknownMethodError(Exception):
    """A message for a method that the service does not have."""


class ReplyTooLargeError(NoResult):
    """A result that is there, and too large to be sent."""

    code = "too_large"

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"the result has {size} bytes; the limit of a reply is {limit} (--max-reply-bytes)")


Reply = tuple[bytes, str, str]
"""For the client: the bytes. For the counters: the method and the outcome."""


class ThriftService:
    """Methods, called by Thrift messages. One for all connections; ``reply`` is for any thread, the rest for one."""

    def __init__(self, methods: Mapping[str, Method], limits: Limits, reply_bytes: int = 64 * 2**20) -> None:
        self._methods, self._limits, self._reply_bytes = methods, limits, reply_bytes
        self._codec = Codec(limits)

    def reader(self) -> MessageReader:
        """What cuts the bytes of a new connection into messages."""
        return MessageReader(self._limits)

    @property
    def decoded_bytes(self) -> int:
        """What the arguments decoded last take beyond the bytes of their message."""
        return self._codec.decoded_bytes

    def method(self, message: Message) -> Method:
        """What the message calls. Raises what is wrong with it."""
        if message.error is not None:
            error: TorchpipeError = InvalidRequest(str(message.error))
            if message.error.kind == Overloaded.code:
                error = Overloaded(message.error.detail, retry_after_ms=1000)
            error.code = message.error.kind
            raise error
        method = self._methods.get(message.name)
        if method is None:
            raise UnknownMethodError(f"no method {message.name!r}")
        return method

    def decode(self, message: Message) -> tuple[Method, Any]:
        """What the message calls, and the arguments. Raises what is wrong with either."""
        method = self._methods.get(message.name)
        if method is None or message.error is not None:
            method = self.method(message)
        return method, self._codec.decode_args(message, method.args)

    def reply(self, message: Message, result: Any) -> Reply:
        """The answer that carries a result struct, or the exception there is in its place."""
        method = self._methods.get(message.name)
        if isinstance(result, BaseException):
            try:
                if method is None or isinstance(result, (UnknownMethodError, BadArgumentsError)):
                    raise result
                result = method.fail(result)
            except BaseException as error:
                return self._undeclared(message, error)
        assert method is not None
        try:
            data = b"" if message.type == ONEWAY else self._codec.encode_reply(message, result)
            if len(data) <= self._reply_bytes:
                return data, message.name, method.outcome(result)
        except Exception as error:
            logger.exception("a result of %s cannot be encoded", message.name)
            return self._exception(message, TApplicationException.INTERNAL_ERROR, describe_error(error), "internal")
        return self.reply(message, ReplyTooLargeError(len(data), self._reply_bytes))

    def _undeclared(self, message: Message, error: BaseException) -> Reply:
        """An error that the method does not declare becomes what every client understands."""
        if isinstance(error, UnknownMethodError):
            return self._exception(message, TApplicationException.UNKNOWN_METHOD, str(error), "unknown_method")
        if isinstance(error, BadArgumentsError):
            return self._exception(message, TApplicationException.PROTOCOL_ERROR, str(error), "bad_arguments")
        outcome = "cancelled" if isinstance(error, CancelledError) else getattr(error, "code", "internal")
        text = f"{type(error).__name__}: {describe_error(error)}"
        return self._exception(message, TApplicationException.INTERNAL_ERROR, text, str(outcome))

    def _exception(self, message: Message, kind: int, text: str, outcome: str) -> Reply:
        error = TApplicationException(kind, text)
        data = b"" if message.type == ONEWAY else self._codec.encode_exception(message, error)
        # NOTE: what a client makes up must not become a name among the counters.
        return data, message.name if message.name in self._methods else "unknown", outcome


def reason(data: Mapping[str, Any], key: str) -> BaseException:
    """Why a finished request has no value under ``key``; backends write what they like under ``error``."""
    error = data.get("error")
    if isinstance(error, BaseException):
        return error
    return NoResult(f"the request has no {key!r}" if error is None else str(error))


_TEXT_CHARACTERS = 1024
_FOLDERS = re.compile(
    r"""(?<=['"])/(?:[^'"/\n]*/)*"""  # in quotes, where a name may hold a space
    r"""|(?<![\w.~/-])/(?:[^\s/'":;,<>()\[\]]+/)+"""
)
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,16}\b")


def describe_error(error: BaseException) -> str:
    """The error's text for a client: its first line, cut where it is long, without folders and addresses."""
    line = message_of(error, 2 * _TEXT_CHARACTERS).strip().split("\n", 1)[0]
    line = _ADDRESS.sub("0x…", _FOLDERS.sub("", line))
    if len(line) > _TEXT_CHARACTERS:
        line = f"{line[:_TEXT_CHARACTERS]}…"
    return line
