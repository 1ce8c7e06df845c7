"""Backends that run another graph of the pipe: once for a request, or once for each element of a list."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from typing import Any

from torchpipe_py.backends.base import Data, Graphs
from torchpipe_py.backends.deferred import DeferredBackend
from torchpipe_py.backends.model.inputs import is_image
from torchpipe_py.backends.params import Param
from torchpipe_py.backends.signature import shown_dims
from torchpipe_py.errors import (
    BackendError,
    ConfigError,
    DeadlineExceeded,
    EngineUnavailable,
    InvalidRequest,
    NoResult,
    PipeClosed,
    TorchpipeError,
    WorkerDied,
    first_line,
    prefixed,
)
from torchpipe_py.keys import TASK_DATA_KEY, TASK_ERROR_KEY, TASK_RESULT_KEY
from torchpipe_py.results import Detections
from torchpipe_py.values import Value, to_keys, to_str
from torchpipe_py.wire.values import is_array

MOST_ROWS = 2**16
"""Maximum rows of an array: a client may have sent it, and each row costs far more memory than its bytes."""


class Jump(DeferredBackend):
    """Runs the graph of the root ``jump`` on the request; the graph's outcome becomes this backend's outcome.

    To run it on other data, or several times, subclass and override ``split`` and ``merge``. The graph's nodes batch
    requests of all jumps and callers together. If it is the only backend of a node, it blocks no thread while it waits,
    and its runs end when the request is abandoned. Inside another backend it blocks the instance's thread until its
    runs have ended.
    """

    reads = ()
    jump = Param(to_str, doc="root node of the graph to run")

    any_batch = True

    @classmethod
    def jumps(cls, params: Mapping[str, Any]) -> Mapping[str, str]:
        return {params["jump"]: ""}

    def setup(self) -> None:
        self._runs = GraphRuns(self.config.graphs, self.jump, self.split, self.merge)

    def split(self, data: Data) -> Sequence[Data]:
        """The dicts to run through the graph; none may be ``data`` itself.

        If ``data`` cannot be split, raise ``InvalidRequest``, which becomes the request's ``error``.
        """
        return [dict(data)]

    def merge(self, data: Data, parts: Sequence[Data]) -> None:
        """Write the outcome into ``data``; ``parts`` are the dicts of ``split``, in order, with their outcomes."""
        data.update(parts[0])

    def start(self, item: Data, done: Callable[[BaseException | None], None], request: Any) -> None:
        self._runs.start(item, done, request)

    def forward(self, items: list[Data]) -> None:
        self._runs.run(items)


class GraphRuns:
    """Runs the graph of the root ``jump`` on the parts that ``split`` makes of an item, then merges them."""

    def __init__(
        self,
        graphs: Graphs | None,
        jump: str,
        split: Callable[[Data], Sequence[Data]],
        merge: Callable[[Data, Sequence[Data]], object],
    ) -> None:
        if graphs is None:
            raise ConfigError("there is no graph to jump to outside a pipe")
        self._graphs, self._jump, self._split, self._merge = graphs, jump, split, merge

    def start(self, item: Data, done: Callable[[BaseException | None], None], request: Any) -> None:
        """Start an item; ``done(error)`` is called once its dict holds the outcome."""
        try:
            parts = self._parts_of(item)
        except InvalidRequest as error:
            item[TASK_ERROR_KEY] = error
            done(None)
            return
        if not parts:
            done(self._finish(item, parts, []))
            return
        self._graphs.run_graphs(self._jump, parts, lambda errors: done(self._finish(item, parts, errors)), request)

    def run(self, items: list[Data]) -> None:
        """Run items and wait for them; raises the first error."""
        split: list[tuple[Data, list[Data]]] = []
        for item in items:
            try:
                split.append((item, self._parts_of(item)))
            except InvalidRequest as error:
                item[TASK_ERROR_KEY] = error
        errors = iter(self._graphs.wait_for_graphs(self._jump, [part for _, parts in split for part in parts]))
        first = None
        for item, parts in split:
            first = first or self._finish(item, parts, [next(errors) for _ in parts])
        if first is not None:
            raise first

    def _parts_of(self, item: Data) -> list[Data]:
        parts = list(self._split(item))
        for part in parts:
            if not isinstance(part, dict) or TASK_DATA_KEY not in part:
                raise ValueError(f"split gave {part!r:.100}, not a dict with {TASK_DATA_KEY!r}")
        return parts

    def _finish(self, item: Data, parts: list[Data], errors: list[BaseException | None]) -> BaseException | None:
        """Merge; returns the error that prevents it, if any."""
        for index, error in enumerate(errors):
            if isinstance(error, (PipeClosed, DeadlineExceeded, CancelledError)):
                return error
            if error is not None:
                return self._failure(index, len(parts), error)
        try:
            self._merge(item, parts)
        except _ElementError as failed:
            item.pop(TASK_RESULT_KEY, None)
            item[TASK_ERROR_KEY] = failed.error
        except BaseException as error:
            return error
        return None

    def _failure(self, index: int, count: int, error: BaseException) -> TorchpipeError:
        which = f"element [{index}] of {count}: " if count > 1 else ""
        kind = next((kind for kind in (WorkerDied, EngineUnavailable) if isinstance(error, kind)), BackendError)
        failure = kind(f"{which}{self._jump!r}: {first_line(error)}")
        failure.__cause__ = error
        return failure


class _ElementError(Exception):
    """An element ended with ``error``, which becomes the request's ``error``: the element failed, not the node."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


def _some_keys(value: Value) -> tuple[str, ...]:
    names = to_keys(value)
    if not names:
        raise ValueError("names no key")
    return names


class MapReduce(DeferredBackend):
    """Runs the graph of the root ``jump`` once for each element of a list, all at once, and gathers lists in order.

    The elements of an array or a Tensor are its rows (``MOST_ROWS`` at most), such as the K rows of boxes K×4, and
    those of ``Detections`` their boxes. Each run gets a copy of the dict in which every key of ``split`` holds its
    element; afterwards every key of ``merge`` holds the list of the runs' values. With an empty ``split`` there is one
    run, on the unchanged dict. No elements give empty lists. ``InvalidRequest`` for a value without elements, for a
    Mat, and for lists of different lengths.

    ``on_error`` says what an element with an ``error`` in place of a result does. ``fail``: the first such error
    becomes the request's, with the element's index. ``none``: its values in the lists are ``None``. ``skip``: it is
    left out of the lists, and of what the keys of ``split`` hold, so that all of them stay aligned. A run without
    result and error, or with a defect, fails the request in any case.
    """

    reads = ()
    jump = Param(to_str, doc="root node of the graph to run")
    split_keys = Param(to_keys, (TASK_DATA_KEY,), key="split", doc="keys that hold lists or arrays of the same length")
    merge_keys = Param(_some_keys, (TASK_RESULT_KEY,), key="merge", doc="keys of the runs to gather as lists")
    on_error = Param(to_str, "fail", choices=("fail", "skip", "none"), doc="what an element with an error does")

    any_batch = True

    @classmethod
    def jumps(cls, params: Mapping[str, Any]) -> Mapping[str, str]:
        split, merge = ", ".join(params["split_keys"]), ", ".join(params["merge_keys"])
        return {params["jump"]: f"split {split or 'nothing'}, merge {merge}"}

    def setup(self) -> None:
        self._runs = GraphRuns(self.config.graphs, self.jump, self.split, self.merge)

    def start(self, item: Data, done: Callable[[BaseException | None], None], request: Any) -> None:
        self._runs.start(item, done, request)

    def forward(self, items: list[Data]) -> None:
        self._runs.run(items)

    def split(self, data: Data) -> Sequence[Data]:
        """The dicts to run through the graph, as for ``Jump``."""
        if not self.split_keys:
            return [dict(data)]
        lists = {key: _elements(data, key) for key in self.split_keys}
        counts = {key: len(elements) for key, elements in lists.items()}
        if len(set(counts.values())) > 1:
            lengths = ", ".join(f"{key!r} has {count}" for key, count in counts.items())
            raise InvalidRequest(f"the keys to split hold lists of different lengths: {lengths}")
        count = next(iter(counts.values()))
        return [{**data, **{key: lists[key][index] for key in lists}} for index in range(count)]

    def merge(self, data: Data, parts: Sequence[Data]) -> None:
        """Write the gathered lists into ``data``, as for ``Jump``."""
        first: _ElementError | None = None
        whole = []
        for index, part in enumerate(parts):
            missing = next((key for key in self.merge_keys if key not in part), None)
            if missing is None:
                whole.append(index)
                continue
            which = f"element [{index}] of {len(parts)}: "
            if TASK_ERROR_KEY not in part:
                raise ValueError(f"{which}{self.jump!r} gave no {missing!r}")
            if first is None:
                error = part[TASK_ERROR_KEY]
                error = error if isinstance(error, BaseException) else NoResult(str(error))
                first = _ElementError(prefixed(which, error))
        if first is not None and self.on_error == "fail":
            raise first
        if first is not None and self.on_error == "skip":
            for key in self.split_keys:
                data[key] = _chosen(data[key], whole)
            parts = [parts[index] for index in whole]
        kept = range(len(parts)) if self.on_error == "skip" else frozenset(whole)
        for key in self.merge_keys:
            data[key] = [part[key] if index in kept else None for index, part in enumerate(parts)]


def _elements(data: Data, key: str) -> Sequence[Any]:
    value: Any = data.get(key)
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, Detections):
        return list(value.boxes)
    found = type(value).__name__ if key in data else "no such key"
    if is_image(value):
        found = f"an image of {shown_dims(value.shape)}; split names the keys that hold lists"
    elif is_array(value):
        if value.ndim and len(value) > MOST_ROWS:
            raise InvalidRequest(f"the {found} under {key!r} has {len(value)} rows to split; the limit is {MOST_ROWS}")
        if value.ndim:
            return list(value)
        found += " of no dimension"
    raise InvalidRequest(f"expected a list or an array under {key!r} to split, found {found}")


def _chosen(value: Any, indices: list[int]) -> Any:
    """The elements of a list, array, Tensor or ``Detections`` at these indices, in one of its kind."""
    if isinstance(value, (list, tuple)):
        return type(value)([value[index] for index in indices])
    return value[indices]
