"""The format of encrypted models, and where keys come from."""

from __future__ import annotations

import base64
import hmac
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.refusals import refusal

from torchpipe_py import BackendUnavailable, ConfigError
from torchpipe_py.encryption import cipher as module
from torchpipe_py.encryption.cipher import HEADER, TAG, Cipher, CipherError
from torchpipe_py.encryption.keys import new_key_file, read_key, readers_problem, without_keys
from torchpipe_py.files import ENCRYPTED

# -- the format of encrypted files -------------------------------------------------------------------------------------


CHUNK = 64


KEY = bytes(range(32))


KEPT = (
    "895450454e430d0a01582e725281303244b62f8ac1bb8b5fc7b9db6706f32f73f1a5f1b6972182718d58fd1c15d02f973a65"
    "aa31f6517200d279d247afb8b9e28c9bc36825df1978ab76e5ef457aa09c344f8534c517b92670c7985a6f248c63982d3d58"
    "01ee7befa7730bfa2a647eee21f5b9de1bf117c01df8d8aba8d2c231cad8a63ad13d8dcebef220"
)


"""A file of 70 bytes, in chunks of 64."""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", CHUNK)


@pytest.fixture
def cipher() -> Cipher:
    return Cipher(KEY, "key_file k")


def content(size: int) -> bytes:
    return bytes(index * 7 % 251 for index in range(size))


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 5])
def test_decrypts_encrypted_content(cipher: Cipher, size: int) -> None:
    encrypted = cipher.encrypt(content(size))
    assert cipher.decrypt(encrypted) == content(size)
    assert len(encrypted) == HEADER + size + TAG * max(1, -(-size // CHUNK))
    assert content(size)[:16] not in encrypted or size < 16


def test_format_matches_docstring(cipher: Cipher) -> None:
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


def test_refuses_any_changed_byte(cipher: Cipher) -> None:
    whole = cipher.encrypt(content(2 * CHUNK + 5))
    for index in range(len(whole)):
        changed = bytearray(whole)
        changed[index] ^= 1
        with pytest.raises(CipherError):
            cipher.decrypt(bytes(changed))


def pieces(whole: bytes) -> list[bytes]:
    """The header, and each chunk."""
    return [whole[:HEADER], *(whole[at : at + CHUNK + TAG] for at in range(HEADER, len(whole), CHUNK + TAG))]


def test_refuses_moved_or_foreign_chunks(cipher: Cipher) -> None:
    header, a, b, c = pieces(cipher.encrypt(content(3 * CHUNK)))
    others = pieces(cipher.encrypt(content(3 * CHUNK)))
    assert cipher.decrypt(header + a + b + c) == content(3 * CHUNK)
    for wrong in ([b, a, c], [a, c], [b, c], [a, a, b, c], [a, b, c, c], [a, b], [c], [a, others[2], c], [*others[1:]]):
        with pytest.raises(CipherError, match=r"are not what was written|cut off after"):
            cipher.decrypt(header + b"".join(wrong))


def test_distinguishes_wrong_key_version_and_plain_file(cipher: Cipher) -> None:
    whole = cipher.encrypt(b"x")
    with pytest.raises(CipherError, match=r"^key_env K is not the key that it was encrypted with, or its header is"):
        Cipher(bytes(32), "key_env K").decrypt(whole)
    with pytest.raises(CipherError, match=r"encrypted in version 2 of the format; this torchpipe_py reads 1"):
        cipher.decrypt(ENCRYPTED + b"\2" + whole[9:])
    with pytest.raises(CipherError, match=r"^it is not encrypted$"):
        cipher.decrypt(b"\x08" + whole)


def test_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(BackendUnavailable, match=r"\(pip install 'torchpipe_py\[encryption\]'\)$"):
        Cipher(KEY, "k")


# -- where keys come from ----------------------------------------------------------------------------------------------


OWN_KEY = bytes(range(100, 132))


FILTER = Path("/proc/self/coredump_filter")


@pytest.fixture(autouse=True)
def core_filter() -> Iterator[None]:
    """Restore the core filter, which reading a key changes."""
    before = FILTER.read_text() if FILTER.exists() else ""
    yield
    if before:
        FILTER.write_text(f"0x{before}")


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return tmp_path / "model.key"


@pytest.mark.parametrize(
    "content",
    [
        OWN_KEY,
        OWN_KEY.hex().encode(),
        OWN_KEY.hex().upper().encode() + b"\r\n",
        base64.b64encode(OWN_KEY) + b"\n",
        base64.urlsafe_b64encode(OWN_KEY).rstrip(b"="),
    ],
    ids=["raw", "hex", "HEX", "base64", "urlsafe"],
)
def test_a_key_is_raw_or_hex_or_base64(key_file: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    key_file.write_bytes(content)
    assert read_key(str(key_file), "") == (OWN_KEY, f"key_file {key_file}")
    if content != OWN_KEY:
        monkeypatch.setenv("MODEL_KEY", content.decode())
        assert read_key("", "MODEL_KEY") == (OWN_KEY, "key_env MODEL_KEY")


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "it is empty"),
        (b" \n", "it is empty"),
        (b"0123456789abcdef" * 2, "it holds 32 hex digits"),
        (b"thirty-two characters of a text!", "it holds 32 characters"),
        (bytes(16), "it holds 16 bytes"),
        (OWN_KEY + b"\n", "it holds 33 bytes"),
        (base64.b64encode(OWN_KEY[:31] + b"!!"), "it holds 44 characters"),
        (OWN_KEY.hex().encode()[:-1] + b"g", "it holds 64 characters"),
        (bytes(1 << 20), "it holds more than 4096 bytes"),
    ],
)
def test_refuses_invalid_keys(key_file: Path, content: bytes, found: str) -> None:
    key_file.write_bytes(content)
    forms = "a key is 32 raw bytes, 64 hex digits or 44 characters of base64. torchpipe encrypt --new_key FILE makes"
    said = refusal(key_file, lambda path: read_key(str(path), ""))
    assert said == f"key_file {key_file}: {found}; {forms} one"


def test_refuses_invalid_key_files(key_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.key: No such file"):
        read_key(str(key_file), "")
    with pytest.raises(ConfigError, match=r"Is a directory"):
        read_key(str(tmp_path), "")
    os.mkfifo(key_file)
    with pytest.raises(ConfigError, match=r"model\.key: it is not a regular file"):
        read_key(str(key_file), "")


def test_refuses_variables_without_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_KEY", " ")
    with pytest.raises(ConfigError, match=r"key_env: the environment variable MODEL_KEY is empty; a key is 64 hex"):
        read_key("", "MODEL_KEY")
    with pytest.raises(ConfigError, match=r"no environment variable MODEL_KEYS; did you mean 'MODEL_KEY'\?"):
        read_key("", "MODEL_KEYS")
    with pytest.raises(ConfigError, match=r"no environment variable QQXQXQ; the service reads its own"):
        read_key("", "QQXQXQ")
    monkeypatch.setenv("MODEL_KEY", "not to be told")
    with pytest.raises(ConfigError, match=r"MODEL_KEY holds 14 characters; a key is") as caught:
        read_key("", "MODEL_KEY")
    assert "told" not in str(caught.value)


def test_a_new_key_is_for_its_owner_and_replaces_nothing(key_file: Path, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        new_key_file(str(key_file))
    finally:
        os.umask(before)
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    key, _ = read_key(str(key_file), "")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    for there in (key_file, link):
        with pytest.raises(FileExistsError):
            new_key_file(str(there))
    assert read_key(str(key_file), "") == (key, f"key_file {key_file}")
    assert not (tmp_path / "elsewhere").exists()
    new_key_file(str(tmp_path / "other"))
    assert read_key(str(tmp_path / "other"), "")[0] != key


@pytest.mark.parametrize(("mode", "problem"), [(0o600, ""), (0o640, ""), (0o644, "read"), (0o602, "write")])
def test_warns_of_key_readable_by_others(key_file: Path, mode: int, problem: str) -> None:
    key_file.write_text("")
    key_file.chmod(mode)
    said = readers_problem(str(key_file))
    wanted = f"every user of this machine can {problem} {key_file} (mode {mode:04o}); chmod 600 {key_file}"
    assert said == (wanted if problem else "")


@pytest.mark.skipif(not FILTER.exists(), reason="Linux says what core files hold")
def test_a_core_file_holds_no_memory_of_a_process_with_a_key(key_file: Path) -> None:
    new_key_file(str(key_file))
    FILTER.write_text("0x33")  # what it is as a rule
    read_key(str(key_file), "")
    assert int(FILTER.read_text(), 16) == 0


def test_removes_keys_from_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ("b" * 41)).touch()
    monkeypatch.chdir(tmp_path)
    others = {"PATH": "/bin", "EMPTY": "", "SHORT": "ab12", "LIKE_BASE64": "a/" + "b" * 41}
    found = {"HEX": OWN_KEY.hex(), "BASE64": base64.b64encode(OWN_KEY).decode()}
    assert without_keys({**others, **found}) == others
