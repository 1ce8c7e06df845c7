"""Prefetching for the training loop: threads that fill a bounded buffer, and separate CUDA streams."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")

GRACE = 30.0
"""Seconds that ``close`` waits for a thread to finish its current item."""


class BatchFeeder(Generic[T]):
    """``threads`` threads take items of ``source`` in turn and queue ``work(item)`` for any thread that iterates.

    Each result goes to exactly one consumer, in order of completion; at most ``depth`` wait. Only one thread at a time
    is inside ``source``, so it may be a generator. The first exception of ``source`` or ``work`` stops the feeder;
    every consumer gets it after the earlier results, and again at every ``next``. ``close`` ends the threads once their
    current items are done; so does dropping the feeder, and the program's exit. A generator is closed after its last
    item.
    """

    def __init__(
        self, source: Iterable[Any], work: Callable[[Any], T], threads: int = 4, depth: int = 8, name: str = ""
    ) -> None:
        if threads < 1 or depth < 1:
            raise ValueError(f"expected at least 1 thread and a depth of at least 1, got {threads} and {depth}")
        # NOTE: the threads do not refer to the feeder, or they would keep it alive.
        self._feed: _Feed[T] = _Feed(iter(source), work, threads, depth)
        self._threads = [
            threading.Thread(target=self._feed.run, name=name or f"torchpipe-feeder-{number}", daemon=True)
            for number in range(threads)
        ]
        self._finalizer = weakref.finalize(self, _stop, self._feed, self._threads)
        for thread in self._threads:
            thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        feed = self._feed
        with feed.changed:
            feed.changed.wait_for(lambda: self.is_ready)
            if feed.items:
                item = feed.items.popleft()
                feed.changed.notify_all()
                return item
            if feed.error is not None and not feed.is_closed:
                raise feed.error
            raise StopIteration

    @property
    def is_ready(self) -> bool:
        """Whether ``next`` would not wait."""
        return bool(self._feed.items or self._feed.is_finished or self._feed.is_closed)

    def close(self) -> None:
        """End the threads; ``next`` raises ``StopIteration`` from now on. Idempotent."""
        self._finalizer()

    def __enter__(self) -> BatchFeeder[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class BackgroundIterator(BatchFeeder[T]):
    """The items of ``source`` in order, produced by one thread, at most ``depth`` ahead."""

    def __init__(self, source: Iterable[T], depth: int = 2, name: str = "torchpipe-background") -> None:
        super().__init__(source, lambda item: item, 1, depth, name)


class _Feed(Generic[T]):
    """State shared by a feeder's threads and its consumers: the source, and the waiting results."""

    def __init__(self, source: Iterator[Any], work: Callable[[Any], T], threads: int, depth: int) -> None:
        self.source, self.work, self.running, self.depth = source, work, threads, depth
        self.turn = threading.Lock()  # to take an item of the source
        self.changed = threading.Condition()
        self.items: deque[T] = deque()
        self.error: BaseException | None = None
        self.is_over = self.is_finished = self.is_closed = False

    def run(self) -> None:
        """The main loop of each thread."""
        error: BaseException | None = None
        try:
            while self._put_one():
                pass
        except BaseException as raised:
            error = raised
        with self.turn:
            self.is_over = True
            self.running -= 1
            is_last = not self.running
            if is_last and hasattr(self.source, "close"):
                try:
                    self.source.close()
                except BaseException as raised:
                    error = error or raised
        with self.changed:
            self.error = self.error or error
            self.is_finished = self.is_finished or is_last or error is not None
            self.changed.notify_all()

    def _put_one(self) -> bool:
        """Put one result, once there is room; ``False`` if there is no further item, or the feeder is closed."""
        with self.turn:
            if self.is_over:
                return False
            try:
                item = next(self.source)
            except StopIteration:
                return False
        result = self.work(item)
        with self.changed:
            self.changed.wait_for(lambda: len(self.items) < self.depth or self.is_closed)
            if not self.is_closed:
                self.items.append(result)
                self.changed.notify_all()
            return not self.is_closed


def _stop(feed: _Feed[Any], threads: list[threading.Thread]) -> None:
    with feed.changed:
        feed.is_closed = True
        feed.items.clear()
        feed.changed.notify_all()
    for thread in threads:
        if thread is not threading.current_thread() and thread.is_alive():  # Ctrl-C may come before it is started
            thread.join(GRACE)


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
        """A context in which they are the current streams, and the first device is the current device."""
        with ExitStack() as stack:
            if self._streams:
                # NOTE: a thread's device is 0 until it is set, and restoring a stream of it creates a context there.
                stack.enter_context(torch.cuda.device(next(iter(self._streams))))
            for device in reversed(self._streams):
                stack.enter_context(torch.cuda.stream(self._streams[device]))
            yield

    def adopt(self, tensor: Any) -> None:
        """Keep the memory of ``tensor``, completed on another stream, until this stream has read it."""
        if tensor.device in self._streams:
            tensor.record_stream(self._streams[tensor.device])

    @staticmethod
    def to(tensor: Any, device: Any) -> Any:
        """``tensor`` on ``device``; from the host asynchronously, through pinned memory, on the current stream."""
        if tensor.device == device:
            return tensor
        if device.type == "cuda" and not tensor.is_cuda:
            with torch.cuda.device(device):  # pinned memory belongs to a device's context
                return tensor.pin_memory().to(device, non_blocking=True)
        return tensor.to(device)

    def mark(self) -> list[Any]:
        """Events that mark the work on the streams so far."""
        return [stream.record_event() for stream in self._streams.values()]

    def synchronize(self) -> None:
        """Wait for everything on the streams."""
        for stream in self._streams.values():
            stream.synchronize()

    def hand_over(self, events: Sequence[Any], tensors: Sequence[Any]) -> None:
        """Let the model's stream wait for ``events``, and keep ``tensors`` until it has used them."""
        for device, event in zip(self._streams, events, strict=True):
            torch.cuda.current_stream(device).wait_event(event)
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))


class CudaPrefetcher:
    """The batches of ``loader`` on ``device``, copied on a separate stream, one batch ahead.

    A batch is a tensor, or tuples, lists and dicts of tensors; other values are unchanged. Copies are asynchronous if
    the loader pins its memory (``pin_memory=True``). ``transform(batch)`` runs on the same stream, to normalise, for
    example. On a CPU this is plain iteration. Each ``for`` restarts the loader; an exception is raised at the batch it
    belongs to. ``device`` defaults to the current CUDA device, or the CPU if there is none.
    """

    def __init__(
        self, loader: Iterable[Any], device: Any = None, transform: Callable[[Any], Any] | None = None
    ) -> None:
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self._loader, self._transform = loader, transform
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        streams = SideStreams([self.device])
        batches = self._prepared(streams)
        if not streams.are_any:
            yield from (batch for batch, _ in batches)
            return
        ahead, failure = next(batches, None), None
        while ahead is not None:
            batch, events = ahead
            try:
                # Start the next one before returning this one: its copy runs in parallel with the model.
                ahead = next(batches, None)
            except Exception as error:  # raised after this batch
                ahead, failure = None, error
            streams.hand_over(events, tensors_in(batch))
            yield batch
        if failure is not None:
            raise failure

    def _prepared(self, streams: SideStreams) -> Iterator[tuple[Any, list[Any]]]:
        """Batches on the device, with events that mark the end of their copies."""
        for batch in self._loader:
            with streams.active():
                moved = moved_to(batch, lambda tensor: tensor.to(self.device, non_blocking=True))
                moved = moved if self._transform is None else self._transform(moved)
                events = streams.mark()
            yield moved, events


def moved_to(value: Any, move: Callable[[Any], Any]) -> Any:
    """``value`` with each tensor in its tuples, lists and dicts replaced by ``move(tensor)``."""
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
