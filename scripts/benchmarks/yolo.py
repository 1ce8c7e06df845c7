"""A detector of YOLOv8's shapes with random weights, as an ONNX file: images 1×3×S×S to 1×84×A."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES, BINS = 80, 16
STRIDES = (8, 16, 32)
NANO = 0.25
"""The width of YOLOv8n."""
SHARE = 0.01
"""Part of the places whose best score is above 0.25: some hundred boxes before suppression, as in a street."""


def conv(inputs: int, outputs: int, size: int = 1, stride: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False),
        nn.BatchNorm2d(outputs, momentum=None),
        nn.SiLU(),
    )


class C2f(nn.Module):
    """YOLOv8's block: parts of the channels pass through ``count`` pairs of convolutions."""

    def __init__(self, inputs: int, outputs: int, count: int, has_shortcut: bool) -> None:
        super().__init__()
        half = outputs // 2
        self.first, self.last = conv(inputs, outputs), conv((2 + count) * half, outputs)
        self.pairs = nn.ModuleList(nn.Sequential(conv(half, half, 3), conv(half, half, 3)) for _ in range(count))
        self.has_shortcut = has_shortcut

    def forward(self, x: Tensor) -> Tensor:
        parts = [*self.first(x).chunk(2, 1)]
        for pair in self.pairs:
            after = pair(parts[-1])
            parts.append(parts[-1] + after if self.has_shortcut else after)
        result: Tensor = self.last(torch.cat(parts, 1))
        return result


class Pyramid(nn.Module):
    """YOLOv8's SPPF: maxima of growing neighbourhoods."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.last = conv(channels, channels // 2), conv(2 * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.first(x)]
        for _ in range(3):
            parts.append(functional.max_pool2d(parts[-1], 5, 1, 2))
        result: Tensor = self.last(torch.cat(parts, 1))
        return result


class Yolo(nn.Module):
    """YOLOv8 for square images of ``side`` pixels; ``width`` scales the channels, 0.25 for YOLOv8n."""

    def __init__(self, side: int, width: float = NANO) -> None:
        super().__init__()
        c1, c2, c3, c4, c5 = (8 * max(1, round(channels * width / 8)) for channels in (64, 128, 256, 512, 1024))
        self.start = nn.Sequential(conv(3, c1, 3, 2), conv(c1, c2, 3, 2), C2f(c2, c2, 1, True))
        self.fine = nn.Sequential(conv(c2, c3, 3, 2), C2f(c3, c3, 2, True))
        self.middle = nn.Sequential(conv(c3, c4, 3, 2), C2f(c4, c4, 2, True))
        self.coarse = nn.Sequential(conv(c4, c5, 3, 2), C2f(c5, c5, 1, True), Pyramid(c5))
        self.up4, self.up3 = C2f(c5 + c4, c4, 1, False), C2f(c4 + c3, c3, 1, False)
        self.down3, self.down4 = conv(c3, c3, 3, 2), conv(c4, c4, 3, 2)
        self.out4, self.out5 = C2f(c3 + c4, c4, 1, False), C2f(c4 + c5, c5, 1, False)
        inner, middle = c3, c3 + c3 // 4  # 64 and 80 for YOLOv8n
        self.boxes = nn.ModuleList(self._head(channels, inner, 4 * BINS) for channels in (c3, c4, c5))
        self.scores = nn.ModuleList(self._head(channels, middle, CLASSES) for channels in (c3, c4, c5))
        grids = [self._grid(side // stride) * stride for stride in STRIDES]
        strides = [torch.full((grid.shape[1],), float(stride)) for grid, stride in zip(grids, STRIDES, strict=True)]
        self.register_buffer("places", torch.cat(grids, 1)[None])
        self.register_buffer("strides", torch.cat(strides)[None, None])
        self.register_buffer("bins", torch.arange(float(BINS))[None, None, :, None])

    @staticmethod
    def _head(inputs: int, inner: int, outputs: int) -> nn.Module:
        return nn.Sequential(conv(inputs, inner, 3), conv(inner, inner, 3), nn.Conv2d(inner, outputs, 1))

    @staticmethod
    def _grid(count: int) -> Tensor:
        middles = torch.arange(count) + 0.5
        y, x = torch.meshgrid(middles, middles, indexing="ij")
        return torch.stack([x.flatten(), y.flatten()])

    def forward(self, images: Tensor) -> Tensor:
        fine = self.fine(self.start(images))
        middle = self.middle(fine)
        coarse = self.coarse(middle)
        middle = self.up4(torch.cat([functional.interpolate(coarse, scale_factor=2.0), middle], 1))
        fine = self.up3(torch.cat([functional.interpolate(middle, scale_factor=2.0), fine], 1))
        middle = self.out4(torch.cat([self.down3(fine), middle], 1))
        coarse = self.out5(torch.cat([self.down4(middle), coarse], 1))
        features = (fine, middle, coarse)
        bins = torch.cat([head(each).flatten(2) for head, each in zip(self.boxes, features, strict=True)], 2)
        scores = torch.cat([head(each).flatten(2) for head, each in zip(self.scores, features, strict=True)], 2)
        distances = (bins.view(-1, 4, BINS, bins.shape[2]).softmax(2) * self.bins).sum(2) * self.strides
        start, end = self.places - distances[:, :2], self.places + distances[:, 2:]
        return torch.cat([(start + end) / 2, end - start, scores.sigmoid()], 1)


def write_yolo(path: Path, side: int, width: float, images: Sequence[np.ndarray]) -> None:
    """Write the ONNX file of a detector that finds something in ``images`` (S×S×3 ``uint8`` RGB)."""
    torch.manual_seed(0)
    batch = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2) / 255
    model = Yolo(side, width)
    with torch.no_grad():
        model.train()(batch)  # the statistics of BatchNorm, without which deep features would all be alike
        model.eval()
        best = model(batch)[:, 4:].amax(1).flatten()
        level = torch.quantile(best[:: max(1, len(best) // 100_000)], 1 - SHARE).logit() - torch.tensor(0.25).logit()
        for head in model.scores:
            last: Any = head[-1]
            last.bias -= level
    names = {"input_names": ["images"], "output_names": ["output0"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the newer exporter needs onnxscript
        torch.onnx.export(model, (batch[:1],), str(path), dynamo=False, opset_version=17, **names)
