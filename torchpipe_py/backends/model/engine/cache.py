"""The file that keeps a TensorRT engine between starts, and its key and timing files."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchpipe_py.encryption.cipher import Cipher, CipherError
from torchpipe_py.errors import ConfigError, logger
from torchpipe_py.files import ENCRYPTED, replace_file


class EngineCache:
    """An engine file, beside it ``FILE.key`` (the inputs of its build) and ``FILE.timing`` (TensorRT's measurements).

    Both are written to temporary files and renamed, the key last; it holds the engine's hash, so that a file that is
    cut off or belongs to another key is never loaded. With a ``cipher``, the model's, all three are encrypted.
    Raises ``ConfigError`` if other users of the machine could have written the engine.
    """

    def __init__(self, path: str, cipher: Cipher | None = None) -> None:
        self._cipher = cipher
        self.path = Path(path)
        self.key_path = Path(f"{path}.key")
        self.timing_path = Path(f"{path}.timing")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes out; they wait here while one builds."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock = _open_lock(Path(f"{self.path}.lock"))
        except OSError as error:
            raise ConfigError(f"model::cache: cannot write beside {self.path}: {error}") from error
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                logger.warning("engine %s: another process is at it, waiting", self.path)
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)  # ends the lock

    def load(self, key: dict[str, Any]) -> tuple[bytes | None, str]:
        """The engine if it was built from ``key``; else ``None`` and the reason."""
        if not self.path.exists():
            return None, "there is no engine yet"
        try:
            kept = json.loads(self._read(self.key_path))
            engine_hash = kept.pop("engine")
        except CipherError as error:
            return None, f"{self.key_path.name}: {error}"
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return None, f"{self.key_path.name} is missing or unreadable"
        changed = [name for name in sorted({*kept, *key}) if not _is_same(name, kept.get(name), key)]
        if changed:
            shown = (f"{name} was {_short(kept.get(name))}, is {_short(key.get(name))}" for name in changed)
            return None, f"stale: {', '.join(shown)}"
        try:
            engine = self._read(self.path)
        except CipherError as error:
            return None, f"damaged: {error}"
        if hashlib.sha256(engine).hexdigest() != engine_hash:
            return None, f"damaged: {len(engine)} bytes are not what was written"
        return engine, ""

    def store(self, engine: bytes, key: dict[str, Any]) -> None:
        """Replace the engine and its key."""
        self.key_path.unlink(missing_ok=True)
        self._write(self.path, engine)
        content = {**key, "engine": hashlib.sha256(engine).hexdigest()}
        self._write(self.key_path, (json.dumps(content, indent=2) + "\n").encode())

    def timing(self) -> bytes:
        """The last content of ``store_timing``; empty if it cannot be read."""
        try:
            return self._read(self.timing_path) if self.timing_path.exists() else b""
        except CipherError:
            return b""

    def store_timing(self, content: bytes) -> None:
        """Keep TensorRT's measurements for the next build."""
        self._write(self.timing_path, content)

    def _read(self, path: Path) -> bytes:
        """Read a file of ``_write``; ``ConfigError`` if other users of this machine could have written it."""
        with open(path, "rb") as file:
            # Check the open file, not its name, which may be another file by now.
            _check(path, path.parent.stat(), os.fstat(file.fileno()))
            content = file.read()
        if self._cipher is not None:
            return self._cipher.decrypt(content)
        if content.startswith(ENCRYPTED):
            raise CipherError("it is encrypted, and the model is not")
        return content

    def _write(self, path: Path, content: bytes) -> None:
        content = content if self._cipher is None else self._cipher.encrypt(content)
        try:
            replace_file(path, content, mode=0o644)  # not writable by others, whatever the umask
        except OSError as error:
            raise ConfigError(f"model::cache: cannot write {path}: {error}") from error


def _check(path: Path, folder: os.stat_result, file: os.stat_result) -> None:
    # In a sticky folder, such as /tmp, a user cannot replace the file of another.
    if folder.st_mode & stat.S_IWOTH and not folder.st_mode & stat.S_ISVTX:
        problem = f"every user of this machine can write in {path.parent}"
    elif file.st_mode & stat.S_IWOTH:
        problem = "every user of this machine can write it"
    elif file.st_uid not in (os.geteuid(), folder.st_uid, 0):  # the folder's owner could have replaced the file
        problem = f"it belongs to another user, uid {file.st_uid}"
    else:
        return
    raise ConfigError(
        f"model::cache: {path}: {problem}. An engine is code that this process runs: keep it in a folder that only its "
        "owner can write"
    )


def _open_lock(path: Path) -> int:
    """Open the lock file, which is created if missing and never written; ``OSError`` for a link."""
    # NOTE: O_NONBLOCK, or opening a FIFO would block. O_RDWR, since NFS does not lock files that are open for reading.
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    try:
        file = os.fstat(lock)
        if not stat.S_ISREG(file.st_mode):
            raise OSError(f"{path} is not a regular file")
        _check(path, path.parent.stat(), file)  # before building an engine that would be refused later
    except BaseException:
        os.close(lock)
        raise
    return lock


def _is_same(name: str, kept: Any, key: dict[str, Any]) -> bool:
    """Whether part ``name`` of ``kept`` fits ``key``; version-compatible engines also run on a newer TensorRT."""
    if name == "TensorRT" and key.get("version_compatible"):
        return _numbers(kept) <= _numbers(key[name])
    return bool(kept == key.get(name))


def _numbers(version: Any) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", str(version))]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:12]}…"
