"""Networks to train."""

from __future__ import annotations

import torch
from torch import nn

from torchpipe_py.errors import nearest
from torchpipe_py.training import TrainingError
from torchpipe_py.training.errors import library


def make_model(arch: str, classes: int, seed: int) -> nn.Module:
    """``"small"``: four convolutions, for images of any size; otherwise torchvision's classifier of that name.

    The same weights for the same seed, in any process; ``TrainingError`` for a name that torchvision does not know.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if arch == "small":
            return _small(classes)
        models = library("torchvision.models", "torchvision", f"--arch {arch}")
        if arch not in models.list_models(module=models):
            raise TrainingError(
                f"--arch {arch}: no such classifier; {nearest(arch, ['small', *models.list_models(module=models)])}"
            )
        model: nn.Module = models.get_model(arch, num_classes=classes)
        return model


def _small(classes: int) -> nn.Module:
    layers: list[nn.Module] = []
    width = 3
    for wider in (16, 32, 64, 64):
        layers += [nn.Conv2d(width, wider, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(wider), nn.ReLU()]
        width = wider
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))
