"""``at_least``: JPEGs decoded at a fraction of their size, with every number still that of the whole image."""

from __future__ import annotations

import io
from collections import defaultdict
from contextlib import ExitStack
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from conftest import encode, picture
from kit.image_backends import Data
from kit.refusals import refusal
from PIL import Image

from torchpipe_py import DecodeError, pipe
from torchpipe_py.backends.image.decode import MatDecoder
from torchpipe_py.plan.build import plan_pipeline
from torchpipe_py.plan.sharing import engine_part, same_shared
from torchpipe_py.training.decode import Decoder, plans_of
from torchpipe_py.training.samples import Sample

SIZES = ((481, 643), (640, 480), (333, 498), (96, 118), (301, 300))
TURNS = range(1, 9)
SIDE = 48
RESIZES: dict[str, dict[str, Any]] = {
    "ResizeMat": {"resize_h": SIDE, "resize_w": SIDE + 9},
    "PillowResizeMat": {"resize_h": SIDE, "resize_w": SIDE + 9},
    "ResizeShorterMat": {"size": SIDE},
    "LetterBoxMat": {"max_h": SIDE, "max_w": SIDE, "pad_value": 0},
    "ResizePadMat": {"max_h": SIDE, "max_w": SIDE + 30, "interpolation": "area"},
}


def saved(mat: np.ndarray, turn: int = 1) -> bytes:
    """A JPEG that is shown as ``mat``, stored turned by EXIF."""
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x0112] = turn
    image = Image.fromarray(mat)
    ways = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # Image.Transpose that turns it back
    image = image.transpose(Image.Transpose(ways[turn])) if turn > 1 else image
    image.save(file, "jpeg", quality=95, exif=exif)
    return file.getvalue()


def spots(height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Two soft spots on black, one in red and one in blue, and their centres (x, y)."""
    wide = 2 * max(height, width) / SIDE
    centres = np.array([[0.3 * width, 0.31 * height], [0.72 * width, 0.69 * height]])
    ys, xs = np.arange(height)[:, None] + 0.5, np.arange(width)[None] + 0.5
    mat = np.zeros((height, width, 3), np.uint8)
    for channel, (x, y) in zip((0, 2), centres, strict=True):
        mat[:, :, channel] = 220 * np.exp(-((xs - x) ** 2 + (ys - y) ** 2) / (2 * wide**2))
    return mat, centres


def centres_in(item: Data) -> np.ndarray:
    """The centres of the spots in a result, as points of the original."""
    mat = np.where(item["result"] < 6, 0, item["result"]).astype(float)
    ys, xs = np.arange(mat.shape[0])[:, None] + 0.5, np.arange(mat.shape[1])[None] + 0.5
    found = [
        ((mat[..., c] * xs).sum() / mat[..., c].sum(), (mat[..., c] * ys).sum() / mat[..., c].sum()) for c in (0, 2)
    ]
    scale_x, scale_y, left, top = item["to_original"]
    return np.array(found) * [scale_x, scale_y] + [left, top]


def textured(height: int, width: int) -> np.ndarray:
    grain = np.random.default_rng(height).normal(0, 18, (height // 2, width // 2, 3))
    grain = cv2.resize(grain, (width, height), interpolation=cv2.INTER_CUBIC)
    return (picture(height, width) + grain).clip(0, 255).astype(np.uint8)


JPEG = encode(textured(240, 320))


def test_reduced_images_lead_back_to_the_whole_and_are_nearer_to_it() -> None:
    wrong: list[Any] = []
    distances: dict[Any, list[float]] = defaultdict(list)
    with ExitStack() as stack:
        pipes = {
            (name, color, times): stack.enter_context(
                pipe({"backend": f"S[DecodeMat,{name}]", "at_least": times, "color": color, "instance_num": 1, **keys})
            )
            for name, keys in RESIZES.items()
            for color in (("rgb", "gray") if name == "ResizeMat" else ("rgb",))
            for times in ("", "1x", "2x")
        }
        for turn in TURNS:
            height, width = SIZES[turn % len(SIZES)]
            mat, centres = spots(height, width)
            spot, texture = saved(mat, turn), saved(textured(height, width), turn)
            whole = MatDecoder("rgb")(texture)
            for name, color, times in pipes:
                case, run = (height, width, turn, name, color, times), pipes[name, color, times]
                first: Data = {"data": texture}
                run(first)
                if not times:
                    full = first
                same = [key for key in ("image_size", "to_original") if first[key] != full[key]]
                if same or first["image_size"] != (height, width) or first["result"].shape != full["result"].shape:
                    wrong.append((case, same, first["result"].shape))
                if "inverse_trans" in full and first["inverse_trans"](7, 9) != full["inverse_trans"](7, 9):
                    wrong.append((case, "inverse_trans"))
                if color == "gray":
                    continue
                second: Data = {"data": spot}
                run(second)
                if np.abs(centres_in(second) - centres).max() > 0.5:
                    wrong.append((case, centres_in(second).round(2).tolist(), centres.tolist()))
                if name in ("ResizeMat", "PillowResizeMat"):
                    ideal = cv2.resize(whole, first["result"].shape[1::-1], interpolation=cv2.INTER_AREA)
                    distances[name, times].append(float(np.abs(first["result"].astype(int) - ideal).mean()))
    assert wrong == []
    levels = {key: float(np.mean(each)) for key, each in distances.items()}
    assert levels["ResizeMat", "1x"] < 0.8 * levels["ResizeMat", ""], levels
    assert levels["ResizeMat", "2x"] < 0.8 * levels["ResizeMat", ""], levels
    assert max(levels["PillowResizeMat", times] for times in ("1x", "2x")) < 0.8 * levels["ResizeMat", ""], levels


def test_scale_is_the_smallest_that_is_large_enough() -> None:
    decode, wrong = MatDecoder("bgr").decode, []
    for height, width in SIZES:
        files = {turn: saved(picture(height, width), turn) for turn in (1, 3, 5, 6)}
        for least in (
            (48, 57),
            (height, width),
            (height + 1, 1),
            (height // 2, width // 2),
            (-(-height // 4), 1),
            (1, 1),
        ):
            fits = [by for by in (8, 4, 2, 1) if height >= by * least[0] and width >= by * least[1]] or [1]
            for turn, file in files.items():
                by = next(by for by in (*fits, 1) if turn in (1, 5) or not (height % by or width % by))
                mat, size, reduction = decode(file, lambda *_: least)  # noqa: B023
                if (size, reduction, mat.shape[:2]) != ((height, width), by, (-(-height // by), -(-width // by))):
                    wrong.append((height, width, least, turn, size, reduction, mat.shape))
    assert wrong == []


def test_other_formats_and_frames_stay_whole() -> None:
    mat = textured(300, 400)
    buffer = io.BytesIO()
    Image.fromarray(mat).convert("CMYK").save(buffer, "jpeg")
    config = {"backend": "S[DecodeMat,ResizeMat]", "resize_h": 30, "resize_w": 40}
    with pipe(config) as full, pipe({**config, "at_least": "1x"}) as reduced:
        for data in (encode(mat, ".png"), encode(mat, ".webp"), buffer.getvalue(), mat):
            results = [run({"data": data})["result"] for run in (full, reduced)]
            assert np.array_equal(*results)
        jpeg = encode(mat)
        assert not np.array_equal(full({"data": jpeg})["result"], reduced({"data": jpeg})["result"])


def test_damaged_files_have_the_same_outcome_at_any_size() -> None:
    rng, decode, differing = np.random.default_rng(0), MatDecoder("bgr").decode, []
    mat = textured(120, 160)
    progressive = encode(mat, ".jpg", cv2.IMWRITE_JPEG_PROGRESSIVE, 1)
    for file in (encode(mat), progressive, encode(mat[:, :, 0])):
        for _ in range(100):
            data = bytearray(file[: rng.integers(2, len(file))] if rng.random() < 0.3 else file)
            for place in rng.integers(0, len(data), rng.integers(0, 6)):
                data[place] = rng.integers(256)
            outcomes = []
            for least in (None, (15, 20)):
                try:
                    outcomes.append(decode(bytes(data), least and (lambda *_: least)).size)  # noqa: B023
                except DecodeError:
                    outcomes.append(None)
            if outcomes[0] != outcomes[1]:
                differing.append((bytes(data), outcomes))
    assert differing == []


@pytest.mark.parametrize("isolation", ["none", "process"])
def test_nodes_after_the_decoder_resize_for_it(isolation: str) -> None:
    data = encode(textured(960, 1280))
    tables: dict[str, Any] = {
        "decode": {"backend": "S[DecodeMat,cvtColorMat]", "color": "rgb", "at_least": "1x", "next": "small,large"},
        "small": {"backend": "S[Identity,LetterBoxMat]", "max_h": 60, "max_w": 80, "next": "end"},
        "large": {"backend": "ResizeMat", "resize_h": 200, "resize_w": 300, "next": "end", "instance_num": 1},
        "end": {"map": "small[result:data,to_original:small],large[to_original:large,image_size:image_size]"},
    }
    tables["decode"] |= {"decode_isolation": isolation, "instance_num": 1}
    alone = {"backend": "S[DecodeMat,LetterBoxMat]", "max_h": 240, "max_w": 320, "color": "rgb", "at_least": "1x"}
    with pipe(tables) as run, pipe(alone) as one:
        run(item := {"data": data})
        quarter = one({"data": data})["result"]  # what both nodes get: a quarter, as the larger one needs it
    assert (item["small"], item["large"]) == ((16.0, 16.0, 0.0, 0.0), (1280 / 300, 4.8, 0.0, 0.0))
    assert item["image_size"] == (960, 1280)
    assert np.array_equal(item["result"], cv2.resize(quarter, (80, 60)))


def test_shared_resize_knows_of_the_decoder_of_the_worker() -> None:
    tables = {
        "decode": {"backend": "DecodeMat", "at_least": "1x", "next": "model"},
        "model": {"backend": "S[ResizeMat,Identity]", "shared": True, "resize_h": 8, "resize_w": 8},
    }
    resize = engine_part(plan_pipeline(tables)).plans["model"].backends[0].children[0]
    assert resize.params["takes_reduced"]
    whole = {**tables, "decode": {"backend": "DecodeMat", "next": "model"}}
    assert same_shared(tables, tables)
    assert not same_shared(tables, whole)  # after a reload the engine process needs the other plan


def test_training_gets_the_pixels_that_are_served() -> None:
    config = {"backend": "S[DecodeMat,ResizeMat,Mat2Tensor]", "resize_h": 20, "resize_w": 30, "device": "cpu"}
    images = {}
    for times in ("", "1x"):
        keys = {**config, "at_least": times, "instance_num": 1}
        with pipe(keys) as run:
            served = run({"data": JPEG})["result"]
        loader = Decoder(plans_of(keys, [torch.device("cpu")]))
        try:
            [sample] = loader.start([Sample(0, JPEG)])()
        finally:
            loader.close()
        assert torch.equal(sample.image, served)
        images[times] = served
    assert not torch.equal(images[""], images["1x"])


NO_RESIZE = "gets the image before a resize of Mats to a size that the configuration sets"
SIZE: dict[str, Any] = {"resize_h": 8, "resize_w": 8}
RESIZE = {"backend": "ResizeMat", **SIZE}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "DecodeMat": ({}, "nothing resizes the result of 'a'"),
    "S[DecodeMat,CenterCropMat,ResizeMat]": ({**SIZE, "crop_h": 9, "crop_w": 9}, f"CenterCropMat {NO_RESIZE}"),
    "S[DecodeMat,CropMat,ResizeMat]": (SIZE, f"CropMat {NO_RESIZE}"),
    "S[DecodeMat,Mat2Tensor,ResizeTensor]": (SIZE, f"Mat2Tensor {NO_RESIZE}"),
    "S[DecodeMat,DynamicResizeMat]": ({}, f"DynamicResizeMat {NO_RESIZE}"),
    "S[DecodeMat,(Run)ResizeMat]": (SIZE, "the filter before ResizeMat may skip it"),
    "S[DecodeMat,ResizeMat]": ({**SIZE, "keep_original": True}, "ResizeMat with keep_original keeps the image"),
    "S[DecodeTensor,ResizeTensor]": (SIZE, "DecodeTensor decodes whole images; DecodeMat takes it"),
    "S[DecodeMat]": ({"next": "b"}, "nothing resizes the result of 'b'"),
    "S[Identity,DecodeMat]": ({"next": "c"}, "'c', which gets it, has a filter"),
    "S[DecodeMat,Identity]": ({"next": "d"}, "the map of 'e' reads the result of 'a'"),
}
AFTER: dict[str, dict[str, Any]] = {
    "b": {"b": {"backend": "Identity"}},
    "c": {"c": {**RESIZE, "filter": "Run"}},
    "d": {"d": {**RESIZE, "next": "e"}, "e": {"backend": "Identity", "map": "a[result:data]"}},
}


@pytest.mark.parametrize("backend", REFUSED)
def test_refuses_to_reduce_an_image_that_is_not_just_resized(backend: str) -> None:
    keys, problem = REFUSED[backend]
    message = refusal({"a": {"backend": backend, "at_least": "1x", **keys}, **AFTER.get(keys.get("next", ""), {})})
    assert "'a': key 'at_least'" in message
    assert problem in message
