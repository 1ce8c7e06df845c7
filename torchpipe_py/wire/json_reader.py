"""A reader of large JSON that lets other threads run.

Python's reader keeps the GIL until a body is read: 0.1 s for 12 MB. This one reads small pieces of long lists of
numbers, and only when their type is known, so that they take no object for each number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from json.decoder import JSONDecodeError, scanstring  # type: ignore[attr-defined]
from typing import Any

from torchpipe_py.wire.errors import RequestTooLargeError

LONG = 2**10
"""Characters of a list, without texts or lists in it, that is kept as ``Numbers``."""
PIECE = 2**15
"""Characters of it that are read without a pause."""
WORD = 2**13
"""Characters of a single number, twice what Python converts to an integer."""
MOST_SINGLE_VALUES = 2**18
"""Limit of one body's values that are not in ``Numbers``, members' names included: each becomes an object."""
_SPACE = re.compile(r"[ \t\n\r]*")
_WORD = re.compile(r"[^][{}\",: \t\n\r]*")


class Numbers:
    """A long list of numbers or booleans, as text. What is wrong in it is found when it is read."""

    __slots__ = ("_at", "_text")

    def __init__(self, text: str, at: int) -> None:
        self._text, self._at = text, at

    def __repr__(self) -> str:
        return f"a list of {self.most} values"

    @property
    def most(self) -> int:
        """The number of elements; of malformed JSON an upper bound."""
        return self._text.count(",") + 1

    def pieces(self) -> Iterator[list[Any]]:
        """Its elements, a few thousand at a time. Raises ``JSONDecodeError`` (a ``ValueError``)."""
        import msgspec

        text, start, end = self._text, 0, 0
        while end >= 0:
            end = text.find(",", start + PIECE)
            piece = f"[{text[start:end] if end >= 0 else text[start:]}]"
            try:
                elements = msgspec.json.decode(piece)
            except msgspec.DecodeError:  # NOTE: it refuses NaN, which Python's reader takes
                try:
                    elements = json.loads(piece)
                except JSONDecodeError as error:
                    raise JSONDecodeError(error.msg, "", self._at + start + error.pos - 1) from None
            if not elements and (start or end >= 0):
                raise JSONDecodeError("Expecting value", "", self._at + start)
            yield elements
            start = end + 1

    def to_list(self) -> list[Any]:
        """All elements. Raises ``JSONDecodeError``."""
        return [element for piece in self.pieces() for element in piece]


def read_json(text: str) -> Any:
    """The value, in which long lists of numbers are ``Numbers``.

    Raises ``JSONDecodeError``, ``RecursionError``, and ``RequestTooLargeError`` for too many values.
    """
    reader = _Reader(text)
    value, at = reader.value(_space(text, 0))
    if _space(text, at) != len(text):
        raise JSONDecodeError("Extra data", "", at)
    return value


class _Reader:
    """Each method returns what begins at ``at``, and where it ends."""

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
            return scanstring(text, at + 1)  # type: ignore[no-any-return]
        end = _WORD.match(text, at, at + WORD).end()  # type: ignore[union-attr]
        try:
            return json.loads(text[at:end]), end
        except JSONDecodeError as error:
            raise JSONDecodeError(error.msg, "", at + error.pos) from None

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
            name, at = scanstring(text, at + 1)
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
            if end - at > LONG:
                return Numbers(text[at:end], at), end + 1
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
