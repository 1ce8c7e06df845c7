"""Which files of a folder are images, and of what; Tensors and Mats in files."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from kit.image_backends import Data, noise, refusal, run

from torchpipe_py import ConfigError, pipe
from torchpipe_py.backends.image import files
from torchpipe_py.backends.image.files import find_images, label_of
from torchpipe_py.backends.image.formats import IMAGE_SUFFIXES


def test_images_of_all_depths_in_the_order_of_their_paths(tmp_path: Path) -> None:
    names = ["b.JPEG", "a.jpg", "deep/c.tiff", "deep/deeper/d.png", "notes.txt", "folder.jpg/e.bmp"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    expected = ["a.jpg", "b.JPEG", "deep/c.tiff", "deep/deeper/d.png", "folder.jpg/e.bmp"]
    assert find_images(str(tmp_path)) == [tmp_path / name for name in expected]


def test_skips_directory_entries_that_are_not_files(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").touch()
    (tmp_path / "broken link.jpg").symlink_to("nowhere")  # whoever reads it is told
    (tmp_path / "link to itself.jpg").symlink_to("link to itself.jpg")
    os.mkfifo(tmp_path / "pipe.jpg")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(os.path.relpath(tmp_path / "socket.jpg"))  # an absolute path may be too long for one
        expected = ["a.jpg", "broken link.jpg", "link to itself.jpg"]
        assert find_images(tmp_path) == [tmp_path / name for name in expected]


def test_labels_come_from_folders_and_names() -> None:
    names = ["circle_03.jpg", "red_square_02.png", "star.jpg", "ring/cross_1.jpg", "ring/deeper/7.jpg"]
    labels = [label_of(Path("images", name), Path("images")) for name in names]
    assert labels == ["circle", "red_square", "star", "ring", "ring"]


def test_refuses_folders_without_images(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}: no image in it .looked for {' '.join(IMAGE_SUFFIXES)}"):
        find_images(tmp_path)
    with pytest.raises(NotADirectoryError, match=f"{tmp_path}/none: no such directory"):
        find_images(tmp_path / "none")


# -- Tensors and Mats in files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5,), (1, 3, 4, 6), ()])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16])
def test_a_tensor_is_saved_and_loaded(tmp_path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.rand(shape).mul(200).to(dtype)
    item = run("SaveTensor", tensor, save_dir=str(tmp_path / "new" / "folder"))
    assert item["result"] is tensor
    assert Path(item["saved"]).parent == tmp_path / "new" / "folder"
    loaded = run("LoadTensor", None, tensor_name=item["saved"])["result"].cpu()
    assert torch.equal(loaded, tensor)
    assert loaded.dtype == dtype


class Runs:
    """Would run when it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, ("/nowhere/at/all",)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"x": torch.zeros(1)}, "it holds no tensor but a dict"),
        (None, "it holds no tensor but a NoneType"),
        (b"", "PyTorch cannot load it: "),
        (b"no tensor", "PyTorch cannot load it: "),
        (Runs(), "PyTorch cannot load it: "),
    ],
    ids=["dict", "none", "empty", "text", "code"],
)
def test_refuses_a_file_without_a_tensor(tmp_path: Path, value: Any, message: str) -> None:
    path = tmp_path / "other.pt"
    if isinstance(value, bytes):
        path.write_bytes(value)
    else:
        torch.save(value, path)
    with pytest.raises(ConfigError, match=rf"LoadTensor.*other\.pt: {message}"):
        pipe({"backend": "LoadTensor", "tensor_name": str(path)})


@pytest.mark.parametrize(("backend", "extension"), [("SaveTensor", ".pt"), ("SaveMat", ".png")])
def test_every_file_has_a_unique_name(tmp_path: Path, backend: str, extension: str) -> None:
    data = torch.zeros(3) if backend == "SaveTensor" else noise(2, 2)
    items: list[Data] = []
    for _ in range(2):
        with pipe({"backend": backend, "save_dir": str(tmp_path), "instance_num": 3}) as p:
            p(batch := [{"data": data} for _ in range(20)])
            items += batch
    names = {os.path.basename(item["saved"]) for item in items}
    assert set(os.listdir(tmp_path)) == names
    assert len(names) == 40
    assert all(name.endswith(extension) for name in names)


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("color", [None, "bgr", "rgb"])
def test_a_mat_is_saved_in_its_color(tmp_path: Path, channels: int, color: str | None) -> None:
    mat = noise(6, 5, channels)
    item = run("SaveMat", {"data": mat} | ({"color": color} if color else {}), save_dir=str(tmp_path))
    assert item["result"] is mat
    shown = mat[:, :, [2, 1, 0, 3][:channels]] if color == "rgb" and channels > 1 else mat
    assert np.array_equal(cv2.imread(item["saved"], cv2.IMREAD_UNCHANGED).reshape(shown.shape), shown)
    assert os.listdir(tmp_path) == [os.path.basename(item["saved"])]


def test_refuses_mats_that_a_png_cannot_hold(tmp_path: Path) -> None:
    message = refusal("SaveMat", noise(4, 4, 5), save_dir=str(tmp_path))
    assert message == "a PNG has 1, 3 or 4 channels, the Mat has 5"
    message = refusal("SaveMat", np.zeros((4, 4, 3), np.float32), save_dir=str(tmp_path))
    assert message.startswith("expected a Mat (uint8 array, HxWxC), got float32")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("backend", ["SaveTensor", "SaveMat"])
def test_refuses_a_folder_that_cannot_be_used(tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("here")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=rf"{backend}.*save_dir '.*file.*' cannot be made"):
            pipe({"backend": backend, "save_dir": str(path)})
    monkeypatch.setattr(files.os, "access", lambda path, mode: False)  # whoever runs this may be root
    with pytest.raises(ConfigError, match=r"save_dir .* cannot be written"):
        pipe({"backend": backend, "save_dir": str(tmp_path)})
