"""The reader and the codec against Apache Thrift's and thriftpy2's own bytes, and against bytes nobody should send."""

from __future__ import annotations

import random
import struct
import sys
from typing import ClassVar

import pytest
import thriftpy2
import torchpipe_server.wire.protocol
import torchpipe_server.wire.scanner
from hypothesis import given, settings
from hypothesis import strategies as st
from thrift.protocol.TBinaryProtocol import TBinaryProtocol
from thrift.protocol.TCompactProtocol import TCompactProtocol
from thrift.Thrift import TType
from thrift.transport.TTransport import TFramedTransport, TMemoryBuffer
from thriftpy2.protocol import TBinaryProtocol as Thriftpy2Binary
from thriftpy2.protocol import TCompactProtocol as Thriftpy2Compact
from thriftpy2.thrift import TApplicationException, TPayload
from thriftpy2.transport import TMemoryBuffer as Thriftpy2Buffer
from torchpipe_server.wire.codec import Codec
from torchpipe_server.wire.decoder import BadArgumentsError
from torchpipe_server.wire.protocol import (
    CALL,
    EXCEPTION,
    ONEWAY,
    REPLY,
    Framing,
    Limits,
    Message,
    MessageReader,
    ProtocolError,
)

from torchpipe_py.idl import load_idl

IDL = load_idl()
SERVICE = IDL.InferenceService
FRAMINGS = [Framing(framed, protocol) for framed in (False, True) for protocol in ("binary", "binary_old", "compact")]
SMALL = Limits(message_bytes=4096, string_bytes=2048, items=256, depth=64)
CODEC = Codec(Limits())

every_framing = pytest.mark.parametrize(
    "framing", FRAMINGS, ids=lambda f: f"{'framed' if f.framed else 'buffered'}-{f.protocol}"
)


def apache_protocol(framing: Framing, transport):
    if framing.protocol == "compact":
        return TCompactProtocol(transport)
    return TBinaryProtocol(transport, strictRead=False, strictWrite=framing.protocol == "binary")


def write_value(protocol, ttype, value):
    """value: of a struct number -> (type, value), of a list (type, values), of a map (key type, type, dict)."""
    if ttype == TType.STRUCT:
        protocol.writeStructBegin("")
        for number, (field_type, field) in value.items():
            protocol.writeFieldBegin("", field_type, number)
            write_value(protocol, field_type, field)
            protocol.writeFieldEnd()
        protocol.writeFieldStop()
        protocol.writeStructEnd()
    elif ttype == TType.LIST:
        protocol.writeListBegin(value[0], len(value[1]))
        for element in value[1]:
            write_value(protocol, value[0], element)
        protocol.writeListEnd()
    elif ttype == TType.SET:
        protocol.writeSetBegin(value[0], len(value[1]))
        for element in value[1]:
            write_value(protocol, value[0], element)
        protocol.writeSetEnd()
    elif ttype == TType.MAP:
        protocol.writeMapBegin(value[0], value[1], len(value[2]))
        for key, element in value[2].items():
            write_value(protocol, value[0], key)
            write_value(protocol, value[1], element)
        protocol.writeMapEnd()
    else:
        names = {
            TType.BOOL: "Bool",
            TType.BYTE: "Byte",
            TType.I16: "I16",
            TType.I32: "I32",
            TType.I64: "I64",
            TType.DOUBLE: "Double",
        }
        name = "Binary" if isinstance(value, bytes) else names.get(ttype, "String")
        getattr(protocol, f"write{name}")(value)


def apache_message(framing: Framing, fields, name="infer_batch", kind=CALL, seqid=7) -> bytes:
    memory = TMemoryBuffer()
    transport = TFramedTransport(memory) if framing.framed else memory
    protocol = apache_protocol(framing, transport)
    protocol.writeMessageBegin(name, kind, seqid)
    write_value(protocol, TType.STRUCT, fields)
    protocol.writeMessageEnd()
    transport.flush()
    return memory.getvalue()


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


def read_all(data: bytes, limits: Limits = SMALL) -> list[Message]:
    reader = MessageReader(limits)
    messages = list(reader.feed(data))
    while reader.is_paused:  # within a message of many items
        messages += reader.feed(b"")
    return messages


def feed_bytes(reader: MessageReader, data: bytes) -> list[Message]:
    messages = []
    for byte in data:
        messages += reader.feed(bytes([byte]))
        assert reader.pending_bytes <= SMALL.message_bytes + 4
    return messages


def refusal(data: bytes, limits: Limits = SMALL) -> str:
    with pytest.raises(ProtocolError) as caught:
        read_all(data, limits)
    return caught.value.kind


def decode(message: Message):
    return CODEC.decode_args(message, getattr(SERVICE, f"{message.name}_args"))


class TestRoundTrip:
    @every_framing
    @pytest.mark.parametrize("seqid", [0, 7, 2**31 - 1, -1, -(2**31)])
    def test_call_of_apache_thrift(self, framing, seqid):
        (message,) = read_all(apache_message(framing, batch_fields(), seqid=seqid))
        assert (message.name, message.type, message.seqid, message.framing) == ("infer_batch", CALL, seqid, framing)
        assert decode(message) == batch_args()

    @every_framing
    def test_call_of_thriftpy2(self, framing):
        (message,) = read_all(thriftpy2_message(framing, batch_args(), "infer_batch"))
        assert message.framing == framing
        assert decode(message) == batch_args()

    @every_framing
    def test_oneway_and_no_arguments(self, framing):
        (message,) = read_all(apache_message(framing, {}, "ping", ONEWAY))
        assert message.type == ONEWAY
        assert decode(message) == SERVICE.ping_args()

    @every_framing
    def test_unknown_fields_are_skipped(self, framing):
        params = {1: (TType.STRING, "u"), 77: (TType.STRUCT, EVERYTHING), 2: (TType.STRING, b"d")}
        (message,) = read_all(apache_message(framing, {1: (TType.STRUCT, params), 9: (TType.STRUCT, EVERYTHING)}))
        assert decode(message) == batch_args("u", b"d")

    @every_framing
    def test_binary_stays_bytes_and_text_is_text(self, framing):
        (message,) = read_all(apache_message(framing, batch_fields("ü" * 9, b"plain ASCII")))
        assert decode(message) == batch_args("ü" * 9, b"plain ASCII")

    @every_framing
    @pytest.mark.parametrize("seqid", [7, -7])
    def test_reply_is_read_by_apache_thrift(self, framing, seqid):
        (message,) = read_all(apache_message(framing, batch_fields(), seqid=seqid))
        result = SERVICE.infer_batch_result(success=IDL.InferenceResult(label="cat", score=0.25))
        protocol = self.reply_protocol(framing, CODEC.encode_reply(message, result))
        assert protocol.readMessageBegin() == ("infer_batch", REPLY, seqid)
        protocol.readStructBegin()
        assert protocol.readFieldBegin()[1:] == (TType.STRUCT, 0)
        protocol.readStructBegin()
        assert protocol.readFieldBegin()[1:] == (TType.STRING, 1)
        assert protocol.readString() == "cat"
        protocol.readFieldEnd()
        assert protocol.readFieldBegin()[1:] == (TType.DOUBLE, 2)
        assert protocol.readDouble() == 0.25

    @every_framing
    def test_exception_is_read_by_apache_thrift(self, framing):
        from thrift.Thrift import TApplicationException as ApacheException

        (message,) = read_all(apache_message(framing, batch_fields()))
        error = TApplicationException(TApplicationException.PROTOCOL_ERROR, "why")
        protocol = self.reply_protocol(framing, CODEC.encode_exception(message, error))
        assert protocol.readMessageBegin() == ("infer_batch", EXCEPTION, 7)
        read = ApacheException()
        read.read(protocol)
        assert (read.type, read.message) == (ApacheException.PROTOCOL_ERROR, "why")

    @staticmethod
    def reply_protocol(framing, data):
        transport = TMemoryBuffer(data)
        return apache_protocol(framing, TFramedTransport(transport) if framing.framed else transport)

    @every_framing
    def test_every_declared_type(self, framing):
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
        (message,) = read_all(apache_message(framing, fields))
        expected = Everything(False, -128, -300, [True, False], {True: False}, [5, -5], [[1], []], number=-0.5)
        expected.inner = Everything(flag=True, inner=Everything())
        assert CODEC.decode_args(message, Everything) == expected

    def test_either_type_of_a_compact_bool_element(self):
        start = apache_message(Framing(False, "compact"), {})[:-1]
        (message,) = read_all(start + b"\x49\x22\x01\x02" + b"\x1b\x01\x22\x01\x02" + b"\0")
        assert CODEC.decode_args(message, Everything) == Everything(flags=[True, False], map={True: False})

    tensors = st.builds(
        IDL.Tensor,
        dtype=st.sampled_from(["uint8", "float32"]),
        shape=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20),
        data=st.binary(max_size=20),
    )
    values = st.one_of(
        st.builds(IDL.Value, tensor=tensors),
        st.builds(IDL.Value, bytes=st.binary(max_size=9)),
        st.builds(IDL.Value, text=st.text(max_size=9)),
        st.builds(IDL.Value, number=st.floats(allow_nan=False)),
        st.builds(IDL.Value, integer=st.integers(-(2**63), 2**63 - 1)),
        st.builds(IDL.Value, tensors=st.lists(tensors, max_size=20)),
    )
    requests = st.builds(
        IDL.InferRequest,
        uuid=st.text(max_size=9),
        inputs=st.dictionaries(st.text(max_size=9), values, max_size=4),
        node_name=st.none() | st.text(max_size=9),
        deadline_ms=st.none() | st.integers(-(2**31), 2**31 - 1),
        outputs=st.none() | st.lists(st.text(max_size=3), max_size=20),
    )

    @settings(max_examples=60)
    @given(request=requests, framing=st.sampled_from(FRAMINGS))
    def test_every_kind_of_value(self, request, framing):
        args = SERVICE.infer_args(request=request)
        (message,) = read_all(thriftpy2_message(framing, args, "infer"), Limits())
        assert decode(message) == args


class TestPieces:
    @every_framing
    def test_every_split_point(self, framing):
        data = apache_message(framing, batch_fields() | {9: (TType.STRUCT, EVERYTHING)})
        for split in range(len(data) + 1):
            reader = MessageReader(SMALL)
            messages = list(reader.feed(data[:split]))
            assert reader.pending_bytes == (split if split < len(data) else 0)
            messages += reader.feed(data[split:])
            assert [decode(message) for message in messages] == [batch_args()]
            assert reader.pending_bytes == 0

    @every_framing
    def test_one_byte_at_a_time(self, framing):
        one = apache_message(framing, batch_fields() | {9: (TType.STRUCT, EVERYTHING)})
        messages = feed_bytes(MessageReader(SMALL), one * 3)
        assert [decode(message) for message in messages] == [batch_args()] * 3

    @every_framing
    @pytest.mark.parametrize("piece", [1000, 47, 3])
    def test_pipelined_messages_keep_their_order(self, framing, piece):
        data = b"".join(apache_message(framing, batch_fields(f"u{i}"), seqid=i) for i in range(30))
        reader, seen = MessageReader(SMALL), []
        for at in range(0, len(data), piece):
            seen += [(m.seqid, decode(m).params.uuid) for m in reader.feed(memoryview(data)[at : at + piece])]
        assert seen == [(i, f"u{i}") for i in range(30)]

    def test_messages_outlive_later_feeds(self):
        one = apache_message(FRAMINGS[0], batch_fields())
        reader = MessageReader(SMALL)
        kept = [m for at in range(0, 10 * len(one), 7) for m in reader.feed((one * 10)[at : at + 7])]
        assert [decode(m) for m in kept] == [batch_args()] * 10

    def test_a_whole_message_is_not_copied(self):
        data = apache_message(FRAMINGS[0], batch_fields())
        (message,) = read_all(data)
        assert message.buffer is data

    @every_framing
    def test_messages_before_the_break_come_out(self, framing):
        good = apache_message(framing, batch_fields())
        bad = bytearray(good)
        bad[4 if framing.framed else 0] = 0x7F
        reader, seen = MessageReader(SMALL), []
        with pytest.raises(ProtocolError):
            seen.extend(reader.feed(good + good + bytes(bad) + good))
        assert len(seen) == 2
        assert reader.pending_bytes == 0
        with pytest.raises(ProtocolError):
            list(reader.feed(good))

    def test_the_broken_request_can_be_answered(self):
        data = apache_message(FRAMINGS[0], batch_fields(data=bytes(3000)), seqid=-3)
        reader = MessageReader(SMALL)
        with pytest.raises(ProtocolError, match="too_large"):
            list(reader.feed(data[:100]))
        assert (reader.request.name, reader.request.seqid) == ("infer_batch", -3)
        error = TApplicationException(TApplicationException.PROTOCOL_ERROR, "too large")
        assert b"too large" in CODEC.encode_exception(reader.request, error)


class TestDetection:
    @every_framing
    def test_from_however_few_bytes(self, framing):
        reader, known = MessageReader(SMALL), []
        for byte in apache_message(framing, batch_fields()):
            list(reader.feed(bytes([byte])))
            known.append(reader.framing)
        assert known[-1] == framing
        assert set(known[:5]) <= {None, framing}
        assert known[5] == framing

    @pytest.mark.parametrize(
        ("data", "kind"),
        [
            (b"GET / HTTP/1.1\r\n", "not_thrift"),
            (b"\x16\x03\x01\x00\xf4\x01\x00", "not_thrift"),
            (b"\xff\xff\xff\xff", "not_thrift"),
            (b"\x80\x02\x00\x01", "not_thrift"),
            (b"\x00\x00\x00\x00", "not_thrift"),
            (b"\x00\x00\x00\x20\x07", "not_thrift"),
            (b"\x7f\xff\xff\xff\x80\x01\x00\x01\x00\x00\x00\x04ping\x00\x00\x00\x01", "too_large"),
            (b"\x82\x22", "bad_version"),
            (b"\x82\x21\xff\xff\xff\xff\xff\x01", "bad_varint"),
            (b"\x82\x21\xff\xff\xff\xff\x1f\x01", "bad_varint"),
            (b"\x82\x41\x00\x01a", "bad_message"),
            (b"\x82\x21\x00\x00", "bad_message"),
            (b"\x82\x21\x00\xff\xff\xff\xff\x0f", "negative_size"),
            (b"\x80\x01\x00\x01\xff\xff\xff\xff", "negative_size"),
            (b"\x80\x01\x00\x01\x00\x00\x01\x00", "bad_message"),
            (b"\x80\x01\x00\x02\x00\x00\x00\x01a\x00\x00\x00\x00", "bad_message"),
            (b"\x80\x01\x00\x01\x00\x00\x00\x01\xff\x00\x00\x00\x00", "bad_message"),
            (b"\x00\x00\x00\x05\x80\x01\x00\x01\x00", "bad_frame"),
        ],
    )
    def test_what_is_no_call_is_refused(self, data, kind):
        assert refusal(data) == kind
        reader = MessageReader(SMALL)
        with pytest.raises(ProtocolError) as caught:  # in pieces, some are refused before they are known
            feed_bytes(reader, data)
        assert caught.value.kind in (kind, "too_large")


class TestLimits:
    @every_framing
    def test_message_bytes(self, framing):
        data = apache_message(framing, batch_fields(data=bytes(500)))
        size = len(data) - 4 * framing.framed
        assert len(read_all(data, Limits(message_bytes=size))) == 1
        with pytest.raises(ProtocolError, match=rf"^too_large: .*\b{size - 1}\b.* \(--max-message-bytes\)$"):
            read_all(data, Limits(message_bytes=size - 1))

    @every_framing
    def test_a_string_that_cannot_fit_is_refused_before_it_comes(self, framing):
        data = apache_message(framing, batch_fields(data=bytes(5000)))
        if framing.framed:
            data = struct.pack(">I", 1000) + data[4:]
        kind = "bad_frame" if framing.framed else "too_large"
        assert refusal(data[:60], Limits(message_bytes=4000)) == kind

    @every_framing
    def test_string_bytes(self, framing):
        for size in (500, 501):
            data = apache_message(framing, batch_fields(data=bytes(size)))
            if size == 500:
                assert len(read_all(data, Limits(string_bytes=500))) == 1
            else:
                assert refusal(data, Limits(string_bytes=500)) == "too_large"

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
    def test_items(self, framing, value):
        data = apache_message(framing, batch_fields() | {9: value})
        assert len(read_all(data, Limits(items=101))) == 1
        assert len(feed_bytes(MessageReader(Limits(items=101)), data)) == 1
        assert refusal(data, Limits(items=100)) == "too_large"

    @every_framing
    @pytest.mark.parametrize("kind", ["struct", "list", "map"])
    def test_depth(self, framing, kind):
        def nested(depth):
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
        assert decode(message) == batch_args()
        assert refusal(nested(65)) == "too_deep"

    @pytest.mark.parametrize(
        ("size", "kind"), [(-1, "negative_size"), (-(2**31), "negative_size"), (2**31 - 1, "too_large")]
    )
    @pytest.mark.parametrize(
        "head", [b"\x0b\x00\x09", b"\x0f\x00\x09\x0c", b"\x0e\x00\x09\x02", b"\x0d\x00\x09\x0b\x0b"]
    )
    def test_claimed_sizes_in_binary(self, head, size, kind):
        start = apache_message(FRAMINGS[0], {})[:-1]
        assert refusal(start + head + struct.pack(">i", size)) == kind

    @pytest.mark.parametrize(
        ("size", "kind"),
        [
            (b"\xff\xff\xff\xff\x0f", "negative_size"),
            (b"\xff\xff\xff\xff\x07", "too_large"),
            (b"\x80\x80\x80\x80\x10", "bad_varint"),
            (b"\x80\x80\x80\x80\x80", "bad_varint"),
        ],
    )
    @pytest.mark.parametrize(("head", "tail"), [(b"\x98", b""), (b"\x99\xf1", b""), (b"\x9b", b"\x88")])
    def test_claimed_sizes_in_compact(self, head, tail, size, kind):
        start = apache_message(Framing(False, "compact"), {})[:-1]
        assert refusal(start + head + size + tail) == kind

    @pytest.mark.parametrize("wire", [1, 5, 7, 9, 16, 18, 255])
    def test_unknown_types_in_binary(self, wire):
        start = apache_message(FRAMINGS[0], {})[:-1]
        assert refusal(start + bytes([wire, 0, 9])) == "bad_type"
        assert refusal(start + b"\x0f\x00\x09" + bytes([wire, 0, 0, 0, 1])) == "bad_type"
        assert refusal(start + b"\x0d\x00\x09\x0b" + bytes([wire, 0, 0, 0, 1])) == "bad_type"

    @pytest.mark.parametrize("wire", [13, 14, 15])
    def test_unknown_types_in_compact(self, wire):
        start = apache_message(Framing(False, "compact"), {})[:-1]
        assert refusal(start + bytes([0x90 | wire])) == "bad_type"
        assert refusal(start + bytes([0x99, 0x10 | wire])) == "bad_type"
        assert refusal(start + bytes([0x9B, 1, 0x80 | wire])) == "bad_type"

    @pytest.mark.parametrize("protocol", ["binary", "binary_old", "compact"])
    def test_a_frame_holds_one_message(self, protocol):
        body = apache_message(Framing(False, protocol), batch_fields())
        for wrong, kind in ((body + b"\0", "bad_frame"), (body[:-1], "bad_frame"), (body[:-9], "bad_frame")):
            assert refusal(struct.pack(">I", len(wrong)) + wrong + body) == kind
        good = struct.pack(">I", len(body)) + body
        with pytest.raises(ProtocolError, match="negative_size"):
            list(MessageReader(SMALL).feed(good + struct.pack(">i", -5)))


class TestBadArguments:
    def refused(self, framing, fields, name="infer_batch"):
        reader = MessageReader(SMALL)
        (message,) = reader.feed(apache_message(framing, fields, name))
        with pytest.raises(BadArgumentsError) as caught:
            decode(message)
        (message,) = reader.feed(apache_message(framing, batch_fields()))  # the stream is intact
        assert decode(message) == batch_args()
        return str(caught.value)

    @every_framing
    def test_required_field_missing(self, framing):
        fields = {1: (TType.STRUCT, {2: (TType.STRING, b"d")})}
        assert self.refused(framing, fields) == "InferenceParams.uuid is missing"

    @every_framing
    def test_field_of_another_type(self, framing):
        fields = {1: (TType.STRUCT, {1: (TType.I64, 5), 2: (TType.STRING, b"d")})}
        assert "InferenceParams.uuid is of type" in self.refused(framing, fields)

    @every_framing
    def test_text_that_is_not_utf8(self, framing):
        assert self.refused(framing, batch_fields(b"\xff\xfe")) == "InferenceParams.uuid is not UTF-8"

    @every_framing
    def test_list_of_another_type(self, framing):
        fields = {1: (TType.LIST, (TType.STRING, [b"\x0b\x00\x01\x7f\xff\xff\xff"]))}
        assert "a list of type" in self.refused(framing, fields, "infer_many")

    @every_framing
    def test_map_whose_strings_would_be_read_as_structs(self, framing):
        poison = b"\x7f\xff\xff\xff" * 9  # thriftpy2 would take it for lengths, which no scanner saw
        request = {1: (TType.STRING, "u"), 2: (TType.MAP, (TType.STRING, TType.STRING, {"k": poison}))}
        assert "a map of types" in self.refused(framing, {1: (TType.STRUCT, request)}, "infer")

    @every_framing
    def test_empty_containers_of_another_type_are_empty(self, framing):
        (message,) = read_all(apache_message(framing, {1: (TType.LIST, (TType.I64, []))}, "infer_many"))
        assert decode(message).params == []

    def test_number_too_large_for_its_field(self):
        framing = Framing(False, "compact")
        data = apache_message(framing, {2: (TType.I64, 2**40)}, "infer_many")
        (message,) = read_all(data.replace(b"\x26", b"\x25", 1))  # field 2, i64 -> i32
        with pytest.raises(BadArgumentsError, match="32 bits"):
            decode(message)


class TestLinear:
    """Work is counted in executed lines, so that the machine's speed does not matter."""

    @staticmethod
    def lines(data: bytes, piece: int) -> int:
        files = {torchpipe_server.wire.protocol.__file__, torchpipe_server.wire.scanner.__file__}
        count = 0

        def trace(frame, event, _):
            nonlocal count
            if frame.f_code.co_filename not in files:
                return None
            count += event == "line"
            return trace

        reader, messages, before = MessageReader(Limits()), [], sys.gettrace()
        sys.settrace(trace)
        try:
            for at in range(0, len(data), piece):
                messages += reader.feed(data[at : at + piece])
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
    def test_one_byte_at_a_time(self, framing, value):
        small, large = (apache_message(framing, batch_fields() | {9: value(n)}) for n in (500, 4000))
        assert self.lines(large, 1) < 1.2 * len(large) / len(small) * self.lines(small, 1)
        assert self.lines(large, 1) < 90 * len(large)

    @every_framing
    def test_fixed_sizes_and_strings_are_passed_by_arithmetic(self, framing):
        value = (TType.LIST, (TType.DOUBLE, [1.0] * 4000))
        data = apache_message(framing, batch_fields(data=bytes(60_000)) | {9: value})
        assert self.lines(data, len(data)) < 300

    @every_framing
    def test_pipelined_messages(self, framing):
        one = apache_message(framing, batch_fields())
        assert self.lines(one * 200, 1000 * len(one)) <= 21 * self.lines(one * 10, 1000 * len(one))


def survive(data: bytes, pieces: random.Random, limits: Limits = SMALL) -> None:
    """Feed and decode `data`; anything but messages and the two declared errors is a failure."""
    reader, at = MessageReader(limits), 0
    codec = Codec(limits)
    try:
        while at < len(data):
            piece = pieces.choice((1, 7, 100, len(data)))
            for message in reader.feed(data[at : at + piece]):
                for method in ("ping", "infer_batch", "infer_many", "infer"):
                    try:
                        codec.decode_args(message, getattr(SERVICE, f"{method}_args"))
                    except BadArgumentsError:
                        pass
                codec.encode_exception(message, TApplicationException(7, "x"))
            assert reader.pending_bytes <= limits.message_bytes + piece
            at += piece
    except ProtocolError:
        assert reader.pending_bytes == 0


class TestFuzz:
    seeds = tuple(
        thriftpy2_message(framing, args, name)
        for framing in FRAMINGS
        for name, args in (
            ("ping", SERVICE.ping_args()),
            ("infer_batch", batch_args()),
            ("infer_many", SERVICE.infer_many_args(params=[batch_args().params] * 3, deadline_ms=5)),
            (
                "infer",
                SERVICE.infer_args(
                    request=IDL.InferRequest(
                        uuid="u",
                        inputs={
                            "a": IDL.Value(tensor=IDL.Tensor("uint8", [2, 3], b"123456")),
                            "b": IDL.Value(number=0.5),
                            "c": IDL.Value(tensors=[IDL.Tensor("uint8", [1], b"1")]),
                        },
                        outputs=["x", "y"],
                    )
                ),
            ),
        )
    )

    @settings(max_examples=300)
    @given(
        data=st.one_of(
            st.binary(max_size=200),
            st.builds(lambda head, tail: head + tail, st.sampled_from(seeds), st.binary(max_size=60)),
            st.builds(
                lambda seed, at, patch: seed[: at % len(seed)] + patch + seed[at % len(seed) + len(patch) :],
                st.sampled_from(seeds),
                st.integers(0, 400),
                st.binary(min_size=1, max_size=8),
            ),
        ),
        pieces=st.randoms(use_true_random=False),
    )
    def test_any_bytes(self, data, pieces):
        survive(data, pieces)

    def test_thousands_of_mutations(self):
        rng = random.Random(20240607)
        for _ in range(8000):
            data = bytearray(rng.choice(self.seeds))
            for _ in range(rng.choice((1, 1, 2, 5))):
                at = rng.randrange(len(data))
                choice = rng.randrange(5)
                if choice == 0:
                    data[at] ^= 1 << rng.randrange(8)
                elif choice == 1:
                    data[at] = rng.choice((0, 1, 0x0B, 0x0C, 0x0D, 0x0F, 0x7F, 0x80, 0x82, 0xFF))
                elif choice == 2:
                    data[at : at + 4] = rng.choice((b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\0\0"))
                elif choice == 3:
                    del data[at : at + rng.randrange(1, 5)]
                else:
                    data[at:at] = rng.randbytes(rng.randrange(1, 5))
                if not data:
                    break
            survive(bytes(data), rng)

    @every_framing
    def test_an_endless_message_is_cut_off(self, framing):
        start = apache_message(Framing(False, framing.protocol), {})[:-1]
        endless = b"\x91" if framing.protocol == "compact" else b"\x02\x00\x09\x01"  # bool fields
        reader = MessageReader(SMALL)
        start = struct.pack(">I", 4000) + start if framing.framed else start
        with pytest.raises(ProtocolError, match="too_large"):
            feed_bytes(reader, start + endless * 5000)
