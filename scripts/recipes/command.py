"""What the scripts have in common as commands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from torchpipe_py import TorchpipeError

INTERRUPTED = 130  # as a shell says of Ctrl-C


def guarded(name: str, work: Callable[[], object]) -> int:
    """The exit status: 0; 2 with one line on stderr where ``work`` raises what a user can mend; 130 after Ctrl-C."""
    try:
        work()
    except (TorchpipeError, OSError) as error:
        sys.stderr.write(f"{name}: {'; '.join(str(error).splitlines())}\n")  # at once, beside other ranks'
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def whole(low: int) -> Callable[[str], int]:
    """An argparse type: a whole number of at least ``low``."""

    def number(text: str) -> int:
        if int(text) < low:
            raise argparse.ArgumentTypeError(f"expected at least {low}, got {text}")
        return int(text)

    return number
