"""Small videos for streams, and a server of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
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
