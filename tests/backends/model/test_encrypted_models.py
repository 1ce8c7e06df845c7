"""Encrypted models in each backend: the same results as plain ones, and no word of them outside of memory."""

from __future__ import annotations

import json
import logging
import os
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.encrypted import KEY, NAME, breaks_when_run, classifier, encrypt, with_weights_beside
from kit.refusals import refusal

from torchpipe_py import BackendError, ConfigError, pipe
from torchpipe_py.backends.model.check import to_bounds
from torchpipe_py.backends.model.engine import build as engine_build
from torchpipe_py.backends.model.engine.api import Messages
from torchpipe_py.backends.model.engine.build import EngineSpec, cached_engine
from torchpipe_py.backends.model.engine.cache import EngineCache
from torchpipe_py.backends.model.engine.precision import check_half, half_model
from torchpipe_py.backends.model.normalisation import Normalisation
from torchpipe_py.backends.model.onnx_graph import model_bytes
from torchpipe_py.encryption.cipher import Cipher
from torchpipe_py.encryption.model_file import REDACTED, ModelFile

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

IMAGE = torch.arange(3 * 8 * 8, dtype=torch.float32).reshape(1, 3, 8, 8)
MEAN = {"mean": "123.675, 116.28, 103.53", "std": "58.395"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    return classifier(tmp_path_factory.mktemp("plain") / "m.onnx")


@pytest.fixture(scope="module")
def keys(plain: str) -> dict[str, str]:
    """Keys of a node with that model, encrypted."""
    return encrypt(plain)


def result(config: dict[str, Any], value: torch.Tensor = IMAGE) -> torch.Tensor:
    with pipe(config) as run:
        return torch.as_tensor(run({"data": value})["result"])


@pytest.mark.parametrize("more", [{}, MEAN, {"max": 4}], ids=["as it is", "mean", "batches"])
def test_serves_encrypted_onnx_model(plain: str, keys: dict[str, str], more: dict[str, Any]) -> None:
    results, signatures = [], []
    for model in ({"model": plain}, keys):
        with pipe({"backend": "OnnxTensor", **model, **more}) as run:
            results.append(run({"data": IMAGE})["result"])
            signatures.append(run.signature())
    assert torch.equal(*results)
    assert signatures[0] == signatures[1]


def test_refuses_encrypted_aotinductor_package(tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("m/data/aotinductor/model/model.so", b"")
    with pytest.raises(ConfigError, match=r"an AOTInductor package is unpacked to files .* cannot be encrypted"):
        pipe({"backend": "TorchTensor", **encrypt(path), "trusted": True})


@pytest.mark.parametrize("more", [{}, MEAN])
def test_weights_in_a_second_file_are_refused(plain: str, tmp_path: Path, monkeypatch: Any, more: Any) -> None:
    """At any place: a library that gets bytes would look in the working directory."""
    keys = encrypt(with_weights_beside(plain, tmp_path / "m.onnx"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"m\.onnx\.enc: its weights are in a second file, which is not encrypted"):
        pipe({"backend": "OnnxTensor", **keys, **more})


# -- keys and files that do not fit -------------------------------------------------------------------------------


def message(config: dict[str, Any]) -> str:
    said = refusal({"backend": "OnnxTensor", **config}, pipe)
    assert "\n" not in said
    return said


def test_explains_wrong_keys_and_files(plain: str, keys: Any, tmp_path: Path, monkeypatch: Any) -> None:
    place, encrypted = "config: node 'node': key", keys["model"]
    assert message({"model": encrypted}) == (
        f"{place} 'model': {encrypted} is encrypted, and there is no key: give key_file or key_env"
    )
    assert message({**keys, "model": plain}) == (
        f"{place} 'key_file': {plain} is not encrypted: torchpipe encrypt {plain} makes an encrypted one; without "
        "key_file it is loaded as it is"
    )
    assert f"{place} 'key_env': {plain} is not encrypted" in message({"model": plain, "key_env": "MODEL_KEY"})
    assert message({**keys, "key_env": "MODEL_KEY"}) == (
        f"{place} 'key_env': key_file is set, too; a model has one key"
    )
    assert f"{place} 'key_file': no such file: no.key (working directory" in message({**keys, "key_file": "no.key"})
    cut = tmp_path / "cut.onnx.enc"
    cut.write_bytes(Path(encrypted).read_bytes()[:-1])
    assert f"model {cut}: it is damaged or cut off" in message({**keys, "model": str(cut)})
    other = tmp_path / "other.key"
    other.write_bytes(bytes(range(200, 232)))
    said = f"model {encrypted}: key_file {other} is not the key that it was encrypted with, or its header is"
    assert said in message({**keys, "key_file": str(other)})
    assert "there is no environment variable NO_KEY" in message({"model": encrypted, "key_env": "NO_KEY"})
    monkeypatch.setenv("MODEL_KEY", KEY.hex())
    assert result({"backend": "OnnxTensor", "model": encrypted, "key_env": "MODEL_KEY"}).shape[0] == 1


def test_refuses_decrypted_model_of_another_backend(keys: dict[str, str], tmp_path: Path) -> None:
    text = tmp_path / "m.onnx"
    text.write_text(f"{NAME} is no model")
    said = message(encrypt(text))
    assert f"not an ONNX file: DecodeError; {REDACTED}" in said
    assert NAME not in said
    torch.jit.script(torch.nn.ReLU()).save(str(tmp_path / "m.pt"))
    for config, said in (
        (
            {**keys, "backend": "TorchTensor", "trusted": True},
            "neither TorchScript nor .pt2: it begins as an ONNX file",
        ),
        (encrypt(tmp_path / "m.pt"), "not an ONNX file: it is TorchScript or a .pt2 file: TorchTensor takes it"),
    ):
        assert f"model {config['model']}: {said}" in message(config)


# -- words --------------------------------------------------------------------------------------------------------


class Refuses(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        secretlayer = x.reshape(-1, 7)
        return secretlayer


@pytest.mark.parametrize("is_encrypted", [False, True])
@pytest.mark.parametrize("backend", ["OnnxTensor", "TorchTensor"])
def test_errors_do_not_name_layers_or_show_source(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    backend: str,
    is_encrypted: bool,
) -> None:
    path = tmp_path / "m"
    if backend == "OnnxTensor":
        breaks_when_run(path)
    else:
        torch.jit.script(Refuses()).save(str(path))
    model: dict[str, Any] = encrypt(path) if is_encrypted else {"model": str(path)}
    trusted = {"trusted": True} if backend == "TorchTensor" else {}
    with pipe({"backend": backend, **trusted, **model}) as run, pytest.raises(BackendError) as caught:
        run({"data": torch.zeros(1, 4)})
    logging.getLogger("torchpipe_py").error("for the log", exc_info=caught.value)
    printed = capfd.readouterr()
    said = f"{caught.value} {caplog.text} {printed.out} {printed.err}"
    assert (NAME in said) == (not is_encrypted)
    assert (REDACTED in said) == is_encrypted


def test_unknown_layer_does_not_reveal_existing_ones(plain: str) -> None:
    content = model_bytes(ModelFile(plain), Normalisation())
    for is_secret, said in ((False, f"did you mean '{NAME}_conv'"), (True, f"no layer '{NAME}_com'; {REDACTED}$")):
        with pytest.raises(ConfigError, match=said):
            half_model(content, (f"{NAME}_com",), is_secret)


def test_a_trial_in_fp16_does_not_name_layers(tmp_path: Path, caplog: Any, capfd: Any) -> None:
    content = Path(breaks_when_run(tmp_path / "m.onnx")).read_bytes()
    caplog.set_level(logging.INFO, "torchpipe_py")
    check_half("m.onnx.enc", content, content, (), to_bounds(1), is_normalised=False, is_secret=True)
    printed = capfd.readouterr()
    assert caplog.messages == [f"m.onnx.enc: its fp16 form is not compared with it: {REDACTED}"]
    assert NAME not in printed.out + printed.err


def test_messages_of_tensorrt_are_left_out_once_a_model_is_encrypted(caplog: pytest.LogCaptureFixture) -> None:
    base = type("ILogger", (), {"INTERNAL_ERROR": 0, "ERROR": 1, "WARNING": 2})
    messages = Messages(SimpleNamespace(ILogger=base))
    caplog.set_level(logging.DEBUG, "torchpipe_py")
    messages.logger.log(1, "a plain layer")
    messages.keep_secret()
    messages.logger.log(1, f"{NAME} failed")
    messages.logger.log(2, f"{NAME} is slow")
    assert messages.last() == REDACTED
    assert [record.getMessage() for record in caplog.records] == ["a plain layer", REDACTED, REDACTED]


# -- what TensorRT keeps ------------------------------------------------------------------------------------------

CIPHER = Cipher(KEY, "key_file k")
CONTENT = f"{NAME} model".encode()
SPEC = EngineSpec("m.onnx.enc", CONTENT, to_bounds(1), to_bounds(4), fp32_layers=(NAME,), cipher=CIPHER)
TRT = SimpleNamespace(__version__="8.6.0", Builder=None)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """TensorRT's part replaced: it keeps measurements, and the list has those it finds."""
    found: list[str] = []

    def build(trt: Any, spec: EngineSpec, cache: EngineCache) -> tuple[str, bytes]:
        found.append(cache.timing().decode())
        cache.store_timing(f"{NAME} takes 1 ms".encode())
        content = b"engine of " + spec.onnx
        return content.decode(), content

    monkeypatch.setattr(engine_build, "new_engine", build)
    monkeypatch.setattr(engine_build, "load_engine", lambda trt, content, name, version_compatible: content.decode())
    return found


def kept_words(folder: Path) -> list[str]:
    return [path.name for path in sorted(folder.iterdir()) if NAME.encode() in path.read_bytes()]


def test_encrypts_engine_key_and_timing_files(tmp_path: Path, built: list[str]) -> None:
    path = str(tmp_path / "m.trt")
    for _ in range(2):
        assert cached_engine(TRT, SPEC, path, "gpu") == f"engine of {NAME} model"
    assert built == [""]
    assert sorted(os.listdir(tmp_path)) == ["m.trt", "m.trt.key", "m.trt.lock", "m.trt.timing"]
    assert kept_words(tmp_path) == []
    assert json.loads(CIPHER.decrypt((tmp_path / "m.trt.key").read_bytes()))["precision::fp32"] == [NAME]
    cached_engine(TRT, replace(SPEC, precision="fp32"), path, "gpu")
    assert built == ["", f"{NAME} takes 1 ms"]


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        (None, CIPHER, "m.trt.key: it is not encrypted"),
        (CIPHER, Cipher(bytes(32), "key_file new"), "m.trt.key: key_file new is not the key"),
        (CIPHER, None, "m.trt.key: it is encrypted, and the model is not"),
    ],
    ids=["plain", "another key", "plain again"],
)
def test_an_engine_kept_otherwise_is_built_anew(
    tmp_path: Path,
    built: list[str],
    caplog: pytest.LogCaptureFixture,
    before: Cipher | None,
    after: Cipher | None,
    why: str,
) -> None:
    path = str(tmp_path / "m.trt")
    cached_engine(TRT, replace(SPEC, cipher=before), path, "gpu")
    cached_engine(TRT, replace(SPEC, cipher=after), path, "gpu")
    assert len(built) == 2
    assert why in caplog.text
    assert bool(kept_words(tmp_path)) == (after is None)
