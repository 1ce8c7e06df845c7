"""Reads Triton's ``config.pbtxt``, in protobuf's text format, with the line of each field.

https://protobuf.dev/reference/protobuf/textformat-spec/ has the grammar, ``model_config.proto`` of Triton the fields.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from torchpipe_py.errors import ConfigError, nearest, quoted
from torchpipe_py.files import read_bytes

FIELDS = {
    "ModelConfig": "name platform backend runtime version_policy max_batch_size input output batch_input batch_output "
    "optimization dynamic_batching sequence_batching ensemble_scheduling instance_group default_model_filename "
    "cc_model_filenames metric_tags parameters model_warmup model_operations model_transaction_policy "
    "model_repository_agents response_cache model_metrics",
    "version_policy": "latest all specific",
    "latest": "num_versions",
    "specific": "versions",
    "input": "name data_type format dims reshape is_shape_tensor allow_ragged_batch optional is_non_linear_format_io",
    "output": "name data_type dims reshape label_filename is_shape_tensor is_non_linear_format_io",
    "dynamic_batching": "preferred_batch_size max_queue_delay_microseconds preserve_ordering priority_levels "
    "default_priority_level default_queue_policy priority_queue_policy",
    "instance_group": "name kind count rate_limiter gpus secondary_devices profile passive host_policy",
    "ensemble_scheduling": "step max_inflight_responses",
    "step": "model_name model_version input_map output_map model_namespace",
    **dict.fromkeys(("input_map", "output_map", "parameters"), "key value"),
}
"""The known fields of messages, by the field that holds the message."""

MOST_DEPTH = 50
MOST_FILE_BYTES = 2**20
MOST_CHARACTERS = 4096  # of a name

_ESCAPE = re.compile(r"\\(?:[abfnrtv'\"\\]|[0-7]{1,2}(?![0-7])|[0-3][0-7]{2}|x[0-9a-fA-F]{2})")
_TOKEN = re.compile(
    r"(?P<space>(?:\s|#[^\n]*)+)"
    r"|(?P<word>[A-Za-z_]\w*|-?\.?\d(?:[eE][+-]|[\w.])*)"
    r"|(?P<mark>[{}<>\[\]:,;])"
    r"""|(?P<text>"(?:[^"\\\n\r\0]|\\[^\n\r\0])*"|'(?:[^'\\\n\r\0]|\\[^\n\r\0])*')"""
    r"|(?P<wrong>[\s\S])",
    re.ASCII,
)
_CLOSING = {"{": "}", "<": ">"}
_BOOLEANS = {"true": True, "True": True, "t": True, "false": False, "False": False, "f": False}


class Word(str):
    """The name of an enum value, or any other word."""


@dataclass
class Message:
    """The values of each field, with their lines."""

    file: str
    line: int = 1
    fields: dict[str, list[tuple[int, Any]]] = field(default_factory=dict)

    def at(self, name: str = "") -> str:
        """The place of a field, or of the message."""
        return f"{self.file}:{self.fields[name][0][0] if name in self.fields else self.line}"

    def error(self, problem: str, name: str = "") -> ConfigError:
        return ConfigError(f"{self.at(name)}: {problem}")

    def all(self, name: str, kind: type) -> list[Any]:
        for line, value in self.fields.get(name, []):
            if type(value) is not kind:
                found = "a message" if isinstance(value, Message) else quoted(value)
                raise ConfigError(f"{self.file}:{line}: {name}: expected {_KINDS[kind]}, got {found}")
        return [value for _, value in self.fields.get(name, [])]

    def one(self, name: str, kind: type, default: Any) -> Any:
        values = self.all(name, kind)
        if len(values) > 1:
            raise ConfigError(f"{self.file}:{self.fields[name][1][0]}: {name} appears twice")
        return values[0] if values else default

    def text(self, name: str) -> str:
        text = str(self.one(name, str, ""))
        if not text.isprintable() or len(text) > MOST_CHARACTERS:
            raise self.error(
                f"{name}: expected at most {MOST_CHARACTERS} printable characters, got {quoted(text)}", name
            )
        return text

    def number(self, name: str, default: int) -> int:
        number = int(self.one(name, int, default))
        if number < 0:
            raise self.error(f"{name}: expected 0 or more, got {number}", name)
        return number

    def choice(self, name: str, valid: Collection[str]) -> str:
        """An enum value; the first one if the field is missing."""
        word = str(self.one(name, Word, next(iter(valid))))
        if word not in valid:
            raise self.error(f"{name}: no {word!r}; {nearest(word, valid)}", name)
        return word

    def pairs(self, name: str) -> dict[str, str]:
        """A map from text to text."""
        return {pair.text("key"): pair.text("value") for pair in self.all(name, Message)}

    def message(self, name: str) -> Message:
        """A message; an empty one if the field is missing."""
        message: Message = self.one(name, Message, Message(self.file, self.line))
        return message


_KINDS = {str: "a text in quotes", int: "a whole number", bool: "true or false", Word: "a name", Message: "{ … }"}


class _Parser:
    """Parses text to messages; ``ConfigError`` names the line of a syntax error or unknown field."""

    def __init__(self, text: str, file: str) -> None:
        self._file, self._tokens, line = file, list[tuple[str, str, int]](), 1
        for match in _TOKEN.finditer(text):
            if match["wrong"]:
                problem = "a text without its closing quote" if match[0] in "\"'" else f"unexpected {match[0]!r}"
                raise ConfigError(f"{file}:{line}: {problem}")
            if match["text"] and "\\" in (rest := _ESCAPE.sub("", match[0])):
                escape = quoted(rest[rest.index("\\") :][:4])
                raise ConfigError(f"{file}:{line}: {escape}: not an escape of a text; octal ones end at '\\\\377'")
            if not match["space"]:
                self._tokens.append((str(match.lastgroup), match[0], line))
            line += match[0].count("\n")
        self._tokens.append(("end", "", line))
        self._tokens.reverse()

    def message(self, closing: str = "", name: str | None = "ModelConfig", depth: int = 0) -> Message:
        """Parse a message up to ``closing``; ``name`` is its key in ``FIELDS``, if known."""
        message = Message(self._file, self._tokens[-1][2])
        if depth > MOST_DEPTH:
            raise message.error(f"more than {MOST_DEPTH} nested messages")
        valid = FIELDS[name].split() if name in FIELDS else None
        while self._tokens[-1][1] != closing:
            kind, key, line = self._tokens[-1]
            if kind != "word":
                raise self._expected(f"a field, or the {closing!r} of line {message.line}" if closing else "a field")
            if valid is not None and key not in valid:
                raise ConfigError(f"{self._file}:{line}: unknown field {quoted(key)}; {nearest(key, valid)}")
            self._tokens.pop()
            has_colon, values = self._take(":"), message.fields.setdefault(key, [])
            if self._take("["):
                while not self._take("]"):
                    values.append((self._tokens[-1][2], self._value(key, valid is not None, depth)))
                    if self._tokens[-1][1] != "]" and not self._take(","):
                        raise self._expected("',' or ']'")
            elif has_colon or self._tokens[-1][1] in _CLOSING:
                values.append((line, self._value(key, valid is not None, depth)))
            else:
                raise self._expected(f"':' after {key}")
            if not self._take(","):
                self._take(";")
        self._tokens.pop()
        return message

    def _value(self, key: str, is_known: bool, depth: int) -> Any:
        kind, token, _ = self._tokens[-1]
        if token in _CLOSING:
            self._tokens.pop()
            return self.message(_CLOSING[token], key if is_known else None, depth + 1)
        if kind not in ("word", "text"):
            raise self._expected(f"a value of {key}")
        self._tokens.pop()
        if kind == "word":
            try:
                return _BOOLEANS[token] if token in _BOOLEANS else _integer(token)
            except ValueError:
                return Word(token)
        text = str(ast.literal_eval(token))
        while self._tokens[-1][0] == "text":  # adjacent texts are joined
            text += str(ast.literal_eval(self._tokens.pop()[1]))
        return text

    def _take(self, mark: str) -> bool:
        return self._tokens[-1][1] == mark and bool(self._tokens.pop())

    def _expected(self, what: str) -> ConfigError:
        _, token, line = self._tokens[-1]
        return ConfigError(f"{self._file}:{line}: expected {what}, found {quoted(token) if token else 'the end'}")


def _integer(token: str) -> int:
    """Parse an integer; ``ValueError`` if it is invalid or too large for protobuf."""
    number = int(token, 0)
    if not -(2**63) <= number < 2**64:
        raise ValueError(token)
    return number


def read_pbtxt(path: str) -> Message:
    """The file's ``ModelConfig``. Raises ``OSError``, or ``ConfigError`` with file and line."""
    if not os.path.isfile(path):
        raise ConfigError(f"{path}: not a regular file")
    if os.path.getsize(path) > MOST_FILE_BYTES:
        raise ConfigError(f"{path}: more than {MOST_FILE_BYTES} bytes")
    content = read_bytes(path)
    try:
        return _Parser(content.decode(), path).message()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}:{content.count(10, 0, error.start) + 1}: not UTF-8") from None
