"""Turns the arguments of a complete message into an object, and results into bytes, which thriftpy2 writes."""

from __future__ import annotations

import copy
from struct import Struct
from typing import Any

import thriftpy2.transport
from thriftpy2.protocol import TBinaryProtocol, TCompactProtocol
from thriftpy2.thrift import TApplicationException, TDecodeException

from torchpipe_py.http import answers
from torchpipe_server.wire.decoder import BadArgumentsError, BinaryDecoder, Bytes, CompactDecoder
from torchpipe_server.wire.header import EXCEPTION, REPLY
from torchpipe_server.wire.protocol import Message
from torchpipe_server.wire.scanner import Limits

_MemoryBuffer = getattr(thriftpy2.transport, "TCyMemoryBuffer", thriftpy2.transport.TMemoryBuffer)
_u32 = Struct(">I")

TEXT_BYTES = 4  # that a byte of a text takes as Python keeps it, at most
ITEM_BYTES = 256  # that an item takes besides its contents: its part of an object, of a tensor or of a request


class Codec:
    """Decodes and encodes what a `MessageReader` found. Holds what it learned about classes.

    Decoding is for one thread; encoding keeps no state and is called from any.
    """

    def __init__(self, limits: Limits) -> None:
        self._binary = BinaryDecoder(limits)
        self._compact = CompactDecoder(limits)
        self.decoded_bytes = 0  # that the arguments decoded last take beyond those of their message, about

    def decode_args(self, message: Message, args_cls: type) -> Any:
        """An `args_cls` object; fields that were not sent are None. Raises `BadArgumentsError`, `TextTooLargeError`."""
        decoder = self._compact if message.framing.protocol == "compact" else self._binary
        buffer = message.buffer
        view: Bytes = buffer if isinstance(buffer, bytes) else memoryview(buffer)  # whose slices are no copies
        decoder.text_bytes = 0
        try:
            args, end = decoder.struct(args_cls)(view, message.start)
        except RecursionError:
            raise BadArgumentsError(f"{args_cls.__name__}: nested too deeply") from None
        if end != message.end:
            raise BadArgumentsError(f"{args_cls.__name__}: {message.end - end} bytes after its end")
        self.decoded_bytes = TEXT_BYTES * decoder.text_bytes + ITEM_BYTES * message.items
        return args

    def encode_reply(self, message: Message, result: Any) -> bytes:
        """The answer to `message` that carries `result`, an object of the method's result struct."""
        return _encode(message, REPLY, result)

    def encode_exception(self, message: Message, error: TApplicationException) -> bytes:
        """The answer to `message` that carries an error the IDL does not declare."""
        return _encode(message, EXCEPTION, error)


def _encode(message: Message, type_: int, payload: Any) -> bytes:
    try:
        return _written(message, type_, payload)
    except (UnicodeEncodeError, TDecodeException):  # NOTE: the latter is how the Cython protocol says the former
        return _written(message, type_, _sendable(payload))


def _sendable(value: Any) -> Any:
    """A copy without halves of surrogate pairs, which UTF-8 has not; thriftpy2 would refuse all of an answer."""
    if isinstance(value, str):
        return answers.utf8_text(value).decode()
    if isinstance(value, dict):
        return {_sendable(key): _sendable(held) for key, held in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_sendable(element) for element in value]
    if hasattr(value, "thrift_spec"):
        value = copy.copy(value)
        for _, name, *_ in value.thrift_spec.values():
            setattr(value, name, _sendable(getattr(value, name)))
    return value


def _written(message: Message, type_: int, payload: Any) -> bytes:
    framed, protocol_name = message.framing
    transport = _MemoryBuffer()
    seqid = message.seqid
    if protocol_name == "compact":
        protocol = TCompactProtocol(transport)
        seqid &= 0xFFFFFFFF  # TRAP: thriftpy2 writes negative numbers for ever
    else:
        protocol = TBinaryProtocol(transport, strict_write=protocol_name == "binary")
    protocol.write_message_begin(message.name, type_, seqid)
    protocol.write_struct(payload)
    body: bytes = transport.getvalue()
    return _u32.pack(len(body)) + body if framed else body
