"""The items of a SOURCE, one at a time, in an order that does not change: files, members of tars, frames of videos."""

from __future__ import annotations

import gzip
import os
import re
import stat
import sys
import tarfile
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from hashlib import blake2b
from queue import Empty, Queue
from typing import IO, Any

from torchpipe_py.backends.image.files import iter_images
from torchpipe_py.backends.image.formats import IMAGE_SUFFIXES
from torchpipe_py.errors import ConfigError, TorchpipeError, first_line
from torchpipe_py.files import MOST_READ, is_pattern, iter_matches, missing
from torchpipe_py.plan.config import Place
from torchpipe_py.tools.report import ToolError
from torchpipe_py.wire.json_values import to_text

TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
VIDEO_SUFFIXES = (".mp4", ".mkv", ".avi", ".mov", ".webm", ".m4v", ".mpg", ".mpeg", ".ts")
STDIN = "-"
KEY_BYTES = 16


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_DOWNLOAD_SECONDS = 30.0
_LOOK_SECONDS = 0.1
_MOST_COME = 1024  # lines of a list in a pipe that are read ahead
_MOST_LINE = 2**16  # bytes of a line of a list
_MOST_EMPTY = 16  # reads of a tar beyond its end
_END = object()


class Unreadable(TorchpipeError):
    """A file, URL or archive that cannot be read."""

    code = "unreadable"


@dataclass(frozen=True, slots=True)
class Item:
    """The subject of a line of the output: a file, a member of a tar, or a frame of a video.

    ``path`` is the path as it was given, that of a member ``TAR/NAME``. ``where`` is the path or URL that a worker
    reads; without it, ``load`` gives the bytes of a member or the pixels of a frame, H×W×3 ``uint8`` BGR or RGB, once,
    before the next item is taken. ``error`` is the reason why the source itself cannot be read further.
    """

    path: str
    where: str = ""
    frame: int | None = None
    pts: float | None = None
    load: Callable[[], Any] | None = None
    color: str = ""
    error: TorchpipeError | None = None

    @property
    def key(self) -> bytes:
        """A hash of path and frame, by which a resumed run recognises the item."""
        return key_of(self.path, self.frame)

    def head(self) -> dict[str, str]:
        """The first members of its line, as JSON."""
        members = {"path": to_text("path", self.path)}
        if self.frame is not None:
            members["frame"] = str(self.frame)
            members["pts"] = "null" if self.pts is None else f"{self.pts:.4f}"
        return members


def key_of(path: str, frame: int | None) -> bytes:
    """The hash of an item's path and frame, ``KEY_BYTES`` long."""
    name = path if frame is None else f"{path}\0{frame}"
    return blake2b(name.encode("utf-8", "surrogatepass"), digest_size=KEY_BYTES).digest()


def read_item(where: str) -> bytes:
    """The bytes of a file, or of an http or https URL; ``Unreadable`` if they cannot be had."""
    if is_url(where):
        return _download(where)
    try:
        # NOTE: without O_NONBLOCK, to open a FIFO may never return.
        with open(os.open(where, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise Unreadable("it is not a regular file")
            if status.st_size > MOST_READ:
                raise Unreadable(f"it has more than {MOST_READ >> 20} MiB")
            return file.readall()
    except (OSError, ValueError) as error:
        raise Unreadable(getattr(error, "strerror", None) or first_line(error)) from None


def _download(url: str) -> bytes:
    from http.client import HTTPException
    from urllib.error import HTTPError, URLError
    from urllib.request import urlopen

    if not url.lower().startswith(("http://", "https://")):
        raise Unreadable(f"{url.partition(':')[0]} URLs are not supported: http and https are")
    try:
        with urlopen(url, timeout=_DOWNLOAD_SECONDS) as answer:
            content: bytes = answer.read(MOST_READ + 1)
            missing = answer.length  # NOTE: read with a size returns less than announced, without an error
    except HTTPError as error:
        raise Unreadable(f"the server answered {error.code} {error.reason}") from None
    except URLError as error:
        reason = error.reason
        raise Unreadable(first_line(reason) if isinstance(reason, Exception) else str(reason)) from None
    except HTTPException as error:
        raise Unreadable(f"the server's answer is not valid HTTP: {type(error).__name__}") from None
    except (OSError, ValueError) as error:
        raise Unreadable(first_line(error)) from None
    if len(content) > MOST_READ:
        raise Unreadable(f"it has more than {MOST_READ >> 20} MiB")
    if missing:
        raise Unreadable(f"the connection ended after {len(content)} of {len(content) + missing} bytes")
    return content


class Source:
    """A SOURCE of the command line; see ``open_source``."""

    def __init__(
        self, text: str, entries: Callable[[], Iterator[tuple[str, str] | None]], can_read_again: bool = True
    ) -> None:
        self.text, self._entries, self._can_read_again = text, entries, can_read_again

    def items(self) -> Iterator[Item | None]:
        """The items, from the start; ``None`` while the next line of a list in a pipe has not come."""
        for entry in self._entries():
            if entry is None:
                yield None
                continue
            path, where = entry
            if is_url(where):
                yield Item(path, where)
            elif is_tar(where):
                yield from _members(path, where)
            elif is_video(where):
                yield from _frames(path, where)
            else:
                yield Item(path, where)

    def count(self) -> int | None:
        """The number of items; ``None`` if only reading them tells, as with tars, videos and lists in a pipe."""
        if not self._can_read_again:
            return None
        total = 0
        for _, where in filter(None, self._entries()):
            if _is_archive(where):
                return None
            total += 1
        return total

    def archive(self) -> str:
        """The first tar or video; empty if there is none, or only reading the items tells."""
        entries = filter(None, self._entries()) if self._can_read_again else ()
        return next((path for path, where in entries if _is_archive(where)), "")


def is_url(text: str) -> bool:
    """Whether it begins as a URL does."""
    return _URL.match(text) is not None


def is_tar(path: str) -> bool:
    """Whether the name is that of a tar, perhaps compressed."""
    return path.lower().endswith(TAR_SUFFIXES)


def is_video(path: str) -> bool:
    """Whether the name is that of a video file."""
    return path.lower().endswith(VIDEO_SUFFIXES)


def _is_archive(where: str) -> bool:
    """Whether it is a tar or a video, which holds items of its own."""
    return not is_url(where) and (is_tar(where) or is_video(where))


def open_source(text: str) -> Source:
    """The source that ``text`` names. ``ToolError`` if there is none, or nothing in it.

    - a folder: its images, also those of folders in it, in the order of their paths
    - a pattern with ``*``, ``?``, ``[…]`` or ``**``: the files that it matches, in that order
    - an image, a video (its frames), a tar (the images in it), a URL
    - any other file, or ``-`` for the standard input: a list of all these, one a line; paths are relative to its folder
    """
    if text == STDIN:
        return Source(text, lambda: _as_they_come(lambda: _listed(_standard_input(), STDIN, "")), can_read_again=False)
    if is_url(text):
        return Source(text, lambda: iter([(text, text)]))
    if os.path.isdir(text):
        return Source(text, lambda: ((path, path) for path in _images(text)))
    if os.path.exists(text):
        lowered = text.lower()
        if lowered.endswith((*IMAGE_SUFFIXES, *TAR_SUFFIXES, *VIDEO_SUFFIXES)):
            return Source(text, lambda: iter([(text, text)]))
        _check_list(text)
        if os.path.isfile(text):
            return Source(text, lambda: _of_list(text))
        return Source(text, lambda: _as_they_come(lambda: _of_list(text)), can_read_again=False)
    if is_pattern(text):
        return Source(text, lambda: ((path, path) for path in _matched(text)))
    raise ToolError(f"{text}: no such file or folder{missing(text)}")


def _images(folder: str) -> Iterator[str]:
    try:
        yield from iter_images(folder)
    except OSError as error:
        raise ToolError(first_line(error)) from error


def _matched(pattern: str) -> Iterator[str]:
    is_empty = True
    for path in iter_matches(pattern):
        is_empty = False
        yield path
    if is_empty:
        raise ToolError(f"{pattern}: no file matches (working directory: {os.getcwd()})")


# --- lists


def _check_list(path: str) -> None:
    """``ToolError`` for a file that is not a list."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return  # a pipe, as of <(…)
        with open(path, "rb") as file:
            start = file.read(4096)
    except OSError as error:
        raise ToolError(f"{path}: cannot be read: {error.strerror}") from error
    if b"\0" in start or start.startswith((b"\xff\xd8", b"%PDF", b"PK\x03\x04")):
        raise ToolError(f"{path}: not a list of paths in text, an image, a video or a tar, by its content and name")


def _of_list(path: str) -> Iterator[tuple[str, str]]:
    try:
        with open(path, "rb") as file:
            yield from _listed(file, path, os.path.dirname(path))
    except OSError as error:
        raise ToolError(f"{path}: cannot be read: {error.strerror}") from error


def _listed(file: IO[bytes], name: str, folder: str) -> Iterator[tuple[str, str]]:
    """Each line as it is, and where it is: a path relative to ``folder``. ``ToolError`` for a line that is no path."""
    for number, line in enumerate(iter(lambda: file.readline(_MOST_LINE), b"")):
        if len(line) == _MOST_LINE:
            raise ToolError(f"{name}: not a list of paths: line {number + 1} has {_MOST_LINE} bytes or more")
        text = os.fsdecode(line.removeprefix(b"\xef\xbb\xbf") if number == 0 else line).strip("\r\n")
        if text.strip():
            yield text, text if is_url(text) else os.path.join(folder, text)


def _standard_input() -> IO[bytes]:
    try:
        # NOTE: its own reader, since the interpreter closes that of ``sys.stdin`` at its end, while a thread reads.
        return open(os.dup(sys.stdin.fileno()), "rb")
    except (OSError, ValueError, AttributeError):  # something else in its place
        return sys.stdin.buffer


def _as_they_come(entries: Callable[[], Iterator[tuple[str, str]]]) -> Iterator[tuple[str, str] | None]:
    """The entries of a list that may be written for long; ``None`` as often as none comes for ``_LOOK_SECONDS``."""
    come: Queue[Any] = Queue(_MOST_COME)

    def read() -> None:
        try:
            for entry in entries():
                come.put(entry)
            come.put(_END)
        except BaseException as error:
            come.put(error)

    threading.Thread(target=read, name="run-list", daemon=True).start()
    while True:
        try:
            entry = come.get(timeout=_LOOK_SECONDS)
        except Empty:
            yield None
            continue
        if entry is _END:
            return
        if isinstance(entry, BaseException):
            raise entry
        yield entry


# --- tars and videos, which the parent of the workers reads


def _members(path: str, where: str) -> Iterator[Item]:
    """The images of a tar, read once from its start to its end."""
    try:
        with _content(where) as content, tarfile.open(mode="r|*", fileobj=_Ending(content)) as tar:  # type: ignore[call-overload]
            while (member := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # NOTE: or all of them stay in memory
                if member.isfile() and member.name.lower().endswith(IMAGE_SUFFIXES):
                    yield _member(path, tar, member)
            while content.read(2**20):  # up to the sum
                pass
    except (OSError, EOFError, zlib.error, tarfile.TarError, ValueError, RecursionError) as error:
        # NOTE: tarfile calls itself for each header before a member.
        is_deep = isinstance(error, RecursionError)
        reason = "too many headers" if is_deep else getattr(error, "strerror", None) or first_line(error)
        yield Item(path, error=Unreadable(f"the tar cannot be read: {reason}"))


def _content(where: str) -> Any:
    """The file, unpacked if it is gzip's, whose sum of the content tarfile would not check."""
    file = open(where, "rb")  # noqa: SIM115 - closed by the caller
    if file.peek(2)[:2] != b"\x1f\x8b":
        return file
    file.close()
    return gzip.open(where)


class _Ending:
    """A file to be read in order, which refuses to be read much beyond its end.

    ``tarfile`` goes on for as many bytes as a header declares, which may be more than any file has.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._empty = file, 0

    def read(self, size: int) -> bytes:
        content = self._file.read(size)
        self._empty += not content
        if self._empty > _MOST_EMPTY:
            raise tarfile.ReadError("unexpected end of data")
        return content


def _member(path: str, tar: tarfile.TarFile, member: tarfile.TarInfo) -> Item:
    name = f"{path}/{member.name}"
    if member.size > MOST_READ:
        return Item(name, error=Unreadable(f"it has more than {MOST_READ >> 20} MiB"))

    def load() -> bytes:
        file = tar.extractfile(member)
        assert file is not None
        content = file.read()
        if len(content) < member.size:
            raise tarfile.ReadError("unexpected end of data")
        return content

    return Item(name, load=load)


def _frames(path: str, where: str) -> Iterator[Item]:
    """The frames of a video, decoded by the code of streams."""
    from torchpipe_py.streams.config import read_stream
    from torchpipe_py.streams.source import SourceError, read_pictures

    try:
        options = read_stream(path, {"source": os.path.abspath(where), "keep": "all"}, Place(path))
        with closing(read_pictures(options, threading.Event())) as pictures:  # type: ignore[type-var]
            for number, picture in enumerate(pictures):
                yield Item(path, frame=number, pts=picture.pts, load=picture.to_image, color=picture.color)
    except (SourceError, ConfigError) as error:
        yield Item(path, error=Unreadable(f"the video cannot be read: {first_line(error)}"))
