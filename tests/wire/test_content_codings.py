"""Content codings: what inflates a body, its limits, and which answers are compressed."""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping
from contextlib import suppress

import pytest

from torchpipe_py import InvalidRequest
from torchpipe_py.wire.compression import (
    RATIO_FREE_BYTES,
    SMALLEST_BYTES,
    Inflater,
    accepted_coding,
    coding_of,
    compress,
    compressed,
    inflater_of,
    shrinks,
)
from torchpipe_py.wire.errors import Bound, RequestTooLargeError, UnsupportedEncodingError
from torchpipe_py.wire.http import SMALL_BYTES, HttpAnswer, HttpRequest

WINDOWS = {"gzip": 31, "deflate": 15}
LIMIT = Bound(2**24, "--max-message-bytes")
RANDOM = random.Random(0)
NOISE = RANDOM.randbytes(300_000)
CONTENTS = {
    "empty": b"",
    "one byte": b"x",
    "text": b"a line of text\n" * 20_000,
    "noise": NOISE,
    "zeros": bytes(RATIO_FREE_BYTES),
    "long": (NOISE + bytes(300_000)) * 8,
}

every_coding = pytest.mark.parametrize("coding", WINDOWS)


def inflate(inflater: Inflater) -> bytes:
    while not inflater.step():
        pass
    return inflater.take()


def pack(content: bytes, coding: str) -> bytes:
    stream = zlib.compressobj(wbits=WINDOWS[coding])
    return stream.compress(content) + stream.flush()


# -- requests ---------------------------------------------------------------------------------------------------------


@every_coding
@pytest.mark.parametrize("size", [1, 1000, SMALL_BYTES, 2**30])
@pytest.mark.parametrize("name", CONTENTS)
def test_inflates_in_steps_of_any_size(name: str, size: int, coding: str) -> None:
    content = CONTENTS[name][: 2000 * size]
    inflater, steps = Inflater(pack(content, coding), coding, LIMIT), 1
    while not inflater.step(size):
        steps += 1
    assert steps >= len(content) // max(size, 2**16)
    assert inflater.take() == content


@every_coding
def test_a_step_inflates_no_more_than_it_is_asked_for(coding: str) -> None:
    inflater = Inflater(pack(CONTENTS["zeros"], coding), coding, LIMIT)
    assert not inflater.step(SMALL_BYTES)
    assert len(inflater.take()) == SMALL_BYTES


EMPTY_BLOCKS = b"\0\0\0\xff\xff" * 2**16


@pytest.mark.parametrize(
    ("coding", "start"),
    [("deflate", b"\x78\x9c" + EMPTY_BLOCKS), ("gzip", b"\x1f\x8b\x08\x08" + bytes(6) + b"name" * 2**16)],
    ids=["empty blocks", "a long name"],
)
def test_a_step_reads_no_more_than_its_size(coding: str, start: bytes) -> None:
    inflater = Inflater(start, coding, LIMIT)
    for _ in range(len(start) // SMALL_BYTES):
        assert not inflater.step(SMALL_BYTES)
    with pytest.raises(InvalidRequest, match="cut short"):
        inflate(inflater)


@every_coding
def test_limit_is_of_the_inflated_body(coding: str) -> None:
    data = pack(CONTENTS["text"], coding)
    size = len(CONTENTS["text"])
    assert inflate(Inflater(data, coding, Bound(size, "x"))) == CONTENTS["text"]
    with pytest.raises(RequestTooLargeError, match=rf"inflates to more than {size - 1} bytes \(--x\)"):
        inflate(Inflater(data, coding, Bound(size - 1, "--x")))


@every_coding
def test_ratio_is_limited_beyond_the_first_mebibyte(coding: str) -> None:
    assert inflate(Inflater(pack(bytes(RATIO_FREE_BYTES), coding), coding, LIMIT)) == bytes(RATIO_FREE_BYTES)
    bomb = pack(bytes(RATIO_FREE_BYTES + 1), coding)
    with pytest.raises(RequestTooLargeError, match=f"more than 200 times its {len(bomb)} bytes: send it uncompressed"):
        inflate(Inflater(bomb, coding, LIMIT))


@every_coding
def test_a_bomb_is_inflated_no_further_than_its_limit(coding: str) -> None:
    inflater = Inflater(pack(bytes(2**26), coding), coding, Bound(10_000, "x"))
    with pytest.raises(RequestTooLargeError):
        inflate(inflater)
    assert len(inflater.take()) == 10_001


@every_coding
def test_refuses_every_cut_stream(coding: str) -> None:
    data = pack(b"some text, some text", coding)
    for size in range(len(data)):
        with pytest.raises(InvalidRequest, match=f"the {coding} stream is cut short after {size} bytes"):
            inflate(Inflater(data[:size], coding, LIMIT))


@every_coding
@pytest.mark.parametrize("rest", [b"x", bytes(100_000), pack(b"another", "gzip")], ids=["byte", "zeros", "stream"])
def test_refuses_bytes_after_the_stream(coding: str, rest: bytes) -> None:
    with pytest.raises(InvalidRequest, match=f"^{len(rest)} bytes after the end of the {coding} stream$"):
        inflate(Inflater(pack(NOISE, coding) + rest, coding, LIMIT))


@every_coding
@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"plain text", "incorrect header check"),
        (pack(b"text", "gzip")[:-5] + b"\0\0\0\0\0", "incorrect data check"),
        (pack(b"text", "deflate")[:-1] + b"\0", "incorrect data check"),
        (zlib.compress(b"text")[2:-4], "incorrect header check"),
    ],
    ids=["plain", "gzip", "deflate", "raw"],
)
def test_refuses_damaged_streams(coding: str, data: bytes, said: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^the body is not {coding}: (incorrect header check|{said})$"):
        inflate(Inflater(data, coding, LIMIT))


def test_damaged_streams_raise_nothing_else() -> None:
    data = pack(CONTENTS["text"], "gzip")
    for _ in range(2000):
        broken = bytearray(data)
        broken[RANDOM.randrange(len(data))] ^= 1 << RANDOM.randrange(8)
        with suppress(InvalidRequest):
            assert len(inflate(Inflater(bytes(broken), "gzip", LIMIT))) == len(CONTENTS["text"])


def request(method: str = "POST", body: bytes = b"", **fields: str) -> HttpRequest:
    made = HttpRequest(method, "/infer", "", {name.replace("_", "-"): value for name, value in fields.items()})
    made.body = body
    return made


@pytest.mark.parametrize("field", ["gzip", "GZip", "x-gzip", " gzip ", "identity, gzip", "gzip,"])
def test_names_of_gzip(field: str) -> None:
    inflater = inflater_of(request(body=pack(b"text", "gzip"), content_encoding=field), LIMIT)
    assert inflater is not None
    assert inflate(inflater) == b"text"


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("br", "Content-Encoding 'br'; expected gzip, deflate or none"),
        ("gzip, gzip", "Content-Encoding 'gzip, gzip': 2 codings; expected gzip, deflate or none"),
        ("deflate, identity, gzip", "2 codings"),
        ("gzip;q=1", "Content-Encoding 'gzip;q=1'; expected"),
        ("z" * 5000, f"Content-Encoding '{'z' * 40}'; expected"),
    ],
)
def test_refuses_other_codings(field: str, said: str) -> None:
    with pytest.raises(UnsupportedEncodingError) as raised:
        inflater_of(request(content_encoding=field), LIMIT)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("method", "fields"),
    [("POST", {}), ("POST", {"content_encoding": "identity"}), ("POST", {"content_encoding": ""}),
     ("GET", {"content_encoding": "gzip"}), ("HEAD", {"content_encoding": "br"})],
)  # fmt: skip
def test_leaves_other_bodies_as_they_are(method: str, fields: Mapping[str, str]) -> None:
    made = request(method, b"body", **fields)
    assert inflater_of(made, LIMIT) is None
    assert made.body == b"body"


def test_an_inflated_request_has_no_coding() -> None:
    made = request(content_encoding="gzip", content_type="text/plain")
    made.inflated(b"text")
    assert (made.body, made.fields) == (b"text", {"content-type": "text/plain"})


# -- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "coding"),
    [
        ("", ""), ("gzip", "gzip"), ("deflate", "deflate"), ("gzip, deflate", "gzip"), ("deflate, gzip", "gzip"),
        ("x-gzip", "gzip"), ("GZIP", "gzip"), ("gzip, deflate, br, zstd", "gzip"), ("br", ""), ("*", "gzip"),
        ("*;q=0", ""), ("gzip;q=0", ""), ("gzip;q=0.000", ""), ("gzip;q=0.001", "gzip"), ("gzip;q=0, *", "deflate"),
        ("gzip;q=0, deflate;q=0, *", ""), ("gzip;q=0.5, deflate", "deflate"), ("gzip;q=0.5, deflate;q=0.4", "gzip"),
        ("deflate;q=0.5, *;q=0.1", "deflate"), ("identity", ""), ("identity, gzip", "gzip"),
        ("identity, gzip;q=0.9", ""), ("identity;q=0.5, gzip;q=0.5", "gzip"), ("identity;q=0, gzip;q=0.1", "gzip"),
        ("gzip ; q=0.8", "gzip"), ("gzip;Q=0", ""), ("gzip;q=2", ""), ("gzip;q=0.1234", ""), ("gzip;q=", ""),
        ("gzip;level=9", ""), (",,gzip,", "gzip"), ("gzipped", ""), ("gzip;q=nan", ""),
    ],
)  # fmt: skip
def test_accepted_coding(field: str, coding: str) -> None:
    assert accepted_coding(field) == coding


TEXT = b'{"numbers": [0.123, 0.456]}' * 100
JSON = HttpAnswer(200, "application/json", TEXT, {"A": "b"})
PLAIN = {"A": "b", "Vary": "Accept-Encoding"}


@every_coding
@pytest.mark.parametrize("size", [SMALLEST_BYTES, SMALL_BYTES, 2**20])
@pytest.mark.parametrize(
    "kind",
    ["application/json", "Application/JSON; charset=utf-8", "text/html", "image/svg+xml", "application/octet-stream",
     "application/ld+json"],
)  # fmt: skip
def test_compresses_what_shrinks(kind: str, size: int, coding: str) -> None:
    plain = HttpAnswer(201, kind, (TEXT * 400)[:size], {"A": "b"})
    answer = compressed(plain, coding)
    assert answer[:2] == (201, kind)
    assert answer.headers == {**PLAIN, "Content-Encoding": coding}
    assert zlib.decompress(answer.body, WINDOWS[coding]) == plain.body
    assert len(answer.body) < size / 2
    assert coding_of(plain, coding) == coding
    assert shrinks(plain.body)


@pytest.mark.parametrize(
    "answer",
    [
        JSON._replace(body=bytes(SMALLEST_BYTES - 1)),
        JSON._replace(kind="image/jpeg"),
        JSON._replace(kind="text"),
        JSON._replace(headers={"content-encoding": "br"}),
    ],
)
def test_leaves_other_answers_as_they_are(answer: HttpAnswer) -> None:
    assert compressed(answer, "gzip") is answer
    assert coding_of(answer, "gzip") == ""


@pytest.mark.parametrize("accepted", ["", "identity", "br", "gzip;q=0"])
def test_compresses_only_where_it_is_asked_for(accepted: str) -> None:
    assert compressed(JSON, accepted) == JSON._replace(headers=PLAIN)
    assert coding_of(JSON, accepted) == ""


def test_keeps_an_answers_own_vary() -> None:
    assert compressed(JSON._replace(headers={"Vary": "Origin"}), "")[3] == {"Vary": "Origin, Accept-Encoding"}


@every_coding
def test_sends_as_it_is_what_does_not_shrink(coding: str) -> None:
    for body in (NOISE, NOISE[:5000], NOISE[:20_000] + bytes(1_000_000)):
        assert compress(body, coding) is None
        assert not shrinks(body)
        answer = HttpAnswer(200, "application/octet-stream", body)
        assert compressed(answer, coding) == answer._replace(headers={"Vary": "Accept-Encoding"})
