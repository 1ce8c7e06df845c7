"""Drawn images: the demo's, and fine textures with the waves that their classes are named by."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
from examples import demo, textures
from examples.textures import CHROMA, HEIGHT, KINDS, LUMA, SIDE, WIDTH, Grating, draw, encode, write_set

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


def test_a_picture_depends_on_nothing_but_its_name_and_the_seed(tmp_path: Path) -> None:
    write_set(tmp_path / "few", train=2, val=1, classes=2)
    write_set(tmp_path / "other", train=2, val=1, classes=2, seed=1)
    (tmp_path / "more" / "train" / "texture00").mkdir(parents=True)
    (tmp_path / "more" / "train" / "texture00" / "0002.jpg").write_bytes(b"as it was")
    write_set(tmp_path / "more", train=3, val=2, classes=3)
    few, more, other = (contents(tmp_path / name) for name in ("few", "more", "other"))
    assert few.items() < more.items()
    assert more["train/texture00/0002.jpg"] == b"as it was"
    assert few.keys() == other.keys()
    assert not set(few.values()) & set(other.values())


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--out", str(tmp_path), "--train", "1", "--val", "1"]
    assert textures.main([*options, "--classes", "2", "--subsampling", "444"]) == 0
    (first, *others) = contents(tmp_path).values()
    assert len(others) == 3
    assert first[first.index(b"\xff\xc0") + 11] == 0x11  # the luminance's factors: chroma is not halved
    with pytest.raises(SystemExit, match="2"):
        textures.main([*options, "--classes", "1"])


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


# --- what tells classes apart --------------------------------------------------------------------------------------


def power_near(spectrum: np.ndarray, grating: Grating) -> float:
    """The share of a spectrum's fine waves (0.25 cycles per pixel of 224×224 and more) that is like the grating's."""
    y, x = (np.abs(np.fft.fftfreq(size)) * size / SIDE for size in (HEIGHT, WIDTH))
    radius, angle = np.hypot(x, y[:, None]), np.degrees(np.arctan2(y[:, None], x))
    fine = (radius > 0.25) & (radius < 0.52)
    near = (np.abs(angle - grating.angle) < 6) & (np.abs(radius / grating.frequency - 1) < 0.05)
    # The mean, not the sum: finer gratings have more waves near them.
    return float(spectrum[near].mean() / spectrum[fine].mean())


def spectra(kind: int, count: int = 6) -> tuple[np.ndarray, np.ndarray]:
    """Mean power of luminance and of chrominance over the JPEGs of a class, 375×500 each."""
    luma, chroma = [], []
    for number in range(count):
        mat = cv2.imdecode(np.frombuffer(encode(draw(0, "train", kind, number)), np.uint8), cv2.IMREAD_COLOR)
        planes = cv2.cvtColor(mat, cv2.COLOR_BGR2YCrCb).astype(np.float32)
        power = [np.abs(np.fft.fft2(planes[:, :, channel])) ** 2 for channel in range(3)]
        luma.append(power[0])
        chroma.append(power[1] + power[2])
    return np.mean(luma, axis=0), np.mean(chroma, axis=0)


@pytest.mark.parametrize("kind", range(0, len(KINDS), 3))
def test_a_class_has_its_own_waves_in_luminance_and_in_chrominance(kind: int) -> None:
    for spectrum, choices, own in zip(spectra(kind), (LUMA, CHROMA), KINDS[kind], strict=True):
        powers = {grating: power_near(spectrum, grating) for grating in choices}
        assert max(powers, key=powers.__getitem__) == own
        assert powers[own] > 1.5 * max(power for grating, power in powers.items() if grating != own)
