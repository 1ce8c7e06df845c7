"""What the written models make of held-out drawings, by ONNX Runtime and ``postprocess.py`` alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np

from examples.drawing import Scene
from examples.networks import CROP
from examples.shared import postprocess
from torchpipe_py.tools.export.onnx_file import open_session

Run = Callable[[np.ndarray], np.ndarray]

SAME_BOX = 0.5  # intersection over union from which a box found is the box drawn


@dataclass(frozen=True)
class SceneResult:
    """What the models say of one scene, against what was drawn."""

    drawn: int
    detected: int
    matched: int
    named: int  # of the matched ones, with the right digit
    overlap: float  # the matched boxes' mean intersection over union

    @property
    def is_right(self) -> bool:
        return self.drawn == self.detected == self.matched == self.named


def runner(model: Path) -> Run:
    """float32 N×3×H×W → logits."""
    session = open_session(model)
    return lambda pictures: session.run(["logits"], {"input": pictures})[0]


def match(boxes: np.ndarray, truth: np.ndarray) -> list[tuple[int, int, float]]:
    """Pairs of a box and a true one, and their overlap of at least ``SAME_BOX``; the best first, each box once."""
    pairs = [
        (place, int(index), float(overlap[index]))
        for place, overlap in enumerate(postprocess.overlaps(box, truth) for box in boxes)
        for index in np.flatnonzero(overlap >= SAME_BOX)
    ]
    matched: list[tuple[int, int, float]] = []
    for place, index, overlap in sorted(pairs, key=lambda pair: -pair[2]):
        if all(place != other[0] and index != other[1] for other in matched):
            matched.append((place, index, overlap))
    return matched


def read_scene(detector: Run, classifier: Run, mat: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """The boxes K×5, best first, and the digit of each."""
    boxes = postprocess.decode_boxes(detector(postprocess.to_input(mat)))
    crops = [cv2.resize(postprocess.crop(mat, box), (CROP, CROP), interpolation=cv2.INTER_LINEAR) for box in boxes]
    return boxes, [int(classifier(postprocess.to_input(crop)).argmax()) for crop in crops]


def scene_result(detector: Run, classifier: Run, scene: Scene) -> SceneResult:
    boxes, digits = read_scene(detector, classifier, scene.mat())
    matched = match(boxes, scene.boxes)
    named = sum(digits[place] == scene.classes[index] for place, index, _ in matched)
    overlap = float(np.mean([overlap for _, _, overlap in matched])) if matched else 0.0
    return SceneResult(len(scene.boxes), len(boxes), len(matched), named, overlap)


def read_line(reader: Run, mat: np.ndarray) -> str:
    return str(postprocess.ctc_text(reader(postprocess.to_input(postprocess.fit_line(mat)))))


def recall_and_precision(results: Sequence[SceneResult]) -> tuple[float, float]:
    matched = sum(result.matched for result in results)
    drawn, detected = sum(result.drawn for result in results), sum(result.detected for result in results)
    return matched / max(drawn, 1), matched / max(detected, 1)
