"""The parser of the command lines."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from itertools import takewhile
from types import MappingProxyType
from typing import Any, NoReturn

from torchpipe_py.errors import nearest


class ArgumentParser(argparse.ArgumentParser):
    """Takes flags by their whole names; ``-`` and ``_`` between words are the same: ``--img-dir`` is ``--img_dir``.

    Names the nearest flag, command or choice for one that it does not know. An error is one line, without the usage.
    ``elsewhere`` maps flags of other programs to hints; ``superfluous`` is the hint for one argument too many.
    """

    def __init__(
        self, *, elsewhere: Mapping[str, str] = MappingProxyType({}), superfluous: str = "", **settings: Any
    ) -> None:
        self._elsewhere, self._superfluous = elsewhere, superfluous
        # NOTE: an abbreviation may mean another flag, or none, in the next version.
        super().__init__(**settings, allow_abbrev=False)
        self._negative_number_matcher = re.compile(r"-\.?\d")  # -1e0 too, as of Python 3.14

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        self._given = sys.argv[1:] if args is None else args
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            hint = self._hint(unknown[0]) if unknown[0].startswith("-") else self._superfluous
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint and f'; {hint}'}")
        return parsed, unknown

    def _parse_optional(self, arg_string: str) -> Any:
        return super()._parse_optional(self._as_declared(arg_string))

    def _as_declared(self, argument: str) -> str:
        """The argument with its flag as declared by ``add_argument``; unchanged if that is unknown or not a flag."""
        flag, *value = argument.split("=", 1)
        if flag.startswith("--"):
            flag = next((name for name in self._option_string_actions if _dashed(name) == _dashed(flag)), flag)
        return "=".join([flag, *value])

    def error(self, message: str) -> NoReturn:
        """Exit with status 2. Describes missing arguments, and reports a misspelt flag that may be one of them."""
        before, is_missing, names = message.partition("arguments are required: ")
        if is_missing:
            message = before + is_missing + ", ".join(map(self._described, names.split(", ")))
            hints = [f"there is {given}, {hint}" for given in self._given if (hint := self._hint(given))]
            message = "; ".join([message, *(hints or [f"{self.prog} --help says more"])])
        self.exit(2, f"{self.prog}: error: {message}\n")

    def _described(self, name: str) -> str:
        """A missing argument with its meaning, or its choices."""
        for action in self._actions:
            if name in (*action.option_strings, action.metavar, action.dest):
                told = self._get_formatter()._expand_help(action) if action.help else ""
                meaning = ", ".join(map(str, action.choices)) if action.choices else told
                return f"{name} ({meaning})" if meaning else name
        return name

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            # argparse takes the value of an unknown flag as the first positional argument.
            for argument in takewhile(lambda given: given != value, () if action.option_strings else self._given):
                if hint := self._hint(argument):
                    self.error(f"unrecognized arguments: {argument}; {hint}")
            hint = nearest(str(value), map(str, action.choices))
            raise argparse.ArgumentError(action, f"invalid choice: {str(value)!r}; {hint}")

    def _hint(self, argument: str) -> str:
        """The probable meaning of an unknown flag; empty for a known flag, or no flag."""
        flag = self._as_declared(argument).split("=", 1)[0]
        known = self._option_string_actions
        if flag in self._elsewhere:
            return self._elsewhere[flag]
        if not flag.startswith("--") or flag == "--" or flag in known:
            return ""
        return nearest(flag, [name for name, action in known.items() if action.help != argparse.SUPPRESS])


def _dashed(flag: str) -> str:
    return flag.replace("_", "-")
