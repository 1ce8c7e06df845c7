"""The JPEG header that DecodeTensor reads before nvJPEG sees the bytes."""

from __future__ import annotations

import io
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from conftest import encode, picture
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from torchpipe_py import BackendUnavailable, ConfigError, DecodeError, pipe
from torchpipe_py.backends.base import BackendConfig
from torchpipe_py.backends.image.jpeg import read_header
from torchpipe_py.backends.image.nvjpeg import DecodeTensor, oriented
from torchpipe_py.images.jpeg import ORIENTATION


def by_pillow(mode: str = "RGB", **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture(40, 60)).convert(mode).save(file, "JPEG", **options)
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "components"),
    [
        (by_pillow(), 3),
        (by_pillow(progressive=True), 3),
        (by_pillow(subsampling=0, optimize=True), 3),
        (by_pillow(restart_marker_rows=1), 3),
        (by_pillow("L"), 1),
        (by_pillow(comment=b"\xff\xd9 in a comment"), 3),
        (b"\xff\xd8" + b"\xff" * 5 + by_pillow()[2:], 3),  # fill bytes before a marker
        (by_pillow() + b"trailing", 3),
    ],
    ids=[
        "baseline",
        "progressive",
        "full chroma",
        "restart markers",
        "gray",
        "comment",
        "fill bytes",
        "trailing bytes",
    ],
)
def test_size_and_components(data: bytes, components: int) -> None:
    assert read_header(data) == (60, 40, components, 1)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_turns_as_opencv_does(orientation: int) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    data = by_pillow(exif=exif)
    assert read_header(data).orientation == orientation
    stored = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    upright = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    turned = oriented(torch.from_numpy(stored).permute(2, 0, 1), orientation)
    assert turned.is_contiguous()
    assert np.array_equal(turned.permute(1, 2, 0).numpy(), upright)


@pytest.mark.parametrize("value", [0, 9, 300])
def test_a_senseless_orientation_is_none(value: int) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = value
    assert read_header(by_pillow(exif=exif)).orientation == 1


def test_a_damaged_exif_segment_is_no_reason_to_refuse() -> None:
    good = by_pillow()
    segment = b"\xff\xe1" + (2 + 6 + 4).to_bytes(2, "big") + b"Exif\0\0" + b"MM\0\x2a"
    assert read_header(good[:2] + segment + good[2:]) == (60, 40, 3, 1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 bytes are no image of formats jpeg"),
        (b"nothing of the kind", "no image of formats"),
        (encode(picture(4, 4), ".png"), "they look like PNG"),
        (encode(picture(4, 4), ".webp"), "they look like WebP"),
        (by_pillow("CMYK"), r"4 color components \(CMYK\) are not supported on the GPU"),
        (by_pillow(progressive=True, restart_marker_rows=1), "progressive with restart markers is not supported"),
        (by_pillow(keep_rgb=True), "stored as RGB, not YCbCr"),
        (by_pillow()[:2], "cut off in its header"),
        (by_pillow()[:100], "cut off in its header"),
        (by_pillow()[:-2], "there is no end marker"),
        (by_pillow()[:-200], "there is no end marker"),
        (b"\xff\xd8\xff\xd9", "ends before the image data"),
        (b"\xff\xd8\x00\x00", "cut off in its header"),
        (by_pillow().replace(b"\xff\xc0", b"\xff\xc3", 1), r"type SOF3 \(lossless\) is not supported"),
    ],
)
def test_what_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(DecodeError, match=message):
        read_header(data)


def test_a_bomb_is_refused() -> None:
    data = by_pillow()
    frame = data.index(b"\xff\xc0") + 5
    with pytest.raises(DecodeError, match="a JPEG of 65535x65535 pixels, more than max_pixels = 67108864"):
        read_header(data[:frame] + b"\xff\xff\xff\xff" + data[frame + 4 :])
    with pytest.raises(DecodeError, match="a JPEG of 60x0 pixels"):
        read_header(data[:frame] + b"\0\0" + data[frame + 2 :])


@given(position=st.integers(2, 700), value=st.integers(0, 255), cut=st.integers(0, 700))
def test_damaged_bytes_give_a_header_or_a_decode_error(position: int, value: int, cut: int) -> None:
    data = bytearray(by_pillow())
    data[position % len(data)] = value
    try:
        header = read_header(bytes(data[: len(data) - cut]))
    except DecodeError:
        return
    assert header.width * header.height > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("backend", ["DecodeTensor", "SyncTensor[DecodeTensor]", "S[DecodeTensor,SyncTensor]"])
def test_without_a_gpu_it_is_unavailable(backend: str) -> None:
    with pytest.raises(BackendUnavailable, match="PyTorch finds no CUDA device"):
        pipe({"backend": backend})


class ByOpenCV:
    """In the place of nvJPEG."""

    uses_engines = False

    def decode(self, encoded: list[bytes]) -> list[Any]:
        assert all(encoded)
        flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
        mats = [cv2.imdecode(np.frombuffer(content, np.uint8), flags) for content in encoded]
        return [
            DecodeError("too wide") if mat.shape[1] > 60 else torch.from_numpy(mat).permute(2, 0, 1)[None]
            for mat in mats
        ]


@pytest.mark.parametrize("color", ["rgb", "bgr"])
def test_decode_tensor_gives_each_item_its_image_or_its_error(color: str) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    wide = encode(picture(40, 61), ".jpg")
    data = [b"no image", by_pillow(exif=exif), wide, np.frombuffer(by_pillow(), np.uint8), b""]
    params = {"color": color, "decoder": "torchvision", "max_batch": 8, "max_pixels": 2**26, "unchecked": False}
    backend = DecodeTensor(BackendConfig(params=params))
    backend.start(ByOpenCV())  # type: ignore[arg-type]
    items = [{"data": content} for content in data]
    backend.forward_guarded(items)
    assert [str(item.get("error", "")) for item in items] == [
        "8 bytes are no image of formats jpeg",
        "",
        "too wide",
        "",
        "0 bytes are no image of formats jpeg",
    ]
    for item, upright in ((items[1], by_pillow(exif=exif)), (items[3], by_pillow())):
        flag = cv2.IMREAD_COLOR_RGB if color == "rgb" else cv2.IMREAD_COLOR
        expected = cv2.imdecode(np.frombuffer(upright, np.uint8), flag)
        assert item["color"] == color
        assert np.array_equal(item["result"][0].permute(1, 2, 0).numpy(), expected)
    backend.close()
    assert backend._jpegs is None


def test_a_decoder_that_there_is_not() -> None:
    with pytest.raises(
        ConfigError, match="expected one of auto, nvimgcodec, nvimgcodec_cuda, torchvision, got 'nvjpeg'"
    ):
        pipe({"backend": "DecodeTensor", "decoder": "nvjpeg"})
