"""How detectors lay out what they found: one class for each layout, which finds its outputs by their shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from torchpipe_py.backends.signature import TensorSpec, shown_dims
from torchpipe_py.errors import ConfigError

MOST_ROWS = 1000
"""Rows of an end-to-end detector at most; a YOLO detector without NMS has thousands."""

Size = tuple[int, int]


class Objects(NamedTuple):
    """Some candidates: ``boxes`` K×4 float32, [left, top, right, bottom] in pixels of the input; ``classes`` K.

    ``extra`` K×E is what follows in their rows.
    """

    boxes: np.ndarray
    classes: np.ndarray
    extra: np.ndarray


class Candidates(NamedTuple):
    """All boxes of an item: ``scores`` float32 K; ``at(indices)`` computes the rest for some of them."""

    scores: np.ndarray
    at: Callable[[np.ndarray], Objects]


class Model(NamedTuple):
    """Facts that a layout depends on: ``outputs``; ``names`` of labels; the number of ``extra`` values after classes.

    ``options`` are keys of the node, ``metadata`` those of an ONNX file.
    """

    outputs: Sequence[TensorSpec]
    names: Sequence[str]
    extra: int
    options: Mapping[str, Any]
    metadata: Mapping[str, str] = {}


class Layout:
    """Reads the outputs of a model. ``ConfigError`` for those that are not laid out so."""

    takes: ClassVar[str]
    """Its outputs, for messages."""
    needs_nms: ClassVar[bool] = True
    classes: int | None = None
    """The number of classes, as far as the outputs tell."""

    def __init__(self, model: Model) -> None:
        raise NotImplementedError(type(self).__name__)

    boxes_output = 0
    """The index of the output that tells the rank of the others."""
    rank = 2
    """The dimensions of that output for one item."""

    def on_device(self, outputs: list[Any]) -> list[Any]:
        """The part of outputs on a GPU that is copied to the host."""
        return [outputs[index].float() if outputs[index].is_floating_point() else outputs[index] for index in self.used]

    used: Sequence[int] = (0,)
    """The indices of its outputs, in the order in which it reads them."""

    def read(self, arrays: Sequence[np.ndarray], threshold: float, size: Size) -> Candidates:
        """The candidates of one item, whose input has ``size``; those below ``threshold`` may be missing."""
        raise NotImplementedError(type(self).__name__)

    def read_reduced(self, arrays: Sequence[np.ndarray], threshold: float, size: Size) -> Candidates:
        """The same of what ``on_device`` gave."""
        return self.read(arrays, threshold, size)


def corners(centred: np.ndarray) -> np.ndarray:
    """Boxes K×4 of centre, width and height as [left, top, right, bottom]."""
    half = centred[:, 2:] / 2
    return np.concatenate([centred[:, :2] - half, centred[:, :2] + half], 1)


def _wrong(layout: type[Layout], outputs: Sequence[TensorSpec]) -> ConfigError:
    return ConfigError(f"takes {layout.takes}, and the model has {', '.join(map(_shown, outputs)) or 'no output'}")


def _shown(output: TensorSpec) -> str:
    return f"{output.name} {shown_dims(output.dims)}".strip()


class Yolo(Layout):
    """Channels first, N×(4+C+E)×A: centre, width, height, and a score for each class; YOLOv8, v9, v11."""

    takes = "an output Nx(4+C)xA, rows of centre, width, height and a score for each class"

    def __init__(self, model: Model) -> None:
        outputs, extra = model.outputs, model.extra
        dims = outputs[0].dims[-2:] if outputs else ()
        if len(dims) < 2 or dims[0] is None or dims[0] - 4 - extra < 1 or (dims[1] is not None and dims[1] <= dims[0]):
            raise _wrong(type(self), outputs)
        self.classes, self._end = dims[0] - 4 - extra, dims[0] - extra

    def on_device(self, outputs: list[Any]) -> list[Any]:
        import torch

        output, *others = super().on_device(outputs)
        if output.ndim == 2:  # a model without a batch
            output, *others = [each[None] for each in (output, *others)]
        scores, classes = output[:, 4 : self._end].max(1, keepdim=True)
        reduced = torch.cat([output[:, :4], scores, classes.float(), output[:, self._end :]], 1)
        return [reduced, *others]

    def read(self, arrays: Sequence[np.ndarray], threshold: float, size: Size) -> Candidates:
        output, end = arrays[0], self._end
        best = output[4:end].max(0)

        def at(indices: np.ndarray) -> Objects:
            boxes = corners(output[:4].take(indices, 1).T)
            if 3 * len(indices) < len(best):
                classes = _first_equal(output[4:end].take(indices, 1), best[indices])
            else:
                classes = _first_equal(output[4:end], best)[indices]
            return Objects(boxes, classes, output[end:].take(indices, 1).T)

        return Candidates(best, at)

    def read_reduced(self, arrays: Sequence[np.ndarray], threshold: float, size: Size) -> Candidates:
        output = arrays[0]

        def at(indices: np.ndarray) -> Objects:
            rows = output.take(indices, 1)
            return Objects(corners(rows[:4].T), rows[5].astype(np.int64), rows[6:].T)

        return Candidates(output[4], at)


class YoloRows(Yolo):
    """The same in rows, N×A×(4+C+E), as some converters give it. The labels tell it from YOLOv5's rows."""

    takes = "an output NxAx(4+C), the same in rows, with labels for its C classes"

    def __init__(self, model: Model) -> None:
        dims = model.outputs[0].dims[-2:] if model.outputs else ()
        if len(dims) < 2 or dims[1] is None or dims[1] - 4 - model.extra < 1:
            raise _wrong(type(self), model.outputs)
        if dims[0] is not None and dims[0] <= dims[1]:
            raise _wrong(type(self), model.outputs)
        if not model.names:
            raise ConfigError("takes rows with labels only, which tell YOLOv8's from YOLOv5's (Yolo5Boxes): set labels")
        self.classes, self._end = dims[1] - 4 - model.extra, dims[1] - model.extra

    def on_device(self, outputs: list[Any]) -> list[Any]:
        return super().on_device([output.mT if index == 0 else output for index, output in enumerate(outputs)])

    def read(self, arrays: Sequence[np.ndarray], threshold: float, size: Size) -> Candidates:
        return super().read([arrays[0].T, *arrays[1:]], threshold, size)


def _first_equal(planes: np.ndarray, best: np.ndarray) -> np.ndarray:
    """``planes.argmax(0)`` where ``best`` is the maximum, in a third of the time."""
    count = len(planes)
    ranks = np.arange(count, 0, -1).astype(np.min_scalar_type(count))  # of equal ones, the first has the highest
    highest = ((planes == best).view(np.uint8) * ranks[:, None]).max(0)
    classes: np.ndarray = count - highest.astype(np.int64)
    return classes


class Yolo5(Layout):
    """Rows, N×A×(5+C+E): centre, width, height, objectness, and a score for each class; YOLOv5, v7."""

    takes = "an output NxAx(5+C), rows of centre, width, height, objectness and a score for each class"

    def __init__(self, model: Model) -> None:
        outputs, extra = model.outputs, model.extra
        dims = outputs[0].dims[-2:] if outputs else ()
        if len(dims) < 2 or dims[1] is None or dims[1] - 5 - extra < 1 or (dims[0] is not None and dims[0] <= dims[1]):
            raise _wrong(type(self), outputs)
        self.classes, self._end = dims[1] - 5 - extra, dims[1] - extra

    def read(self, arrays: Sequence[np.ndarray], threshold: float, size: Size) -> Candidates:
        output, end = arrays[0], self._end
        objectness = output[:, 4]
        likely = np.flatnonzero(~(objectness <= threshold))  # NaN, too
        scores = output[likely, 5:end] * objectness[likely, None]

        def at(indices: np.ndarray) -> Objects:
            rows = output[likely[indices]]
            return Objects(corners(rows[:, :4]), scores[indices].argmax(1), rows[:, end:])

        return Candidates(scores.max(1), at)


class EndToEnd(Layout):
    """Rows, N×K×(6+E): left, top, right, bottom, score, class, without overlaps; YOLOv10, v26."""

    takes = "an output NxKx6, rows of left, top, right, bottom, score, class"
    needs_nms = False

    def __init__(self, model: Model) -> None:
        outputs, extra = model.outputs, model.extra
        dims = outputs[0].dims[-2:] if outputs else ()
        if len(dims) < 2 or dims[1] != 6 + extra or (dims[0] or 0) > MOST_ROWS:
            raise _wrong(type(self), outputs)
        if is_rtdetr(model.metadata):
            raise ConfigError(f"takes {self.takes}, and the metadata says that this is RT-DETR: DetrBoxes reads it")

    def read(self, arrays: Sequence[np.ndarray], threshold: float, size: Size) -> Candidates:
        output = arrays[0]

        def at(indices: np.ndarray) -> Objects:
            rows = output[indices]
            return Objects(rows[:, :4], rows[:, 5].astype(np.int64), rows[:, 6:])

        return Candidates(output[:, 4], at)


class Detr(Layout):
    """Boxes N×Q×4, centre, width and height of 0..1, and logits N×Q×C; DETR, RT-DETR.

    With ``activation`` ``softmax`` the last class is "no object"; with ``sigmoid`` a query may have several classes.
    ``auto``: as many logits as labels are ``sigmoid``, one more is ``softmax``.
    """

    takes = "two outputs: boxes NxQx4 of centre, width and height, and logits NxQxC"
    needs_nms = False

    def __init__(self, model: Model) -> None:
        outputs = model.outputs
        pairs = [index for index, output in enumerate(outputs) if len(output.dims) >= 2]
        boxes = [index for index in pairs if outputs[index].dims[-1] == 4]
        named = [index for index in boxes if "box" in outputs[index].name.lower()]
        boxes = named if len(boxes) > 1 and len(named) == 1 else boxes
        logits = [index for index in pairs if index not in boxes]
        if len(boxes) != 1 or len(logits) != 1 or model.extra:
            raise _wrong(type(self), outputs)
        self.used, self.boxes_output = (boxes[0], logits[0]), boxes[0]
        count, activation = outputs[logits[0]].dims[-1], model.options.get("activation", "auto")
        rows = outputs[boxes[0]].dims[-2], outputs[logits[0]].dims[-2]
        if count is None or (None not in rows and rows[0] != rows[1]):
            raise _wrong(type(self), outputs)
        if activation == "auto":
            activation = _activation(count, len(model.names))
        self._is_softmax = activation == "softmax"
        self.classes = count - self._is_softmax

    def read(self, arrays: Sequence[np.ndarray], threshold: float, size: Size) -> Candidates:
        centred, logits = arrays
        scale = np.array([*size[::-1]] * 2, np.float32)
        nothing = np.empty((0, 0), np.float32)
        if self._is_softmax:
            shifted = np.exp(logits - logits.max(1, keepdims=True))
            scores = (shifted / shifted.sum(1, keepdims=True))[:, :-1]
            return Candidates(
                scores.max(1), lambda at: Objects(corners(centred[at]) * scale, scores[at].argmax(1), nothing)
            )
        flat = 0.5 * (1 + np.tanh(0.5 * logits)).ravel()  # the sigmoid; exp would overflow
        count = logits.shape[1]
        return Candidates(flat, lambda at: Objects(corners(centred[at // count]) * scale, at % count, nothing))


class DetrRows(Layout):
    """Rows, N×Q×6: centre, width, height of 0..1, score, class; or N×Q×(4+C): a score for each class.

    RT-DETR as Ultralytics exports it, from version 8.4 on and before.
    """

    takes = "an output NxQx6, rows of centre, width and height of 0..1, score, class, or NxQx(4+C) with C scores"
    needs_nms = False

    def __init__(self, model: Model) -> None:
        outputs = model.outputs
        dims = outputs[0].dims[-2:] if len(outputs) == 1 else ()
        if len(dims) < 2 or (dims[1] or 0) < 5 or (dims[0] or 0) > MOST_ROWS or model.extra:
            raise _wrong(type(self), outputs)
        if dims[1] == 6 and "task" in model.metadata and not is_rtdetr(model.metadata):
            raise ConfigError(f"takes {self.takes}, and the metadata names another model: EndToEndBoxes reads it")
        # Six numbers may also be scores of two classes, in a file that names no head.
        self._has_classes = dims[1] == 6 and (len(model.names) != 2 or "head" in model.metadata)
        self.classes = None if self._has_classes else (dims[1] or 0) - 4

    def read(self, arrays: Sequence[np.ndarray], threshold: float, size: Size) -> Candidates:
        rows, nothing = arrays[0], np.empty((0, 0), np.float32)
        scale = np.array([*size[::-1]] * 2, np.float32)

        def at(indices: np.ndarray) -> Objects:
            own = rows[indices]
            classes = own[:, 5].astype(np.int64) if self._has_classes else own[:, 4:].argmax(1)
            return Objects(corners(own[:, :4]) * scale, classes, nothing)

        return Candidates(np.ascontiguousarray(rows[:, 4]) if self._has_classes else rows[:, 4:].max(1), at)


def is_rtdetr(metadata: Mapping[str, str]) -> bool:
    """Whether Ultralytics' metadata names RT-DETR, whose boxes are parts of the sides."""
    return metadata.get("head") == "RTDETRDecoder" or "rtdetr" in metadata.get("description", "").lower()


def _activation(count: int, labels: int) -> str:
    if count == labels + 1 or (not labels and count == 92):  # DETR's 91 numbers of COCO, and "no object"
        return "softmax"
    if count == labels or (not labels and count in (80, 91)):
        return "sigmoid"
    known = f"there are {labels} labels" if labels else "there are no labels"
    raise ConfigError(f'reads {count} logits for each box, and {known}: set activation = "softmax" or "sigmoid"')


class Listed(Layout):
    """Boxes N×K×4, scores N×K and labels N×K, in any order; torchvision's detectors, SSD with NMS inside.

    A fourth output, N or N×1 integers, is the number of rows that count. With ``max = 1`` without N. Boxes are
    [left, top, right, bottom] in pixels of the input, or parts of its sides if ``normalised``.
    """

    takes = "three outputs: boxes NxKx4, scores NxK and labels NxK, without N where max = 1"
    needs_nms = False

    def __init__(self, model: Model) -> None:
        outputs = model.outputs
        boxes = [index for index, output in enumerate(outputs) if output.dims[-1:] == (4,) and len(output.dims) > 1]
        others = [index for index in range(len(outputs)) if index not in boxes]
        if len(boxes) != 1 or len(others) not in (2, 3) or model.extra:
            raise _wrong(type(self), outputs)
        self.boxes_output, self._is_normalised = boxes[0], bool(model.options.get("normalised", False))
        rank = len(outputs[boxes[0]].dims) - 1
        rows = [index for index in others if len(outputs[index].dims) == rank]
        if len(rows) == 3:
            rows = [index for index in rows if outputs[index].dims[-1:] != (1,)]
        scores = _one([index for index in rows if _is_named(outputs[index], "score", "conf", "prob")])
        labels = _one([index for index in rows if _is_named(outputs[index], "label", "class", "cls")])
        if scores is None:
            scores = _one([index for index in rows if outputs[index].dtype.startswith(("float", "bfloat"))])
        if labels is None:
            labels = _one([index for index in rows if outputs[index].dtype.startswith(("int", "uint"))])
        if len(rows) == 2 and (scores is None) != (labels is None):
            scores, labels = (rows[rows[0] == (labels if scores is None else scores)] if one is None else one
                              for one in (scores, labels))  # fmt: skip
        if scores is None or labels is None or scores == labels:
            raise _wrong(type(self), outputs)
        counts = [index for index in others if index not in (scores, labels)]
        self.used = (boxes[0], scores, labels, *counts)

    def read(self, arrays: Sequence[np.ndarray], threshold: float, size: Size) -> Candidates:
        boxes, scores, labels, *counts = arrays
        scale = np.array([*size[::-1]] * 2 if self._is_normalised else [1] * 4, np.float32)
        scores = scores[: int(counts[0].ravel()[0])] if counts else scores
        nothing = np.empty((0, 0), np.float32)
        return Candidates(scores, lambda at: Objects(boxes[at] * scale, labels[at].astype(np.int64), nothing))


def _is_named(output: TensorSpec, *words: str) -> bool:
    return any(word in output.name.lower() for word in words)


def _one(indices: list[int]) -> int | None:
    return indices[0] if len(indices) == 1 else None
