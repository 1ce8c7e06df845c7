"""Settings of malloc, so that it keeps freed memory."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

LARGE_BYTES = 2**25
"""Size from which freed memory returns to the system at once: 32 MiB, the largest that glibc sets."""

KEPT_BYTES = 2 * LARGE_BYTES
"""Freed memory that malloc keeps at the end of each heap.

Each thread has a heap. Half as much is too little for 3840×2160 pixels, which took a third longer.
"""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_VARIABLES = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_"}


def keep_freed_memory(kept: int = KEPT_BYTES) -> None:
    """Let malloc keep up to ``kept`` freed bytes in each heap of this process, for the next images.

    Otherwise glibc returns each large image's memory to the system and gets it again page by page, which takes a third
    of the decoding time at 1920×1080 pixels. Does nothing with another C library, or if the environment sets these
    options.
    """
    if not _VARIABLES.isdisjoint(os.environ) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    with suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_TRIM_THRESHOLD, kept)
        mallopt(_MMAP_THRESHOLD, LARGE_BYTES)


def release_freed_memory() -> None:
    """Return freed memory to the system, after a model was removed. Does nothing with another C library."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
