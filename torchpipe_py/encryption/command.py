"""``torchpipe encrypt``: encrypts a model, and creates a key."""

from __future__ import annotations

import argparse
import io
import os
import shlex
import zipfile
from typing import Any, BinaryIO

from torchpipe_py.encryption.cipher import Cipher
from torchpipe_py.encryption.keys import new_key_file, read_key
from torchpipe_py.encryption.model_file import ENDING, outside_files
from torchpipe_py.errors import ConfigError, first_line
from torchpipe_py.files import ENCRYPTED, ENGINE, ZIP, archive_kind, file_kind, replacing

ONNX_LIMIT = 1 << 31
"""Maximum bytes of an ONNX file with its weights: the limit of protobuf."""

TAKEN = "torchpipe encrypt takes an ONNX file, TorchScript, a .pt2 of torch.export or a TensorRT engine"


def run_encrypt(args: argparse.Namespace) -> int:
    """Returns 0 after success; raises ``ConfigError`` or ``BackendUnavailable``, and then leaves no partial file."""
    if args.model is None and not args.new_key:
        raise ConfigError("MODEL is missing: the model to encrypt")
    out = args.out or f"{args.model}{ENDING}"
    if args.model is not None:
        _check_names(args.model, out, args.force)
    if args.new_key:
        _make_key(args.new_key)
        print(f"{args.new_key}: a new key, readable by its owner only; nothing else decrypts what it encrypts")
    if args.model is None:
        return 0
    cipher = Cipher(*read_key(args.new_key or args.key_file, args.key_env))
    try:
        file = open(args.model, "rb")  # noqa: SIM115 - separates the errors of the two files
    except OSError as error:
        raise ConfigError(f"{args.model}: {error.strerror}") from None
    with file:
        source, note = _source(file, args.model)
        try:
            with replacing(out) as target:
                cipher.encrypt_file(source, target)
        except OSError as error:
            raise ConfigError(f"--out {out}: {error.strerror}") from None
    key = "key_env" if args.key_env else "key_file"
    value = args.key_env or args.new_key or args.key_file
    print(f"{out}: {args.model}{note}, encrypted, {os.path.getsize(out) / 1e6:.1f} MB")
    print(f'  model = "{out}" and {key} = "{value}" in its node serve it; {shlex.quote(args.model)} is left as it is')
    return 0


def _check_names(model: str, out: str, force: bool) -> None:
    if not os.path.isfile(model):
        raise ConfigError(f"{model}: no such file (working directory: {os.getcwd()})")
    if os.path.exists(out) and os.path.samefile(model, out):
        raise ConfigError(f"--out {out}: it is the model itself; give another name, {model}{ENDING} say")
    if os.path.lexists(out) and not force:
        raise ConfigError(f"{out}: there already; --force replaces it, --out gives another name")


def _make_key(path: str) -> None:
    try:
        new_key_file(path)
    except FileExistsError:
        raise ConfigError(
            f"--new_key {path}: there already, and no key is replaced: --key_file {path} encrypts with it"
        ) from None
    except OSError as error:
        raise ConfigError(f"--new_key {path}: {error.strerror}") from None


def _source(file: BinaryIO, path: str) -> tuple[BinaryIO, str]:
    """The content to encrypt, and a note on changes to it: an ONNX model gets its external weights included."""
    start = file.read(len(ENCRYPTED))
    file.seek(0)
    if not start:
        raise ConfigError(f"{path}: it is empty")
    if start == ENCRYPTED:
        raise ConfigError(f"{path}: it is encrypted already; to change its key, encrypt the plain model again")
    if start.startswith(ENGINE):
        return file, ""
    if start.startswith(ZIP):
        _check_archive(file, path)
        return file, ""
    import onnx

    model = _parsed(onnx, file)
    if model is None:
        raise _no_model(path)
    outside = outside_files(model)
    if not outside:
        file.seek(0)
        return file, ""
    names = f"{outside[0]} and {len(outside) - 1} more" if len(outside) > 1 else outside[0]
    try:
        model = onnx.load(path, format="protobuf")
    except Exception as error:
        raise ConfigError(f"{path}: its weights in {names} cannot be read: {first_line(error)}") from error
    if left := outside_files(model):
        raise ConfigError(f"{path}: {left[0]} cannot be taken into it; save the model in one file")
    if model.ByteSize() >= ONNX_LIMIT:
        raise ConfigError(
            f"{path}: with its weights in {names} it is larger than 2 GiB, the limit of an ONNX file in one piece; "
            "torch.export's .pt2 and TensorRT's engines may be larger, and torchpipe encrypt takes them"
        )
    return io.BytesIO(model.SerializeToString()), f" with {names} inside"


def _check_archive(file: BinaryIO, path: str) -> None:
    """Raise ``ConfigError`` for a zip archive that is not a PyTorch model, or that would be unpacked to files."""
    try:
        kind = archive_kind(file)
    except zipfile.BadZipFile:
        raise _no_model(path) from None
    file.seek(0)
    if kind == "aotinductor":
        raise ConfigError(
            f"{path}: an AOTInductor package is unpacked to files when it is loaded, so it cannot be encrypted; {TAKEN}"
        )
    if kind not in ("torchscript", "export"):
        raise _no_model(path)


def _no_model(path: str) -> ConfigError:
    return ConfigError(f"{path}: {file_kind(path) or 'it is not a model'}; {TAKEN}")


def _parsed(onnx: Any, file: BinaryIO) -> Any:
    """Parse an ONNX model without its external weights; ``None`` for anything else."""
    try:
        model = onnx.load(file, format="protobuf", load_external_data=False)
    except Exception:
        return None
    return model if model.graph.output else None
