"""scripts/compare_decoders.py: its figures for planted decoders, and that nothing is left out without a word."""

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
from benchmarks.decoders import decoders
from benchmarks.decoders.compare import Outcome, batch_call, compare_pixels, main, measure, read_images, sideways, table
from benchmarks.decoders.decoders import Decoder, NotMeasuredError, by_opencv, subjects
from conftest import encode, picture

# torchvision 0.29 says that TorchCodec will take over; where torchvision is installed, it is compared all the same.
pytestmark = pytest.mark.filterwarnings("ignore:The image decoding and encoding capabilities:DeprecationWarning")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two images, one of them deeper, a file that is no image, one that is cut off, and one of another kind."""
    below = tmp_path / "images" / "deep" / "deeper"
    below.mkdir(parents=True)
    (tmp_path / "images" / "a.jpg").write_bytes(encode(picture(40, 60)))
    (below / "b.JPEG").write_bytes(encode(picture(30, 20, seed=1)))
    (below / "corrupt.jpg").write_bytes(b"no image")
    (below / "cut.jpg").write_bytes(encode(picture(200, 200, seed=2))[:3000])
    (below / "notes.txt").write_bytes(b"no image")
    return tmp_path / "images"


def planted(change: Callable[[np.ndarray], np.ndarray], upright: bool = True, **more: Any) -> Decoder:
    return Decoder(lambda batch: [change(by_opencv(encoded, upright)) for encoded in batch], **more)


def flat(*levels: int) -> dict[str, bytes]:
    """8×8 gray JPEGs, which every decoder makes the same pixels of."""
    return {f"{level}.jpg": encode(np.full((8, 8, 3), level, np.uint8)) for level in levels}


def differ(decoder: Decoder, images: dict[str, bytes]) -> Outcome:
    outcome = Outcome("planted")
    compare_pixels(outcome, decoder, images)
    return outcome


def test_differences_are_over_all_values_of_all_images() -> None:
    def change(mat: np.ndarray) -> np.ndarray:
        mat = mat.copy()
        if mat[0, 0, 0] < 128:
            mat[0, 0, 0] += 96  # one value of 192
        else:
            mat[:] -= 2  # downwards: uint8 must not wrap
        return mat

    outcome = differ(planted(change), flat(100, 200))
    assert (outcome.mean, outcome.max) == (pytest.approx((96 + 2 * 192) / 384), 96)
    assert (outcome.images, outcome.refused, outcome.shapes) == (2, {}, [])


def test_a_decoder_that_does_not_turn_is_compared_with_what_is_stored() -> None:
    images = {"sideways.jpg": sideways()}
    for upright in (True, False):
        outcome = differ(planted(np.asarray, upright), images)
        assert (outcome.exif, outcome.mean, outcome.max, outcome.shapes) == (upright, 0.0, 0, [])
    wrong_way = differ(planted(lambda mat: mat[::-1, ::-1]), images)
    assert (wrong_way.exif, wrong_way.shapes) == (False, ["sideways.jpg"])


def test_what_a_decoder_refuses_is_named_and_neither_compared_nor_timed() -> None:
    seen: list[bytes] = []

    def decode(batch: Sequence[bytes]) -> list[np.ndarray]:
        seen.extend(batch)
        mats = [by_opencv(encoded) for encoded in batch]
        if any(mat[0, 0, 0] == 50 for mat in mats):
            raise RuntimeError("too dark\nand more")
        return mats

    images = flat(50, 200)
    (outcome,) = measure({"picky": lambda: Decoder(decode)}, images, [1], 0.02, 2)
    assert (outcome.images, outcome.refused, outcome.mean) == (1, {"50.jpg": "too dark"}, 0.0)
    assert outcome.images_per_second[1] > 0
    assert seen.count(images["50.jpg"]) == 1
    assert "picky: 50.jpg is refused, and left out: too dark" in table([outcome], [1])


def test_batches_deal_out_all_images_and_count_each() -> None:
    sizes: list[int] = []

    def decode(batch: Sequence[bytes]) -> list[np.ndarray]:
        sizes.append(len(batch))
        return [by_opencv(encoded) for encoded in batch]

    images = list(flat(10, 20, 30).values())
    seen: list[Sequence[bytes]] = []
    call = batch_call(Decoder(lambda batch: seen.append(batch) or [], batch=2), images)
    for _ in range(3):
        call()
    assert [encoded for batch in seen for encoded in batch] == images * 2

    closed: list[int] = []
    made = Decoder(decode, batch=4, close=lambda: closed.append(1))
    (outcome,) = measure({"four": lambda: made}, flat(10, 20, 30), [1, 2], 0.02, 1)
    assert list(outcome.images_per_second) == [1, 2]
    assert {*sizes} == {1, 4}  # one by one for the pixels, then batches
    assert closed == [1]


def test_missing_libraries_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    monkeypatch.setitem(sys.modules, "torchvision.io", None)
    made = subjects(1)
    for name, package in (("TurboJPEG (simplejpeg)", "simplejpeg"), ("torchvision, CPU", "torchvision")):
        with pytest.raises(NotMeasuredError, match=rf"needs {package} \(pip install {package}\): "):
            made[name]()
    monkeypatch.setattr(decoders.importlib, "import_module", broken)
    with pytest.raises(NotMeasuredError, match=r"torchvision::nms does not exist$"):
        made["torchvision, CPU"]()


def broken(name: str) -> Any:
    raise RuntimeError("operator torchvision::nms does not exist\n  at some place")


def test_no_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    on_gpu = {name: make for name, make in subjects(1).items() if "GPU" in name or "DecodeTensor" in name}
    assert len(on_gpu) == 9
    outcomes = measure(on_gpu, flat(10), [1], 0.02, 1)
    assert {outcome.missing for outcome in outcomes} == {"there is no CUDA GPU that PyTorch can use"}
    assert table(outcomes, [1]).count("not measured: there is no CUDA GPU") == 9


def test_corrupt_files_are_left_out_with_a_reason(folder: Path) -> None:
    images, left_out = read_images(folder, None)
    assert list(images) == ["a.jpg", "deep/deeper/b.JPEG"]
    assert list(left_out) == ["deep/deeper/corrupt.jpg", "deep/deeper/cut.jpg"]
    assert left_out["deep/deeper/corrupt.jpg"] == "8 bytes are no JPEG"
    assert list(read_images(folder, 1)[0]) == ["a.jpg"]


def test_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    options = ["--img_dir", str(folder), "--seconds", "0.04", "--rounds", "2", "--threads", "1,2"]
    assert main([*options, "--json", str(report)]) == 0
    printed, content = capsys.readouterr().out, json.loads(report.read_text(encoding="utf-8"))
    assert "left out: deep/deeper/corrupt.jpg: 8 bytes are no JPEG" in printed
    assert (content["images"], list(content["left_out"])) == (2, ["deep/deeper/corrupt.jpg", "deep/deeper/cut.jpg"])
    assert [decoder["name"] for decoder in content["decoders"]] == list(subjects(1))
    measured = {decoder["name"]: decoder for decoder in content["decoders"] if decoder["missing"] is None}
    assert {"Pillow", "OpenCV", "pipe, DecodeMat"} <= set(measured)
    for name, exif in (("Pillow", False), ("OpenCV", True), ("pipe, DecodeMat", True)):
        assert measured[name]["exif"] is exif
        assert measured[name]["images_per_second"]["2"] > 0
    assert measured["pipe, DecodeMat"]["max"] == 0
    for name in subjects(1):
        assert any(line.startswith(name) for line in printed.splitlines())


def test_a_folder_without_images_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--img_dir", str(tmp_path)]) == 2
    assert f"--img_dir {tmp_path}: no image in it (looked for .jpg .jpeg)" in capsys.readouterr().err
    (tmp_path / "corrupt.jpg").write_bytes(b"no image")
    assert main(["--img_dir", str(tmp_path)]) == 2
    assert "no JPEG that can be decoded" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--threads", "0"], ["--threads", "1,1"], ["--limit", "0"], ["--seconds", "0"]])
def test_options_that_make_no_sense(wrong: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["--img_dir", str(tmp_path), *wrong])


def test_colors_come_in_order() -> None:
    """Each decoder that is there gives RGB: red stays red."""
    red = np.zeros((16, 16, 3), np.uint8)
    red[:] = (30, 60, 220)  # BGR
    encoded = encode(red, ".jpg", cv2.IMWRITE_JPEG_QUALITY, 100)
    for make in subjects(1).values():
        try:
            decoder = make()
        except NotMeasuredError:
            continue
        (image,) = decoder.decode([encoded])
        assert np.abs(decoder.pixels(image)[8, 8].astype(int) - (220, 60, 30)).max() < 6
        decoder.close()
