"""JPEGs for the GPU, with stand-ins for its decoders: which are refused, and what each item gets."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from fuzz import broken_jpegs
from fuzz.broken_jpegs import KINDS, broken, join, segments
from kit.fake_gpu import cpu_as_gpu
from kit.pictures import jpeg_segment, saved, turned

from torchpipe_py import BackendUnavailable, DecodeError, pipe
from torchpipe_py.backends.base import BackendConfig
from torchpipe_py.backends.image import gpujpeg
from torchpipe_py.backends.image.decode import HeaderCheck
from torchpipe_py.backends.image.gpujpeg import DecodeTensor, read_header
from torchpipe_py.backends.image.jpeg import MOST_MCUS, WholeCheck

SEEDS = Path(broken_jpegs.__file__).parent / "seeds" / "jpegs"
SLOPE = np.linspace(0, 200, 48 * 64 * 3).reshape(48, 64, 3).astype(np.uint8)
JPEG = broken_jpegs.encode(SLOPE)
CUT = JPEG[:-200] + b"\xff\xd9"


# -- headers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "channels"),
    [
        (saved("JPEG"), 3),
        (saved("JPEG", progressive=True), 3),
        (saved("JPEG", subsampling=0, restart_marker_rows=1), 3),
        (saved("JPEG", mode="L"), 1),
        (saved("JPEG", comment=b"\xff\xd9 in a comment"), 3),
        (b"\xff\xd8" + b"\xff" * 5 + saved("JPEG")[2:], 3),  # fill bytes before a marker
        (saved("JPEG") + b"trailing", 3),
        (b"\xff\xd8" + jpeg_segment(0xE1, b"Exif\0\0MM\0\x2a") + saved("JPEG")[2:], 3),  # damaged EXIF
        *((turned(value), 3) for value in (0, 9, 300)),  # orientations that do not exist
    ],
)
def test_reads_size_and_channels(data: bytes, channels: int) -> None:
    header = read_header(data, HeaderCheck())
    assert (header.width, header.height, header.channels, header.orientation(data)) == (32, 24, channels, 1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 bytes: not a JPEG"),
        (saved("PNG"), "it looks like PNG"),
        (saved("JPEG", mode="CMYK"), r"4 color components \(CMYK\) are not supported on the GPU"),
        (saved("JPEG", progressive=True, restart_marker_rows=1), "progressive with restart markers is not supported"),
        (saved("JPEG", keep_rgb=True), "stored as RGB, not YCbCr"),
        (saved("JPEG")[:20] + b"junk\xff\0" + saved("JPEG")[20:], "bytes between its segments"),
        (saved("JPEG")[:100], "cut off in its header"),
        (saved("JPEG")[:-2], "without an end marker"),
        (saved("JPEG").replace(b"\xff\xc0", b"\xff\xc3", 1), r"type SOF3 \(lossless\) is not supported"),
    ],
)
def test_refuses_kinds_that_gpu_cannot_decode(data: bytes, message: str) -> None:
    with pytest.raises(DecodeError, match=message):
        read_header(data, HeaderCheck(("jpeg",)))


# -- whole files ------------------------------------------------------------------------------------------------------


def refusal(data: bytes) -> str:
    """The reason why the check refuses a file; empty if it does not."""
    try:
        WholeCheck()(data)
    except DecodeError as error:
        return str(error)
    return ""


def without(marker: int) -> bytes:
    parts, rest = segments(JPEG)
    return join([part for part in parts if part[0] != marker], rest)


def edited(marker: int, place: int, value: int) -> bytes:
    parts, rest = segments(JPEG)
    edits = [(m, c[:place] + bytes([value]) + c[place + 1 :] if m == marker else c) for m, c in parts]
    return join(edits, rest)


def large(**options: Any) -> bytes:
    return broken_jpegs.encode(np.zeros((8 * 257, 8 * 256, 3), np.uint8), subsampling=0, **options)


@pytest.mark.parametrize(
    "data",
    [
        *(broken_jpegs.encode(SLOPE, subsampling) for subsampling in (0, 1, 2)),
        broken_jpegs.encode(SLOPE, optimize=True),
        broken_jpegs.encode(SLOPE, quality=100),
        broken_jpegs.encode(SLOPE, restart_marker_blocks=3),
        broken_jpegs.encode(SLOPE) + b"what follows the image",
        bytes(cv2.imencode(".jpg", SLOPE[:, :, 0])[1]),
        large(restart_marker_blocks=4096),
    ],
)
def test_accepts_intact_files(data: bytes) -> None:
    assert refusal(data) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_file_that_passes_is_decoded_as_opencv_does(kind: str) -> None:
    """libjpeg decodes it without a warning to OpenCV's pixels."""
    rng = np.random.default_rng(7)
    files = [broken(kind, rng)[0] for _ in range(24)]
    passing = [data for data in files if len(data) < 9000 and not refusal(data)]
    for data in passing:
        broken_jpegs.require_opencvs(data)
    assert bool(passing) == (kind not in ("cut", "frames", "progressive")), "of these kinds the check refuses all"


def test_refuses_every_cut() -> None:
    start = len(JPEG) - len(segments(JPEG)[1])
    for end in range(start, len(JPEG) - 8):
        assert refusal(JPEG[:end] + b"\xff\xd9")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no_such_code", "bad Huffman code"),  # libjpeg-turbo's fast path takes it for a zero
        ("marker_inside", "not baseline with one scan"),  # which libjpeg-turbo passes over
    ],
)
def test_refuses_files_that_the_engines_completed_with_another_image(name: str, reason: str) -> None:
    assert reason in refusal((SEEDS / f"{name}.jpg").read_bytes())


INTERVAL = jpeg_segment(0xDD, b"\0\3")


@pytest.mark.parametrize(
    "data",
    [
        broken_jpegs.encode(SLOPE, progressive=True),
        saved("JPEG").replace(b"\xff\xc0", b"\xff\xc9", 1),  # arithmetic coding
        without(0xC4),  # libjpeg-turbo has tables of its own
        without(0xDB),
        edited(0xC4, 17, 15),  # a symbol that no file of 8 bits has
        edited(0xDB, 5, 0),  # a step of 0
        edited(0xC0, 7, 0x41),  # a sampling that is rare
        edited(0xDA, 0, 1),  # the first component alone
        JPEG[:-2] + b"\xff\xda" + JPEG[-2:],  # a second scan
        JPEG[:2] + INTERVAL + INTERVAL + JPEG[2:],  # two restart intervals, of which one may not count
        large(),
    ],
    ids=[
        *("progressive", "arithmetic", "huffman", "quantisation", "symbol", "step", "sampling", "component"),
        *("scan", "intervals", "blocks"),
    ],
)
def test_leaves_other_than_plain_jpegs_to_cpu(data: bytes) -> None:
    assert f"at most {MOST_MCUS} blocks; decode it on the CPU" in refusal(data)


def test_check_jpeg_leaves_broken_files_to_next_node() -> None:
    png = bytes(cv2.imencode(".png", SLOPE)[1])
    config = {
        "check": {"backend": "CheckJpeg", "next": "cpu", "max_pixels": 4000},
        "cpu": {"backend": "DecodeMat", "filter": "or"},
    }
    with pipe({"backend": "CheckJpeg", "max_pixels": 4000}) as check, pipe(config) as both:
        items = [{"data": data} for data in (JPEG, CUT, png, broken_jpegs.encode(SLOPE.repeat(2, 0)), bytearray(JPEG))]
        check(items)
        both(decoded := [{"data": data} for data in (JPEG, CUT, png)])
    assert items[0]["result"] is JPEG
    assert items[4]["result"] == JPEG
    for item, reason in zip(items[1:4], ("premature end", "not a JPEG image", "max_pixels = 4000"), strict=True):
        assert reason in str(item["error"])
    assert [type(item["result"]) for item in decoded] == [bytes, np.ndarray, np.ndarray]


def test_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    with pytest.raises(BackendUnavailable, match="pip install simplejpeg"):
        pipe({"backend": "CheckJpeg"})


# -- DecodeTensor -----------------------------------------------------------------------------------------------------


class StandIn:
    """Replaces a decoder on the GPU: OpenCV's pixels; a file wider than 64 pixels fails."""

    name = "stand-in"

    def __init__(self, uses_engines: bool) -> None:
        self.uses_engines = uses_engines
        self.seen: list[bytes] = []

    def decode(self, encoded: list[bytes]) -> list[Any]:
        self.seen += encoded
        flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
        mats = [cv2.imdecode(np.frombuffer(content, np.uint8), flags) for content in encoded]
        tensors = [torch.from_numpy(mat).permute(2, 0, 1)[None].contiguous() for mat in mats]
        return [DecodeError("too wide") if tensor.shape[3] > 64 else tensor for tensor in tensors]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    cpu_as_gpu(monkeypatch)
    decoder = StandIn(uses_engines=True)
    monkeypatch.setitem(gpujpeg.DECODERS, "nvimgcodec", lambda device, stream, trial: decoder)
    return decoder


def decode(data: list[Any], **params: Any) -> list[dict[str, Any]]:
    defaults = {param.key: param.default for param in DecodeTensor.parameters().values()}
    names = {param.key: name for name, param in DecodeTensor.parameters().items()}
    values = {**defaults, "decoder": "nvimgcodec", "max": 8, **params}
    backend = DecodeTensor(BackendConfig(params={names[key]: value for key, value in values.items()}))
    items: list[dict[str, Any]] = [{"data": one} for one in data]
    backend.setup()
    try:
        assert [*backend.setup_choices()] == ["DecodeTensor: cpu", "DecodeTensor: stand-in"]
        backend.forward(items)
    finally:
        backend.close()
    return items


@pytest.mark.parametrize("color", ["rgb", "bgr"])
def test_each_item_has_its_image_or_its_error(stand_in: StandIn, color: str) -> None:
    other, wide = broken_jpegs.encode(SLOPE, quality=80), saved("JPEG", 24, 65)
    data = [CUT, JPEG, b"no image", wide, other, SLOPE, np.frombuffer(JPEG, np.uint8), SLOPE[:, :, :1]]
    items = decode(data, color=color)
    assert stand_in.seen == [JPEG, wide, other, JPEG], "a broken file reaches the engines"
    reasons = ["premature end", "", "not a JPEG image", "too wide", "", "", "", "3 channels, got 1"]
    for item, reason in zip(items, reasons, strict=True):
        assert reason in str(item.get("error", ""))
        assert ("result" in item) is (reason == "")
    for number, wanted in ((1, JPEG), (4, other), (6, JPEG)):
        flag = cv2.IMREAD_COLOR_RGB if color == "rgb" else cv2.IMREAD_COLOR_BGR
        mat = cv2.imdecode(np.frombuffer(wanted, np.uint8), flag)
        assert np.array_equal(items[number]["result"][0].permute(1, 2, 0).numpy(), mat)
        assert items[number]["color"] == color
    mat = SLOPE[:, :, ::-1] if color == "rgb" else SLOPE  # a Mat is BGR
    assert np.array_equal(items[5]["result"][0].permute(1, 2, 0).numpy(), mat)


def test_no_call_has_more_pixels_than_one_image_may(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    inner = stand_in.decode
    monkeypatch.setattr(stand_in, "decode", lambda encoded: calls.append(len(encoded)) or inner(encoded))
    assert all("result" in item for item in decode([JPEG] * 5, max_pixels=2 * 48 * 64))
    assert calls == [2, 2, 1]


@pytest.mark.parametrize(("uses_engines", "unchecked"), [(True, True), (False, False)])
def test_checks_only_files_for_the_engines(stand_in: StandIn, uses_engines: bool, unchecked: bool) -> None:
    stand_in.uses_engines = uses_engines
    (item,) = decode([CUT], unchecked=unchecked)
    assert stand_in.seen == [CUT]
    assert "result" in item


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_turns_as_opencv_does(stand_in: StandIn, orientation: int) -> None:
    data = turned(orientation)
    (item,) = decode([data])
    upright = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB)
    assert item["result"].is_contiguous()
    assert np.array_equal(item["result"][0].permute(1, 2, 0).numpy(), upright)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("backend", ["DecodeTensor", "SyncTensor[DecodeTensor]", "S[DecodeTensor,SyncTensor]"])
def test_unavailable_without_gpu(backend: str) -> None:
    with pytest.raises(BackendUnavailable, match="PyTorch finds no CUDA device"):
        pipe({"backend": backend})
