"""The finished part of a run: the lines in OUT.partial, and OUT.lock, which says of which run they are."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any

from torchpipe_py.errors import first_line
from torchpipe_py.tools.report import ToolError
from torchpipe_py.tools.run.lines import read_line
from torchpipe_py.tools.run.sources import key_of

SYNC_SECONDS = 2.0
"""After a crash of the machine, lines of so many seconds may be computed again."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise an ``OSError`` as a ``ToolError`` that names the file."""
    try:
        yield
    except OSError as error:
        raise ToolError(
            f"{path}: cannot be written: {error.strerror or first_line(error)}; start it again to go on"
        ) from error


class Lock:
    """``OUT.lock``: held by one run at a time; its first line says what the run is, the second how it has finished.

    Raises ``ToolError`` if another run holds it, and if its run is another one than ``identity``, unless ``restart``.
    """

    def __init__(self, out: Path, identity: Mapping[str, Any], restart: bool) -> None:
        self.path = Path(f"{out}.lock")
        self._file = _locked(self.path, out)
        try:
            before = os.pread(self._file, 2**24, 0)
            self.is_known = bool(before)
            """Whether a run has begun here before."""
            lines = b"" if restart else before
            self.is_new = b"\n" not in lines  # also if its run was killed while it wrote the first line
            finished = lines.split(b"\n")[1:-1]
            self.errors = int(finished[0]) if finished else None
            """The number of errors of a run whose lines are complete."""
            if not self.is_new:
                _check_same(out, json.loads(lines.split(b"\n")[0]), identity)
        except BaseException as error:
            os.close(self._file)
            if isinstance(error, ValueError):
                raise ToolError(f"{self.path}: damaged: --restart begins anew") from error
            raise
        self._line = json.dumps(identity).encode() + b"\n"

    def begin(self) -> None:
        """Write what the run is."""
        with writing(self.path):
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, self._line, 0)
            os.fsync(self._file)
            sync_folder(self.path)
        self.is_new = False

    def finish(self, errors: int) -> None:
        """Write that the lines are complete, before the output gets its name."""
        with writing(self.path):
            os.ftruncate(self._file, len(self._line))
            os.pwrite(self._file, b"%d\n" % errors, len(self._line))
            os.fsync(self._file)

    def remove(self) -> None:
        """Remove the file, which is still locked."""
        with writing(self.path):
            self.path.unlink()

    def close(self) -> None:
        """Release it."""
        os.close(self._file)


def _locked(path: Path, out: Path) -> int:
    while True:
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise ToolError(f"--out {out}: cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.exists(path) and os.path.samestat(os.fstat(file), os.stat(path)):
                return file
        except BlockingIOError:
            os.close(file)
            raise ToolError(f"--out {out}: another run is writing it") from None
        except OSError as error:
            os.close(file)
            raise ToolError(f"{path}: cannot be locked: {error.strerror}") from error
        os.close(file)  # another run has ended and removed it meanwhile


def _check_same(out: Path, before: Any, now: Mapping[str, Any]) -> None:
    """``ToolError`` that names what differs from the run that is to be resumed."""
    if before == now:
        return
    differing = [
        f"{kind} {name}".strip()
        for kind in now
        for name in dict.fromkeys([*before.get(kind, ()), *now[kind]])
        if before.get(kind, {}).get(name) != now[kind].get(name)
    ]
    raise ToolError(
        f"--out {out}: a run with another {', '.join(differing) or 'version'} is unfinished: start it again as it was, "
        "or give --restart to begin anew"
    )


class LineFile:
    """The lines so far, in a file; a torn or damaged end is cut off when it is opened.

    ``done`` has the keys of the items: 16 bytes each, about 100 in memory. ``places`` has the place of the first line
    with each content, where lines have hashes. ``is_whole``, if given, says whether what belongs to a line is there.
    """

    def __init__(self, path: Path, is_whole: Callable[[Mapping[str, Any]], bool] | None = None) -> None:
        self.path = path
        self.done: set[bytes] = set()
        self.places: dict[bytes, int] = {}
        self.files = self.errors = 0
        with writing(path):
            self._file = open(path, "a+b")  # noqa: SIM115 - closed by `close`
        self._end, self._synced_at, self._is_synced = 0, monotonic(), True
        self._file.seek(0)
        for line in self._file:
            members = read_line(line)
            if members is None or not (is_whole is None or is_whole(members)):
                break
            self._count(key_of(members["path"], members.get("frame")), members.get("sha256", ""), "error" in members)
            self._end += len(line)
        with writing(path):
            self._file.truncate(self._end)
            self._file.seek(self._end)

    def add(self, key: bytes, line: bytes, is_error: bool, digest: str = "") -> None:
        """Append a line; it is on the disk after ``SYNC_SECONDS`` at most, if lines keep coming, or after ``sync``."""
        with writing(self.path):
            self._file.write(line)
        self._count(key, digest, is_error)
        self._end += len(line)
        self._is_synced = False

    def line_with(self, digest: str) -> bytes | None:
        """The first line with this content."""
        place = self.places.get(bytes.fromhex(digest)[:16])
        if place is None:
            return None
        self._file.flush()
        self._file.seek(place)
        line = self._file.readline()
        self._file.seek(self._end)
        return line

    def sync_if_due(self, and_all: bool = False) -> None:
        """Bring the lines to the file, and every ``SYNC_SECONDS`` to the disk, ``and_all`` other files before them."""
        with writing(self.path):
            self._file.flush()
        if not self._is_synced and monotonic() - self._synced_at > SYNC_SECONDS:
            self.sync(and_all)

    def sync(self, and_all: bool = False) -> None:
        """Bring the lines to the disk."""
        with writing(self.path):
            self._file.flush()
            if and_all:
                os.sync()
            os.fsync(self._file.fileno())
        self._is_synced, self._synced_at = True, monotonic()

    def lines(self) -> Iterator[bytes]:
        """All lines, from the start."""
        self._file.flush()
        with open(self.path, "rb") as file:
            yield from file

    def close(self) -> None:
        """Close the file."""
        with writing(self.path):
            self._file.close()

    def _count(self, key: bytes, digest: str, is_error: bool) -> None:
        self.done.add(key)
        self.files += 1
        self.errors += is_error
        if digest:
            self.places.setdefault(bytes.fromhex(digest)[:16], self._end)


def sync_folder(path: Path) -> None:
    """Bring the names in the folder of ``path`` to the disk."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with suppress(OSError):  # some file systems cannot
            os.fsync(folder)
    finally:
        os.close(folder)


def remove_partial(path: Path) -> None:
    """Remove what an earlier run has begun, a file or a folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
