"""Reads and creates the keys of encrypted models, and keeps them out of other processes."""

from __future__ import annotations

import base64
import binascii
import difflib
import os
import re
import stat
from collections.abc import Mapping

from torchpipe_py.encryption.cipher import KEY_BYTES
from torchpipe_py.errors import ConfigError, logger

FORMS = "64 hex digits or 44 characters of base64"
HOW = "torchpipe encrypt --new_key FILE makes one"
_MOST = 4096
_HEX = re.compile(r"[0-9A-Fa-f]*")


def read_key(key_file: str, key_env: str) -> tuple[bytes, str]:
    """The key's 32 bytes from a file or an environment variable, and its name for messages; ``ConfigError`` if missing.

    From then on, core files of this process do not contain its memory.
    """
    keep_out_of_core_files()
    return (_of_file(key_file), f"key_file {key_file}") if key_file else (_of_variable(key_env), f"key_env {key_env}")


def new_key_file(path: str) -> None:
    """Write a random key as 64 hex digits, readable only by its owner; ``OSError`` if the file exists."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, 0o600), "wb") as file:
        file.write(os.urandom(KEY_BYTES).hex().encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())  # files encrypted with it are lost without it


def readers_problem(path: str) -> str:
    """The problem if other users may read or replace a key file; an empty string if they may not."""
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if not mode & (stat.S_IROTH | stat.S_IWOTH):
        return ""
    verb = "read" if mode & stat.S_IROTH else "write"
    return f"every user of this machine can {verb} {path} (mode {mode:04o}); chmod 600 {path}"


def without_keys(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without variables that could be a key, for a process that does not need one."""
    others = {}
    for name in list(environment):
        value = environment.get(name)  # None if another thread has just removed it
        if value is not None and (_of_text(value) is None or os.path.lexists(value)):  # a path may look like base64
            others[name] = value
    return others


def keep_out_of_core_files() -> None:
    """Exclude the memory of this process, and of processes it starts, from core files. Linux only."""
    try:
        # Unlike a limit, this also applies to cores piped to a program, and debuggers can still attach.
        with open("/proc/self/coredump_filter", "w", encoding="ascii") as file:
            file.write("0")
    except OSError as error:
        logger.info("core files of this process may contain decrypted models: %s", error)


def _of_file(path: str) -> bytes:
    try:
        # NOTE: O_NONBLOCK, or a FIFO would block. Links are followed: Kubernetes mounts secrets as links.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(f"key_file {path}: it is not a regular file")
            content = file.read(_MOST + 1)
    except OSError as error:
        raise ConfigError(f"key_file {path}: {error.strerror}") from None
    text = content.decode("ascii").strip() if content.isascii() else "\0"
    if len(content) == KEY_BYTES and not text.isprintable():
        return content
    key = _of_text(text)
    if key is None:
        size = _size(text) if text.isprintable() else f"{min(len(content), _MOST)} bytes"
        problem = f"it holds {'more than ' if len(content) > _MOST else ''}{size}" if text else "it is empty"
        raise ConfigError(f"key_file {path}: {problem}; a key is 32 raw bytes, {FORMS}. {HOW}")
    return key


def _of_variable(name: str) -> bytes:
    value = os.environ.get(name)
    if value is None:
        close = difflib.get_close_matches(name, os.environ, 1, 0.7)  # do not reveal other variables
        hint = f"did you mean {close[0]!r}?" if close else "the service reads its own, as it was when it was started"
        raise ConfigError(f"key_env: there is no environment variable {name}; {hint}")
    if not value.strip():
        raise ConfigError(f"key_env: the environment variable {name} is empty; a key is {FORMS}. {HOW}")
    key = _of_text(value)
    if key is None:
        raise ConfigError(f"key_env: {name} holds {_size(value)}; a key is {FORMS}. {HOW}")
    return key


def _of_text(text: str) -> bytes | None:
    """The key that a text encodes; ``None`` for any other text."""
    text = text.strip()
    if len(text) == 2 * KEY_BYTES and _HEX.fullmatch(text):
        return bytes.fromhex(text)
    if len(text) not in (43, 44):
        return None
    try:
        key = base64.b64decode(text[:43].translate({45: 43, 95: 47}) + "=", validate=True)  # either alphabet
    except (binascii.Error, ValueError):
        return None
    return key if text[43:] in ("", "=") and len(key) == KEY_BYTES else None


def _size(text: str) -> str:
    text = text.strip()
    return f"{len(text)} {'hex digits' if _HEX.fullmatch(text) else 'characters'}"
