"""The contract every backend keeps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import numpy as np

from torchpipe_py.backends.params import Param, Remark
from torchpipe_py.backends.signature import ImageSpec, Signature
from torchpipe_py.errors import InvalidRequest
from torchpipe_py.keys import TASK_DATA_KEY, TASK_ERROR_KEY

Data = dict[str, Any]
"""One request's dict: ``data`` in, ``result`` out, other keys free."""

BatchRange = tuple[int, int]
"""The fewest and the most items of a batch."""


class Shared:
    """What the instances of one node have in common: a model loaded once, a compiled engine."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[Hashable, Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Shared, ()  # instances share nothing with those of another process

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The value of ``key``, made by the first that asks while the others wait; a failure is not kept."""
        with self._lock:
            if key not in self._values:
                self._values[key] = make()
            return self._values[key]


class Graphs(Protocol):
    """The other graphs of a pipe, for backends that run one of them; ``root`` names one by its root node."""

    def run_graphs(
        self,
        root: str,
        items: Sequence[Data],
        on_done: Callable[[list[BaseException | None]], None],
        parent: Any = None,
    ) -> None:
        """Start each item through the graph, all at once.

        ``on_done(errors)``, in order, is called once, from any thread, when all are through.
        """

    def wait_for_graphs(self, root: str, items: Sequence[Data]) -> list[BaseException | None]:
        """Run each item through the graph, all at once, and wait for them; their errors, in order."""


class FilterMaker(Protocol):
    """What makes the filter in front of a child, where it is to run."""

    def create(self) -> Callable[[Data], Any]: ...


@dataclass(frozen=True)
class BackendConfig:
    """What a backend is constructed from: typed parameters, children and where it runs.

    ``reaches_caller`` says that a result of its node may go to the caller as it is: there is no next node, or one that
    may be skipped. ``processes`` of a service run the node at the same time, each with ``instance_num`` instances.
    ``graphs`` are the pipe's; ``None`` outside a pipe.
    """

    params: Mapping[str, Any] = field(default_factory=dict)
    children: tuple[Backend, ...] = ()
    filters: tuple[FilterMaker | None, ...] = ()
    label: str = ""
    device_id: int = 0
    instance: int = 0
    instance_num: int = 1
    processes: int = 1
    reaches_caller: bool = True
    shared: Shared = field(default_factory=Shared)
    graphs: Graphs | None = None


class Isolation(Enum):
    """What ``decode_isolation = "process"`` does with a backend.

    ``STAYS``: nothing. ``MOVES``: it hands bytes of clients to native code, and runs in a process of its own; it takes
    encoded bytes and gives a Mat with its ``color``. ``FOLLOWS``: it takes a Mat and gives one, reads and writes no
    other key but ``color``, and goes along with the decoder before it. ``REFUSED``: it hands bytes of clients to native
    code where no other process can do that for it.
    """

    STAYS, MOVES, FOLLOWS, REFUSED = range(4)


class Backend:
    """One instance of a computation.

    ``setup``, ``forward`` and ``close`` of an instance run on one thread that is its own, so a CUDA context,
    a stream or an ONNX Runtime session may live in attributes without a lock. Only where ``any_thread()`` says so,
    ``forward`` may run on the thread of a blocked caller instead, never on two threads at once.

    ``forward`` takes ``min()`` to ``max()`` dicts, any number with ``any_batch``, and gives each exactly one outcome: a
    ``result``, or none, in which case ``error`` should hold an exception that says why. It returns nothing. An
    exception is a defect; a batch that raises is repeated item by item, so that only the item that is at fault fails.
    """

    children: tuple[int, int | None] = (0, 0)
    """How many backends may stand in its brackets: at least, at most (``None``: any number)."""

    any_params = False
    """Takes every key of its node, unchecked, in ``self.params``."""

    any_batch = False
    """Takes any number of items at once inside another backend, though its ``max()`` is 1."""

    is_sequence = False
    """Runs its children one after the other: filters may stand in front of them, and the last may wrap the others."""

    keeps_color = False
    """The channel order is nothing to it: what the backend after it prefers, it prefers too."""

    wraps_sequence = False
    """Standing last in a sequence without brackets, it wraps all that stands before it."""

    takes = ""
    """The kind of ``data`` that it takes, one of ``signature``; refuses all others. Empty: several, or unknown."""

    gives = ""
    """The kind of ``result`` that it gives, as ``takes``."""

    sides: tuple[str, ...] = ()
    """Its parameters that are height and width of the image that it gives; empty: there are none."""

    keeps_sides = False
    """The image that it gives has the height and width of the one that it takes."""

    is_model = False
    """It takes the channels of an image as they come, in whatever order."""

    passes_on = False
    """Its ``result`` is its ``data``."""

    checks = False
    """It refuses data that a later node must not have; by default it has instances for all cores."""

    needs_cuda = False
    """It cannot be set up without a CUDA device."""

    uses_device = False
    """It works on the CUDA device ``config.device_id`` where there is one; what ``needs_cuda`` need not say it."""

    ignored_keys: Mapping[str, str] = {}
    """Keys of other backends that mean nothing to it, each with the reason; accepted, with a line in the log."""

    isolation = Isolation.STAYS
    """Whether it runs in a process of its own where decoders do."""

    keeps_nothing = False
    """It keeps nothing between items and nothing on its thread."""

    def __init__(self, config: BackendConfig) -> None:
        self.config = config
        self.params = config.params
        if not self.any_params:
            for name, value in config.params.items():
                setattr(self, name, value)

    def setup(self) -> None:
        """Acquire what ``forward`` needs; ``BackendUnavailable`` where this machine lacks it."""

    def forward(self, items: list[Data]) -> None:
        """Compute ``result`` from ``data`` for each item, in place."""
        raise NotImplementedError(type(self).__name__)

    def forward_one(self) -> Callable[[Data], object] | None:
        """``forward`` for one item, where it works item by item; asked after ``setup``.

        An ``InvalidRequest`` that it raises is the item's outcome, its ``error``. ``None``: there is only ``forward``.
        """
        return None

    def close(self) -> None:
        """Release what ``setup`` acquired."""

    def max(self) -> int:
        """The most items one ``forward`` takes; asked after ``setup``."""
        return 1

    def min(self) -> int:
        """The fewest items one ``forward`` takes."""
        return 1

    def any_thread(self) -> bool:
        """Whether ``forward`` may run on another thread than ``setup``; asked after it. One hand-over less."""
        return self.keeps_nothing

    def signature(self) -> Signature:
        """What ``data`` and ``result`` hold, as far as it can say; asked after ``setup``, by any thread."""
        return Signature()

    def batch_key(self, item: Data) -> Hashable:
        """What items of one batch have in common: by default shape and dtype of their tensors.

        A Mat is no tensor: Mats of any size share a batch, since what takes them resizes them one by one.
        """
        return tensor_key(item[TASK_DATA_KEY])

    def is_large(self, item: Data) -> bool:
        """Whether this item may take seconds where others take milliseconds; asked before ``forward``, in microseconds.

        Where instances take one request at a time, all of them but one run such items, so that the others go on.
        """
        return False

    def running_since(self) -> float:
        """When the ``forward`` began that is at work in another process, ``perf_counter``; 0.0 where none is."""
        return 0.0

    def prefer_color(self, color: str | None) -> str | None:
        """Told which ``color`` the next backend in a ``Sequential`` prefers for its Mats, say which this one prefers.

        Converting while decoding saves a pass over the image.
        """
        return color if self.keeps_color else None

    @classmethod
    def jumps(cls, params: Mapping[str, Any]) -> Mapping[str, str]:
        """Roots of the graphs that it runs with these parameters, and for each what a drawing says of the jump."""
        return {}

    @classmethod
    def remarks(cls, params: Mapping[str, Any], own: Collection[str]) -> Iterable[Remark]:
        """What is wrong with these parameters, each of which is right by itself; ``own`` are the keys of the node."""
        return ()

    @classmethod
    def image_misfits(cls, params: Mapping[str, Any], image: ImageSpec) -> Mapping[str, str]:
        """Why it takes no such image, for each of ``height``, ``width`` and ``channels`` that is wrong."""
        return {}

    @classmethod
    def batch_range(cls, params: Mapping[str, Any], children: Sequence[BatchRange | None]) -> BatchRange | None:
        """The batches that it takes, as far as its parameters say; ``None`` where only ``setup`` can tell.

        ``children`` are the ranges of the backends in its brackets; the widest is its own, unless it has a ``max``.
        """
        if cls.any_params:
            return None
        values = {param.key: params[name] for name, param in cls.parameters().items()}
        if "max" in values:
            return values.get("min", 1), values["max"]
        known = [limits for limits in children if limits is not None]
        if len(known) < len(children) or (cls.max is not Backend.max and not children):
            return None
        return max(known, key=lambda limits: limits[1], default=(1, 1))

    @classmethod
    def requires_cuda(cls, params: Mapping[str, Any], children: Sequence[bool]) -> bool:
        """Whether it cannot be set up without a CUDA device with these parameters.

        ``children`` says it of the backends in its brackets.
        """
        return cls.needs_cuda or any(children)

    @classmethod
    def undeclared(cls, key: str, value: Any) -> str:
        """What to write in the class for it to take ``key``, where it seems to: the end of a message, or empty."""
        if any(key in vars(base).get("__annotations__", ()) for base in cls.__mro__):
            return f'a parameter of a Backend is a Param: {key} = Param({type(value).__name__}, doc="…")'
        return ""

    @classmethod
    def parameters(cls) -> dict[str, Param]:
        """Declared parameters by attribute, those of base classes first."""
        params: dict[str, Param] = {}
        for base in reversed(cls.__mro__):
            params.update({name: value for name, value in vars(base).items() if isinstance(value, Param)})
        return params


def tensor_key(value: Any) -> Hashable:
    """Shape and dtype of a tensor, of each tensor in a list; ``None`` for anything else."""
    if isinstance(value, (bytes, np.ndarray)):
        return None
    if isinstance(value, (list, tuple)):
        return tuple(map(tensor_key, value))
    shape = getattr(value, "shape", None)
    if shape is None:
        return None
    return shape if isinstance(shape, tuple) else tuple(shape), getattr(value, "dtype", None)


def run_padded(backend: Backend, items: list[Data]) -> None:
    """``forward`` of no fewer than ``min()`` items: missing ones are copies of the last, their outcome is dropped."""
    missing = backend.min() - len(items)
    backend.forward(items if missing <= 0 else items + [dict(items[-1]) for _ in range(missing)])


def close_all(backends: Iterable[Backend]) -> None:
    """Close each, whatever the others raise; the first error is raised at the end."""
    first: BaseException | None = None
    for backend in backends:
        try:
            backend.close()
        except BaseException as error:
            first = first or error
    if first is not None:
        raise first


class ItemBackend(Backend):
    """A backend that works on one item at a time: implement ``forward_item``."""

    def forward(self, items: list[Data]) -> None:
        for item in items:
            try:
                self.forward_item(item)
            except InvalidRequest as error:
                item[TASK_ERROR_KEY] = error

    def forward_one(self) -> Callable[[Data], object] | None:
        return self.forward_item if type(self).forward is ItemBackend.forward else None

    def forward_item(self, item: Data) -> None:
        """Compute ``result`` from ``data`` for one item, in place.

        An ``InvalidRequest`` that it raises is no defect but the item's outcome: its ``error``.
        """
        raise NotImplementedError(type(self).__name__)
