"""Datasets of a training: a folder of classes, an LMDB database packed from one, or either of them in memory.

    python scripts/run.py lmdb --data DIR --out OUT

packs ``DIR/train`` and ``DIR/val`` into ``OUT/train.lmdb`` and ``OUT/val.lmdb``: one large file in place of many small
ones. ``train.py --data OUT`` reads these. Images stay encoded, to the byte.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from recipes.options import guarded
from torchpipe_py.arguments import ArgumentParser
from torchpipe_py.training import ImageFolder, LmdbImages, TrainingError, UnreadableFile, pack_folder

PARTS = ("train", "val")
"""Parts of a training's data: training and validation."""
IN_MEMORY_SHARE = 0.8
"""Share of the available memory that ``--in-memory`` may fill; the training itself needs some, too."""


def open_dataset(data: Path, part: str) -> ImageFolder | LmdbImages:
    """``data/part.lmdb`` if there is one, else the folder of classes ``data/part``; ``TrainingError`` without both."""
    packed, folder = data / f"{part}.lmdb", data / part
    if packed.exists():
        return LmdbImages(packed)
    if not folder.is_dir():
        expected = "expected the folders train/ and val/ in it, or train.lmdb and val.lmdb"
        raise TrainingError(f"--data {data}: {expected}, found no {part}/")
    return ImageFolder(folder)


def agreed_classes(data: Path, train: Any, val: Any) -> list[str]:
    """The ``classes`` of both parts of ``data``; ``TrainingError`` if they differ."""
    if train.classes != val.classes:
        raise TrainingError(f"{data}: train/ has the classes {train.classes}, val/ has {val.classes}")
    classes: list[str] = train.classes
    return classes


class InMemory:
    """A dataset of ``(encoded bytes, label)`` that reads all files at once and keeps them: ``size`` bytes.

    It has the ``classes`` of ``dataset``. A file that cannot be read raises ``UnreadableFile`` when its item is
    requested, as from the disk. A process that is not forked from this one gets a copy.
    """

    def __init__(self, dataset: ImageFolder | LmdbImages) -> None:
        self.classes = dataset.classes
        if isinstance(dataset, ImageFolder):
            self.samples = dataset.samples  # error messages name the files by these
        self._items: list[tuple[bytes, Any] | UnreadableFile] = []
        for index in range(len(dataset)):
            try:
                self._items.append(dataset[index])
            except UnreadableFile as error:
                self._items.append(error)
        self.size = sum(len(item[0]) for item in self._items if isinstance(item, tuple))

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> tuple[bytes, Any]:
        item = self._items[index]
        if isinstance(item, UnreadableFile):
            raise item
        return item


def check_memory(datasets: Sequence[ImageFolder | LmdbImages], args: argparse.Namespace) -> None:
    """Raise ``TrainingError`` if the encoded files do not fit into the available memory."""
    forks = multiprocessing.get_start_method(allow_none=True) in (None, "fork")
    workers = 0 if forks and not args.workers_decode else args.workers
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if args.ddp else 1  # each has a copy
    size, available = sum(map(encoded_bytes, datasets)), available_memory()
    if available is not None and ranks * (1 + workers) * size > IN_MEMORY_SHARE * available:
        where = f" in this process and in each of {workers} workers" if workers else ""
        where += f", for each of {ranks} ranks" if ranks > 1 else ""
        raise TrainingError(
            f"--in-memory: the files take {gigabytes(size)}{where}, {gigabytes(available)} of memory are available, of "
            f"which they may fill {IN_MEMORY_SHARE:.0%}; leave --in-memory out, or pack them (scripts/run.py lmdb)"
        )


def encoded_bytes(dataset: ImageFolder | LmdbImages) -> int:
    """Bytes of its files, or of its database, which is a little larger; a missing file counts 0."""
    if isinstance(dataset, LmdbImages):
        return (dataset.path / "data.mdb").stat().st_size
    return sum(os.path.getsize(path) for path, _ in dataset.samples if os.path.exists(path))


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that this process may still take, of the system or of its container; ``None`` if unknown."""
    amounts = []
    if match := re.search(r"MemAvailable:\s+(\d+) kB", _text(root / "proc/meminfo")):
        amounts.append(int(match[1]) * 1024)
    group = root / "sys/fs/cgroup"
    for limit, used in ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"):
        folder = group if limit == "memory.max" else group / "memory"  # version 2, or 1
        most, now = _text(folder / limit).strip(), _text(folder / used).strip()
        if most.isdigit() and now.isdigit():
            # Cached files count as used, but the system drops them when memory is needed.
            cached = re.search(r"^inactive_file (\d+)", _text(folder / "memory.stat"), re.MULTILINE)
            amounts.append(max(0, int(most) - int(now) + (int(cached[1]) if cached else 0)))
    return min(amounts, default=None)


def gigabytes(size: int) -> str:
    """``1.25 GB``, or ``3.4 MB``."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


# -- the command --------------------------------------------------------------------------------------------------


def pack(data: Path, out: Path) -> None:
    """Pack each part of ``data`` into ``out``; both appear when both are complete.

    ``TrainingError`` if a part is not there or already packed, or if their classes differ.
    """
    for part in PARTS:
        if (out / f"{part}.lmdb").exists():
            raise TrainingError(f"{out / f'{part}.lmdb'}: is there already; remove it, or name another --out")
        if not (data / part).is_dir():
            raise TrainingError(f"--data {data}: expected the folders train/ and val/ in it, found no {part}/")
    agreed_classes(data, *(ImageFolder(data / part) for part in PARTS))
    out.mkdir(parents=True, exist_ok=True)
    names = [f"{part}.lmdb" for part in PARTS]
    # In the same folder, so that they can be renamed.
    with TemporaryDirectory(prefix=".lmdb.", dir=out) as unfinished:
        for part, name in zip(PARTS, names, strict=True):
            began, target = perf_counter(), Path(unfinished, name)
            count = pack_folder(data / part, target)
            size = gigabytes((target / "data.mdb").stat().st_size)
            print(f"{out / name}: {count} images, {size}, {perf_counter() - began:.1f} s", flush=True)
        for name in names:
            os.replace(Path(unfinished, name), out / name)


def main(argv: Sequence[str] | None = None) -> int:
    """0 when packed, 2 with one line on stderr otherwise."""
    parser = ArgumentParser(description="Pack the images of a training into LMDB databases.")
    parser.add_argument("--data", type=Path, required=True, help="a folder with train/ and val/, each of class folders")
    parser.add_argument("--out", type=Path, required=True, help="where train.lmdb and val.lmdb are written")
    args = parser.parse_args(argv)
    return guarded("lmdb", lambda: pack(args.data, args.out))
