"""Small videos for streams."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

HEIGHT, WIDTH, FPS = 48, 64, 25


def write_video(path: Path, frames: Iterable[int | tuple[int, int]]) -> Path:
    """Write grey frames of these brightnesses, 25 a second; with ``(brightness, number)`` at that frame's time."""
    av = pytest.importorskip("av")
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=FPS)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for each in frames:
            brightness, number = each if isinstance(each, tuple) else (each, None)
            frame = av.VideoFrame.from_ndarray(np.full((HEIGHT, WIDTH, 3), brightness, np.uint8), format="bgr24")
            if number is not None:
                frame.pts, frame.time_base = number, Fraction(1, FPS)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path
