"""Folders of classes, and the same packed into LMDB."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest
from conftest import encode, picture
from torch.utils.data import DataLoader
from training_data import FORKS, taken, wrapped

from torchpipe_py.training import ImageFolder, LmdbImages, TrainingError, UnreadableFile, pack_folder

pytestmark = FORKS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(7):
        place = tmp_path / "classes" / ("dog" if number % 2 else "cat") / "deeper"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number}.jpg").write_bytes(encode(picture(20, 20 + number, seed=number)))
    (tmp_path / "classes" / "cat" / "notes.txt").write_text("no image", encoding="utf-8")
    return tmp_path / "classes"


def test_a_folder_of_classes(folder: Path) -> None:
    dataset = ImageFolder(folder)
    assert dataset.classes == ["cat", "dog"]
    assert [label for _, label in dataset.samples] == [0, 0, 0, 0, 1, 1, 1]
    encoded, label = dataset[4]
    assert (encoded, label) == ((folder / "dog" / "deeper" / "1.jpg").read_bytes(), 1)
    with pytest.raises(IndexError):
        dataset[7]


def test_folders_that_are_no_dataset(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="no such folder"):
        ImageFolder(tmp_path / "nowhere")
    with pytest.raises(TrainingError, match="expected one for each class"):
        ImageFolder(folder / "cat" / "deeper")
    (folder / "bird").mkdir()
    with pytest.raises(TrainingError, match="bird: no image in it"):
        ImageFolder(folder)


def test_it_is_torchvisions_folder(folder: Path) -> None:
    datasets = pytest.importorskip("torchvision.datasets")
    from torchpipe_py.training import cv2_loader

    theirs, ours = datasets.ImageFolder(str(folder), loader=cv2_loader), ImageFolder(folder)
    assert [theirs[index] for index in range(7)] == [ours[index] for index in range(7)]
    assert theirs.classes == ours.classes


def test_without_the_library_it_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lmdb", None)
    with pytest.raises(TrainingError, match=r"packing needs lmdb \(pip install lmdb\)"):
        pack_folder(folder, folder / "out.lmdb")


def test_a_packed_folder_is_the_same_dataset(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("lmdb")
    progress = []
    target = tmp_path / "packed"
    assert pack_folder(folder, target, on_progress=lambda done, total: progress.append((done, total))) == 7
    files, packed = ImageFolder(folder), LmdbImages(target)
    assert progress[-1] == (7, 7)
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
    packed.close()
    packed.close()
    assert packed[0] == files[0]
    packed.close()
    with pytest.raises(TrainingError, match="is there already"):
        pack_folder(folder, target)


def test_workers_read_a_packed_folder(folder: Path, tmp_path: Path, toml: str) -> None:
    pytest.importorskip("lmdb")
    pack_folder(folder, tmp_path / "packed")
    packed = LmdbImages(tmp_path / "packed")
    assert packed[0]  # open here before the workers start
    with wrapped(packed, toml, workers=2) as loader, wrapped(ImageFolder(folder), toml) as plain:
        assert [batch[1] for batch in taken(loader)] == [batch[1] for batch in taken(plain)]
    packed.close()


def test_files_that_cannot_be_packed(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("lmdb")
    (folder / "dog" / "empty.jpg").touch()
    with pytest.raises(UnreadableFile, match=r"empty\.jpg: the file is empty"):
        pack_folder(folder, tmp_path / "packed")
    assert not list(tmp_path.glob("packed*"))
    assert pack_folder(folder, tmp_path / "packed", bad_files="skip") == 7
    with pytest.raises(ValueError, match="bad_files"):
        pack_folder(folder, tmp_path / "other", bad_files="mask")


def test_what_is_no_database(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="no LMDB database"):
        LmdbImages(tmp_path)


def test_a_plain_dataloader_reads_it_as_well(folder: Path) -> None:
    (encoded, labels), *_ = DataLoader(ImageFolder(folder), batch_size=4)  # type: ignore[arg-type]
    assert len(encoded) == 4
    assert labels.tolist() == [0, 0, 0, 0]
