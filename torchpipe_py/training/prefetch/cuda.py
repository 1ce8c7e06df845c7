"""CUDA streams beside the one that the model runs on, and batches copied to the GPU on one; on a CPU nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


class SideStreams:
    """One stream for each CUDA device among ``devices``; used by one thread."""

    def __init__(self, devices: Sequence[Any]) -> None:
        self._streams = {
            device: torch.cuda.Stream(device) for device in dict.fromkeys(devices) if device.type == "cuda"
        }

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


class CudaPrefetcher:
    """The batches of ``loader`` on ``device``, copied on a stream of their own, one batch ahead.

    A batch is a tensor, or tuples, lists and dicts of tensors; what is no tensor stays as it is. Copies wait for
    nothing if the loader pins its memory (``pin_memory=True``). ``transform(batch)`` runs on the same stream, to
    normalise, say. On a CPU this is plain iteration. Each ``for`` starts the loader anew; an exception comes at the
    batch it belongs to. ``device`` is by default the current CUDA device, or the CPU where there is none.
    """

    def __init__(
        self, loader: Iterable[Any], device: Any = None, transform: Callable[[Any], Any] | None = None
    ) -> None:
        if device is None:
            device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        self._loader, self._transform = loader, transform
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        if self.device.type != "cuda":
            for batch in batches:
                yield self._prepared(batch)
            return
        streams = SideStreams([self.device])
        ahead = self._start(batches, streams)
        while ahead is not None:
            batch, events, error = ahead
            if error is not None:
                raise error
            # The next one starts before this one is given away: its copy runs beside the model.
            ahead = self._start(batches, streams)
            streams.hand_over(events, tensors_in(batch))
            yield batch

    def _start(self, batches: Iterator[Any], streams: SideStreams) -> tuple[Any, list[Any], Exception | None] | None:
        try:
            with streams.active():
                return self._prepared(next(batches)), streams.mark(), None
        except StopIteration:
            return None
        except Exception as error:
            return None, [], error

    def _prepared(self, batch: Any) -> Any:
        moved = moved_to(batch, lambda tensor: tensor.to(self.device, non_blocking=True))
        return moved if self._transform is None else self._transform(moved)


def moved_to(value: Any, move: Callable[[Any], Any]) -> Any:
    """``value`` with ``move(tensor)`` in the place of each tensor in its tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return move(value)
    if isinstance(value, dict):
        return {key: moved_to(item, move) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(moved_to(item, move) for item in value))
    if isinstance(value, (list, tuple)):
        moved = [moved_to(item, move) for item in value]
        return moved if isinstance(value, list) else tuple(moved)
    return value


def tensors_in(value: Any) -> list[Any]:
    """All tensors in ``value``."""
    tensors: list[Any] = []
    moved_to(value, tensors.append)
    return tensors
