"""What the first bytes of a connection tell, and which are refused."""

from __future__ import annotations

import pytest
from thrift_messages import (
    SMALL,
    apache_message,
    batch_fields,
    every_framing,
    feed_bytes,
    refusal,
)
from torchpipe_server.wire.errors import ProtocolError
from torchpipe_server.wire.protocol import MessageReader


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
