"""Content codings: bodies of requests are inflated within limits, answers are compressed where that pays."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Callable
from concurrent.futures import Executor
from functools import lru_cache

from torchpipe_py.errors import InvalidRequest
from torchpipe_py.wire.errors import Bound, RequestTooLargeError, UnsupportedEncodingError
from torchpipe_py.wire.http import HttpAnswer, HttpRequest

MOST_RATIO, RATIO_FREE_BYTES = 200, 2**20
"""The most bytes that one compressed byte may become; the first MiB of a body is free."""
SMALLEST_BYTES = 1400
"""Shorter answers fit into one packet, and are sent as they are."""
LEVEL = 1
"""Of zlib, for answers: JSON of numbers takes 8 us for 1 KB and half of its bytes; level 6 takes 60 us for 0.44."""
MAGIC = b"\x1f\x8b"
"""The first bytes of gzip. No message of Protocol Buffers begins with them."""

_STEP_BYTES, _PIECE_BYTES, _STATE_BYTES = 2**20, 2**16, 40_000
_TRIAL_BYTES = 2**14  # tensors of noise save 7 % in 24 ms for 1 MB: that shows here, in 0.4 ms
_WINDOW_BITS = {"gzip": 31, "deflate": 15}  # of zlib, which reads its own form of deflate (RFC 1950) as HTTP does
_CODINGS = {"gzip": "gzip", "x-gzip": "gzip", "deflate": "deflate"}
_EXPECTED = "expected gzip, deflate or none"
_WEIGHT = re.compile(r"\s*q=(0(?:\.[0-9]{0,3})?|1(?:\.0{0,3})?)\s*")
_SHRINKING = {"application/javascript", "application/json", "application/octet-stream", "image/svg+xml"}


# -- requests ---------------------------------------------------------------------------------------------------------


class Inflater:
    """Inflates ``data`` step by step, to at most ``most`` bytes. ``coding`` is gzip or deflate."""

    def __init__(self, data: bytes, coding: str, most: Bound) -> None:
        self._data, self._coding, self._most = data, coding, most
        self._stream = zlib.decompressobj(_WINDOW_BITS[coding])
        self._at = 0  # index of the first byte that the stream has not seen
        self._tail = b""  # bytes before it that the stream has not used
        self._parts: list[bytes] = []
        self._size = 0

    def step(self, size: int = _STEP_BYTES) -> bool:
        """Inflate about ``size`` more bytes, or as many as become of ``size`` bytes; returns whether all is inflated.

        Raises ``InvalidRequest`` for a stream that is damaged, cut short or followed by other bytes, and
        ``RequestTooLargeError`` beyond the limit or 200 times the size of ``data``.
        """
        stream, until, read_until = self._stream, self._size + size, self._at + size
        bounded = min(self._most.bytes, max(RATIO_FREE_BYTES, MOST_RATIO * len(self._data)))
        while not stream.eof:
            # NOTE: megabytes of empty blocks, or of a long name in gzip's head, become nothing.
            if self._size >= until or self._at >= read_until:
                return False
            piece = self._tail
            if not piece:
                piece = self._data[self._at : self._at + _PIECE_BYTES]
                self._at += len(piece)
            try:
                part = stream.decompress(piece, min(until, bounded + 1) - self._size)
            except zlib.error as error:
                raise InvalidRequest(f"the body is not {self._coding}: {str(error).rpartition(': ')[2]}") from None
            self._tail = stream.unconsumed_tail
            if not part and not piece:
                raise InvalidRequest(f"the {self._coding} stream is cut short after {len(self._data)} bytes")
            self._parts.append(part)
            self._size += len(part)
            if self._size > bounded:
                raise self._too_large()
        rest = len(stream.unused_data) + len(self._data) - self._at
        if rest:
            raise InvalidRequest(f"{rest} bytes after the end of the {self._coding} stream")
        return True

    @property
    def held_bytes(self) -> int:
        """Bytes that it keeps in memory until ``take``."""
        return len(self._data) + self._size + _STATE_BYTES

    def take(self) -> bytes:
        """Remove and return what was inflated."""
        parts, self._parts = self._parts, []
        return b"".join(parts)

    def _too_large(self) -> RequestTooLargeError:
        if self._size > self._most.bytes:
            return RequestTooLargeError(f"the body inflates to more than {self._most.bytes} bytes ({self._most.name})")
        return RequestTooLargeError(
            f"the body inflates to more than {MOST_RATIO} times its {len(self._data)} bytes: send it uncompressed"
        )


class InflateQueue:
    """Inflates long bodies stepwise on ``executor``, one at a time: many would grow together. For one event loop."""

    def __init__(self, executor: Executor) -> None:
        self._executor, self._turn = executor, asyncio.Lock()

    async def finish(self, inflater: Inflater, hold: Callable[[int], object] = lambda size: None) -> None:
        """Inflate all that is left; if this is cancelled, no further step is taken.

        ``hold`` is called with the bytes that the inflater keeps, before it waits for its turn and after each step.
        Raises what ``hold`` and ``Inflater.step`` raise.
        """
        loop = asyncio.get_running_loop()
        hold(inflater.held_bytes)
        async with self._turn:
            while not await loop.run_in_executor(self._executor, inflater.step):
                hold(inflater.held_bytes)


def inflater_of(request: HttpRequest, most: Bound) -> Inflater | None:
    """The inflater of the request's body; ``None`` if it is not compressed.

    Raises ``UnsupportedEncodingError`` for another coding than gzip and deflate, or for several.
    """
    given = request.fields.get("content-encoding")
    if given is None or request.method in ("GET", "HEAD"):
        return None
    codings = [name for name in (part.strip().lower() for part in given.split(",")) if name not in ("", "identity")]
    if not codings:
        return None
    if len(codings) > 1:
        raise UnsupportedEncodingError(f"Content-Encoding {given[:40]!r}: {len(codings)} codings; {_EXPECTED}")
    coding = _CODINGS.get(codings[0])
    if coding is None:
        raise UnsupportedEncodingError(f"Content-Encoding {given[:40]!r}; {_EXPECTED}")
    return Inflater(request.take_body(), coding, most)


# -- answers ----------------------------------------------------------------------------------------------------------


def coding_of(answer: HttpAnswer, accepted: str) -> str:
    """The coding in which the answer is sent to a client with this Accept-Encoding field; empty: as it is."""
    return accepted_coding(accepted) if accepted and _may_shrink(answer) else ""


def compressed(answer: HttpAnswer, accepted: str) -> HttpAnswer:
    """The answer as it is sent to a client with this Accept-Encoding field: compressed if that pays."""
    if not _may_shrink(answer):
        return answer
    headers = dict(answer.headers)
    headers["Vary"] = f"{headers['Vary']}, Accept-Encoding" if "Vary" in headers else "Accept-Encoding"
    coding = accepted_coding(accepted) if accepted else ""
    body = compress(answer.body, coding) if coding else None
    if body is None:
        return answer._replace(headers=headers)
    return answer._replace(body=body, headers={**headers, "Content-Encoding": coding})


def compress(body: bytes, coding: str) -> bytes | None:
    """The body in this coding; ``None`` if that saves less than a quarter, judging by its beginning."""
    view = memoryview(body)
    stream = zlib.compressobj(LEVEL, zlib.DEFLATED, _WINDOW_BITS[coding])
    begin = stream.compress(view[:_TRIAL_BYTES]) + stream.flush(zlib.Z_SYNC_FLUSH)
    if 4 * len(begin) > 3 * min(len(body), _TRIAL_BYTES):
        return None
    return b"".join([begin, stream.compress(view[_TRIAL_BYTES:]), stream.flush()])


def shrinks(body: bytes) -> bool:
    """Whether compression saves a quarter, judging by the beginning of the body."""
    return compress(body[:_TRIAL_BYTES], "gzip") is not None


@lru_cache(maxsize=64)
def accepted_coding(field: str) -> str:
    """The coding that an Accept-Encoding field prefers, gzip or deflate; empty for none (RFC 9110, 12.5.3)."""
    weights: dict[str, float] = {}
    for part in field.lower().split(","):
        name, _, parameter = part.partition(";")
        weight = _WEIGHT.fullmatch(parameter)
        weights[_CODINGS.get(name.strip(), name.strip())] = float(weight[1]) if weight else float(not parameter)
    others = weights.get("*", 0.0)
    best = max("gzip", "deflate", key=lambda name: weights.get(name, others))
    weight_of_best = weights.get(best, others)
    return best if weight_of_best > 0 and weight_of_best >= weights.get("identity", 0.0) else ""


def _may_shrink(answer: HttpAnswer) -> bool:
    """Whether the answer is long enough to be compressed, and of a type that shrinks."""
    if len(answer.body) < SMALLEST_BYTES or any(name.lower() == "content-encoding" for name in answer.headers):
        return False
    kind = answer.kind.partition(";")[0].strip().lower()
    return kind in _SHRINKING or kind.startswith("text/") or kind.endswith(("+json", "+xml"))
