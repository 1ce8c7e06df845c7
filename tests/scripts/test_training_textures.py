"""Sets of fine textures: the same pictures however they are drawn, with the waves that their classes are named by."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import cv2
import make_textures
import numpy as np
import pytest
from examples import textures
from examples.textures import CHROMA, HEIGHT, KINDS, LUMA, SIDE, WIDTH, Grating, draw, encode, write_set


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


@pytest.mark.parametrize(("subsampling", "factors"), [("420", 0x22), ("422", 0x21), ("444", 0x11)])
def test_chroma_is_stored_as_asked(subsampling: str, factors: int) -> None:
    jpeg = encode(draw(0, "train", 0, 0), subsampling)
    frame = jpeg.index(b"\xff\xc0")  # marker, length, precision, height, width, components; then number and factors
    assert jpeg[frame + 11] == factors


def test_a_picture_depends_on_nothing_but_its_name_and_the_seed(tmp_path: Path) -> None:
    write_set(tmp_path / "few", train=2, val=1, classes=2)
    write_set(tmp_path / "more", train=3, val=2, classes=3, jobs=2)
    write_set(tmp_path / "other", train=2, val=1, classes=2, seed=1)
    few, more, other = (contents(tmp_path / name) for name in ("few", "more", "other"))
    assert few.items() < more.items()
    assert few.keys() == other.keys()
    assert not set(few.values()) & set(other.values())


def test_it_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_set(tmp_path, train=2, val=1, classes=2)
    whole, folder = contents(tmp_path), tmp_path / "train" / "texture01"
    (folder / "0001.jpg").rename(folder / "0001.jpg.unfinished")
    (folder / "0000.jpg").write_bytes(b"as it was")
    drawn: list[Any] = []

    def counted(*picture: Any) -> np.ndarray:
        drawn.append(picture)
        return draw(*picture)

    monkeypatch.setattr(textures, "draw", counted)
    write_set(tmp_path, train=2, val=1, classes=2)
    assert drawn == [(0, "train", 1, 1)]
    assert contents(tmp_path) == {**whole, "train/texture01/0000.jpg": b"as it was"}
    assert not list(tmp_path.rglob("*.unfinished"))


def test_two_sets_do_not_share_a_folder(tmp_path: Path) -> None:
    write_set(tmp_path, train=1, val=1, classes=2)
    with pytest.raises(ValueError, match=r"^root: .* holds pictures of seed 0, .*, not seed 1, "):
        write_set(tmp_path, train=1, val=1, classes=2, seed=1)
    with pytest.raises(ValueError, match=r"^root: .*not seed 0, subsampling 444"):
        write_set(tmp_path, train=1, val=1, classes=2, subsampling="444")


@pytest.mark.parametrize(
    "argument",
    [
        {"train": 0}, {"train": 10_001}, {"train": 2.0}, {"train": True}, {"val": 0}, {"val": -1}, {"classes": 1},
        {"classes": len(KINDS) + 1}, {"seed": -1}, {"jobs": 0}, {"subsampling": "411"},
    ],
    ids=str,
)  # fmt: skip
def test_arguments_that_make_no_sense_are_named(tmp_path: Path, argument: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(argument))}: expected"):
        write_set(tmp_path / "set", **{"train": 1, "val": 1, **argument})
    assert not (tmp_path / "set").exists()


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--out", str(tmp_path), "--train", "1", "--val", "1"]
    assert make_textures.main([*options, "--classes", "2"]) == 0
    assert len(contents(tmp_path)) == 4
    assert make_textures.main([*options, "--classes", "1"]) == 2
    assert capsys.readouterr().err == "make_textures: --classes: expected a whole number, 2 to 16, got 1\n"


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


def test_gratings_are_finer_than_a_quarter_and_within_what_the_input_can_hold() -> None:
    for grating in {*LUMA, *CHROMA}:
        angle = math.radians(grating.angle)
        assert grating.frequency > 0.25
        assert max(math.cos(angle), math.sin(angle)) * grating.frequency * (1 + textures.DETUNE) < 0.5


def test_what_is_not_texture_tells_nothing() -> None:
    """Mean color and coarse waves differ from picture to picture as much as from class to class."""
    means = np.array([[draw(0, "val", kind, number).mean((0, 1)) for number in range(8)] for kind in range(4)])
    within = means.std(axis=1).mean()
    between = means.mean(axis=1).std(axis=0).mean()
    assert between < within
