"""Explains a syntax error of TOML: the line, and what is expected there instead."""

from __future__ import annotations

import re
from collections.abc import Callable

from torchpipe_py.errors import quoted

_WORDS = {
    "true": "true and false are written small",
    "false": "true and false are written small",
    "none": "TOML has no empty value; leave the key out",
    "null": "TOML has no empty value; leave the key out",
}


def explain(error: Exception, text: str) -> str:
    """``line 3, 'a = b': …`` for an error of the TOML parser; its own words if it has no place in ``text``."""
    words, place = str(error), re.search(r" \(at (?:line (\d+), column (\d+)|end of document)\)$", str(error))
    lines = text.removesuffix("\n").split("\n")  # TOML knows no other ends of lines
    if place is None:
        return words
    number = min(int(place[1]), len(lines)) if place[1] else len(lines)
    line, problem = lines[number - 1].strip(), words[: place.start()]
    return f"line {number}, {quoted(line)}: {_expected(line, problem) or problem}"


def _expected(line: str, problem: str) -> str:
    """A hint at the right line, by the most likely cause; empty if that is unknown."""
    key, equals, value = (part.strip() for part in line.partition("="))
    value = value if value[:1] in ("'", '"', "[") else value.partition("#")[0].strip()
    first = _FIRST_CHARACTERS.get(line[:1], "") or _FIRST_CHARACTERS.get(line[:2], "")
    for is_it, expected in (
        (re.search("[“”„‘’]", line), "quotes are plain: \" or '"),
        (problem.startswith("Cannot overwrite"), f"{key.strip('[]')!r} is set twice"),
        (problem.startswith("Cannot declare"), f"the table {line} occurs twice"),
        (first and not equals, first),
        (not equals and line.endswith(":"), f"this is YAML; in TOML a table is [{line[:-1]}]"),
        (not equals and re.match(r"[\w.-]+:", line), f"a key has '=' after it, as {line.partition(':')[0]} = …"),
        (not equals, "expected a table, as [name], or a key with its value, as key = value"),
        (line.startswith("["), "a table's name ends with ], as [name]"),
        (
            problem.startswith(("Unescaped", "Invalid hex")),
            r"in double quotes a backslash is written \\; in single quotes it stays as it is",
        ),
        (not value, f"a value is missing after {key} ="),
        (value.lower() in _WORDS, _WORDS.get(value.lower(), "")),
        (value.startswith("("), f"a list is in brackets, as {key} = [1, 2]"),
        (
            value.startswith("[") and "array" in problem,
            "elements of a list have a comma between them, and ] at the end",
        ),
        (_is_open(value), f"the text has no quote at its end; expected {key} = {value}{value[:1]}"),
        (value[:1].isalpha(), f"put quotes around text: {key} = {_quote(value)}"),
        (problem.startswith("Expected newline"), "after a value the line ends; put quotes around text"),
    ):
        if is_it:
            return expected
    return ""


_FIRST_CHARACTERS = {
    "{": "this is JSON; in TOML a table is [name], with a line key = value for each key",
    "//": "a comment begins with #",
    "[": "a table's name ends with ], as [name]",
    "-": "this is YAML; in TOML a list is key = [1, 2]",
}

_quote: Callable[[str], str] = '"{}"'.format


def _is_open(value: str) -> bool:
    """Whether a text begins with a quote that is the only one in it."""
    return value[:1] in ("'", '"') and value.count(value[0]) == 1
