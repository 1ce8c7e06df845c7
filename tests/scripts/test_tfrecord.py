"""scripts/run.py tfrecord, and a training by DALI on its output."""

from __future__ import annotations

import struct
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import train
from kit.training_data import write_classes
from recipes import tfrecord
from recipes.tfrecord import TfRecordImages, masked_crc, write_record
from test_training_dali import dali, loader_of, needs_dali, same, steps
from test_training_scripts import accuracies, ran

from torchpipe_py.training import ImageFolder, TrainingError

__all__ = ["dali"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Eleven images to train on, five to validate with, in two classes."""
    write_classes(tmp_path / "data", 11, 5)
    return tmp_path / "data"


@pytest.fixture
def packed(folder: Path, tmp_path: Path, capsys: Any) -> Path:
    out = tmp_path / "packed"
    assert tfrecord.main(["--data", str(folder), "--out", str(out)]) == 0
    assert f"{out / 'train.tfrecord'}: 11 images" in capsys.readouterr().out
    return out


def test_checksums_are_masked_crc_32c() -> None:
    mask = 0xA282EAD8
    for data, crc in ((b"123456789", 0xE3069283), (bytes(32), 0x8A9136AA), (bytes(range(32)), 0x46DD794E)):
        assert masked_crc(data) == (((crc >> 15) | (crc << 17)) + mask) % 2**32


def test_records_hold_the_files_and_their_labels(folder: Path, packed: Path) -> None:
    for part, is_ordered in (("train", False), ("val", True)):
        records, files = TfRecordImages(packed, part), ImageFolder(folder / part)
        assert records.classes == files.classes
        images = [records.image(position) for position in range(len(records))]
        wanted = [files[position][0] for position in range(len(files))]
        assert (images == wanted) is is_ordered
        assert sorted(images) == sorted(wanted)
        whole = records.path.read_bytes()
        for start, size in records.records:
            length, of_length = struct.unpack_from("<QI", whole, start)
            data, (of_data,) = (
                whole[start + 12 : start + 12 + length],
                struct.unpack_from("<I", whole, start + size - 4),
            )
            assert (masked_crc(whole[start : start + 8]), masked_crc(data)) == (of_length, of_data)


def test_an_index_is_written_where_it_is_missing_or_of_another_file(packed: Path) -> None:
    index = packed / "val.tfrecord.idx"
    text = index.read_text()
    other = text.replace(f" {text.split()[1]}\n", " 20\n", 1)  # which ends where the file does
    for change in (index.unlink, *(partial(index.write_text, wrong) for wrong in ("0 7\n", "no index", other))):
        change()
        assert len(TfRecordImages(packed, "val")) == 5
        assert index.read_text() == text


@needs_dali
def test_validation_images_equal_those_of_the_folder(folder: Path, packed: Path) -> None:
    with loader_of(folder / "val", False) as files, loader_of(TfRecordImages(packed, "val"), False) as records:
        assert same(list(steps(records, 2)), list(steps(files, 2)))


@needs_dali
def test_training_images_come_in_another_order_each_epoch(folder: Path, packed: Path) -> None:
    dataset = TfRecordImages(packed, "train")
    files = ImageFolder(folder / "train")
    labels = {files[position][0]: files[position][1] for position in range(11)}
    orders = set()
    with loader_of(dataset, batch_size=11) as loader:
        for _, _, indices, found, _ in steps(loader, 3):
            assert sorted(indices) == list(range(11))
            assert found == [labels[dataset.image(index)] for index in indices]
            orders.add(tuple(indices))
    assert len(orders) == 3


@needs_dali
@pytest.mark.parametrize("is_training", [True, False])
def test_ranks_share_the_records(packed: Path, is_training: bool) -> None:
    seen = []
    for rank in range(2):
        with loader_of(TfRecordImages(packed, "train"), is_training, batch_size=3, rank=rank, ranks=2) as loader:
            assert len(loader) == 2
            seen += [(epoch, index) for epoch, _, indices, *_ in steps(loader, 2) for index in indices]
    once = [(epoch, index) for epoch in range(2) for index in range(11)]
    assert sorted(seen) == sorted([*once, (0, 0), (1, 0)] if is_training else once)


@pytest.mark.slow
@needs_dali
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_state_goes_on_with_the_next_batch(packed: Path, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(states: list[Any], own: Any) -> None:
        states[:] = [own, own]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    dataset, options = TfRecordImages(packed, "train"), {"augments": ("crop",), "rank": ranks - 1, "ranks": ranks}
    states, whole = [], []
    with loader_of(dataset, **options) as loader:
        for step in steps(loader, 3):  # in which each rank reads the other's part, and its own again
            whole.append(step)
            states.append(loader.state_dict())
    with loader_of(dataset, **options) as other:
        for position, state in enumerate(states, 1):
            other.load_state_dict(state)
            assert same(list(steps(other, 3)), whole[position:]), position


@needs_dali
@pytest.mark.slow
def test_the_script_trains_on_it(packed: Path, capsys: Any) -> None:
    options = ("--dali", "--data", packed, "--device", "cpu", "--size", 32, "--batch-size", 4, "--epochs", 8)
    assert accuracies(ran(capsys, *options, "--augment", "crop"))[-1] == (1.0, 5)


# -- what a user can mend ---------------------------------------------------------------------------------------------


def told(capsys: Any, packed: Path, *more: object) -> str:
    capsys.readouterr()
    assert train.main(["--data", str(packed), "--device", "cpu", "--size", "32", "--dali", *map(str, more)]) == 2
    return str(capsys.readouterr().err.strip().splitlines()[-1])


@needs_dali
def test_damaged_files_are_named(packed: Path, capsys: Any) -> None:
    path, index = packed / "val.tfrecord", packed / "val.tfrecord.idx"
    whole = path.read_bytes()
    second = TfRecordImages(packed, "val").records[1][0]
    for content, reason in (
        (whole[:-1], "cut short: record 4, at byte"),
        (whole[: second + 5], f"cut short: record 1, at byte {second}, ends after the file"),
        (whole[:second] + b"other bytes of no record", f"damaged after 1 records: a wrong checksum at byte {second}"),
        (b"no record, but some text", "no TFRecord: a wrong checksum at byte 0"),
        (b"", "it is empty"),
    ):
        path.write_bytes(content)
        index.unlink(missing_ok=True)
        assert f"{path}: {reason}" in told(capsys, packed)
    path.unlink()
    assert "expected train.tfrecord and val.tfrecord, no val" in told(capsys, packed)


@needs_dali
@pytest.mark.slow
def test_names_records_of_another_kind(packed: Path, capsys: Any) -> None:
    path = packed / "val.tfrecord"

    def wrote(*records: bytes) -> str:
        with path.open("wb") as file:
            for record in records:
                write_record(file, record)
        return told(capsys, packed, "--batch-size", 4, "--epochs", 1)

    good = TfRecordImages(packed, "train").image(0)
    assert "a record is not a tf.train.Example" in wrote(b"\xff\xff")
    assert "expected the features image/encoded and image/class/label, the first record has none" in wrote(b"")
    line = wrote(tfrecord.make_example(good, 1), tfrecord.make_example(good, 2))
    assert "has the image/class/label 2, expected 0 to 1, a line of labels.txt" in line
    line = wrote(tfrecord.make_example(good, 1), tfrecord.make_example(b"no image", 1))
    assert f"{path}, record 1, at byte" in line
    assert "cannot be decoded: not an image" in line
    (packed / "labels.txt").unlink()
    assert "labels.txt: expected a name of a class in each line" in told(capsys, packed)


def test_pipe_refuses_tfrecords(packed: Path, capsys: Any) -> None:
    capsys.readouterr()
    assert train.main(["--data", str(packed), "--toml", "configs/preprocess_cpu.toml"]) == 2
    assert "add --dali, or train from class folders, or from LMDB (pack_folder" in capsys.readouterr().err


def test_packing_refuses_other_classes(folder: Path, tmp_path: Path, capsys: Any) -> None:
    (folder / "val" / "red").rename(folder / "val" / "green")
    assert tfrecord.main(["--data", str(folder), "--out", str(tmp_path / "out")]) == 2
    assert "val/ has ['blue', 'green']" in capsys.readouterr().err
    with pytest.raises(TrainingError, match="no train"):
        TfRecordImages(folder, "train")


def test_a_set_that_is_there_is_not_packed_over(folder: Path, packed: Path, capsys: Any) -> None:
    for name in ("labels.txt", "train.tfrecord", "val.tfrecord"):
        assert tfrecord.main(["--data", str(folder), "--out", str(packed)]) == 2
        assert f"{packed / name}: already exists; remove it" in capsys.readouterr().err
        (packed / name).unlink()


def test_failed_packing_leaves_no_file(folder: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    (folder / "val" / "red" / "01.jpg").write_bytes(b"")
    assert tfrecord.main(["--data", str(folder), "--out", str(out)]) == 2
    assert "01.jpg: the file is empty" in capsys.readouterr().err
    assert not list(out.iterdir())


@pytest.mark.parametrize(
    ("name", "is_packed"), [("a\x0cb\u2028c", True), ("a\nb", False), ("a\rb", False), ("\udcff", False)]
)
def test_names_of_classes_are_lines_of_utf8(
    folder: Path, tmp_path: Path, name: str, is_packed: bool, capsys: Any
) -> None:
    for part in ("train", "val"):
        (folder / part / "red").rename(folder / part / name)
    assert tfrecord.main(["--data", str(folder), "--out", str(tmp_path / "out")]) == (0 if is_packed else 2)
    if is_packed:
        assert name in TfRecordImages(tmp_path / "out", "train").classes
    else:
        assert f"labels.txt cannot hold the class {name!r}" in capsys.readouterr().err


@needs_dali
def test_a_state_of_files_is_not_one_of_records(folder: Path, packed: Path) -> None:
    with loader_of(folder / "train") as files:
        state = files.state_dict()
    assert torch.is_tensor(state["pipelines"][0])
    with (
        loader_of(TfRecordImages(packed, "train")) as records,
        pytest.raises(TrainingError, match="reader = FileReader"),
    ):
        records.load_state_dict(state)
