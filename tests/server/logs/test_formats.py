"""Whatever a text holds, a record is one line, or lines that nobody takes for another record's."""

from __future__ import annotations

import json
import logging
import re
import sys
from typing import Any

import pytest
from torchpipe_server.logs.formats import LINE_BYTES, JsonFormatter, LineFormatter, TextFormatter, escape

TIME = "2026-11-22 07:00:00,000"
FORGED = f"{TIME} CRITICAL torchpipe_server[1]: forged"
EVIL = [
    f"\n{FORGED}",
    f"\r\n{FORGED}",
    *(f"a{mark}{FORGED}" for mark in "\v\f\x1c\x1d\x1e\x85\u2028\u2029"),
    '\n{"level":"critical"}\n',
    "\x1b[2J\x1b]0;title\x07",
    "\x9b31m \x7f \x00 \b",
    "\u202e\u2066\u200f\ufeff\u200b",
    "\ud800 \udc80",
    "\U000e0001",
]
BEGINNING = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ERROR ")


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise SystemExit("of __str__")


def record(message: Any, *args: Any, error: BaseException | None = None, name: str = "x") -> logging.LogRecord:
    info: Any = None
    if error is not None:
        try:
            raise error from ValueError(str(error.args))
        except BaseException:
            info = sys.exc_info()
    return logging.LogRecord(name, logging.ERROR, "", 0, message, args, info)


def check(text: str, formatter: LineFormatter) -> None:
    assert len(text.encode("utf-8", "backslashreplace")) < LINE_BYTES
    lines = text.split("\n")
    assert all(line.isprintable() for line in lines)
    assert lines == text.splitlines()
    if isinstance(formatter, JsonFormatter):
        (line,) = lines
        assert json.loads(line)["level"] == "error"
    else:
        assert BEGINNING.match(lines[0])
        assert all(line.startswith("  | ") for line in lines[1:])


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()], ids=["text", "json"])
@pytest.mark.parametrize("evil", EVIL, ids=ascii)
def test_no_text_begins_a_line_of_its_own(formatter: LineFormatter, evil: str):
    for made in (
        record("%s", evil),
        record(evil),
        record("x", name=evil),
        record("x", error=RuntimeError(evil)),
        record("x %s", {"key": evil}, error=OSError(2, evil, evil)),
    ):
        check(formatter.format(made), formatter)


def test_json_holds_the_text_as_it_is():
    for evil in EVIL:
        assert json.loads(JsonFormatter().format(record("%s", evil)))["message"] == evil


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()], ids=["text", "json"])
def test_what_cannot_be_put_into_words_is_still_a_line(formatter: LineFormatter):
    check(formatter.format(record("two %s %s", 1)), formatter)
    check(formatter.format(record("%d", "x")), formatter)
    check(formatter.format(record("%s", Unspeakable())), formatter)
    check(formatter.format(record(Unspeakable())), formatter)
    line = formatter.format(record("here: %d", "x"))
    assert "here: %d" in line
    assert "TypeError" in line


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()], ids=["text", "json"])
@pytest.mark.parametrize("letter", ["x", "é", "\n", "\u202e", "\U0001f600", "\\"], ids=ascii)
def test_a_long_line_keeps_its_beginning_and_its_end(formatter: LineFormatter, letter: str):
    for size in (3000, LINE_BYTES, 10**5):
        text = formatter.format(record("begin %s end", letter * size))
        check(text, formatter)
        assert "begin" in text
        assert " end" in text
        check(formatter.format(record(letter * size, error=RuntimeError(letter * size))), formatter)
    assert "characters ..." in text


def test_a_traceback_in_text_is_marked():
    lines = TextFormatter().format(record("a defect", error=KeyError("why"))).split("\n")
    assert lines[0].endswith(" ERROR x[{}]: a defect".format(lines[0].split("[")[1].split("]")[0]))
    assert "  | Traceback (most recent call last):" in lines
    assert lines[-1] == "  | KeyError: 'why'"


def test_what_is_printable_stays():
    assert escape("größe 大 ☃ a\\n") == "größe 大 ☃ a\\n"
    assert escape("a\nb\x1b") == "a\\nb\\x1b"
