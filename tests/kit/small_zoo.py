"""A stand-in for torchvision, which need not be installed: one architecture with one set of weights."""

from __future__ import annotations

import enum
import sys
from collections import OrderedDict
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
FILE = "tiny-01234567.pth"


def tiny(classes: int = 1000, seed: int = 0) -> nn.Module:
    """A network for images of any size, with layer names as in torchvision's ResNet."""
    torch.manual_seed(seed)
    layers: dict[str, nn.Module] = {
        "conv1": nn.Conv2d(3, 8, 5, stride=3),
        "bn1": nn.BatchNorm2d(8),
        "relu": nn.ReLU(),
        "pool": nn.AdaptiveAvgPool2d(2),
        "flat": nn.Flatten(),
        "fc": nn.Linear(32, classes),
    }
    return nn.Sequential(OrderedDict(layers)).eval()


class Interpolation(enum.Enum):
    BILINEAR = "bilinear"


class Preset:
    """Resize(40), CenterCrop(32), ToTensor, Normalize."""

    resize_size, crop_size, interpolation = (40,), (32,), Interpolation.BILINEAR

    def __init__(self) -> None:
        self.mean, self.std = MEAN, STD

    def __call__(self, image: Image.Image) -> torch.Tensor:
        width, height = (40 * side // min(image.size) for side in image.size)
        left, top = round((width - 32) / 2), round((height - 32) / 2)
        cut = image.resize((width, height), Image.Resampling.BILINEAR).crop((left, top, left + 32, top + 32))
        pixels = torch.from_numpy(np.asarray(cut) / np.float32(255))
        return ((pixels - torch.tensor(self.mean)) / torch.tensor(self.std)).permute(2, 0, 1)


class Tiny_Weights(enum.Enum):
    V1 = "V1"
    DEFAULT = V1

    @property
    def url(self) -> str:
        return f"https://weights.invalid/{FILE}"

    @property
    def meta(self) -> dict[str, Any]:
        return {"categories": [f"thing {index}" for index in range(1000)]}

    def transforms(self) -> Preset:
        return Preset()


def use_small_zoo(monkeypatch: pytest.MonkeyPatch, downloaded: nn.Module | None = None) -> None:
    """Let ``torchvision.models`` be this; without ``downloaded`` it cannot fetch weights."""

    def get_model(name: str, weights: Any = None, num_classes: int = 1000) -> nn.Module:
        assert name == "tiny"
        if weights is None:
            return tiny(num_classes)
        if downloaded is None:
            raise OSError("no way to\n  weights.invalid")
        return downloaded

    models = ModuleType("torchvision.models")
    models.list_models = lambda module: ["tiny"]  # type: ignore[attr-defined]
    models.get_model = get_model  # type: ignore[attr-defined]
    models.get_model_weights = lambda name: Tiny_Weights  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.models", models)


def saved(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path
