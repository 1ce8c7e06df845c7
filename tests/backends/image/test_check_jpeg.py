"""What is refused before the JPEG engines of a GPU decode it; tests/gpu/leaks.py has the engines themselves."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from broken_jpegs import KINDS, broken, encode, join, segments
from entropy import require_whole

from torchpipe_py import BackendUnavailable, DecodeError, pipe
from torchpipe_py.backends.base import BackendConfig
from torchpipe_py.backends.image.jpeg import MOST_MCUS, WholeCheck
from torchpipe_py.backends.image.nvjpeg import DecodeTensor

SEEDS = Path(__file__).parents[2] / "fuzz" / "seeds" / "jpegs"
SLOPE = np.linspace(0, 200, 48 * 64 * 3).reshape(48, 64, 3).astype(np.uint8)


def refusal(data: bytes) -> str:
    """Why a file is refused; empty if it is not."""
    try:
        WholeCheck()(data)
    except DecodeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "options",
    [{}, {"subsampling": 0}, {"subsampling": 1}, {"optimize": True}, {"restart_marker_blocks": 3}, {"quality": 100}],
    ids=str,
)
def test_whole_files_pass(options: dict[str, Any]) -> None:
    data = encode(SLOPE, **options)
    require_whole(data)
    assert refusal(data) == ""
    assert refusal(data + b"what follows the image") == ""


def test_gray_files_and_those_of_the_demo_pass() -> None:
    assert refusal(bytes(cv2.imencode(".jpg", SLOPE[:, :, 0])[1])) == ""
    images = Path(__file__).parents[3] / "configs" / "demo" / "images"
    assert [path.name for path in images.glob("*.jpg") if refusal(path.read_bytes())] == []


@pytest.mark.parametrize("kind", KINDS)
def test_what_passes_is_whole_when_it_is_read_code_by_code(kind: str) -> None:
    rng = np.random.default_rng(7)
    for _ in range(12):
        data, _ = broken(kind, rng)
        if len(data) < 9000 and not refusal(data):
            require_whole(data)


def test_every_cut_is_refused() -> None:
    data = encode(SLOPE)
    start = len(data) - len(segments(data)[1])
    for end in range(start, len(data) - 8):
        assert refusal(data[:end] + b"\xff\xd9")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no_such_code", "bad Huffman code"),  # libjpeg-turbo's fast path takes it for a zero
        ("marker_inside", "not baseline with one scan"),  # which libjpeg-turbo passes over
    ],
)
def test_files_that_the_engines_completed_with_another_image(name: str, reason: str) -> None:
    assert reason in refusal((SEEDS / f"{name}.jpg").read_bytes())


def _without(data: bytes, marker: int) -> bytes:
    parts, rest = segments(data)
    return join([part for part in parts if part[0] != marker], rest)


def _edited(data: bytes, marker: int, place: int, value: int) -> bytes:
    parts, rest = segments(data)
    edits = [(m, c[:place] + bytes([value]) + c[place + 1 :] if m == marker else c) for m, c in parts]
    return join(edits, rest)


@pytest.mark.parametrize(
    "data",
    [
        encode(SLOPE, progressive=True),
        _without(encode(SLOPE), 0xC4),  # libjpeg-turbo has tables of its own
        _without(encode(SLOPE), 0xDB),
        _edited(encode(SLOPE), 0xC4, 17, 15),  # a symbol that no file of 8 bits has
        _edited(encode(SLOPE), 0xDB, 5, 0),  # a step of 0
        _edited(encode(SLOPE), 0xC0, 7, 0x41),  # a sampling that is rare
        _edited(encode(SLOPE), 0xDA, 0, 1),  # the first component alone
        encode(np.zeros((8 * 257, 8 * 256, 3), np.uint8), subsampling=0),
    ],
    ids=["progressive", "no Huffman", "no quantisation", "symbol", "step", "sampling", "one component", "blocks"],
)
def test_what_is_not_plain_is_left_to_the_cpu(data: bytes) -> None:
    assert f"at most {MOST_MCUS} blocks; decode it on the CPU" in refusal(data)


def test_a_large_file_with_restart_markers_passes() -> None:
    large = np.zeros((8 * 257, 8 * 256, 3), np.uint8)
    assert refusal(encode(large, subsampling=0, restart_marker_blocks=4096)) == ""


def test_check_jpeg_passes_on_what_is_whole_and_leaves_the_rest_to_the_next_node() -> None:
    good, cut = encode(SLOPE), encode(SLOPE)[:-200] + b"\xff\xd9"
    png = bytes(cv2.imencode(".png", SLOPE)[1])
    config = {
        "check": {"backend": "CheckJpeg", "next": "cpu", "max_pixels": 4000},
        "cpu": {"backend": "DecodeMat", "filter": "or"},
    }
    with pipe({"backend": "CheckJpeg", "max_pixels": 4000}) as check, pipe(config) as both:
        items = [{"data": data} for data in (good, cut, png, encode(SLOPE.repeat(2, 0)), bytearray(good))]
        check(items)
        assert items[0]["result"] is good
        assert items[4]["result"] == good
        errors = [str(item.get("error", "")) for item in items[1:4]]
        assert "premature end" in errors[0]
        assert "no image of formats jpeg" in errors[1]
        assert "more than max_pixels = 4000" in errors[2]
        decoded = [{"data": data} for data in (good, cut, png)]
        both(decoded)
        assert [type(item["result"]) for item in decoded] == [bytes, np.ndarray, np.ndarray]


class Engines:
    """In the place of a decoder that uses them."""

    uses_engines = True

    def __init__(self) -> None:
        self.seen: list[bytes] = []

    def decode(self, encoded: list[bytes]) -> list[Any]:
        self.seen += encoded
        return [torch.zeros(1, 3, 48, 64, dtype=torch.uint8)] * len(encoded)


def decode_tensor(engines: Engines, unchecked: bool) -> DecodeTensor:
    params = {"color": "rgb", "decoder": "nvimgcodec", "max_batch": 8, "max_pixels": 2**26, "unchecked": unchecked}
    backend = DecodeTensor(BackendConfig(params=params))
    backend.start(engines)
    return backend


def test_decode_tensor_gives_the_engines_nothing_that_is_broken() -> None:
    engines = Engines()
    backend = decode_tensor(engines, False)
    good, other, cut = encode(SLOPE), encode(SLOPE, quality=80), encode(SLOPE)[:-200] + b"\xff\xd9"
    items: list[dict[str, Any]] = [{"data": data} for data in (cut, good, cut, other, b"no image", SLOPE)]
    backend.forward_guarded(items)
    backend.close()
    assert engines.seen == [good, other]
    assert ["result" in item for item in items] == [False, True, False, True, False, True]
    assert "premature end" in str(items[0]["error"])
    assert np.array_equal(items[5]["result"][0].permute(1, 2, 0).numpy(), SLOPE[:, :, ::-1]), "a Mat is BGR"


def test_unchecked_gives_them_all() -> None:
    engines, cut = Engines(), encode(SLOPE)[:-200] + b"\xff\xd9"
    backend = decode_tensor(engines, True)
    item: dict[str, Any] = {"data": cut}
    backend.forward_guarded([item])
    backend.close()
    assert engines.seen == [cut]
    assert "result" in item


def test_without_the_library_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    with pytest.raises(BackendUnavailable, match="pip install simplejpeg"):
        pipe({"backend": "CheckJpeg"})
