"""What malloc keeps of the memory that is freed."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

LARGE_BYTES = 2**25
"""From this size on, memory goes back to the system as soon as it is freed: 32 MiB, the most that glibc comes to."""

KEPT_BYTES = 2 * LARGE_BYTES
"""Freed memory at the end of each of malloc's heaps that stays there for what is allocated next.

Each thread has a heap. Half as much loses what 3840×2160 pixels take, which was a third slower than without any of it.
"""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_VARIABLES = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_"}


def keep_freed_memory(kept: int = KEPT_BYTES) -> None:
    """Let malloc keep what an image took for the next ones, up to ``kept`` bytes in each heap, in this process.

    glibc gives what is as large as the largest before back to the system each time, and has it again page by page: of
    1920×1080 pixels that took a third of the time in which OpenCV decodes them. Nothing happens with another C library,
    and where the environment says what glibc is to keep.
    """
    if not _VARIABLES.isdisjoint(os.environ) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    with suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_TRIM_THRESHOLD, kept)
        mallopt(_MMAP_THRESHOLD, LARGE_BYTES)
