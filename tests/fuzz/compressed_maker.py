"""Compressed requests over HTTP, messages of gRPC, compressed or not, and a second opinion on how they inflate."""

from __future__ import annotations

import gzip
import zlib
from typing import Any

from fuzz.http_maker import HttpMaker
from fuzz.thrift_maker import ThriftMaker

_WINDOWS = {"gzip": 31, "deflate": 15}


def plain_inflated(data: bytes, coding: str, most: int, ratio: int, free: int) -> bytes | None:
    """What zlib makes of it in one go; ``None`` for a stream that is damaged, cut, followed by more, or too large."""
    stream = zlib.decompressobj(_WINDOWS[coding])
    try:
        inflated = stream.decompress(data, most + 1)
        inflated += (
            stream.decompress(stream.unconsumed_tail, most + 1 - len(inflated)) if len(inflated) <= most else b""
        )
    except zlib.error:
        return None
    if not stream.eof or stream.unused_data or len(inflated) > min(most, max(free, ratio * len(data))):
        return None
    return inflated


class CompressedMaker(HttpMaker):
    """Makes requests whose bodies are compressed, as their field says or otherwise."""

    def body(self) -> tuple[bytes, ...]:
        rng = self.rng
        kind, body, *more = super().body()
        coding = rng.choice(("gzip", "deflate"))
        packed = self.packed(body, coding)
        if rng.random() < 0.3:
            packed = self.mutant(packed, packed)
        field = rng.choice((coding.encode(),) * 9 + (b"x-gzip", b"br", b"gzip, gzip", b"identity, deflate", b""))
        return kind, packed, *more, b"Content-Encoding: " + field

    def packed(self, body: bytes, coding: str) -> bytes:
        """The body in this coding, in one of several forms; sometimes of more bytes than may become of it."""
        rng = self.rng
        if rng.random() < 0.1:
            body += bytes(rng.choice((2**14, 2**16, 2**21)))
        if coding == "gzip" and rng.random() < 0.2:
            return gzip.compress(body, rng.randint(0, 9)) + gzip.compress(b"")[: rng.choice((0, 0, 5, 20))]
        stream = zlib.compressobj(rng.randint(0, 9), zlib.DEFLATED, _WINDOWS[coding], 8, rng.randint(0, 4))
        parts = [stream.compress(body[at : at + 1000]) for at in range(0, min(len(body), 10_000), 1000)]
        parts.insert(rng.randint(0, len(parts)), stream.flush(zlib.Z_FULL_FLUSH) if rng.random() < 0.3 else b"")
        return b"".join([*parts, stream.compress(body[10_000:]), stream.flush()])


class GrpcMaker(ThriftMaker):
    """Makes messages of the Open Inference Protocol over gRPC, as grpc hands them over: two thirds with gzip."""

    def mutant(self, seed: bytes, other: bytes) -> bytes:
        rng, data = self.rng, super().mutant(seed, other)
        if rng.random() < 0.3:
            return data
        packed = gzip.compress(data, rng.randint(0, 9))
        return super().mutant(packed, packed) if rng.random() < 0.3 else packed

    def message(self) -> bytes:
        from torchpipe_py.methods.rpc.messages import message

        rng = self.rng
        if rng.random() < 0.5:
            usual = {"name": "data", "datatype": "UINT8", "shape": [1, 500]}
            asked = message("inference.ModelInferRequest")(inputs=[usual], raw_input_contents=[bytes(500)])
            asked.model_name = "pipe"
            return bytes(asked.SerializeToString())
        datatype = rng.choice(("BYTES", "FP32", "UINT8", "INT64", "BF16", "BOOL", "x"))
        shape = rng.choice(([1], [1, 3], [2, 2], [0], [300, 2], [2**40, 2**40], [-1], [1] * 40))
        given: dict[str, Any] = {"name": rng.choice(("data", "x", "")), "datatype": datatype, "shape": shape}
        raw = []
        if rng.random() < 0.7:
            raw = [rng.choice((b"\3\0\0\0abc", bytes(12), bytes(2**14), b"\xff\xff\xff\xff", b""))]
        else:
            field, element = rng.choice((("bytes_contents", b"a"), ("fp32_contents", 1.5), ("int64_contents", -1)))
            given["contents"] = {field: [element] * rng.choice((0, 1, 3, 4, 5000))}
        parameters: dict[str, Any] = {}
        for _ in range(rng.choice((0, 0, 1, 3))):
            name = rng.choice(
                ("deadline_ms", "priority", "node_name", "my", "sequence_id", "classification", "binary_data")
            )
            value = rng.choice(
                ({"int64_param": 1}, {"string_param": "é" * 9}, {"double_param": 1e308}, {"bool_param": True})
            )
            parameters[name] = value
        outputs = [{"name": rng.choice(("result", "data", "none"))}] * rng.choice((0, 0, 1, 2))
        asked = message("inference.ModelInferRequest")(
            model_name=rng.choice(("pipe", "pipe", "pipe", "x" * 3000)), id=rng.choice(("", "a")),
            inputs=[given] * rng.choice((1, 1, 1, 0, 2)), raw_input_contents=raw, parameters=parameters,
            outputs=outputs,
        )  # fmt: skip
        data: bytes = asked.SerializeToString()
        return data + bytes(rng.choice((0,) * 20 + (2**21,)))
