"""CUDA streams: assigns them to instances, and waits for their work."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from time import perf_counter, sleep
from typing import Any, TypeVar

from torchpipe_py.backends.base import Backend, BackendConfig, Data, ItemBackend
from torchpipe_py.backends.control.basic import Identity, Wrapper
from torchpipe_py.errors import BackendUnavailable, ConfigError
from torchpipe_py.keys import TASK_DATA_KEY, TASK_RESULT_KEY

LONG_SECONDS = 0.002  # shorter waits spin: a sleep would release the GIL again, and the core must wake up
SPIN_SECONDS = 0.0003  # spin at the end of a wait: a sleeping core takes up to 200 µs to wake
SHORTEST_SLEEP, LONGEST_SLEEP = 0.0003, 0.002

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: no implicit ordering with the default stream


def cuda_device(device_id: int) -> Any:
    """``torch.device`` of a CUDA device; ``BackendUnavailable`` without CUDA, ``ConfigError`` for an invalid number."""
    import torch

    if not torch.cuda.is_available():
        raise BackendUnavailable("PyTorch finds no CUDA device")
    count = torch.cuda.device_count()
    if device_id >= count:
        raise ConfigError(f"device_id = {device_id}: there are {count} CUDA devices, counted from 0")
    return torch.device("cuda", device_id)


_without_collection = threading.Lock()


@contextmanager
def no_collection() -> Iterator[None]:
    """A context without garbage collections, in processes that are forked in it too, until they enable them.

    What a collection frees may be CUDA's, on a thread or in a process where that does harm. One thread at a time is in
    such a context: the first of two to leave would enable collections for the other.
    """
    with _without_collection:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()


def _after_fork() -> None:
    """A new lock: in a forked process nobody releases one that another thread held."""
    global _without_collection
    _without_collection = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


# Process-wide, like the devices and PyTorch's memory. Returned streams are reused, since PyTorch caches memory per
# stream.
_free_streams: dict[Any, list[Any]] = defaultdict(list)


def _borrow_stream(device: Any) -> Any:
    """A ``torch.cuda.Stream`` of ``device`` that no other instance holds.

    PyTorch hands out 32 streams in turn, so two instances could get the same one; a CUDA graph captured on it would
    then include the other's work.
    """
    import torch

    with suppress(IndexError):  # pop is atomic: no other thread gets the same stream
        return _free_streams[device].pop()
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # the device's context exists from here on
        handle = ctypes.c_void_p()
        status = ctypes.CDLL("libcuda.so.1").cuStreamCreate(ctypes.byref(handle), _NON_BLOCKING)
        if status != 0:
            raise RuntimeError(f"cuStreamCreate failed with error {status}")
        return torch.cuda.ExternalStream(handle.value, device=device)


class StreamWait:
    """Waits for an instance's stream: sleeps for the usual time of a batch of that size, then spins.

    Spinning is fast (on an H200, sleeping until the GPU's interrupt took 300 µs longer, as long as a model itself) but
    occupies a core; if several processes share a GPU, batches take much longer, and all their cores would be occupied.
    """

    def __init__(self, sleep: Callable[[float], object] = sleep, clock: Callable[[], float] = perf_counter) -> None:
        self._sleep, self._clock = sleep, clock
        self._usual: dict[int, float] = {}  # seconds by batch size

    def wait(self, stream: Any, batch: int) -> None:
        """Wait until ``stream`` is idle."""
        # NOTE: a query keeps the GIL, a wait releases it; in a busy process that costs more than the query.
        if stream.query():
            return
        began, usual = self._clock(), self._usual.get(batch, 0.0)
        # NOTE: in slices, since the last batch may have been unusually slow.
        while usual >= LONG_SECONDS and (left := began + usual - SPIN_SECONDS - self._clock()) >= SHORTEST_SLEEP:
            self._sleep(min(left, LONGEST_SLEEP))
            if stream.query():
                self._usual[batch] = min(0.9 * usual, self._clock() - began)  # overslept: it took less time
                return
        stream.synchronize()
        waited = self._clock() - began
        self._usual[batch] = min(waited, 1.05 * usual) if usual else waited


# Number of guards active around the one being created; a thread belongs to one instance.
_nesting = threading.local()


class StreamGuard:
    """The stream of an instance, with a single wait at the end.

    Created in ``setup``, on the instance's thread. The first guard of a thread borrows a stream and makes it the
    thread's current one until it is closed. A guard created while another one is ``active`` leaves the waiting to that
    one. After ``run`` every result is complete, so that any thread and any stream may read it.
    """

    is_cuda = True

    def __init__(self, config: BackendConfig) -> None:
        import torch

        self.device = cuda_device(config.device_id)
        self._torch: Any = torch
        # NOTE: before anything else, since a new thread is on device 0, and PyTorch's first use of streams would create
        # a context of half a GiB there.
        torch.cuda.set_device(self.device)
        self._default = torch.cuda.default_stream(self.device)
        self._is_outermost = not getattr(_nesting, "depth", 0)
        self._hands_over = config.reaches_caller
        self._stream_wait = StreamWait()
        self.stream: Any = torch.cuda.current_stream(self.device)
        self._is_borrowed = bool(self.stream == self._default)
        if self._is_borrowed:
            self.stream = _borrow_stream(self.device)
            torch.cuda.set_stream(self.stream)

    @contextmanager
    def active(self) -> Iterator[None]:
        """A context in which backends that are set up leave the waiting to this guard."""
        _nesting.depth = getattr(_nesting, "depth", 0) + 1
        try:
            yield
        finally:
            _nesting.depth -= 1

    def synchronize(self, batch: int = 1) -> None:
        """Wait without the GIL until the stream's work, a batch of ``batch`` items, is done."""
        self._stream_wait.wait(self.stream, batch)

    def run(self, forward: Callable[[list[Data]], None], items: list[Data]) -> None:
        """``forward(items)`` on the stream, and wait."""
        if not self._is_outermost:
            forward(items)
            return
        # NOTE: inputs belong to other streams, which may reuse the memory once the tensors are freed.
        held = [item[TASK_DATA_KEY] for item in items]
        if any(map(_holds_cuda, held)):
            self.stream.wait_stream(self._default)  # tensors of callers and of backends without a guard
        try:
            forward(items)
        finally:
            self.synchronize(len(items))
        del held
        if self._hands_over:
            for item in items:
                self._hand_over(item.get(TASK_RESULT_KEY))

    def _hand_over(self, result: Any) -> None:
        """Protect a tensor that a caller drops while its own work on the default stream still reads it."""
        if isinstance(result, (list, tuple)):
            for value in result:
                self._hand_over(value)
        elif isinstance(result, self._torch.Tensor) and result.is_cuda:
            result.record_stream(self._default)

    def close(self) -> None:
        """Return the stream."""
        if self._is_borrowed:
            self._is_borrowed = False
            self.stream.synchronize()
            self._torch.cuda.set_stream(self._default)
            _free_streams[self.device].append(self.stream)


def _holds_cuda(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_cuda, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_holds_cuda, value))
    return bool(getattr(value, "is_cuda", False))


class HostGuard:
    """Replaces a ``StreamGuard`` on the CPU, where there is nothing to wait for."""

    is_cuda = False

    def __init__(self) -> None:
        import torch

        self.device: Any = torch.device("cpu")

    def active(self) -> AbstractContextManager[None]:
        return nullcontext()

    def synchronize(self, batch: int = 1) -> None: ...

    def run(self, forward: Callable[[list[Data]], None], items: list[Data]) -> None:
        forward(items)

    def close(self) -> None: ...


Guard = StreamGuard | HostGuard


B = TypeVar("B", bound=type[Backend])


def on_stream(cls: B) -> B:
    """Make ``setup`` and ``forward`` of a backend run on the CUDA stream of the instance, if there is a GPU.

    Inside a ``SyncTensor`` they use its stream; alone, a stream of this instance, with a wait at the end of each
    ``forward``. Without a GPU they run normally, unless ``needs_cuda``. ``self.guard`` is the ``Guard`` from ``setup``
    on; a parameter ``device_type`` chooses between GPU and CPU.
    """
    set_up, forward_batch, release, choices = cls.setup, cls.forward, cls.close, cls.setup_choices

    def setup(self: Any) -> None:
        import torch

        device = "cuda" if self.needs_cuda else getattr(self, "device_type", "")
        is_cuda = device == "cuda" or (not device and torch.cuda.is_available())
        self.guard = StreamGuard(self.config) if is_cuda else HostGuard()
        with self.guard.active():
            set_up(self)

    def forward(self: Any, items: list[Data]) -> None:
        self.guard.run(partial(forward_batch, self), items)

    def forward_one(self: Any) -> Callable[[Data], object] | None:
        is_plain = forward_batch is ItemBackend.forward and not self.guard.is_cuda
        return self.forward_item if is_plain else None

    def setup_choices(self: Any) -> Iterator[str]:
        # NOTE: not of copies to a device, which a worker makes on the CPU where an engine process has the GPU.
        if not hasattr(self, "device_type"):
            yield f"{type(self).__name__}: {self.guard.device.type}"
        yield from choices(self)

    def close(self: Any) -> None:
        try:
            release(self)
        finally:
            if self.guard is not None:
                self.guard.close()
                self.guard = None

    for method in (setup, forward, forward_one, setup_choices, close):
        setattr(cls, method.__name__, method)
    cls.uses_device = True
    cls.guard = None  # type: ignore[attr-defined]
    return cls


@on_stream
class SyncTensor(Wrapper):
    """Runs the backend in its brackets on this instance's own CUDA stream and waits for it once, at the end.

    Inside another ``SyncTensor`` it uses the outer stream and leaves the waiting to it. As the last of a ``Sequential``
    and without brackets, it wraps the whole sequence. On a CPU there is nothing to wait for. Also called
    ``StreamGuard``, ``TensorSync`` and ``Torch``.
    """

    reads = ()
    children = (0, 1)
    wraps_sequence = True
    guard: Guard

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(replace(config, children=config.children or (Identity(config),)))

    def any_thread(self) -> bool:
        return not self.guard.is_cuda and self.inner.any_thread()
