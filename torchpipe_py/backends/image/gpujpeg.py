"""JPEG decoding on the GPU, and which files its JPEG engines may have."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

import numpy as np

from torchpipe_py.backends.base import Data, Isolation, ItemBackend
from torchpipe_py.backends.cuda import Guard, on_stream
from torchpipe_py.backends.image import original
from torchpipe_py.backends.image.decode import HeaderCheck
from torchpipe_py.backends.image.geometry import max_pixels
from torchpipe_py.backends.image.jpeg import PROGRESSIVE, JpegHeader, WholeCheck
from torchpipe_py.backends.image.mat import COLORS, EIGHT_BITS, OF_MATS, as_mat, color_of, encoded_bytes, to_color
from torchpipe_py.backends.image.nvimgcodec import NvImageCodec
from torchpipe_py.backends.params import Param
from torchpipe_py.backends.signature import ENCODED, ENCODED_IMAGE, TENSOR, Signature
from torchpipe_py.cores import usable_cores
from torchpipe_py.errors import BackendUnavailable, DecodeError, InvalidRequest, first_line, logger
from torchpipe_py.keys import TASK_COLOR_KEY, TASK_DATA_KEY, TASK_ERROR_KEY, TASK_RESULT_KEY
from torchpipe_py.values import to_bool, to_int, to_str

CHECKERS = 8
"""Threads that check the files of one batch."""


def read_header(data: bytes, check: HeaderCheck) -> JpegHeader:
    """The header; ``DecodeError`` if ``check`` refuses it, it is cut off, or the GPU cannot decode such a JPEG."""
    jpeg = check(data)
    assert isinstance(jpeg, JpegHeader)
    if not jpeg.is_tight:
        raise DecodeError("JPEG: there are bytes between its segments, which is not supported on the GPU")
    if jpeg.channels == 4:
        raise DecodeError("JPEG: 4 color components (CMYK) are not supported on the GPU")
    if data.rfind(b"\xff\xd9", jpeg.data_start) < 0:
        raise DecodeError(f"JPEG: cut off after {len(data)} bytes, without an end marker")
    if jpeg.frame == PROGRESSIVE and b"\xff\xdd" in data:
        # NOTE: nvJPEG (CUDA 13.0, H200) decodes these wrongly without a word; `torchpipe parity` showed it.
        raise DecodeError("JPEG: progressive with restart markers is not supported on the GPU")
    if jpeg.channels == 3 and jpeg.transform == 0:
        raise DecodeError("JPEG: colors stored as RGB, not YCbCr, are not supported on the GPU")
    return jpeg


class CheckJpeg(ItemBackend):
    """Passes on JPEG bytes that ``DecodeTensor`` may decode unchecked, on the CPU, beside whatever the GPU does.

    ``result`` is ``data``. A broken file, one of another format, one of more than ``max_pixels``, and one that the JPEG
    engines do not take (progressive, CMYK, several scans): no ``result``, ``error`` is a ``DecodeError``. A next node
    ``DecodeMat`` with ``filter = "or"`` decodes it on the CPU, and ``DecodeTensor`` takes that as well. Needs
    simplejpeg.
    """

    reads = ()

    takes, gives = ENCODED, ENCODED
    passes_on = True
    checks = True
    keeps_nothing = True
    isolation = Isolation.REFUSED

    max_pixels = max_pixels()

    def setup(self) -> None:
        self._check = HeaderCheck(("jpeg",), self.max_pixels)
        self._whole_check = WholeCheck()

    def signature(self) -> Signature:
        return ENCODED_IMAGE

    def forward_item(self, item: Data) -> None:
        data = item[TASK_DATA_KEY]
        data = data if isinstance(data, bytes) else encoded_bytes(data).tobytes()
        try:
            read_header(data, self._check)
            self._whole_check(data)
        except DecodeError as error:
            item[TASK_ERROR_KEY] = error
        else:
            item[TASK_RESULT_KEY] = data


class Torchvision:
    """nvJPEG by torchvision, which uses its own streams and waits for them; same interface as ``NvImageCodec``."""

    name = "torchvision"
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
        # Encoded images are only read. NOTE: not catch_warnings, since instances are set up in parallel.
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        # From 0.29 on: advice for developers who choose the library, not for operators.
        warnings.filterwarnings("ignore", "The image decoding and encoding capabilities of Torch", DeprecationWarning)
        try:
            for count in {1, len(trial)}:
                self._decoded(trial[:count])
        except self._out_of_memory:
            raise
        except RuntimeError as error:
            raise BackendUnavailable(f"nvJPEG does not work here: {first_line(error)}") from error

    def decode(self, encoded: Sequence[bytes]) -> list[Any]:
        """Decode each image to a Tensor 1×3×H×W, uint8, RGB, or a ``DecodeError``."""
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


def best_decoder(device: Any, stream: Any, trial: Sequence[bytes]) -> Torchvision | NvImageCodec:
    """nvImageCodec, whose pixels are OpenCV's; torchvision if that is missing or does not work."""
    try:
        return NvImageCodec(device, stream, trial)
    except BackendUnavailable as first:
        try:
            decoder = Torchvision(device, stream, trial)
        except BackendUnavailable as second:
            raise BackendUnavailable(f"{first}; {second}") from second
        logger.info("JPEGs are decoded by torchvision: %s", first)
        return decoder


DECODERS: dict[str, Callable[[Any, Any, Sequence[bytes]], Torchvision | NvImageCodec]] = {
    "auto": best_decoder,
    "nvimgcodec": NvImageCodec,
    "nvimgcodec_cuda": partial(NvImageCodec, uses_engines=False),
    "torchvision": Torchvision,
}


class _Jpeg(NamedTuple):
    """A file whose header was accepted."""

    item: Data
    data: bytes
    header: JpegHeader


@on_stream
class DecodeTensor(ItemBackend):
    """JPEG bytes to a Tensor 1×3×H×W, ``uint8``, on the GPU by nvJPEG; a batch is decoded in one call.

    Baseline and progressive JPEGs, gray or YCbCr; EXIF orientation is applied, as ``DecodeMat`` does. Anything else
    (another format, CMYK, progressive with restart markers or more than 32 scans, more pixels than ``max_pixels``,
    cut-off or corrupt bytes): no ``result``, ``error`` is a ``DecodeError``; a next node with ``filter = "or"`` can
    decode it on the CPU. A Mat of 3 channels, ``uint8``, decoded by a node before, is copied to the GPU.
    The images of one call have at most ``max_pixels`` together.

    ``decoder``: the library that calls nvJPEG. With ``torchvision`` pixels differ from OpenCV's where chroma is
    subsampled, since it is not smoothed; ``nvimgcodec``, NVIDIA's nvImageCodec, smooths it; ``auto`` is the latter
    if it works, otherwise the former. ``torchpipe parity`` shows the differences. Images of one size from one call of
    ``nvimgcodec`` share memory.

    For broken compressed data, the GPU's JPEG engines return pixels of an image that they decoded before. So each
    file is first checked on the CPU, as by ``CheckJpeg``, in up to eight threads for a batch; a broken one, or
    one that is not baseline with one scan, has a ``DecodeError``. ``unchecked = true`` skips this: for your
    own files, or after a node with ``CheckJpeg``. ``nvimgcodec_cuda`` uses no engines, needs no check,
    and decodes a twentieth of the images in a second.
    """

    reads = ()

    takes, gives = ENCODED, TENSOR
    needs_cuda = True
    isolation = Isolation.REFUSED

    color = Param(to_color, "rgb", choices=COLORS, doc="channel order of the Tensor")
    decoder = Param(to_str, "auto", choices=tuple(DECODERS), doc="the library that calls nvJPEG")
    max_batch = Param(to_int, 1, low=1, key="max", doc="most images decoded in one call")
    max_pixels = max_pixels()
    unchecked = Param(to_bool, False, doc="decode broken files too, which may show pixels of other images")

    @classmethod
    def undeclared(cls, key: str, value: Any) -> str:
        is_reduced = key == "at_least"
        return "DecodeTensor decodes whole images; DecodeMat takes it" if is_reduced else super().undeclared(key, value)

    guard: Guard
    _jpegs: Torchvision | NvImageCodec | None = None
    _whole_check: WholeCheck | None = None
    _checkers: ThreadPoolExecutor | None = None

    def setup(self) -> None:
        import cv2

        # nvJPEG starts at its first call: make it now, so that no request waits for it.
        stream: Any = self.guard.stream  # type: ignore[union-attr]  # it needs CUDA
        small = bytes(cv2.imencode(".jpg", np.zeros((16, 16, 3), np.uint8))[1])
        self._jpegs = DECODERS[self.decoder](self.guard.device, stream, [small] * self.max())
        self._check = HeaderCheck(("jpeg",), self.max_pixels)
        if self._jpegs.uses_engines and not self.unchecked:
            self._whole_check = WholeCheck()
            self._checkers = ThreadPoolExecutor(min(CHECKERS, self.max(), usable_cores()), "torchpipe-check")

    def max(self) -> int:
        return int(self.max_batch)

    def signature(self) -> Signature:
        return ENCODED_IMAGE

    def setup_choices(self) -> Iterator[str]:
        if self._jpegs is not None:
            yield f"DecodeTensor: {self._jpegs.name}"

    def forward(self, items: list[Data]) -> None:
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
        # NOTE: copy: the memory of a read-only Mat may be reused for the next request once this one is answered.
        tensor = torch.tensor(mat, device=self.guard.device).permute(2, 0, 1)[None]
        is_same = color_of(item, 3, OF_MATS) == self.color
        item[TASK_RESULT_KEY] = tensor.contiguous() if is_same else tensor.flip(1)
        item[TASK_COLOR_KEY] = self.color
        original.begin(item, *mat.shape[:2])

    def _checked(self, images: list[_Jpeg], check: WholeCheck) -> list[_Jpeg]:
        """The images that the engines may decode; the others get their errors."""

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
        for (item, data, header), image in zip(images, decoded, strict=True):
            if isinstance(image, DecodeError):
                item[TASK_ERROR_KEY] = image
                continue
            if image.shape[2:] != (header.height, header.width):
                # The limits were checked for the size in the header: another size means another image.
                item[TASK_ERROR_KEY] = DecodeError(f"JPEG: decoded to another size than {header.width}x{header.height}")
                continue
            image = oriented(image, header.orientation(data))
            item[TASK_RESULT_KEY] = image if self.color == "rgb" else image.flip(1)
            item[TASK_COLOR_KEY] = self.color
            original.begin(item, *image.shape[2:])

    def close(self) -> None:
        if self._checkers is not None:
            self._checkers.shutdown()
        self._jpegs = self._checkers = None


def oriented(image: Any, orientation: int) -> Any:
    """An image …×H×W turned upright by its EXIF orientation 1..8 (Exif 2.3, table 6)."""
    if orientation == 1:
        return image
    if orientation >= 5:
        image = image.transpose(-2, -1)
    dims = {2: (-1,), 3: (-2, -1), 4: (-2,), 6: (-1,), 7: (-2, -1), 8: (-2,)}.get(orientation, ())
    return (image.flip(dims) if dims else image).contiguous()
