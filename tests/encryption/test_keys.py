"""Where keys come from: files, variables, and what is none."""

from __future__ import annotations

import base64
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchpipe_py import ConfigError
from torchpipe_py.encryption.keys import new_key_file, read_key, readers_problem, without_keys

KEY = bytes(range(100, 132))
FILTER = Path("/proc/self/coredump_filter")


@pytest.fixture(autouse=True)
def core_filter() -> Iterator[None]:
    """Whoever reads a key changes it for the process."""
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
        KEY,
        KEY.hex().encode(),
        KEY.hex().upper().encode() + b"\r\n",
        base64.b64encode(KEY) + b"\n",
        base64.urlsafe_b64encode(KEY).rstrip(b"="),
    ],
    ids=["raw", "hex", "HEX", "base64", "urlsafe"],
)
def test_a_key_is_raw_or_hex_or_base64(key_file: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    key_file.write_bytes(content)
    assert read_key(str(key_file), "") == (KEY, f"key_file {key_file}")
    if content != KEY:
        monkeypatch.setenv("MODEL_KEY", content.decode())
        assert read_key("", "MODEL_KEY") == (KEY, "key_env MODEL_KEY")


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "it is empty"),
        (b" \n", "it is empty"),
        (b"0123456789abcdef" * 2, "it holds 32 hex digits"),
        (b"thirty-two characters of a text!", "it holds 32 characters"),
        (bytes(16), "it holds 16 bytes"),
        (KEY + b"\n", "it holds 33 bytes"),
        (base64.b64encode(KEY[:31] + b"!!"), "it holds 44 characters"),
        (KEY.hex().encode()[:-1] + b"g", "it holds 64 characters"),
        (bytes(1 << 20), "it holds more than 4096 bytes"),
    ],
)
def test_what_is_no_key(key_file: Path, content: bytes, found: str) -> None:
    key_file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_key(str(key_file), "")
    forms = (
        "a key is 32 raw bytes, 64 hex digits or 44 characters of base64. torchpipe encrypt --new_key FILE makes one"
    )
    assert str(caught.value) == f"key_file {key_file}: {found}; {forms}"


def test_what_is_no_file_with_a_key(key_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.key: No such file"):
        read_key(str(key_file), "")
    with pytest.raises(ConfigError, match=r"Is a directory"):
        read_key(str(tmp_path), "")
    os.mkfifo(key_file)
    with pytest.raises(ConfigError, match=r"model\.key: it is not a regular file"):
        read_key(str(key_file), "")


def test_variables_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_who_may_read_a_key(key_file: Path, mode: int, problem: str) -> None:
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


def test_an_environment_without_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ("b" * 41)).touch()
    monkeypatch.chdir(tmp_path)
    others = {"PATH": "/bin", "EMPTY": "", "SHORT": "ab12", "LIKE_BASE64": "a/" + "b" * 41}
    found = {"HEX": KEY.hex(), "BASE64": base64.b64encode(KEY).decode()}
    assert without_keys({**others, **found}) == others
