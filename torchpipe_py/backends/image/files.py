"""Image files of a folder, and Mats and Tensors in files."""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from torchpipe_py.backends.base import Data, ItemBackend
from torchpipe_py.backends.cuda import Guard, on_stream
from torchpipe_py.backends.image.formats import IMAGE_SUFFIXES
from torchpipe_py.backends.image.mat import EIGHT_BITS, OF_MATS, as_mat, color_of
from torchpipe_py.backends.image.tensor import on_tensors
from torchpipe_py.backends.params import Param
from torchpipe_py.backends.signature import MAT, TENSOR
from torchpipe_py.errors import ConfigError, InvalidRequest, first_line
from torchpipe_py.files import replace_file
from torchpipe_py.keys import TASK_COLOR_KEY, TASK_DATA_KEY, TASK_RESULT_KEY
from torchpipe_py.values import to_str


def find_images(folder: str | os.PathLike[str]) -> list[Path]:
    """The images of ``iter_images`` as a list."""
    return list(map(Path, iter_images(folder)))


def iter_images(folder: str | os.PathLike[str]) -> Iterator[str]:
    """All files below ``folder`` with one of ``IMAGE_SUFFIXES``, in any case, in the order of their paths.

    Named pipes, sockets and other non-files are left out. Paths start with ``folder``. Only the names of one folder at
    a time, and of those around it, are in memory. Raises ``OSError`` if ``folder`` is not a folder, cannot be read or
    holds no image; the message is complete and begins with the folder's path.
    """
    if not os.path.isdir(folder):
        raise NotADirectoryError(f"{folder}: no such directory")
    is_empty = True
    for path in _images_below(os.fspath(folder)):
        is_empty = False
        yield path
    if is_empty:
        raise FileNotFoundError(f"{folder}: no image in it (looked for {' '.join(IMAGE_SUFFIXES)})")


def _images_below(folder: str) -> Iterator[str]:
    try:
        with os.scandir(folder) as entries:
            named = sorted((each.name, each.is_dir(follow_symlinks=False), _is_file(each)) for each in entries)
    except OSError as error:
        raise PermissionError(f"{error.filename}: cannot be read: {error.strerror}") from error
    for name, is_folder, is_file in named:
        path = os.path.join(folder, name)
        if is_folder:
            yield from _images_below(path)
        # A broken link is one of them, and reading it reports the error; reading a FIFO or device may never end.
        elif (
            name.lower().endswith(IMAGE_SUFFIXES)
            and name.lower() not in IMAGE_SUFFIXES
            and (is_file or not os.path.exists(path))
        ):
            yield path


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:  # a link to itself, or into a folder that cannot be read
        return False


def label_of(path: PurePath, folder: PurePath) -> str:
    """The label of an image of ``find_images(folder)``: ``circle`` of ``circle/03.jpg`` and of ``circle_03.jpg``."""
    first, *others = path.relative_to(folder).parts
    return first if others else path.stem.rpartition("_")[0] or path.stem


@on_tensors
class SaveTensor(ItemBackend):
    """Writes each Tensor, of any shape, to a ``.pt`` file of its own in ``save_dir`` and passes it on.

    The path is ``saved`` in the dict; ``torch.load`` and ``LoadTensor`` read it, as a CPU tensor. The folder is made if
    it is missing. A file gets its name once it is complete. ``ConfigError`` if the folder cannot be written.
    """

    reads = ()
    gives = TENSOR
    keeps_sides = True

    save_dir = Param(to_str, doc="folder for the files")

    def setup(self) -> None:
        make_folder(self.save_dir)

    def forward_tensor(self, tensor: Any, item: Data) -> Any:
        import torch

        file = io.BytesIO()
        # NOTE: a view would be saved with all the memory it looks into: one row with its whole batch.
        torch.save(tensor.detach().clone().cpu(), file)
        # NOTE: the buffer of getbuffer() would stay open as long as the traceback of a failed write.
        item["saved"] = write_new(self.save_dir, ".pt", file.getvalue())
        return tensor


class SaveMat(ItemBackend):
    """Writes each Mat of 1, 3 or 4 channels to a ``.png`` file of its own in ``save_dir`` and passes it on.

    The channel order is the dict's ``color``, BGR without one. The path is ``saved`` in the dict. The folder is
    made if it is missing. A file gets its name once it is complete. ``ConfigError`` if the folder cannot be
    written, ``InvalidRequest`` for another number of channels, a ``color`` that is not a channel order, or a
    Mat that is not ``uint8``.
    """

    reads = (TASK_COLOR_KEY,)

    takes, gives = MAT, MAT
    keeps_sides = True

    save_dir = Param(to_str, doc="folder for the files")

    def setup(self) -> None:
        import cv2

        self._encode: Callable[..., Any] = cv2.imencode
        make_folder(self.save_dir)

    def forward_item(self, item: Data) -> None:
        mat = as_mat(item[TASK_DATA_KEY], EIGHT_BITS)
        channels = mat.shape[2]
        if channels not in (1, 3, 4):
            raise InvalidRequest(f"a PNG has 1, 3 or 4 channels, the Mat has {channels}")
        if color_of(item, channels, OF_MATS) == "rgb":
            mat = mat[:, :, [2, 1, 0, 3][:channels]]
        # What cv2.imwrite does, without its rule that the name of the unfinished file end in ".png" too.
        done, encoded = self._encode(".png", np.ascontiguousarray(mat))
        if not done:
            raise ValueError(f"OpenCV cannot write a Mat of shape {mat.shape} as PNG")
        item["saved"] = write_new(self.save_dir, ".png", memoryview(encoded))
        item[TASK_RESULT_KEY] = item[TASK_DATA_KEY]


@on_stream
class LoadTensor(ItemBackend):
    """The Tensor in the file ``tensor_name``, whatever ``data`` is: a copy on this node's device for each request.

    The file is read once, when the node starts; ``torch.load`` takes tensors from it and runs no code.
    ``ConfigError`` for a file that holds no tensor.
    """

    reads = ()
    gives = TENSOR
    any_batch = True
    guard: Guard

    tensor_name = Param(to_str, file=True, doc="path of a .pt file with one tensor")

    def setup(self) -> None:
        import torch

        path = self.tensor_name
        try:
            value = torch.load(path, map_location=self.guard.device, weights_only=True)
        except Exception as error:
            raise ConfigError(f"tensor_name {path}: PyTorch cannot load it: {first_line(error)}") from error
        if not isinstance(value, torch.Tensor):
            raise ConfigError(f"tensor_name {path}: it holds no tensor but a {type(value).__name__}")
        self._tensor = value.detach()

    def forward_item(self, item: Data) -> None:
        item[TASK_RESULT_KEY] = self._tensor.clone()

    def close(self) -> None:
        self._tensor = None


def make_folder(path: str) -> None:
    """Create the folder if it does not exist; ``ConfigError`` if files cannot be written into it."""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"save_dir {path!r} cannot be made: {error} (working directory: {os.getcwd()})") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"save_dir {path!r} cannot be written (working directory: {os.getcwd()})")


def write_new(folder: str, extension: str, content: bytes | memoryview) -> str:
    """Write a new file with a unique name in ``folder``, and return its path. It gets its name once it is complete."""
    path = os.path.join(folder, uuid.uuid4().hex + extension)
    replace_file(path, content)
    return path
