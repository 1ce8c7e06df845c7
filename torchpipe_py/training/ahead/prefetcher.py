"""The next batch on its way to the GPU while the model works on this one, for any loader of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from torchpipe_py.training.ahead.streams import SideStreams


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
        return {key: moved_to(one, move) for key, one in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(moved_to(one, move) for one in value))
    if isinstance(value, (list, tuple)):
        moved = [moved_to(one, move) for one in value]
        return moved if isinstance(value, list) else tuple(moved)
    return value


def tensors_in(value: Any) -> list[Any]:
    """All tensors in ``value``."""
    found: list[Any] = []
    moved_to(value, found.append)
    return found
