"""Small videos for streams."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

HEIGHT, WIDTH, FPS = 48, 64, 25
GOP = 12
"""Frames from one key frame to the next."""


def write_video(
    path: Path,
    frames: Iterable[int | tuple[int, int]],
    codec: str = "mpeg4",
    size: tuple[int, int] = (WIDTH, HEIGHT),
) -> Path:
    """Write grey frames of these brightnesses, 25 a second; with ``(brightness, number)`` at that frame's time."""
    av = pytest.importorskip("av")
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=FPS)
        (stream.width, stream.height), stream.pix_fmt = size, "yuv420p"
        stream.codec_context.gop_size, stream.codec_context.max_b_frames = GOP, 0
        for each in frames:
            brightness, number = each if isinstance(each, tuple) else (each, None)
            frame = av.VideoFrame.from_ndarray(np.full((*size[::-1], 3), brightness, np.uint8), format="bgr24")
            if number is not None:
                frame.pts, frame.time_base = number, Fraction(1, FPS)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path
