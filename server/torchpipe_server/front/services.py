"""A port's protocols: what makes calls of methods from messages of Thrift and requests over HTTP."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from thriftpy2.thrift import TApplicationException

from torchpipe_py.errors import InvalidRequest, Overloaded, TorchpipeError
from torchpipe_py.methods.routes import OK, Method, Routes, Served, json_answer
from torchpipe_py.wire import answers, errors
from torchpipe_py.wire.errors import Bound, ReplyTooLargeError, RouteError, describe_error, report
from torchpipe_py.wire.http import HttpAnswer, HttpRequest
from torchpipe_server.options import Options
from torchpipe_server.wire.errors import ProtocolError
from torchpipe_server.wire.http import HttpError, HttpReader
from torchpipe_server.wire.thrift import Message
from torchpipe_server.wire.thrift_reader import BadArgumentsError, ThriftReader

logger = logging.getLogger("torchpipe_server")

METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
_ROUTE = "route"  # what a head is known to take, the parameters, and what it is counted as


def reply_bound(size: int) -> Bound:
    """The bound of a reply, under the name that users know."""
    return Bound(size, "--max-reply-bytes")


# -- protocols ------------------------------------------------------------------------------------------------------


class UnknownMethodError(Exception):
    """A message for a method that the service does not have."""


_UNDECLARED: Mapping[type, tuple[int, str]] = {
    UnknownMethodError: (TApplicationException.UNKNOWN_METHOD, "unknown_method"),
    BadArgumentsError: (TApplicationException.PROTOCOL_ERROR, "bad_arguments"),
}


class ThriftService:
    """Methods, called by messages of Thrift. One for all connections; ``reply`` is for any thread, the rest for one.

    ``other`` is called by a message for a method that is not there; it has no result.
    """

    def __init__(self, methods: Mapping[str, Method], options: Options, other: Method | None = None) -> None:
        self._methods, self._options, self._other = methods, options, other
        self._reply = reply_bound(options.max_reply_bytes)
        self._args = {name: method.args for name, method in methods.items()}

    def reader(self) -> ThriftReader:
        """What cuts the bytes of a new connection into messages."""
        return ThriftReader(self._options, self._args.get)

    def decode(self, message: Message) -> tuple[Method, Any]:
        """What the message calls, and the arguments. Raises what is wrong with either."""
        error = message.error
        if isinstance(error, ProtocolError):
            failure: TorchpipeError = InvalidRequest(str(error))
            if error.kind == Overloaded.code:
                failure = Overloaded(error.detail, retry_after_ms=1000)
            failure.code = error.kind
            raise failure
        method = self._methods.get(message.name, self._other)
        if method is None:
            raise UnknownMethodError(f"no method {message.name!r}")
        if error is not None:
            raise error
        args, message.args = message.args, None
        return method, args

    def reply(self, message: Message, result: Any) -> tuple[bytes, str, str]:
        """The answer that carries a result struct, or the exception there is in its place; what to count it as."""
        method = self._methods.get(message.name)
        if isinstance(result, BaseException):
            try:
                if method is None or type(result) in _UNDECLARED:
                    raise result
                result = method.fail(result)
            except BaseException as error:  # what the method does not declare becomes what every client understands
                kind, outcome = _UNDECLARED.get(type(error), (TApplicationException.INTERNAL_ERROR, ""))
                if outcome:
                    text = str(error)
                else:  # NOTE: whatever its own methods do, which may leave the loop
                    outcome, text = report(error)
                    text = f"{type(error).__name__}: {text}"
                return self._exception(message, kind, text, outcome)
        assert method is not None
        try:
            data = b"" if message.is_oneway else message.reply(result)
            if len(data) <= self._reply.bytes:
                return data, message.name, method.outcome(result)
        except Exception as error:
            logger.exception("a result of %s cannot be encoded", message.name)
            return self._exception(message, TApplicationException.INTERNAL_ERROR, describe_error(error), "internal")
        return self.reply(message, ReplyTooLargeError(len(data), self._reply))

    def _exception(self, message: Message, kind: int, text: str, outcome: str) -> tuple[bytes, str, str]:
        data = b"" if message.is_oneway else message.reply(TApplicationException(kind, text))
        # NOTE: what a client makes up must not become a name among the counters.
        return data, message.name if message.name in self._methods else "unknown", outcome


class HttpService:
    """Routes, called by HTTP requests. One for all connections; ``reply`` is for any thread, the rest for one.

    ``headers`` are those of each answer besides its own; ``failure`` makes an answer of an error. ``other`` is called
    by a request that no route takes.
    """

    def __init__(
        self, routes: Routes, body_bytes: int, reply_bytes: int, methods: frozenset[str] = METHODS,
        headers: Mapping[str, str] | None = None,
        failure: Callable[[HttpRequest, BaseException], HttpAnswer] | None = None, other: Method | None = None,
    ) -> None:  # fmt: skip
        self._routes, self._body_bytes, self._reply = routes, body_bytes, reply_bound(reply_bytes)
        self._methods, self._headers, self._failure, self._other = methods, headers, failure, other

    def reader(self) -> HttpReader:
        """What cuts the bytes of a new connection into requests."""
        return HttpReader(self._methods, self._body_bytes)

    def decode(self, request: HttpRequest) -> tuple[Method, HttpRequest]:
        """What the request calls, and the request. Raises what is wrong with it."""
        found = request.known.get(_ROUTE)
        if found is None:
            try:
                found = self._routes.find(request)
            except RouteError as error:
                if self._other is None or request.error is not None:
                    raise request.error or error from None
                return self._other, request
            request.known[_ROUTE] = found = (*found, found[0].name)
        route, request.parameters, _ = found
        if request.error is not None:
            raise request.error
        return route.method, request

    def reply(self, request: HttpRequest, result: Any) -> tuple[bytes, str, str]:
        """The answer that carries an ``HttpAnswer``, or the exception there is in its place; what to count it as."""
        found = request.known.get(_ROUTE)
        name = "http" if found is None else found[2]  # NOTE: a client's own path must not become a counter
        try:
            if isinstance(result, BaseException):
                raise result
            if len(result.body) > self._reply.bytes:
                raise ReplyTooLargeError(len(result.body), self._reply)
            return request.answer(result, self._headers), name, OK
        except BaseException as error:  # a header that cannot be sent, too
            answer = self._failure(request, error) if self._failure else error_answer(error)
            return request.answer(answer, self._headers), name, code_of(error)


def code_of(error: BaseException) -> str:
    """What the error is counted as."""
    return error.kind if isinstance(error, ProtocolError) else errors.code_of(error)


def error_answer(error: BaseException) -> HttpAnswer:
    """``{"error": …, "code": …, "retry_after_ms": …}`` under the status that belongs to the code."""
    if isinstance(error, ProtocolError):
        status = error.status if isinstance(error, HttpError) else answers.STATUSES.get(error.kind, 400)
        failure = answers.failure_of(status, error.kind, error.detail)
    else:
        failure = answers.failure(error)
    return json_answer(failure.body, failure.status, failure.headers)


TELLING_BYTES = 5  # no request of any protocol is shorter
_TEXT = frozenset(b"\t\r\n" + bytes(range(0x20, 0x7F)))


Service = ThriftService | HttpService
"""One protocol: what cuts its bytes into requests, what they call, and replies."""


class Services(NamedTuple):
    """A port's protocols."""

    thrift: Service
    http: Service

    def of(self, data: bytes) -> Service | None:
        """That in which a stream begins so; ``None`` while it may be either."""
        start = data[:TELLING_BYTES]
        if not _TEXT.issuperset(start):
            return self.thrift
        # Text is HTTP: for Thrift it would be a name of 150 MB and more, or a frame, whose fifth byte is not text.
        return self.http if len(start) == TELLING_BYTES else None


def services_of(served: Served, options: Options) -> Services:
    """What answers, within the limits of the options."""
    return Services(
        ThriftService(served.methods, options),
        HttpService(served.routes, options.max_message_bytes, options.max_reply_bytes),
    )
