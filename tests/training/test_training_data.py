"""Datasets, files packed into LMDB, and transforms: the pixels are those of the pipe."""

from __future__ import annotations

import os
import pickle
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import encode, picture
from kit.training_data import FORKS, taken, wrapped
from PIL import Image

from torchpipe_py import DecodeError, pipe
from torchpipe_py.backends.image.decoders import Decoders
from torchpipe_py.plan.build import plan_pipeline
from torchpipe_py.training import (
    ImageFolder,
    LmdbImages,
    TensorToTensor,
    TrainingError,
    UnreadableFile,
    cv2_loader,
    cv2Resize,
    pack_folder,
)
from torchpipe_py.training.data import reads_floats_as_0_to_1
from torchpipe_py.training.samples import pil_image

pytestmark = FORKS


def decoded_rgb(encoded: bytes) -> Any:
    """The image that ``transforms_cpu`` gets."""
    return pil_image(Decoders.of(plan_pipeline({"backend": "DecodeMat", "color": "rgb"})).decode(encoded))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(7):
        place = tmp_path / "classes" / ("dog" if number % 2 else "cat") / "deeper"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number}.jpg").write_bytes(encode(picture(20, 20 + number, seed=number)))
    (tmp_path / "classes" / "cat" / "notes.txt").write_text("no image", encoding="utf-8")
    return tmp_path / "classes"


def test_image_folder_lists_classes_and_files(folder: Path, tmp_path: Path) -> None:
    dataset = ImageFolder(folder)
    assert dataset.classes == ["cat", "dog"]
    assert [label for _, label in dataset.samples] == [0, 0, 0, 0, 1, 1, 1]
    assert dataset[4] == ((folder / "dog" / "deeper" / "1.jpg").read_bytes(), 1)
    (folder / "bird").mkdir()
    for place, message in (
        (tmp_path / "nowhere", "no such folder"),
        (folder / "cat" / "deeper", "expected one for each class"),
        (folder, "bird: no image in it"),
    ):
        with pytest.raises(TrainingError, match=message):
            ImageFolder(place)


def test_image_folder_lists_what_torchvisions_lists(tmp_path: Path) -> None:
    root, other = tmp_path / "root", tmp_path / "other"
    names = (
        "b/2.jpg",
        "b/10.JPEG",
        "b/a/x.png",
        "b/a-b/y.webp",
        "b/c.bmp",
        "b/._0.jpg",
        "a/1.ppm",
        "a/1.PGM",
        "a/1.tif",
    )
    more = (
        "a/1.tif",
        "a/1.tiff",
        "a/.jpg",
        "a/Thumbs.db",
        "a/notes.txt",
        "a/anim.gif",
        "a/x.jfif",
        "top.jpg",
        ".hidden/z.png",
    )
    for name in (*names, *more):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    (other / "deep").mkdir(parents=True)
    (other / "deep" / "linked.jpg").touch()
    (root / "c").symlink_to(other)
    (root / "b" / "d").symlink_to(other / "deep")
    (root / "a" / "broken.jpg").symlink_to(root / "nowhere.jpg")
    ours = ImageFolder(root)
    listed = [(os.path.relpath(path, root), label) for path, label in ours.samples]
    assert ours.classes == [".hidden", "a", "b", "c"]
    assert listed == [
        (".hidden/z.png", 0),
        *((f"a/{name}", 1) for name in (".jpg", "1.PGM", "1.ppm", "1.tif", "1.tiff", "broken.jpg")),
        *((f"b/{name}", 2) for name in ("._0.jpg", "10.JPEG", "2.jpg", "c.bmp")),
        *((f"b/{name}", 2) for name in ("a/x.png", "a-b/y.webp", "d/linked.jpg")),
        ("c/deep/linked.jpg", 3),
    ]
    with suppress(ImportError):
        from torchvision.datasets import ImageFolder as Theirs

        theirs = Theirs(str(root))
        assert (theirs.samples, theirs.classes) == (ours.samples, ours.classes)


def test_image_folder_leaves_out_what_would_never_end(tmp_path: Path) -> None:
    (tmp_path / "a" / "deep").mkdir(parents=True)
    (tmp_path / "a" / "1.jpg").touch()
    (tmp_path / "a" / "deep" / "again").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "itself").symlink_to(tmp_path / "a" / "itself")
    os.mkfifo(tmp_path / "a" / "pipe.jpg")
    (tmp_path / ".ipynb_checkpoints").mkdir()
    dataset = ImageFolder(tmp_path)
    assert (dataset.classes, dataset.samples) == (["a"], [(str(tmp_path / "a" / "1.jpg"), 0)])


def test_image_folder_and_transforms_agree_with_torchvision(folder: Path, jpeg: bytes) -> None:
    datasets = pytest.importorskip("torchvision.datasets")
    transforms = pytest.importorskip("torchvision.transforms")
    theirs, ours = datasets.ImageFolder(str(folder), loader=cv2_loader), ImageFolder(folder)
    assert ([*theirs], theirs.classes) == ([ours[index] for index in range(7)], ours.classes)
    mat = np.asarray(decoded_rgb(jpeg)).copy()
    assert torch.equal(transforms.ToTensor()(mat), TensorToTensor()(mat))
    chain = transforms.Compose([transforms.RandomHorizontalFlip(1.0), TensorToTensor()])
    tensor = torch.from_numpy(mat.transpose(2, 0, 1).copy())[None]
    assert torch.equal(chain(tensor), (tensor[0].float() / 255).flip(2))


def test_cv2_loader_names_a_file_that_it_cannot_read(tmp_path: Path, jpeg: bytes) -> None:
    (tmp_path / "one.jpg").write_bytes(jpeg)
    (tmp_path / "empty.jpg").touch()
    assert cv2_loader(str(tmp_path / "one.jpg")) == jpeg
    for name, message in (("none.jpg", "cannot be read: No such file"), ("empty.jpg", "is empty"), ("", "cannot be")):
        with pytest.raises(UnreadableFile, match=rf"{name}: .*{message}"):
            cv2_loader(tmp_path / name)


def test_packed_folder_is_the_same_dataset(folder: Path, tmp_path: Path, toml: str) -> None:
    pytest.importorskip("lmdb")
    target = tmp_path / "packed"
    assert pack_folder(folder, target) == 7
    files, packed = ImageFolder(folder), LmdbImages(target)
    assert packed.classes == files.classes
    assert [packed[index] for index in range(len(packed))] == [files[index] for index in range(7)]
    assert packed.name(4) == "dog/deeper/1.jpg"
    copied = pickle.loads(pickle.dumps(packed))
    with pytest.raises(TrainingError, match="already open"):
        copied[3]
    packed.close()
    assert copied[3] == files[3]
    copied.close()
    with pytest.raises(IndexError, match="no sample 7, there are 7"):
        packed[7]
    assert packed[0]  # open here before the workers start
    with wrapped(packed, toml, workers=2) as loader, wrapped(files, toml) as plain:
        assert [batch[1] for batch in taken(loader)] == [batch[1] for batch in taken(plain)]
    packed.close()


def test_packing_refuses_bad_files_and_places(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrainingError, match="no LMDB database"):
        LmdbImages(tmp_path)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "lmdb", None)
        with pytest.raises(TrainingError, match=r"packing needs lmdb \(pip install lmdb\)"):
            pack_folder(folder, tmp_path / "packed")
    pytest.importorskip("lmdb")
    (folder / "dog" / "empty.jpg").touch()
    with pytest.raises(UnreadableFile, match=r"empty\.jpg: the file is empty"):
        pack_folder(folder, tmp_path / "packed")
    assert not list(tmp_path.glob("packed*"))
    (tmp_path / "packed").mkdir()
    with pytest.raises(TrainingError, match="is there already"):
        pack_folder(folder, tmp_path / "packed")


def test_a_database_that_is_cut_short_is_refused(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("lmdb")
    pack_folder(folder, tmp_path / "packed")
    file = tmp_path / "packed" / "data.mdb"
    whole = file.read_bytes()
    packed = LmdbImages(tmp_path / "packed")
    file.write_bytes(whole[:-1])
    for read in (lambda: packed[0], lambda: LmdbImages(tmp_path / "packed")):
        with pytest.raises(
            TrainingError, match=rf"cut short: data\.mdb has {len(whole) - 1} bytes, expected {len(whole)}"
        ):
            read()
    file.write_bytes(whole)
    assert packed[0]
    packed.close()


@pytest.mark.parametrize(
    ("header", "message"),
    [
        *(
            (text, "not a database that pack_folder wrote")
            for text in ("", "[1]", "3", "hello", "\xff", '{"format": 2}')
        ),
        *(
            (f'{{"format": 1, {rest}}}', "its header is damaged")
            for rest in ('"count": 3', '"classes": null, "count": 3', '"classes": [1], "count": 3', '"classes": ["a"]')
        ),
    ],
)
def test_refuses_database_of_another_kind(tmp_path: Path, header: str, message: str) -> None:
    lmdb = pytest.importorskip("lmdb")
    with lmdb.open(str(tmp_path / "other")) as database, database.begin(write=True) as transaction:
        transaction.put(b"header", header.encode("latin-1"))
    for _ in range(2):  # it is closed after the first
        with pytest.raises(TrainingError, match=message):
            LmdbImages(tmp_path / "other")


def test_cv2_resize_takes_whole_numbers() -> None:
    assert repr(cv2Resize(np.int64(3), 4)) == "cv2Resize(h=3, w=4)"  # type: ignore[arg-type]
    for sides in ((20.5, 31), (20, "31"), (True, 31), ((20, None),)):
        with pytest.raises(TypeError, match="the sides are whole numbers of pixels"):
            cv2Resize(*sides)  # type: ignore[arg-type]


def test_decoded_and_resized_pixels_equal_the_pipes() -> None:
    jpeg = encode(picture(33, 47))
    toml = {"backend": "S[DecodeMat,ResizeMat]", "resize_h": 20, "resize_w": 31, "color": "rgb"}
    with pipe(toml) as run:
        run(data := {"data": jpeg})
    decoded = decoded_rgb(jpeg)
    mat = np.asarray(decoded)
    assert np.array_equal(np.asarray(cv2Resize(20, 31)(decoded)), data["result"])
    assert np.array_equal(cv2Resize(h=20, w=31)(mat), data["result"])
    assert cv2Resize(20, 31)(mat[:, :, :1]).shape == (20, 31, 1)
    with pytest.raises(ValueError, match="at least 1 pixel"):
        cv2Resize(0, 5)
    for arguments in ((20,), ((20, 31, 3),), ((20, 31), 5)):
        with pytest.raises(TypeError, match=r"takes h and w, or OpenCV's size \(w, h\)"):
            cv2Resize(*arguments)  # type: ignore[arg-type]
    with pytest.raises(DecodeError, match="8 bytes"):
        decoded_rgb(b"no image")


def test_cv2_resize_of_opencvs_size_gives_an_array_for_to_pil_image() -> None:
    decoded = decoded_rgb(encode(picture(33, 47)))
    resized = cv2Resize((31, 20))(decoded)
    assert isinstance(resized, np.ndarray)
    assert np.array_equal(resized, np.asarray(cv2Resize(h=20, w=31)(decoded)))
    assert repr(cv2Resize((31, 20))) == "cv2Resize((31, 20))"


class ColorJitter(torch.nn.Module):
    """Like torchvision's: it takes floats for values of 0..1."""

    __module__ = "torchvision.transforms.transforms"

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return image.clamp(0, 1.0 if image.is_floating_point() else 255)


class Chain:
    def __init__(self, *transforms: Any) -> None:
        self.transforms = transforms

    def __call__(self, image: Any) -> Any:
        for transform in self.transforms:
            image = transform(image)
        return image


FLOATS = {"backend": "S[DecodeMat,Mat2Tensor,ResizeTensor]", "resize_h": 24, "resize_w": 20, "device": "cpu"}


@pytest.mark.parametrize(
    "chain",
    [Chain(Chain(ColorJitter()), TensorToTensor()), Chain(torch.nn.Sequential(ColorJitter()), TensorToTensor())],
)
def test_floats_of_a_pipe_are_rounded_before_color_transforms_which_would_clip_them(dataset: Any, chain: Chain) -> None:
    with (
        wrapped(dataset, FLOATS, transforms_gpu=None) as plain,
        wrapped(dataset, FLOATS, transforms_gpu=chain) as loader,
    ):
        for (floats, _), (images, _) in zip(plain, loader, strict=True):
            assert floats.dtype == images.dtype == torch.float32
            assert torch.equal(images, floats.round() / 255)
            assert not torch.equal(images, floats / 255)


def test_floats_of_a_pipe_are_not_rounded_before_other_transforms(dataset: Any) -> None:
    chain = Chain(TensorToTensor())
    with (
        wrapped(dataset, FLOATS, transforms_gpu=None) as plain,
        wrapped(dataset, FLOATS, transforms_gpu=chain) as loader,
    ):
        for (floats, _), (images, _) in zip(plain, loader, strict=True):
            assert torch.equal(images, floats / 255)


def test_color_transforms_of_torchvision_are_known_wherever_they_stand() -> None:
    transforms = pytest.importorskip("torchvision.transforms")
    v2 = pytest.importorskip("torchvision.transforms.v2")
    jitter = transforms.ColorJitter(0.05, 0.05, 0.05)
    for known in (
        transforms.Compose([transforms.RandomApply([jitter]), TensorToTensor()]),
        transforms.RandomChoice([transforms.RandomCrop(8), jitter]),
        torch.nn.Sequential(transforms.RandomApply(torch.nn.ModuleList([jitter]))),
        v2.Compose([v2.RandomCrop(8), v2.RandomPhotometricDistort()]),
        transforms.RandAugment(),
    ):
        assert reads_floats_as_0_to_1(known)
    flips = [transforms.RandomHorizontalFlip(), transforms.RandomGrayscale(), transforms.RandomRotation(10)]
    for other in (transforms.Compose([*flips, TensorToTensor(), transforms.Normalize([0.5], [0.5])]), None, len):
        assert not reads_floats_as_0_to_1(other)


@pytest.mark.parametrize("shape", [(1, 3, 5, 4), (3, 5, 4)])
def test_tensor_to_tensor_gives_floats_in_0_to_1(shape: tuple[int, ...]) -> None:
    values = torch.arange(60, dtype=torch.uint8).reshape(shape) * 4
    expected = values.reshape(3, 5, 4).float() / 255
    for dtype in (torch.uint8, torch.float64, torch.float32, torch.float16):
        given = values.to(dtype)
        assert torch.equal(TensorToTensor()(given), expected)
        assert torch.equal(given, values.to(dtype))  # left as it was
    mat = np.ascontiguousarray(values.reshape(3, 5, 4).numpy().transpose(1, 2, 0))
    assert torch.equal(TensorToTensor()(mat), expected)
    assert torch.equal(TensorToTensor()(Image.fromarray(mat)), expected)
    assert TensorToTensor()(mat[:, :, 0]).shape == (1, 5, 4)
    for value in (torch.zeros(2, 3, 4, 4), torch.zeros(4, 4), torch.zeros(3, 4, 4, dtype=torch.int64), "text"):
        with pytest.raises(TypeError, match="expected a Tensor"):
            TensorToTensor()(value)
