"""JPEG decoding by nvImageCodec: on the JPEG engines of a GPU that has them, else on its cores."""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import compress
from tempfile import TemporaryFile
from typing import Any

from torchpipe_py.errors import BackendUnavailable, DecodeError, first_line, logger

OLDEST_VERSION = "0.9"
CPU_THREADS = 1  # of each decoder, for the CPU's part of decoding
KEPT_BYTES = 2**28  # image memory that stays allocated between two calls

_LIBRARY = "nvidia.nvimgcodec"
_importing = threading.Lock()
_OTHER_FORMATS = re.compile(rb"(?i)nvjpeg2k|nvjpeg2000|nvtiff")
_VERBOSITY = "PYNVIMGCODEC_VERBOSITY"
_RELEASE_THRESHOLD = 4  # CU_MEMPOOL_ATTR_RELEASE_THRESHOLD


class _Target:
    """An image of the library that is reused by each call, and a tensor over its memory."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Release the image."""
        self._tensor: Any = None
        self._laid_out: tuple[int, Sequence[int]] | None = (
            None  # capacity and shape of the image when the tensor was made
        )
        self.image: Any = None

    @property
    def capacity(self) -> int:
        """Bytes of memory."""
        return int(getattr(self.image, "capacity", 0))

    def put(self, image: Any) -> None:
        """Store the image of a call: this target's own, with new pixels, or another one."""
        if image is not self.image:
            self.clear()
            self.image = image

    def tensor(self, as_tensor: Any, device: Any) -> Any:
        """A tensor 3×H×W over the image's memory."""
        # NOTE: the memory moves only when it grows. Do not read the address: that releases the GIL several times, the
        # shape once, and the capacity never.
        laid_out = self.capacity, self.image.shape
        if laid_out != self._laid_out:
            self._tensor = as_tensor(self.image, device=device)
            self._laid_out = laid_out
        return self._tensor


class NvImageCodec:
    """Decodes on ``device``, in the order of ``stream``; chroma is smoothed, as OpenCV does it.

    Files that the JPEG engines do not decode, such as progressive ones, are decoded on the GPU's cores; without
    ``uses_engines`` all are. ``trial``: small JPEGs for a first call, as many as a batch has. The library's images, 3
    bytes a pixel, are reused by the next call, so results are copies. Raises ``BackendUnavailable`` if the library
    is not installed or does not work.
    """

    name = "nvimgcodec"

    def __init__(self, device: Any, stream: Any, trial: Sequence[bytes], uses_engines: bool = True) -> None:
        import torch

        try:
            library = _imported()
        except ImportError as error:
            problem = f'decoder = "nvimgcodec" needs nvImageCodec (pip install {package(torch)!r})'
            raise BackendUnavailable(f"{problem}: {error}") from error
        self._as_tensor: Any = torch.as_tensor
        self._stack: Any = torch.stack
        self._device, self._stream = device, stream.cuda_stream
        self.uses_engines = uses_engines
        self._targets = [_Target() for _ in trial]  # one for each place in a batch
        name = f"nvImageCodec {library.__version__}"
        try:
            kinds = library.BackendKind
            self._params = library.DecodeParams(
                apply_exif_orientation=False,
                color_spec=library.ColorSpec.SRGB,
                sample_format=library.SampleFormat.P_RGB,
            )
            # NOTE: two decoders: one with both kinds would split a batch among them, and their pixels differ slightly.
            engines, cores = [kinds.HW_GPU_ONLY], [kinds.GPU_ONLY, kinds.HYBRID_CPU_GPU]
            decoders = [
                library.Decoder(
                    device_id=device.index,
                    max_num_cpu_threads=CPU_THREADS,
                    backends=[library.Backend(kind) for kind in some],
                    options=":fancy_upsampling=1",
                )
                for some in ([engines, cores] if uses_engines else [cores])
            ]
            _keep_memory(device, KEPT_BYTES)
            self._decoders = [decoder for decoder in decoders if self._decode(decoder, trial, self._targets)[0]]
        except torch.cuda.OutOfMemoryError:
            raise
        except (
            RuntimeError,
            TypeError,
            AttributeError,
            LookupError,
            ValueError,
        ) as error:  # also from an unknown version
            problem = f"{name} does not work here; {OLDEST_VERSION} or newer is needed, and nvJPEG"
            raise BackendUnavailable(f"{problem}: {first_line(error)}") from error
        if not self._decoders:
            raise BackendUnavailable(f"{name} does not work here: it cannot decode a small JPEG")
        if uses_engines and decoders[0] not in self._decoders:
            logger.warning("%s finds no JPEG engines on %s, and decodes on its cores", name, device)
            self.uses_engines = False

    def decode(self, encoded: Sequence[bytes]) -> list[Any]:
        """Decode each image to a Tensor 1×3×H×W, uint8, RGB, or a ``DecodeError``."""
        self._trim()
        self._targets += [_Target() for _ in range(len(encoded) - len(self._targets))]
        images: list[Any] = [None] * len(encoded)
        for decoder in self._decoders:
            places = [place for place, image in enumerate(images) if image is None]
            if not places:
                break
            targets = [self._targets[place] for place in places]
            is_decoded = self._decode(decoder, [encoded[place] for place in places], targets)
            if len(places) > 1:
                # Retry each alone, so that an outcome does not depend on the other images of the batch.
                for number, place in enumerate(places):
                    if not is_decoded[number]:
                        (is_decoded[number],) = self._decode(decoder, [encoded[place]], [targets[number]])
            done = list(compress(places, is_decoded))
            for place, image in zip(done, self._copies(list(compress(targets, is_decoded))), strict=True):
                images[place] = image
        for target, image in zip(self._targets, images, strict=False):
            if image is None:
                target.clear()  # never decode again into memory that a failed decoder used
        return [
            DecodeError(f"{len(content)} bytes: nvImageCodec cannot decode them ({_VERBOSITY}=2 makes it say why)")
            if image is None
            else image
            for content, image in zip(encoded, images, strict=True)
        ]

    def _trim(self) -> None:
        """Release the largest images beyond ``KEPT_BYTES``.

        NOTE: call it before decoding, when the stream is idle: releasing an image waits for the stream, which takes
        twice as long as to decode it (117 µs an image of 500×375, against 42, on an H200).
        """
        while sum(target.capacity for target in self._targets) > KEPT_BYTES:
            max(self._targets, key=lambda target: target.capacity).clear()

    def _copies(self, targets: Sequence[_Target]) -> Sequence[Any]:
        """Copies in PyTorch's memory, which its allocator does not reuse too early.

        The library's memory is safe, too: the next call decodes in the order of the stream, after these copies.
        """
        # NOTE: create no unneeded tensor: freeing one makes PyTorch release the GIL to other threads.
        tensors = [target.tensor(self._as_tensor, self._device) for target in targets]
        if len({tensor.shape for tensor in tensors}) == 1:
            copies: Sequence[Any] = self._stack(tensors).split(1)
            return copies
        return [self._stack([tensor]) for tensor in tensors]

    def _decode(self, decoder: Any, encoded: Sequence[bytes], targets: Sequence[_Target]) -> list[bool]:
        """Decode each image into the target at its index; return whether each succeeded."""
        options: dict[str, Any] = {"params": self._params, "cuda_stream": self._stream}
        images = decoder.decode(list(encoded), images=[target.image for target in targets], **options)
        for target, image in zip(targets, images, strict=True):
            if image is not None:
                target.put(image)
        return [image is not None for image in images]


def package(torch: Any) -> str:
    """The requirement for pip that fits this PyTorch."""
    cuda = (torch.version.cuda or "").partition(".")[0]
    return f"nvidia-nvimgcodec-cu{cuda}[nvjpeg]>={OLDEST_VERSION}"


def _imported() -> Any:
    # NOTE: by one thread at a time, since instances are set up in parallel and ``_silent`` changes the whole process.
    with _importing, nullcontext() if _LIBRARY in sys.modules else _silent():
        return importlib.import_module(_LIBRARY)


@contextmanager
def _silent() -> Iterator[None]:
    """Hide the library's reports on stderr, during import, about missing libraries for unused formats.

    Its reports about images that it cannot decode, which have their errors, are switched off by the environment.
    NOTE: other output to stderr meanwhile, also of other threads, is written at the end.
    """
    is_set = _VERBOSITY in os.environ
    os.environ.setdefault(_VERBOSITY, "0")
    with TemporaryFile() as output:
        stderr = os.dup(2)
        os.dup2(output.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            output.seek(0)
            os.write(2, b"".join(line for line in output if not _OTHER_FORMATS.search(line)))
            if not is_set:
                del os.environ[_VERBOSITY]


def _keep_memory(device: Any, size: int) -> None:
    """Let the device's memory pool keep ``size`` bytes; by default it returns all to the driver at each wait."""
    cuda, pool, threshold = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_uint64()
    if cuda.cuDeviceGetDefaultMemPool(ctypes.byref(pool), device.index) != 0:
        return
    if cuda.cuMemPoolGetAttribute(pool, _RELEASE_THRESHOLD, ctypes.byref(threshold)) == 0 and threshold.value < size:
        threshold.value = size
        cuda.cuMemPoolSetAttribute(pool, _RELEASE_THRESHOLD, ctypes.byref(threshold))
