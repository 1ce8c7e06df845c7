"""Results from a model's outputs, for the whole batch at once, with one copy to the host."""

from torchpipe_py.backends.model.postprocess.base import (
    Postprocessor,
    PostprocessorParam,
    Written,
    make_postprocessor,
    read_labels,
)
from torchpipe_py.backends.model.postprocess.classes import (
    ArgMax,
    Cpu,
    OfClasses,
    Sigmoid,
    SoftmaxArgMax,
    SoftmaxCpu,
    SoftmaxMax,
    TopK,
)
from torchpipe_py.backends.model.postprocess.detections import (
    Boxes,
    BoxesScoresLabels,
    Detector,
    DetrBoxes,
    EndToEndBoxes,
    Yolo5Boxes,
    YoloBoxes,
)

__all__ = [
    "BUILT_IN",
    "ArgMax",
    "Boxes",
    "BoxesScoresLabels",
    "Cpu",
    "Detector",
    "DetrBoxes",
    "EndToEndBoxes",
    "OfClasses",
    "Postprocessor",
    "PostprocessorParam",
    "Sigmoid",
    "SoftmaxArgMax",
    "SoftmaxCpu",
    "SoftmaxMax",
    "TopK",
    "Written",
    "Yolo5Boxes",
    "YoloBoxes",
    "make_postprocessor",
    "read_labels",
    "uses",
]

BUILT_IN: tuple[type[Postprocessor], ...] = (SoftmaxMax, ArgMax, SoftmaxArgMax, TopK, Sigmoid, SoftmaxCpu, Cpu)
BUILT_IN += (YoloBoxes, Yolo5Boxes, EndToEndBoxes, DetrBoxes, BoxesScoresLabels, Boxes)


def uses(cls: type | str, key: str) -> bool:
    """Whether the postprocessor, or an empty string, may use ``key``; always true for a custom one."""
    return bool(cls) and (cls not in BUILT_IN or key in getattr(cls, "uses", ()))
