"""The parser of the command lines."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from torchpipe_py.errors import nearest


class ArgumentParser(argparse.ArgumentParser):
    """Names the nearest flag for one that it does not know."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flag = unknown[0].split("=", 1)[0]
            hint = f"; {nearest(flag, self._option_string_actions)}" if flag.startswith("--") else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return parsed, unknown
