"""Mutated Thrift messages through the reader, the codec and the handler; ``python tests/fuzz/wire.py --seconds 60``.

A message is made as a tree of fields, of every method of the IDL and with wrong types and sizes among them, written in
one of the protocols, then changed byte by byte. Of each mutant is checked: it raises what is declared and nothing else;
each call is answered once; an error is short; it takes less than 50 ms; cut in pieces, the stream gives the same
messages. Of each process: its memory does not grow.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import logging
import multiprocessing
import random
import struct
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from torchpipe_server.serving.service import ThriftService
from torchpipe_server.wire.protocol import ONEWAY, Limits, Message, ProtocolError
from torchpipe_server.worker.handler import InferenceHandler

from torchpipe_py.errors import DecodeError, UnknownNode
from torchpipe_py.idl import load_idl
from torchpipe_py.runtime.deadlines import Deadlines

SEEDS = Path(__file__).parent / "seeds"
LIMITS = Limits(message_bytes=2**20, string_bytes=2**20, text_bytes=2**12, items=2**12)
MOST_SECONDS = 0.05
MOST_GROWTH = 8 * 2**20
POOL = 400

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


class Maker:
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


def mutate(rng: random.Random, seed: bytes, other: bytes) -> bytes:
    """Up to four changes: bits, types, sizes, cuts, repetitions, a piece of another message."""
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


class EchoPipe:
    """Answers at once: what it got, an error, or nothing."""

    def expected_wait(self) -> float:
        return 0.0

    def stats(self) -> dict[str, Any]:
        return {"max_inflight": 1000, "nodes": {"node": {"instances": 1, "max": 1}}}

    def dispatch(self, data: dict[str, Any], on_done: Any, timeout: float | None = None) -> None:
        if not isinstance(data.get("node_name", ""), str) or data.get("node_name"):
            raise UnknownNode("no such root")
        data["result"] = data.get("data")
        on_done(data, DecodeError("no image") if data["result"] == b"" else None)


@dataclass
class Tally:
    """What was done and found; ``findings`` are (what is wrong, the bytes)."""

    mutants: int = 0
    calls: int = 0
    slowest: float = 0.0
    findings: list[tuple[str, bytes]] = field(default_factory=list)


class Judge:
    """Runs a mutant and says what is wrong with it; empty where nothing is."""

    def __init__(self) -> None:
        methods = InferenceHandler(EchoPipe(), load_idl(), Deadlines(EchoPipe(), 1000.0)).methods  # type: ignore[arg-type]
        self.service = ThriftService(methods, LIMITS)
        self.calls = 0
        self.seconds = 0.0

    def wrong(self, data: bytes, rng: random.Random) -> str:
        began = time.process_time()
        messages, ended = self.read([data])
        replies = "".join(self.answer(message) for message in messages)
        self.seconds = time.process_time() - began
        if replies:
            return replies
        pieces, at = [], 0
        step = rng.choice((1, 5)) if len(data) < 300 and rng.random() < 0.1 else len(data) // 2
        while at < len(data):
            size = 1 + int(rng.random() * step)
            pieces.append(data[at : at + size])
            at += size
        again, ended_again = self.read(pieces)
        if [content(one) for one in messages] != [content(one) for one in again]:
            return "in pieces there are other messages"
        return "" if ended == ended_again else f"in pieces it ends with {ended_again!r}, in one with {ended!r}"

    def read(self, pieces: list[bytes]) -> tuple[list[Message], str]:
        reader, messages = self.service.reader(), []
        try:
            for piece in pieces:
                messages += reader.feed(piece)
                while reader.is_paused:
                    messages += reader.feed(b"")
        except ProtocolError as error:
            return messages, error.kind
        return messages, "unfinished" if reader.pending_bytes else ""

    def answer(self, message: Message) -> str:
        self.calls += 1
        results: list[Any] = []
        try:
            method, args = self.service.decode(message)
            method.start(args, results.append)
        except Exception as error:
            results.append(error)
        if len(results) != 1:
            return f"{message.name} has {len(results)} answers"
        reply, _, outcome = self.service.reply(message, results[0])
        if outcome == "internal":
            return f"{message.name}: a defect, {results[0]!r}"[:300]
        if (message.type == ONEWAY) != (not reply):
            return f"{message.name} of type {message.type} has a reply of {len(reply)} bytes"
        if outcome != "ok" and message.name != "infer_many" and len(reply) > 2600:
            return f"{message.name}: an error of {len(reply)} bytes"
        return ""


def content(message: Message) -> tuple[Any, ...]:
    return (*message[:4], bytes(message.buffer[message.start : message.end]))


def kept_bytes(pool: list[bytes]) -> int:
    """Memory of this process, less the messages that are mutated and what the allocator only keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss) - sum(map(len, pool))


def fuzz(seed: int, mutants: int, seconds: float) -> Tally:
    """Until so many mutants or so many seconds are through."""
    logging.disable(logging.CRITICAL)
    rng, judge, tally = random.Random(seed), Judge(), Tally()
    maker = Maker(rng)
    pool = [maker.message() for _ in range(POOL)]
    until, kept_first = time.monotonic() + seconds, 0
    while tally.mutants < mutants and not (tally.mutants % 64 == 0 and time.monotonic() > until):
        tally.mutants += 1
        if tally.mutants % 8 == 0:
            pool[int(rng.random() * POOL)] = maker.message()
        data = mutate(rng, pool[int(rng.random() * POOL)], pool[int(rng.random() * POOL)])
        problem = judge.wrong(data, rng)
        if not problem and judge.seconds > MOST_SECONDS:
            times = [judge.seconds]
            for _ in range(4):  # a busy machine or the collector may have been it
                judge.wrong(data, rng)
                times.append(judge.seconds)
            judge.seconds = min(times)
            problem = f"{judge.seconds:.3f} s" if judge.seconds > MOST_SECONDS else ""
        tally.slowest = max(tally.slowest, judge.seconds)
        if problem and len(tally.findings) < 20:
            tally.findings.append((problem, data))
        if tally.mutants == 20_000:
            kept_first = kept_bytes(pool)
        elif kept_first and tally.mutants % 50_000 == 0 and kept_bytes(pool) > kept_first + MOST_GROWTH:
            tally.findings.append((f"the process grew by more than {MOST_GROWTH} bytes", b""))
            break
    tally.calls = judge.calls
    logging.disable(logging.NOTSET)
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--mutants", type=int, default=100_000, help="of all jobs together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    began = time.monotonic()
    share = -(-options.mutants // options.jobs)
    work = [(options.seed * 1000 + index, share, options.seconds) for index in range(options.jobs)]
    with multiprocessing.Pool(options.jobs) as processes:
        tallies = processes.starmap(fuzz, work)
    spent = time.monotonic() - began
    mutants, calls = sum(one.mutants for one in tallies), sum(one.calls for one in tallies)
    slowest = 1000 * max(one.slowest for one in tallies)
    speed = f"{spent:.0f} s, {mutants / spent:.0f} a second, the slowest took {slowest:.1f} ms"
    print(f"{mutants} mutants, {calls} calls answered, {speed}")
    findings = [finding for one in tallies for finding in one.findings]
    for index, (problem, data) in enumerate(findings):
        path = Path(f"wire_finding_{options.seed}_{index}.bin")
        path.write_bytes(data)
        print(f"{path}: {problem}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
