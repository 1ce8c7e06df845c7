"""Raw configuration values (strings and TOML scalars) to typed ones; ``224`` and ``"224"`` mean the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Union

from torchpipe_py.errors import nearest, quoted
from torchpipe_py.keys import BY_CONSTANT

Value = Union[str, int, float, bool, Sequence["Value"]]  # noqa: UP007 - recursive, evaluated on Python 3.10

_TRUE = {"true", "1", "yes", "on"}
_FALSE = {"false", "0", "no", "off"}


def to_int(value: Value) -> int:
    """An integer; a bool, a fraction or a word is refused with ``ValueError``."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str):
        try:
            return int(value.strip())
        except ValueError:
            pass
    raise ValueError(f"expected an integer, got {quoted(value)}")


def to_float(value: Value) -> float:
    """A finite number; ``ValueError`` otherwise."""
    number = math.nan
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):  # a word; an integer of hundreds of digits
            pass
    if math.isfinite(number):
        return number
    raise ValueError(f"expected a finite number, got {quoted(value)}")


def to_bool(value: Value) -> bool:
    """A truth value: TOML's, or one of true/false, yes/no, on/off, 1/0 in any case."""
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError(f"expected true or false, got {quoted(value)}")


def to_str(value: Value) -> str:
    """A string; numbers become their decimal form, a list is refused."""
    if isinstance(value, str):
        return value
    if isinstance(value, (bool, list, tuple)):
        raise ValueError(f"expected a string, got {quoted(value)}")
    return str(value)


def to_list(value: Value) -> list[Value]:
    """A list: a TOML list as it is, a string split at commas with blanks stripped, a scalar as one element."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, (list, tuple)):
        return list(value)
    return [value]


def to_ints(value: Value) -> tuple[int, ...]:
    """Several integers, from a list or from ``"1, 2"``."""
    return tuple(to_int(part) for part in to_list(value))


def to_floats(value: Value) -> tuple[float, ...]:
    """Several numbers, from a list or from ``"123.675, 116.28, 103.53"``."""
    return tuple(to_float(part) for part in to_list(value))


def to_strings(value: Value) -> tuple[str, ...]:
    """Several words, from a list or from ``"a, b"``."""
    return tuple(to_str(part) for part in to_list(value))


def to_key(name: str) -> str:
    """A key of a request's dict; ``TASK_RESULT_KEY`` stands for its value. ``ValueError`` for an unknown constant."""
    if name in BY_CONSTANT:
        return BY_CONSTANT[name]
    if name.startswith("TASK_") and name.endswith("_KEY"):
        raise ValueError(f"no key {quoted(name)}; {nearest(name, BY_CONSTANT)}")
    return name


def to_keys(value: Value) -> tuple[str, ...]:
    """Several keys of a request's dict, from a list or from ``"data, TASK_BOX_KEY"``."""
    return tuple(to_key(name) for name in to_strings(value))
