"""Models as people have them, one file of a few KB for each kind: random weights, the usual names and layouts.

``Kind.toml`` is the configuration that serves the file; ``tests/test_kinds_of_models.py`` asks it at the doors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FLOAT, HALF, BYTE, TEXT, INT = (
    TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.UINT8, TensorProto.STRING, TensorProto.INT64,
)  # fmt: skip
NAMES = {0: "person", 1: "car", 2: "dog"}
LABELS = [f"label {index}" for index in range(10)]
"""The lines of ``labels.txt``, beside the models."""
ANCHORS = 84
"""Rows of a YOLO for 64×64."""

Declared = Mapping[str, tuple[int, Sequence[int | str]]]


class Graph:
    """Nodes of an ONNX model, added one by one, and the weights that they read."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.weights: list[Any] = []
        self._random = np.random.default_rng(0)

    def add(self, kind: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        name = output or f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def constant(self, value: Any) -> str:
        name = f"c{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def random(self, *shape: int, scale: float = 0.1) -> str:
        return self.constant((scale * self._random.standard_normal(shape)).astype(np.float32))

    def head(self, images: str, size: int, channels: int = 3) -> str:
        """N×``size`` numbers of images N×C×H×W: a convolution, an average, a matrix."""
        features = self.add("Relu", self.add("Conv", images, self.random(8, channels, 3, 3), strides=[4, 4]))
        pooled = self.add("Flatten", self.add("GlobalAveragePool", features))
        return self.add("MatMul", pooled, self.random(8, size))

    def rows(self, images: str, boxes: np.ndarray, output: str) -> str:
        """``boxes`` 1×… for each image, a little different for each."""
        # N×1×1: the rows depend on the image by less than a rounding to three digits shows.
        shape = self.constant(np.array([-1, *[1] * (boxes.ndim - 1)]))
        shift = self.add("Reshape", self.add("Mul", self.head(images, 1), self.constant(np.float32(1e-6))), shape)
        return self.add("Add", shift, self.constant(boxes.astype(np.float32)), output=output)

    def save(self, path: Path, inputs: Declared, outputs: Declared, metadata: Mapping[str, str] | None = None) -> Path:
        declared = [
            [helper.make_tensor_value_info(name, kind, dims) for name, (kind, dims) in tensors.items()]
            for tensors in (inputs, outputs)
        ]
        graph = helper.make_graph(self.nodes, path.stem, *declared, self.weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
        helper.set_model_props(model, dict(metadata or {}))
        onnx.checker.check_model(model)
        onnx.save(model, path)
        return path


@dataclass(frozen=True)
class Kind:
    """A kind of model. ``toml`` serves ``NAME.onnx``; ``tensors`` are the inputs of a request, else it is a picture."""

    name: str
    make: Callable[[Path], Path]
    toml: str
    tensors: Mapping[str, np.ndarray] = field(default_factory=dict)
    outputs: Sequence[str] = ("result",)
    """The names of a model of tensors' outputs."""


DETECTOR_TOML = """
[decode]
backend = "S[DecodeMat,LetterBoxMat,cvtColorMat]"
max_h = 64
max_w = 64
color = "rgb"
next = "model"

[model]
backend = "OnnxTensor"
model = "NAME.onnx"
max = 4
std = 255
postprocessor = "POSTPROCESSOR"
"""

CLASSIFIER_TOML = """
[decode]
backend = "S[DecodeMat,ResizeMat,cvtColorMat]"
resize_h = 64
resize_w = 64
color = "rgb"
next = "model"

[model]
backend = "OnnxTensor"
model = "NAME.onnx"
MORE
"""

TENSORS_TOML = """
[model]
backend = "OnnxTensor"
model = "NAME.onnx"
MORE
"""


def _ultralytics(task: str, **more: Any) -> dict[str, str]:
    own = {"task": task, "names": NAMES, "imgsz": [64, 64], "stride": 32, "batch": 1, **more}
    return {key: str(value) for key, value in own.items()}


def _boxes(extra: int = 0) -> np.ndarray:
    """1×(4+3+``extra``)×84: two boxes of two classes, and others without a score."""
    output = np.zeros((1, 7 + extra, ANCHORS), np.float32)
    output[0, :7, 5] = [20, 32, 24, 16, 0, 0, 0.9]
    output[0, :7, 60] = [48, 30, 16, 20, 0, 0.6, 0]
    return output


def _yolo(path: Path) -> Path:
    graph = Graph()
    graph.rows("images", _boxes(), "output0")
    metadata = _ultralytics("detect")
    return graph.save(path, {"images": (FLOAT, ["batch", 3, 64, 64])},
                      {"output0": (FLOAT, ["batch", 7, ANCHORS])}, metadata)  # fmt: skip


def _segments(path: Path) -> Path:
    graph, output = Graph(), _boxes(32)
    output[0, 7, [5, 60]] = 4  # of the first prototype
    graph.rows("images", output, "output0")
    graph.rows("images", np.ones((1, 32, 16, 16)), "output1")
    outputs = {"output0": (FLOAT, ["batch", 39, ANCHORS]), "output1": (FLOAT, ["batch", 32, 16, 16])}
    return graph.save(path, {"images": (FLOAT, ["batch", 3, 64, 64])}, outputs, _ultralytics("segment"))


def _pose(path: Path) -> Path:
    graph, points = Graph(), 4
    output = np.zeros((1, 5 + 3 * points, ANCHORS), np.float32)
    output[0, :, 5] = [20, 32, 24, 16, 0.9, *[15, 30, 0.8, 25, 30, 0.7, 15, 36, 0.6, 25, 36, 0.5]]
    graph.rows("images", output, "output0")
    metadata = _ultralytics("pose", kpt_shape=[points, 3]) | {"names": "{0: 'person'}"}
    return graph.save(path, {"images": (FLOAT, ["batch", 3, 64, 64])},
                      {"output0": (FLOAT, ["batch", 5 + 3 * points, ANCHORS])}, metadata)  # fmt: skip


def _pair(path: Path) -> Path:
    graph = Graph()
    both = graph.add("Sub", graph.head("left", 4), graph.head("right", 4))
    graph.add("ReduceL2", both, axes=[1], keepdims=1, output="distance")
    image = (FLOAT, ["batch", 3, 16, 16])
    return graph.save(path, {"left": image, "right": image}, {"distance": (FLOAT, ["batch", 1])})


def _half(path: Path) -> Path:
    graph = Graph()
    graph.add("Cast", graph.head(graph.add("Cast", "images", to=FLOAT), 10), output="logits", to=HALF)
    return graph.save(path, {"images": (HALF, ["batch", 3, 64, 64])}, {"logits": (HALF, ["batch", 10])})


def _byte(path: Path) -> Path:
    graph = Graph()
    scaled = graph.add("Div", graph.add("Cast", "images", to=FLOAT), graph.constant(np.float32(255)))
    graph.add("Identity", graph.head(scaled, 10), output="logits")
    return graph.save(path, {"images": (BYTE, ["batch", 3, 64, 64])}, {"logits": (FLOAT, ["batch", 10])})


def _keras(path: Path) -> Path:
    graph = Graph()
    planes = graph.add("Transpose", "input_1", perm=[0, 3, 1, 2])
    graph.add("Softmax", graph.head(planes, 10), axis=1, output="predictions")
    return graph.save(path, {"input_1": (FLOAT, ["unk__1", 64, 64, 3])}, {"predictions": (FLOAT, ["unk__1", 10])})


def _embedding(path: Path) -> Path:
    graph = Graph()
    graph.add("Identity", graph.head("pixel_values", 128), output="image_embeds")
    return graph.save(path, {"pixel_values": (FLOAT, ["batch", 3, 64, 64])}, {"image_embeds": (FLOAT, ["batch", 128])})


def _sam(path: Path) -> Path:
    """The inputs of SAM's decoder, small: an embedding, points, and the size of the picture without a batch."""
    graph = Graph()
    pooled = graph.head("image_embeddings", 1, channels=8)
    points = graph.add("ReduceSum", "point_coords", graph.constant(np.array([1, 2])), keepdims=0)
    area = graph.add("ReduceProd", "orig_im_size", keepdims=0)
    sums = graph.add("Add", graph.add("Add", pooled, points), area)
    graph.add("Identity", graph.add("Add", sums, "threshold"), output="iou_predictions")
    inputs = {
        "image_embeddings": (FLOAT, [1, 8, 16, 16]), "point_coords": (FLOAT, [1, "points", 2]),
        "orig_im_size": (FLOAT, [2]), "threshold": (FLOAT, []),
    }  # fmt: skip
    return graph.save(path, inputs, {"iou_predictions": (FLOAT, [1, 1])})


def _text(path: Path) -> Path:
    graph = Graph()
    graph.add("Identity", "text", output="same")
    return graph.save(path, {"text": (TEXT, ["batch", 1])}, {"same": (TEXT, ["batch", 1])})


def _points(path: Path) -> Path:
    """Points P×3, less the least of each coordinate: the first dimension is not a batch."""
    graph = Graph()
    graph.add("Sub", "points", graph.add("ReduceMin", "points", axes=[0]), output="moved")
    return graph.save(path, {"points": (FLOAT, ["points", 3])}, {"moved": (FLOAT, ["points", 3])})


def _one(path: Path) -> Path:
    graph = Graph()
    graph.add("Identity", graph.head("input", 10), output="logits")
    return graph.save(path, {"input": (FLOAT, [1, 3, 64, 64])}, {"logits": (FLOAT, [1, 10])})


def _several(path: Path) -> Path:
    graph = Graph()
    graph.add("Identity", graph.head("input", 5), output="age")
    graph.add("Identity", graph.head("input", 2), output="gender")
    outputs = {"age": (FLOAT, ["batch", 5]), "gender": (FLOAT, ["batch", 2])}
    return graph.save(path, {"input": (FLOAT, ["batch", 3, 64, 64])}, outputs)


_RANDOM = np.random.default_rng(1)


def _image(channels: int = 3, side: int = 16) -> np.ndarray:
    return _RANDOM.standard_normal((1, channels, side, side)).astype(np.float32)


def _toml(template: str, more: str) -> str:
    return template.replace("MORE", more.strip())


KINDS = (
    Kind("yolo", _yolo, DETECTOR_TOML.replace("POSTPROCESSOR", "YoloBoxes")),
    Kind("yolo_seg", _segments, DETECTOR_TOML.replace("POSTPROCESSOR", "YoloSegments")),
    Kind("yolo_pose", _pose, DETECTOR_TOML.replace("POSTPROCESSOR", "YoloPose")),
    Kind("two_inputs", _pair, _toml(TENSORS_TOML, "max = 4"), {"left": _image(), "right": _image()}, ["distance"]),
    Kind("fp16_input", _half, _toml(CLASSIFIER_TOML, """
max = 4
mean = "123.675, 116.28, 103.53"
std = "58.395, 57.12, 57.375"
postprocessor = "SoftmaxMax"
labels = "labels.txt"
""")),
    Kind("uint8_input", _byte, _toml(CLASSIFIER_TOML, """
max = 4
postprocessor = "SoftmaxMax"
labels = "labels.txt"
""")),
    Kind("keras", _keras, _toml(CLASSIFIER_TOML, """
max = 4
mean = 127.5
std = 127.5
postprocessor = "ArgMax"
labels = "labels.txt"
""")),
    Kind("embeddings", _embedding, _toml(CLASSIFIER_TOML, """
max = 4
mean = "122.77, 116.75, 104.09"
std = "68.5, 66.63, 70.32"
postprocessor = "L2Normalize"
""")),
    Kind("sam", _sam, _toml(TENSORS_TOML, "max = 1"), {
        "image_embeddings": _image(8), "point_coords": np.array([[[1, 2], [3, 4]]], np.float32),
        "orig_im_size": np.array([[480, 640]], np.float32), "threshold": np.array([0.5], np.float32),
    }, ["iou_predictions"]),
    Kind("string_input", _text, _toml(TENSORS_TOML, "max = 4"), {"text": np.array([["caf\u00e9"]], object)}, ["same"]),
    Kind("points", _points, _toml(TENSORS_TOML, "max = 1"), {"points": np.array([[3, 1, 2]], np.float32)}, ["moved"]),
    Kind("fixed_batch", _one, _toml(CLASSIFIER_TOML, """
max = 1
mean = "123.675, 116.28, 103.53"
std = "58.395, 57.12, 57.375"
postprocessor = "SoftmaxMax"
labels = "labels.txt"
""")),
    Kind("several_outputs", _several, _toml(CLASSIFIER_TOML, """
max = 4
mean = "123.675, 116.28, 103.53"
std = "58.395, 57.12, 57.375"
postprocessor = "cpu"
""")),
)  # fmt: skip
