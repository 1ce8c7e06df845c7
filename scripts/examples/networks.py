"""The three networks and how each is trained. They take normalised pictures and give logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

import cv2
import numpy as np
import torch
from torch import nn

from examples.drawing import HEIGHT, WIDTH, Line, Scene
from examples.shared import postprocess

CROP = 32  # pixels; the classifier's input is CROP×CROP
CROPS_PER_TILE = 3
DIGITS = 10
CORE, REACH = 0.25, 0.4  # of a tile's side, from its centre: cells within CORE predict it, cells beyond REACH do not
BATCH = 32
MEAN = (123.675, 116.28, 103.53)  # RGB; a pipeline writes these two into the graph, so the export is without them
STD = (58.395, 57.12, 57.375)

Batch = tuple[torch.Tensor, ...]  # pictures first, uint8


def _convolution(
    inputs: int, outputs: int, kernel: int | tuple[int, int], stride: int, padding: int | tuple[int, int]
) -> list[nn.Module]:
    """Convolution, batch-norm (the exporter folds it into the convolution) and ReLU."""
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
    return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]


def _stack(widths: Sequence[int], strides: Sequence[int]) -> list[nn.Module]:
    pairs = zip(pairwise(widths), strides, strict=True)
    return [layer for (inputs, outputs), stride in pairs for layer in _convolution(inputs, outputs, 3, stride, 1)]


def normalise(images: torch.Tensor) -> torch.Tensor:
    """uint8 N×3×H×W → float32 of the same shape."""
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (MEAN, STD))
    return (images.float() - mean) / std


def fit(
    network: nn.Module, batches: Iterable[Batch], loss: Callable[..., torch.Tensor], steps: int, rate: float
) -> nn.Module:
    """AdamW with a one-cycle rate; ``loss`` takes the output and what follows the pictures. Gives it in eval mode."""
    optimiser = torch.optim.AdamW(network.parameters(), weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=steps)
    for pictures, *targets in batches:
        optimiser.zero_grad()
        loss(network(normalise(pictures)), *targets).backward()
        optimiser.step()
        schedule.step()
    return network.eval()


def _orders(count: int, epochs: int, seed: int) -> Iterator[torch.Tensor]:
    """Indices of each full batch, every epoch in another order."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(count, generator=generator)
        yield from order[: count // BATCH * BATCH].split(BATCH)


def _pictures(mats: Sequence[np.ndarray]) -> torch.Tensor:
    """uint8 N×3×H×W, RGB, of BGR Mats of one size."""
    return torch.from_numpy(np.stack(mats)[:, :, :, ::-1].transpose(0, 3, 1, 2).copy())


# --- detector ----------------------------------------------------------------------------------------------------


def build_detector() -> nn.Sequential:
    """float32 N×3×H×W → N×5×H/8×W/8, whose channels ``decode_boxes`` explains. A cell sees 63×63 pixels."""
    return nn.Sequential(*_stack((3, 16, 24, 28, 28, 28, 28), (2, 2, 2, 1, 1, 1)), nn.Conv2d(28, 5, 1))


def detector_target(boxes: np.ndarray) -> np.ndarray:
    """float32 6×h×w: objectness 1 or 0, the four numbers of a box where it is 1, and whether the cell counts."""
    stride, unit = postprocess.STRIDE, postprocess.BOX_UNIT
    rows, columns = np.mgrid[: HEIGHT // stride, : WIDTH // stride].astype(np.float32) + 0.5
    target = np.zeros((6, *rows.shape), np.float32)
    target[5] = 1
    for left, top, right, bottom in boxes:
        x, y = (left + right) / 2 / stride - columns, (top + bottom) / 2 / stride - rows
        width, height = right - left, bottom - top
        distance = np.maximum(np.abs(x) * stride / width, np.abs(y) * stride / height)
        core = distance <= CORE
        target[5, (distance < REACH) & ~core] = 0
        target[0, core] = 1
        target[1:3, core] = x[core], y[core]
        target[3:5, core] = np.log([[width / unit], [height / unit]])
    return target


def _detector_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    tile, counts = target[:, 0], target[:, 5]
    objectness = nn.functional.binary_cross_entropy_with_logits(output[:, 0], tile, reduction="none")
    boxes = nn.functional.smooth_l1_loss(output[:, 1:], target[:, 1:5], reduction="none", beta=0.1).sum(1)
    return ((objectness * counts).sum() + (boxes * tile).sum()) / tile.sum()


def train_detector(scenes: Sequence[Scene], epochs: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    pictures = _pictures([scene.mat() for scene in scenes])
    targets = torch.from_numpy(np.stack([detector_target(scene.boxes) for scene in scenes]))
    batches = ((pictures[chosen], targets[chosen]) for chosen in _orders(len(scenes), epochs, seed))
    steps = epochs * (len(scenes) // BATCH)
    network = build_detector().to(memory_format=torch.channels_last)
    return fit(network, batches, _detector_loss, steps, rate=6e-3)


# --- classifier --------------------------------------------------------------------------------------------------


def build_classifier() -> nn.Sequential:
    """float32 N×3×32×32 → N×10."""
    layers = _stack((3, 16, 24, 32, 36, 36), (1, 2, 2, 2, 1))
    pooled = [nn.AvgPool2d((2, 2)), nn.Flatten(), nn.Linear(36 * 2 * 2, DIGITS)]
    return nn.Sequential(*layers, *pooled)


def jittered_crops(scene: Scene, rng: np.random.Generator) -> list[np.ndarray]:
    """uint8 CROP×CROP×3 of each tile in turn, every side up to 8 % of the box off, as a detector's would be."""
    mat, sides = scene.mat(), scene.boxes[:, 2:] - scene.boxes[:, :2]
    boxes = scene.boxes + np.tile(sides, 2) * rng.uniform(-0.08, 0.08, scene.boxes.shape)
    return [cv2.resize(postprocess.crop(mat, box), (CROP, CROP), interpolation=cv2.INTER_LINEAR) for box in boxes]


def train_classifier(scenes: Sequence[Scene], epochs: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    chosen_scenes = [scene for scene in scenes for _ in range(CROPS_PER_TILE)]
    pictures = _pictures([mat for scene in chosen_scenes for mat in jittered_crops(scene, rng)])
    classes = torch.from_numpy(np.concatenate([scene.classes for scene in chosen_scenes]))
    batches = ((pictures[chosen], classes[chosen]) for chosen in _orders(len(classes), epochs, seed))
    network = build_classifier().to(memory_format=torch.channels_last)
    return fit(network, batches, nn.functional.cross_entropy, epochs * (len(classes) // BATCH), rate=6e-3)


# --- text lines --------------------------------------------------------------------------------------------------


class LineReader(nn.Module):
    """float32 N×3×32×W → N×W/8×11, W a multiple of 8; class 0 is CTC's blank, class d+1 the digit d."""

    def __init__(self) -> None:
        super().__init__()
        self.columns = nn.Sequential(
            *_stack((3, 16, 24, 24, 40), (2, 1, 2, 2)),
            *_convolution(40, 48, (4, 3), 1, (0, 1)),  # the four rows that are left become one
            nn.Dropout(0.1),
            nn.Conv2d(48, DIGITS + 1, (1, 3), padding=(0, 1)),
        )

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        return self.columns(pictures).squeeze(2).transpose(1, 2)


def padded_lines(mats: Sequence[np.ndarray], rng: np.random.Generator) -> torch.Tensor:
    """uint8 N×3×32×W, W that of the widest: the others continued by their last column, by black, or by any grey."""
    width = max(mat.shape[1] for mat in mats)
    batch = np.empty((len(mats), postprocess.LINE_HEIGHT, width), np.uint8)
    for place, mat in enumerate(mats):
        grey = mat[:, :, 0]
        fills = (grey[:, -1:], 0, rng.integers(256))
        batch[place] = fills[int(rng.integers(len(fills)))]
        batch[place, :, : grey.shape[1]] = grey
    return torch.from_numpy(batch)[:, None].expand(-1, 3, -1, -1)


def _ctc_loss(output: torch.Tensor, classes: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    steps = torch.full((len(output),), output.shape[1])
    return nn.functional.ctc_loss(output.log_softmax(2).transpose(0, 1), classes, steps, lengths, zero_infinity=True)


def train_reader(lines: Sequence[Line], epochs: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    mats = [postprocess.fit_line(line.mat()) for line in lines]

    def batch(chosen: torch.Tensor) -> Batch:
        texts = [lines[index].text for index in chosen.tolist()]
        classes = torch.tensor([int(digit) + 1 for digit in "".join(texts)])
        return padded_lines([mats[index] for index in chosen.tolist()], rng), classes, torch.tensor([*map(len, texts)])

    batches = (batch(chosen) for chosen in _orders(len(lines), epochs, seed))
    return fit(
        LineReader().to(memory_format=torch.channels_last),
        batches,
        _ctc_loss,
        epochs * (len(lines) // BATCH),
        rate=6e-3,
    )
