"""The interface of every backend."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import numpy as np

from torchpipe_py.backends.params import Param, Remark
from torchpipe_py.backends.signature import ImageSpec, Signature
from torchpipe_py.errors import InvalidRequest, NoResult
from torchpipe_py.keys import TASK_DATA_KEY, TASK_ERROR_KEY, TASK_RESULT_KEY
from torchpipe_py.values import to_keys

Data = dict[str, Any]
"""One request's dict: ``data`` in, ``result`` out, other keys free."""

BatchRange = tuple[int, int]
"""Minimum and maximum size of a batch."""


class Shared:
    """State shared by the instances of one node: a model loaded once, a compiled engine."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[Hashable, Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Shared, ()  # instances do not share across processes

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The value of ``key``, created by the first caller while others wait; a failure is not stored."""
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

        ``on_done(errors)``, in order, is called once, from any thread, when all are finished.
        """

    def wait_for_graphs(self, root: str, items: Sequence[Data]) -> list[BaseException | None]:
        """Run all items through the graph at once, and wait for them; returns their errors in order."""


class FilterMaker(Protocol):
    """Creates the filter before a child, in the process where it will run."""

    def create(self) -> Callable[[Data], Any]: ...


@dataclass(frozen=True)
class BackendConfig:
    """The arguments for constructing a backend: typed parameters, children, and where it runs.

    ``node`` is the name of its node, for messages. ``reaches_caller``: a result of its node may go to the caller
    unchanged, since there is no next node, or it may be skipped. ``processes`` is the number of service processes that
    run the node, each with ``instance_num`` instances. ``graphs`` are the pipe's; ``None`` outside a pipe. A process in
    place of one that died is set up within ``reloading()``, which may refuse what is loaded.
    """

    params: Mapping[str, Any] = field(default_factory=dict)
    children: tuple[Backend, ...] = ()
    filters: tuple[FilterMaker | None, ...] = ()
    label: str = ""
    node: str = ""
    device_id: int = 0
    instance: int = 0
    instance_num: int = 1
    processes: int = 1
    reaches_caller: bool = True
    shared: Shared = field(default_factory=Shared)
    graphs: Graphs | None = None
    reloading: Callable[[], AbstractContextManager[None]] = nullcontext


class Isolation(Enum):
    """The effect of ``decode_isolation = "process"`` on a backend.

    ``STAYS``: no effect. ``MOVES``: it passes client bytes to native code, and moves to a separate process; it takes
    encoded bytes and outputs a Mat with its ``color``. ``FOLLOWS``: it takes and outputs a Mat, uses no other key but
    ``color``, and moves with the decoder before it. ``REFUSED``: it passes client bytes to native code and cannot run
    in another process.
    """

    STAYS, MOVES, FOLLOWS, REFUSED = range(4)


class Backend:
    """One instance of a computation.

    ``setup``, ``forward`` and ``close`` of an instance run on its own thread, so attributes may hold a CUDA context, a
    stream or an ONNX Runtime session without a lock. Only if ``any_thread()`` is true, ``forward`` may run on the
    thread of a blocked caller instead, but never on two threads at once.

    ``forward`` takes ``min()`` to ``max()`` dicts (any number with ``any_batch``) and gives each exactly one outcome: a
    ``result``, or no result, and then ``error`` should hold an exception that explains why. It returns nothing. An
    exception is a defect; after it the batch is repeated item by item, so that only the faulty item fails.
    """

    children: tuple[int, int | None] = (0, 0)
    """Minimum and maximum number of backends in its brackets (``None``: no maximum)."""

    any_params = False
    """Takes every key of its node, unchecked, in ``self.params``."""

    any_batch = False
    """Takes any number of items at once inside another backend, although its ``max()`` is 1."""

    is_sequence = False
    """Runs its children one after the other: they may have filters, and the last may wrap the others."""

    keeps_color = False
    """The channel order does not matter to it: it prefers the order that the backend after it prefers."""

    wraps_sequence = False
    """As the last of a sequence and without brackets, it wraps all backends before it."""

    takes = ""
    """The only kind of ``data`` that it accepts, from ``signature``. Empty: several kinds, or unknown."""

    gives = ""
    """The kind of ``result`` that it outputs; see ``takes``."""

    sides: tuple[str, ...] = ()
    """Names of its parameters for height and width of the output image; empty if it has none."""

    keeps_sides = False
    """Its output image has the same height and width as its input."""

    is_model = False
    """It takes the channels of an image in any order, without checking it."""

    normalises = False
    """Its output image is normalised: by ``mean`` and ``std``, to float32."""

    passes_on = False
    """Its ``result`` is its ``data``."""

    reads: Collection[str] | None = None
    """The keys of a request's dict that it reads beside ``data``, and beside those that its parameters name.

    ``None``: any. A subclass does not inherit it, since it may read more.
    """

    decodes_reduced = False
    """It has a parameter ``at_least``, with which it decodes images at a reduced size for the next resize."""

    reduced_for: Sequence[tuple[type[Backend], Mapping[str, Any]]] = ()
    """The resizes, class and parameters, that get its images if it decodes at a reduced size; the plan sets it."""

    takes_reduced = False
    """It resizes images that were decoded at a reduced size for it; the plan sets it."""

    checks = False
    """It refuses data that a later node must not get; by default it has instances for all cores."""

    needs_cuda = False
    """It cannot be set up without a CUDA device."""

    uses_device = False
    """It uses the CUDA device ``config.device_id`` if there is one; ``needs_cuda`` implies it."""

    ignored_keys: Mapping[str, str] = {}
    """Keys of other backends that have no effect here, with the reason; they are accepted and logged."""

    isolation = Isolation.STAYS
    """Whether it moves to a separate process when decoders are isolated."""

    keeps_nothing = False
    """It has no state between items and no thread-bound state."""

    def __init__(self, config: BackendConfig) -> None:
        self.config = config
        self.params = config.params
        if not self.any_params:
            for name, value in config.params.items():
                setattr(self, name, value)

    def setup(self) -> None:
        """Acquire the resources of ``forward``; ``BackendUnavailable`` if this machine lacks them."""

    def forward(self, items: list[Data]) -> None:
        """Compute ``result`` from ``data`` for each item, in place."""
        raise NotImplementedError(type(self).__name__)

    def forward_one(self) -> Callable[[Data], object] | None:
        """``forward`` for one item, if the backend works item by item; called after ``setup``.

        An ``InvalidRequest`` that it raises becomes the item's ``error``. ``None``: there is only ``forward``.
        """
        return None

    def close(self) -> None:
        """Release the resources acquired in ``setup``."""

    def max(self) -> int:
        """Maximum number of items in one ``forward``; called after ``setup``."""
        return 1

    def min(self) -> int:
        """Minimum number of items in one ``forward``."""
        return 1

    def any_thread(self) -> bool:
        """Whether ``forward`` may run on another thread than ``setup``, saving a hand-over; called after ``setup``."""
        return self.keeps_nothing

    def signature(self) -> Signature:
        """The types of ``data`` and ``result``, as far as known; called after ``setup``, by any thread."""
        return Signature()

    def batch_key(self, item: Data) -> Hashable:
        """The key that all items of a batch share: by default the shape and dtype of their tensors.

        A Mat does not count as a tensor: Mats of any size share a batch, since they are resized one by one.
        """
        return tensor_key(item[TASK_DATA_KEY])

    def is_large(self, item: Data) -> bool:
        """Whether this item may take seconds while others take milliseconds; called before ``forward``, must be fast.

        If instances take one request at a time, one instance never runs such items, so that other items continue.
        """
        return False

    def setup_choices(self) -> Iterator[str]:
        """What ``setup`` chose on this machine, as ``"NAME: choice"``: a backend, providers, a library, a device.

        On another machine it may choose otherwise, and give other results. Called after ``setup``, by any thread.
        """
        for child in self.config.children:
            yield from child.setup_choices()

    def running_since(self) -> float:
        """When the ``forward`` running in another process began (``perf_counter``); 0.0 if none runs."""
        return 0.0

    def prefer_color(self, color: str | None) -> str | None:
        """The ``color`` that this backend prefers for its input, given the one that the next backend prefers.

        A decoder can then convert while decoding, which saves a pass over the image.
        """
        return color if self.keeps_color else None

    @classmethod
    def jumps(cls, params: Mapping[str, Any]) -> Mapping[str, str]:
        """Roots of the graphs that it runs with these parameters, each with the jump's label in a drawing."""
        return {}

    @classmethod
    def keys_read(cls, params: Mapping[str, Any]) -> Collection[str] | None:
        """The keys of a request's dict that it may read with these parameters, beside ``data``; ``None``: any."""
        own: Collection[str] | None = vars(cls).get("reads")
        if own is None:
            return None
        named = [params[name] for name, param in cls.parameters().items() if param.convert is to_keys]
        return {*own, *[key for keys in named for key in keys]}

    @classmethod
    def remarks(cls, params: Mapping[str, Any], own: Collection[str]) -> Iterable[Remark]:
        """Problems of parameters that are each valid but do not fit together; ``own`` are the keys of the node."""
        return ()

    @classmethod
    def image_misfits(cls, params: Mapping[str, Any], image: ImageSpec) -> Mapping[str, str]:
        """Why it does not accept such an image, by ``kind``, ``height``, ``width`` or ``channels``, if it is wrong."""
        return {}

    @classmethod
    def sizes(cls, params: Mapping[str, Any]) -> Callable[[int, int], tuple[int, int]] | None:
        """``size(height, width)``: height and width to which it resizes the pixels of such a Mat with these parameters.

        ``None`` if it does not resize Mats, or needs more than their size to know.
        """
        return None

    @classmethod
    def batch_range(cls, params: Mapping[str, Any], children: Sequence[BatchRange | None]) -> BatchRange | None:
        """The batch sizes that it accepts, according to its parameters; ``None`` if only ``setup`` can know.

        ``children`` are the ranges of the backends in its brackets; it takes the widest, unless it has a ``max``.
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
        """Whether it needs a CUDA device with these parameters.

        ``children`` holds the same for the backends in its brackets.
        """
        return cls.needs_cuda or any(children)

    @classmethod
    def undeclared(cls, key: str, value: Any) -> str:
        """The end of a message: why the class does not take ``key``, or how it must declare it; empty if unknown."""
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
    """Run ``forward`` with at least ``min()`` items: add copies of the last item and drop their outcomes."""
    missing = backend.min() - len(items)
    forward: Callable[[list[Data]], object] = backend.forward
    returned = forward(items if missing <= 0 else items + [dict(items[-1]) for _ in range(missing)])
    explain_returned(backend, items, returned)


def explain_returned(backend: Backend, items: Iterable[Data], returned: object) -> None:
    """Set the ``error`` of items without an outcome, if ``forward`` returned a value, which is ignored."""
    if returned is None:
        return
    for item in items:
        if TASK_RESULT_KEY not in item and TASK_ERROR_KEY not in item:
            value = f"{type(backend).__name__} returned a value ({type(returned).__name__})"
            item[TASK_ERROR_KEY] = NoResult(f"{value}; return values are ignored: write item['result'] instead")


def close_all(backends: Iterable[Backend]) -> None:
    """Close all backends, even if some raise; raises the first error at the end."""
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
        forward: Callable[[Data], object] = self.forward_item
        for item in items:
            try:
                returned: object = forward(item)
            except InvalidRequest as error:
                item[TASK_ERROR_KEY] = error
            else:
                if returned is not None:
                    explain_returned(self, (item,), returned)

    def forward_one(self) -> Callable[[Data], object] | None:
        return self.forward_item if type(self).forward is ItemBackend.forward else None

    def forward_item(self, item: Data) -> None:
        """Compute ``result`` from ``data`` for one item, in place.

        An ``InvalidRequest`` that it raises is not a defect: it becomes the item's ``error``.
        """
        raise NotImplementedError(type(self).__name__)
