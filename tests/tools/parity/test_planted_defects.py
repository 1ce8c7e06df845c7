"""``compare`` with a function in PyTorch: a sound configuration keeps the tolerance, each planted defect does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from conftest import Register, encode
from kit.models import torch_model
from kit.oriented import EXIF_6, TAGGED
from PIL import Image, ImageOps

from torchpipe_py import ItemBackend
from torchpipe_py.tools.compare_models.images import Pictures, ResultSource
from torchpipe_py.tools.compare_models.run import Comparison, compare
from torchpipe_py.tools.compare_models.tolerance import Verdict, read_tolerance

Data = dict[str, Any]

SIDE = 48
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
LABELS = ("cat", "dog", "owl", "bee")


# -- small networks ---------------------------------------------------------------------------------------------------


class Net(torch.nn.Module):
    """Features of N×3×48×48, on which the outputs of a kind depend."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv = torch.nn.Conv2d(3, 8, 5, stride=2, padding=2)
        self.fc = torch.nn.Linear(72, 4)

    def features(self, images: torch.Tensor) -> torch.Tensor:
        return self.conv(images).relu()

    def vectors(self, images: torch.Tensor) -> torch.Tensor:
        pooled = torch.nn.functional.adaptive_avg_pool2d(self.features(images), 3)
        return self.fc(pooled.flatten(1))


class Classifier(Net):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return 4 * self.vectors(images)


class Embedder(Net):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.vectors(images)


class Segmenter(Net):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.features(images)[:, :4]


class Finder(Net):
    """Rows N×4×6: the place where each feature is strongest, its strength as score, its number as class."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found = self.features(images)[:, :4]
        weights = (2 * found).flatten(2).softmax(2)
        places = torch.arange(24, device=images.device).float() * 2
        x = (weights.unflatten(2, (24, 24)).sum(2) * places).sum(2, keepdim=True)
        y = (weights.unflatten(2, (24, 24)).sum(3) * places).sum(2, keepdim=True)
        score = 0.5 + 0.5 * torch.tanh((weights * found.flatten(2)).sum(2, keepdim=True) / 4)
        classes = torch.arange(4, device=images.device).float().reshape(1, 4, 1).expand(x.shape[0], 4, 1)
        return torch.cat([x - 8, y - 8, x + 8, y + 8, score, classes], 2)


# -- the reference ----------------------------------------------------------------------------------------------------


def letterboxed(path: str) -> tuple[torch.Tensor, list[float], list[int], tuple[int, int]]:
    """The normalised input as Ultralytics makes it, its scales, what is padded left and top, the size; x before y."""
    picture = np.asarray(ImageOps.exif_transpose(Image.open(path)).convert("RGB"))
    height, width = picture.shape[:2]
    scale = min(SIDE / height, SIDE / width)
    new = round(width * scale), round(height * scale)
    left, top = (SIDE - new[0]) / 2, (SIDE - new[1]) / 2
    first = round(left - 0.1), round(top - 0.1)
    canvas = np.full((SIDE, SIDE, 3), 114, np.uint8)
    canvas[first[1] : first[1] + new[1], first[0] : first[0] + new[0]] = cv2.resize(picture, new)
    tensor = torch.from_numpy((canvas.astype(np.float32) - np.float32(MEAN)) / np.float32(STD))
    return tensor.permute(2, 0, 1)[None], [new[0] / width, new[1] / height], list(first), (width, height)


def predict_with(kind: str, net: Any) -> Callable[[str], Any]:
    @cache
    def predict(path: str) -> Any:
        images, scales, padding, size = letterboxed(path)
        with torch.inference_mode():
            output = net(images)
        if kind == "classes":
            score, index = output.softmax(1).max(1)
            return LABELS[int(index)], float(score)
        if kind == "masks":
            return output.argmax(1)
        if kind == "embeddings":
            return output
        boxes = (output[0, :, :4] - torch.tensor(padding * 2)) / torch.tensor(scales * 2)
        boxes = torch.minimum(boxes.clamp(min=0), torch.tensor(size * 2))
        return {"boxes": boxes, "scores": output[0, :, 4], "labels": [LABELS[int(each)] for each in output[0, :, 5]]}

    return predict


# -- configurations with a defect -------------------------------------------------------------------------------------


def hide_exif(data: bytes) -> bytes:
    return data.replace(b"Exif\0\0", b"none\0\0")


def shift_a_pixel(mat: np.ndarray) -> np.ndarray:
    return np.roll(mat, 1, 1)


def shift_half_a_pixel(mat: np.ndarray) -> np.ndarray:
    """As a resize does that takes corners for the middles of pixels."""
    moved = np.float32([[1, 0, 0.5], [0, 1, 0.5]])
    return cv2.warpAffine(mat, moved, mat.shape[1::-1], borderMode=cv2.BORDER_REPLICATE)


def nearest_chroma(mat: np.ndarray) -> np.ndarray:
    """Colours for squares of four pixels, as a decoder gives them that does not smooth chroma."""
    whole = cv2.cvtColor(mat, cv2.COLOR_BGR2YCrCb)
    small = cv2.resize(whole, (mat.shape[1] // 2, mat.shape[0] // 2), interpolation=cv2.INTER_AREA)
    large = cv2.resize(small, mat.shape[1::-1], interpolation=cv2.INTER_NEAREST)
    whole[:, :, 1:] = large[:, :, 1:]
    return cv2.cvtColor(whole, cv2.COLOR_YCrCb2BGR)


def backend_of(change: Callable[[Any], Any]) -> type[ItemBackend]:
    """A backend that changes ``data``, and keeps every other key."""

    class Changed(ItemBackend):
        """Changes data."""

        def forward_item(self, item: Data) -> None:
            item["result"] = change(item["data"])

    return Changed


def defects(sound: Data, folder: Path, net: Any, names: Mapping[Any, str]) -> Iterator[tuple[str, Data]]:
    """The ten, each as a changed configuration; of results without labels nine.

    ``names`` are those of the backends that change images.
    """

    def through(before: str, after: str) -> str:
        return str(sound["backend"]).replace(before, after)

    yield "BGR for RGB", {**sound, "color": "bgr"}
    yield "nearest for linear", {**sound, "interpolation": "nearest"}
    shifted = through("LetterBoxMat", f"LetterBoxMat,{names[shift_a_pixel]}")
    yield "letterbox offset by a pixel", {**sound, "backend": shifted}
    yield "mean forgotten", {key: value for key, value in sound.items() if key != "mean"}
    yield "EXIF ignored", {**sound, "backend": through("DecodeMat", f"{names[hide_exif]},DecodeMat")}
    half = through("DecodeMat", f"DecodeMat,{names[shift_half_a_pixel]}")
    yield "half-pixel shift", {**sound, "backend": half}
    chroma = through("DecodeMat", f"DecodeMat,{names[nearest_chroma]}")
    yield "chroma nearest", {**sound, "backend": chroma}
    yield "std in place of 1/std", {**sound, "std": ", ".join(str(1 / value) for value in STD)}
    if "labels" in sound:
        (folder / "other.txt").write_text("\n".join([*LABELS[1:], LABELS[0]]))
        yield "wrong label order", {**sound, "labels": str(folder / "other.txt")}
    with torch.no_grad():
        net.conv.weight += 0.02 * torch.randn_like(net.conv.weight) * net.conv.weight.abs().mean()
    yield "stale engine", {**sound, **torch_model(folder / "stale.pt", net), "backend": sound["backend"]}


KINDS: Mapping[str, tuple[type[Net], str, str]] = {
    "classes": (Classifier, "SoftmaxMax", "top1=0.9, score=0.0001, images=0.9"),
    "detections": (Finder, "EndToEndBoxes", "missing=0.1, additional=0.1, score=0.0001, box=0.02, images=0.9"),
    "masks": (Segmenter, "ArgMax", "iou=0.999, images=0.9"),
    "embeddings": (Embedder, "L2Normalize", "cosine=0.99999, images=0.9"),
}


@pytest.fixture
def pictures(tmp_path: Path) -> Pictures:
    """48 colourful JPEGs of many sizes with subsampled chroma, that are to be turned."""
    folder = tmp_path / "images"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for index in range(48):
        height, width = rng.integers(60, 110, 2).tolist()
        coarse = rng.integers(0, 256, (height // 6, width // 6, 3), np.uint8)
        mat = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)
        data = TAGGED["jpeg"](encode(mat), EXIF_6, None)
        (folder / f"{index}.jpg").write_bytes(data)
    return Pictures(str(folder))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("kind", ["classes", *(pytest.param(each, marks=pytest.mark.slow) for each in [*KINDS][1:])])
def test_finds_each_planted_defect(tmp_path: Path, pictures: Pictures, register: Register, kind: str) -> None:
    make, postprocessor, limits = KINDS[kind]
    net, tolerance = make().eval(), read_tolerance(limits)
    reference = ResultSource("net.py:predict", predict_with(kind, make().eval()))
    sound = {
        **torch_model(tmp_path / "net.pt", net),
        "backend": "S[DecodeMat,LetterBoxMat,cvtColorMat,Mat2Tensor,TorchTensor]",
        **{"max_h": SIDE, "max_w": SIDE, "color": "rgb", "max": 16},
        **{"mean": ", ".join(map(str, MEAN)), "std": ", ".join(map(str, STD)), "postprocessor": postprocessor},
    }
    if kind in ("classes", "detections"):
        (tmp_path / "labels.txt").write_text("\n".join(LABELS))
        sound["labels"] = str(tmp_path / "labels.txt")

    def outcome(config: Data) -> Comparison:
        return compare(reference, ResultSource("model.toml", {"model": config}), pictures, tolerance)

    found = outcome(sound)
    assert (found.verdict, found.kinds) == (Verdict.WITHIN, (kind,)), (found.findings, found.refused[:1])
    changes = (hide_exif, shift_a_pixel, shift_half_a_pixel, nearest_chroma)
    names = {change: register(backend_of(change)) for change in changes}
    verdicts = {name: outcome(config).verdict for name, config in defects(sound, tmp_path, net, names)}
    assert len(verdicts) == (10 if "labels" in sound else 9)
    assert verdicts == dict.fromkeys(verdicts, Verdict.BEYOND)
