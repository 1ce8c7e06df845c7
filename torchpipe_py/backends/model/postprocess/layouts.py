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

    ``options`` are keys of the node, ``metadata`` those of an ONNX file. ``has_rows``: batches may have several items,
    so that each output has a row for each.
    """

    outputs: Sequence[TensorSpec]
    names: Sequence[str]
    extra: int
    options: Mapping[str, Any]
    metadata: Mapping[str, str] = {}
    has_rows: bool = False


class OtherShapeError(ConfigError):
    """The outputs of a model are not laid out so; ``takes`` is what the layout reads, perhaps with a reason."""

    def __init__(self, takes: str, outputs: Sequence[TensorSpec]) -> None:
        super().__init__(f"takes {takes}; the model has {shown_outputs(outputs)}")
        self.takes = takes


class OpenShapeError(ConfigError):
    """A size that a layout depends on is not declared, and the others fit: the first batch has it."""


def shown_outputs(outputs: Sequence[TensorSpec]) -> str:
    """Names and shapes for messages."""
    return ", ".join(f"{output.name} {shown_dims(output.dims)}".strip() for output in outputs) or "no output"


Sizes = tuple[int | str, ...]
"""The shape of an output for one item: numbers, and letters for any size, the same wherever a letter is.

Those of small letters are 1 at least.
"""
COUNT: Sizes = ("at least one number",)


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
    """The index of the output with the boxes."""

    def on_device(self, outputs: list[Any]) -> list[Any]:
        """The part of outputs on a GPU that is copied to the host."""
        return [outputs[index].float() if outputs[index].is_floating_point() else outputs[index] for index in self.used]

    used: Sequence[int] = (0,)
    """The indices of its outputs, in the order in which it reads them."""
    sizes: Sequence[Sizes]
    """The shape of each of these, the boxes first."""

    def fits(self, outputs: Sequence[Sequence[int | None]]) -> bool:
        """Whether it can read a model's outputs of these shapes, with or without a batch, as far as they are known."""
        if max(self.used) >= len(outputs):
            return False
        shapes = [outputs[index] for index in self.used]
        start, known = len(shapes[0]) - len(self.sizes[0]), dict[str, int]()
        if start not in (0, 1):
            return False
        for sizes, shape in zip(self.sizes, shapes, strict=True):
            if sizes is COUNT:
                if 0 in shape:
                    return False
                continue
            if len(shape) != start + len(sizes):
                return False
            for wanted, size in zip(sizes, shape[start:], strict=True):
                if size is None:
                    continue
                if size != (wanted if isinstance(wanted, int) else known.setdefault(wanted, size)):
                    return False
                if size == 0 and str(wanted).islower():
                    return False
        return True

    def shown_sizes(self) -> str:
        """The shapes that it reads, for messages."""
        return ", ".join("x".join(map(str, ("N", *each))) for each in self.sizes if each is not COUNT)

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
    return OtherShapeError(layout.takes, outputs)


def _open(outputs: Sequence[TensorSpec]) -> ConfigError:
    return OpenShapeError(f"cannot tell from {shown_outputs(outputs)}")


def _sizes(layout: type[Layout], model: Model) -> tuple[int | None, int | None]:
    """Both sizes of the first output for one item. ``OtherShapeError`` for one of another rank."""
    dims = model.outputs[0].dims if model.outputs else ()
    if len(dims) != 3 and (len(dims) != 2 or model.has_rows):
        raise _wrong(layout, model.outputs)
    return dims[-2], dims[-1]


def _check_rows(layout: type[Layout], model: Model, rows: int | None, values: int | None, least: int) -> int:
    """The ``values`` of each of many ``rows``, which are ``least`` at least, and fewer than the rows."""
    if (values is not None and values < least) or (rows is not None and rows <= (values or least)):
        raise _wrong(layout, model.outputs)
    if values is None:
        raise _open(model.outputs)
    return values


class Yolo(Layout):
    """Channels first, N×(4+C+E)×A: centre, width, height, and a score for each class; YOLOv8, v9, v11."""

    takes = "an output Nx(4+C)xA, rows of centre, width, height and a score for each class"

    def __init__(self, model: Model) -> None:
        values, boxes = _sizes(type(self), model)
        values = _check_rows(type(self), model, boxes, values, 5 + model.extra)
        self.classes, self._end, self.sizes = values - 4 - model.extra, values - model.extra, ((values, "A"),)

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
        boxes, values = _sizes(type(self), model)
        values = _check_rows(type(self), model, boxes, values, 5 + model.extra)
        if not model.names:
            takes = "rows NxAx(4+C) with labels only, which tell YOLOv8's from YOLOv5's (Yolo5Boxes): set labels"
            raise OtherShapeError(takes, model.outputs)
        self.classes, self._end, self.sizes = values - 4 - model.extra, values - model.extra, (("A", values),)

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
        boxes, values = _sizes(type(self), model)
        values = _check_rows(type(self), model, boxes, values, 6 + model.extra)
        self.classes, self._end, self.sizes = values - 5 - model.extra, values - model.extra, (("A", values),)

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
        rows, values = _sizes(type(self), model)
        if values not in (None, 6 + model.extra) or (rows or 0) > MOST_ROWS:
            raise _wrong(type(self), model.outputs)
        if values is None:
            raise _open(model.outputs)
        self.sizes = (("K", values),)
        if is_rtdetr(model.metadata):
            takes = f"{self.takes}, and the metadata says that this is RT-DETR: DetrBoxes reads it"
            raise OtherShapeError(takes, model.outputs)

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
        if not boxes and len(outputs) == 2 and not model.extra and any(_may_be_boxes(each, model) for each in outputs):
            raise _open(outputs)
        named = [index for index in boxes if "box" in outputs[index].name.lower()]
        boxes = named if len(boxes) > 1 and len(named) == 1 else boxes
        logits = [index for index in pairs if index not in boxes]
        if len(boxes) != 1 or len(logits) != 1 or model.extra:
            raise _wrong(type(self), outputs)
        self.used, self.boxes_output = (boxes[0], logits[0]), boxes[0]
        count, activation = outputs[logits[0]].dims[-1], model.options.get("activation", "auto")
        self.sizes = (("Q", 4), ("Q", "C" if count is None else count))
        has_rows = model.has_rows and len(outputs[boxes[0]].dims) < 3
        if has_rows or count == 0 or not self.fits([output.dims for output in outputs]):
            raise _wrong(type(self), outputs)
        if count is None:
            raise _open(outputs)
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
        if len(model.outputs) != 1 or model.extra:
            raise _wrong(type(self), model.outputs)
        rows, values = _sizes(type(self), model)
        if (values is not None and values < 5) or (rows or 0) > MOST_ROWS:
            raise _wrong(type(self), model.outputs)
        if values is None:
            raise _open(model.outputs)
        self.sizes = (("Q", values),)
        if values == 6 and "task" in model.metadata and not is_rtdetr(model.metadata):
            takes = f"{self.takes}, and the metadata names another model: EndToEndBoxes reads it"
            raise OtherShapeError(takes, model.outputs)
        # Six numbers may also be scores of two classes, in a file that names no head.
        self._has_classes = values == 6 and (len(model.names) != 2 or "head" in model.metadata)
        self.classes = None if self._has_classes else values - 4

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
        if not boxes and len(outputs) in (3, 4) and any(_may_be_boxes(each, model) for each in outputs):
            raise _open(outputs)
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
        self.sizes = (("K", 4), ("K",), ("K",), *[COUNT] * len(counts))
        if (model.has_rows and rank < 2) or not self.fits([output.dims for output in outputs]):
            raise _wrong(type(self), outputs)

    def read(self, arrays: Sequence[np.ndarray], threshold: float, size: Size) -> Candidates:
        boxes, scores, labels, *counts = arrays
        scale = np.array([*size[::-1]] * 2 if self._is_normalised else [1] * 4, np.float32)
        scores = scores[: int(counts[0].ravel()[0])] if counts else scores
        nothing = np.empty((0, 0), np.float32)
        return Candidates(scores, lambda at: Objects(boxes[at] * scale, labels[at].astype(np.int64), nothing))


def _may_be_boxes(output: TensorSpec, model: Model) -> bool:
    """Whether an output whose last size is open may hold boxes N×K×4."""
    return len(output.dims) in ((3,) if model.has_rows else (2, 3)) and output.dims[-1] is None


def _is_named(output: TensorSpec, *words: str) -> bool:
    return any(word in output.name.lower() for word in words)


def _one(indices: list[int]) -> int | None:
    return indices[0] if len(indices) == 1 else None
