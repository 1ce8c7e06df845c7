"""A reader of large JSON that lets other threads run.

Python's reader keeps the GIL until a body is read: 0.1 s for 12 MB. This one reads long texts and long lists of numbers
in small pieces, the numbers only when their type is known, so that they take no object each. It decodes
each text by itself and leaves other bytes as they are, since a single emoji would make the whole body as wide.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from json.decoder import JSONDecodeError, scanstring  # type: ignore[attr-defined]
from time import perf_counter, sleep
from typing import Any

from torchpipe_py.wire.errors import RequestTooLargeError

LONG = 2**7
"""Characters of a list, without texts or lists in it, that is kept as ``Numbers`` if it has ``MANY`` commas."""
MANY = 2**5
"""No shape has as many sizes, however it is indented."""
PIECE = 2**14
"""Characters of it that are read without a pause."""
WORD = 2**13
"""Characters of a single number, twice what Python converts to an integer."""
MOST_SINGLE_VALUES = 2**18
"""Limit of one body's values that are not in ``Numbers``, members' names included: each becomes an object."""
TURN_SECONDS, REST_SECONDS = 0.001, 0.0001
"""How long a reader keeps other threads waiting, and how long it sleeps then."""
_FIRST_PIECE, _LONGEST_PIECE = 2**8, 2**14  # characters of a text with escapes: most are short, so pieces grow
_ESCAPES = 12  # characters of the longest escape: a pair of surrogates
_LONGEST_CHARACTER = 4  # bytes
_CONTINUATION = frozenset(map(chr, range(0x80, 0xC0)))  # bytes of a character after its first
_PAIR = re.compile(r"\\u[dD][89abAB]..\\u[dD][c-fC-F]")
_SPACE = re.compile(r"[ \t\n\r]*")
_WORD = re.compile(r"[^][{}\",: \t\n\r]*")


class Turns:
    """Has a thread that computes for long let others run."""

    def __init__(self) -> None:
        self._since = perf_counter()

    def pause(self) -> None:
        """Sleep for a moment if the last time was a while ago.

        NOTE: to release the GIL is not enough. NumPy does so for a few microseconds, in which no other thread wakes up,
        and each time the others' wait, after which Python interrupts this thread, begins anew.
        """
        if perf_counter() > self._since + TURN_SECONDS:
            sleep(REST_SECONDS)
            self._since = perf_counter()


class Numbers:
    """A long list of numbers or booleans, as a part of a text. What is wrong in it is found when it is read."""

    __slots__ = ("_at", "_end", "_text")

    def __init__(self, text: str, at: int, end: int) -> None:
        self._text, self._at, self._end = text, at, end

    def __repr__(self) -> str:
        return f"a list of {self.most} values"

    @property
    def most(self) -> int:
        """The number of elements; of malformed JSON an upper bound."""
        text, end = self._text, self._end
        return 1 + sum(text.count(",", start, min(start + PIECE, end)) for start in range(self._at, end, PIECE))

    def pieces(self) -> Iterator[list[Any]]:
        """Its elements, a few thousand at a time. Raises ``JSONDecodeError`` (a ``ValueError``)."""
        import msgspec

        text, start, comma, turns = self._text, self._at, self._at, Turns()
        while comma >= 0:
            comma = text.find(",", start + PIECE, self._end)
            end = comma if comma >= 0 else self._end
            if end - start > PIECE + WORD:
                self._check_last(start, end)
            piece = f"[{text[start:end]}]"
            try:
                elements = msgspec.json.decode(piece)
            except msgspec.DecodeError:  # NOTE: it refuses NaN, which Python's reader takes
                try:
                    elements = json.loads(piece)
                except JSONDecodeError as error:
                    raise JSONDecodeError(error.msg, "", start + error.pos - 1) from None
            if not elements and (start > self._at or comma >= 0):
                raise JSONDecodeError("Expecting value", "", start)
            yield elements
            turns.pause()
            start = end + 1

    def _check_last(self, start: int, end: int) -> None:
        """Raise ``JSONDecodeError`` if the last element of these is so long that to read it takes long."""
        last = max(start, self._text.rfind(",", start, end) + 1)
        if len(self._text[last:end].strip()) > WORD:
            raise JSONDecodeError(f"A number of more than {WORD} characters", "", last)

    def to_list(self) -> list[Any]:
        """All elements. Raises ``JSONDecodeError``."""
        return [element for piece in self.pieces() for element in piece]


def read_json(body: bytes) -> Any:
    """The value of JSON in UTF-8, in which long lists of numbers are ``Numbers``.

    Raises ``JSONDecodeError``, whose ``pos`` is a byte, ``RecursionError``, and ``RequestTooLargeError`` for too many
    values.
    """
    text = body.decode("latin-1")
    reader = _Reader(text)
    value, at = reader.value(_space(text, 0))
    if _space(text, at) != len(text):
        raise JSONDecodeError("Extra data", "", at)
    return value


class _Reader:
    """Each method returns what begins at ``at``, and where it ends. A character of ``text`` is a byte of UTF-8."""

    def __init__(self, text: str) -> None:
        self._text, self._left = text, MOST_SINGLE_VALUES

    def value(self, at: int) -> tuple[Any, int]:
        text = self._text
        start = text[at : at + 1]
        if start == "{":
            return self._object(at + 1)
        if start == "[":
            return self._list(at + 1)
        self._count()
        if start == '"':
            return self._string(at + 1)
        end = _WORD.match(text, at, at + WORD).end()  # type: ignore[union-attr]
        try:
            return json.loads(text[at:end]), end
        except JSONDecodeError as error:
            raise JSONDecodeError(error.msg, "", at + error.pos) from None

    def _string(self, at: int) -> tuple[str, int]:
        text, size, parts = self._text, _FIRST_PIECE, []
        quote = text.find('"', at, at + _LONGEST_PIECE)
        if quote == at or (quote > at and text[quote - 1] != "\\"):  # then it ends there
            return _scan(text, at, quote + 1)
        while at + size < len(text):
            end = _whole_characters(text, at, _whole_escapes(text, at, at + size))
            part, read = _scan(text, at, end, '"')
            parts.append(part)
            if read <= end:  # its own end, not the quote after the piece
                return "".join(parts), read
            at, size = end, min(2 * size, _LONGEST_PIECE)
        part, at = _scan(text, at, len(text))
        return "".join([*parts, part]), at

    def _object(self, at: int) -> tuple[dict[str, Any], int]:
        text = self._text
        members: dict[str, Any] = {}
        at = _space(text, at)
        if text[at : at + 1] == "}":
            return members, at + 1
        while True:
            if text[at : at + 1] != '"':
                raise JSONDecodeError("Expecting property name enclosed in double quotes", "", at)
            self._count()
            name, at = self._string(at + 1)
            at = _space(text, at)
            if text[at : at + 1] != ":":
                raise JSONDecodeError("Expecting ':' delimiter", "", at)
            members[name], at = self.value(_space(text, at + 1))
            at = _space(text, at)
            if text[at : at + 1] == "}":
                return members, at + 1
            if text[at : at + 1] != ",":
                raise JSONDecodeError("Expecting ',' delimiter", "", at)
            at = _space(text, at + 1)

    def _list(self, at: int) -> tuple[list[Any] | Numbers, int]:
        text = self._text
        elements: list[Any] = []
        end = self._flat_end(at)
        if end is not None:
            if end - at > LONG and text.count(",", at, end) >= MANY:
                return Numbers(text, at, end), end + 1
            try:
                return json.loads(text[at - 1 : end + 1]), end + 1
            except JSONDecodeError as error:
                raise JSONDecodeError(error.msg, "", at - 1 + error.pos) from None
        at = _space(text, at)
        if text[at : at + 1] == "]":
            return elements, at + 1
        while True:
            element, at = self.value(at)
            elements.append(element)
            at = _space(text, at)
            if text[at : at + 1] == "]":
                return elements, at + 1
            if text[at : at + 1] != ",":
                raise JSONDecodeError("Expecting ',' delimiter", "", at)
            at = _space(text, at + 1)

    def _flat_end(self, at: int) -> int | None:
        """Where the list ends, if it holds no texts, lists or objects."""
        text = self._text
        end = text.find("]", at, at + LONG)
        near = end if end >= 0 else at + LONG
        # NOTE: the first characters first, or each of many lists would search through all of the text.
        if any(text.find(start, at, near) >= 0 for start in '"[{'):
            return None
        if end < 0:
            end = text.find("]", near)
            if end < 0 or any(text.find(start, near, end) >= 0 for start in '"[{'):
                return None
        return end

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise RequestTooLargeError(f"JSON of more than {MOST_SINGLE_VALUES} texts and single numbers")


def _space(text: str, at: int) -> int:
    """Where the blanks that begin at ``at`` end."""
    return _SPACE.match(text, at).end()  # type: ignore[union-attr]


def _scan(text: str, at: int, end: int, quote: str = "") -> tuple[str, int]:
    """The text that begins at ``at``, of ``text`` up to ``end`` with ``quote`` after it, and where it ends."""
    piece = text[at:end] + quote
    if piece.isascii():
        try:
            part, read = scanstring(piece, 0)
        except JSONDecodeError as error:
            raise JSONDecodeError(error.msg, "", at + error.pos) from None
        return part, at + read
    try:
        decoded = piece.encode("latin-1").decode("utf-8", "surrogatepass")
        part, read = scanstring(decoded, 0)
    except UnicodeDecodeError as error:
        raise JSONDecodeError(f"Not UTF-8: {error.reason}", "", at + error.start) from None
    except JSONDecodeError as error:
        # NOTE: -1 stands for the quote before the text.
        before = _bytes_of(decoded[: error.pos]) if error.pos > 0 else error.pos
        raise JSONDecodeError(error.msg, "", at + before) from None
    return part, at + _bytes_of(decoded[:read])


def _bytes_of(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _whole_characters(text: str, at: int, end: int) -> int:
    """The last place up to ``end`` that no character of UTF-8 crosses; ``end`` if this is not UTF-8."""
    for place in range(end, max(at, end - _LONGEST_CHARACTER), -1):
        if text[place] not in _CONTINUATION:
            return place
    return end


def _whole_escapes(text: str, at: int, end: int) -> int:
    """The last place up to ``end`` that no escape or pair of surrogates crosses, in a text that goes on at ``at``."""
    slash = text.find("\\", max(at, end - _ESCAPES), end)
    if slash < 0:
        return end
    slash -= _backslashes(text, at, slash) % 2  # of two, the second one begins no escape
    pair = slash - _ESCAPES // 2
    is_pair = pair > at and _PAIR.match(text, pair) is not None and not _backslashes(text, at, pair) % 2
    return pair if is_pair else slash


def _backslashes(text: str, at: int, end: int) -> int:
    """The number of backslashes right before ``end``."""
    before = text[at:end]
    return len(before) - len(before.rstrip("\\"))
