"""Frames decoded by the video engines of an NVIDIA GPU; PyAV reads the packets, PyNvVideoCodec decodes them."""

from __future__ import annotations

import importlib
from typing import Any

from torchpipe_py.backends.cuda import cuda_device
from torchpipe_py.errors import BackendUnavailable, first_line
from torchpipe_py.streams.orientation import AS_STORED, Turn, turn_of_frame

_FORMATS = ("yuv420p", "yuvj420p")
_NO_PTS = -(2**63)


class UndecodableError(Exception):
    """A packet that the GPU cannot decode. Decoding continues at the next key frame."""


class GpuFrames:
    """Decodes the packets of one stream; it shares no decoder with another stream.

    ``BackendUnavailable`` if PyNvVideoCodec or CUDA is missing, and for anything but H.264 of 8 bits, 4:2:0: damaged
    HEVC gave other pixels each time, perhaps from memory of other streams (H100, PyNvVideoCodec 2.2). ``ConfigError``
    for a GPU that does not exist.
    """

    def __init__(self, av: Any, stream: Any, device_id: int, is_live: bool) -> None:
        import torch

        device = cuda_device(device_id)
        try:
            library: Any = importlib.import_module("PyNvVideoCodec")
        except (ImportError, OSError, RuntimeError) as problem:
            raise BackendUnavailable(f"PyNvVideoCodec does not work here: {first_line(problem)}") from problem
        name, pixels = stream.codec_context.name, stream.codec_context.pix_fmt
        if name != "h264" or pixels not in _FORMATS:
            raise BackendUnavailable(f"{name} of format {pixels}; the GPU decodes h264 of {' or '.join(_FORMATS)}")
        self._torch, self._library = torch, library
        self._filter = av.BitStreamFilterContext("h264_mp4toannexb", stream)
        self._cuda_stream = torch.cuda.Stream(device)
        self._time_base = stream.time_base
        self._on_cpu = stream.codec_context
        self._turn = AS_STORED
        self._options = {
            "gpuid": device.index,
            "codec": library.cudaVideoCodec.H264,
            "cudastream": self._cuda_stream.cuda_stream,
            "usedevicememory": True,
            "outputColorType": library.OutputColorType.RGBP,
            "latency": getattr(library.DisplayDecodeLatencyType, "LOW" if is_live else "NATIVE"),
        }
        flags = library.VideoPacketFlag
        # NOTE: without it, a frame comes only when the next one begins.
        self._flag, self._end_flag = int(flags.ENDOFPICTURE) if is_live else 0, int(flags.ENDOFSTREAM)
        self._decoder: Any = None

    def decode(self, packet: Any) -> list[tuple[float | None, Any, Turn]]:
        """The frames that are complete now: seconds, a Tensor 1×3×H×W ``uint8`` RGB on the GPU, and its turn."""
        try:
            if self._decoder is None and packet.size and packet.is_keyframe:
                self._turn = self._turn_of(packet)
            parts = self._filter.filter(packet) if packet.size else [*self._filter.filter(None), None]
            return [frame for part in parts for frame in self._decode(part)]
        except Exception as problem:
            self._decoder = None
            raise UndecodableError(first_line(problem)) from problem

    def _turn_of(self, packet: Any) -> Turn:
        """The turn of a key frame, which only the CPU's decoder reports."""
        try:
            frames = [*self._on_cpu.decode(packet), *self._on_cpu.decode(None)]
        finally:
            self._on_cpu.flush_buffers()
        return turn_of_frame(frames[0]) if frames else AS_STORED

    def _decode(self, part: Any) -> list[tuple[float | None, Any, Turn]]:
        if self._decoder is None:
            # NOTE: without a key frame before it, a frame shows whatever its memory held before.
            if part is None or not part.is_keyframe:
                return []
            self._decoder = self._library.CreateDecoder(**self._options)
        packet = self._library.PacketData()
        packet.bsl = packet.bsl_data = 0
        packet.decode_flag = self._end_flag if part is None else self._flag
        if part is not None:
            packet.bsl, packet.bsl_data = part.buffer_size, part.buffer_ptr
            packet.pts = _NO_PTS if part.pts is None else part.pts
        torch = self._torch
        with torch.cuda.stream(self._cuda_stream):
            decoded = self._decoder.Decode(packet)
            # NOTE: copies, since the decoder writes its next frames into the same memory.
            frames = [(frame.getPTS(), torch.from_dlpack(frame)[None].clone()) for frame in decoded]
        self._cuda_stream.synchronize()
        return [(None if pts == _NO_PTS else float(pts * self._time_base), image, self._turn) for pts, image in frames]


def to_tensor(mat: Any, device_id: int) -> Any:
    """An image H×W×3 ``uint8`` BGR as a Tensor 1×3×H×W RGB, on the GPU if there is one."""
    import cv2
    import torch

    image = torch.from_numpy(cv2.cvtColor(mat, cv2.COLOR_BGR2RGB)).permute(2, 0, 1)[None].contiguous()
    return image.to(cuda_device(device_id)) if torch.cuda.is_available() else image
