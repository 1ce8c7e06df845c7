"""Small videos for streams, and a server of them."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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


@contextmanager
def web_server(respond: Callable[[BaseHTTPRequestHandler, int], object]) -> Iterator[int]:
    """Answers each GET by ``respond(handler, number)``; yields its port."""
    numbers = iter(range(1000))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            respond(self, next(numbers))

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


TURNS: dict[str, tuple[tuple[int, int, int, int], Callable[[np.ndarray], np.ndarray]]] = {
    "as stored": ((1, 0, 0, 1), lambda stored: stored),
    "90 clockwise": ((0, 1, -1, 0), lambda stored: np.rot90(stored, -1)),
    "180": ((-1, 0, 0, -1), lambda stored: np.rot90(stored, 2)),
    "90 counterclockwise": ((0, -1, 1, 0), lambda stored: np.rot90(stored, 1)),
    "mirrored": ((-1, 0, 0, 1), lambda stored: stored[:, ::-1]),
    "upside down": ((1, 0, 0, -1), lambda stored: stored[::-1]),
    "transposed": ((0, 1, 1, 0), lambda stored: stored.swapaxes(0, 1)),
    "transposed the other way": ((0, -1, -1, 0), lambda stored: np.rot90(stored, 2).swapaxes(0, 1)),
}
"""The ``a b c d`` of a display matrix, and an image H×W×3 as it shows it."""


def picture(width: int, height: int) -> np.ndarray:
    """A smooth image, H×W×3 ``uint8`` BGR, that is different after each turn; the left upper corner is red."""
    y, x = np.mgrid[:height, :width] / [[[height]], [[width]]]
    image = np.stack([255 * x, 255 * y, 255 * (1 - np.hypot(x, y) / 2)], axis=2)
    image[: height // 2, : width // 2] = (20, 20, 230)
    return image.astype(np.uint8)


def write_clip(
    path: Path, image: np.ndarray, codec: str = "mpeg4", pixels: str = "yuv420p", frames: int = 1,
    options: Mapping[str, str] | None = None, **attributes: int,
) -> Path:  # fmt: skip
    """Write frames of this image, 25 a second. ``options`` are the codec's, ``attributes`` those of a frame and its
    codec, as ``colorspace``.
    """
    av = pytest.importorskip("av")
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=FPS)
        stream.height, stream.width, stream.pix_fmt = *image.shape[:2], pixels
        stream.codec_context.max_b_frames, stream.options = 0, dict(options or {})
        for number in range(frames):
            frame = av.VideoFrame.from_ndarray(image, format="bgr24").reformat(format=pixels)
            frame.pts = number
            for name, value in attributes.items():
                setattr(stream.codec_context, name, value)
                setattr(frame, name, value)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def turn_clip(path: Path, matrix: tuple[int, int, int, int], box: bytes = b"tkhd") -> Path:
    """Write the ``a b c d`` of a display matrix into the header of an MP4's track, or of the whole movie (``mvhd``)."""
    data = bytearray(path.read_bytes())
    content = data.index(box) + 4
    first = {b"tkhd": (40, 52), b"mvhd": (36, 48)}[box][data[content] > 0]
    a, b, c, d = (value << 16 for value in matrix)
    data[content + first : content + first + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    path.write_bytes(data)
    return path
