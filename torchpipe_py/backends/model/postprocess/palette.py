"""Maps of class indices on the original image, and in colours."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from torchpipe_py.backends.image.geometry import MAX_PIXELS, Size
from torchpipe_py.backends.image.original import WayBack
from torchpipe_py.errors import ConfigError, InvalidRequest

MOST_COLOURS = 256
_COLOUR = re.compile("#?([0-9a-fA-F]{6})")


def read_palette(values: Sequence[str]) -> np.ndarray:
    """The colours ``#rrggbb`` of the classes, or those of Pascal VOC for ``("voc",)``: uint8 K×3, RGB."""
    if list(values) == ["voc"]:
        return voc_colours()
    colours = []
    for value in values:
        match = _COLOUR.fullmatch(value)
        if match is None:
            raise ConfigError(f"palette: expected voc, or a colour #rrggbb for each class, got {value!r}")
        colours.append(list(bytes.fromhex(match[1])))
    return np.array(colours, np.uint8)


def voc_colours() -> np.ndarray:
    """The 256 colours of Pascal VOC: the bits of an index, in threes, from the highest bit of each channel on."""
    indices = np.arange(MOST_COLOURS)
    colours = np.zeros((MOST_COLOURS, 3), np.uint8)
    for bit in range(8):
        for channel in range(3):
            colours[:, channel] |= ((indices >> (3 * bit + channel) & 1) << (7 - bit)).astype(np.uint8)
    return colours


def on_original(classes: np.ndarray, size: Size, back: WayBack) -> np.ndarray:
    """A map h×w, of a model's input of ``size``, at the pixels of the original: the nearest value for each."""
    if back.size[0] * back.size[1] > MAX_PIXELS:  # a client may have sent the size
        raise InvalidRequest(f"a map of {back.size[1]}x{back.size[0]} pixels is larger than {MAX_PIXELS} pixels")
    places = []
    for axis, (count, pixels) in enumerate(zip(classes.shape, size, strict=True)):
        middles = (np.arange(back.size[axis]) + 0.5 - back.offset[1 - axis]) / back.scale[1 - axis]
        places.append(np.clip(np.floor(middles * (count / pixels)), 0, count - 1).astype(np.int64))
    rows, columns = places
    found: np.ndarray = classes[rows][:, columns]
    return found
