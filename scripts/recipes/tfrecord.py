"""TFRecord files of labelled images: written from class folders, indexed for DALI, checked.

    python scripts/run.py tfrecord --data DIR --out OUT

packs ``DIR/train`` and ``DIR/val`` into ``OUT/train.tfrecord`` and ``OUT/val.tfrecord``, beside ``OUT/labels.txt``.
``train.py --dali --data OUT`` reads them. Files stay as they are, to the byte; training images are in a random order,
since a reader of TFRecords shuffles only within a buffer. A record is a ``tf.train.Example`` with the features
``image/encoded`` and ``image/class/label``, a line of ``labels.txt`` counted from 0.
"""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, BinaryIO

from recipes.datasets import PARTS, agreed_classes
from recipes.options import guarded, whole_seed
from torchpipe_py.arguments import ArgumentParser
from torchpipe_py.files import replace_file
from torchpipe_py.training import ImageFolder, TrainingError

LABELS = "labels.txt"
IMAGE, LABEL = "image/encoded", "image/class/label"

Records = list[tuple[int, int]]
"""First byte and size of each record, with its length and checksums."""

_LENGTH, _CHECKSUM = struct.Struct("<Q"), struct.Struct("<I")
_AROUND = _LENGTH.size + 2 * _CHECKSUM.size
"""Bytes of a record around its data: the length, and checksums of length and data."""


class TfRecordImages:
    """The images of ``folder/part.tfrecord``.

    ``classes`` are the lines of ``labels.txt``; ``records`` those of the file; ``index`` is a file of these for DALI,
    written beside it if missing or outdated. ``TrainingError`` for a file that is cut short, has no record, or
    is not a TFRecord of images.
    """

    def __init__(self, folder: Path, part: str) -> None:
        self.path = folder / f"{part}.tfrecord"
        if not self.path.is_file():
            raise TrainingError(f"{folder}: expected {' and '.join(f'{name}.tfrecord' for name in PARTS)}, no {part}")
        self.classes = _read_labels(folder / LABELS)
        self.index = Path(f"{self.path}.idx")
        self.records = scan_records(self.path)
        _write_index(self.index, index_text(self.records))
        features = _features(self.data(0), self.path)
        if not {IMAGE, LABEL} <= features.keys():
            names = ", ".join(sorted(features)) or "none"
            raise TrainingError(f"{self.path}: expected the features {IMAGE} and {LABEL}, the first record has {names}")

    def __len__(self) -> int:
        return len(self.records)

    def data(self, position: int) -> bytes:
        """The serialised ``tf.train.Example`` of a record."""
        start, size = self.records[position]
        with open(self.path, "rb") as file:
            file.seek(start + _LENGTH.size + _CHECKSUM.size)
            return file.read(size - _AROUND)

    def image(self, position: int) -> bytes:
        """The encoded image of a record."""
        values = _features(self.data(position), self.path)[IMAGE].bytes_list.value
        return bytes(values[0]) if values else b""

    def encoded(self) -> Iterator[tuple[str, Callable[[], bytes]]]:
        """The name of each image, and a function that reads it."""
        for position, (start, _) in enumerate(self.records):
            yield f"{self.path}, record {position}, at byte {start}", partial(self.image, position)


def has_records(data: Path) -> bool:
    """Whether a training's ``--data`` is a TFRecord instead of folders."""
    return (data / f"{PARTS[0]}.tfrecord").is_file()


def refuse_records(data: Path) -> None:
    """Raise ``TrainingError`` for ``--data`` that only DALI reads."""
    if has_records(data):
        ways = "add --dali, or train from class folders, or from LMDB (pack_folder, LmdbImages)"
        raise TrainingError(
            f"--data {data}: a pipe's loader needs each image by its number, a TFRecord has none: {ways}"
        )


def _read_labels(path: Path) -> list[str]:
    try:
        names = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise TrainingError(f"{path}: expected a name of a class in each line ({error})") from error
    if not names or len(set(names)) != len(names) or not all(names):
        raise TrainingError(f"{path}: expected a name of a class in each line, each once")
    return names


# -- records ------------------------------------------------------------------------------------------------------


def write_record(file: BinaryIO, data: bytes) -> tuple[int, int]:
    """Append a record; its first byte and its size."""
    start, length = file.tell(), _LENGTH.pack(len(data))
    file.write(length + _CHECKSUM.pack(masked_crc(length)) + data + _CHECKSUM.pack(masked_crc(data)))
    return start, len(data) + _AROUND


def scan_records(path: Path) -> Records:
    """Every record, by the lengths in the file, whose checksums are compared; ``TrainingError`` for a damaged file."""
    records: Records = []
    size = path.stat().st_size
    with open(path, "rb", buffering=0) as file:  # a buffer would read 8 KB for 12 bytes
        start = 0
        while start < size:
            file.seek(start)
            head = file.read(_LENGTH.size + _CHECKSUM.size)
            length = head[: _LENGTH.size]
            is_whole = len(head) == _LENGTH.size + _CHECKSUM.size
            if is_whole and _CHECKSUM.unpack_from(head, _LENGTH.size)[0] != masked_crc(length):
                what = "no TFRecord" if not records else f"damaged after {len(records)} records"
                raise TrainingError(f"{path}: {what}: a wrong checksum at byte {start}")
            step = _LENGTH.unpack(length)[0] + _AROUND if is_whole else _AROUND
            if start + step > size:
                raise TrainingError(f"{path}: cut short: record {len(records)}, at byte {start}, ends after the file")
            records.append((start, step))
            start += step
    if not records:
        raise TrainingError(f"{path}: it is empty")
    return records


def masked_crc(data: bytes) -> int:
    """The checksum of a TFRecord: CRC-32C, rotated right by 15 bits, and a constant added. About 10 MB/s."""
    crc, table = 0xFFFFFFFF, _crc_table()
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


@cache
def _crc_table() -> list[int]:
    """Castagnoli's polynomial, its bits reversed."""
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


# -- index --------------------------------------------------------------------------------------------------------


def index_text(records: Sequence[tuple[int, int]]) -> str:
    """The index for DALI: first byte and size of a record in each line."""
    return "".join(f"{start} {size}\n" for start, size in records)


def _write_index(path: Path, text: str) -> None:
    """Unless the file has it."""
    try:
        if path.read_text(encoding="ascii").split() == text.split():
            return
    except (OSError, ValueError):
        pass  # it is missing, or is not an index
    try:
        replace_file(path, text.encode())
    except OSError as error:
        reason = error.strerror or error
        raise TrainingError(f"{path}: cannot be written ({reason}); DALI reads a TFRecord with its index") from error


# -- tf.train.Example ---------------------------------------------------------------------------------------------

_PROTO = """
name: "example.proto" syntax: "proto3"
message_type { name: "BytesList" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES } }
message_type { name: "FloatList" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_FLOAT } }
message_type { name: "Int64List" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 } }
message_type { name: "Feature"
  oneof_decl { name: "kind" }
  field { name: "bytes_list" number: 1 type: TYPE_MESSAGE type_name: ".BytesList" oneof_index: 0 label: LABEL_OPTIONAL }
  field { name: "float_list" number: 2 type: TYPE_MESSAGE type_name: ".FloatList" oneof_index: 0 label: LABEL_OPTIONAL }
  field { name: "int64_list" number: 3 type: TYPE_MESSAGE type_name: ".Int64List" oneof_index: 0 label: LABEL_OPTIONAL }
}
message_type { name: "Features"
  field { name: "feature" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: ".Features.FeatureEntry" }
  nested_type { name: "FeatureEntry" options { map_entry: true }
    field { name: "key" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL }
    field { name: "value" number: 2 type: TYPE_MESSAGE type_name: ".Feature" label: LABEL_OPTIONAL }
  }
}
message_type { name: "Example"
  field { name: "features" number: 1 type: TYPE_MESSAGE type_name: ".Features" label: LABEL_OPTIONAL }
}
"""


@cache
def message_type(file: str, name: str) -> Any:
    """A message of TensorFlow, of a ``FileDescriptorProto`` as text, without TensorFlow; onnx brings protobuf."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(file, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))


def make_example(image: bytes, label: int) -> bytes:
    """The serialised ``tf.train.Example``."""
    example = message_type(_PROTO, "Example")()
    example.features.feature[IMAGE].bytes_list.value.append(image)
    example.features.feature[LABEL].int64_list.value.append(label)
    data: bytes = example.SerializeToString(deterministic=True)
    return data


def _features(data: bytes, path: Path) -> dict[str, Any]:
    from google.protobuf.message import DecodeError

    try:
        return dict(message_type(_PROTO, "Example").FromString(data).features.feature)
    except DecodeError as error:
        raise TrainingError(f"{path}: a record is not a tf.train.Example ({error})") from error


# -- command ------------------------------------------------------------------------------------------------------


def pack(data: Path, out: Path, seed: int) -> None:
    """Pack both parts; return a line for each. The files appear when all are complete.

    ``TrainingError`` if one of them exists, the classes of the parts differ, or ``labels.txt`` cannot hold their names.
    """
    for name in (LABELS, *(f"{part}.tfrecord" for part in PARTS)):
        if (out / name).exists():
            raise TrainingError(f"{out / name}: already exists; remove it, or name another --out")
    train, val = (ImageFolder(data / part) for part in PARTS)
    agreed_classes(data, train, val)
    labels = _labels_text(train)
    out.mkdir(parents=True, exist_ok=True)
    # In the same folder, so that they can be renamed.
    with TemporaryDirectory(prefix=".tfrecord.", dir=out) as aside:
        unfinished = Path(aside)
        (unfinished / LABELS).write_bytes(labels)
        for part, images in zip(PARTS, (train, val), strict=True):
            order = list(range(len(images)))
            if images is train:
                random.Random(seed).shuffle(order)
            path, began = unfinished / f"{part}.tfrecord", perf_counter()
            with open(path, "wb") as file:
                records = [write_record(file, make_example(*images[position])) for position in order]
            Path(f"{path}.idx").write_text(index_text(records), encoding="ascii")
            size = path.stat().st_size / 1e6
            print(f"{out / path.name}: {len(images)} images, {size:.1f} MB, {perf_counter() - began:.1f} s", flush=True)
        files = [f"{part}.tfrecord{suffix}" for suffix in (".idx", "") for part in PARTS]
        for name in (LABELS, *files):  # the last ones make them visible to a training
            os.replace(unfinished / name, out / name)


def _labels_text(images: ImageFolder) -> bytes:
    for name in images.classes:
        try:
            is_line = not set("\n\r") & set(name.encode().decode())
        except UnicodeEncodeError:
            is_line = False
        if not is_line:
            raise TrainingError(f"{images.root}: {LABELS} cannot hold the class {name!r}: a name is a line of UTF-8")
    return "".join(f"{name}\n" for name in images.classes).encode()


def main(argv: Sequence[str] | None = None) -> int:
    """0 when all is packed, 2 with one line on stderr otherwise."""
    parser = ArgumentParser(description="Pack class folders into TFRecord files.")
    option = parser.add_argument
    option("--data", type=Path, required=True, help="a folder with train/ and val/, each of class folders")
    option("--out", type=Path, required=True, help="folder, made where there is none")
    option("--seed", type=whole_seed, default=0, help="of the order of the training images (default: %(default)s)")
    args = parser.parse_args(argv)
    return guarded("tfrecord", lambda: pack(args.data, args.out, args.seed))
