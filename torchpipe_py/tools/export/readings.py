"""Guesses about an ONNX file: kind, postprocessor and pixels, from its metadata, shapes and one run.

Where there are two readings, ``Reading.notes`` has the other one, and the key that chooses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torchpipe_py.backends.control.python import declared
from torchpipe_py.backends.model import postprocess
from torchpipe_py.backends.model.onnx_graph import scale_of_pixels
from torchpipe_py.backends.model.postprocess import Detector, Postprocessor, make_postprocessor
from torchpipe_py.backends.model.postprocess.layouts import is_rtdetr, shown_outputs
from torchpipe_py.backends.model.postprocess.settings import names_of
from torchpipe_py.backends.signature import TensorSpec, shown_dims
from torchpipe_py.encryption.model_file import ModelFile
from torchpipe_py.errors import ConfigError, counted
from torchpipe_py.tools.export.onnx_model import ImageInput, OnnxModel, is_probability

LETTERBOX, STRETCH, CROP, WHOLE = "letterbox", "stretch", "crop", "whole"
"""How a picture gets the model's size; ``WHOLE``: it keeps its own."""
SEGMENTER = "a segmenter"

Numbers = tuple[float, ...]

IMAGENET: tuple[Numbers, Numbers] = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
ZERO_TO_ONE: tuple[Numbers, Numbers] = ((0.0,), (1.0,))
MINUS_ONE_TO_ONE: tuple[Numbers, Numbers] = ((0.5,), (0.5,))

CLASS_COUNTS = (2, 10, 100, 365, 1000, 1001, 21841, 21843)
"""Classes of data sets that many models are trained on."""
VECTOR_SIZES = (64, 96, 128, 192, 256, 320, 384, 512, 576, 640, 768, 960, 1024, 1152, 1280, 1536, 1664, 1792, 2048)
"""Sizes of embeddings."""
VECTOR_NAMES = ("embed", "feature", "pooler", "vector", "hidden", "token")
CLASS_NAMES = ("logit", "prob", "class", "softmax", "score")
STRIDES = ((8, 16, 32), (8, 16, 32, 64), (16, 32))
"""Strides of YOLO's grids."""


@dataclass
class Reading:
    """A model as it is understood. ``postprocessor`` is empty for plain outputs."""

    kind: str
    why: str
    postprocessor: str = ""
    fit: str = STRETCH
    shorter: float = 256 / 224
    """With ``CROP``, the shorter side of a picture before the crop, in sides of the model's input."""
    keys: dict[str, Any] = field(default_factory=dict)
    """More keys of its node."""
    labels: Sequence[str] = ()
    notes: list[str] = field(default_factory=list)

    @property
    def is_yolo(self) -> bool:
        """Whether it is trained on pixels 0 to 1 with gray borders."""
        return self.fit == LETTERBOX


def read_kind(
    model: OnnxModel, image: ImageInput, outputs: Sequence[TensorSpec], arrays: Sequence[np.ndarray],
    sides: tuple[int, int], labels: Sequence[str],
) -> Reading:  # fmt: skip
    """The most likely reading; ``labels`` are those that the user gives."""
    task, names = model.metadata.get("task", ""), labels or names_of(model.metadata.get("names", ""))
    of_task = f"the metadata has task {task}"
    if task == "classify":
        first = Reading("a classifier", of_task, "ArgMax", CROP, 1.0, labels=names)
        return first if is_probability(arrays) else _with(first, postprocessor="SoftmaxMax")
    if task == "obb":
        note = "rotated boxes need a postprocessor of your own (docs/own-backends.md)"
        return Reading("a detector of rotated boxes", of_task, fit=LETTERBOX, notes=[note])
    if _is_class_map(outputs):
        first = Reading(SEGMENTER, of_task if task else f"output {outputs[0]} is a map of integers", "ArgMax")
        return _with(first, fit=LETTERBOX if task else STRETCH, keys={"original_size": True})
    if task in ("detect", "segment", "pose") or len(outputs[0].dims) == 3 or len(outputs) > 1:
        found = _detector(model, outputs, sides, task, labels)
        if found is not None:
            return found
    if len(outputs[0].dims) == 4 and arrays[0].shape[2:] != (1, 1):
        return _map(image, outputs)
    if len(outputs) > 1 and all(array.ndim == 2 for array in arrays):
        note = f'postprocessor = "SoftmaxMax" answers the best class of {outputs[0].name} alone'
        return Reading("a model with several outputs", "a row in each", "cpu", CROP, notes=[note])
    if len(outputs[0].dims) == 2 or arrays[0].shape[2:] == (1, 1):
        return _row(outputs, arrays, names)
    shapes = ", ".join(map(str, outputs))
    note = 'if these are boxes, postprocessor = "YoloBoxes" or another of docs/detectors.md reads them'
    return Reading("a model of images", f"outputs {shapes} have no reading here", notes=[note])


def read_named(name: str, outputs: Sequence[TensorSpec], arrays: Sequence[np.ndarray]) -> Reading:
    """The reading that a postprocessor named by the user implies."""
    why = f"--postprocessor {name!r}"
    cls = next((each for each in postprocess.BUILT_IN if each.__name__ == name), None)
    if cls is not None and issubclass(cls, Detector):
        is_yolo = name in ("YoloBoxes", "Yolo5Boxes", "EndToEndBoxes", "YoloSegments", "YoloPose", "Boxes")
        reading = Reading("a detector", why, name, LETTERBOX if is_yolo else STRETCH)
        prototypes = [output for output in outputs if len(output.dims) == 4]
        if name in ("YoloBoxes", "Yolo5Boxes") and prototypes:
            reading.notes.append(f"if {prototypes[0]} are prototypes of masks, their coefficients are read as classes: "
                                 "--postprocessor YoloSegments reads masks")  # fmt: skip
        return reading
    if cls is not None and "labels" in getattr(cls, "uses", ()):
        if len(outputs[0].dims) == 4:
            return Reading(SEGMENTER, why, name)
        return Reading("a classifier", why, name, CROP)
    return Reading("a model of images", why, name, CROP if len(outputs[0].dims) == 2 else STRETCH)


def fits(
    model: OnnxModel, cls: type[Postprocessor], outputs: Sequence[TensorSpec], labels: Sequence[str] | None = None
) -> Any:
    """The postprocessor, fitted to these outputs; ``None`` if they do not fit.

    It is for as many classes as there are ``labels``; for any number without one, and if they are ``None``, for the
    names that the metadata has.
    """
    own = {key: param.default for key, param in declared(cls).items()}
    config = {"labels": "", "k": 5, "threshold": 0.5, "max": 1, "model": ModelFile(str(model.path))}
    try:
        made: Any = make_postprocessor(cls, config, own)
        if labels is not None:
            made.names = tuple(labels)
        made.fit(outputs)
    except ConfigError:
        return None
    return made


def readers_of_labels(model: OnnxModel, outputs: Sequence[TensorSpec], labels: Sequence[str]) -> str:
    """The postprocessors that can name what these outputs hold by ``labels``, for messages."""
    own = [each for each in postprocess.BUILT_IN if issubclass(each, Detector) and each is not postprocess.Boxes]
    made = [fits(model, each, outputs, labels) for each in own]
    if names := [type(each).__name__ for each in made if each is not None and each.layout is not None]:
        return (
            f"--postprocessor {' or '.join(names)} reads {counted(len(labels), 'class')} from {shown_outputs(outputs)}"
        )
    names = [each.__name__ for each in postprocess.BUILT_IN if postprocess.uses(each, "labels")]
    return f"these have labels, if --postprocessor names one: {', '.join(names)}"


def _with(reading: Reading, **changes: Any) -> Reading:
    for name, value in changes.items():
        setattr(reading, name, value)
    return reading


_OF_TASK = {"segment": ("YoloSegments",), "pose": ("YoloPose",)}
_DETECTORS = ("YoloSegments", "YoloBoxes", "Yolo5Boxes", "EndToEndBoxes", "YoloPose", "DetrBoxes", "BoxesScoresLabels")
_WORDS = {"YoloSegments": "a detector with masks", "YoloPose": "a pose model"}


_TURNED = "boxes of YOLOv8 and later (N×A×(4+C))", 1, "--postprocessor YoloBoxes --labels FILE reads it so"
_ROTATED = "rotated boxes", -1, "they need a postprocessor of your own (docs/own-backends.md)"
_ALSO = {"Yolo5Boxes": _TURNED, "YoloBoxes": _ROTATED}
"""What the outputs of a postprocessor may also be, how many more classes they have then, and what to do."""


def _detector(
    model: OnnxModel, outputs: Sequence[TensorSpec], sides: tuple[int, int], task: str, labels: Sequence[str]
) -> Reading | None:
    """The layout of boxes that fits; without a task, it must also have the rows of such a detector.

    The user's ``labels`` tell layouts apart as the names in the metadata do.
    """
    classes = {each.__name__: each for each in postprocess.BUILT_IN if issubclass(each, Detector)}
    names: Sequence[str] = _OF_TASK.get(task, _DETECTORS)
    if task == "detect":
        names = ("YoloBoxes", "Yolo5Boxes", "EndToEndBoxes", "DetrBoxes", "BoxesScoresLabels")
    if is_rtdetr(model.metadata):
        names = ("DetrBoxes",)
    has_keypoints = "kpt_shape" in model.metadata
    possible = []
    for name in names:
        if task != "segment" and name == "YoloSegments" and len(outputs) < 2:
            continue
        if name == "YoloPose" and not (task == "pose" or has_keypoints or outputs[0].dims[-2:-1] == (56,)):
            continue
        if name in ("YoloBoxes", "Yolo5Boxes", "EndToEndBoxes", "YoloPose") and len(outputs) > 1 and not task:
            continue
        if name == "DetrBoxes" and len(outputs) == 1 and not is_rtdetr(model.metadata):
            continue
        if task or _has_rows(name, outputs, sides):
            possible.append(name)
    shapes, own_names = ", ".join(map(str, outputs)), labels or names_of(model.metadata.get("names", ""))
    found = [name for name in possible if fits(model, classes[name], outputs, own_names)]
    if not found:
        for name, (what, more, advice) in _ALSO.items() if own_names else ():
            if task and name == "YoloBoxes":  # which is not obb
                continue
            made = fits(model, classes[name], outputs, ()) if _may_be_both(name, outputs, sides) else None
            if made is not None and made.layout is not None and made.layout.classes + more == len(own_names):
                source = "your file" if labels else "the metadata"
                why = f"{source} names {counted(len(own_names), 'class')}, and {name} reads {made.layout.classes}"
                return Reading(f"a detector of {what}", why, fit=LETTERBOX, notes=[advice])
        # Labels that fit no layout: the trial says how many classes there are.
        found = [name for name in possible if fits(model, classes[name], outputs, ())] if labels else []
    if not found:
        if not task:
            return None
        note = f"no postprocessor reads {shapes}: write one (docs/own-backends.md)"
        return Reading(f"a model for the task {task}", f"the metadata has task {task}", fit=LETTERBOX, notes=[note])
    first, *others = found
    if has_keypoints and "YoloPose" in others:
        first, others = "YoloPose", []
    why = f"the metadata has task {task}" if task else f"of outputs {shapes}"
    is_yolo = first not in ("DetrBoxes", "BoxesScoresLabels")
    reading = Reading(_WORDS.get(first, "a detector"), why, first, LETTERBOX if is_yolo else STRETCH)
    for other in others:
        reading.notes.append(f'{shapes} may also be {_WORDS.get(other, "boxes")} laid out for {other}: '
                             f'postprocessor = "{other}" chooses that')  # fmt: skip
    is_known = bool(own_names) or (first == "YoloBoxes" and bool(task))
    if not is_known and first in _ALSO and _may_be_both(first, outputs, sides):
        layout, (what, more, advice) = fits(model, classes[first], outputs, own_names).layout, _ALSO[first]
        if layout is not None and layout.classes + more > 0:
            read = f"{shapes} is read as {counted(layout.classes, 'class')}"
            reading.notes.append(f'{read}; {what} have {layout.classes + more} in this shape: {advice}; '
                                 '--postprocessor "" answers the outputs as they are')  # fmt: skip
    return reading


def _may_be_both(name: str, outputs: Sequence[TensorSpec], sides: tuple[int, int]) -> bool:
    """Whether the outputs may be what ``_ALSO`` has for a postprocessor. YOLOv5 has three rows for each place."""
    if len(outputs) > 1 or len(outputs[0].dims) != 3:
        return False
    return name != "Yolo5Boxes" or outputs[0].dims[1] in _grids(sides)


def _has_rows(name: str, outputs: Sequence[TensorSpec], sides: tuple[int, int]) -> bool:
    """Whether a YOLO layout has one row for each place of its grids, or three."""
    if name in ("DetrBoxes", "BoxesScoresLabels", "EndToEndBoxes"):
        return True
    boxes = next((output for output in outputs if len(output.dims) == 3), outputs[0])
    return any(size in boxes.dims[-2:] for grid in _grids(sides) for size in (grid, 3 * grid))


def _grids(sides: tuple[int, int]) -> list[int]:
    """The places of YOLO's grids, for each of ``STRIDES``."""
    return [sum((sides[0] // each) * (sides[1] // each) for each in strides) for strides in STRIDES]


def _is_class_map(outputs: Sequence[TensorSpec]) -> bool:
    """Whether a segmenter chooses the class of each pixel itself: one output of integers N×H×W, or N×1×H×W."""
    dims = outputs[0].dims
    is_integer = outputs[0].dtype.startswith(("int", "uint"))
    return len(outputs) == 1 and is_integer and (len(dims) == 3 or (len(dims) == 4 and dims[1] == 1))


def _map(image: ImageInput, outputs: Sequence[TensorSpec]) -> Reading:
    first = outputs[0]
    shape = shown_dims((None, *first.dims[1:]))
    if image.is_last:
        note = "ArgMax reads NxCxHxW: for a map NxHxWxC transpose in the model, or write a postprocessor"
        return Reading("a model with an image as output", f"output {first.name} is {shape}", notes=[note])
    if first.dims[1] == 1:
        note = "one number for each pixel, the logit of a mask or a depth, is answered as it is"
        return Reading("a model with a map as output", f"output {first.name} is {shape}", notes=[note])
    reading = Reading(SEGMENTER, f"output {first.name} is {shape}", "ArgMax", keys={"original_size": True})
    if first.dims[1] == 3:
        reading.notes.append(f'{shape} is read as scores of three classes; for an image, postprocessor = "" answers it')
    return reading


def _row(outputs: Sequence[TensorSpec], arrays: Sequence[np.ndarray], labels: Sequence[str]) -> Reading:
    """A classifier, or an embedding."""
    first, rows = outputs[0], np.asarray(arrays[0], np.float64).reshape(len(arrays[0]), -1)
    size, name = rows.shape[1], first.name.lower()
    shape = f"output {first.name} is {shown_dims((None, *first.dims[1:]))}"
    if size == 1:
        note = 'if it is the logit of a class, postprocessor = "Sigmoid" answers its score'
        return Reading("a model with one number as output", shape, fit=CROP, notes=[note])
    if is_probability(arrays):
        return Reading("a classifier", f"{shape}, whose rows add up to 1", "ArgMax", CROP, labels=labels)
    classifier = Reading("a classifier", shape, "SoftmaxMax", CROP, labels=labels)
    embedding = Reading("an embedding", shape, "L2Normalize", CROP)
    if len(labels) == size:
        return classifier
    if arrays[0].ndim == 4:
        return embedding
    embedding.notes.append('if these are scores of classes, postprocessor = "SoftmaxMax" answers the best one')
    classifier.notes.append('if this is an embedding, postprocessor = "L2Normalize" answers the vector')
    if any(word in name for word in VECTOR_NAMES):
        return _with(embedding, why=f"{shape}, by its name")
    if any(word in name for word in CLASS_NAMES):
        return _with(classifier, why=f"{shape}, by its name")
    if size in CLASS_COUNTS or size not in VECTOR_SIZES:
        return classifier
    return embedding


@dataclass(frozen=True)
class Pixels:
    """``mean`` and ``std`` of pixels 0 to 1; empty if the model takes them 0 to 255."""

    mean: Numbers
    std: Numbers
    words: str


_PLAIN_PIXELS = "models that take just 0 to 1 need --mean 0 --std 1 (mean = 0 and std = 255 in the TOML, of 0 to 255)"


def read_pixels(model: OnnxModel, image: ImageInput, reading: Reading) -> Pixels:
    """How the model takes pixels, by its type, its first operators, or else the custom of its kind."""
    if image.spec.dtype == "uint8":
        return Pixels((), (), "0 to 255, as the input is uint8")
    scale = scale_of_pixels(str(model.path), model.inputs[0].name)
    if scale == 255.0:
        return Pixels((), (), "0 to 255: the model normalises them itself")
    if scale == 1.0:
        return Pixels(*ZERO_TO_ONE, "0 to 1: the model normalises them itself")
    if image.channels == 1:
        return Pixels(*ZERO_TO_ONE, "0 to 1 (of one channel; is that how it was trained?)")
    if reading.is_yolo:
        return Pixels(*ZERO_TO_ONE, "0 to 1, as YOLO takes them")
    if "task" in model.metadata:
        return Pixels(*ZERO_TO_ONE, "0 to 1, as Ultralytics' models take them")
    if reading.postprocessor == "BoxesScoresLabels":
        return Pixels(*ZERO_TO_ONE, "0 to 1, as torchvision's detectors take them")
    if image.is_last:
        words = f"-1 to 1, as many Keras models take them; {_PLAIN_PIXELS}, and 0 to 255 neither key"
        return Pixels(*MINUS_ONE_TO_ONE, words)
    words = f"normalised by ImageNet's mean and std; {_PLAIN_PIXELS}"
    return Pixels(*IMAGENET, words)
