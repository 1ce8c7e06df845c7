"""Inputs of a loader: datasets of encoded images, in files or packed into LMDB, and transforms."""

from __future__ import annotations

import json
import numbers
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchpipe_py.backends.signature import shown_dims
from torchpipe_py.errors import quoted
from torchpipe_py.training.errors import TrainingError, UnreadableFile, library

FORMAT = 1
HEADER = b"header"
COMMIT_BYTES = 64 << 20
SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""The suffixes of torchvision's ``ImageFolder``."""
INTERPOLATION = "INTER_LINEAR"  # ResizeMat's default


def cv2_loader(path: str | os.PathLike[str]) -> bytes:
    """The file's bytes, not decoded; for a dataset's ``loader``: ``ImageFolder(root, loader=cv2_loader)``.

    Raises ``UnreadableFile`` (an ``OSError``), naming the file, if it cannot be read or is empty.
    """
    name = os.fspath(path)
    try:
        with open(name, "rb") as file:
            encoded = file.read()
    except OSError as error:
        raise UnreadableFile(f"{name}: cannot be read: {error.strerror or error}") from None
    if not encoded:
        raise UnreadableFile(f"{name}: the file is empty")
    return encoded


class ImageFiles:
    """A dataset of ``(encoded bytes, label)`` from a list of ``(path, label)``: ``samples``.

    Raises ``TrainingError`` for anything else than pairs. Only a ``loader`` of yours may take what is not a path.
    """

    def __init__(self, samples: Sequence[tuple[Any, Any]], loader: Callable[[Any], bytes] = cv2_loader) -> None:
        if isinstance(samples, (str, bytes, os.PathLike)):
            raise TrainingError(f"ImageFiles takes (path, label) pairs, got {samples!r}; a folder: ImageFolder")
        self.samples, self._loader = list(samples), loader
        for sample in self.samples:
            is_pair = not isinstance(sample, (str, bytes)) and hasattr(sample, "__len__") and len(sample) == 2
            if not is_pair or (loader is cv2_loader and not isinstance(sample[0], (str, bytes, os.PathLike))):
                raise TrainingError(f"ImageFiles takes (path, label) pairs, got {quoted(sample)}")

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[bytes, Any]:
        path, label = self.samples[index]
        return self._loader(path), label


class ImageFolder(ImageFiles):
    """Images in one folder per class, including subfolders and links to folders; ``classes`` are sorted by name.

    It has the samples of torchvision's ``ImageFolder(root, loader=cv2_loader)`` in the same order, without torchvision.
    Left out are named pipes, links to a folder around them, and hidden folders without an image, such as
    ``.ipynb_checkpoints``. Raises ``TrainingError`` for a folder without classes, or a class without images.
    """

    def __init__(self, root: str | os.PathLike[str], loader: Callable[[Any], bytes] = cv2_loader) -> None:
        self.root = Path(root).expanduser()
        if not self.root.is_dir():
            raise TrainingError(f"{root}: no such folder (working directory: {os.getcwd()})")
        self.classes: list[str] = []
        samples = []
        for name in sorted(folder.name for folder in self.root.iterdir() if folder.is_dir()):
            paths = _images_of(self.root / name)
            if not paths and name.startswith("."):
                continue
            if not paths:
                raise TrainingError(f"{self.root / name}: no image in it (looked for {' '.join(SUFFIXES)})")
            samples += [(path, len(self.classes)) for path in paths]
            self.classes.append(name)
        if not self.classes:
            raise TrainingError(f"{root}: no folder in it; expected one for each class")
        super().__init__(samples, loader)


def _images_of(folder: Path) -> list[str]:
    """The images of a class, folder by folder, as torchvision lists them."""
    try:
        return [os.path.join(place, name) for place, names in sorted(_files_below(str(folder))) for name in names]
    except OSError as error:
        raise TrainingError(f"{error.filename}: cannot be read: {error.strerror}") from error


def _files_below(folder: str, around: tuple[str, ...] = ()) -> Iterator[tuple[str, list[str]]]:
    """Each folder from ``folder`` on, and its image files; a link to a folder ``around`` it is not followed."""
    place, names, folders = os.path.realpath(folder), [], []
    if place in around:
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            is_link = entry.is_symlink()
            if entry.is_dir(follow_symlinks=False) or (is_link and os.path.isdir(entry.path)):
                folders.append(entry.path)
            # A broken link is one of them, and reading it reports the error; reading a FIFO or device may never end.
            elif entry.name.lower().endswith(SUFFIXES) and (
                entry.is_file(follow_symlinks=False)
                or (is_link and (os.path.isfile(entry.path) or not os.path.exists(entry.path)))
            ):
                names.append(entry.name)
    yield folder, sorted(names)
    for inner in folders:
        yield from _files_below(inner, (*around, place))


def pack_folder(root: str | os.PathLike[str], target: str | os.PathLike[str]) -> int:
    """Write the images of a folder of classes into a new LMDB folder ``target``; returns their number.

    Files are stored unchanged, not decoded. A file that cannot be read, or is empty, raises ``UnreadableFile``.
    ``target`` appears when it is complete; raises ``TrainingError`` if it already exists, or if the library is missing.
    """
    lmdb = library("lmdb", "lmdb", "packing")
    files, place = ImageFolder(root), Path(target)
    if place.exists():
        raise TrainingError(f"{place}: is there already")
    # In the same parent, so that it can be renamed; a new folder, so that no other process has put anything there.
    with tempfile.TemporaryDirectory(prefix=f".{place.name}.", dir=place.absolute().parent) as folder:
        unfinished = Path(folder, "unfinished")
        _write(lmdb, files, unfinished)
        os.replace(unfinished, place)
    return len(files)


def _write(lmdb: Any, files: ImageFolder, place: Path) -> None:
    size = sum(os.stat(path).st_size + 4096 for path, _ in files.samples)
    pending = 0
    # Pages of 4096 bytes: allow for the unused end of each image's last page, and for the tree.
    with lmdb.open(str(place), map_size=2 * size + (16 << 20), lock=False) as database:
        transaction = database.begin(write=True)
        for index, (path, label) in enumerate(files.samples):
            try:
                encoded, _ = files[index]
            except UnreadableFile:
                transaction.abort()
                raise
            name = os.path.relpath(path, files.root)
            transaction.put(_key(index), json.dumps([label, name]).encode() + b"\n" + encoded)
            pending += len(encoded)
            if pending > COMMIT_BYTES:
                transaction.commit()
                transaction, pending = database.begin(write=True), 0
        header = {"format": FORMAT, "count": len(files), "classes": files.classes}
        transaction.put(HEADER, json.dumps(header).encode())
        transaction.commit()


class LmdbImages:
    """The dataset that ``pack_folder`` wrote: ``(encoded bytes, label)``, with ``classes``.

    Each process opens it on first read, so it may be passed to workers. LMDB opens a database only once in a process:
    ``close`` one of these before another reads the same database. Raises ``TrainingError`` if it is missing, not of
    this format, or already open.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._database: Any = None
        self._process = -1  # the process that opened it
        if not (self.path / "data.mdb").is_file():
            raise TrainingError(f"{self.path}: no LMDB database (working directory: {os.getcwd()})")
        try:
            header = self._get(HEADER) or b""
        finally:
            self.close()
        self.classes, self._count = _classes_and_count(header, self.path)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        (label, _), encoded = self._record(index)
        return encoded, label

    def name(self, index: int) -> str:
        """The path of the image within the packed folder."""
        return str(self._record(index)[0][1])

    def close(self) -> None:
        """Close the database; the next read opens it again."""
        if self._database is not None and self._process == os.getpid():
            self._database.close()
        self._database = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_database": None}

    def _record(self, index: int) -> tuple[list[Any], bytes]:
        record = self._get(_key(index)) if 0 <= index < self._count else None
        if record is None:
            raise IndexError(f"{self.path}: no sample {index}, there are {self._count}")
        facts, _, encoded = record.partition(b"\n")
        return json.loads(facts), encoded

    def _get(self, key: bytes) -> bytes | None:
        # NOTE: an environment must not be used across a fork.
        if self._database is None or self._process != os.getpid():
            lmdb = library("lmdb", "lmdb", "LmdbImages")
            self._database = None  # close it first: a process opens a database only once
            try:
                self._database = lmdb.open(str(self.path), readonly=True, lock=False, readahead=False, max_readers=1)
            except lmdb.Error as error:
                raise TrainingError(f"{self.path}: {error}") from error
            self._process = os.getpid()
            self._check_size()
        with self._database.begin() as transaction:
            value: bytes | None = transaction.get(key)
        return value

    def _check_size(self) -> None:
        """``TrainingError`` for a file that is cut short: reading its missing pages would kill the process."""
        needed = (self._database.info()["last_pgno"] + 1) * self._database.stat()["psize"]
        size = (self.path / "data.mdb").stat().st_size
        if size < needed:
            self.close()
            raise TrainingError(f"{self.path}: cut short: data.mdb has {size} bytes, expected {needed}; pack it again")


def _classes_and_count(header: bytes, path: Path) -> tuple[list[str], int]:
    """Classes and count in the header of a packed folder; ``TrainingError`` for any other header."""
    try:
        values = json.loads(header)
    except ValueError:
        values = None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise TrainingError(f"{path}: not a database that pack_folder wrote")
    classes, count = values.get("classes"), values.get("count")
    if (
        not isinstance(classes, list)
        or not all(isinstance(name, str) for name in classes)
        or not isinstance(count, int)
        or count < 0
    ):
        raise TrainingError(f"{path}: its header is damaged: expected names of classes and a count; pack it again")
    return classes, count


def _key(index: int) -> bytes:
    return b"%012d" % index


class TensorToTensor:
    """Replaces ``ToTensor``: converts the pipe's output to float32 C×H×W in 0..1, on the same device.

    Takes a Tensor 1×C×H×W or C×H×W, uint8 or floating point, with values in 0..255; for the end of ``transforms_cpu``
    also a ``PIL.Image`` or a uint8 array H×W×C or H×W. Raises ``TypeError`` for anything else.
    """

    def __call__(self, image: Any) -> Any:
        tensor = image if isinstance(image, torch.Tensor) else _planes(image)
        if tensor.ndim == 4 and tensor.shape[0] == 1:
            tensor = tensor[0]
        if tensor.ndim != 3:
            raise TypeError(f"expected a Tensor 1xCxHxW or CxHxW, got {shown_dims(tensor.shape)}")
        if tensor.dtype != torch.uint8 and not tensor.is_floating_point():
            raise TypeError(f"expected a Tensor of uint8 or floats in 0..255, got {tensor.dtype}")
        # Divide, as ToTensor does: multiplying by 1/255 differs in the last bit.
        floats = tensor.to(torch.float32)
        return floats.div(255.0) if floats is tensor else floats.div_(255.0)

    def __repr__(self) -> str:
        return "TensorToTensor()"


class cv2Resize:
    """Resize to ``h`` × ``w`` pixels by bilinear ``cv2.resize``, exactly like ``ResizeMat``; for ``transforms_cpu``.

    Takes a ``PIL.Image`` or a uint8 array H×W×C or H×W, and returns the same kind. torchpipe's ``cv2Resize((w, h))``
    takes OpenCV's size, and always returns an array in RGB order, so that ``ToPILImage`` or ``ToTensor`` can follow.
    Raises ``ValueError`` for a side below 1, ``TypeError`` for one number, or one that is not
    whole.
    """

    def __init__(self, h: int | tuple[int, int], w: int | None = None) -> None:
        self.gives_array = w is None
        if w is None:
            if not isinstance(h, (tuple, list)) or len(h) != 2:
                raise TypeError(f"cv2Resize takes h and w, or OpenCV's size (w, h), got {h!r}")
            w, h = h
        if isinstance(h, (tuple, list)):
            raise TypeError(f"cv2Resize takes h and w, or OpenCV's size (w, h), got {h!r} and {w!r}")
        for side in (h, w):
            if not isinstance(side, numbers.Integral) or isinstance(side, bool):
                raise TypeError(f"cv2Resize: the sides are whole numbers of pixels, got h={h!r}, w={w!r}")
        if h < 1 or w < 1:
            raise ValueError(f"cv2Resize: the sides are at least 1 pixel, got h={h}, w={w}")
        self.h, self.w = int(h), int(w)

    def __call__(self, image: Any) -> Any:
        import cv2
        from PIL import Image

        mat = _mat(image, "a PIL.Image")
        if mat.shape[:2] != (self.h, self.w):
            channels = mat.shape[2:]
            mat = cv2.resize(mat, (self.w, self.h), None, 0, 0, getattr(cv2, INTERPOLATION))
            mat = mat.reshape(self.h, self.w, *channels)
        return Image.fromarray(mat) if isinstance(image, Image.Image) and not self.gives_array else mat

    def __repr__(self) -> str:
        return f"cv2Resize(({self.w}, {self.h}))" if self.gives_array else f"cv2Resize(h={self.h}, w={self.w})"


COLOR_TRANSFORMS = {
    *("ColorJitter", "RandomAdjustSharpness", "RandomAutocontrast", "RandomEqualize", "RandomInvert"),
    *("RandomPhotometricDistort", "RandomPosterize", "RandomSolarize"),
    *("AugMix", "AutoAugment", "RandAugment", "TrivialAugmentWide"),
}


def reads_floats_as_0_to_1(transform: Any) -> bool:
    """Whether it is, or contains, a transform of torchvision's that clips or scales floats for values of 0..1."""
    for kind in type(transform).__mro__:
        if kind.__module__.startswith("torchvision.transforms") and kind.__name__ in COLOR_TRANSFORMS:
            return True
    parts = [*getattr(transform, "transforms", ())]
    if isinstance(transform, torch.nn.Module):
        parts += transform.children()
    return any(map(reads_floats_as_0_to_1, parts))


def _planes(image: Any) -> Any:
    """An image H×W×C or H×W as a uint8 Tensor C×H×W."""
    mat = np.atleast_3d(_mat(image, "a Tensor, a PIL.Image"))
    return torch.from_numpy(np.ascontiguousarray(mat.transpose(2, 0, 1)))


def _mat(image: Any, expected: str) -> np.ndarray:
    mat = np.asarray(image)
    if mat.dtype != np.uint8 or mat.ndim not in (2, 3):
        raise TypeError(f"expected {expected} or a uint8 array HxWxC, got {type(image).__name__} of {mat.dtype}")
    return mat
