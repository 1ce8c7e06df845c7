"""Operations on images, each with the library call that it must equal, and sizes to run them on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import cv2
import numpy as np
from conftest import picture
from PIL import Image

from kit.image_backends import FLAGS, Data, noise

Size = tuple[int, int]

RESAMPLING = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


# -- what OpenCV, Pillow, Ultralytics and torchvision do --------------------------------------------------------------


def by_opencv(mat: np.ndarray, size: Size, interpolation: str = "bilinear") -> np.ndarray:
    return np.atleast_3d(cv2.resize(mat, size[::-1], interpolation=FLAGS[interpolation]))


def by_pillow(mat: np.ndarray, size: Size, interpolation: str = "bilinear") -> np.ndarray:
    image = Image.fromarray(mat[:, :, 0] if mat.shape[2] == 1 else mat)
    return np.atleast_3d(np.asarray(image.resize(size[::-1], RESAMPLING[interpolation])))


def shorter(mat: np.ndarray, size: Size, interpolation: str) -> np.ndarray:
    """torchvision's ``Resize``: a fraction of the longer side is cut off."""
    height, width = mat.shape[:2]
    wanted = size[0], int(size[0] * width / height)
    if width < height:
        wanted = int(size[0] * height / width), size[0]
    return by_pillow(mat, wanted, interpolation)


def fitted(mat: np.ndarray, size: Size, value: int, interpolation: str = "bilinear") -> np.ndarray:
    """The reference: as large as fits, top left."""
    scale = min(size[0] / mat.shape[0], size[1] / mat.shape[1])
    inside = tuple(max(1, round(side * scale)) for side in mat.shape[:2])
    canvas = np.full((*size, mat.shape[2]), value, np.uint8)
    canvas[: inside[0], : inside[1]] = by_opencv(mat, inside, interpolation)
    return canvas


def letter_box(mat: np.ndarray, size: Size) -> np.ndarray:
    """The reference, by the formulas of Ultralytics' LetterBox."""
    height, width = mat.shape[:2]
    scale = min(size[0] / height, size[1] / width)
    new_h, new_w = max(1, round(height * scale)), max(1, round(width * scale))
    dh, dw = (size[0] - new_h) / 2, (size[1] - new_w) / 2
    borders = round(dh - 0.1), round(dh + 0.1), round(dw - 0.1), round(dw + 0.1)
    resized = cv2.resize(mat, (new_w, new_h), interpolation=cv2.INTER_LINEAR)
    return np.atleast_3d(cv2.copyMakeBorder(resized, *borders, cv2.BORDER_CONSTANT, value=[114] * 4))


def middle(mat: np.ndarray, size: Size) -> np.ndarray:
    """torchvision's ``center_crop``: padded first, then cut."""
    for axis, wanted in enumerate(size):
        missing = max(0, wanted - mat.shape[axis])
        pads = [(0, 0)] * 3
        pads[axis] = missing // 2, (missing + 1) // 2
        mat = np.pad(mat, pads)
        start = round((mat.shape[axis] - wanted) / 2)
        mat = np.take(mat, range(start, start + wanted), axis)
    return mat


def cut(mat: np.ndarray, size: Size) -> np.ndarray:
    return mat[: size[0], : size[1]]


def bordered(mat: np.ndarray, size: Size) -> np.ndarray:
    return np.pad(mat, ((size[0] % 7, 3), (0, size[1] % 5), (0, 0)), constant_values=9)


@dataclass(frozen=True)
class Case:
    """An operation with parameters, or keys of the dict, that a size gives; ``off``: how far Tensors may be from it."""

    name: str
    reference: Callable[[np.ndarray, Size], np.ndarray]
    params: Callable[[Size], Data] = lambda size: {}
    keys: Callable[[Size], Data] = lambda size: {}
    off: float = 0
    on: tuple[str, ...] = ("Mat", "Tensor")
    to_float: bool = False
    more: Data = field(default_factory=dict)

    @property
    def source(self) -> Callable[..., np.ndarray]:
        """The function that makes images: torchvision on a tensor is near to Pillow for smooth ones."""
        return picture_of if self.name == "ResizeShorter" else noise

    def __str__(self) -> str:
        return "-".join([self.name, *map(str, self.more.values())])

    def config(self, size: Size) -> Data:
        return {**self.params(size), **self.more}


def picture_of(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    return np.ascontiguousarray(picture(height, width, seed)[:, :, :channels])


def sides(height: str, width: str) -> Callable[[Size], Data]:
    return lambda size: {height: size[0], width: size[1]}


RESIZED, FITTED = sides("resize_h", "resize_w"), sides("max_h", "max_w")


SMOOTH = (("bilinear", 1), ("bicubic", 2))
PADDED = {"off": 1, "to_float": True}


def resizes(flag: str) -> Case:
    def reference(mat: np.ndarray, size: Size) -> np.ndarray:
        return by_opencv(mat, size, flag)

    on = ("Mat",) if flag == "lanczos" else ("Mat", "Tensor")
    off = 0 if flag == "nearest" else 1
    return Case("Resize", reference, RESIZED, off=off, on=on, to_float=True, more={"interpolation": flag})


def shortens(mode: str, off: int) -> Case:
    def reference(mat: np.ndarray, size: Size) -> np.ndarray:
        return shorter(mat, size, mode)

    return Case("ResizeShorter", reference, lambda size: {"size": size[0]}, off=off, more={"interpolation": mode})


def fits(value: int, flag: str = "bilinear") -> Callable[[np.ndarray, Size], np.ndarray]:
    return lambda mat, size: fitted(mat, size, value, flag)


def box(size: Size) -> Data:
    return {"box": [-0.4, 0, size[1] + 0.3, size[0]]}


def borders(size: Size) -> Data:
    return {"top": size[0] % 7, "bottom": 99, "right": size[1] % 5, "pad_value": 9}


CASES = [
    *map(resizes, FLAGS),
    Case("PillowResize", by_pillow, RESIZED),
    *(shortens(*each) for each in SMOOTH),
    Case("ResizePad", fits(7), FITTED, more={"pad_value": 7}, **PADDED),
    Case("ResizePad", fits(0, "area"), FITTED, more={"interpolation": "area"}, **PADDED),
    Case("LetterBox", letter_box, FITTED, **PADDED),
    Case("DynamicResize", by_opencv, keys=RESIZED, **PADDED),
    Case("DynamicResize", fits(9), keys=RESIZED, more={"keep_aspect": True, "pad_value": 9}, **PADDED),
    Case("CenterCrop", middle, sides("crop_h", "crop_w")),
    Case("Crop", cut, keys=box),
    Case("CopyMakeBorder", bordered, borders, keys=lambda size: {"bottom": 3}, on=("Tensor",)),
]
BACKENDS = [(case, kind) for case in CASES for kind in case.on]
ON_MATS, ON_TENSORS = ([case for case in CASES if kind in case.on] for kind in ("Mat", "Tensor"))

SIZES = [
    # given, and wanted: smaller, larger, one of each, single pixels, a side kept, as it is, a photo
    *((20, 30, 7, 11), (20, 30, 41, 67), (20, 30, 9, 67), (1, 1, 7, 5), (1, 40, 9, 3), (40, 1, 3, 9), (30, 50, 1, 1)),
    *((20, 30, 20, 7), (20, 30, 7, 30), (20, 30, 20, 30), (49, 343, 7, 49), (375, 500, 224, 224)),
]
