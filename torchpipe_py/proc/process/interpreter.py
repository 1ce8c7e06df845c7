"""Another interpreter as a child: what starts one like this, and how it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys


def import_path() -> str:
    """``sys.path`` for a child process, a folder a line.

    Only absolute ones, so that nothing is imported from the working directory, wherever that is.
    """
    paths = [path for path in sys.path if isinstance(path, str) and os.path.isabs(path)]
    # TRAP: while another thread imports cv2, that has its own folder in front of the others, where a `typing` lies.
    file = getattr(sys.modules.get("cv2"), "__file__", None)
    if file:
        folder = os.path.join(os.path.dirname(os.path.realpath(file)), "")
        paths = [path for path in paths if not os.path.join(path, "").startswith(folder)]
    return "\n".join(paths)


def is_stopped(pid: int) -> bool:
    """Whether a process is held by a signal; ``False`` where the system does not tell."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except OSError:
        return False


def interpreter_flags() -> list[str]:
    """What makes another interpreter like this one."""
    return subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined,no-any-return]


def describe_ending(status: int | None) -> str:
    """How a process ended, from its exit status, which is less than 0 for a signal; ``None``: it has not."""
    if status is None:
        return "it closed its connection"
    if status >= 0:
        return f"exit status {status}"
    names = {number.value: number.name for number in signal.Signals}
    return f"killed by signal {-status} ({names.get(-status, 'unknown')})"
