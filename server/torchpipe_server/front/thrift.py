"""Methods, called by Thrift messages."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from thriftpy2.thrift import TApplicationException

from torchpipe_py.errors import InvalidRequest, Overloaded, TorchpipeError
from torchpipe_py.wire.errors import ReplyTooLargeError, describe_error, told
from torchpipe_server.front.method import Method, reply_bound
from torchpipe_server.wire.errors import ProtocolError
from torchpipe_server.wire.thrift import BadArgumentsError, Limits, Message, Specs, ThriftReader

logger = logging.getLogger("torchpipe_server")


class UnknownMethodError(Exception):
    """A message for a method that the service does not have."""


class ThriftService:
    """One for all connections; ``reply`` is for any thread, the rest for one."""

    def __init__(self, methods: Mapping[str, Method], limits: Limits, reply_bytes: int = 64 * 2**20) -> None:
        self._methods, self._limits, self._reply = methods, limits, reply_bound(reply_bytes)
        self._specs = Specs(False), Specs(True)

    def reader(self) -> ThriftReader:
        """What cuts the bytes of a new connection into messages."""
        return ThriftReader(self._limits, self._args_of)

    def _args_of(self, name: str, is_compact: bool) -> Any:
        method = self._methods.get(name)
        return None if method is None else self._specs[is_compact].struct(method.args)

    def decode(self, message: Message) -> tuple[Method, Any]:
        """What the message calls, and the arguments. Raises what is wrong with either."""
        error = message.error
        if isinstance(error, ProtocolError):
            failure: TorchpipeError = InvalidRequest(str(error))
            if error.kind == Overloaded.code:
                failure = Overloaded(error.detail, retry_after_ms=1000)
            failure.code = error.kind
            raise failure
        method = self._methods.get(message.name)
        if method is None:
            raise UnknownMethodError(f"no method {message.name!r}")
        if error is not None:
            raise error
        args, message.args = message.args, None
        return method, args

    def reply(self, message: Message, result: Any) -> tuple[bytes, str, str]:
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
            data = b"" if message.is_oneway else message.reply(result)
            if len(data) <= self._reply.bytes:
                return data, message.name, method.outcome(result)
        except Exception as error:
            logger.exception("a result of %s cannot be encoded", message.name)
            return self._exception(message, TApplicationException.INTERNAL_ERROR, describe_error(error), "internal")
        return self.reply(message, ReplyTooLargeError(len(data), self._reply))

    def _undeclared(self, message: Message, error: BaseException) -> tuple[bytes, str, str]:
        """An error that the method does not declare becomes what every client understands."""
        if isinstance(error, UnknownMethodError):
            return self._exception(message, TApplicationException.UNKNOWN_METHOD, str(error), "unknown_method")
        if isinstance(error, BadArgumentsError):
            return self._exception(message, TApplicationException.PROTOCOL_ERROR, str(error), "bad_arguments")
        code, text = told(error)
        text = f"{type(error).__name__}: {text}"
        return self._exception(message, TApplicationException.INTERNAL_ERROR, text, code)

    def _exception(self, message: Message, kind: int, text: str, outcome: str) -> tuple[bytes, str, str]:
        data = b"" if message.is_oneway else message.exception(TApplicationException(kind, text))
        # NOTE: what a client makes up must not become a name among the counters.
        return data, message.name if message.name in self._methods else "unknown", outcome
