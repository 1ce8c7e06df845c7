"""The backend expression grammar, as a pure function from text to a tree.

::

    variants := call ("&" call)*                       at the top of a node only
    call     := ["(" filter ")"] NAME ["[" call ("," call)* "]"]
    filter   := NAME ["[" NAME "]"]                    only inside a list

A NAME is a letter or underscore followed by letters, digits, ``_``, ``.`` and ``-``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torchpipe_py.errors import ConfigError, quoted

MAX_DEPTH = 32

_TOKEN = re.compile(r"\s*(?:(?P<name>[A-Za-z_][A-Za-z0-9_.\-]*)|(?P<mark>[\[\](),&]))")


@dataclass(frozen=True)
class Call:
    """``(filter)name[args]``; ``filter`` is ``None`` if the expression has no filter there."""

    name: str
    args: tuple[Call, ...] = ()
    filter: str | None = None

    def __str__(self) -> str:
        prefix = f"({self.filter})" if self.filter else ""
        suffix = f"[{','.join(map(str, self.args))}]" if self.args else ""
        return f"{prefix}{self.name}{suffix}"

    def walk(self) -> Iterator[Call]:
        """This call and every call inside it, outermost first."""
        yield self
        for arg in self.args:
            yield from arg.walk()


def parse_expression(text: str) -> tuple[Call, ...]:
    """Parse ``text``; one tree for each part of an ``&`` composition (one part is the usual case).

    Raises ``ConfigError``, which quotes the text and gives the column, counted from 1.
    """
    return _Parser(text).variants()


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = self._tokenize(text)
        self.index = 0

    def _tokenize(self, text: str) -> list[tuple[str, int]]:
        tokens, position = [], 0
        end = len(text.rstrip())
        while position < end:
            match = _TOKEN.match(text, position)
            if match is None:
                column = position + len(text[position:]) - len(text[position:].lstrip())
                raise self._error(f"unexpected {text[column]!r}", column)
            group = "name" if match.group("name") else "mark"
            tokens.append((match.group(group), match.start(group)))
            position = match.end()
        return tokens

    def variants(self) -> tuple[Call, ...]:
        calls = [self.call(depth=1, in_list=False)]
        while self._take("&"):
            calls.append(self.call(depth=1, in_list=False))
        if self.index < len(self.tokens):
            token, column = self.tokens[self.index]
            hint = f"backends in turn are S[{self.text}]: " if token == "," else ""
            raise self._error(f"{hint}unexpected {quoted(token)} after a complete expression", column)
        return tuple(calls)

    def call(self, depth: int, in_list: bool) -> Call:
        if depth > MAX_DEPTH:
            raise self._error(f"nested deeper than {MAX_DEPTH}", self._column())
        filter_name = self._filter(in_list)
        name = self._name("a backend name")
        args: tuple[Call, ...] = ()
        if self._take("["):
            args = self._list(depth)
        return Call(name, args, filter_name)

    def _list(self, depth: int) -> tuple[Call, ...]:
        calls = [self.call(depth + 1, in_list=True)]
        while self._take(","):
            calls.append(self.call(depth + 1, in_list=True))
        self._expect("]")
        return tuple(calls)

    def _filter(self, in_list: bool) -> str | None:
        column = self._column()
        if not self._take("("):
            return None
        if not in_list:
            raise self._error("(filter) belongs inside a list; for a whole node write filter = …", column)
        name = self._name("a filter name")
        if self._take("["):
            name = f"{name}[{self._name('a filter name')}]"
            self._expect("]")
        self._expect(")")
        return name

    def _name(self, expected: str) -> str:
        if self.index < len(self.tokens):
            token, column = self.tokens[self.index]
            if token not in "[](),&":
                self.index += 1
                return token
            raise self._error(f"expected {expected}, found {quoted(token)}", column)
        raise self._error(f"expected {expected}, found the end", len(self.text))

    def _take(self, mark: str) -> bool:
        if self.index < len(self.tokens) and self.tokens[self.index][0] == mark:
            self.index += 1
            return True
        return False

    def _expect(self, mark: str) -> None:
        if not self._take(mark):
            actual = quoted(self.tokens[self.index][0]) if self.index < len(self.tokens) else "the end"
            raise self._error(f"expected {mark!r}, found {actual}", self._column())

    def _column(self) -> int:
        return self.tokens[self.index][1] if self.index < len(self.tokens) else len(self.text)

    def _error(self, problem: str, column: int) -> ConfigError:
        return ConfigError(f"{problem} at column {column + 1} of {quoted(self.text)}")
