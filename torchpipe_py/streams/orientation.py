"""The turn that shows stored frames upright: quarter turns and mirrors of a display matrix."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import IO, Any, NamedTuple

import numpy as np

MOST_BOXES = 10_000
"""Boxes of an MP4 that are looked at on one level."""

_MATRIX = ">9i"
_TRACK_PLACES, _MOVIE_PLACES = (40, 52), (36, 48)  # of the matrix in tkhd and mvhd, by their version


class Turn(NamedTuple):
    """How to show a stored frame upright: transpose it, then reverse its rows, its columns, or both."""

    is_transposed: bool = False
    reverses_rows: bool = False
    reverses_columns: bool = False

    @classmethod
    def of_matrix(cls, matrix: Sequence[int]) -> Turn:
        """The turn of a display matrix ``a b u c d v x y w``, as MP4 and FFmpeg have it.

        The stored point x, y is shown at a·x + c·y, b·x + d·y. Scale and position are ignored, and so is a matrix
        that is neither a quarter turn nor a mirrored one.
        """
        a, b, _, c, d = matrix[:5]
        straight, crossed = min(abs(a), abs(d)), min(abs(b), abs(c))
        if straight > 100 * max(abs(b), abs(c)):
            return cls(False, d < 0, a < 0)
        if crossed > 100 * max(abs(a), abs(d)):
            return cls(True, b < 0, c < 0)
        return AS_STORED

    @classmethod
    def of_degrees(cls, degrees: float) -> Turn:
        """The turn by 90, 180 or 270 degrees clockwise; any other angle is ignored."""
        turns = {90: cls(True, False, True), 180: cls(False, True, True), 270: cls(True, True, False)}
        return turns.get(round(degrees) % 360, AS_STORED)

    def apply(self, image: Any) -> Any:
        """The upright image: H×W×3 as an array, or 1×3×H×W as a Tensor; both contiguous."""
        if not isinstance(image, np.ndarray):
            image = image.transpose(2, 3) if self.is_transposed else image
            return image.flip([2] * self.reverses_rows + [3] * self.reverses_columns).contiguous()
        import cv2

        image = cv2.transpose(image) if self.is_transposed else image
        flip = {(True, False): 0, (False, True): 1, (True, True): -1}.get((self.reverses_rows, self.reverses_columns))
        return image if flip is None else cv2.flip(image, flip)


AS_STORED = Turn()


def turn_of_frame(frame: Any) -> Turn:
    """The turn of a frame that PyAV decoded, from its container or its own data."""
    for data in frame.side_data:
        if data.type.name == "DISPLAYMATRIX":
            return Turn.of_matrix(struct.unpack("=9i", bytes(data)))
    return AS_STORED


def turn_of_mp4(path: str) -> Turn | None:
    """The turn of the first video track of an MP4 or MOV file; ``None`` for other files and damaged headers."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            for kind, start, end in _boxes(file, 0, size):
                if kind == b"moov":
                    return _turn_of_movie(file, start, end)
    except (OSError, struct.error):
        pass
    return None


def _turn_of_movie(file: IO[bytes], start: int, end: int) -> Turn | None:
    """The turn that the headers of the movie and of its first video track give together."""
    movie, shown = None, None
    for kind, inner, inner_end in _boxes(file, start, end):
        if kind == b"mvhd":
            movie = _matrix(file, inner, _MOVIE_PLACES)
        elif kind == b"trak" and shown is None:
            boxes = {name: place for name, *place in _boxes(file, inner, inner_end)}
            if b"tkhd" in boxes and b"mdia" in boxes and _is_video(file, *boxes[b"mdia"]):
                shown = _matrix(file, boxes[b"tkhd"][0], _TRACK_PLACES)
    if shown is None:
        return None
    if movie is not None:
        (a, b, _, c, d), (e, f, _, g, h) = shown[:5], movie[:5]
        shown = [a * e + b * g, a * f + b * h, 0, c * e + d * g, c * f + d * h]
    return Turn.of_matrix(shown)


def _is_video(file: IO[bytes], start: int, end: int) -> bool:
    """Whether the handler of a track's media is that of video."""
    for kind, inner, _ in _boxes(file, start, end):
        if kind == b"hdlr":
            file.seek(inner + 8)
            return file.read(4) == b"vide"
    return False


def _matrix(file: IO[bytes], start: int, places: tuple[int, int]) -> Sequence[int]:
    """The matrix in a header box, whose first byte is its version."""
    file.seek(start)
    (version,) = struct.unpack("B", file.read(1))
    file.seek(start + places[version > 0])
    return struct.unpack(_MATRIX, file.read(36))


def _boxes(file: IO[bytes], start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Kind, start and end of the content of each box in these bytes of a file, up to one that does not fit."""
    return islice(_all_boxes(file, start, end), MOST_BOXES)


def _all_boxes(file: IO[bytes], start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    while start + 8 <= end:
        file.seek(start)
        size, kind = struct.unpack(">I4s", file.read(8))
        head = 8
        if size == 1:
            (size,) = struct.unpack(">Q", file.read(8))
            head = 16
        elif size == 0:  # up to the end
            size = end - start
        if size < head or start + size > end:
            return
        yield kind, start + head, start + size
        start += size
