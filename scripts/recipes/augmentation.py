"""The augmentations of a training: one set of numbers for every loader, so that all make the same kind of images.

The order is: resize to ``ENLARGED`` times the size, rotate, crop a part of random area and aspect ratio to the size,
twist the colours, erase, flip, normalise. Without ``crop`` images are resized to the size at once. Only ``train.py``
with a pipe, whose TOML sets the size, crops from images of that size.
"""

from __future__ import annotations

AUGMENTS = ("crop", "color", "cutout", "gridmask")

ENLARGED = 1.2
"""Sides of the image before rotation and crop, relative to those of the result."""


def enlarged(size: int) -> int:
    """Sides, in pixels, of the image before it is rotated and cropped to ``size``."""
    return round(size * ENLARGED)


ROTATION = 20.0
"""Degrees, either way; corners become black."""
AREA, ASPECT_RATIO = (0.3, 1.0), (3 / 4, 4 / 3)
"""Ranges of the crop: area as a share of the image's, and width over height (uniform in the logarithm)."""
BRIGHTNESS = CONTRAST = SATURATION = 0.5
"""Factors are drawn from 1 - this to 1 + this."""
HUE = 0.3
"""Turns of the colour wheel, either way: 0.3 is 108 degrees."""
HOLES, HOLE_SIDE = 1, 0.5
"""CutOut: squares in an image, and their side over the image's. Centres are anywhere, squares cut off at the border."""
TILE, TILE_RATIO = 0.25, (0.2, 0.6)
"""GridMask: side of a tile over the image's, and of its black square over the tile's. The grid's phase is random."""
