"""Declarations of a backend's parameters, and remarks about them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torchpipe_py.errors import quoted

REQUIRED: Any = type("Required", (), {"__repr__": lambda self: "required"})()


class Postprocessors(Protocol):
    """The part of a registry that parameters need."""

    def find_postprocessor(self, name: str) -> type | None: ...

    def postprocessor_names(self) -> list[str]: ...


class Param:
    """A parameter of a backend, declared once as a class attribute.

    ``convert`` turns the raw TOML value into the typed one; its ``ValueError`` says in a sentence what is expected;
    ``low`` and ``high`` bound numbers, ``choices`` lists the valid words, ``file`` requires an existing file, ``kept``
    marks a file that the backend writes; ``key`` is the name in the configuration if it differs from the attribute's,
    ``also`` holds further names. ``named``: ``key`` ends in ``::WORD``, and any name may replace that word, once or
    several times; the value is a sorted tuple of pairs, the name and the typed value.
    On an instance the attribute is the typed value.
    """

    def __init__(
        self,
        convert: Callable[[Any], Any],
        default: Any = REQUIRED,
        *,
        doc: str = "",
        low: float | None = None,
        high: float | None = None,
        choices: Sequence[str] = (),
        file: bool = False,
        kept: bool = False,
        key: str = "",
        also: Sequence[str] = (),
        named: bool = False,
    ) -> None:
        self.convert, self.default, self.doc = convert, default, doc
        self.low, self.high, self.choices, self.file, self.kept = low, high, tuple(choices), file, kept
        self.key, self.also, self.named = key, tuple(also), named

    def __set_name__(self, owner: type, name: str) -> None:
        self.key = self.key or name

    def __get__(self, instance: object, owner: type) -> Any:
        # A non-data descriptor: an instance's own attribute, the typed value, takes precedence.
        return self

    def read(self, value: Any, registry: Postprocessors) -> Any:
        """The typed value; ``ValueError`` if it has the wrong type or is out of bounds."""
        typed = self.convert(value)
        if self.choices and typed not in self.choices:
            choices = ", ".join(choice or "''" for choice in self.choices)
            raise ValueError(f"expected one of {choices}, got {quoted(value)}")
        if self.low is not None and typed < self.low:
            raise ValueError(f"expected at least {self.low:.15g}, got {quoted(typed)}")
        if self.high is not None and typed > self.high:
            raise ValueError(f"expected at most {self.high:.15g}, got {quoted(typed)}")
        return typed

    def inner(self, typed: Any) -> Mapping[str, Param]:
        """The parameters of the object that a typed value names; they are keys of the node, too."""
        return {}


@dataclass(frozen=True)
class Remark:
    """A problem of the parameter ``key``: certain, or only probable if ``is_warning``."""

    key: str
    text: str
    is_warning: bool = False
    is_unused: bool = False  # reported only if no other backend of the node takes the key
