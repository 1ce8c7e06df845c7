"""DecodeTensor: nvJPEG against OpenCV, what it refuses, and what it keeps."""

from __future__ import annotations

import io
from typing import Any

import cv2
import numpy as np
import psutil
import pytest
import torch
from fuzz.broken_jpegs import KINDS
from gpu.leaks import search
from kit.gpu import (
    backend_of,
    decoders,
    forward,
    gpu_bytes,
    jpeg,
    needs_gpu,
    needs_nvimgcodec,
    needs_torchvision,
    photo,
)
from PIL import Image

from torchpipe_py import DecodeError, pipe

pytestmark = [needs_gpu, pytest.mark.timeout(300)]


def by_opencv(data: bytes) -> np.ndarray:
    return cv2.cvtColor(cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)


def as_rgb(tensor: torch.Tensor) -> np.ndarray:
    assert tensor.is_cuda
    assert tensor.dtype == torch.uint8
    assert tensor.ndim == 4
    return tensor[0].permute(1, 2, 0).cpu().numpy()


def turned(orientation: int) -> dict[str, Any]:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return {"exif": exif, "subsampling": 0}


@decoders
@pytest.mark.parametrize("color", ["rgb", "bgr"])
@pytest.mark.parametrize(
    "options",
    [
        {"subsampling": 0},
        {"subsampling": 0, "progressive": True},
        {"mode": "L"},
        {"subsampling": 0, "quality": 40},
        {"subsampling": 0, "restart_marker_rows": 1},
        *map(turned, range(2, 9)),
    ],
    ids=" ".join,
)
def test_full_chroma_is_opencvs_within_three_levels(options: dict[str, Any], color: str, decoder: str) -> None:
    data = jpeg(photo(123, 211, 0), **options)
    config = {"backend": "DecodeTensor", "color": color, "decoder": decoder, "unchecked": "progressive" in options}
    with backend_of(config) as backend:
        (item,) = forward(backend, [data])
    assert item["color"] == color
    found = as_rgb(item["result"])[:, :, :: 1 if color == "rgb" else -1].astype(int)
    assert found.shape == by_opencv(data).shape
    assert np.abs(found - by_opencv(data)).max() <= 3


@decoders
@pytest.mark.parametrize("subsampling", [1, 2])
def test_subsampled_chroma_is_near_opencvs(subsampling: int, decoder: str) -> None:
    """Of noise too where nvImageCodec decodes, which smooths chroma as OpenCV does."""
    smooth = cv2.GaussianBlur(photo(200, 300, 0), (0, 0), 4)
    rough = [
        np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8) for size in ((16, 16), (63, 101), (375, 500))
    ]
    for mat in [smooth, *(rough if decoder == "nvimgcodec" else [])]:
        data = jpeg(mat, subsampling=subsampling)
        with backend_of({"backend": "DecodeTensor", "decoder": decoder}) as backend:
            (item,) = forward(backend, [data])
        differences = np.abs(as_rgb(item["result"]).astype(int) - by_opencv(data))
        assert differences.mean() < (3 if mat is smooth else 0.1)
        assert mat is smooth or differences.max() <= 2


@needs_nvimgcodec
def test_nvimgcodec_decodes_batch_after_batch_as_it_decodes_one_image() -> None:
    """Whatever else is in its batch: images of other sizes and of other kinds, and broken ones."""
    sizes = [(90, 130)] * 8 + [(130, 90)] * 4 + [(375, 500)] * 4 + [(33, 17), (900, 1200)]
    images = [jpeg(photo(*size, number), subsampling=0) for number, size in enumerate(sizes)]
    images[3] = jpeg(photo(90, 130, 3), subsampling=0, progressive=True)  # the engines do not take it
    images[4] = jpeg(photo(90, 130, 4), mode="L")
    images += [jpeg(photo(90, 130, 5), subsampling=1), jpeg(photo(95, 125, 6))]
    config: dict[str, Any] = {"backend": "DecodeTensor", "decoder": "nvimgcodec", "unchecked": True}
    with backend_of(config) as backend:
        alone = [forward(backend, [data])[0]["result"] for data in images]
    for data, image in zip(images[:-2], alone, strict=False):
        assert np.abs(as_rgb(image).astype(int) - by_opencv(data)).max() <= 3
    broken = len(images)
    images.append(images[12][:2000] + images[12][-2:])
    same, turned, photos = list(range(8)), [0, 8, 1, 9, 2, 10, 3, 11], [12, 13, 14, 15]
    batches = [same, same[::-1], [7], turned, turned[::-1], photos, same, [16, broken, 5, 17], photos[::-1], same]
    rng = np.random.default_rng(0)
    batches += [list(rng.integers(0, broken + 1, rng.integers(1, 9))) for _ in range(40)]
    with backend_of({**config, "max": 8}) as backend:
        # All are kept to the end: a later batch is not decoded into what an earlier one gave.
        decoded = [forward(backend, [images[number] for number in batch]) for batch in batches]
    for batch, items in zip(batches, decoded, strict=True):
        for number, item in zip(batch, items, strict=True):
            assert number == broken or torch.equal(item["result"], alone[number])


@pytest.mark.parametrize(
    "decoder",
    [
        pytest.param("torchvision", marks=needs_torchvision),
        pytest.param("nvimgcodec", marks=needs_nvimgcodec),
        pytest.param("nvimgcodec_cuda", marks=needs_nvimgcodec),
    ],
)
def test_broken_files_show_nothing_of_other_images(decoder: str) -> None:
    """``leaks.py`` does the same for 100,000 files of each kind."""
    found = search(decoder, False, list(KINDS), 96, 120, 0, "")
    assert {kind: figures.get("leaks", 0) for kind, figures in found.items()} == dict.fromkeys(KINDS, 0)
    assert sum(figures.get("results", 0) for figures in found.values()) > 300, "files that pass are decoded"


@needs_nvimgcodec
def test_the_search_finds_leaks_without_the_check() -> None:
    with backend_of({"backend": "DecodeTensor", "decoder": "nvimgcodec"}) as backend:
        if not backend._jpegs.uses_engines:  # type: ignore[attr-defined]
            pytest.skip("this GPU has no JPEG engines")
    assert search("nvimgcodec", True, ["cut"], 96, 60, 0, "")["cut"]["leaks"] > 0


@decoders
def test_bad_items_alone_lose_their_result(decoder: str) -> None:
    good = jpeg(photo(100, 150, 0))
    mat = photo(60, 90, 1)
    file = io.BytesIO()
    Image.fromarray(photo(10, 10, 0)).save(file, "PNG")
    restarted = jpeg(photo(64, 64, 0), progressive=True, restart_marker_rows=1)
    cmyk = jpeg(photo(20, 20, 0), mode="CMYK")
    bad = [b"", b"no image", good[:2000], good[:-2], file.getvalue(), cmyk, restarted]
    rng = np.random.default_rng(0)
    with backend_of({"backend": "DecodeTensor", "max": 16, "decoder": decoder}) as backend:
        expected = forward(backend, [good])[0]["result"]
        for place in range(len(bad) + 1):
            items = forward(backend, [*bad[:place], good, *bad[place:], mat])
            assert torch.equal(items[place]["result"], expected)
            assert np.array_equal(as_rgb(items[-1]["result"]), mat[:, :, ::-1]), (
                "a Mat, of BGR, goes to the GPU as it is"
            )
            for item in [*items[:place], *items[place + 1 : -1]]:
                assert "result" not in item
                assert isinstance(item["error"], DecodeError)
        for _ in range(50):  # garbage in the middle is an outcome, one or the other
            broken = bytearray(good)
            for position in rng.integers(2, len(good), 30):
                broken[position] = int(rng.integers(0, 256))
            items = forward(backend, [good, bytes(broken), good])
            assert torch.equal(items[0]["result"], expected)
            assert torch.equal(items[2]["result"], expected)
            assert ("result" in items[1]) != ("error" in items[1])


@decoders
def test_twenty_thousand_decodes_keep_no_memory(decoder: str) -> None:
    images = [jpeg(photo(height, width, 0)) for height, width in ((375, 500), (224, 224), (480, 640), (100, 333))]
    config: dict[str, Any] = {"backend": "SyncTensor[DecodeTensor]", "max": 8, "instance_num": 2, "batching_timeout": 1}
    config["decoder"] = decoder
    process = psutil.Process()
    with pipe(config) as run:
        for start in range(0, 20000, 80):
            run([{"data": images[(start + index) % 4]} for index in range(80)])
            if start == 4000:
                before = (gpu_bytes(), process.memory_info().rss)
        after = (gpu_bytes(), process.memory_info().rss)
    grown = [(one - other) / 2**20 for one, other in zip(after, before, strict=True)]
    print(f"grown from 4,000 to 20,000 decodes: GPU {grown[0]:.1f} MiB, host {grown[1]:.1f} MiB")
    assert grown[0] < 16
    assert grown[1] < 32
