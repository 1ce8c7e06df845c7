"""The recipe of two stages: letterbox, a detector, crops of the original. References are by NumPy and Pillow."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from kit.cells import check_each
from kit.detectors import constant_model
from PIL import Image, ImageOps

from torchpipe_py import InvalidRequest, pipe

SIDE = 64
IN_PADDING, OVER_THE_EDGE = [31.5, 1.0, 20, 2], [60.0, 32.0, 30, 24]
"""Centre and sides in the model's input: without a pixel of a picture that is wide, and cut off on the right."""
CENTRES = [[32.0, 32.0, 20, 12], OVER_THE_EDGE, IN_PADDING, [8.4, 30.2, 9.1, 7.7]]
SCORES = [0.9, 0.8, 0.7, 0.6]
Picture = tuple[int, int, int, str]
PICTURES: list[Picture] = [
    (h, w, turn, kind)
    for turn, (h, w) in enumerate([(48, 96), (31, 77), (90, 40), (7, 150), (64, 64), (101, 33), (20, 37), (3, 60)], 1)
    for kind in ("PNG", "JPEG")
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A detector of four boxes at the same places of each picture, and one of none."""
    folder = tmp_path_factory.mktemp("two_stages")
    output = np.zeros((1, 5, 84), np.float32)
    output[0, :4, :4], output[0, 4, :4] = np.transpose(CENTRES), SCORES
    constant_model(folder / "none.onnx", {"output0": np.zeros_like(output)})
    return constant_model(folder / "found.onnx", {"output0": output}), str(folder / "none.onnx")


def encoded(picture: Picture) -> bytes:
    """A file whose EXIF turns it."""
    height, width, turn, kind = picture
    pixels = np.random.default_rng(turn).integers(0, 256, (height, width, 3), np.uint8)
    exif = Image.Exif()
    exif[0x112] = turn
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, exif=exif.tobytes())
    return file.getvalue()


def expected(content: bytes) -> tuple[np.ndarray, list[np.ndarray | None]]:
    """Boxes on the picture as Pillow shows it, and the crop of each; ``None`` for one without a pixel."""
    pixels = np.array(ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB"))
    height, width = pixels.shape[:2]
    gain = min(SIDE / height, SIDE / width)
    new_h, new_w = (max(1, round(side * gain)) for side in (height, width))
    pads = np.array([(SIDE - new_w) // 2, (SIDE - new_h) // 2] * 2)
    centred = np.array(CENTRES)
    corners = np.concatenate([centred[:, :2] - centred[:, 2:] / 2, centred[:, :2] + centred[:, 2:] / 2], 1)
    boxes = np.clip((corners - pads) / ([new_w / width, new_h / height] * 2), 0, [width, height] * 2)
    crops = []
    for left, top, right, bottom in np.rint(boxes.astype(np.float32)).astype(int).tolist():
        crop = pixels[top:bottom, left:right]
        crops.append(crop if crop.size else None)
    return boxes, crops


def tables(model: str, on_error: str) -> dict[str, Any]:
    letterbox = {"backend": "S[DecodeMat,LetterBoxMat,cvtColorMat]", "max_h": SIDE, "max_w": SIDE, "color": "rgb"}
    detect = {"backend": "OnnxTensor", "model": model, "postprocessor": "YoloBoxes", "max": 4, "next": "each"}
    each = {"backend": "MapReduce", "jump": "crop", "split": "box", "map": "detect[original:data,result:box]"}
    return {
        "decode": {**letterbox, "keep_original": True, "next": "detect"},
        "detect": detect,
        "each": {**each, "on_error": on_error},
        "crop": {"backend": "CropMat"},
    }


@pytest.mark.parametrize("on_error", ["skip", "none", "fail"])
def test_each_box_gets_its_crop_of_the_original_or_what_on_error_says(on_error: str, models: tuple[str, str]) -> None:
    files = {picture: encoded(picture) for picture in PICTURES}
    items: dict[Picture, dict[str, Any]] = {
        picture: {"data": file, "node_name": "decode"} for picture, file in files.items()
    }
    with pipe(tables(models[0], on_error)) as run:
        run([*items.values()])

    def check(picture: Picture) -> None:
        item, (boxes, crops) = items[picture], expected(files[picture])
        kept = [index for index, crop in enumerate(crops) if crop is not None]
        if on_error == "fail" and len(kept) < len(crops):
            assert "result" not in item
            assert isinstance(item["error"], InvalidRequest)
            first = next(index for index, crop in enumerate(crops) if crop is None)
            assert f"element [{first}] of {len(crops)}: box " in str(item["error"])
            return
        shown = kept if on_error == "skip" else range(len(crops))
        np.testing.assert_allclose(item["box"].boxes, boxes[[*shown]], atol=1e-3)
        np.testing.assert_allclose(item["box"].scores, np.float32(SCORES)[[*shown]])
        assert len(item["result"]) == len(shown)
        for found, wanted in zip(item["result"], [crops[index] for index in shown], strict=True):
            assert (found is None) == (wanted is None)
            assert wanted is None or np.array_equal(found, wanted)

    check_each(PICTURES, check)


def test_pictures_without_a_box_get_empty_lists(models: tuple[str, str]) -> None:
    for on_error in ("skip", "none", "fail"):
        with pipe(tables(models[1], on_error)) as run:
            run(data := {"data": encoded(PICTURES[0]), "node_name": "decode"})
        assert (len(data["box"]), data["result"]) == (0, [])
