"""The preprocessing that belongs to weights: torchvision's evaluation transform, in its own terms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchpipe_py.export.errors import ExportError

Sides = tuple[int, int]
"""Height and width in pixels."""


@dataclass(frozen=True)
class Transform:
    """``Resize(resize)``, ``CenterCrop(crop)``, ``ToTensor``, ``Normalize(mean, std)``.

    ``resize`` is the shorter side, or height and width; ``mean`` and ``std`` are of pixels from 0 to 1.
    """

    resize: int | Sides = 256
    crop: Sides | None = (224, 224)
    interpolation: str = "bilinear"
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)

    def __post_init__(self) -> None:
        if self.crop is None and isinstance(self.resize, int):
            raise ExportError(f"--resize {self.resize}: images keep their shape; --crop says what the model takes")
        height, width = _sides(self.resize)
        if self.crop is not None and (self.crop[0] > height or self.crop[1] > width):
            raise ExportError(f"--crop {_text(_side(self.crop))}: more than --resize {_text(self.resize)} leaves")
        if not isinstance(self.resize, int) and self.interpolation != "bilinear":
            raise ExportError(f"--interpolation {self.interpolation}: to height and width it is bilinear alone")
        if max(self.mean, default=0.0) > 1 or max(self.std, default=0.0) > 1.5:
            raise ExportError("--mean, --std: of pixels from 0 to 1, as Normalize takes them; divide yours by 255")
        if 0.0 in self.std:
            raise ExportError("--std: holds a zero")

    @classmethod
    def of(cls, preset: Any) -> Transform:
        """What ``weights.transforms()`` of torchvision's classifiers gives."""
        crop = (*preset.crop_size, *preset.crop_size)[:2]
        sizes = tuple(preset.resize_size)
        resize = sizes[0] if len(sizes) == 1 else (sizes[0], sizes[1])
        mean, std = tuple(map(float, preset.mean)), tuple(map(float, preset.std))
        return cls(resize, crop, preset.interpolation.value, mean, std)

    @property
    def size(self) -> Sides:
        """Of the model's input."""
        return self.crop or _sides(self.resize)

    def __str__(self) -> str:
        crop = f", CenterCrop({_text(_side(self.crop))})" if self.crop else ""
        return f"Resize({_text(self.resize)}, {self.interpolation}){crop}, {self.normalisation()}"

    def normalisation(self) -> str:
        """In words."""
        mean, std = (", ".join(f"{value:g}" for value in values) for values in (self.mean, self.std))
        return f"mean {mean}, std {std}"

    def node(self, color: str) -> dict[str, Any]:
        """From encoded bytes to a Mat of ``size``."""
        sizes: dict[str, Any]
        if isinstance(self.resize, int):
            names, sizes = ["ResizeShorterMat"], {"size": self.resize}
        else:
            names, sizes = ["PillowResizeMat"], dict(zip(("resize_h", "resize_w"), self.resize, strict=True))
        if self.interpolation != "bilinear":
            sizes["interpolation"] = self.interpolation
        if self.crop:
            names, sizes = [*names, "CenterCropMat"], {**sizes, "crop_h": self.crop[0], "crop_w": self.crop[1]}
        return {"backend": f"S[{','.join(['DecodeMat', *names, 'cvtColorMat'])}]", **sizes, "color": color}


def _sides(size: int | Sides) -> Sides:
    return (size, size) if isinstance(size, int) else size


def _side(sides: Sides) -> int | Sides:
    return sides[0] if sides[0] == sides[1] else sides


def _text(size: int | Sides) -> str:
    return str(size) if isinstance(size, int) else f"{size[0]}x{size[1]}"
