"""What goes before and after the example models, in NumPy and OpenCV alone.

The pipelines' own backends and a straight loop over ``onnxruntime`` call the same functions. A Mat is uint8 H×W×3, BGR.
"""

from __future__ import annotations

import cv2
import numpy as np

MEAN = (123.675, 116.28, 103.53)  # RGB, of 0..255; the same for the three models
STD = (58.395, 57.12, 57.375)
STRIDE = 8  # pixels of the input to a cell of the detector's output
BOX_UNIT = 32.0  # pixels; a predicted width of 0 means this much
LINE_HEIGHT = 32  # pixels
WIDTH_STEP = 32  # pixels; the width of a fitted line is a multiple of this


def to_input(mat: np.ndarray) -> np.ndarray:
    """float32 1×3×H×W, RGB, normalised: what the exported models take. A pipeline does this itself."""
    rgb = cv2.cvtColor(mat, cv2.COLOR_BGR2RGB).astype(np.float32)
    normalised = (rgb - np.array(MEAN, np.float32)) / np.array(STD, np.float32)
    return np.ascontiguousarray(normalised.transpose(2, 0, 1)[None])


# --- detector ----------------------------------------------------------------------------------------------------


def decode_boxes(output: np.ndarray, threshold: float = 0.5, iou: float = 0.4) -> np.ndarray:
    """float32 K×5 (left, top, right, bottom, score), the best first, of one picture's 5×h×w or 1×5×h×w.

    Coordinates are pixels of the detector's input and may reach a little over its border. The channels are the
    objectness logit; the box's centre from the cell's centre, x and y, in cells; and the logarithms of its width and
    height over ``BOX_UNIT``.
    """
    objectness, x, y, width, height = output.reshape(5, *output.shape[-2:]).astype(np.float32)
    scores = 1 / (1 + np.exp(-objectness))
    rows, columns = np.nonzero(scores >= threshold)
    best_first = np.argsort(-scores[rows, columns], kind="stable")
    cell = rows[best_first], columns[best_first]
    centres = np.stack([cell[1] + 0.5 + x[cell], cell[0] + 0.5 + y[cell]], axis=1) * STRIDE
    halves = np.exp(np.stack([width[cell], height[cell]], axis=1)) * (BOX_UNIT / 2)
    boxes = np.concatenate([centres - halves, centres + halves, scores[cell][:, None]], axis=1).astype(np.float32)
    return boxes[_kept(boxes, iou)]


def _kept(boxes: np.ndarray, iou: float) -> list[int]:
    """Greedy non-maximum suppression over boxes that come best first; the indices that stay."""
    kept: list[int] = []
    left = np.arange(len(boxes))
    while left.size:
        best, left = int(left[0]), left[1:]
        kept.append(best)
        left = left[overlaps(boxes[best], boxes[left]) <= iou]
    return kept


def overlaps(box: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """float K: intersection over union of one box with each of K; the first four columns count."""
    corner = np.maximum(box[:2], boxes[:, :2])
    sides = np.maximum(np.minimum(box[2:4], boxes[:, 2:4]) - corner, 0)
    both = sides.prod(axis=1)
    areas = (boxes[:, 2:4] - boxes[:, :2]).prod(axis=1)
    union = (box[2:4] - box[:2]).prod() + areas - both
    shares: np.ndarray = both / np.maximum(union, 1e-9)
    return shares


def crop(mat: np.ndarray, box: np.ndarray) -> np.ndarray:
    """The part of ``mat`` within ``box`` (its first four numbers), to the nearest pixel, at least 1×1; a view."""
    height, width = mat.shape[:2]
    left, top, right, bottom = (round(float(value)) for value in box[:4])
    left, top = min(max(left, 0), width - 1), min(max(top, 0), height - 1)
    return mat[top : max(min(bottom, height), top + 1), left : max(min(right, width), left + 1)]


# --- text lines --------------------------------------------------------------------------------------------------


def fit_line(mat: np.ndarray) -> np.ndarray:
    """``mat`` at ``LINE_HEIGHT``, its aspect ratio kept, its last column repeated to the next ``WIDTH_STEP``."""
    height, width = mat.shape[:2]
    width = max(1, round(width * LINE_HEIGHT / height))
    resized = cv2.resize(mat, (width, LINE_HEIGHT), interpolation=cv2.INTER_LINEAR)
    fitted: np.ndarray = cv2.copyMakeBorder(resized, 0, 0, 0, -width % WIDTH_STEP, cv2.BORDER_REPLICATE)
    return fitted


def ctc_text(logits: np.ndarray) -> str:
    """The digits of one line's T×11 or 1×T×11: the best class of each step, repeats merged, blanks (0) dropped."""
    best = logits.reshape(-1, logits.shape[-1]).argmax(axis=1)
    changed = np.diff(best, prepend=0) != 0
    return "".join(str(index - 1) for index in best[changed & (best != 0)])
