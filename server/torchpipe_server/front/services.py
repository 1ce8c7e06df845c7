"""The protocols of a port: turn Thrift messages and HTTP requests into calls of methods."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from thriftpy2.thrift import TApplicationException

from torchpipe_py import InvalidRequest, Overloaded, TorchpipeError
from torchpipe_py.serving import (
    OK,
    SMALL_BYTES,
    Bound,
    HttpAnswer,
    HttpRequest,
    Method,
    ReplyTooLargeError,
    RouteError,
    Routes,
    Served,
    answers,
    compression,
    describe_error,
    errors,
    json_answer,
    report,
)
from torchpipe_server.front.cors import CrossOrigin, cross_origin
from torchpipe_server.front.hosts import ForbiddenError, HostGuard
from torchpipe_server.options import Options
from torchpipe_server.wire.errors import ProtocolError
from torchpipe_server.wire.http import HttpError, HttpReader
from torchpipe_server.wire.thrift import Message
from torchpipe_server.wire.thrift_reader import BadArgumentsError, ThriftReader

logger = logging.getLogger("torchpipe_server")

METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
_NO_CHANGE = "pages of other origins load and unload nothing"


def reply_bound(size: int) -> Bound:
    """The bound of a reply, named by its option."""
    return Bound(size, "--max-reply-bytes")


# -- protocols ------------------------------------------------------------------------------------------------------


class UnknownMethodError(Exception):
    """A message for an unknown method."""


_UNDECLARED: Mapping[type, tuple[int, str]] = {
    UnknownMethodError: (TApplicationException.UNKNOWN_METHOD, "unknown_method"),
    BadArgumentsError: (TApplicationException.PROTOCOL_ERROR, "bad_arguments"),
}


class ThriftService:
    """Methods called by Thrift messages, for all connections. ``reply`` is for any thread, the rest for one.

    ``other`` is called for an unknown method; it has no result.
    """

    def __init__(self, methods: Mapping[str, Method], options: Options, other: Method | None = None) -> None:
        self._methods, self._options, self._other = methods, options, other
        self._reply = reply_bound(options.max_reply_bytes)
        self._args = {name: method.args for name, method in methods.items()}

    def reader(self) -> ThriftReader:
        """A reader that splits the bytes of a new connection into messages."""
        return ThriftReader(self._options, self._args.get)

    def decode(self, message: Message) -> tuple[Method, Any]:
        """The method that the message calls, and the arguments. Raises what is wrong with either."""
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
        message.model = method.model_of(args)
        return method, args

    def inflater(self, message: Message) -> None:
        """Nothing: messages of Thrift are not compressed."""

    def takes_long(self, message: Message, result: Any) -> bool:
        """Never: nothing is compressed."""
        return False

    def reply(self, message: Message, result: Any) -> tuple[bytes, str, str]:
        """The answer with a result struct or an exception; the method and the outcome to count."""
        method = self._methods.get(message.name)
        if isinstance(result, BaseException):
            try:
                if method is None or type(result) in _UNDECLARED:
                    raise result
                result = method.fail(result)
            except BaseException as error:  # an undeclared exception becomes one that every client understands
                kind, outcome = _UNDECLARED.get(type(error), (TApplicationException.INTERNAL_ERROR, ""))
                if outcome:
                    text = str(error)
                else:  # NOTE: `report` is safe whatever the methods of the exception do
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
        # NOTE: a client's invented name must not become a counter.
        return data, message.name if message.name in self._methods else "unknown", outcome


class HttpService:
    """Routes called by HTTP requests, for all connections. ``reply`` is for any thread, the rest for one.

    ``headers`` are added to each answer; ``failure`` turns an error into an answer. ``other`` is called for a request
    without a route. ``guard`` refuses requests to names of others, ``cors`` lets pages of other origins read answers.
    """

    def __init__(
        self, routes: Routes, body_bytes: int, reply_bytes: int, methods: frozenset[str] = METHODS,
        headers: Mapping[str, str] | None = None,
        failure: Callable[[HttpRequest, BaseException], HttpAnswer] | None = None, other: Method | None = None,
        guard: HostGuard | None = None, cors: CrossOrigin | None = None,
    ) -> None:  # fmt: skip
        self._routes, self._body_bytes, self._reply = routes, body_bytes, reply_bound(reply_bytes)
        self._body = Bound(body_bytes, "--max-message-bytes")
        self._methods, self._headers, self._failure, self._other = methods, headers, failure, other
        self._guard, self._cors = guard or HostGuard(""), cors

    def reader(self) -> HttpReader:
        """A reader that splits the bytes of a new connection into requests."""
        return HttpReader(self._methods, self._body_bytes)

    def decode(self, request: HttpRequest) -> tuple[Method, HttpRequest]:
        """The method that the request calls, and the request. Raises what is wrong with it."""
        self._guard.check(request)
        try:
            route, request.parameters = self._routes.find(request)
        except RouteError as error:
            if self._cors is not None and request.error is None and self._cors.is_preflight(request):
                self._check_preflight(self._cors.wanted(request))
                return self._cors.preflight, request
            if self._other is None or request.error is not None:
                raise request.error or error from None
            return self._other, request
        if route.changes_service:
            self._guard.check(request, is_change=True)
            if request.is_of_other_page:
                raise ForbiddenError(_NO_CHANGE)
        request.label = route.label
        if request.error is not None:
            raise request.error
        return route.method, request

    def inflater(self, request: HttpRequest) -> compression.Inflater | None:
        """The inflater of the body; ``None`` if it is not compressed. Raises ``UnsupportedEncodingError``."""
        return compression.inflater_of(request, self._body) if "content-encoding" in request.fields else None

    def takes_long(self, request: HttpRequest, result: Any) -> bool:
        """Whether ``reply`` makes or compresses so much that it should not run on the caller's thread."""
        if isinstance(result, HttpAnswer) and result.make is not None:
            return True
        accepted = request.fields.get("accept-encoding")
        if accepted is None or not isinstance(result, HttpAnswer) or len(result.body) <= SMALL_BYTES:
            return False
        return compression.coding_of(result, accepted) != ""

    def _check_preflight(self, wanted: HttpRequest) -> None:
        """Refuse a request without a route, or one that changes the service, which pages of other origins must not."""
        if self._other is None:
            route, _ = self._routes.find(wanted)
            if route.changes_service:
                raise ForbiddenError(_NO_CHANGE)

    def _fields(self, request: HttpRequest, own: Mapping[str, str]) -> Mapping[str, str] | None:
        """The header fields of an answer, besides its ``own``."""
        if self._cors is None:
            return self._headers
        return {**(self._headers or {}), **self._cors.fields(request, own)}

    def reply(self, request: HttpRequest, result: Any) -> tuple[bytes, str, str]:
        """The answer with an ``HttpAnswer`` or an exception; the method and the outcome to count."""
        try:
            if isinstance(result, BaseException):
                raise result
            answer: HttpAnswer = result.made()
            if len(answer.body) > self._reply.bytes:
                raise ReplyTooLargeError(len(answer.body), self._reply)
            answer = compression.compressed(answer, request.fields.get("accept-encoding", ""))
            fields = self._headers if self._cors is None else self._fields(request, answer.headers)
            return request.answer(answer, fields), request.label, OK
        except BaseException as error:  # also for a header that cannot be sent
            answer = self._failure(request, error) if self._failure else error_answer(error)
            return request.answer(answer, self._fields(request, answer.headers)), request.label, code_of(error)


def code_of(error: BaseException) -> str:
    """The outcome under which the error is counted."""
    return error.kind if isinstance(error, ProtocolError) else errors.code_of(error)


def error_answer(error: BaseException) -> HttpAnswer:
    """``{"error": …, "code": …, "retry_after_ms": …}`` with the status of the code."""
    if isinstance(error, ProtocolError):
        status = error.status if isinstance(error, HttpError) else answers.STATUSES.get(error.kind, 400)
        failure = answers.failure_of(status, error.kind, error.detail)
    else:
        failure = answers.failure(error)
    return json_answer(failure.body, failure.status, failure.headers)


SHORTEST_REQUEST = 5  # no request of any protocol is shorter
_TEXT = frozenset(b"\t\r\n" + bytes(range(0x20, 0x7F)))


Service = ThriftService | HttpService
"""One protocol: its reader, its methods and its replies."""


class Services(NamedTuple):
    """A port's protocols."""

    thrift: Service
    http: Service

    def of(self, data: bytes) -> Service | None:
        """The protocol of a stream that begins with ``data``; ``None`` while it may be either."""
        start = data[:SHORTEST_REQUEST]
        if not _TEXT.issuperset(start):
            return self.thrift
        # Text is HTTP: for Thrift it would be a name of 150 MB and more, or a frame, whose fifth byte is not text.
        return self.http if len(start) == SHORTEST_REQUEST else None


def services_of(served: Served, options: Options) -> Services:
    """The protocols of what is served, within the limits of the options."""
    return Services(
        ThriftService(served.methods, options),
        HttpService(
            served.routes,
            options.max_message_bytes,
            options.max_reply_bytes,
            guard=HostGuard(options.host, options.allowed_hosts),
            cors=cross_origin(options.cors_origin),
        ),
    )
