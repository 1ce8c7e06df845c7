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
from torchpipe_py.backends.model.postprocess.embeddings import L2Normalize
from torchpipe_py.backends.model.postprocess.masks import YoloSegments
from torchpipe_py.backends.model.postprocess.pose import YoloPose

__all__ = [
    "BUILT_IN",
    "ArgMax",
    "Boxes",
    "BoxesScoresLabels",
    "Cpu",
    "Detector",
    "DetrBoxes",
    "EndToEndBoxes",
    "L2Normalize",
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
    "YoloPose",
    "YoloSegments",
    "make_postprocessor",
    "read_labels",
    "uses",
]

BUILT_IN: tuple[type[Postprocessor], ...] = (
    *(SoftmaxMax, ArgMax, SoftmaxArgMax, TopK, Sigmoid, SoftmaxCpu, Cpu, L2Normalize),
    *(YoloBoxes, Yolo5Boxes, EndToEndBoxes, DetrBoxes, BoxesScoresLabels, Boxes, YoloSegments, YoloPose),
)


def uses(cls: type | str, key: str) -> bool:
    """Whether the postprocessor, or an empty string, may use ``key``; always true for a custom one."""
    return bool(cls) and (cls not in BUILT_IN or key in getattr(cls, "uses", ()))
