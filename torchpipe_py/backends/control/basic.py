"""Backends that pass data on, or chain, choose and combine other backends."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torchpipe_py.backends.base import Backend, BatchRange, Data, ItemBackend, close_all, explain_returned, run_padded
from torchpipe_py.backends.params import Param
from torchpipe_py.backends.signature import Signature
from torchpipe_py.errors import BackendError, BackendUnavailable, ConfigError, InvalidRequest, logger
from torchpipe_py.filters import RUN, SKIP, Status, run, swap
from torchpipe_py.keys import TASK_DATA_KEY, TASK_ERROR_KEY, TASK_RESULT_KEY
from torchpipe_py.values import Value, to_int, to_list


class Identity(ItemBackend):
    """``result = data``."""

    reads = ()
    keeps_nothing = True
    passes_on = True
    keeps_color = True

    def forward_item(self, item: Data) -> None:
        item[TASK_RESULT_KEY] = item[TASK_DATA_KEY]


class Wrapper(Backend):
    """Behaves like the only backend in its brackets."""

    children: tuple[int, int | None] = (1, 1)

    @property
    def inner(self) -> Backend:
        return self.config.children[0]


def _of_inner(name: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(self.inner, name)(*args)


for _name in (
    *("setup", "forward", "close", "max", "min", "any_thread"),
    *("signature", "batch_key", "is_large", "prefer_color"),
):
    setattr(Wrapper, _name, _of_inner(_name))


class Several(Backend):
    """Combines the backends in its brackets; the first defines the input, the last the output."""

    children: tuple[int, int | None] = (1, None)

    def setup(self) -> None:
        for child in self.config.children:
            child.setup()

    def close(self) -> None:
        close_all(reversed(self.config.children))

    def any_thread(self) -> bool:
        return all(child.any_thread() for child in self.config.children)

    def signature(self) -> Signature:
        children = self.config.children
        last = next((child for child in reversed(children) if not child.passes_on), children[-1])
        parameters = dict.fromkeys(name for child in children for name in child.signature().parameters)
        return Signature(children[0].signature().inputs, last.signature().outputs, tuple(parameters))

    def batch_key(self, item: Data) -> Hashable:
        return self.config.children[0].batch_key(item)

    def is_large(self, item: Data) -> bool:
        return self.config.children[0].is_large(item)


class Sequential(Several):
    """Runs its children one after the other, each on the result of the one before; ``S`` for short.

    ``(filter)Backend`` puts a filter before a child; the default is ``swap``, and ``Run`` for the first.
    ``SerialSkip`` and ``SubGraphSkip`` act like ``Break``, which ends the sequence for that item. The sequence has the
    batch range of the child with the largest batches; other children get batches in pieces that they accept. Each item
    of a batch passes all consecutive children that work item by item before the next item does.
    """

    reads = ()
    is_sequence = True

    _color_after: str | None = None

    def prefer_color(self, color: str | None) -> str | None:
        self._color_after = color
        filters = self.config.filters or (None,) * len(self.config.children)
        for child, filter_ in zip(reversed(self.config.children), reversed(filters), strict=True):
            color = child.prefer_color(color) if filter_ is None else None
        return color

    def setup(self) -> None:
        self.prefer_color(self._color_after)
        super().setup()
        widest = max(self.config.children, key=lambda child: child.max())
        self._range = widest.min(), widest.max()
        given = self.config.filters or (None,) * len(self.config.children)
        defaults = (run, *(swap,) * (len(given) - 1))
        filters = [default if plan is None else plan.create() for plan, default in zip(given, defaults, strict=True)]
        self._single_steps: list[_Step] = []
        self._stages: list[Callable[[list[Data]], list[Data]]] = []
        item_steps: list[_Step] | None = None  # of the children before this one that take single items
        for filter_, child in zip(filters, self.config.children, strict=True):
            forward_one = child.forward_one()
            # `_walk` runs the default filter inline, as None: a call would take longer than its work.
            forward = child.forward if child.min() == 1 else partial(run_padded, child)
            step = None if filter_ is swap else filter_, child, forward_one or _alone(forward)
            self._single_steps.append(step)
            if forward_one is None:
                item_steps = None
                most = sys.maxsize if child.any_batch else child.max()
                self._stages.append(partial(_in_batches, filter_, child, forward, most))
            elif item_steps is None:
                item_steps = [step]
                self._stages.append(partial(_item_by_item, item_steps))
            else:
                item_steps.append(step)

    def forward(self, items: list[Data]) -> None:
        if len(items) == 1:
            _walk(self._single_steps, items[0])
            return
        for stage in self._stages:
            items = stage(items)

    def max(self) -> int:
        return self._range[1]

    def min(self) -> int:
        return self._range[0]


def _check_end(status: Any, child: Backend) -> None:
    """Check a status other than ``Run`` and ``Skip``: it ends the sequence for the item, or is a ``BackendError``."""
    if status not in (Status.Break, Status.SerialSkip, Status.SubGraphSkip):
        returned = "Status.Error" if status is Status.Error else f"{status!r}, not a Status"
        raise BackendError(f"the filter before {child.config.label} returned {returned}")


_Step = tuple[Callable[[Data], Any] | None, Backend, Callable[[Data], object]]
"""The filter before a child (``None`` for the default), the child, and its ``forward`` for one item."""


def _item_by_item(steps: Sequence[_Step], items: list[Data]) -> list[Data]:
    """Run items through steps that each take one; returns the items that continue.

    Each item passes all steps while it is in the processor's cache: step by step, a batch of eight photographs takes
    a fifth longer.
    """
    return [item for item in items if _walk(steps, item)]


def _walk(steps: Sequence[_Step], item: Data) -> bool:
    """Run one item through the steps; returns whether it continues after them."""
    for filter_, child, forward in steps:
        if filter_ is None:
            if TASK_RESULT_KEY not in item:
                return False
            item[TASK_DATA_KEY] = item.pop(TASK_RESULT_KEY)
        else:
            status = filter_(item)
            if status is SKIP:
                continue
            if status is not RUN:
                _check_end(status, child)
                return False
            item.pop(TASK_RESULT_KEY, None)
        if TASK_ERROR_KEY in item:
            del item[TASK_ERROR_KEY]
        try:
            returned = forward(item)
        except InvalidRequest as error:
            if child.forward_one() is None:
                raise  # `forward` reports errors in the dict; one that raises has a defect, as outside a sequence
            item[TASK_ERROR_KEY] = error
        else:
            if returned is not None:
                explain_returned(child, (item,), returned)
    return True


def _in_batches(
    filter_: Callable[[Data], Any],
    child: Backend,
    forward: Callable[[list[Data]], object],
    most: int,
    items: list[Data],
) -> list[Data]:
    """Run items through one step, in batches of up to ``most`` items; returns the items that continue."""
    running = []
    continuing = []
    for item in items:
        status = filter_(item)
        if status is RUN:
            # Remove the result of an earlier backend: only the child sets the outcome.
            item.pop(TASK_RESULT_KEY, None)
            item.pop(TASK_ERROR_KEY, None)
            running.append(item)
            continuing.append(item)
        elif status is SKIP:
            continuing.append(item)
        else:
            _check_end(status, child)
    for start in range(0, len(running), most):
        batch = running[start : start + most]
        explain_returned(child, batch, forward(batch))
    return continuing


def _alone(forward: Callable[[list[Data]], object]) -> Callable[[Data], object]:
    """``forward`` for one item."""
    return lambda item: forward([item])


class FirstAvailable(Wrapper):
    """Uses the first backend in its list that can be set up on this machine; logs the choice and the reasons.

    It tries the next one only after ``BackendUnavailable`` (a missing library or device); other errors are defects.
    """

    reads = ()
    children = (1, None)

    @classmethod
    def requires_cuda(cls, params: Mapping[str, Any], children: Sequence[bool]) -> bool:
        return all(children)

    _chosen: Backend | None = None

    @property
    def inner(self) -> Backend:
        assert self._chosen is not None  # from setup on
        return self._chosen

    def setup(self) -> None:
        reasons = []
        for child in self.config.children:
            try:
                child.setup()
            except BaseException as error:
                child.close()
                if not isinstance(error, BackendUnavailable):
                    raise
                reasons.append(f"{child.config.label}: {error}")
                continue
            self._chosen = child
            if self.config.instance == 0:
                because = f" ({'; '.join(reasons)})" if reasons else ""
                logger.info("%s: using %s%s", self.config.label, child.config.label, because)
            return
        raise BackendUnavailable(f"{self.config.label}: none is available: {'; '.join(reasons)}")

    def setup_choices(self) -> Iterator[str]:
        chosen = self.inner
        if chosen.config.label not in self.config.label:  # decode_isolation has wrapped it, which changes no result
            (chosen,) = chosen.config.children
        yield f"{self.config.label}: {chosen.config.label}"
        yield from self.inner.setup_choices()

    def close(self) -> None:
        if self._chosen is not None:
            self._chosen.close()

    def prefer_color(self, color: str | None) -> str | None:
        return None


# -- batch ranges -----------------------------------------------------------------------------------------------------

LAUNCH = 1
"""Cost of starting a run, in computed items: one padded larger run may be cheaper than several."""


def to_range(value: Value) -> BatchRange:
    """``"8,19"`` as (8, 19); ``ValueError`` unless 1 <= first <= second."""
    problem = f'expected "min,max" with 1 <= min <= max, got {value!r}'
    try:
        parts = [to_int(part) for part in to_list(value)]
    except ValueError:
        raise ValueError(problem) from None
    if len(parts) != 2 or not 1 <= parts[0] <= parts[1]:
        raise ValueError(problem)
    return parts[0], parts[1]


class Range(Wrapper):
    """Gives the backend in its brackets another batch range: batches are split into pieces that it accepts.

    The first pieces are the largest. A range is refused if some size is not a sum of accepted pieces.
    """

    reads = ()
    limits = Param(to_range, key="range", doc='"min,max" of the batches taken')

    @classmethod
    def batch_range(cls, params: Mapping[str, Any], children: Sequence[BatchRange | None]) -> BatchRange | None:
        limits: BatchRange = params["limits"]
        return limits

    def setup(self) -> None:
        super().setup()
        low, high = self.inner.min(), self.inner.max()
        for size in range(self.limits[0], self.limits[1] + 1):
            if low * -(-size // high) > size:  # with as few pieces as possible, or not at all
                label = self.inner.config.label
                raise ConfigError(f"range: {label} takes {low}..{high}, into which a batch of {size} cannot be cut")

    def forward(self, items: list[Data]) -> None:
        for start, end in _cuts(len(items), self.inner.min(), self.inner.max()):
            self.inner.forward(items[start:end])

    def max(self) -> int:
        return int(self.limits[1])

    def min(self) -> int:
        return int(self.limits[0])


def _cuts(size: int, low: int, high: int) -> Iterator[tuple[int, int]]:
    """Split ``size`` into pieces of ``low`` to ``high``, the largest first; yields start and end of each."""
    start = 0
    while start < size:
        left = size - start
        others = -(-left // high) - 1
        end = start + min(high, left - low * others)
        yield start, end
        start = end


class Composed(Several):
    """Several backends as one, ``a&b``: a batch is split into runs of the backends whose ranges suit it best.

    Its range is the union of theirs. A run that is too small for its backend is filled up with copies, whose outcomes
    are dropped.
    """

    reads = ()

    def setup(self) -> None:
        super().setup()
        self._runs = _best_runs([(child.min(), child.max()) for child in self.config.children])

    def forward(self, items: list[Data]) -> None:
        start = 0
        while start < len(items):
            which, count = self._runs[len(items) - start]
            run_padded(self.config.children[which], items[start : start + count])
            start += count

    def max(self) -> int:
        return max(child.max() for child in self.config.children)

    def min(self) -> int:
        return min(child.min() for child in self.config.children)


def _best_runs(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """For each number of items, up to the largest: the backend to run first, and its number of items.

    The choice minimises the total of computed items, padding included, plus ``LAUNCH`` for each run.
    """
    costs, runs = [0], [(0, 0)]
    for size in range(1, max(high for _, high in ranges) + 1):
        cost, _, run = min(
            (max(count, low) + LAUNCH + costs[size - count], -count, (which, count))
            for which, (low, high) in enumerate(ranges)
            for count in range(1, min(size, high) + 1)
        )
        costs.append(cost)
        runs.append(run)
    return runs
