"""The methods that are served, and what Thrift messages make of them: a message starts one, its result is a reply."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from thriftpy2.thrift import TApplicationException

from torchpipe_py.errors import InvalidRequest, Overloaded, TorchpipeError
from torchpipe_py.http.errors import Bound, ReplyTooLargeError, describe_error, told
from torchpipe_server.wire.codec import Codec
from torchpipe_server.wire.decoder import BadArgumentsError
from torchpipe_server.wire.header import ONEWAY
from torchpipe_server.wire.protocol import Message, MessageReader
from torchpipe_server.wire.scanner import Limits

logger = logging.getLogger("torchpipe_server")

OK = "ok"

Done = Callable[[Any], None]
"""Takes the result struct, or the exception there is in its place; called exactly once, from any thread."""


class Cancellable(Protocol):
    """Work under way that can be ended; its ``deadline`` is in seconds of ``time.perf_counter``."""

    @property
    def deadline(self) -> float | None: ...

    def cancel(self, error: BaseException | None = None) -> object: ...


TraceFields = tuple["str | None", "str | None"]
"""``traceparent`` and ``tracestate``, as a client sent them."""


class Method(NamedTuple):
    """One method of the service.

    ``start`` calls ``done`` once, or raises. ``fail`` makes a result of an error, or raises it where the method
    declares none for it. ``outcome`` says what a result is counted as, ``request_id`` what the client calls a request.
    ``trace_fields`` is there for methods that run the pipe: what the client says of the request's trace.
    """

    args: type
    start: Callable[[Any, Done], Cancellable | None]
    fail: Callable[[BaseException], Any]
    outcome: Callable[[Any], str] = lambda result: OK
    request_id: Callable[[Any], str] = lambda args: ""
    trace_fields: Callable[[Any], TraceFields] | None = None


def trace_fields(args: Any) -> TraceFields:
    """Of arguments, or a struct among them, that have fields of these names."""
    return getattr(args, "traceparent", None), getattr(args, "tracestate", None)


class UnknownMethodError(Exception):
    """A message for a method that the service does not have."""


Reply = tuple[bytes, str, str]
"""For the client: the bytes. For the counters: the method and the outcome."""


def reply_bound(size: int) -> Bound:
    """The bound of a reply, under the name that users know."""
    return Bound(size, "--max-reply-bytes")


class ThriftService:
    """Methods, called by Thrift messages. One for all connections; ``reply`` is for any thread, the rest for one."""

    def __init__(self, methods: Mapping[str, Method], limits: Limits, reply_bytes: int = 64 * 2**20) -> None:
        self._methods, self._limits, self._reply = methods, limits, reply_bound(reply_bytes)
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
            if len(data) <= self._reply.bytes:
                return data, message.name, method.outcome(result)
        except Exception as error:
            logger.exception("a result of %s cannot be encoded", message.name)
            return self._exception(message, TApplicationException.INTERNAL_ERROR, describe_error(error), "internal")
        return self.reply(message, ReplyTooLargeError(len(data), self._reply))

    def _undeclared(self, message: Message, error: BaseException) -> Reply:
        """An error that the method does not declare becomes what every client understands."""
        if isinstance(error, UnknownMethodError):
            return self._exception(message, TApplicationException.UNKNOWN_METHOD, str(error), "unknown_method")
        if isinstance(error, BadArgumentsError):
            return self._exception(message, TApplicationException.PROTOCOL_ERROR, str(error), "bad_arguments")
        code, text = told(error)
        text = f"{type(error).__name__}: {text}"
        return self._exception(message, TApplicationException.INTERNAL_ERROR, text, code)

    def _exception(self, message: Message, kind: int, text: str, outcome: str) -> Reply:
        error = TApplicationException(kind, text)
        data = b"" if message.type == ONEWAY else self._codec.encode_exception(message, error)
        # NOTE: what a client makes up must not become a name among the counters.
        return data, message.name if message.name in self._methods else "unknown", outcome
