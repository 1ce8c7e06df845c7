"""JPEG decoding by nvImageCodec: on the JPEG engines of a GPU that has them, else on its cores."""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torchpipe_py.errors import BackendUnavailable, DecodeError, first_line

logger = logging.getLogger("torchpipe_py")

OLDEST = "0.9"  # that is known to work
CPU_THREADS = 1  # of a decoder, for what the GPU leaves to the CPU
KEPT_BYTES = 2**28  # of images, between two calls

_VERBOSITY = "PYNVIMGCODEC_VERBOSITY"
_RELEASE_THRESHOLD = 4  # CU_MEMPOOL_ATTR_RELEASE_THRESHOLD


class NvImageCodec:
    """Decodes on ``device``, in the order of ``stream``; chroma is smoothed, as OpenCV does it.

    What the JPEG engines do not take, progressive files for one, is decoded on the cores. ``trial``: small JPEGs to
    begin with, as many as a batch has. The library's images, 3 bytes a pixel, take memory until the next call: what is
    given are copies. ``BackendUnavailable`` where the library is not installed or does not work.
    """

    def __init__(self, device: Any, stream: Any, trial: Sequence[bytes]) -> None:
        import torch

        try:
            with _silent():
                library: Any = importlib.import_module("nvidia.nvimgcodec")
        except ImportError as error:
            problem = f'decoder = "nvimgcodec" needs nvImageCodec (pip install {package(torch)!r})'
            raise BackendUnavailable(f"{problem}: {error}") from error
        self._as_tensor: Any = torch.as_tensor
        self._stack: Any = torch.stack
        self._device, self._stream = device, stream.cuda_stream
        self._last: list[Any] = []  # the library's images of the last call
        name = f"nvImageCodec {library.__version__}"
        try:
            kinds = library.BackendKind
            self._params = library.DecodeParams(
                apply_exif_orientation=False,
                color_spec=library.ColorSpec.SRGB,
                sample_format=library.SampleFormat.P_RGB,
            )
            # NOTE: two decoders, since one that has both shares a batch out among them, and their pixels differ a bit.
            engines, cores = (
                library.Decoder(
                    device_id=device.index,
                    max_num_cpu_threads=CPU_THREADS,
                    backends=[library.Backend(kind) for kind in some],
                    options=":fancy_upsampling=1",
                )
                for some in ([kinds.HW_GPU_ONLY], [kinds.GPU_ONLY, kinds.HYBRID_CPU_GPU])
            )
            _keep_memory(device, KEPT_BYTES)
            self._decoders = [decoder for decoder in (engines, cores) if self._decoded(decoder, trial)[0] is not None]
        except torch.cuda.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, AttributeError, IndexError) as error:  # the latter three: another version
            problem = f"{name} does not work here; {OLDEST} or newer is needed, and nvJPEG"
            raise BackendUnavailable(f"{problem}: {first_line(error)}") from error
        if not self._decoders:
            raise BackendUnavailable(f"{name} does not work here: it cannot decode a small JPEG")
        if engines not in self._decoders:
            logger.warning("%s finds no JPEG engines on %s, and decodes on its cores", name, device)

    def decode(self, encoded: Sequence[bytes]) -> list[Any]:
        """For each image a Tensor 1×3×H×W, uint8, RGB, or a ``DecodeError``."""
        # NOTE: now, since the stream has been waited for: to release an image before that is to wait for it alone,
        # which takes twice as long as to decode it (117 µs an image of 500×375, against 42, on an H200).
        self._last.clear()
        images: list[Any] = [None] * len(encoded)
        for decoder in self._decoders:
            missing = [place for place, image in enumerate(images) if image is None]
            if not missing:
                break
            decoded = self._decoded(decoder, [encoded[place] for place in missing])
            if len(missing) > 1:
                # NOTE: alone once more, so that what becomes of an image does not depend on those beside it.
                for number, place in enumerate(missing):
                    if decoded[number] is None:
                        decoded[number] = self._decoded(decoder, [encoded[place]])[0]
            done = {place: image for place, image in zip(missing, decoded, strict=True) if image is not None}
            for place, image in zip(done, self._copies(list(done.values())), strict=True):
                images[place] = image
        return [
            DecodeError(f"{len(content)} bytes: nvImageCodec cannot decode them ({_VERBOSITY}=2 makes it say why)")
            if image is None
            else image
            for content, image in zip(encoded, images, strict=True)
        ]

    def _copies(self, images: list[Any]) -> Sequence[Any]:
        """In PyTorch's memory: what follows keeps that from being used again too early, by PyTorch's means."""
        tensors = [self._as_tensor(image, device=self._device) for image in images]
        if len({tensor.shape for tensor in tensors}) == 1:
            # NOTE: no tensor more than one for each: as it goes, PyTorch hands Python's lock to whoever waits for it.
            copies: Sequence[Any] = self._stack(tensors).split(1)
            return copies
        return [tensor.clone()[None] for tensor in tensors]

    def _decoded(self, decoder: Any, encoded: Sequence[bytes]) -> list[Any]:
        """An image of the library for each, or ``None``."""
        images: list[Any] = decoder.decode(list(encoded), params=self._params, cuda_stream=self._stream)
        self._last += images
        return images


def package(torch: Any) -> str:
    """What pip installs beside this PyTorch."""
    cuda = (torch.version.cuda or "").partition(".")[0]
    return f"nvidia-nvimgcodec-cu{cuda}[nvjpeg]>={OLDEST}"


@contextmanager
def _silent() -> Iterator[None]:
    """While it is imported, the library reads what to write of images that it cannot decode, which have their errors.

    NOTE: only then is it in the environment, which is the program's.
    """
    if _VERBOSITY in os.environ:
        yield
        return
    os.environ[_VERBOSITY] = "0"
    try:
        yield
    finally:
        os.environ.pop(_VERBOSITY, None)


def _keep_memory(device: Any, size: int) -> None:
    """Let the device's memory pool keep so many bytes, where it would give all back to the driver at each wait."""
    cuda, pool, kept = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_uint64()
    if cuda.cuDeviceGetDefaultMemPool(ctypes.byref(pool), device.index) != 0:
        return
    if cuda.cuMemPoolGetAttribute(pool, _RELEASE_THRESHOLD, ctypes.byref(kept)) == 0 and kept.value < size:
        kept.value = size
        cuda.cuMemPoolSetAttribute(pool, _RELEASE_THRESHOLD, ctypes.byref(kept))
