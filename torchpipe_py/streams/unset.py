"""Notices frames that OpenCV does not convert.

FFmpeg converts no interlaced frame to one that is not, OpenCV does not look at that, and the image shows what was in
memory before: other images.
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

_FILL = 0xA5
_M_PERTURB = -6  # of glibc's mallopt: allocated memory gets the complement of this byte
_LOCK = threading.Lock()


def retrieve_first(capture: Any) -> Any:
    """The first grabbed frame of a capture, for which OpenCV allocates the image; ``None`` if it is not converted.

    Where the C library is not glibc, it is the frame as OpenCV gives it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return capture.retrieve()[1]
    usual = os.environ.get("MALLOC_PERTURB_", "0")
    with _LOCK:
        mallopt(_M_PERTURB, _FILL ^ 0xFF)
        try:
            is_read, mat = capture.retrieve()
        finally:
            mallopt(_M_PERTURB, int(usual) if usual.isdigit() else 0)
    return None if not is_read or (mat == _FILL).all() else mat
