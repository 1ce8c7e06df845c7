"""``torchpipe doctor --pixels``: what the installed libraries make of made pictures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from torchpipe_py.backends.image import formats
from torchpipe_py.cli import main
from torchpipe_py.tools import doctor, pixel_check
from torchpipe_py.tools.pixel_check import Finding

PARTS = {"decode", "chroma", "EXIF", "scale", "colour", "resize"}
TURNED = [f"orientation {number}" for number in range(2, 9)]


def test_only_what_is_wrong_differs_from_its_reference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "LIBRARIES", doctor.LIBRARIES[:4])
    monkeypatch.setattr(formats, "orientation", lambda exif, xmp: 1)  # a decoder that passes over EXIF
    file = tmp_path / "report.json"
    assert main(["doctor", "--pixels", "--json", str(file)]) == 1
    assert "LetterBoxMat" in capsys.readouterr().out
    pixels = json.loads(file.read_text())["pixels"]
    assert {each["part"] for each in pixels} >= PARTS
    assert [each["what"] for each in pixels if each["verdict"] == "differs"] == TURNED
    right = [Finding(**{key: each[key] for key in Finding._fields}) for each in pixels if each["verdict"] == "ok"]
    monkeypatch.setattr(pixel_check, "check_pixels", lambda: right)
    assert main(["doctor", "--pixels"]) == 0
