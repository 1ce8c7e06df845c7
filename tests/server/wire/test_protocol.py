"""The reader against Apache Thrift's and thriftpy2's own bytes, and against bytes nobody should send."""

from __future__ import annotations

import random
import struct
import sys

import pytest
import torchpipe_server.wire.header
import torchpipe_server.wire.protocol
import torchpipe_server.wire.scanner
from hypothesis import given, settings
from hypothesis import strategies as st
from thrift.Thrift import TType
from thrift_messages import (
    CODEC,
    EVERYTHING,
    FRAMINGS,
    IDL,
    SERVICE,
    SMALL,
    apache_message,
    batch_args,
    batch_fields,
    decode,
    every_framing,
    feed_bytes,
    read_all,
    refusal,
    thriftpy2_message,
)
from thriftpy2.thrift import TApplicationException
from torchpipe_server.wire.codec import Codec
from torchpipe_server.wire.decoder import BadArgumentsError
from torchpipe_server.wire.header import Framing
from torchpipe_server.wire.protocol import MessageReader
from torchpipe_server.wire.scanner import Limits, ProtocolError


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


class TestLinear:
    """Work is counted in executed lines, so that the machine's speed does not matter."""

    @staticmethod
    def lines(data: bytes, piece: int) -> int:
        modules = (torchpipe_server.wire.header, torchpipe_server.wire.protocol, torchpipe_server.wire.scanner)
        files = {module.__file__ for module in modules}
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
