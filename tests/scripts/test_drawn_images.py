"""Drawn images: the demo's, and fine textures with the waves that their classes are named by."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
from examples import demo
from examples.textures import write_set

ROOT = Path(__file__).resolve().parents[2]


def contents(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(root.rglob("*.jpg"))}


def test_layout_and_size(tmp_path: Path) -> None:
    write_set(tmp_path, train=3, val=2, classes=2)
    files = contents(tmp_path)
    names = [f"{split}/texture{kind:02d}/{number:04d}.jpg" for split, count in (("train", 3), ("val", 2))
             for kind in range(2) for number in range(count)]  # fmt: skip
    assert sorted(files) == sorted(names)
    for jpeg in files.values():
        assert cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_UNCHANGED).shape == (375, 500, 3)
        assert 35_000 < len(jpeg) < 90_000
    assert len(set(files.values())) == len(files)
    assert not list(tmp_path.rglob("*.unfinished"))


def test_the_demo_images_are_those_that_demo_draws(tmp_path: Path) -> None:
    folder = ROOT / "configs" / "demo"
    assert (folder / "labels.txt").read_text(encoding="utf-8").split() == list(demo.LABELS)
    for index, label in enumerate(demo.LABELS):
        kept = cv2.imread(str(folder / "images" / f"{label}_00.jpg")).astype(int)
        drawn = cv2.imdecode(np.frombuffer(demo.draw_jpeg(0, demo.HELD_OUT, index, 0), np.uint8), cv2.IMREAD_COLOR)
        assert np.abs(kept - drawn).mean() < 1  # other versions of OpenCV round otherwise


def test_the_demo_is_written_at_its_smallest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "HELD_OUT_PER_CLASS", 6)
    assert demo.main(["--out", str(tmp_path), "--epochs", "1", "--images-per-class", "8"]) == 1  # far too few
    assert {path.name for path in tmp_path.iterdir()} == {"images", "labels.txt", "model.onnx"}
    assert len(list((tmp_path / "images").iterdir())) == 48
