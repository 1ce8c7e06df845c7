"""Classes from a model's outputs, for the whole batch at once, with one copy to the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from torchpipe_py.backends.base import Data
from torchpipe_py.backends.image import original
from torchpipe_py.backends.model.check import ROWS, layout_of
from torchpipe_py.backends.model.inputs import to_numpy
from torchpipe_py.backends.model.postprocess.base import Origin, Postprocessor, Written, read_labels
from torchpipe_py.backends.model.postprocess.detections import input_size
from torchpipe_py.backends.model.postprocess.palette import on_original, read_palette
from torchpipe_py.backends.params import Param
from torchpipe_py.backends.signature import BYTES, LABEL_AND_SCORE, RANKING, TensorSpec, shown_dims
from torchpipe_py.errors import BackendError, ConfigError, InvalidRequest, counted
from torchpipe_py.keys import TASK_COLOR_KEY, TASK_DATA_KEY, TASK_RESULT_KEY
from torchpipe_py.values import to_bool, to_strings

# -- arithmetic of float32, over the classes --------------------------------------------------------------------------
# NumPy on a CPU: PyTorch's operators wake a pool of threads whose spinning disturbs those that decode.


def _floats(output: Any) -> Any:
    return output.detach().float()


def _softmax(output: Any) -> Any:
    import torch

    logits = _floats(output)
    if logits.is_cuda:
        return logits.softmax(1)
    values = logits.numpy()
    with np.errstate(invalid="ignore"):  # infinity becomes NaN, which is reported
        shifted = np.exp(values - values.max(1, keepdims=True))
        return torch.from_numpy(shifted / shifted.sum(1, keepdims=True))


def _best(scores: Any, count: int) -> Any:
    """The ``count`` largest of each row and their indices, the largest first, N×2×count: one copy to the host.

    As ``float32`` indices are exact up to 2**24.
    """
    import torch

    count = min(count, scores.shape[1])
    if scores.is_cuda:
        largest, indices = scores.topk(count, 1) if count > 1 else scores.max(1, keepdim=True)
        return torch.stack([largest, indices.float()], 1)
    values = scores.numpy()
    chosen = np.argsort(-values, 1, kind="stable")[:, :count] if count > 1 else values.argmax(1)[:, None]
    # `take_along_axis` and `stack` would take three times as long.
    largest = values[np.arange(len(values))[:, None], chosen]
    return torch.from_numpy(np.array([largest, chosen]).swapaxes(0, 1))


def _classes(output: Any) -> list[Any]:
    """The index of the largest at each place, and for each item whether it has NaN."""
    import torch

    dtype = _dtype_of_classes(output.shape[1])
    if output.is_cuda:
        largest, classes = output.max(1)
        return [classes.to(getattr(torch, dtype)), largest.isnan().flatten(1).any(1)]
    values = to_numpy(output)
    return [torch.from_numpy(each) for each in (values.argmax(1).astype(dtype), has_nan(values))]


def has_nan(values: np.ndarray) -> np.ndarray:
    """For each item of N×… whether it has NaN."""
    have_nan: np.ndarray = np.isnan(values).any(tuple(range(1, values.ndim)))
    return have_nan


def _dtype_of_classes(count: int) -> str:
    return "uint8" if count <= 256 else "int32"


# -- the built-in ones ------------------------------------------------------------------------------------------


class OfClasses(Postprocessor):
    """A built-in postprocessor of classes: the first output is N×C, its labels are the lines of the label file.

    Subclasses override ``on_device`` and ``on_host``. An item with scores that are not finite numbers gets a
    ``BackendError`` as its result.
    """

    uses: ClassVar[Collection[str]] = ("labels",)
    takes_rows: ClassVar[bool] = True
    """Whether the first output must be N×C, also with ``max = 1``."""
    takes_planes: ClassVar[bool] = False
    """Whether it may also be N×C×…."""
    least_classes: ClassVar[int] = 2
    origin = Origin()

    def init(self, config: Mapping[str, Any]) -> None:
        self.origin = Origin.of(config)
        self._path = config.get("labels")
        self._labels = read_labels(self._path) if self._path else None

    def fit(self, outputs: Sequence[TensorSpec]) -> None:
        if outputs:
            self.origin = replace(self.origin, output=outputs[0].name)

    def forward(self, outputs: list[Any]) -> list[Any]:
        return self.on_host(self.on_device(outputs))

    def on_device(self, outputs: list[Any]) -> list[Any]:
        """Compute, where the outputs are, the tensors to copy to the host."""
        raise NotImplementedError(type(self).__name__)

    def on_host(self, tensors: list[Any]) -> list[Any]:
        raise NotImplementedError(type(self).__name__)

    def rows(self, tensor: Any, what: str) -> list[Any]:
        """Each item's row 1×… of a tensor of ``what`` on the host, or the error of one with NaN."""
        return self.without_nan(ROWS.of_items([tensor]), has_nan(tensor.numpy()), what)

    def without_nan(self, results: Sequence[Any], have_nan: Iterable[Any], what: str = "scores") -> list[Any]:
        """The results, with an error in place of those whose numbers ``have_nan``."""
        return [
            self.origin.not_finite(what) if is_wrong else result
            for result, is_wrong in zip(results, have_nan, strict=True)
        ]

    def label(self, index: int) -> int | str:
        """The label of a class, or else its index."""
        return index if self._labels is None else self._labels[index]

    def check(self, shape: Sequence[int | None]) -> None:
        """``ConfigError`` for a first output of this shape: not N×C, too few classes, another number than of labels."""
        name = type(self).__name__
        if self.takes_rows and (len(shape) < 2 or 0 in shape[1:]):
            raise ConfigError(f"{name} takes an output NxC, got {shown_dims(shape)}")
        if self.takes_planes and len(shape) > 2:
            if self._labels is not None:
                raise ConfigError(f"{name} of an output NxCx… gives class indices: leave 'labels' out")
            return
        if self.least_classes and len(shape) != 2:
            raise ConfigError(f"{name} takes an output NxC, got {shown_dims(shape)}")
        classes = shape[1] if len(shape) == 2 else None
        if classes is not None and classes < self.least_classes:
            raise ConfigError(f"{name} of one class is always that class; Sigmoid gives its score")
        if self._labels is not None and classes not in (None, len(self._labels)):
            lines = f"{self._path} has {counted(len(self._labels), 'line')}"
            raise ConfigError(f"labels: {lines}, the model has {counted(classes, 'class')}")

    def named(self, outputs: Sequence[TensorSpec]) -> Sequence[TensorSpec]:
        """The outputs, the first with the labels."""
        return [*[replace(output, labels=tuple(self._labels or ())) for output in outputs[:1]], *outputs[1:]]


class Cpu(OfClasses):
    """Outputs as CPU tensors 1×…, with ``max = 1`` of any shape; several outputs as a list."""

    takes_rows = False
    least_classes = 0

    def init(self, config: Mapping[str, Any]) -> None:
        super().init(config)
        self._of_items = layout_of(config["max"], needs_rows=False).of_items

    def forward(self, outputs: list[Any]) -> list[Any]:
        return self._of_items([output if isinstance(output, np.ndarray) else output.cpu() for output in outputs])

    def on_device(self, outputs: list[Any]) -> list[Any]:
        return outputs

    def on_host(self, tensors: list[Any]) -> list[Any]:
        return self._of_items([tensor.clone() for tensor in tensors])

    def gives(self, outputs: Sequence[TensorSpec]) -> Sequence[TensorSpec]:
        return self.named(outputs)


class SoftmaxCpu(OfClasses):
    """Softmax of the first output over its classes: a CPU tensor 1×C of probabilities, float32."""

    least_classes = 0

    def forward(self, outputs: list[Any]) -> list[Any]:
        return self.rows(self.on_device(outputs)[0], "scores")

    def on_device(self, outputs: list[Any]) -> list[Any]:
        self.check(outputs[0].shape)
        return [_softmax(outputs[0])]

    def on_host(self, tensors: list[Any]) -> list[Any]:
        return self.rows(tensors[0].clone(), "scores")

    def gives(self, outputs: Sequence[TensorSpec]) -> Sequence[TensorSpec]:
        return [replace(output, dtype="float32") for output in self.named(outputs[:1])]


class SoftmaxMax(OfClasses):
    """``(label, score)``: the most probable class of the first output, N×C, and its softmax probability."""

    def on_device(self, outputs: list[Any]) -> list[Any]:
        self.check(outputs[0].shape)
        return [_best(_softmax(outputs[0]), 1)]

    def on_host(self, tensors: list[Any]) -> list[Any]:
        best = tensors[0].tolist()
        return [
            (self.label(int(index)), score) if math.isfinite(score) else self.origin.not_finite("scores")
            for (score,), (index,) in best
        ]

    def gives(self, outputs: Sequence[TensorSpec]) -> Sequence[TensorSpec]:
        return LABEL_AND_SCORE


class ArgMax(OfClasses):
    """The label of the largest value; beside ``result``, ``score`` is that value and ``class`` the index.

    Of an output N×C×…, a mask say, the class index at each place: a CPU tensor 1×…, ``uint8`` for up to 256 classes,
    else ``int32``. Integers N×H×W or N×1×H×W are class indices already. Of N×C×H×W and N×H×W, with ``original_size`` at
    the pixels of the original image, and with a ``palette`` a Mat H×W×3 in these colours, ``color`` ``rgb``.
    """

    takes_planes = True
    takes_items = True
    reads: ClassVar[Collection[str]] = original.KEYS

    palette = Param(to_strings, (), doc="colours of the classes of a map, #rrggbb each, or voc: a picture")
    original_size = Param(to_bool, False, doc="whether a map has the size of the original image")

    def init(self, config: Mapping[str, Any]) -> None:
        super().init(config)
        self._colours = read_palette(self.palette) if self.palette else None

    def check(self, shape: Sequence[int | None]) -> None:
        super().check(shape)
        if not (self.palette or self.original_size):
            return
        if len(shape) not in (3, 4):
            raise ConfigError(f"{_FOR_MAPS}, got {shown_dims(shape)}")
        if self._colours is not None and len(shape) == 4 and (shape[1] or 0) > len(self._colours):
            raise ConfigError(f"palette has {counted(len(self._colours), 'colour')}, the model {shape[1]} classes")

    def fit(self, outputs: Sequence[TensorSpec]) -> None:
        super().fit(outputs)
        if not ((self.palette or self.original_size) and outputs):
            return
        if len(outputs[0].dims) == 3 and not _holds_classes(outputs[0].dims, outputs[0].dtype):
            raise ConfigError(f"{_FOR_MAPS}, got {outputs[0]}")

    def forward(self, outputs: list[Any], items: Sequence[Data] = ()) -> list[Any]:  # type: ignore[override]
        return self.on_host(self.on_device(outputs), items)

    def on_device(self, outputs: list[Any]) -> list[Any]:
        self.check(outputs[0].shape)
        if _holds_classes(outputs[0].shape, str(outputs[0].dtype).removeprefix("torch.")):
            return _given_classes(outputs[0])
        return _largest(outputs[0], _floats)

    def on_host(self, tensors: list[Any], items: Sequence[Data] = ()) -> list[Any]:
        if not (self.palette or self.original_size):
            return _results_of_largest(self, tensors)
        classes, have_nan = map(to_numpy, tensors)
        results: list[Any] = []
        for own, is_wrong, item in zip(classes, have_nan, items, strict=True):
            try:
                results.append(self.origin.not_finite("scores") if is_wrong else self._map(own, item))
            except (InvalidRequest, BackendError) as error:
                results.append(error)
        return results

    def _map(self, classes: np.ndarray, item: Data) -> Any:
        """The result for a map h×w of class indices. ``BackendError`` for one that the palette lacks."""
        if self._colours is not None:
            for index in (int(classes.max(initial=0)), int(classes.min(initial=0))):
                if not 0 <= index < len(self._colours):
                    colours = counted(len(self._colours), "colour")
                    raise BackendError(f"the model's output has class {index}, palette has {colours}")
        if self.original_size:
            size = input_size(item[TASK_DATA_KEY])
            classes = on_original(classes, size, self.origin.way_back(item, size))
        if self._colours is not None:
            return Written({TASK_RESULT_KEY: self._colours[classes], TASK_COLOR_KEY: "rgb"})
        import torch

        return torch.from_numpy(classes[None].copy())

    def gives(self, outputs: Sequence[TensorSpec]) -> Sequence[TensorSpec]:
        specs = _specs_of_largest(outputs, self._labels is not None)
        if outputs and _holds_classes(outputs[0].dims, outputs[0].dtype):
            dims = outputs[0].dims
            specs = [TensorSpec(TASK_RESULT_KEY, (dims[0], *dims[-2:]), _dtype_of_given(outputs[0].dtype))]
        if not (self.palette or self.original_size) or not specs:
            return specs
        sides = (None, None) if self.original_size else specs[0].dims[1:]
        if self._colours is None:
            return [replace(specs[0], dims=(specs[0].dims[0], *sides))]
        return [TensorSpec(TASK_RESULT_KEY, (*sides, 3), "uint8")]


class SoftmaxArgMax(OfClasses):
    """The label of the most probable class; beside ``result``, ``score`` is its probability and ``class`` the index."""

    takes_planes = True

    def on_device(self, outputs: list[Any]) -> list[Any]:
        self.check(outputs[0].shape)
        return _largest(outputs[0], _softmax)

    def on_host(self, tensors: list[Any]) -> list[Any]:
        return _results_of_largest(self, tensors)

    def gives(self, outputs: Sequence[TensorSpec]) -> Sequence[TensorSpec]:
        return _specs_of_largest(outputs, self._labels is not None)


def _largest(output: Any, scores: Callable[[Any], Any]) -> list[Any]:
    """Of N×C, the largest score and its index; of N×C×…, what ``_classes`` gives."""
    return _classes(output) if output.ndim > 2 else [_best(scores(output), 1)]


_FOR_MAPS = "palette and original_size are for maps, of an output NxCxHxW, or NxHxW of integers"


def _holds_classes(dims: Sequence[int | None], dtype: str) -> bool:
    """Whether an output of this shape and type holds class indices, not scores: integers N×H×W or N×1×H×W."""
    return dtype.startswith(("int", "uint", "bool")) and (len(dims) == 3 or (len(dims) == 4 and dims[1] == 1))


def _given_classes(output: Any) -> list[Any]:
    """Class indices N×H×W, and for each item that it has no NaN, as of ``_classes``."""
    import torch

    classes = output[:, 0] if output.ndim == 4 else output
    dtype = _dtype_of_given(str(output.dtype).removeprefix("torch."))
    return [classes.to(getattr(torch, dtype)), torch.zeros(len(output), dtype=torch.bool, device=output.device)]


def _dtype_of_given(dtype: str) -> str:
    return "uint8" if dtype in ("uint8", "bool") else "int32"


def _specs_of_largest(outputs: Sequence[TensorSpec], has_labels: bool) -> Sequence[TensorSpec]:
    """The result for a first output N×C, or N×C×…; empty if its number of classes is unknown."""
    dims = outputs[0].dims if outputs else ()
    if len(dims) == 2:
        return [TensorSpec(TASK_RESULT_KEY, dims[:1], BYTES if has_labels else "int64")]
    if len(dims) < 2 or dims[1] is None:
        return ()
    return [TensorSpec(TASK_RESULT_KEY, (dims[0], *dims[2:]), _dtype_of_classes(dims[1]))]


def _results_of_largest(of: OfClasses, largest: list[Any]) -> list[Any]:
    """The results of the postprocessor ``of`` for what ``_largest`` gives."""
    if len(largest) == 2:
        classes, have_nan = largest
        return of.without_nan(ROWS.of_items([classes.clone()]), have_nan.tolist())
    best = [(int(index), score) for (score,), (index,) in largest[0].tolist()]
    results = [Written({"result": of.label(index), "score": score, "class": index}) for index, score in best]
    return of.without_nan(results, [not math.isfinite(score) for _, score in best])


class TopK(OfClasses):
    """The ``k`` most probable classes, or all where there are fewer: a list of ``(label, probability)``, best first."""

    uses: ClassVar[Collection[str]] = ("labels", "k")

    def init(self, config: Mapping[str, Any]) -> None:
        super().init(config)
        self._count = int(config.get("k", 5))

    def on_device(self, outputs: list[Any]) -> list[Any]:
        self.check(outputs[0].shape)
        return [_best(_softmax(outputs[0]), self._count)]

    def on_host(self, tensors: list[Any]) -> list[Any]:
        rows = tensors[0].tolist()
        results = [[(self.label(int(index)), score) for score, index in zip(*row, strict=True)] for row in rows]
        return self.without_nan(results, [not math.isfinite(scores[0]) for scores, _ in rows])

    def gives(self, outputs: Sequence[TensorSpec]) -> Sequence[TensorSpec]:
        return RANKING


class Sigmoid(OfClasses):
    """The classes whose sigmoid is ``threshold`` or more: a list of ``(label, score)``, best first, empty for none."""

    uses: ClassVar[Collection[str]] = ("labels", "threshold")
    least_classes = 1

    def init(self, config: Mapping[str, Any]) -> None:
        super().init(config)
        self._threshold = float(config.get("threshold", 0.5))

    def on_device(self, outputs: list[Any]) -> list[Any]:
        self.check(outputs[0].shape)
        return [_floats(outputs[0])]

    def on_host(self, tensors: list[Any]) -> list[Any]:
        scores = 0.5 * (1 + np.tanh(0.5 * tensors[0].numpy()))  # the sigmoid; exp would overflow
        results = []
        for row in scores:
            best = [index for index in np.argsort(-row, kind="stable").tolist() if row[index] >= self._threshold]
            results.append([(self.label(index), float(row[index])) for index in best])
        return self.without_nan(results, has_nan(scores))

    def gives(self, outputs: Sequence[TensorSpec]) -> Sequence[TensorSpec]:
        return RANKING
