"""The CUDA streams a loader works on, apart from the one the model runs on; on a CPU nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


class SideStreams:
    """One stream for each CUDA device among ``devices``; used by one thread."""

    def __init__(self, devices: Sequence[Any]) -> None:
        self._streams = {one: torch.cuda.Stream(one) for one in dict.fromkeys(devices) if one.type == "cuda"}

    @property
    def are_any(self) -> bool:
        return bool(self._streams)

    @contextmanager
    def active(self) -> Iterator[None]:
        """They are their devices' current streams; the first device is the current one."""
        with ExitStack() as stack:
            if self._streams:
                # NOTE: a thread's device is 0 until it is set, and to go back to a stream of it makes a context there.
                stack.enter_context(torch.cuda.device(next(iter(self._streams))))
            for device in reversed(self._streams):
                stack.enter_context(torch.cuda.stream(self._streams[device]))
            yield

    def adopt(self, tensor: Any) -> None:
        """``tensor`` was made on another stream, and complete: its memory must last until this stream has read it."""
        if tensor.device in self._streams:
            tensor.record_stream(self._streams[tensor.device])

    def to(self, tensor: Any, device: Any) -> Any:
        """``tensor`` on ``device``; from the host without waiting, out of pinned memory. Call it while ``active``."""
        if tensor.device == device:
            return tensor
        if device.type == "cuda" and not tensor.is_cuda:
            with torch.cuda.device(device):  # pinned memory belongs to a device's context
                return tensor.pin_memory().to(device, non_blocking=True)
        return tensor.to(device)

    def mark(self) -> list[Any]:
        """Events for what is on the streams so far."""
        return [stream.record_event() for stream in self._streams.values()]

    def synchronize(self) -> None:
        """Wait for everything on the streams."""
        for stream in self._streams.values():
            stream.synchronize()

    def hand_over(self, events: Sequence[Any], tensors: Sequence[Any]) -> None:
        """The model's stream waits for ``events``, and ``tensors`` live until it has used them."""
        for device, event in zip(self._streams, events, strict=True):
            torch.cuda.current_stream(device).wait_event(event)
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
