"""``torchpipe parity`` of exports that are right, against Ultralytics and torchvision themselves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from conftest import encode
from PIL import Image

from torchpipe_py.cli import main
from torchpipe_py.tools.export.models import find_classifier

ultralytics = pytest.importorskip("ultralytics")
torchvision = pytest.importorskip("torchvision")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::Warning")]  # of the libraries that export

SIDE = 160


def textured(height: int, width: int, seed: int) -> np.ndarray:
    """A Mat unlike itself at every place: equal scores would leave open which of two boxes is dropped."""
    coarse = np.random.default_rng(seed).integers(0, 256, (height // 5, width // 5, 3), np.uint8)
    return cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """60 JPEGs of different sizes."""
    folder = tmp_path / "images"
    folder.mkdir()
    for index in range(60):
        (folder / f"{index}.jpg").write_bytes(encode(textured(100 + 3 * index, 250 - 2 * index, index)))
    return folder


Parity = Callable[[str, Callable[[str], Any], str], dict[str, Any]]


@pytest.fixture
def parity(tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch) -> Parity:
    """Runs the command against a function; returns its JSON."""

    def run(config: str, predict: Callable[[str], Any], tolerance: str) -> dict[str, Any]:
        monkeypatch.setattr("torchpipe_py.tools.parity.command.find_function", lambda name: predict)
        out = tmp_path / "out.json"
        given = ["--img_dir", str(images), "--tolerance", tolerance, "--json", str(out)]
        status = main(["parity", config, "--against", "net.py:predict", *given])
        found: dict[str, Any] = json.loads(out.read_text())
        assert (status, found["tolerance"]["verdict"]) == (0, "within"), found["tolerance"]
        return found

    return run


def train(model: Any) -> None:
    """As if trained: batch norms know the pictures, on which scores of all sizes depend."""
    mats = np.full((8, SIDE, SIDE, 3), 114, np.uint8)
    for index, mat in enumerate(mats):
        mat[20 : 100 + 5 * index] = textured(80 + 5 * index, SIDE, index)
    inputs = torch.from_numpy(mats).permute(0, 3, 1, 2).float() / 255
    head = model.model[-1]
    with torch.no_grad():
        for norm in (each for each in model.modules() if isinstance(each, torch.nn.BatchNorm2d)):
            norm.momentum = None  # the average of all
        model.train()(inputs)
        for branch in head.cv3:
            branch[-1].bias.zero_()
        found = model.eval()(inputs)[0]
        found = found[0] if isinstance(found, (list, tuple)) else found
        logits = torch.logit(found[:, 4 : 4 + head.nc].double())
        counts = [(SIDE // stride) ** 2 for stride in (8, 16, 32)]
        for boxes, classes, part in zip(head.cv2, head.cv3, logits.split(counts, 2), strict=True):
            scale = 0.4 / float(part.std())
            classes[-1].weight *= scale
            classes[-1].bias.fill_(-2 - scale * float(part.mean()))
            boxes[-1].weight *= 3


@pytest.mark.parametrize("name", ["yolov8n", "yolov8n-seg", "yolov8n-pose"])
def test_export_of_ultralytics_gives_its_detections(
    tmp_path: Path, parity: Parity, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    yolo = ultralytics.YOLO(f"{name}.yaml")
    # Of 80 classes Ultralytics' NMS shifts boxes by up to 600,000 pixels, and rounds them to 0.06.
    yolo.model = type(yolo.model)(f"{name}.yaml", nc=1 if name.endswith("pose") else 3, verbose=False)
    train(yolo.model)
    file = str(tmp_path / "yolo.onnx")
    exported = yolo.model.fuse()
    exported.model[-1].export, exported.model[-1].format = True, "onnx"
    args = {"input_names": ["images"], "dynamic_axes": {"images": {0: "batch"}}, "opset_version": 17, "dynamo": False}
    torch.onnx.export(exported, torch.zeros(1, 3, SIDE, SIDE), file, **args)
    exported.model[-1].export = False
    kind = {"yolov8n": "YoloBoxes", "yolov8n-seg": "YoloSegments", "yolov8n-pose": "YoloPose"}[name]
    more = 'masks = "arrays"\n' if kind == "YoloSegments" else ""
    toml = tmp_path / "yolo.toml"
    toml.write_text(
        f'backend = "S[DecodeMat,LetterBoxMat,cvtColorMat,OnnxTensor]"\ncolor = "rgb"\nmax_h = {SIDE}\nmax_w = {SIDE}\n'
        f'model = "{file}"\nstd = 255\npostprocessor = "{kind}"\nmax_det = 10\n{more}'
    )

    def predict(path: str) -> Any:
        return yolo.predict(path, imgsz=SIDE, rect=False, verbose=False, retina_masks=True, max_det=10)

    limits = "score=0.0001, box=0.02, images=0.9"
    limits += {"yolov8n-seg": ", iou=0.99", "yolov8n-pose": ", keypoint=0.02"}.get(name, "")
    found = parity(str(toml), predict, limits)
    assert found["kinds"] == ["detections"]
    assert sum(image["objects"]["matched"] for image in found["images"]) > 100


def test_export_of_torchvision_gives_its_classes(tmp_path: Path, parity: Parity) -> None:
    out = str(tmp_path / "net")
    preset = ["--transforms", "ResNet18_Weights.IMAGENET1K_V1"]
    assert (
        main(["export", "resnet18", "--weights", "random", "--out", out, *preset, "--postprocessor", "SoftmaxMax"]) == 0
    )
    transform = torchvision.models.ResNet18_Weights.IMAGENET1K_V1.transforms()
    net = find_classifier("resnet18", "random", None).model.eval()

    def predict(path: str) -> Any:
        with torch.inference_mode():
            return net(transform(Image.open(path).convert("RGB"))[None])

    found = parity(f"{out}.toml", predict, "top1=0.9, score=0.0001, images=0.9")
    assert found["kinds"] == ["classes"]
    assert np.isfinite(found["measures"]["score"]["worst"])
