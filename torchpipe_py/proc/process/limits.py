"""What a child process gives up before it works: it ends with its parent, and takes no more memory than it may."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Have the system kill this process, stopped or not, when the thread that started it ends.

    NOTE: the thread, not the process. ``parent`` is the process id of whoever started it; it may be gone already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def limit_memory(mebibytes: int) -> None:
    """Refuse this process more address space than it has now and ``mebibytes`` besides; ``OSError`` if not on Linux."""
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[0])
    lower(resource.RLIMIT_AS, pages * resource.getpagesize() + mebibytes * 2**20)


def lower(kind: int, limit: int) -> None:
    """Set a limit of this process for good, unless it is lower already."""
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(kind, (limit, limit))
