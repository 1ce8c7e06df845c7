"""JPEG decoding on the GPU."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import compress
from typing import Any, NamedTuple, Protocol

import numpy as np

from torchpipe_py.backends.base import Data, Isolation
from torchpipe_py.backends.cuda import GuardedBackend
from torchpipe_py.backends.image.jpeg import GpuJpeg, WholeCheck, read_header
from torchpipe_py.backends.image.nvimgcodec import NvImageCodec
from torchpipe_py.backends.image.opencv import (
    COLORS,
    EIGHT_BITS,
    OF_MATS,
    as_mat,
    color_of,
    encoded_bytes,
    max_pixels,
    to_color,
)
from torchpipe_py.backends.params import Param
from torchpipe_py.backends.signature import ENCODED, ENCODED_IMAGE, TENSOR, Signature
from torchpipe_py.cores import usable_cores
from torchpipe_py.errors import BackendUnavailable, DecodeError, InvalidRequest, first_line
from torchpipe_py.images.header import HeaderCheck
from torchpipe_py.keys import TASK_COLOR_KEY, TASK_DATA_KEY, TASK_ERROR_KEY, TASK_RESULT_KEY
from torchpipe_py.values import to_bool, to_int, to_str

logger = logging.getLogger("torchpipe_py")


class JpegDecoder(Protocol):
    """Decodes batches; made with the device, the instance's stream, and small JPEGs, as many as a batch has."""

    uses_engines: bool

    def __init__(self, device: Any, stream: Any, trial: Sequence[bytes]) -> None: ...

    def decode(self, encoded: Sequence[bytes]) -> list[Any]:
        """For each image a Tensor 1×3×H×W, uint8, RGB, or a ``DecodeError``."""


class Torchvision:
    """nvJPEG through torchvision, which has its own streams and waits for them."""

    uses_engines = True

    def __init__(self, device: Any, stream: Any, trial: Sequence[bytes]) -> None:
        try:
            import torch
            from torchvision.io import ImageReadMode, decode_jpeg
        except ImportError as error:
            raise BackendUnavailable(f"DecodeTensor needs torchvision (pip install torchvision): {error}") from error
        self._device = device
        self._frombuffer: Any = torch.frombuffer
        self._uint8 = torch.uint8
        self._out_of_memory = torch.cuda.OutOfMemoryError
        self._decode: Any = decode_jpeg
        self._rgb = ImageReadMode.RGB
        # Nobody writes to an encoded image. NOTE: not catch_warnings, since instances are set up side by side.
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        # From 0.29 on: that is for whoever chooses the library, not for those who run it.
        warnings.filterwarnings("ignore", "The image decoding and encoding capabilities of Torch", DeprecationWarning)
        try:
            for count in {1, len(trial)}:
                self._decoded(trial[:count])
        except self._out_of_memory:
            raise
        except RuntimeError as error:
            raise BackendUnavailable(f"nvJPEG does not work here: {first_line(error)}") from error

    def decode(self, encoded: Sequence[bytes]) -> list[Any]:
        """For each image a Tensor 1×3×H×W, uint8, RGB, or a ``DecodeError``."""
        try:
            return [image[None] for image in self._decoded(encoded)]
        except self._out_of_memory:
            raise
        except RuntimeError as error:
            if len(encoded) > 1:
                return [self.decode([content])[0] for content in encoded]
            return [DecodeError(f"{len(encoded[0])} bytes: {first_line(error)}")]

    def _decoded(self, encoded: Sequence[bytes]) -> list[Any]:
        buffers = [self._frombuffer(content, dtype=self._uint8) for content in encoded]
        images: list[Any] = self._decode(buffers, mode=self._rgb, device=self._device)
        return images


def best_decoder(device: Any, stream: Any, trial: Sequence[bytes]) -> JpegDecoder:
    """nvImageCodec, whose pixels are OpenCV's, or torchvision where that is not installed or does not work."""
    try:
        return NvImageCodec(device, stream, trial)
    except BackendUnavailable as first:
        try:
            decoder = Torchvision(device, stream, trial)
        except BackendUnavailable as second:
            raise BackendUnavailable(f"{first}; {second}") from second
        logger.info("JPEGs are decoded by torchvision: %s", first)
        return decoder


DECODERS: dict[str, Callable[[Any, Any, Sequence[bytes]], JpegDecoder]] = {
    "auto": best_decoder,
    "nvimgcodec": NvImageCodec,
    "nvimgcodec_cuda": partial(NvImageCodec, uses_engines=False),
    "torchvision": Torchvision,
}


CHECKERS = 8
"""Threads that check the files of one batch."""


class _Jpeg(NamedTuple):
    """A file that its header lets through."""

    item: Data
    data: bytes
    header: GpuJpeg


class DecodeTensor(GuardedBackend):
    """JPEG bytes to a Tensor 1×3×H×W, ``uint8``, on the GPU by nvJPEG; a batch is decoded in one call.

    Baseline and progressive JPEGs, gray or YCbCr; EXIF orientation is applied, as ``cv2.imdecode`` does. Anything else
    (another format, CMYK, progressive with restart markers or more than 32 scans, more pixels than ``max_pixels``,
    cut-off or corrupt bytes): no ``result``, ``error`` is a ``DecodeError``; a next node with ``filter = "or"`` can
    decode it on the CPU. A Mat of 3 channels, ``uint8``, which a node before has decoded, goes to the GPU as it is.
    The images of one call have no more than ``max_pixels`` together.

    ``decoder``: the library that calls nvJPEG. With ``torchvision`` pixels differ from OpenCV's where chroma is
    subsampled, since it is not smoothed; ``nvimgcodec``, NVIDIA's nvImageCodec, smooths it; ``auto`` is the latter
    where it works, else the former. ``torchpipe parity`` shows the differences. Images of one size from one call of
    ``nvimgcodec`` share memory.

    Where compressed data is broken, the GPU's JPEG engines show pixels of an image that they decoded before. So each
    file is checked on the CPU first, as ``CheckJpeg`` does it, in up to eight threads for a batch; a broken one, and
    one that is not baseline with one scan, has a ``DecodeError``. With ``unchecked = true`` nothing is checked: for
    files of your own, or where ``CheckJpeg`` is in a node before. ``nvimgcodec_cuda`` uses no engines, needs no check,
    and decodes a twentieth of the images in a second.
    """

    takes, gives = ENCODED, TENSOR
    needs_cuda = True
    isolation = Isolation.REFUSED

    color = Param(to_color, "rgb", choices=COLORS, doc="channel order of the Tensor")
    decoder = Param(to_str, "auto", choices=tuple(DECODERS), doc="the library that calls nvJPEG")
    max_batch = Param(to_int, 1, low=1, key="max", doc="most images decoded in one call")
    max_pixels = max_pixels()
    unchecked = Param(to_bool, False, doc="decode broken files too, which may show pixels of other images")

    _jpegs: JpegDecoder | None = None
    _whole_check: WholeCheck | None = None
    _checkers: ThreadPoolExecutor | None = None

    def setup_guarded(self) -> None:
        assert self._guard is not None
        # nvJPEG starts at its first call: no request waits for that.
        self.start(DECODERS[self.decoder](self.device, self._guard.stream, [_small_jpeg()] * self.max()))

    def start(self, decoder: JpegDecoder) -> None:
        """Decode by ``decoder``, and check what it gets where that is needed."""
        self._jpegs = decoder
        self._check = HeaderCheck(("jpeg",), self.max_pixels)
        if decoder.uses_engines and not self.unchecked:
            self._whole_check = WholeCheck()
            self._checkers = ThreadPoolExecutor(min(CHECKERS, self.max(), usable_cores()), "torchpipe-check")

    def max(self) -> int:
        return int(self.max_batch)

    def signature(self) -> Signature:
        return ENCODED_IMAGE

    def forward_guarded(self, items: list[Data]) -> None:
        good: list[_Jpeg] = []
        for item in items:
            data = item[TASK_DATA_KEY]
            try:
                if isinstance(data, np.ndarray) and data.ndim == 3:
                    self._take_over(item, data)
                    continue
                data = data if isinstance(data, bytes) else encoded_bytes(data).tobytes()
                good.append(_Jpeg(item, data, read_header(data, self._check)))
            except (DecodeError, InvalidRequest) as error:
                item[TASK_ERROR_KEY] = error
        if self._whole_check is not None:
            good = self._checked(good, self._whole_check)
        for group in self._groups(good):
            self._decode(group)

    def _take_over(self, item: Data, mat: np.ndarray) -> None:
        """The result of an image that a node before has decoded."""
        import torch

        mat = as_mat(mat, EIGHT_BITS)
        if mat.shape[2] != 3:
            raise InvalidRequest(f"DecodeTensor takes a decoded image of 3 channels, got {mat.shape[2]}")
        # NOTE: the memory of a Mat that cannot be written to may belong to the next request once this one is answered.
        tensor = torch.tensor(mat, device=self.device).permute(2, 0, 1)[None]
        is_same = color_of(item, 3, OF_MATS) == self.color
        item[TASK_RESULT_KEY] = tensor.contiguous() if is_same else tensor.flip(1)
        item[TASK_COLOR_KEY] = self.color

    def _checked(self, images: list[_Jpeg], check: WholeCheck) -> list[_Jpeg]:
        """Those that the engines may have; the others get their errors."""

        def passes(image: _Jpeg) -> bool:
            try:
                check(image.data)
            except DecodeError as error:
                image.item[TASK_ERROR_KEY] = error
                return False
            return True

        assert self._checkers is not None
        passed = self._checkers.map(passes, images) if len(images) > 1 else map(passes, images)
        return list(compress(images, passed))

    def _groups(self, images: Sequence[_Jpeg]) -> Iterator[list[_Jpeg]]:
        """Runs of images that together have no more pixels than one image may have."""
        group: list[_Jpeg] = []
        pixels = 0
        for image in images:
            size = image.header.width * image.header.height
            if group and pixels + size > self.max_pixels:
                yield group
                group, pixels = [], 0
            group.append(image)
            pixels += size
        if group:
            yield group

    def _decode(self, images: Sequence[_Jpeg]) -> None:
        assert self._jpegs is not None
        decoded = self._jpegs.decode([image.data for image in images])
        for (item, _, header), image in zip(images, decoded, strict=True):
            if isinstance(image, DecodeError):
                item[TASK_ERROR_KEY] = image
                continue
            if image.shape[2:] != (header.height, header.width):
                # What the header says is what was bounded: another size is another image.
                item[TASK_ERROR_KEY] = DecodeError(f"JPEG: decoded to another size than {header.width}x{header.height}")
                continue
            if header.orientation != 1:
                image = oriented(image, header.orientation)
            item[TASK_RESULT_KEY] = image if self.color == "rgb" else image.flip(1)
            item[TASK_COLOR_KEY] = self.color

    def close(self) -> None:
        if self._checkers is not None:
            self._checkers.shutdown()
        self._jpegs = self._checkers = None
        super().close()


def oriented(image: Any, orientation: int) -> Any:
    """An image …×H×W turned upright by its EXIF orientation 1..8 (Exif 2.3, table 6)."""
    if orientation >= 5:
        image = image.transpose(-2, -1)
    dims = {2: (-1,), 3: (-2, -1), 4: (-2,), 6: (-1,), 7: (-2, -1), 8: (-2,)}.get(orientation, ())
    return (image.flip(dims) if dims else image).contiguous()


def _small_jpeg() -> bytes:
    """16×16 pixels, black."""
    import cv2
    import numpy as np

    return bytes(cv2.imencode(".jpg", np.zeros((16, 16, 3), np.uint8))[1])
