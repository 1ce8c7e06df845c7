"""A stand-in for torchvision, which need not be installed: one architecture with one set of weights."""

from __future__ import annotations

import enum
import sys
from collections import OrderedDict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
FILE = "tiny-01234567.pth"


def tiny(classes: int = 1000, seed: int = 0) -> nn.Module:
    """For images of any size; layers are called as in torchvision's ResNet."""
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


class TinyWeights(enum.Enum):
    V1 = "V1"
    DEFAULT = V1

    @property
    def url(self) -> str:
        return f"https://weights.invalid/{FILE}"

    @property
    def meta(self) -> dict[str, Any]:
        return {"categories": [f"thing {index}" for index in range(1000)]}

    def transforms(self) -> SimpleNamespace:
        sizes = {"resize_size": [40], "crop_size": [32]}
        return SimpleNamespace(**sizes, mean=MEAN, std=STD, interpolation=Interpolation.BILINEAR)

    def __str__(self) -> str:
        return f"Tiny_Weights.{self.name}"


def use_small_zoo(monkeypatch: pytest.MonkeyPatch, downloaded: nn.Module | None = None) -> None:
    """Let ``torchvision.models`` be this; without ``downloaded`` it cannot fetch weights."""

    def get_model(name: str, weights: Any = None, num_classes: int = 1000) -> nn.Module:
        assert name == "tiny"
        if weights is None:
            return tiny(num_classes)
        if downloaded is None:
            raise OSError("no way to\n  weights.invalid")
        return downloaded

    def get_weight(name: str) -> TinyWeights:
        if name != "Tiny_Weights.V1":
            raise ValueError(f"Couldn't parse {name}")
        return TinyWeights.V1

    models = ModuleType("torchvision.models")
    models.list_models = lambda module: ["tiny"]  # type: ignore[attr-defined]
    models.get_model = get_model  # type: ignore[attr-defined]
    models.get_model_weights = lambda name: TinyWeights  # type: ignore[attr-defined]
    models.get_weight = get_weight  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.models", models)


def saved(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path
