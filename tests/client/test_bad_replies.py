"""Answers of a server that means harm: each ends in ``BadReply``, and soon."""

from __future__ import annotations

import struct

import pytest
from torchpipe_client.contract import decode_reply
from torchpipe_client.errors import BadReply

VOID, STRING, STRUCT, MAP, LIST = 1, 11, 12, 13, 15


def reply(fields: bytes) -> bytes:
    return struct.pack(">HHI", 0x8001, 2, 5) + b"infer" + struct.pack(">i", 1) + fields


def field(kind: int, number: int = 9) -> bytes:
    return struct.pack(">bh", kind, number)


def listed(kind: int, size: int) -> bytes:
    return struct.pack(">bi", kind, size)


WRONG = {
    "elements of no bytes": (field(LIST) + listed(VOID, 2**22) + b"\0", "more than 262144 values"),
    "a few of them": (field(LIST) + listed(VOID, 2) + b"\0", "a value of type 1"),
    "pairs of no bytes": (field(MAP) + struct.pack(">bbi", VOID, VOID, 2**22) + b"\0", "more than 262144 values"),
    "empty structs": (field(LIST) + listed(STRUCT, 300_000) + bytes(300_000) + b"\0", "more than 262144 values"),
    "many fields": ((field(2) + b"\0") * 300_000 + b"\0", "more than 262144 values"),
    "a negative size": (field(LIST) + listed(STRUCT, -1) + b"\0", "a size of -1"),
    "a negative length": (field(STRING) + struct.pack(">i", -1) + b"\0", "a size of -1"),
    "deep": (field(STRUCT) * 100 + bytes(101), "depth"),
    "deeper": (field(STRUCT) * 10_000 + bytes(10_001), "recursion"),
    "a type that is none": (field(99) + b"\0", "a value of type 99"),
    "cut off": (field(LIST) + listed(STRUCT, 9), "index out of range"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_says_too_much_is_not_decoded(name: str):
    fields, said = WRONG[name]
    with pytest.raises(BadReply, match=said):
        decode_reply("infer", 1, reply(fields))
