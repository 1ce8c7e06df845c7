"""``torchpipe encrypt``: its files and its error messages."""

from __future__ import annotations

import os
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from kit.encrypted import KEY, NAME, classifier, with_weights_beside

from torchpipe_py.cli import main
from torchpipe_py.encryption import command
from torchpipe_py.encryption.command import TAKEN
from torchpipe_py.encryption.model_file import ModelFile

Refused = Callable[..., str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with ``m.onnx`` and ``key``."""
    classifier(tmp_path / "m.onnx")
    (tmp_path / "key").write_text(KEY.hex())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """The one line that it says of wrong arguments; it leaves no file."""

    def say(*arguments: str) -> str:
        before = sorted(os.listdir())
        assert main(["encrypt", *arguments]) == 1
        assert sorted(os.listdir()) == before
        (line,) = capsys.readouterr().err.splitlines()
        return line.removeprefix("torchpipe: ")

    return say


def test_a_new_key_and_a_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["encrypt", "m.onnx", "--new_key", "new.key"]) == 0
    told = capsys.readouterr().out
    assert 'model = "m.onnx.enc" and key_file = "new.key" in its node serve it' in told
    assert (folder / "new.key").read_text().strip() not in told
    assert stat.S_IMODE((folder / "new.key").stat().st_mode) == 0o600
    assert ModelFile("m.onnx.enc", "new.key").read() == (folder / "m.onnx").read_bytes()
    assert NAME.encode() not in (folder / "m.onnx.enc").read_bytes()


def test_encrypts_engine_with_existing_key(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "m.trt").write_bytes(b"ftrt" + bytes(range(256)) * 1000)
    monkeypatch.setenv("MODEL_KEY", KEY.hex())
    assert main(["encrypt", "m.trt", "--key_env", "MODEL_KEY", "--out", "served.trt.enc"]) == 0
    assert ModelFile("served.trt.enc", "key").read() == (folder / "m.trt").read_bytes()
    before = (folder / "served.trt.enc").read_bytes()
    assert main(["encrypt", "m.trt", "--key_file", "key", "--out", "served.trt.enc", "--force"]) == 0
    assert (folder / "served.trt.enc").read_bytes() != before


def test_includes_external_weights(folder: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    with_weights_beside("m.onnx", folder / "two.onnx")
    assert main(["encrypt", "two.onnx", "--key_file", "key"]) == 0
    whole = onnx.load_from_string(ModelFile("two.onnx.enc", "key").read())
    onnx.checker.check_model(whole)
    monkeypatch.setattr(command, "ONNX_LIMIT", 1000)
    said = refused("two.onnx", "--key_file", "key", "--out", "x")
    assert said.startswith("two.onnx: with its weights in two.weights it is larger than 2 GiB, the limit of")
    (folder / "two.weights").unlink()
    assert refused("two.onnx", "--key_file", "key", "--out", "x").startswith(
        "two.onnx: its weights in two.weights cannot be read: "
    )


def test_explains_user_errors(folder: Path, refused: Refused) -> None:
    key = "--key_file", "key"
    assert refused("no.onnx", *key) == f"no.onnx: no such file (working directory: {folder})"
    assert refused("m.onnx", "--key_file", "no.key") == "key_file no.key: No such file or directory"
    assert refused("m.onnx", "--new_key", "key") == (
        "--new_key key: there already, and no key is replaced: --key_file key encrypts with it"
    )
    assert refused("m.onnx", "--new_key", "no/key") == "--new_key no/key: No such file or directory"
    assert refused(*key) == "MODEL is missing: the model to encrypt"
    assert refused("m.onnx", *key, "--out", "key/x") == "--out key/x: Not a directory"
    assert refused("m.onnx", *key, "--out", "m.onnx", "--force") == (
        "--out m.onnx: it is the model itself; give another name, m.onnx.enc say"
    )
    (folder / "m.onnx.enc").write_bytes(b"")
    assert refused("m.onnx", *key) == "m.onnx.enc: there already; --force replaces it, --out gives another name"
    assert refused("m.onnx.enc", *key) == "m.onnx.enc: it is empty"
    (folder / "text.onnx").write_text("text")
    assert refused("text.onnx", *key) == f"text.onnx: it is not a model; {TAKEN}"
    assert main(["encrypt", "m.onnx", *key, "--force"]) == 0
    assert refused("m.onnx.enc", *key) == (
        "m.onnx.enc: it is encrypted already; to change its key, encrypt the plain model again"
    )


def archive(path: Path, *names: str) -> None:
    with zipfile.ZipFile(path, "w") as file:
        for name in names:
            file.writestr(name, "")


@pytest.mark.parametrize(
    "save",
    [
        classifier,
        lambda path: archive(path, "m/data.pkl", "m/constants.pkl"),  # TorchScript
        lambda path: archive(path, "m/archive_format"),  # torch.export
    ],
)
def test_accepts_model_of_any_name(folder: Path, save: Callable[[Path], object]) -> None:
    save(folder / "model")
    assert main(["encrypt", "model", "--key_file", "key"]) == 0
    assert ModelFile("model.enc", "key").read() == (folder / "model").read_bytes()


@pytest.mark.parametrize(
    ("save", "said"),
    [
        (lambda path: path.write_bytes(bytes(range(256))), "it is not a model; "),
        (lambda path: path.write_text("<html>"), "it is an HTML page, as a download leaves that was refused; "),
        (lambda path: path.write_bytes(onnx.ModelProto(ir_version=8).SerializeToString()), "it begins as an ONNX file"),
        (lambda path: torch.save({"weight": torch.zeros(2)}, path), "it is a PyTorch checkpoint: torchpipe export "),
        (lambda path: archive(path, "a.txt"), "it is a zip archive; "),
        (lambda path: path.write_bytes(b"PK\x03\x04 and no more"), "it is a zip archive, as PyTorch checkpoints are,"),
        (lambda path: archive(path, "m/data/aotinductor/m.so"), "an AOTInductor package is unpacked to files when it"),
    ],
)
def test_refuses_unservable_files_by_kind(folder: Path, refused: Refused, save: Any, said: str) -> None:
    save(folder / "model.onnx")
    line = refused("model.onnx", "--key_file", "key")
    assert line.startswith(f"model.onnx: {said}")
    assert line.endswith(f"; {TAKEN}")
