"""What every model backend shares: parameters, inputs of a request, results from a batch of outputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from torchpipe_py.backends.base import Backend, BatchRange, Data, Param, Remark
from torchpipe_py.backends.models.bounds import Bounds, to_bounds
from torchpipe_py.backends.models.postprocess import (
    BUILT_IN,
    Postprocessor,
    PostprocessorParam,
    Written,
    make_postprocessor,
    uses,
)
from torchpipe_py.errors import ConfigError, InvalidRequest
from torchpipe_py.keys import TASK_DATA_KEY, TASK_ERROR_KEY, TASK_RESULT_KEY
from torchpipe_py.values import Value, to_float, to_floats, to_int, to_str

Shapes = TypeVar("Shapes")


def to_divisors(value: Value) -> tuple[float, ...]:
    """Several numbers above 0."""
    numbers = to_floats(value)
    for number in numbers:
        if number <= 0:
            raise ValueError(f"expected numbers above 0, since channels are divided by them, got {number:g}")
    return numbers


class ModelBackend(Backend):
    """A model: ``data`` is its input, or a list in the model's order; so is ``result``.

    Without a ``postprocessor`` the result is the output tensor of shape 1×…; several outputs are a list.
    What the model does not take, by number, shape or type, has no ``result``; ``error`` is an ``InvalidRequest``.
    """

    model = Param(to_str, file=True, doc="path of the model")
    min_batch = Param(to_bounds, to_bounds(1), key="min", doc="fewest items of a batch, or the smallest shapes")
    max_batch = Param(to_bounds, to_bounds(1), key="max", doc="most items of a batch, or the largest shapes")
    mean = Param(to_floats, (), doc="subtracted from each channel, inside the model; pixels of 0..255")
    std = Param(to_divisors, (), doc="each channel divided by it after mean, inside the model")
    postprocessor = PostprocessorParam(
        to_str, "", also=("post_processor",), doc="cpu, SoftmaxMax, TopK or another; docs/models.md lists them"
    )
    labels = Param(to_str, "", file=True, doc="text file with a label a line, for postprocessors: index to label")
    k = Param(to_int, 5, low=1, doc="how many classes TopK gives")
    threshold = Param(to_float, 0.5, low=0, high=1, doc="the least score of the classes that Sigmoid gives")

    @classmethod
    def remarks(cls, params: Mapping[str, Any], own: Collection[str]) -> Iterator[Remark]:
        yield from _bounds_remarks(params["min_batch"], params["max_batch"], "max" in own)
        for key in ("mean", "std"):
            yield from _pixel_remarks(key, params[key])
        for key in sorted({"labels", "k", "threshold"}.intersection(own)):
            if params[key] != getattr(cls, key).default and not uses(params["postprocessor"], key):
                names = ", ".join(each.__name__ for each in BUILT_IN if key in each.uses)
                yield Remark(key, f"nothing uses it without a postprocessor that does: {names}")

    @classmethod
    def batch_range(cls, params: Mapping[str, Any], children: Sequence[BatchRange | None]) -> BatchRange | None:
        return min(params["min_batch"].batches()), max(params["max_batch"].batches())

    def setup(self) -> None:
        self._postprocess: Postprocessor | None = None
        if self.postprocessor:
            config = {"labels": self.labels, "k": self.k, "threshold": self.threshold}
            self._postprocess = make_postprocessor(self.postprocessor, config)

    def check_labels(self, shape: Sequence[Any]) -> None:
        """``ConfigError`` where the label file does not fit the first output, whose dimensions are ``shape``."""
        if not self.labels or len(shape) != 2 or not isinstance(shape[1], int):
            return
        count = len(Path(self.labels).read_text(encoding="utf-8").splitlines())
        if count != shape[1]:
            raise ConfigError(f"labels: {self.labels} has {count} lines, the model has {shape[1]} classes")

    def max(self) -> int:
        return int(max(self.max_batch.batches()))

    def min(self) -> int:
        return int(min(self.min_batch.batches()))

    def write_results(self, items: Sequence[Data], outputs: list[Any]) -> None:
        """Spread a batch of outputs, each a tensor N×…, over N items."""
        if self._postprocess is not None:
            self.spread(items, self._postprocess.forward(outputs))
            return
        for index, item in enumerate(items):
            parts = [output[index : index + 1] for output in outputs]
            item[TASK_RESULT_KEY] = parts[0] if len(parts) == 1 else parts

    def spread(self, items: Sequence[Data], results: Sequence[Any]) -> None:
        """Give each item its result; ``ValueError`` where a postprocessor gave more or fewer."""
        if len(results) != len(items):
            raise ValueError(f"{self.postprocessor.__name__} gave {len(results)} results for {len(items)} items")
        for item, result in zip(items, results, strict=True):
            item.update(result if isinstance(result, Written) else {TASK_RESULT_KEY: result})


def _bounds_remarks(least: Bounds, most: Bounds, says_max: bool) -> Iterator[Remark]:
    if len(least.profiles) != len(most.profiles):
        yield Remark("min", f"min has {len(least.profiles)} profiles, max has {len(most.profiles)}")
    elif least.exceeds(most):
        default = "" if says_max else ", its default"
        yield Remark("min", f"min = {least} is larger than max = {most}{default}")


def _pixel_remarks(key: str, values: Sequence[float]) -> Iterator[Remark]:
    """A doubt where numbers look like those of pixels 0..1, which models are trained on in PyTorch."""
    if values and 0 < max(map(abs, values)) < (2 if key == "mean" else 1):
        written, meant = (", ".join(f"{scale * value:.6g}" for value in values) for scale in (1, 255))
        text = (
            f"{written} looks like the {key} of pixels 0..1, but pixels here are 0..255: probably {meant} is meant, "
            "255 times as much; it is right only where something before divides by 255"
        )
        yield Remark(key, text, is_doubt=True)


def request_values(item: Data) -> list[Any]:
    """The inputs of one request: ``data`` itself, or the list that it is."""
    data = item[TASK_DATA_KEY]
    return list(data) if isinstance(data, (list, tuple)) else [data]


def by_shapes(
    items: Sequence[Data], read: Callable[[list[Any]], tuple[Shapes, list[Any]]]
) -> list[tuple[Shapes, list[Data], list[list[Any]]]]:
    """The items whose inputs have the same shapes, with their inputs, as ``read`` gives both.

    An ``InvalidRequest`` of ``read`` is the outcome of its item, which is in no group then.
    """
    groups: dict[Shapes, tuple[list[Data], list[list[Any]]]] = {}
    for item in items:
        try:
            shapes, row = read(request_values(item))
        except InvalidRequest as error:
            item[TASK_ERROR_KEY] = error
            continue
        members, rows = groups.setdefault(shapes, ([], []))
        members.append(item)
        rows.append(row)
    return [(shapes, members, rows) for shapes, (members, rows) in groups.items()]


def check_count(values: Sequence[Any], count: int) -> None:
    """``InvalidRequest`` where a request does not bring the model's ``count`` inputs."""
    if len(values) != count:
        raise InvalidRequest(f"the model has {count} inputs, data holds {len(values)}")


def as_array(value: Any, dims: Sequence[int | None], name: str) -> np.ndarray:
    """A tensor or array as the 1×… array that fits ``dims`` (``None``: any size); C×H×W is taken as 1×C×H×W.

    A ``uint8`` array of three dimensions, for an input of four, is a Mat H×W×C. ``InvalidRequest`` for what
    does not fit.
    """
    array = value if isinstance(value, np.ndarray) else _tensor_to_numpy(value, name)
    if len(dims) == 4 and array.ndim == 3 and value is array and array.dtype == np.uint8:
        array = array.transpose(2, 0, 1)  # a Mat
    if array.ndim == len(dims) - 1:
        array = array[None]
    shape = array.shape
    fits = len(shape) == len(dims) and shape[0] == 1
    if not fits or any(want is not None and want != have for want, have in zip(dims[1:], shape[1:], strict=True)):
        wanted = "x".join("?" if dim is None else str(dim) for dim in (1, *dims[1:]))
        raise InvalidRequest(f"input {name!r} takes {wanted}, got {'x'.join(map(str, np.shape(value))) or 'a scalar'}")
    return array


def _tensor_to_numpy(value: Any, name: str) -> np.ndarray:
    try:
        return value.detach().cpu().numpy()  # type: ignore[no-any-return]
    except AttributeError:
        raise InvalidRequest(f"input {name!r} takes a tensor, got {type(value).__name__}") from None
