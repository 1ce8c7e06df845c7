"""The Thrift reader and writer against Apache Thrift's own bytes, and bytes nobody should send."""

from __future__ import annotations

import struct
import sys
from typing import Any, ClassVar

import pytest
import torchpipe_server.wire.thrift_reader as module
from fuzz.thrift_maker import FRAMINGS, IDL, apache_message, apache_protocol
from thrift.Thrift import TApplicationException as ApacheException
from thrift.Thrift import TType
from thrift.transport.TTransport import TFramedTransport, TMemoryBuffer
from thriftpy2.thrift import TApplicationException, TPayload
from torchpipe_server.options import Options
from torchpipe_server.wire.errors import ProtocolError
from torchpipe_server.wire.thrift import EXCEPTION, REPLY, Framing, Message
from torchpipe_server.wire.thrift_reader import BadArgumentsError, ThriftReader

SERVICE = IDL.InferenceService
SMALL = Options("test", max_message_bytes=4096, max_items=256, max_depth=64)

every_framing = pytest.mark.parametrize(
    "framing", FRAMINGS, ids=lambda f: f"{'framed' if f.framed else 'buffered'}-{f.protocol}"
)


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


BINARY, COMPACT = FRAMINGS[0], Framing(False, "compact")


class Everything(TPayload):
    """A struct with the types that the IDL does not use."""

    default_spec: ClassVar = [
        (name, None) for name in ("flag", "byte", "short", "flags", "map", "set", "lists", "inner", "number")
    ]


Everything.thrift_spec = {
    1: (TType.BOOL, "flag", False),
    2: (TType.BYTE, "byte", False),
    3: (TType.I16, "short", False),
    4: (TType.LIST, "flags", TType.BOOL, False),
    5: (TType.MAP, "map", (TType.BOOL, TType.BOOL), False),
    6: (TType.SET, "set", TType.I32, False),
    7: (TType.LIST, "lists", (TType.LIST, TType.I64), False),
    8: (TType.STRUCT, "inner", Everything, False),
    30: (TType.DOUBLE, "number", False),
}


# -- messages that are right ----------------------------------------------------------------------------------------


@every_framing
@pytest.mark.parametrize("seqid", [0, 7, 2**31 - 1, -1, -(2**31)])
def test_reads_calls_of_apache_thrift(framing, seqid):
    fields = batch_fields("ü" * 9, b"plain ASCII") | {9: (TType.STRUCT, EVERYTHING)}
    (message,) = read_all(apache_message(framing, fields, seqid=seqid))
    assert (message.name, message.is_oneway, message.seqid, message.protocol) == ("infer_batch", False, seqid, framing)
    assert args_of(message) == batch_args("ü" * 9, b"plain ASCII")


@every_framing
def test_reads_every_declared_type(framing):
    fields = {
        1: (TType.BOOL, False),
        2: (TType.BYTE, -128),
        3: (TType.I16, -300),
        4: (TType.LIST, (TType.BOOL, [True, False])),
        5: (TType.MAP, (TType.BOOL, TType.BOOL, {True: False})),
        6: (TType.SET, (TType.I32, [5, -5])),
        7: (TType.LIST, (TType.LIST, [(TType.I64, [1]), (TType.I64, [])])),
        8: (TType.STRUCT, {1: (TType.BOOL, True), 8: (TType.STRUCT, {})}),
        30: (TType.DOUBLE, -0.5),
    }
    (message,) = read_all(apache_message(framing, fields, "everything"), everything=Everything)
    expected = Everything(False, -128, -300, [True, False], {True: False}, [5, -5], [[1], []], number=-0.5)
    expected.inner = Everything(flag=True, inner=Everything())
    assert args_of(message) == expected


@every_framing
@pytest.mark.parametrize("seqid", [7, -7])
def test_apache_thrift_reads_replies_and_exceptions(framing, seqid):
    (message,) = read_all(apache_message(framing, batch_fields(), seqid=seqid))

    def read(data: bytes, kind: int, skips: bool) -> Any:
        transport = TMemoryBuffer(data)
        protocol = apache_protocol(framing, TFramedTransport(transport) if framing.framed else transport)
        assert protocol.readMessageBegin() == ("infer_batch", kind, seqid)
        if skips:
            protocol.skip(TType.STRUCT)
            assert transport.read(1) == b""
        return protocol

    result = message.reply(SERVICE.infer_batch_result(success=IDL.InferenceResult(label="cat", score=0.25)))
    read(result, REPLY, skips=True)
    assert b"cat" in result
    error = ApacheException()
    error.read(read(message.reply(TApplicationException(6, "why")), EXCEPTION, skips=False))
    assert (error.type, error.message) == (ApacheException.INTERNAL_ERROR, "why")


# -- pieces ---------------------------------------------------------------------------------------------------------


@every_framing
def test_reads_a_message_split_anywhere(framing):
    data = apache_message(framing, batch_fields() | {9: (TType.STRUCT, EVERYTHING)})
    for split in range(len(data) + 1):
        reader = reader_of()
        messages = take(reader, data[:split])
        assert reader.pending_bytes == (split if split < len(data) else 0)
        messages += take(reader, data[split:])
        assert [args_of(message) for message in messages] == [batch_args()]
        assert reader.pending_bytes == 0
    assert [args_of(message) for message in take_bytes(reader_of(), data * 3)] == [batch_args()] * 3


@every_framing
def test_messages_before_a_broken_one_are_read(framing):
    good = apache_message(framing, batch_fields())
    bad = bytearray(good)
    bad[4 if framing.framed else 0] = 0x7F
    reader = reader_of()
    reader.feed(good + good + bytes(bad) + good)
    assert [args_of(reader.next()) for _ in range(2)] == [batch_args()] * 2
    for _ in range(2):
        with pytest.raises(ProtocolError):
            reader.next()
        assert reader.pending_bytes == 0
        reader.feed(good)


# -- arguments that do not fit --------------------------------------------------------------------------------------

POISON = b"\x7f\xff\xff\xff" * 9  # thriftpy2 would take it for lengths, which it does not check
BAD_ARGUMENTS = {
    "missing": ("infer_batch", {1: (TType.STRUCT, {2: (TType.STRING, b"d")})}, "InferenceParams.uuid is missing"),
    "another type": (
        "infer_batch",
        {1: (TType.STRUCT, {1: (TType.I64, 5), 2: (TType.STRING, b"d")})},
        "InferenceParams.uuid is of type",
    ),
    "not UTF-8": ("infer_batch", batch_fields(b"\xff\xfe"), "InferenceParams.uuid is not UTF-8"),
    "list": ("infer_many", {1: (TType.LIST, (TType.STRING, [b"\x0b\x00\x01\x7f\xff\xff\xff"]))}, "a list of type"),
    "map": (
        "infer",
        {1: (TType.STRUCT, {1: (TType.STRING, "u"), 2: (TType.MAP, (TType.STRING, TType.STRING, {"k": POISON}))})},
        "a map of type",
    ),
}


@every_framing
@pytest.mark.parametrize("what", BAD_ARGUMENTS)
def test_bad_arguments_leave_the_stream_intact(framing, what):
    name, fields, text = BAD_ARGUMENTS[what]
    bad, good = read_all(apache_message(framing, fields, name) + apache_message(framing, batch_fields()))
    assert isinstance(bad.error, BadArgumentsError)
    assert text in str(bad.error)
    assert args_of(good) == batch_args()


def test_rejects_a_number_of_more_bits_than_its_field():
    data = apache_message(COMPACT, {2: (TType.I64, 2**40)}, "infer_many")
    (message,) = read_all(data.replace(b"\x26", b"\x25", 1))  # field 2, i64 -> i32
    with pytest.raises(BadArgumentsError, match="32 bits"):
        args_of(message)


# -- streams that cannot be read ------------------------------------------------------------------------------------


_BINARY_START, _COMPACT_START = (apache_message(framing, {})[:-1] for framing in (BINARY, COMPACT))
_HEADS = [b"\x0b\x00\x09", b"\x0f\x00\x09\x0c", b"\x0e\x00\x09\x02", b"\x0d\x00\x09\x0b\x0b"]
_SIZES = [(-1, "negative_size"), (-(2**31), "negative_size"), (2**31 - 1, "too_large")]
_VARINTS = [
    (b"\xff\xff\xff\xff\x0f", "negative_size"),
    (b"\xff\xff\xff\xff\x07", "too_large"),
    (b"\x80\x80\x80\x80\x10", "negative_size"),
    (b"\x80\x80\x80\x80\x80", "bad_varint"),
]
BROKEN = [
    (b"GET / HTTP/1.1\r\n", "not_thrift"),
    (b"\x16\x03\x01\x00\xf4\x01\x00", "not_thrift"),
    (b"\xff\xff\xff\xff", "not_thrift"),
    (b"\x80\x02\x00\x01", "not_thrift"),
    (b"\x00\x00\x00\x00", "not_thrift"),
    (b"\x00\x00\x00\x20\x07", "not_thrift"),
    (b"\x7f\xff\xff\xff\x80\x01\x00\x01\x00\x00\x00\x04ping\x00\x00\x00\x01", "too_large"),
    (b"\x82\x22", "bad_version"),
    (b"\x82\x21\xff\xff\xff\xff\xff\x01", "bad_varint"),
    (b"\x82\x41\x00\x01a", "bad_message"),
    (b"\x82\x21\x00\x00", "bad_message"),
    (b"\x82\x21\x00\xff\xff\xff\xff\x0f", "negative_size"),
    (b"\x80\x01\x00\x01\xff\xff\xff\xff", "negative_size"),
    (b"\x80\x01\x00\x01\x00\x00\x01\x00", "bad_message"),
    (b"\x80\x01\x00\x02\x00\x00\x00\x01a\x00\x00\x00\x00", "bad_message"),
    (b"\x80\x01\x00\x01\x00\x00\x00\x01\xff\x00\x00\x00\x00", "bad_message"),
    (b"\x00\x00\x00\x05\x80\x01\x00\x01\x00", "bad_frame"),
    *((_BINARY_START + head + struct.pack(">i", size), kind) for head in _HEADS for size, kind in _SIZES),
    *(
        (_COMPACT_START + head + size + tail, kind)
        for head, tail in ((b"\x98", b""), (b"\x99\xf1", b""), (b"\x9b", b"\x88"))
        for size, kind in _VARINTS
    ),
    *(
        (_BINARY_START + head + bytes([wire]) + tail, "bad_type")
        for wire in (1, 5, 7, 9, 16, 18, 255)
        for head, tail in ((b"", b"\0\x09"), (b"\x0f\0\x09", b"\0\0\0\1"), (b"\x0d\0\x09\x0b", b"\0\0\0\1\0\0\0\0"))
    ),
    *(
        (_COMPACT_START + head, "bad_type")
        for wire in (13, 14, 15)
        for head in (bytes([0x90 | wire]), bytes([0x99, 0x10 | wire]), bytes([0x9B, 1, 0x80 | wire, 0]))
    ),
]


@pytest.mark.parametrize(("data", "kind"), BROKEN)
def test_rejects_messages_other_than_calls(data, kind):
    assert refusal(data) == kind
    with pytest.raises(ProtocolError) as caught:  # in pieces, some are refused before they are known
        take_bytes(reader_of(), data)
    assert caught.value.kind in (kind, "too_large")


@pytest.mark.parametrize("protocol", ["binary", "binary_old", "compact"])
def test_refuses_frame_with_more_than_one_message(protocol):
    body = apache_message(Framing(False, protocol), batch_fields())
    for wrong in (body + b"\0", body[:-1], body[:-9]):
        assert refusal(struct.pack(">I", len(wrong)) + wrong + body) == "bad_frame"
    assert refusal(struct.pack(">I", len(body)) + body + struct.pack(">i", -5)) == "negative_size"


# -- limits ---------------------------------------------------------------------------------------------------------


@every_framing
def test_bounds_the_bytes_of_a_message(framing):
    data = apache_message(framing, batch_fields(data=bytes(500)))
    size = len(data) - 4 * framing.framed
    assert len(read_all(data, Options("test", max_message_bytes=size))) == 1
    with pytest.raises(ProtocolError, match=rf"^too_large: .*\b{size - 1}\b.* \(--max-message-bytes\)$"):
        read_all(data, Options("test", max_message_bytes=size - 1))


@every_framing
@pytest.mark.parametrize(
    "value",
    [
        (TType.LIST, (TType.I64, list(range(97)))),  # with its field, and batch_fields' 3, 101 items
        (TType.LIST, (TType.STRUCT, [{}] * 97)),
        (TType.SET, (TType.BOOL, [True] * 97)),
        (TType.MAP, (TType.I32, TType.STRING, dict.fromkeys(range(97), ""))),
        (TType.LIST, (TType.LIST, [(TType.BYTE, [1] * 47), (TType.BYTE, [1] * 48)])),
        (TType.STRUCT, dict.fromkeys(range(97), (TType.BOOL, True))),
    ],
)
def test_bounds_the_items_of_a_message(framing, value):
    data = apache_message(framing, batch_fields() | {9: value})
    assert len(read_all(data, Options("test", max_items=101))) == 1
    assert len(take_bytes(reader_of(Options("test", max_items=101)), data)) == 1
    assert refusal(data, Options("test", max_items=100)) == "too_large"


@every_framing
@pytest.mark.parametrize("kind", ["struct", "list", "map"])
def test_bounds_the_depth_of_a_message(framing, kind):
    def nested(depth: int) -> bytes:
        value = (TType.STRUCT, {})
        for _ in range(depth - 2):  # the arguments and the innermost struct are two
            if kind == "struct":
                value = (TType.STRUCT, {1: value})
            elif kind == "list":
                value = (TType.LIST, (value[0], [value[1]]))
            else:
                value = (TType.MAP, (TType.BOOL, value[0], {True: value[1]}))
        return apache_message(framing, batch_fields() | {9: value})

    (message,) = read_all(nested(64))
    assert args_of(message) == batch_args()
    assert refusal(nested(65)) == "too_deep"


# -- work, counted in executed lines, so that the machine's speed does not matter ------------------------------------


def executed_lines(data: bytes, piece: int) -> int:
    count = 0

    def trace(frame, event, _):
        nonlocal count
        if frame.f_code.co_filename != module.__file__:
            return None
        count += event == "line"
        return trace

    reader, messages, before = reader_of(Options("test")), [], sys.gettrace()
    sys.settrace(trace)
    try:
        for at in range(0, len(data), piece):
            messages += take(reader, data[at : at + piece])
    finally:
        sys.settrace(before)
    assert messages
    return count


@every_framing
@pytest.mark.parametrize(
    "value",
    [
        lambda n: (TType.STRING, bytes(n)),
        lambda n: (TType.LIST, (TType.BYTE, [1] * n)),
        lambda n: (TType.LIST, (TType.STRUCT, [{}] * n)),
        lambda n: (TType.LIST, (TType.I32, [1] * (n // 4))),
        lambda n: (TType.MAP, (TType.I32, TType.STRING, dict.fromkeys(range(n // 8), ""))),
    ],
    ids=["string", "bytes", "structs", "numbers", "map"],
)
def test_reading_by_the_byte_is_linear(framing, value):
    small, large = (apache_message(framing, batch_fields() | {9: value(n)}) for n in (300, 1500))
    assert executed_lines(large, 1) < 1.2 * len(large) / len(small) * executed_lines(small, 1)
    assert executed_lines(large, 1) < 90 * len(large)
