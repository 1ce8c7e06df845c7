"""The codec against Apache Thrift's and thriftpy2's own bytes."""

from __future__ import annotations

from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thrift.Thrift import TType
from thrift.transport.TTransport import TFramedTransport, TMemoryBuffer
from thrift_messages import (
    CODEC,
    EVERYTHING,
    FRAMINGS,
    IDL,
    SERVICE,
    SMALL,
    apache_message,
    apache_protocol,
    batch_args,
    batch_fields,
    decode,
    every_framing,
    read_all,
    thriftpy2_message,
)
from thriftpy2.thrift import TApplicationException, TPayload
from torchpipe_server.wire.decoder import BadArgumentsError
from torchpipe_server.wire.header import CALL, EXCEPTION, ONEWAY, REPLY, Framing
from torchpipe_server.wire.protocol import MessageReader
from torchpipe_server.wire.scanner import Limits


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
