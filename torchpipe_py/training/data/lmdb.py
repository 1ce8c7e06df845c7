"""A dataset of files as one LMDB database, which reads faster where files are many and small."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchpipe_py.training.data.datasets import ImageFolder
from torchpipe_py.training.errors import TrainingError, UnreadableFile, library

FORMAT = 1
HEADER = b"header"
COMMIT_BYTES = 64 << 20


def pack_folder(
    root: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    bad_files: str = "raise",
    on_progress: Callable[[int, int], object] = lambda done, total: None,
) -> int:
    """Write the images of a folder of classes into a new LMDB folder ``target``; how many there are in it.

    Files go in as they are, undecoded. One that cannot be read, or is empty, raises ``UnreadableFile``, or is left out
    with ``bad_files="skip"``. ``target`` appears when it is complete; ``TrainingError`` if it is there already, or
    without the library.
    """
    lmdb = library("lmdb", "lmdb", "packing")
    if bad_files not in ("raise", "skip"):
        raise ValueError(f"bad_files is 'raise' or 'skip', got {bad_files!r}")
    files, place = ImageFolder(root), Path(target)
    if place.exists():
        raise TrainingError(f"{place}: is there already")
    # Beside it, so that it can be renamed; a folder of its own, so that nobody else has put anything there.
    with tempfile.TemporaryDirectory(prefix=f".{place.name}.", dir=place.absolute().parent) as folder:
        unfinished = Path(folder, "unfinished")
        count = _write(lmdb, files, unfinished, bad_files == "skip", on_progress)
        os.replace(unfinished, place)
    return count


def _write(lmdb: Any, files: ImageFolder, place: Path, skips: bool, on_progress: Callable[[int, int], object]) -> int:
    size = sum(os.stat(path).st_size + 4096 for path, _ in files.samples)
    count, pending = 0, 0
    # Pages of 4096 bytes: what an image leaves of its last one, and the tree above them, is lost.
    with lmdb.open(str(place), map_size=2 * size + (16 << 20), lock=False) as database:
        transaction = database.begin(write=True)
        for done, (path, label) in enumerate(files.samples, 1):
            try:
                encoded, _ = files[done - 1]
            except UnreadableFile:
                if not skips:
                    transaction.abort()
                    raise
                continue
            name = os.path.relpath(path, files.root)
            transaction.put(_key(count), json.dumps([label, name]).encode() + b"\n" + encoded)
            count, pending = count + 1, pending + len(encoded)
            if pending > COMMIT_BYTES:
                transaction.commit()
                transaction, pending = database.begin(write=True), 0
            on_progress(done, len(files))
        header = {"format": FORMAT, "count": count, "classes": files.classes}
        transaction.put(HEADER, json.dumps(header).encode())
        transaction.commit()
    return count


class LmdbImages:
    """The dataset that ``pack_folder`` wrote: ``(encoded bytes, label)``, with ``classes``.

    Opened in each process when it is first read there, so it may be handed to workers. LMDB opens a database once in a
    process: ``close`` one of these before another reads the same. ``TrainingError`` where it is not there, not of this
    format, or open already.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._database: Any = None
        self._process = -1
        if not os.path.isfile(os.path.join(self._path, "data.mdb")):
            raise TrainingError(f"{self._path}: no LMDB database (working directory: {os.getcwd()})")
        header = json.loads(self._get(HEADER) or b"{}")
        self.close()
        if header.get("format") != FORMAT:
            raise TrainingError(f"{self._path}: not a database that pack_folder wrote")
        self.classes: list[str] = header["classes"]
        self._count: int = header["count"]

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        (label, _), encoded = self._record(index)
        return encoded, label

    def name(self, index: int) -> str:
        """The path of the image within the folder that was packed."""
        return str(self._record(index)[0][1])

    def close(self) -> None:
        """Close the database; it is opened again when it is read."""
        if self._database is not None and self._process == os.getpid():
            self._database.close()
        self._database = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_database": None, "_process": -1}

    def _record(self, index: int) -> tuple[list[Any], bytes]:
        record = self._get(_key(index)) if 0 <= index < self._count else None
        if record is None:
            raise IndexError(f"{self._path}: no sample {index}, there are {self._count}")
        facts, _, encoded = record.partition(b"\n")
        return json.loads(facts), encoded

    def _get(self, key: bytes) -> bytes | None:
        # NOTE: an environment must not be used across a fork.
        if self._database is None or self._process != os.getpid():
            self._open()
        with self._database.begin() as transaction:
            value: bytes | None = transaction.get(key)
        return value

    def _open(self) -> None:
        lmdb = library("lmdb", "lmdb", "LmdbImages")
        self._database = None  # before the next: a process opens a database once
        try:
            self._database = lmdb.open(self._path, readonly=True, lock=False, readahead=False, max_readers=1)
        except lmdb.Error as error:
            raise TrainingError(f"{self._path}: {error}") from error
        self._process = os.getpid()


def _key(index: int) -> bytes:
    return b"%012d" % index
