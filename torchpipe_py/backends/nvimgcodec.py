"""JPEG decoding by nvImageCodec: on the JPEG engines of a GPU that has them, else on its cores."""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Sequence
from typing import Any

from torchpipe_py.errors import BackendUnavailable, first_line

CPU_THREADS = 1  # of a decoder, for what the GPU leaves to the CPU
KEPT_BYTES = 2**28  # of images between two calls

_RELEASE_THRESHOLD = 4  # CU_MEMPOOL_ATTR_RELEASE_THRESHOLD


class NvImageCodec:
    """Decodes on ``device``, in the order of ``stream``; chroma is smoothed, as OpenCV does it.

    What the JPEG engines do not take is decoded on the cores, image by image: what becomes of one does not depend on
    those beside it. ``trial``: small JPEGs to begin with. ``BackendUnavailable`` where the library is not installed or
    does not work.
    """

    def __init__(self, device: Any, stream: Any, trial: Sequence[bytes]) -> None:
        import torch

        # Each image that cannot be decoded has its DecodeError; the library would write a line of its own as well.
        os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")
        try:
            library: Any = importlib.import_module("nvidia.nvimgcodec")
        except ImportError as error:
            cuda = (torch.version.cuda or "").partition(".")[0]
            package = f"pip install 'nvidia-nvimgcodec-cu{cuda}[nvjpeg]'"
            raise BackendUnavailable(f'decoder = "nvimgcodec" needs nvImageCodec ({package}): {error}') from error
        self._as_tensor: Any = torch.as_tensor
        self._stack: Any = torch.stack
        self._device, self._stream = device, stream.cuda_stream
        name = f"nvImageCodec {library.__version__}"
        try:
            kinds = library.BackendKind
            self._params = library.DecodeParams(
                apply_exif_orientation=False,
                color_spec=library.ColorSpec.SRGB,
                sample_format=library.SampleFormat.P_RGB,
            )
            # NOTE: two decoders, since one that has both shares a batch out among them, and their pixels differ a bit.
            found = [
                library.Decoder(
                    device_id=device.index,
                    max_num_cpu_threads=CPU_THREADS,
                    backends=[library.Backend(kind) for kind in some],
                    options=":fancy_upsampling=1",
                )
                for some in ([kinds.HW_GPU_ONLY], [kinds.GPU_ONLY, kinds.HYBRID_CPU_GPU])
            ]
            self._decoders = [one for one in found if self._decoded(one, trial[:1])[0] is not None]
        except (RuntimeError, TypeError, AttributeError) as error:  # the latter two: another version
            raise BackendUnavailable(f"{name} does not work here: {first_line(error)}") from error
        if not self._decoders:
            raise BackendUnavailable(f"{name} does not work here: it cannot decode a small JPEG")
        _keep_memory(device, KEPT_BYTES)
        self.decode(trial)

    def decode(self, encoded: Sequence[bytes]) -> list[Any]:
        """A Tensor 3×H×W, uint8, RGB, for each, or why there is none."""
        images: list[Any] = ["nvImageCodec cannot decode it"] * len(encoded)
        missing = list(range(len(encoded)))
        for decoder in self._decoders:
            found = self._decoded(decoder, [encoded[place] for place in missing])
            done = [(place, image) for place, image in zip(missing, found, strict=True) if image is not None]
            for (place, _), image in zip(done, self._copies([image for _, image in done]), strict=True):
                images[place] = image
            missing = [place for place, image in zip(missing, found, strict=True) if image is None]
            if not missing:
                break
        return images

    def _copies(self, images: list[Any]) -> Sequence[Any]:
        """In PyTorch's memory: what follows keeps that from being used again too early, by PyTorch's means."""
        tensors = [self._as_tensor(image, device=self._device) for image in images]
        if len({tensor.shape for tensor in tensors}) == 1:
            copies: Sequence[Any] = self._stack(tensors).unbind()
            return copies
        return [tensor.clone() for tensor in tensors]

    def _decoded(self, decoder: Any, encoded: Sequence[bytes]) -> list[Any]:
        """An image of the library for each, or ``None``."""
        images: list[Any] = decoder.decode(list(encoded), params=self._params, cuda_stream=self._stream)
        return images


def _keep_memory(device: Any, size: int) -> None:
    """Let the device's memory pool keep so many bytes, where it would give all back to the driver at each wait."""
    cuda, pool, value = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_uint64(size)
    if cuda.cuDeviceGetDefaultMemPool(ctypes.byref(pool), device.index) == 0:
        cuda.cuMemPoolSetAttribute(pool, _RELEASE_THRESHOLD, ctypes.byref(value))
