"""cv2_loader, TensorToTensor and cv2Resize."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import encode, picture
from PIL import Image

from torchpipe_py import DecodeError, pipe
from torchpipe_py.training import TensorToTensor, UnreadableFile, cv2_loader, cv2Resize
from torchpipe_py.training.samples import decode_rgb


def test_the_loader_passes_bytes_on(tmp_path: Path, jpeg: bytes) -> None:
    path = tmp_path / "one.jpg"
    path.write_bytes(jpeg)
    assert cv2_loader(str(path)) == cv2_loader(path) == jpeg


def test_the_loader_names_the_file_that_it_cannot_read(tmp_path: Path) -> None:
    (tmp_path / "empty.jpg").touch()
    with pytest.raises(UnreadableFile, match=r"none\.jpg: cannot be read: No such file"):
        cv2_loader(tmp_path / "none.jpg")
    with pytest.raises(OSError, match=r"empty\.jpg: the file is empty"):
        cv2_loader(tmp_path / "empty.jpg")
    with pytest.raises(UnreadableFile, match="cannot be read"):
        cv2_loader(tmp_path)


def test_pictures_have_the_pixels_of_the_pipe(jpeg: bytes) -> None:
    with pipe({"backend": "DecodeMat", "color": "rgb"}) as run:
        run(data := {"data": jpeg})
    assert np.array_equal(np.asarray(decode_rgb(jpeg)), data["result"])
    with pytest.raises(DecodeError, match="8 bytes"):
        decode_rgb(b"no image")


@pytest.mark.parametrize("shape", [(1, 3, 5, 4), (3, 5, 4)])
def test_a_tensor_becomes_a_float_in_0_to_1(shape: tuple[int, ...]) -> None:
    values = torch.arange(60, dtype=torch.uint8).reshape(shape) * 4
    result = TensorToTensor()(values)
    assert (result.shape, result.dtype) == ((3, 5, 4), torch.float32)
    assert torch.equal(result, values.reshape(3, 5, 4).float() / 255)
    for dtype in (torch.float64, torch.float32):
        floats = values.to(dtype)
        assert torch.equal(TensorToTensor()(floats), result)
        assert torch.equal(floats, values.to(dtype))  # left as it was
    assert torch.equal(TensorToTensor()(values.half()), result)


def test_pictures_become_tensors_as_well() -> None:
    mat = picture(6, 5)
    expected = torch.from_numpy(mat.transpose(2, 0, 1).copy()).float() / 255
    assert torch.equal(TensorToTensor()(mat), expected)
    assert torch.equal(TensorToTensor()(Image.fromarray(mat)), expected)
    assert TensorToTensor()(mat[:, :, 0]).shape == (1, 6, 5)


@pytest.mark.parametrize(
    "value", [torch.zeros(2, 3, 4, 4), torch.zeros(4, 4), torch.zeros(3, 4, 4, dtype=torch.int64), "text"]
)
def test_anything_else_is_a_type_error(value: object) -> None:
    with pytest.raises(TypeError, match="expected a Tensor"):
        TensorToTensor()(value)


def test_resize_has_the_pixels_of_the_pipe() -> None:
    jpeg = encode(picture(33, 47))
    toml = {"backend": "S[DecodeMat,ResizeMat]", "resize_h": 20, "resize_w": 31, "color": "rgb"}
    with pipe(toml) as run:
        run(data := {"data": jpeg})
    resized = cv2Resize(20, 31)(decode_rgb(jpeg))
    assert isinstance(resized, Image.Image)
    assert np.array_equal(np.asarray(resized), data["result"])
    mat = np.asarray(decode_rgb(jpeg))
    assert np.array_equal(cv2Resize(h=20, w=31)(mat), data["result"])
    assert cv2Resize(20, 31)(mat[:, :, :1]).shape == (20, 31, 1)
    assert cv2Resize(20, 31)(mat[:, :, 0]).shape == (20, 31)
    with pytest.raises(ValueError, match="at least 1 pixel"):
        cv2Resize(0, 5)


def test_torchvision_takes_what_the_pipe_gives(jpeg: bytes) -> None:
    transforms = pytest.importorskip("torchvision.transforms")
    mat = np.asarray(decode_rgb(jpeg)).copy()
    assert torch.equal(transforms.ToTensor()(mat), TensorToTensor()(mat))
    chain = transforms.Compose([transforms.RandomHorizontalFlip(1.0), TensorToTensor()])
    tensor = torch.from_numpy(mat.transpose(2, 0, 1).copy())[None]
    assert torch.equal(chain(tensor), (tensor[0].float() / 255).flip(2))
