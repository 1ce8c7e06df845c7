"""``datasets`` and ``transforms``: torchvision's, or the few that a test needs, with the same names and arguments.

A Tensor has any leading dimensions before C×H×W. A transform of these also takes a ``PIL.Image`` where the test's list
gives it one. Random ones draw from PyTorch's global generator, as torchvision's do.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from PIL import Image, ImageEnhance

from torchpipe_py.training import ImageFolder, TensorToTensor

HAS_TORCHVISION = importlib.util.find_spec("torchvision") is not None


class Compose:
    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self.transforms = transforms

    def __call__(self, image: Any) -> Any:
        for transform in self.transforms:
            image = transform(image)
        return image


class RandomCrop:
    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        top, left = (int(torch.randint(side - self.size + 1, ())) for side in image.shape[-2:])
        return image[..., top : top + self.size, left : left + self.size]


class RandomHorizontalFlip:
    def __init__(self, p: float) -> None:
        self.p = p

    def __call__(self, image: Any) -> Any:
        if float(torch.rand(())) >= self.p:
            return image
        is_tensor = isinstance(image, torch.Tensor)
        return image.flip(-1) if is_tensor else image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


class RandomGrayscale:
    def __init__(self, p: float) -> None:
        self.p = p

    def __call__(self, image: Any) -> Any:
        if float(torch.rand(())) >= self.p:
            return image
        if isinstance(image, Image.Image):
            return image.convert("L").convert("RGB")
        weights = torch.tensor([0.299, 0.587, 0.114], device=image.device).view(3, 1, 1)
        gray = (image * weights).sum(-3, keepdim=True).to(image.dtype)
        return gray.expand(image.shape)


class RandomRotation:
    """Rotate by up to ``degrees`` either way; nearest neighbours, black corners."""

    def __init__(self, degrees: float) -> None:
        self.degrees = degrees

    def __call__(self, image: Any) -> Any:
        angle = self.degrees * (2 * float(torch.rand(())) - 1)
        if isinstance(image, Image.Image):
            return image.rotate(angle)
        turn = torch.deg2rad(torch.tensor(angle))
        cos, sin = float(turn.cos()), float(turn.sin())
        matrix = torch.tensor([[[cos, -sin, 0.0], [sin, cos, 0.0]]], device=image.device)
        grid = torch.nn.functional.affine_grid(matrix, list(image.shape), align_corners=False)
        floats = image.to(torch.float32)
        return torch.nn.functional.grid_sample(floats, grid, "nearest", align_corners=False).to(image.dtype)


class ColorJitter:
    """Brightness, contrast and saturation; the hue stays."""

    def __init__(self, *ranges: float) -> None:
        self.ranges = ranges[:3]

    def __call__(self, image: Any) -> Any:
        brightness, contrast, saturation = (1 + each * (2 * float(torch.rand(())) - 1) for each in self.ranges)
        if isinstance(image, Image.Image):
            image = ImageEnhance.Brightness(image).enhance(brightness)
            image = ImageEnhance.Contrast(image).enhance(contrast)
            return ImageEnhance.Color(image).enhance(saturation)
        floats = image.to(torch.float32) * brightness
        for share, dims in ((contrast, (-3, -2, -1)), (saturation, (-3,))):
            mean = floats.mean(dims, keepdim=True)
            floats = mean + share * (floats - mean)
        return floats.clamp(0, 255).to(image.dtype)


class Normalize:
    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean, self.std = mean, std

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        mean, std = (torch.tensor(each, device=image.device).view(-1, 1, 1) for each in (self.mean, self.std))
        return (image - mean) / std


if HAS_TORCHVISION:
    from torchvision import datasets, transforms
else:
    datasets = SimpleNamespace(ImageFolder=ImageFolder)
    here = (Compose, RandomCrop, RandomHorizontalFlip, RandomGrayscale, RandomRotation, ColorJitter, Normalize)
    transforms = SimpleNamespace(**{each.__name__: each for each in here})
    transforms.ToPILImage, transforms.ToTensor = lambda: Image.fromarray, TensorToTensor
