"""The parser of the command lines."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from torchpipe_py.errors import nearest


class ArgumentParser(argparse.ArgumentParser):
    """Takes flags by their whole names; names the nearest flag, command or choice for one that it does not know."""

    def __init__(self, **settings: Any) -> None:
        # NOTE: the beginning of a flag may mean another one, or nothing, in the next version.
        super().__init__(**settings, allow_abbrev=False)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        self._given = sys.argv[1:] if args is None else args
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            hint = self._hint(unknown[0])
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint and f'; {hint}'}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        """An argument that is missing may be there, misspelt."""
        if "arguments are required" in message:
            for argument in self._given:
                if hint := self._hint(argument):
                    message += f"; there is {argument}, {hint}"
        super().error(message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            hint = nearest(str(value), map(str, action.choices))
            raise argparse.ArgumentError(action, f"invalid choice: {str(value)!r}; {hint}")

    def _hint(self, argument: str) -> str:
        """The flag that an unknown one may stand for; empty where it is none, or a known one."""
        flag = argument.split("=", 1)[0]
        valid = self._option_string_actions
        if not flag.startswith("--") or flag == "--" or flag in valid:
            return ""
        return nearest(flag, valid)
