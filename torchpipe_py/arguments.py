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

    Names the nearest flag, command or choice for one that it does not know. ``elsewhere`` maps flags of other programs
    to hints.
    """

    def __init__(self, *, elsewhere: Mapping[str, str] = MappingProxyType({}), **settings: Any) -> None:
        self._elsewhere = elsewhere
        # NOTE: an abbreviation may mean another flag, or none, in the next version.
        super().__init__(**settings, allow_abbrev=False)
        self._negative_number_matcher = re.compile(r"-\.?\d")  # -1e0 too, as of Python 3.14

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        self._given = sys.argv[1:] if args is None else args
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            hint = self._hint(unknown[0])
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
        """Report a misspelt flag, too, if an argument is missing."""
        if "arguments are required" in message:
            for argument in self._given:
                if hint := self._hint(argument):
                    message += f"; there is {argument}, {hint}"
        super().error(message)

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
