"""A record as one line that no text within it can end: text for a person, JSON for a machine."""

from __future__ import annotations

import json
import logging
from abc import abstractmethod
from datetime import datetime, timezone
from typing import Any

# What a pipe takes whole (PIPE_BUF), less a byte: lines of several processes do not mix.
LINE_BYTES = 4095

_CONTINUED = "\n  | "  # before each line of a traceback: no record begins like that


def escape(text: str) -> str:
    """The text with what is not printable written out: controls, line separators, marks that turn the direction."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def message_of(record: logging.LogRecord) -> str:
    """The record's message, whatever its arguments do."""
    try:
        return record.getMessage()
    except BaseException as error:
        template = record.msg if isinstance(record.msg, str) else type(record.msg).__name__
        return f"{template} ({type(error).__name__}: it cannot be put into words)"


class LineFormatter(logging.Formatter):
    """Gives lines of ``LINE_BYTES`` at most, their end included; of what is too long the middle is left out."""

    def format(self, record: logging.LogRecord) -> str:
        """One line of a form's own, without its end."""
        texts = {"message": message_of(record)}
        if record.exc_info:
            texts["traceback"] = self.formatException(record.exc_info)
        most = LINE_BYTES
        while True:
            line = self.compose(record, {name: _without_middle(text, most) for name, text in texts.items()})
            if len(line.encode("utf-8", "backslashreplace")) < LINE_BYTES or not most:
                return line
            most = most * 3 // 4  # nobody knows what a character takes before it is written out

    @abstractmethod
    def compose(self, record: logging.LogRecord, texts: dict[str, str]) -> str:
        """The line of the record, with these texts: its message, and its traceback if it has one."""


class TextFormatter(LineFormatter):
    """Time, level, logger, pid, message; a traceback follows on lines of its own, each of which is marked."""

    def compose(self, record: logging.LogRecord, texts: dict[str, str]) -> str:
        """The line."""
        where = f"{record.levelname} {record.name}[{record.process}]"
        line = f"{self.formatTime(record)} {escape(where)}: {escape(texts['message'])}"
        if "traceback" in texts:
            line += _CONTINUED + _CONTINUED.join(map(escape, texts["traceback"].split("\n")))
        return line


class JsonFormatter(LineFormatter):
    """An object a line: time (ISO 8601, UTC), level, logger, pid, message, the record's ``fields``, any traceback."""

    def compose(self, record: logging.LogRecord, texts: dict[str, str]) -> str:
        """The line."""
        said: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "message": texts["message"],
            **getattr(record, "fields", {}),
        }
        if "traceback" in texts:
            said["traceback"] = texts["traceback"]
        return json.dumps(said).replace("\x7f", "\\u007f")


def _without_middle(text: str, size: int) -> str:
    """The text, or so many characters of its beginning and its end."""
    if len(text) <= size:
        return text
    left_out = f" [... {len(text) - size} characters ...] "
    half = max(0, size - len(left_out)) // 2
    return text[:half] + left_out + text[len(text) - half :] if half else ""
