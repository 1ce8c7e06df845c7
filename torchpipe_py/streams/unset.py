"""Notices frames that OpenCV does not convert.

FFmpeg converts no interlaced frame to one that is not, OpenCV does not look at that, and the image shows what was in
memory before: other images.
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

FILLS = (0xA5, 0x5A)
"""Bytes that an image may be filled with: a frame may be of one of these grays, but not of both."""

_M_PERTURB = -6  # of glibc's mallopt: allocated memory gets the complement of this byte
_LOCK = threading.Lock()


def retrieve_first(capture: Any, fill: int) -> Any:
    """The first grabbed frame of a capture, for which OpenCV allocates the image.

    ``None`` if all of it is ``fill``: it is not converted, or of this gray. Where the C library is not glibc, it is the
    frame as OpenCV gives it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return capture.retrieve()[1]
    usual = os.environ.get("MALLOC_PERTURB_", "0")
    with _LOCK:
        mallopt(_M_PERTURB, fill ^ 0xFF)
        try:
            is_read, mat = capture.retrieve()
        finally:
            mallopt(_M_PERTURB, int(usual) if usual.isdigit() else 0)
    return None if not is_read or (mat == fill).all() else mat
