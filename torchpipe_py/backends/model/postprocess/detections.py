"""Detections from a model's outputs: one postprocessor for each layout, with non-maximum suppression where it needs it.

Defaults and meaning of the keys are those of Ultralytics.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from torchpipe_py.backends.base import Data
from torchpipe_py.backends.image import original
from torchpipe_py.backends.image.original import WayBack
from torchpipe_py.backends.model.inputs import looks_like_mat, to_numpy
from torchpipe_py.backends.model.normalisation import has_channels_last
from torchpipe_py.backends.model.onnx_graph import metadata
from torchpipe_py.backends.model.postprocess.base import Origin, Postprocessor, read_labels
from torchpipe_py.backends.model.postprocess.layouts import (
    MOST_ROWS,
    Candidates,
    Detr,
    DetrRows,
    EndToEnd,
    Layout,
    Listed,
    Model,
    Objects,
    OpenShapeError,
    OtherShapeError,
    Size,
    Yolo,
    Yolo5,
    YoloRows,
    is_rtdetr,
    shown_outputs,
)
from torchpipe_py.backends.model.postprocess.nms import NO_BOXES, suppress
from torchpipe_py.backends.model.postprocess.settings import (
    PARAMETERS,
    Bounds,
    Settings,
    class_indices,
    names_of,
)
from torchpipe_py.backends.params import Param
from torchpipe_py.backends.signature import TensorSpec, detection_outputs
from torchpipe_py.errors import BackendError, ConfigError, InvalidRequest, counted
from torchpipe_py.keys import TASK_DATA_KEY, TASK_PARAMETERS_KEY
from torchpipe_py.results import Detections
from torchpipe_py.values import to_bool, to_float, to_int, to_str, to_strings

MOST_CANDIDATES = 30_000
"""Boxes of an image before non-maximum suppression; of more, those with the best scores."""


FIRST_CANDIDATES = 512
"""Of these, those that are looked at first, at least."""


class AmbiguousLayoutError(ConfigError):
    """Several layouts fit the outputs of a model."""


class Detector(Postprocessor):
    """A built-in postprocessor of a detector: ``Detections`` for each item, on its original image, the best first.

    The labels are the lines of ``labels``, or else the ``names`` in the metadata of an ONNX file.
    """

    layouts: ClassVar[Sequence[type[Layout]]] = ()
    """The layouts that it reads; of several, the one that fits the model's outputs."""

    takes_items = True
    uses: ClassVar[Collection[str]] = ("labels", "threshold")
    reads: ClassVar[Collection[str]] = (*original.KEYS, TASK_PARAMETERS_KEY)
    request_parameters: ClassVar[Collection[str]] = PARAMETERS

    threshold = Param(to_float, 0.25, low=0, high=1, doc="the score that a detection must exceed")
    least_threshold = Param(to_float, None, low=0, high=1, doc="the least threshold of a request; default: threshold")
    iou = Param(to_float, 0.7, low=0, high=1, doc="a box is dropped if it overlaps a better one of its class by more")
    max_det = Param(to_int, 300, low=1, high=MOST_CANDIDATES, doc="the most detections in an image")
    classes = Param(to_strings, (), doc="labels or indices of the only classes to answer")
    class_agnostic = Param(to_bool, False, doc="whether boxes of different classes drop each other")

    def init(self, config: Mapping[str, Any]) -> None:
        self.layout: Layout | None = None  # once the outputs are known
        self.origin = Origin.of(config)
        file = config.get("model")
        self.metadata = metadata(file) if file is not None and file.is_onnx else {}
        self.labels_file = config.get("labels") or ""
        self.names = names_of(self.metadata.get("names", ""))
        if self.labels_file:
            self.names = tuple(read_labels(self.labels_file))
        self.options = config
        self.has_rows = config.get("max", 1) > 1
        try:
            classes = class_indices(self.classes, self.names)
        except ValueError as error:
            raise ConfigError(f"classes: {error}") from None
        settings = Settings(self.threshold, self.iou, self.max_det, classes, self.class_agnostic)
        self.bounds = Bounds(settings, self.least_threshold, self.names)

    # -- the layout of a model's outputs ------------------------------------------------------------------------------

    def fit(self, outputs: Sequence[TensorSpec]) -> None:
        if not outputs or not all(output.dims for output in outputs):
            return
        try:
            self._use(outputs)
        except OpenShapeError:
            return  # the first batch has the sizes that the file leaves open, as Ultralytics' dynamic=True does

    def _use(self, outputs: Sequence[TensorSpec]) -> None:
        self.layout = self.find_layout(outputs)
        self.origin = replace(self.origin, output=outputs[self.layout.boxes_output].name)

    def candidates(self, outputs: Sequence[TensorSpec]) -> Sequence[type[Layout]]:
        """The layouts that a model with these outputs may have."""
        return self.layouts

    def find_layout(self, outputs: Sequence[TensorSpec], extra: int = 0) -> Layout:
        """The only one of its layouts that fits; ``ConfigError`` if none does, or several do.

        ``OpenShapeError`` if one may fit once the sizes are known that the outputs leave open.
        """
        fitting: list[Layout] = []
        problems: list[ConfigError] = []
        for cls in self.candidates(outputs):
            try:
                layout = cls(Model(outputs, self.names, extra, self.options, self.metadata, self.has_rows))
                self.check_labels(layout.classes)
            except ConfigError as error:
                problems.append(error)
            else:
                fitting.append(layout)
        if not fitting:
            raise self._misfit(problems, outputs)
        if len(fitting) > 1:
            names = " or ".join(_NAMES[type(layout)] for layout in fitting)
            shapes = ", ".join(map(str, outputs))
            raise AmbiguousLayoutError(
                f"outputs {shapes} can be read in more than one way: name {names} as postprocessor"
            )
        return fitting[0]

    def _misfit(self, problems: Sequence[ConfigError], outputs: Sequence[TensorSpec]) -> ConfigError:
        """Of the problems of each layout, the one to report: of those that fit the shapes, or else all."""
        nearer = [error for error in problems if not isinstance(error, OtherShapeError)]
        name = type(self).__name__
        if is_open := next((error for error in nearer if isinstance(error, OpenShapeError)), None):
            return is_open
        if nearer:
            text = f"{name} {', or '.join(map(str, nearer))}"
            fitting = self._named_otherwise(outputs) if self.names else []
            return ConfigError(f'{text}. postprocessor = "{fitting[0]}" reads as many' if fitting else text)
        takes = ", or ".join(error.takes for error in problems if isinstance(error, OtherShapeError))
        others = f"; {OTHERS}" if name in _NAMES.values() or name == Boxes.__name__ else ""
        return ConfigError(f"{name} takes {takes}; the model has {shown_outputs(outputs)}{others}")

    def _named_otherwise(self, outputs: Sequence[TensorSpec]) -> list[str]:
        """Other postprocessors that read a class for each label from these outputs."""
        found = []
        for cls, name in _NAMES.items():
            try:
                layout = cls(Model(outputs, self.names, 0, self.options, self.metadata, self.has_rows))
            except ConfigError:
                continue
            if layout.classes == len(self.names) and name != type(self).__name__:
                found.append(name)
        return found

    def check_labels(self, classes: int | None) -> None:
        """``ConfigError`` for another number of classes than of labels."""
        if not self.names or classes in (None, len(self.names)):
            return
        source = self.labels_file or "its metadata"
        count = counted(len(self.names), "label")
        raise ConfigError(f"reads {counted(classes or 0, 'class')} from the outputs, and {source} has {count}")

    def gives(self, outputs: Sequence[TensorSpec]) -> Sequence[TensorSpec]:
        return detection_outputs(bool(self.names))

    # -- a batch ------------------------------------------------------------------------------------------------------

    def on_device(self, outputs: list[Any]) -> list[Any]:
        """Compute, where the outputs are, the tensors to copy to the host."""
        return self.layout_of(outputs).on_device(outputs)

    def forward(self, outputs: list[Any], items: Sequence[Data]) -> list[Any]:  # type: ignore[override]
        layout = self.layout_of(outputs)
        return self._detections([outputs[index] for index in layout.used], items, is_reduced=False)

    def on_host(self, tensors: list[Any], items: Sequence[Data]) -> list[Any]:
        """Detections from what ``on_device`` gave."""
        return self._detections(tensors, items, is_reduced=True)

    def layout_of(self, outputs: Sequence[Any]) -> Layout:
        """The layout; found by the shapes of these outputs if the model declares none.

        ``BackendError`` for shapes that it cannot read.
        """
        shapes = [tuple(output.shape) for output in outputs]
        if self.layout is None:
            self._use(
                [
                    TensorSpec(str(index), shape, str(output.dtype).removeprefix("torch."))
                    for index, (shape, output) in enumerate(zip(shapes, outputs, strict=True))
                ]
            )
        assert self.layout is not None
        if not self.layout.fits(shapes):
            raise self.origin.misfit(f"{type(self).__name__} reads {self.layout.shown_sizes()}", shapes)
        return self.layout

    def _detections(self, tensors: Sequence[Any], items: Sequence[Data], is_reduced: bool) -> list[Any]:
        arrays = [array if isinstance(array, np.ndarray) else to_numpy(array) for array in tensors]
        arrays = [array.astype(np.float32, copy=False) if array.dtype.kind == "f" else array for array in arrays]
        has_batch = arrays[0].ndim > 2
        results: list[Any] = []
        for index, item in enumerate(items):
            own = [array[index] for array in arrays] if has_batch else arrays
            try:
                with np.errstate(all="ignore"):  # numbers that are not finite are reported
                    results.append(self.of_item(own, item, is_reduced))
            except (InvalidRequest, BackendError) as error:
                results.append(error)
        return results

    # -- an item ------------------------------------------------------------------------------------------------------

    def of_item(self, arrays: Sequence[np.ndarray], item: Data, is_reduced: bool) -> Detections:
        """The detections of one item; ``InvalidRequest`` for its parameters, ``BackendError`` for its outputs."""
        assert self.layout is not None
        settings = self.bounds.of(item)
        size = input_size(item[TASK_DATA_KEY])
        back = self.origin.way_back(item, size)
        read = self.layout.read_reduced if is_reduced else self.layout.read
        scores, objects = self.choose(read(arrays, settings.threshold, size), settings)
        return self.result(scores, objects, arrays, size, back)

    def choose(self, candidates: Candidates, settings: Settings) -> tuple[np.ndarray, Objects]:
        """The candidates that are detections, the best first: their scores, and the rest of them."""
        assert self.layout is not None
        scores = candidates.scores
        if np.isnan(scores).any():
            raise self.origin.not_finite("scores")
        order = best_first(scores, settings.threshold)[:MOST_CANDIDATES]
        kept, decided, most = NO_BOXES, 0, max(FIRST_CANDIDATES, 2 * settings.max_det)  # these are mostly enough
        while True:
            part = order[:most]
            objects = candidates.at(part)
            if not np.isfinite(objects.boxes).all():
                raise self.origin.not_finite("boxes")
            if settings.classes is not None:
                wanted = np.isin(objects.classes, [*settings.classes])
                part, objects = part[wanted], _rows(objects, wanted)
            if not self.layout.needs_nms:
                kept = np.arange(min(len(part), settings.max_det))
            else:
                classes = np.zeros_like(objects.classes) if settings.class_agnostic else objects.classes
                kept = suppress(objects.boxes, classes, settings.iou, settings.max_det, kept, decided)
                decided = len(part)
            if len(kept) == settings.max_det or most >= len(order):
                break
            most *= 4
        return scores[part[kept]], _rows(objects, kept)

    def result(
        self, scores: np.ndarray, objects: Objects, arrays: Sequence[np.ndarray], size: Size, back: WayBack
    ) -> Detections:
        """The detections on the original image; ``arrays`` are the outputs, ``size`` is that of the model's input."""
        return Detections(self.on_original(objects.boxes, back), scores, objects.classes, self.names)

    def on_original(self, boxes: np.ndarray, back: WayBack) -> np.ndarray:
        """Boxes K×4 in pixels of the original image, clipped to it."""
        return back.points(boxes.reshape(-1, 2, 2).astype(np.float64)).reshape(-1, 4)


def best_first(scores: np.ndarray, threshold: float) -> np.ndarray:
    """The indices of scores above the threshold, which is not negative, the best first, equal ones in their order."""
    above = np.flatnonzero(scores > threshold)
    # Positive floats are ordered as their bits are. Sorting these with the index is four times as fast as argsort.
    bits = np.uint64(2**32 - 1) - scores[above].view(np.uint32)
    ordered: np.ndarray = np.sort(bits << np.uint64(32) | above.astype(np.uint64)) & np.uint64(2**32 - 1)
    return ordered.astype(np.int64)


def _rows(objects: Objects, chosen: np.ndarray) -> Objects:
    return Objects(
        objects.boxes[chosen], objects.classes[chosen], objects.extra[chosen] if len(objects.extra) else objects.extra
    )


def input_size(data: Any) -> Size:
    """Height and width of the first image among a model's inputs; ``BackendError`` if there is none."""
    values = data.values() if isinstance(data, Mapping) else data if isinstance(data, (list, tuple)) else (data,)
    for value in values:
        shape = tuple(getattr(value, "shape", ()))
        if len(shape) == 4:
            return shape[1:3] if has_channels_last(shape) else shape[2:]
        if len(shape) == 3:
            is_mat = looks_like_mat(value) if isinstance(value, np.ndarray) else shape[0] not in (1, 3, 4)
            return shape[:2] if is_mat else shape[1:]
        if len(shape) == 2 and getattr(value, "dtype", None) == np.uint8:
            return shape
    raise BackendError("boxes are found in an image, and none of the model's inputs is one")


class YoloBoxes(Detector):
    """YOLOv8, v9, v11: the first output is N×(4+C)×A: centre, width, height, and a score for each class.

    Or it is N×A×(4+C), if there are labels for C classes.
    """

    layouts = (Yolo, YoloRows)


class Yolo5Boxes(Detector):
    """YOLOv5, v7: the first output is N×A×(5+C): centre, width, height, objectness, and a score for each class."""

    layouts = (Yolo5,)


class EndToEndBoxes(Detector):
    """YOLOv10, v26, whose NMS is inside: the first output is N×K×6: left, top, right, bottom, score, class."""

    layouts = (EndToEnd,)


ACTIVATION = Param(
    to_str, "auto", choices=("auto", "softmax", "sigmoid"), doc="of DETR's logits; with softmax the last class is none"
)
NORMALISED = Param(to_bool, False, doc="whether listed boxes are parts of the sides, not pixels")


class DetrBoxes(Detector):
    """DETR, RT-DETR: boxes N×Q×4 of centre, width and height as parts of the sides, and logits N×Q×C.

    Also RT-DETR of Ultralytics: one output N×Q×6 of such a box, score and class, or N×Q×(4+C) with a score for each.
    """

    layouts = (Detr, DetrRows)
    activation = ACTIVATION


class BoxesScoresLabels(Detector):
    """torchvision's detectors, SSD with NMS inside: boxes N×K×4, scores N×K, labels N×K in any order."""

    layouts = (Listed,)
    normalised = NORMALISED


class Boxes(Detector):
    """Any of these layouts, found by the shapes of the outputs; refused where more than one fits."""

    layouts = (Yolo, Yolo5, YoloRows, EndToEnd, Detr, DetrRows, Listed)
    activation, normalised = ACTIVATION, NORMALISED

    def candidates(self, outputs: Sequence[TensorSpec]) -> Sequence[type[Layout]]:
        if "kpt_shape" in self.metadata:
            raise ConfigError("Boxes: the model's metadata names keypoints, which YoloPose reads")
        if len(outputs) > 1:
            return (Detr, Listed)
        if is_rtdetr(self.metadata):
            return (DetrRows,)
        rows = rows_of(outputs[0])
        if rows == OF_PEOPLE and not self.names:
            raise ConfigError("Boxes: an output Nx56xA has 17 keypoints (YoloPose), or 52 classes: name YoloBoxes then")
        is_short = rows is not None and rows <= MOST_ROWS  # YOLOv5 has thousands of rows
        if is_short:
            return Yolo, EndToEnd
        return (Yolo, Yolo5, EndToEnd) if rows is None else (Yolo, Yolo5, YoloRows, EndToEnd)


OF_PEOPLE = 56
"""Channels of a YOLO for COCO's keypoints."""


def rows_of(output: TensorSpec) -> int | None:
    """The second dimension of an output from the end, as far as it is declared."""
    return output.dims[-2] if len(output.dims) > 1 else None


_NAMES = {
    Yolo: YoloBoxes.__name__,
    YoloRows: YoloBoxes.__name__,
    Yolo5: Yolo5Boxes.__name__,
    EndToEnd: EndToEndBoxes.__name__,
    Detr: DetrBoxes.__name__,
    DetrRows: DetrBoxes.__name__,
    Listed: BoxesScoresLabels.__name__,
}
"""The postprocessor of each layout."""

OTHERS = (
    f"postprocessors of detectors: {', '.join(dict.fromkeys(_NAMES.values()))}, "
    "YoloSegments (with masks), YoloPose (with keypoints); Boxes finds the layout of boxes by the shapes"
)
