"""Reading, patterns, atomic writes; the kinds of model files, for error messages."""

from __future__ import annotations

import errno
import os
import re
import uuid
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import BinaryIO, Literal

from torchpipe_py.errors import nearest_name

ENCRYPTED = b"\x89TPENC\r\n"
"""First bytes of an encrypted model."""

ENGINE = b"ftrt"
"""First bytes of TensorRT engines, from 8.6 to 11; trtexec checks them too."""

ONNX = b"\x08"
"""First byte of ONNX files: the first field of a ModelProto, its version."""

ZIP = b"PK\x03\x04"
"""First bytes of PyTorch's files."""


MOST_READ = 2**28
"""Maximum bytes of a file that is read whole, except a model."""

_PART_BYTES = 2**16
_MAGIC = re.compile(r"[*?[]")


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """The content of a file or FIFO; ``OSError`` beyond ``MOST_READ``, since ``/dev/zero``, for example, has no end."""
    with open(path, "rb") as file:
        size = min(os.fstat(file.fileno()).st_size, MOST_READ)
        content = file.read(size + 1)
        if len(content) > size:  # it has grown, or has no size, as a FIFO
            content += file.read(MOST_READ - size)
    if len(content) > MOST_READ:
        raise OSError(errno.EFBIG, f"it has more than {MOST_READ >> 20} MiB")
    return content


def leave_deleted_folder() -> str:
    """Go to ``/`` if the working directory was deleted: there is no absolute path in one.

    Returns a sentence for the user; empty if the directory is there.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        os.chdir("/")
        return "the working directory was deleted: relative paths are now of /"
    return ""


def missing(path: str, suffix: str = "") -> str:
    """The end of a message that there is no ``path``: what is probably meant, or else the working directory."""
    meant = nearest_path(path, suffix)
    return f"; did you mean {meant!r}?" if meant else f" (working directory: {os.getcwd()})"


def nearest_path(path: str, suffix: str = "") -> str:
    """The file or folder that ``path`` probably means; empty if there is none.

    With ``suffix`` it is a file with it or, if ``path`` has no suffix, perhaps a folder.
    """
    folder, name = os.path.split(path)
    try:
        names = sorted(each for each in os.listdir(folder or ".") if not each.startswith("."))
    except (OSError, ValueError):
        return ""
    stem, end = os.path.splitext(name)
    if suffix:
        folders = [] if end else [each for each in names if os.path.isdir(os.path.join(folder, each))]
        names = folders + [each for each in names if each.endswith(suffix)]
    # NOTE: suffixes would make all names alike. Of names that differ only by them, the last has that of ``path``.
    names.sort(key=lambda each: os.path.splitext(each)[1] == end)
    by_stem = {os.path.splitext(each)[0]: each for each in names}
    meant = nearest_name(stem, by_stem)
    return os.path.join(folder, by_stem[meant]) if meant else ""


class FileContent:
    """Bytes of an open file by slices, fewer than asked for where it ends. ``ValueError`` for an empty file.

    NOTE: not ``mmap``, which ends the process (SIGBUS) if the file is written anew meanwhile, as ``cp`` does.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._size = file, os.fstat(file.fileno()).st_size
        if not self._size:
            raise ValueError("an empty file")
        self._start, self._part = 0, b""

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, span: slice) -> bytes:
        start, end = span.start, min(span.stop, self._size)
        if not self._start <= start <= end <= self._start + len(self._part):
            self._start, self._part = start, os.pread(self._file.fileno(), max(end - start, _PART_BYTES), start)
        return self._part[start - self._start : max(end, start) - self._start]


def is_pattern(text: str) -> bool:
    """Whether a path has ``*``, ``?`` or ``[``."""
    return _MAGIC.search(text) is not None


def iter_matches(pattern: str) -> Iterator[str]:
    """The files that a pattern matches, the names of one folder in memory at a time, each folder's in order.

    ``**`` is any number of folders; ``*`` and ``?`` match no name that begins with a dot, as in a shell.
    """
    top = re.match(r"/*", pattern)
    root = top[0] if top else ""
    parts = [part for part in pattern[len(root) :].split("/") if part not in ("", ".")]
    yield from _below(root, parts)


def _below(folder: str, parts: list[str]) -> Iterator[str]:
    part, rest = parts[0], parts[1:]
    if part == "**":
        yield from _below(folder, rest or ["*"])
        for name in _names(folder, "*"):
            path = os.path.join(folder, name)
            if os.path.isdir(path) and not os.path.islink(path):
                yield from _below(path, parts)
        return
    names = _names(folder, part) if is_pattern(part) else [part]
    for name in names:
        path = os.path.join(folder, name)
        if rest:
            if os.path.isdir(path):
                yield from _below(path, rest)
        elif os.path.isfile(path):
            yield path


def _names(folder: str, part: str) -> list[str]:
    try:
        names = os.listdir(folder or ".")
    except OSError:  # as glob does
        return []
    return sorted(name for name in names if fnmatchcase(name, part) and (part[0] == "." or name[0] != "."))


def output_problem(path: str | os.PathLike[str], replaces: bool = False) -> str:
    """The reason why ``path`` cannot be written, to be checked before long work; empty if none is known.

    ``replaces``: for ``replace_file``, which writes to the folder, not to an existing file.
    """
    folder = os.path.dirname(path) or "."
    try:
        os.lstat(_unfinished(path) if replaces else path)
    except OSError as error:  # it is to be made
        if error.errno == errno.ENAMETOOLONG:
            return "File name too long"
    except ValueError as error:  # a null character, say
        return str(error)
    if os.path.isdir(path):
        return "is a directory"
    if not os.path.isdir(folder):
        return f"no such folder: {folder}"
    # NOTE: os.path returns False where pathlib raises, for example in a folder without search permission.
    place = folder if replaces or not os.path.exists(path) else path
    return "" if os.access(place, os.W_OK) else "Permission denied"


def replace_file(path: str | os.PathLike[str], content: bytes | memoryview, mode: int = 0o666) -> None:
    """Write ``content`` to ``path`` atomically, as ``replacing`` does; ``mode`` is reduced by the umask."""
    with replacing(path, mode) as file:
        file.write(content)


def _unfinished(path: str | os.PathLike[str]) -> str:
    """The random name under which ``replacing`` writes a file: 38 bytes longer."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.{uuid.uuid4().hex}.tmp")


@contextmanager
def replacing(path: str | os.PathLike[str], mode: int = 0o666) -> Iterator[BinaryIO]:
    """Write ``path`` atomically: readers see the old or the new file.

    It is written under a random name and renamed: a link at ``path`` is replaced, never followed. Raises ``OSError``;
    after that, or an exception inside, no new file remains.
    """
    unfinished = _unfinished(path)
    try:
        # "x" is O_EXCL: an existing name, even a link, is an error.
        with open(unfinished, "xb", opener=lambda file, flags: os.open(file, flags, mode)) as file:
            yield file
        os.replace(unfinished, path)
    except BaseException:
        if os.path.exists(unfinished):
            os.unlink(unfinished)
        raise


def file_kind(path: str | os.PathLike[str]) -> str:
    """The kind of a file that should be a model, by its first bytes, and what to do with it; empty if unknown."""
    with open(path, "rb") as file:
        return content_kind(file, f"torchpipe export MODEL --weights {os.fspath(path)} makes an ONNX file of it")


def content_kind(file: BinaryIO, checkpoint: str) -> str:
    """``file_kind`` of a file opened at its start; ``checkpoint`` says what to do with a checkpoint."""
    start = file.read(512)
    if start.startswith(ENCRYPTED):
        return "it is an encrypted model, which key_file or key_env of its node opens"
    if not start:
        return "it is empty"
    if start.startswith(b"version https://git-lfs"):
        return "it is a pointer of git-lfs to the file: git lfs pull fetches that"
    if start.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        return "it is an HTML page, as a download leaves that was refused"
    if start.startswith(ZIP):
        return _archive_kind(file, checkpoint)
    if start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return f"it is a pickle, as old PyTorch checkpoints are: {checkpoint}"
    if start.startswith(ENGINE):
        return "it is an engine: TensorrtTensor takes it"
    if start.startswith(ONNX):
        return "it begins as an ONNX file does; OnnxTensor takes one that is whole"
    return ""


def archive_kind(file: str | BinaryIO) -> Literal["checkpoint", "aotinductor", "torchscript", "export", ""]:
    """The kind of PyTorch file that a zip archive is, by the names in it; nothing is unpacked.

    A checkpoint is any other file of ``torch.save``. Raises ``zipfile.BadZipFile`` and ``OSError``.
    """
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
    ends = {name.rpartition("/")[2] for name in names if name.count("/") == 1}
    if "data.pkl" in ends and "constants.pkl" not in ends:
        return "checkpoint"
    if any("/aotinductor/" in name or name.endswith("AOTI_MODEL") for name in names):
        return "aotinductor"
    if any(name.endswith("constants.pkl") for name in names):
        return "torchscript"
    is_export = any(name.endswith(("/archive_format", "serialized_exported_program.json")) for name in names)
    return "export" if is_export else ""


def _archive_kind(file: BinaryIO, checkpoint: str) -> str:
    try:
        kind = archive_kind(file)
    except zipfile.BadZipFile:
        return "it is a zip archive, as PyTorch checkpoints are, cut short or damaged"
    if kind == "checkpoint":
        return f"it is a PyTorch checkpoint: {checkpoint}"
    return "it is TorchScript or a .pt2 file: TorchTensor takes it" if kind else "it is a zip archive"
