"""Messages, and what the reader makes of them."""

from __future__ import annotations

import struct

import pytest
import thriftpy2
from thrift.Thrift import TType
from thrift_maker import FRAMINGS, IDL
from thriftpy2.protocol import TBinaryProtocol as Thriftpy2Binary
from thriftpy2.protocol import TCompactProtocol as Thriftpy2Compact
from thriftpy2.transport import TMemoryBuffer as Thriftpy2Buffer
from torchpipe_server.options import Options
from torchpipe_server.wire.errors import ProtocolError
from torchpipe_server.wire.thrift import CALL, Framing, Message
from torchpipe_server.wire.thrift_reader import ThriftReader

SERVICE = IDL.InferenceService
SMALL = Options("test", max_message_bytes=4096, max_items=256, max_depth=64)

every_framing = pytest.mark.parametrize(
    "framing", FRAMINGS, ids=lambda f: f"{'framed' if f.framed else 'buffered'}-{f.protocol}"
)


def thriftpy2_message(framing: Framing, args, name, kind=CALL, seqid=7) -> bytes:
    transport = Thriftpy2Buffer() if framing.protocol == "compact" else thriftpy2.transport.TCyMemoryBuffer()
    if framing.protocol == "compact":
        protocol = Thriftpy2Compact(transport)
    else:
        protocol = Thriftpy2Binary(transport, strict_write=framing.protocol == "binary")
    protocol.write_message_begin(name, kind, seqid)
    args.write(protocol)
    body = transport.getvalue()
    return struct.pack(">I", len(body)) + body if framing.framed else body


def batch_fields(uuid="a name", data=b"\xff\xd8 data"):
    return {1: (TType.STRUCT, {1: (TType.STRING, uuid), 2: (TType.STRING, data)})}


def batch_args(uuid="a name", data=b"\xff\xd8 data"):
    return SERVICE.infer_batch_args(params=IDL.InferenceParams(uuid=uuid, data=data))


EVERYTHING = {  # fields that no struct of the IDL knows, of every type and nesting
    1: (TType.BOOL, True),
    2: (TType.BYTE, -5),
    3: (TType.I16, -300),
    40: (TType.I32, 2**31 - 1),
    41: (TType.I64, -(2**63)),
    42: (TType.DOUBLE, 0.1),
    43: (TType.STRING, "text"),
    44: (TType.LIST, (TType.BOOL, [True, False, True])),
    45: (TType.LIST, (TType.STRING, ["", "a", "bc"])),
    46: (TType.LIST, (TType.STRUCT, [])),
    47: (TType.LIST, (TType.STRUCT, [{}, {3: (TType.BOOL, False)}, {}])),
    48: (TType.LIST, (TType.LIST, [(TType.I64, [1, -1, 2**40]), (TType.DOUBLE, [1.0])])),
    49: (TType.SET, (TType.I32, list(range(20)))),
    50: (TType.MAP, (TType.I32, TType.I64, {1: 2, 3: 4})),
    51: (TType.MAP, (TType.STRING, TType.BOOL, {"x": True, "y": False})),
    52: (TType.MAP, (TType.BYTE, TType.STRUCT, {1: {}, 2: batch_fields()})),
    53: (TType.MAP, (TType.STRING, TType.STRUCT, {})),
    54: (TType.MAP, (TType.BOOL, TType.DOUBLE, {True: 1.5})),
    56: (TType.MAP, (TType.BYTE, TType.I32, {1: 300, 2: -300})),
    57: (TType.MAP, (TType.I64, TType.DOUBLE, {2**50: 1.5})),
    55: (TType.STRUCT, {1: (TType.STRUCT, {1: (TType.STRUCT, {})})}),
}


def reader_of(limits: Options = SMALL, **structs: type) -> ThriftReader:
    """A reader that knows the service's methods, and ``structs`` as arguments of further ones."""
    return ThriftReader(limits, lambda name: structs.get(name) or getattr(SERVICE, f"{name}_args", None))


def take(reader: ThriftReader, data: bytes) -> list[Message]:
    """Feed the bytes, and take every message that is whole."""
    reader.feed(data)
    messages = []
    while (message := reader.next()) is not None or reader.is_paused:
        messages += [] if message is None else [message]
    return messages


def read_all(data: bytes, limits: Options = SMALL, **structs: type) -> list[Message]:
    return take(reader_of(limits, **structs), data)


def take_bytes(reader: ThriftReader, data: bytes) -> list[Message]:
    """As ``take``, a byte at a time."""
    messages = []
    for byte in data:
        messages += take(reader, bytes([byte]))
        assert reader.pending_bytes <= SMALL.max_message_bytes + 4
    return messages


def refusal(data: bytes, limits: Options = SMALL) -> str:
    """The kind of the ``ProtocolError`` that the bytes raise."""
    with pytest.raises(ProtocolError) as caught:
        read_all(data, limits)
    return caught.value.kind


def args_of(message: Message):
    """The arguments; raises what is wrong with them."""
    if message.error is not None:
        raise message.error
    return message.args
