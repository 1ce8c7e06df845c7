"""Configurations as text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torchpipe_py.plan.config import GLOBAL


def to_toml(config: Mapping[str, Mapping[str, Any]], comments: Mapping[str, str] | None = None) -> str:
    """Scalars of ``global`` first, then a table for each node; ``comments`` has some for keys."""
    tables = ["\n".join(_lines(config.get(GLOBAL, {}), comments or {}))]
    tables += [
        "\n".join([f"[{_key(name)}]", *_lines(table, comments or {})])
        for name, table in config.items()
        if name != GLOBAL
    ]
    return "\n\n".join(filter(None, tables)) + "\n"


def _lines(table: Mapping[str, Any], comments: Mapping[str, str]) -> list[str]:
    lines = [f"{_key(key)} = {_value(value)}" for key, value in table.items()]
    return [f"{line:37} # {comments[key]}" if key in comments else line for key, line in zip(table, lines, strict=True)]


def _key(key: str) -> str:
    return key if key.isascii() and key.replace("_", "a").replace("-", "a").isalnum() else _value(key)


def _value(value: Any) -> str:
    # JSON's, but for its pairs of surrogates and for the one character that TOML has escaped beside JSON's.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
