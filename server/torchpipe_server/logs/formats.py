"""Formats records as single lines, whatever text they contain: for people, or as JSON."""

from __future__ import annotations

import json
import logging
from abc import abstractmethod
from datetime import datetime, timezone
from typing import Any

# Less than a pipe writes atomically (PIPE_BUF), so that lines of several processes do not mix.
LINE_BYTES = 4095

_CONTINUED = "\n  | "  # before each line of a traceback: no record begins like that


def escape(text: str) -> str:
    """Escape unprintable characters: controls, line separators, marks that change the direction."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def message_of(record: logging.LogRecord) -> str:
    """The record's message, even if its arguments cannot be formatted."""
    try:
        return record.getMessage()
    except BaseException as error:
        template = record.msg if isinstance(record.msg, str) else type(record.msg).__name__
        return f"{template} ({type(error).__name__}: it cannot be formatted)"


class LineFormatter(logging.Formatter):
    """Makes lines of at most ``LINE_BYTES`` with their end; the middle of longer ones is left out."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record, without its end."""
        texts = {"message": message_of(record)}
        if record.exc_info:
            texts["traceback"] = self.formatException(record.exc_info)
        most = LINE_BYTES
        while True:
            line = self.compose(record, {name: _without_middle(text, most) for name, text in texts.items()})
            if len(line.encode("utf-8", "backslashreplace")) < LINE_BYTES or not most:
                return line
            most = most * 3 // 4  # the size of a character is only known after escaping

    @abstractmethod
    def compose(self, record: logging.LogRecord, texts: dict[str, str]) -> str:
        """Make the line from ``texts``: the message, and the traceback if there is one."""


class TextFormatter(LineFormatter):
    """Time, level, logger, pid, message; a traceback follows on separate, marked lines."""

    def compose(self, record: logging.LogRecord, texts: dict[str, str]) -> str:
        """The line."""
        where = f"{record.levelname} {record.name}[{record.process}]"
        line = f"{self.formatTime(record)} {escape(where)}: {escape(texts['message'])}"
        if "traceback" in texts:
            line += _CONTINUED + _CONTINUED.join(map(escape, texts["traceback"].split("\n")))
        return line


class JsonFormatter(LineFormatter):
    """One object per line: time (ISO 8601, UTC), level, logger, pid, message, ``fields``, traceback if any."""

    def compose(self, record: logging.LogRecord, texts: dict[str, str]) -> str:
        """The line."""
        members: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "message": texts["message"],
            **getattr(record, "fields", {}),
        }
        if "traceback" in texts:
            members["traceback"] = texts["traceback"]
        return json.dumps(members).replace("\x7f", "\\u007f")


def _without_middle(text: str, size: int) -> str:
    """The text, shortened to about ``size`` characters by leaving out its middle."""
    if len(text) <= size:
        return text
    left_out = f" [... {len(text) - size} characters ...] "
    half = max(0, size - len(left_out)) // 2
    return text[:half] + left_out + text[len(text) - half :] if half else ""
