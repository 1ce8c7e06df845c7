"""Messages of the Thrift contract, and mutants of them."""

from __future__ import annotations

import random
import struct
from typing import Any

# A value is (type of thrift's binary protocol, what it holds): a struct {number: value}, a list (type, [values]), a map
# (type, type, [(key, value)]), bytes or a number.
BOOL, BYTE, DOUBLE, I16, I32, I64, STRING, STRUCT, MAP, SET, LIST = 2, 3, 4, 6, 8, 10, 11, 12, 13, 14, 15
_NUMBERS = {BOOL: ">b", BYTE: ">b", DOUBLE: ">d", I16: ">h", I32: ">i", I64: ">q"}
_COMPACT = {BOOL: 1, BYTE: 3, DOUBLE: 7, I16: 4, I32: 5, I64: 6, STRING: 8, STRUCT: 12, MAP: 11, SET: 10, LIST: 9}
_EDGES = (0, 1, -1, 2, 32, 33, 127, 128, 255, 2**15, 2**31 - 1, -(2**31), 2**31, 2**63 - 1, -(2**63))
_TEXTS = (
    b"",
    b"u",
    b"data",
    b"result",
    b"node_name",
    b"uint8",
    b"float32",
    b"\xff\xfe",
    "é😀".encode(),
    b"x" * 2000,
    b"/etc/a/b",
)
_BYTES = (0, 1, 8, 0x0B, 0x0C, 0x0D, 0x0F, 0x18, 0x7F, 0x80, 0x82, 0xF0, 0xFF)
Value = tuple[int, Any]


class ThriftMaker:
    """Makes messages of the IDL, now and then with what does not belong there."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def message(self) -> bytes:
        rng = self.rng
        method = rng.choice(
            ("ping", "infer_batch", "infer_many", "infer", "infer", "infer", "x" * rng.randrange(1, 300))
        )
        fields: dict[int, Value] = {}
        if method == "infer_batch":
            fields = {1: self.params()}
        elif method == "infer_many":
            fields = {
                1: (LIST, (STRUCT, [self.params()[1] for _ in range(rng.choice((0, 1, 3, 300)))])),
                2: self.number(I32),
            }
        elif method == "infer":
            fields = {1: self.request()}
        kind = rng.choice((1, 1, 1, 1, 1, 4, 2))
        return write_message(method, kind, rng.choice(_EDGES), (STRUCT, self.odd(fields)), rng.randrange(6))

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
        kind = rng.choice(
            (BOOL, BYTE, DOUBLE, I16, I32, I64, STRING) if depth > 3 else (BOOL, I64, STRING, STRUCT, MAP, SET, LIST)
        )
        if kind in _NUMBERS:
            return self.number(kind)
        if kind == STRING:
            return self.text()
        count = rng.choice((0, 1, 2, 20))
        if kind == STRUCT:
            return kind, {rng.randrange(1, 40): self.any(depth + 1) for _ in range(min(count, 3))}
        inner = self.any(depth + 1)
        if kind == MAP:
            return kind, (STRING, inner[0], [(self.text()[1], inner[1])] * count)
        return kind, (inner[0], [inner[1]] * count)

    def number(self, kind: int) -> Value:
        value = self.rng.choice(_EDGES)
        if kind == DOUBLE:
            return kind, self.rng.choice((0.0, float("nan"), float("inf"), 1e308, value))
        bits = {BOOL: 1, BYTE: 8, I16: 16, I32: 32, I64: 64}[kind]
        return kind, value & 1 if bits == 1 else ((value + (1 << bits - 1)) % (1 << bits)) - (1 << bits - 1)

    def text(self) -> Value:
        return STRING, self.rng.choice(_TEXTS)

    def params(self) -> Value:
        return STRUCT, self.odd({1: self.text(), 2: self.text()})

    def tensor(self) -> Value:
        rng = self.rng
        shape = [rng.choice((0, 1, 2, 3))] * rng.choice((0, 1, 2, 4, 33))
        size = 1
        for one in shape[:8]:
            size *= one
        if rng.random() < 0.3:
            shape = [rng.choice(_EDGES[-4:])] * rng.choice((1, 2, 33) if rng.random() < 0.97 else (1000,))
            shape = [((one + 2**63) % 2**64) - 2**63 for one in shape]
        dtype = rng.choice((b"uint8", b"bool", b"float32", b"object", b"int64", b""))
        return STRUCT, self.odd({1: (STRING, dtype), 2: (LIST, (I64, shape)), 3: (STRING, b"x" * min(size, 99))})

    def value(self) -> Value:
        rng = self.rng
        kind = rng.randrange(1, 7)
        held = {
            1: self.tensor,
            4: lambda: self.number(DOUBLE),
            5: lambda: self.number(I64),
            6: lambda: (LIST, (STRUCT, [self.tensor()[1] for _ in range(rng.choice((0, 1, 3)))])),
        }.get(kind, self.text)()
        return STRUCT, self.odd({kind: held})

    def request(self) -> Value:
        rng = self.rng
        inputs = [(b"data", self.value()[1])]
        inputs += [(rng.choice(_TEXTS), self.value()[1]) for _ in range(rng.choice((0, 0, 1, 4)))]
        fields: dict[int, Value] = {1: self.text(), 2: (MAP, (STRING, STRUCT, inputs))}
        if rng.random() < 0.3:
            fields[3] = self.text()
        if rng.random() < 0.5:
            fields[4] = self.number(I32)
        if rng.random() < 0.5:
            fields[5] = (
                LIST,
                (STRING, [rng.choice(_TEXTS) for _ in range(rng.choice((1, 2)) if rng.random() < 0.97 else 400)]),
            )
        return STRUCT, self.odd(fields)

    def mutant(self, seed: bytes, other: bytes) -> bytes:
        """Up to four changes: bits, types, sizes, cuts, repetitions, a piece of another message."""
        rng = self.rng
        data = bytearray(seed)
        for _ in range(int(rng.random() * 5)):
            at = int(rng.random() * (len(data) or 1))
            choice = int(rng.random() * 7)
            if choice == 0 and data:
                data[at] ^= 1 << int(rng.random() * 8)
            elif choice == 1 and data:
                data[at] = rng.choice(_BYTES)
            elif choice == 2:
                data[at : at + 4] = struct.pack(">I", rng.choice(_EDGES) & 0xFFFFFFFF)
            elif choice == 3:
                del data[at : at + int(rng.random() * 8)]
            elif choice == 4:
                data[at:at] = data[at : at + int(rng.random() * 40)] * 2
            elif choice == 5:
                start = int(rng.random() * len(other))
                data[at : at + 8] = other[start : start + int(rng.random() * 60)]
            else:
                data += other
        return bytes(data[: 2**16])


def write_message(method: str, kind: int, seqid: int, args: Value, form: int) -> bytes:
    """``form``: framed or not, of each protocol."""
    framed, protocol = divmod(form, 3)
    name, out = method.encode(), bytearray()
    seqid = ((seqid + 2**31) % 2**32) - 2**31
    if protocol == 0:
        out += struct.pack(">HHI", 0x8001, kind, len(name)) + name + struct.pack(">i", seqid)
    elif protocol == 1:
        out += struct.pack(">I", len(name)) + name + struct.pack(">bi", kind, seqid)
    else:
        out += bytes((0x82, kind << 5 | 1)) + varint(seqid & 0xFFFFFFFF) + varint(len(name)) + name
    (write_compact if protocol == 2 else write_binary)(out, args)
    return struct.pack(">I", len(out)) + out if framed else bytes(out)


def write_binary(out: bytearray, value: Value) -> None:
    kind, held = value
    if kind == STRUCT:
        for number, (ttype, inner) in held.items():
            out += struct.pack(">bh", ttype, number)
            write_binary(out, (ttype, inner))
        out.append(0)
    elif kind == MAP:
        key_type, value_type, items = held
        out += struct.pack(">bbi", key_type, value_type, len(items))
        for key, one in items:
            write_binary(out, (key_type, key))
            write_binary(out, (value_type, one))
    elif kind in (LIST, SET):
        out += struct.pack(">bi", held[0], len(held[1]))
        for one in held[1]:
            write_binary(out, (held[0], one))
    elif kind == STRING:
        out += struct.pack(">I", len(held)) + held
    else:
        out += struct.pack(_NUMBERS[kind], held)


def write_compact(out: bytearray, value: Value) -> None:
    kind, held = value
    if kind == STRUCT:
        for number, (ttype, inner) in held.items():
            wire = 2 if ttype == BOOL and not inner else _COMPACT[ttype]
            out.append(wire)
            out += varint(((number << 1) ^ (number >> 63)) & 0xFFFF)
            if ttype != BOOL:
                write_compact(out, (ttype, inner))
        out.append(0)
    elif kind == MAP:
        key_type, value_type, items = held
        out += varint(len(items))
        if items:
            out.append(_COMPACT[key_type] << 4 | _COMPACT[value_type])
        for key, one in items:
            write_compact(out, (key_type, key))
            write_compact(out, (value_type, one))
    elif kind in (LIST, SET):
        size = len(held[1])
        out += (
            bytes((size << 4 | _COMPACT[held[0]],)) if size < 15 else bytes((0xF0 | _COMPACT[held[0]],)) + varint(size)
        )
        for one in held[1]:
            write_compact(out, (held[0], one))
    elif kind == STRING:
        out += varint(len(held)) + held
    elif kind == DOUBLE:
        out += struct.pack("<d", held)
    elif kind in (BOOL, BYTE):
        out += struct.pack("b", held)
    else:
        out += varint(((held << 1) ^ (held >> 63)) & (2**64 - 1))


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)
