"""The format of encrypted files: that it is as written down, and that nothing else is decrypted."""

from __future__ import annotations

import hmac
import sys

import pytest

from torchpipe_py import BackendUnavailable
from torchpipe_py.encryption import cipher as module
from torchpipe_py.encryption.cipher import HEADER, TAG, Cipher, CipherError
from torchpipe_py.files import ENCRYPTED

CHUNK = 64
KEY = bytes(range(32))
KEPT = (
    "895450454e430d0a01582e725281303244b62f8ac1bb8b5fc7b9db6706f32f73f1a5f1b6972182718d58fd1c15d02f973a65"
    "aa31f6517200d279d247afb8b9e28c9bc36825df1978ab76e5ef457aa09c344f8534c517b92670c7985a6f248c63982d3d58"
    "01ee7befa7730bfa2a647eee21f5b9de1bf117c01df8d8aba8d2c231cad8a63ad13d8dcebef220"
)
"""Of 70 bytes, in chunks of 64."""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", CHUNK)


@pytest.fixture
def cipher() -> Cipher:
    return Cipher(KEY, "key_file k")


def content(size: int) -> bytes:
    return bytes(index * 7 % 251 for index in range(size))


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 5])
def test_what_is_encrypted_is_decrypted(cipher: Cipher, size: int) -> None:
    encrypted = cipher.encrypt(content(size))
    assert cipher.decrypt(encrypted) == content(size)
    assert len(encrypted) == HEADER + size + TAG * max(1, -(-size // CHUNK))
    assert content(size)[:16] not in encrypted or size < 16


def test_the_format_is_as_its_docstring_says(cipher: Cipher) -> None:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    encrypted = cipher.encrypt(content(CHUNK + 10))
    header, chunks = encrypted[:37], encrypted[37:]
    nonce, check = header[9:21], header[21:]
    assert header[:9] == b"\x89TPENC\r\n\x01"
    extracted = hmac.digest(nonce, KEY, "sha256")
    first = hmac.digest(extracted, header[:9] + b"\1", "sha256")
    second = hmac.digest(extracted, first + header[:9] + b"\2", "sha256")
    assert second[:16] == check
    aes = AESGCM(first)
    plain = aes.decrypt(bytes(12), chunks[: CHUNK + 16], header)
    plain += aes.decrypt(bytes(10) + b"\1\1", chunks[CHUNK + 16 :], header)
    assert plain == content(CHUNK + 10)


def test_files_of_version_1_stay_readable(cipher: Cipher) -> None:
    kept = bytes.fromhex(KEPT)
    assert cipher.decrypt(kept) == content(70)


@pytest.mark.parametrize("size", [0, 3 * CHUNK, 2 * CHUNK + 30])
def test_a_file_that_is_cut_anywhere_is_refused(cipher: Cipher, size: int) -> None:
    whole = cipher.encrypt(content(size))
    for length in range(len(whole)):
        with pytest.raises(CipherError, match=r"cut off|it is empty"):
            cipher.decrypt(whole[:length])


def test_a_byte_that_changed_anywhere_is_refused(cipher: Cipher) -> None:
    whole = cipher.encrypt(content(2 * CHUNK + 5))
    for index in range(len(whole)):
        changed = bytearray(whole)
        changed[index] ^= 1
        with pytest.raises(CipherError):
            cipher.decrypt(bytes(changed))


def pieces(whole: bytes) -> list[bytes]:
    """The header, and each chunk."""
    return [whole[:HEADER], *(whole[at : at + CHUNK + TAG] for at in range(HEADER, len(whole), CHUNK + TAG))]


def test_chunks_in_another_order_or_of_another_file_are_refused(cipher: Cipher) -> None:
    header, a, b, c = pieces(cipher.encrypt(content(3 * CHUNK)))
    others = pieces(cipher.encrypt(content(3 * CHUNK)))
    assert cipher.decrypt(header + a + b + c) == content(3 * CHUNK)
    for wrong in ([b, a, c], [a, c], [b, c], [a, a, b, c], [a, b, c, c], [a, b], [c], [a, others[2], c], [*others[1:]]):
        with pytest.raises(CipherError, match=r"are not what was written|cut off after"):
            cipher.decrypt(header + b"".join(wrong))


@pytest.mark.parametrize(
    ("length", "message"),
    [
        (0, "it is empty"),
        (5, "it is cut off: 5 of the 37 bytes of its header are there"),
        (20, "it is cut off: 20 of the 37 bytes of its header are there"),
        (37, "it is cut off after 37 bytes"),
        (40, "it is damaged or cut off: bytes 37 to 40 are not what was written"),
        (37 + 80, "it is cut off after 117 bytes"),
        (37 + 100, "it is damaged or cut off: bytes 117 to 137 are not what was written"),
    ],
)
def test_it_is_told_where_a_file_was_cut(cipher: Cipher, length: int, message: str) -> None:
    with pytest.raises(CipherError, match=f"^{message}$"):
        cipher.decrypt(cipher.encrypt(content(3 * CHUNK))[:length])


def test_another_key_another_version_and_no_encrypted_file_are_told_apart(cipher: Cipher) -> None:
    whole = cipher.encrypt(b"x")
    with pytest.raises(CipherError, match=r"^key_env K is not the key that it was encrypted with, or its header is"):
        Cipher(bytes(32), "key_env K").decrypt(whole)
    with pytest.raises(CipherError, match=r"encrypted in version 2 of the format; this torchpipe_py reads 1"):
        cipher.decrypt(ENCRYPTED + b"\2" + whole[9:])
    with pytest.raises(CipherError, match=r"^it is not encrypted$"):
        cipher.decrypt(b"\x08" + whole)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(BackendUnavailable, match=r"\(pip install 'torchpipe_py\[encryption\]'\)$"):
        Cipher(KEY, "k")
