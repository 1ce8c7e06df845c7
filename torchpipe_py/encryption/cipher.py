"""Files of any size, encrypted with AES-256-GCM in chunks; every byte is authenticated.

========  =====  ====================================================================================
part      bytes  what
========  =====  ====================================================================================
magic     8      ``files.ENCRYPTED``
version   1      1
nonce     12     random, unique to this file
check     16     derived from key and nonce: distinguishes a wrong key from a damaged file
chunks           65,552 bytes each, the last one at most: encrypted content and its tag of 16 bytes
========  =====  ====================================================================================

HKDF-SHA256 derives 48 bytes from the key, with the nonce as salt and magic and version as info: the key of this file
and the check. The nonce of a chunk is its number (11 bytes, big-endian), followed by 1 for the last chunk, else 0. This
detects chunks that are missing, repeated, moved or from another file, and a truncated end. The header (everything
before the chunks) is authenticated with each chunk. This is STREAM (Hoang, Reyhanitabar, Rogaway, Vizár: Online
Authenticated-Encryption and its Nonce-Reuse Misuse-Resistance, 2015) as in the format of age, with AES-GCM.
"""

from __future__ import annotations

import hmac
import io
import os
from collections.abc import Iterator
from typing import Any, BinaryIO

from torchpipe_py.errors import BackendUnavailable
from torchpipe_py.files import ENCRYPTED

KEY_BYTES = 32
VERSION = 1
CHUNK = 1 << 16
TAG = 16
_NONCE, _CHECK = 12, 16
HEADER = len(ENCRYPTED) + 1 + _NONCE + _CHECK


class CipherError(ValueError):
    """A file that cannot be decrypted; the message is a clause with the reason, without the file's name."""


class Cipher:
    """Encrypts and decrypts with one key; ``name`` is the key's source for messages.

    Raises ``BackendUnavailable`` if the library ``cryptography`` is missing.
    """

    def __init__(self, key: bytes, name: str) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"expected a key of {KEY_BYTES} bytes, got {len(key)}")
        try:
            import cryptography.hazmat.primitives.ciphers.aead  # noqa: F401
        except ImportError as error:
            raise BackendUnavailable(
                "encrypted models need cryptography, which is not installed (pip install 'torchpipe_py[encryption]')"
            ) from error
        self._key, self.name = key, name

    def encrypt_file(self, source: BinaryIO, target: BinaryIO) -> None:
        """Encrypt the rest of ``source`` into ``target``."""
        nonce = os.urandom(_NONCE)
        start = ENCRYPTED + bytes([VERSION]) + nonce
        aes, check = self._derived(nonce)
        header = start + check
        target.write(header)
        for number, content, is_last in _chunks(source, CHUNK):
            target.write(aes.encrypt(_nonce(number, is_last), content, header))

    def encrypt(self, content: bytes) -> bytes:
        """``content``, encrypted."""
        target = io.BytesIO()
        self.encrypt_file(io.BytesIO(content), target)
        return target.getvalue()

    def decrypt_file(self, source: BinaryIO) -> bytes:
        """Decrypt and authenticate all of ``source``; ``CipherError`` if that fails."""
        header = source.read(HEADER)
        _check_start(header)
        nonce = header[len(ENCRYPTED) + 1 :][:_NONCE]
        aes, check = self._derived(nonce)
        if not hmac.compare_digest(check, header[-_CHECK:]):
            raise CipherError(f"{self.name} is not the key that it was encrypted with, or its header is damaged")
        content = io.BytesIO()
        for number, chunk, is_last in _chunks(source, CHUNK + TAG):
            plain = _decrypted(aes, number, is_last, chunk, header)
            if plain is None:
                at = HEADER + number * (CHUNK + TAG)
                if is_last and (not chunk or _decrypted(aes, number, False, chunk, header) is not None):
                    raise CipherError(f"it is cut off after {at + len(chunk)} bytes")
                raise CipherError(f"it is damaged or cut off: bytes {at} to {at + len(chunk)} are not what was written")
            content.write(plain)
        return content.getvalue()

    def decrypt(self, content: bytes) -> bytes:
        """Reverse ``encrypt``; raises ``CipherError`` like ``decrypt_file``."""
        return self.decrypt_file(io.BytesIO(content))

    def _derived(self, nonce: bytes) -> tuple[Any, bytes]:
        """AES-GCM with the key of one file, and the check value of that file's header."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        info = ENCRYPTED + bytes([VERSION])
        derived = HKDF(SHA256(), KEY_BYTES + _CHECK, salt=nonce, info=info).derive(self._key)
        return AESGCM(derived[:KEY_BYTES]), derived[KEY_BYTES:]


def _check_start(header: bytes) -> None:
    """Raise ``CipherError`` if a file with these first bytes cannot be decrypted."""
    if not header or not header.startswith(ENCRYPTED[: len(header)]):
        raise CipherError("it is not encrypted" if header else "it is empty")
    if len(header) > len(ENCRYPTED) and header[len(ENCRYPTED)] != VERSION:
        version = header[len(ENCRYPTED)]
        raise CipherError(f"it is encrypted in version {version} of the format; this torchpipe_py reads {VERSION}")
    if len(header) < HEADER:
        raise CipherError(f"it is cut off: {len(header)} of the {HEADER} bytes of its header are there")


def _chunks(source: BinaryIO, size: int) -> Iterator[tuple[int, bytes, bool]]:
    """Yield number, content and whether it is the last chunk; a chunk is empty only if the source is empty."""
    number, chunk = 0, source.read(size)
    while True:
        following = source.read(size)
        yield number, chunk, not following
        if not following:
            return
        number, chunk = number + 1, following


def _nonce(number: int, is_last: bool) -> bytes:
    return number.to_bytes(_NONCE - 1, "big") + bytes([is_last])


def _decrypted(aes: Any, number: int, is_last: bool, chunk: bytes, header: bytes) -> bytes | None:
    """The content of a chunk; ``None`` if authentication fails."""
    from cryptography.exceptions import InvalidTag

    if len(chunk) < TAG:
        return None
    try:
        plain: bytes = aes.decrypt(_nonce(number, is_last), chunk, header)
    except InvalidTag:
        return None
    return plain
