"""The compressed data of a baseline JPEG, read code by code: slow, and strict."""

from __future__ import annotations

import re

from broken_jpegs import segments


class BrokenError(Exception):
    """The data is not what the header says."""


SPARE_BITS = 64  # libjpeg reads so many ahead, and does not miss them


def require_whole(data: bytes) -> None:
    """Raise ``BrokenError`` unless every code is in a table and the data ends with the last block (T.81, F.2.2)."""
    parts, rest = segments(data)
    huffman, interval, frame = {}, 0, b""
    for marker, content in parts:
        if marker == 0xC4:
            huffman.update(_tables(content))
        elif marker == 0xDD:
            interval = int.from_bytes(content, "big")
        elif marker == 0xC0:
            frame = content
    scan = parts[-1][1]
    height, width = int.from_bytes(frame[1:3], "big"), int.from_bytes(frame[3:5], "big")
    samplings = [(frame[start] >> 4, frame[start] & 15) for start in range(7, len(frame), 3)]
    across, down = (8 * max(factors) for factors in zip(*samplings, strict=True))
    mcus = -(-width // across) * -(-height // down)
    counts = [h * v if len(samplings) > 1 else 1 for h, v in samplings]
    tables = [(huffman[scan[2 + 2 * n] >> 4], huffman[0x10 | scan[2 + 2 * n] & 15]) for n in range(scan[0])]
    pieces, end = [], 0
    for found in re.finditer(rb"\xff([^\x00])", rest):
        pieces.append(rest[end : found.start()].replace(b"\xff\x00", b"\xff"))
        end = found.end()
        marker = found[1][0]
        if marker == 0xD9 or end == len(rest) - 2:
            break
        if marker != 0xD0 + (len(pieces) - 1) % 8:
            raise BrokenError(f"marker FF{marker:02X}")
    each = interval or mcus
    if len(pieces) != -(-mcus // each):
        raise BrokenError(f"{len(pieces)} pieces for {mcus} blocks")
    for number, piece in enumerate(pieces):
        bits = "".join(f"{byte:08b}" for byte in piece)
        position = 0
        for _ in range(min(each, mcus - number * each)):
            for count, (dc, ac) in zip(counts, tables, strict=True):
                for _ in range(count):
                    position = _block(bits, position, dc, ac)
        if not 0 <= len(bits) - position < SPARE_BITS:
            raise BrokenError(f"{len(bits) - position} bits are left")


def _block(bits: str, position: int, dc: dict[str, int], ac: dict[str, int]) -> int:
    symbol, position = _symbol(bits, position, dc)
    position += symbol
    coefficient = 1
    while coefficient < 64:
        symbol, position = _symbol(bits, position, ac)
        if symbol & 15 == 0 and symbol != 0xF0:
            break
        coefficient += (symbol >> 4) + 1
        position += symbol & 15
    return position


def _symbol(bits: str, position: int, table: dict[str, int]) -> tuple[int, int]:
    for length in range(1, 17):
        code = bits[position : position + length]
        if len(code) == length and code in table:
            return table[code], position + length
    raise BrokenError(f"no code at bit {position}")


def _tables(content: bytes) -> dict[int, dict[str, int]]:
    found = {}
    while content:
        code, symbols, table = 0, iter(content[17:]), {}
        for length in range(1, 17):
            for _ in range(content[length]):
                table[f"{code:0{length}b}"] = next(symbols)
                code += 1
            code *= 2
        found[content[0]] = table
        content = content[17 + sum(content[1:17]) :]
    return found
