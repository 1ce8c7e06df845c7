"""scripts/run.py decoders: its figures for planted decoders, and that nothing is left out without a word."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from benchmarks import decoder_libraries
from benchmarks.decoder_libraries import DECODERS, Decoder, NotMeasured, Setting, by_opencv
from benchmarks.decoders import compared, main, next_batch, read_images, reason, sideways
from conftest import encode, picture

# torchvision 0.29 says that TorchCodec will take over; where torchvision is installed, it is compared all the same.
pytestmark = pytest.mark.filterwarnings("ignore:The image decoding and encoding capabilities:DeprecationWarning")

ALONE = Setting(threads=1, batch=2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two images, one of them in a subfolder, an invalid file, a truncated one, and one of another kind."""
    below = tmp_path / "images" / "deep" / "deeper"
    below.mkdir(parents=True)
    (tmp_path / "images" / "a.jpg").write_bytes(encode(picture(40, 60)))
    (below / "b.JPEG").write_bytes(encode(picture(30, 20, seed=1)))
    (below / "corrupt.jpg").write_bytes(b"no image")
    (below / "cut.jpg").write_bytes(encode(picture(200, 200, seed=2))[:3000])
    (below / "notes.txt").write_bytes(b"no image")
    return tmp_path / "images"


def planted(change: Callable[[np.ndarray], np.ndarray], upright: bool = True, **more: Any) -> Decoder:
    return Decoder(lambda batch: [change(by_opencv(encoded, upright)) for encoded in batch], 1, **more)


def flat(*levels: int) -> dict[str, bytes]:
    """8×8 gray JPEGs, which every decoder makes the same pixels of."""
    return {f"{level}.jpg": encode(np.full((8, 8, 3), level, np.uint8)) for level in levels}


# -- pixels ---------------------------------------------------------------------------------------------------------


def test_differences_are_over_all_values_of_all_images() -> None:
    def change(mat: np.ndarray) -> np.ndarray:
        mat = mat.copy()
        if mat[0, 0, 0] < 128:
            mat[0, 0, 0] += 96  # one value of 192
        else:
            mat[:] -= 2  # downwards: uint8 must not wrap
        return mat

    found = compared(planted(change), flat(100, 200))
    assert (found.mean, found.most) == (pytest.approx((96 + 2 * 192) / 384), 96)
    assert (found.refused, found.shapes) == ({}, [])


def test_decoder_without_rotation_is_compared_with_stored_pixels() -> None:
    images = {"sideways.jpg": sideways()}
    for upright in (True, False):
        found = compared(planted(np.asarray, upright), images)
        assert (found.turns, found.mean, found.most, found.shapes) == (upright, 0.0, 0, [])
    wrong_way = compared(planted(lambda mat: mat[::-1, ::-1]), images)
    assert (wrong_way.turns, wrong_way.shapes) == (False, ["sideways.jpg"])


def test_a_decoder_that_decodes_nothing_is_not_measured() -> None:
    def decode(batch: Sequence[bytes]) -> list[np.ndarray]:
        raise RuntimeError("too dark\nand more")

    with pytest.raises(NotMeasured, match=r"decodes none of the images: too dark$"):
        compared(Decoder(decode, 1), flat(10))


def test_reason_is_the_informative_line() -> None:
    assert (
        reason(RuntimeError("Critical error:\nFile x\n\nencountered:\n\nbad stream\nno longer valid")) == "bad stream"
    )
    assert reason(RuntimeError("too dark\nand more")) == "too dark"
    assert reason(KeyError()) == "KeyError"


# -- the libraries --------------------------------------------------------------------------------------------------


def test_each_decoder_that_is_there_gives_rgb() -> None:
    red = np.zeros((16, 16, 3), np.uint8)
    red[:] = (30, 60, 220)  # BGR
    encoded = encode(red, ".jpg", cv2.IMWRITE_JPEG_QUALITY, 100)
    there = []
    for name, make in DECODERS.items():
        try:
            decoder = make(ALONE)
        except NotMeasured:
            continue
        there.append(name)
        try:
            pixels = decoder.pixels(decoder.decode([encoded])[0])
            assert np.abs(pixels[8, 8].astype(int) - (220, 60, 30)).max() < 6, name
            assert len(decoder.decode([encoded] * decoder.batch)) == decoder.batch, name
        finally:
            decoder.close()
    assert {"OpenCV", "Pillow", "pipe, DecodeMat"} <= {*there}


def test_missing_library_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    monkeypatch.setitem(sys.modules, "torchvision.io", None)
    for name, package in (("TurboJPEG (simplejpeg)", "simplejpeg"), ("torchvision, CPU", "torchvision")):
        with pytest.raises(NotMeasured, match=rf"needs {package} \(pip install '{package}'\): "):
            DECODERS[name](ALONE)

    def broken(name: str) -> Any:
        raise RuntimeError("operator torchvision::nms does not exist\n  at some place")

    monkeypatch.setattr(decoder_libraries.importlib, "import_module", broken)
    with pytest.raises(NotMeasured, match=r"torchvision::nms does not exist$"):
        DECODERS["torchvision, CPU"](ALONE)


def test_a_missing_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    needing = []
    for name, make in DECODERS.items():
        try:
            make(ALONE).close()
        except NotMeasured as error:
            needing += [name] if "needs a CUDA GPU" in str(error) else []
    assert len(needing) == 7


# -- the command ----------------------------------------------------------------------------------------------------


def test_batches_deal_out_all_images() -> None:
    images = list(flat(10, 20, 30).values())
    seen: list[Sequence[bytes]] = []
    call = next_batch(Decoder(lambda batch: seen.append(batch) or [], 1, batch=2), images)
    for _ in range(3):
        call()
    assert [encoded for batch in seen for encoded in batch] == images * 2


def test_files_that_are_not_whole_jpegs_are_left_out_with_a_reason(folder: Path) -> None:
    images, left_out = read_images(folder, 10)
    assert list(images) == ["a.jpg", "deep/deeper/b.JPEG"]
    assert list(left_out) == ["deep/deeper/corrupt.jpg", "deep/deeper/cut.jpg"]
    assert left_out["deep/deeper/corrupt.jpg"] == "its 8 bytes are not a JPEG"
    assert list(read_images(folder, 1)[0]) == ["a.jpg"]


def test_each_decoder_is_a_row_or_a_remark(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    closed: list[str] = []

    def absent(setting: Setting) -> Decoder:
        raise NotMeasured("needs a library")

    def failing(setting: Setting) -> Decoder:
        calls: list[int] = []

        def decode(batch: Sequence[bytes]) -> list[np.ndarray]:
            calls.append(len(batch))
            if len(calls) > 5:  # the EXIF image, both images, a first batch, a first round
                raise MemoryError("no memory is left")
            return [by_opencv(encoded) for encoded in batch]

        return Decoder(decode, 1, close=lambda: closed.append("failing"))

    def picky(setting: Setting) -> Decoder:
        def change(mat: np.ndarray) -> np.ndarray:
            if mat.shape[0] == 30:
                raise ValueError("too low")
            return mat

        return planted(change, batch=setting.batch, close=lambda: closed.append("picky"))

    report = tmp_path / "report.json"
    options = ["--img_dir", folder, "--seconds", 0.01, "--rounds", 2, "--threads", "1", "--json", report]
    decoders = {"absent": absent, "failing": failing, "picky": picky}
    assert main(list(map(str, options)), decoders) == 0
    printed = capsys.readouterr().out
    assert "left out: deep/deeper/corrupt.jpg: its 8 bytes are not a JPEG" in printed
    assert "absent: not measured: needs a library" in printed
    assert "failing, 1 thread: not measured: MemoryError: no memory is left" in printed
    assert "picky: deep/deeper/b.JPEG is left out: too low" in printed
    (written,) = json.loads(report.read_text(encoding="utf-8"))["reports"]
    rows = {row["name"]: row for row in written["rows"]}
    assert rows["picky, {} thread"]["qps"] > 0
    assert rows["picky, {} thread"]["more"] == {"difference": 0.0, "most": 0.0, "exif": 1.0}
    assert sorted(closed) == ["failing", "picky"]


def test_all_decoders_measure_drawn_pictures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import decoders

    sizes = {name: {"width": 40 + 8 * number, "height": 32} for number, name in enumerate(("small", "large"))}
    monkeypatch.setattr(decoders, "PICTURES", sizes)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--seconds", "0.01", "--rounds", "1", "--threads", "1"]) == 0
    printed = capsys.readouterr().out
    for name in DECODERS:
        assert f"{name}, 1 thread " in printed or f"{name}: not measured: " in printed
    assert printed.count("needs a CUDA GPU") == 7
    assert "not measured, as above: " in printed


def test_a_folder_without_images_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--img_dir", str(tmp_path)]) == 2
    assert f"--img_dir {tmp_path}: no image in it" in capsys.readouterr().err
    (tmp_path / "corrupt.jpg").write_bytes(b"no image")
    assert main(["--img_dir", str(tmp_path)]) == 2
    assert "no JPEG that can be decoded" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--threads", "0"], ["--limit", "0"], ["--only", "OpenGL"]])
def test_options_that_do_not_fit_are_refused(wrong: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["--img_dir", str(tmp_path), *wrong])
