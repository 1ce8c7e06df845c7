"""Messages as Apache Thrift writes them, messages of the contract with what does not belong there, and mutants."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from thrift.protocol.TBinaryProtocol import TBinaryProtocol
from thrift.protocol.TCompactProtocol import TCompactProtocol
from thrift.Thrift import TType
from thrift.transport.TTransport import TFramedTransport, TMemoryBuffer
from torchpipe_server.wire.thrift import CALL, ONEWAY, REPLY, Framing

from torchpipe_py.idl import load_idl

IDL = load_idl()
FRAMINGS = [Framing(framed, protocol) for framed in (False, True) for protocol in ("binary", "binary_old", "compact")]

Value = tuple[int, Any]
"""A type, and what it holds: of a struct number -> value, of a list (type, contents), of a map (types, dict)."""

_NAMES = {
    TType.BOOL: "Bool", TType.BYTE: "Byte", TType.I16: "I16", TType.I32: "I32", TType.I64: "I64",
    TType.DOUBLE: "Double", TType.LIST: "List", TType.SET: "Set", TType.MAP: "Map",
}  # fmt: skip
_BITS = {TType.BYTE: 8, TType.I16: 16, TType.I32: 32, TType.I64: 64}
_EDGES = (0, 1, -1, 2, 32, 33, 127, 128, 255, 2**15, 2**31 - 1, -(2**31), 2**31, 2**63 - 1, -(2**63))
_TEXTS = (
    b"", b"u", b"data", b"result", b"node_name", b"uint8", b"float32", b"\xff\xfe", "é😀".encode(), b"x" * 2000,
    b"/etc/a/b",
)  # fmt: skip
_TOKENS = (
    *(bytes([byte]) for byte in (0, 1, 8, 0x0B, 0x0C, 0x0D, 0x0F, 0x18, 0x7F, 0x80, 0x82, 0xF0, 0xFF)),
    *((edge & 0xFFFFFFFF).to_bytes(4, "big") for edge in _EDGES),
)


def apache_protocol(framing: Framing, transport: Any) -> Any:
    if framing.protocol == "compact":
        return TCompactProtocol(transport)
    return TBinaryProtocol(transport, strictRead=False, strictWrite=framing.protocol == "binary")


def write_value(protocol: Any, ttype: int, value: Any) -> None:
    name = "Binary" if isinstance(value, bytes) else _NAMES.get(ttype, "String")
    if ttype == TType.STRUCT:
        protocol.writeStructBegin("")
        for number, (field_type, field) in value.items():
            protocol.writeFieldBegin("", field_type, number)
            write_value(protocol, field_type, field)
            protocol.writeFieldEnd()
        protocol.writeFieldStop()
        protocol.writeStructEnd()
    elif ttype in (TType.LIST, TType.SET, TType.MAP):
        *types, held = value
        getattr(protocol, f"write{name}Begin")(*types, len(held))
        for element in held:
            write_value(protocol, types[0], element)
            if ttype == TType.MAP:
                write_value(protocol, types[1], held[element])
        getattr(protocol, f"write{name}End")()
    else:
        getattr(protocol, f"write{name}")(value)


def apache_message(framing: Framing, fields: Any, name: str = "infer_batch", kind: int = CALL, seqid: int = 7) -> bytes:
    memory = TMemoryBuffer()
    transport = TFramedTransport(memory) if framing.framed else memory
    protocol = apache_protocol(framing, transport)
    protocol.writeMessageBegin(name, kind, seqid)
    write_value(protocol, TType.STRUCT, fields)
    protocol.writeMessageEnd()
    transport.flush()
    return bytes(memory.getvalue())


class ThriftMaker:
    """Makes messages of the IDL, now and then with what does not belong there."""

    tokens: Sequence[bytes] = _TOKENS

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def message(self) -> bytes:
        rng = self.rng
        method = rng.choice(("ping", "infer_batch", "infer_many", *["infer"] * 3, "x" * rng.randrange(1, 300)))
        args = getattr(IDL.InferenceService, f"{method}_args", IDL.InferenceService.ping_args)
        kind = rng.choice((*[CALL] * 5, ONEWAY, REPLY))
        seqid = self.number(TType.I32)[1]
        return apache_message(rng.choice(FRAMINGS), self.of(TType.STRUCT, args)[1], method, kind, seqid)

    def of(self, ttype: int, inner: Any = None) -> Value:
        """A value of the type, as the IDL declares it: ``inner`` is a class, or the type of what it contains."""
        rng = self.rng
        if ttype == TType.STRUCT:
            spec = inner.thrift_spec
            numbers = [rng.choice(list(spec))] if inner is IDL.Value else list(spec)
            wanted = [number for number in numbers if inner is IDL.Value or spec[number][-1] or rng.random() < 0.5]
            return ttype, self.odd({number: self.of(spec[number][0], *spec[number][2:-1]) for number in wanted})
        if ttype == TType.LIST:
            kind, *more = inner if isinstance(inner, tuple) else (inner,)
            count = rng.choice((0, 1, 3)) if rng.random() < 0.97 else 400
            return ttype, (_wire(kind), [self.of(kind, *more)[1] for _ in range(count)])
        if ttype == TType.MAP:
            keys = [b"data", *rng.sample(_TEXTS, rng.choice((0, 0, 1, 4)))]
            return ttype, (TType.STRING, inner[1][0], {key: self.of(*inner[1])[1] for key in keys})
        return self.number(ttype) if ttype in _NAMES else (TType.STRING, rng.choice(_TEXTS))

    def odd(self, fields: dict[int, Value]) -> dict[int, Value]:
        """Sometimes a field too many, one too few, or one of another type."""
        rng = self.rng
        choice = rng.randrange(12)
        if choice == 0:
            fields[rng.choice((0, 3, 9, 99, -1, 32767))] = self.any()
        elif choice == 1 and fields:
            del fields[rng.choice(list(fields))]
        elif choice == 2 and fields:
            fields[rng.choice(list(fields))] = self.any()
        return fields

    def any(self, depth: int = 0) -> Value:
        rng = self.rng
        kinds = [TType.STRING, *_NAMES] if depth <= 3 else [TType.STRING, TType.BOOL, TType.I16, *_BITS, TType.DOUBLE]
        kind = rng.choice([*kinds, TType.STRUCT] if depth <= 3 else kinds)
        count = rng.choice((0, 1, 2, 20))
        if kind == TType.STRUCT:
            return kind, {rng.randrange(1, 40): self.any(depth + 1) for _ in range(min(count, 3))}
        if kind in (TType.LIST, TType.SET):
            inner = self.any(depth + 1)
            return kind, (inner[0], [inner[1]] * count)
        if kind == TType.MAP:
            inner = self.any(depth + 1)
            return kind, (TType.STRING, inner[0], {rng.choice(_TEXTS): inner[1] for _ in range(count)})
        return self.of(kind)

    def number(self, kind: int) -> Value:
        value = self.rng.choice(_EDGES)
        if kind == TType.DOUBLE:
            return kind, self.rng.choice((0.0, float("nan"), float("inf"), 1e308, value))
        half = 1 << _BITS.get(kind, 64) - 1
        return kind, bool(value & 1) if kind == TType.BOOL else (value + half) % (2 * half) - half

    def mutant(self, seed: bytes, other: bytes) -> bytes:
        """Up to four changes: bits, tokens, numbers, cuts, repetitions, a piece of another message, all of it."""
        rng, data = self.rng, bytearray(seed)
        for _ in range(int(rng.random() * 5)):
            at = int(rng.random() * (len(data) or 1))
            choice = int(rng.random() * 8)
            if choice == 0 and data:
                data[at] ^= 1 << int(rng.random() * 8)
            elif choice == 1:
                token = rng.choice(self.tokens)
                data[at : at + len(token)] = token
            elif choice == 2:
                data[at : at + int(rng.random() * 8)] = rng.choice(self.tokens)
            elif choice == 3:
                del data[at : at + int(rng.random() * 8)]
            elif choice == 4:
                data[at:at] = data[at : at + int(rng.random() * 40)] * 2
            elif choice == 5:
                start = int(rng.random() * len(other))
                data[at : at + 8] = other[start : start + int(rng.random() * 60)]
            elif choice == 6:
                numbers = list(re.finditer(rb"\d+", data))
                if numbers:
                    start, end = rng.choice(numbers).span()
                    more = int(data[start : min(end, start + 9)]) + 1
                    data[start:end] = b"%d" % rng.choice((0, 1, 2**31, 2**63, 2**64 + 1, more))
            else:
                data += other
        return bytes(data[: 2**16])


def _wire(ttype: int) -> int:
    """``binary`` has a type of its own in thriftpy2's specs."""
    return ttype if ttype in _NAMES or ttype == TType.STRUCT else TType.STRING
