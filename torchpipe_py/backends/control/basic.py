"""Backends that compute nothing themselves: they pass on, chain, choose, or call a class of the user's."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

from torchpipe_py.backends.base import (
    Backend,
    Data,
    StatelessBackend,
    close_all,
    run_padded,
)
from torchpipe_py.backends.signature import Signature
from torchpipe_py.errors import BackendError, BackendUnavailable, InvalidRequest
from torchpipe_py.filters import RUN, SKIP, Status, run, swap
from torchpipe_py.keys import TASK_DATA_KEY, TASK_ERROR_KEY, TASK_RESULT_KEY

logger = logging.getLogger("torchpipe_py")


class Identity(StatelessBackend):
    """``result = data``."""

    passes_on = True
    keeps_color = True

    def forward_item(self, item: Data) -> None:
        item[TASK_RESULT_KEY] = item[TASK_DATA_KEY]


class Wrapper(Backend):
    """Behaves as the one backend in its brackets."""

    children: tuple[int, int | None] = (1, 1)

    @property
    def inner(self) -> Backend:
        return self.config.children[0]

    def setup(self) -> None:
        self.inner.setup()

    def forward(self, items: list[Data]) -> None:
        self.inner.forward(items)

    def close(self) -> None:
        self.inner.close()

    def max(self) -> int:
        return self.inner.max()

    def min(self) -> int:
        return self.inner.min()

    def any_thread(self) -> bool:
        return self.inner.any_thread()

    def signature(self) -> Signature:
        return self.inner.signature()

    def batch_key(self, item: Data) -> Hashable:
        return self.inner.batch_key(item)

    def is_large(self, item: Data) -> bool:
        return self.inner.is_large(item)

    def prefer_color(self, color: str | None) -> str | None:
        return self.inner.prefer_color(color)


class Sequential(Backend):
    """Its children one after the other, each on the result of the one before; ``S`` for short.

    ``(filter)Backend`` puts a filter in front of a child; without one it is ``swap``, and ``Run`` for the first.
    The skips beyond ``Skip`` mean ``Break``, which ends the sequence for that item. The range of the sequence is that
    of the child that takes the largest batches; another one gets them in pieces that it takes. Of a batch each item
    goes through all children that work item by item before the next does.
    """

    children = (1, None)
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
        for child in self.config.children:
            child.setup()
        widest = max(self.config.children, key=lambda child: child.max())
        self._range = widest.min(), widest.max()
        given = self.config.filters or (None,) * len(self.config.children)
        defaults = (run, *(swap,) * (len(given) - 1))
        filters = [default if plan is None else plan.create() for plan, default in zip(given, defaults, strict=True)]
        self._single_steps: list[_Step] = []
        self._stages: list[Callable[[list[Data]], list[Data]]] = []
        walked: list[_Step] | None = None
        for filter_, child in zip(filters, self.config.children, strict=True):
            one = child.forward_one()
            # NOTE: the default filter is None here, and done in place: its call would take longer than it does.
            forward = child.forward if child.min() == 1 else partial(run_padded, child)
            step = None if filter_ is swap else filter_, child, one or _alone(forward)
            self._single_steps.append(step)
            if one is None:
                walked = None
                most = sys.maxsize if child.any_batch else child.max()
                self._stages.append(partial(_in_batches, filter_, child, forward, most))
            elif walked is None:
                walked = [step]
                self._stages.append(partial(_item_by_item, walked))
            else:
                walked.append(step)

    def forward(self, items: list[Data]) -> None:
        if len(items) == 1:
            _walk(self._single_steps, items[0])
            return
        for stage in self._stages:
            items = stage(items)

    def close(self) -> None:
        close_all(reversed(self.config.children))

    def max(self) -> int:
        return self._range[1]

    def min(self) -> int:
        return self._range[0]

    def any_thread(self) -> bool:
        return all(child.any_thread() for child in self.config.children)

    def signature(self) -> Signature:
        first, last = self.config.children[0].signature(), self.config.children[-1].signature()
        return Signature(first.inputs, last.outputs)

    def batch_key(self, item: Data) -> Hashable:
        return self.config.children[0].batch_key(item)

    def is_large(self, item: Data) -> bool:
        return self.config.children[0].is_large(item)


def _check_end(status: Any, child: Backend) -> None:
    """What a filter says instead of ``Run`` and ``Skip`` ends the sequence for the item, or is a ``BackendError``."""
    if status not in (Status.Break, Status.SerialSkip, Status.SubGraphSkip):
        said = "says Error" if status is Status.Error else f"gave {status!r}, which is no Status"
        raise BackendError(f"a filter in front of {child.config.label} {said}")


_Step = tuple[Callable[[Data], Any] | None, Backend, Callable[[Data], object]]
"""The filter in front of a child, ``None`` for the default one, the child, and its ``forward`` for one item."""


def _item_by_item(steps: Sequence[_Step], items: list[Data]) -> list[Data]:
    """Items through steps that each take one; those that go on.

    NOTE: each through all steps, while it is in the processor's cache: step by step, a batch of eight photographs takes
    a fifth longer.
    """
    return [item for item in items if _walk(steps, item)]


def _walk(steps: Sequence[_Step], item: Data) -> bool:
    """One item through steps; whether it goes on after them."""
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
            forward(item)
        except InvalidRequest as error:
            if child.forward_one() is None:
                raise  # a `forward` says it in the dict: an exception of it is a defect, as outside a sequence
            item[TASK_ERROR_KEY] = error
    return True


def _in_batches(
    filter_: Callable[[Data], Any],
    child: Backend,
    forward: Callable[[list[Data]], object],
    most: int,
    items: list[Data],
) -> list[Data]:
    """Items through one step, in batches of ``most`` items, which the child takes; those that go on."""
    running = []
    going = []
    for item in items:
        status = filter_(item)
        if status is RUN:
            # Until the child says otherwise there is no outcome, whatever an earlier one left.
            item.pop(TASK_RESULT_KEY, None)
            item.pop(TASK_ERROR_KEY, None)
            running.append(item)
            going.append(item)
        elif status is SKIP:
            going.append(item)
        else:
            _check_end(status, child)
    for start in range(0, len(running), most):
        forward(running[start : start + most])
    return going


def _alone(forward: Callable[[list[Data]], None]) -> Callable[[Data], None]:
    """``forward`` for one item."""
    return lambda item: forward([item])


class FirstAvailable(Wrapper):
    """The first backend of its list that can be set up on this machine; the log says which, and why not the others.

    Only ``BackendUnavailable`` (a missing library or device) moves on to the next; any other error is a defect.
    """

    children = (1, None)

    @classmethod
    def requires_cuda(cls, params: Mapping[str, Any], children: Sequence[bool]) -> bool:
        return all(children)

    def setup(self) -> None:
        reasons = []
        for child in self.config.children:
            try:
                child.setup()
            except BackendUnavailable as error:
                child.close()
                reasons.append(f"{child.config.label}: {error}")
            except BaseException:
                child.close()
                raise
            else:
                self._chosen = child
                self._log(child, reasons)
                return
        raise BackendUnavailable(f"{self.config.label}: none is available: {'; '.join(reasons)}")

    def _log(self, child: Backend, reasons: list[str]) -> None:
        if self.config.instance == 0:
            because = f" ({'; '.join(reasons)})" if reasons else ""
            logger.warning("%s: using %s%s", self.config.label, child.config.label, because)

    @property
    def inner(self) -> Backend:
        return self._chosen

    def close(self) -> None:
        if hasattr(self, "_chosen"):
            self._chosen.close()

    def prefer_color(self, color: str | None) -> str | None:
        return None
