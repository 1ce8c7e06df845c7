"""Certificates of ``torchpipe compile``: files, versions and figures of a compiled file, and whether they are the same.

A certificate states the SHA-256 of a TOML file and of the files that it names, versions, figures, and a digest of all
this. The digest shows that a figure was edited. It is no signature: whoever edits one can compute another digest.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torchpipe_py
from torchpipe_py.encryption.model_file import ModelFile, outside_files
from torchpipe_py.errors import ConfigError
from torchpipe_py.files import read_bytes
from torchpipe_py.plan.build import Pipeline
from torchpipe_py.plan.config import Tables, parse_toml, used_backends

SCHEMA = 1
"""Version of the file; raised by incompatible changes."""

ENDING = ".certificate.json"

DIGEST = "digest"

_BLOCK = 2**20

_OPENCV = ("opencv-python", "opencv-python-headless", "opencv-contrib-python", "opencv-contrib-python-headless")
_ALWAYS = ("numpy", "torch", *_OPENCV, "pillow", "simplejpeg", "onnxruntime", "onnxruntime-gpu")
_BY_BACKEND = {
    "TensorrtTensor": ("tensorrt", "tensorrt-lean-cu13-bindings"),
    "DecodeTensor": ("nvidia-nvimgcodec-cu13", "torchvision"),
}
"""Distributions on which results depend."""


# --- files and versions


def file_hash(path: str | os.PathLike[str]) -> str:
    """The SHA-256 of a file, in hex. Raises ``OSError``."""
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            found.update(block)
    return found.hexdigest()


def versions(tables: Mapping[str, Any]) -> dict[str, str]:
    """The installed distributions that the results of a configuration depend on; imports none."""
    names = list(_ALWAYS)
    for backend in used_backends(tables):
        names += _BY_BACKEND.get(backend, ())
    found = {"torchpipe_py": torchpipe_py.__version__}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def described(pipeline: Pipeline, path: str, code: Iterable[str]) -> dict[str, Any]:
    """The hashes of a TOML file, of the files that its backends read, and of files of ``code``."""
    folder, files = os.path.dirname(path), dict[tuple[str, str, str], str]()
    for name, plan in pipeline.plans.items():
        for part in (part for backend in plan.backends for part in backend.parts()):
            for attribute, param in part.cls.parameters().items():
                located, key = part.params.get(attribute), part.keys.get(attribute)
                # NOTE: a key of encryption is a secret that is as good under another name.
                if not (param.file and located and key) or attribute == "key_file":
                    continue
                written = _as_written(plan.spec.params[key], str(located), folder)
                for each in (written, *_weights(part.params, written, str(located))):
                    files[name, key, each] = file_hash(_located(each, folder))
    return {
        "path": path,
        "sha256": file_hash(path),
        "files": [
            {"node": node, "key": key, "path": written, "sha256": found}
            for (node, key, written), found in sorted(files.items())
        ],
        "code": [{"path": each, "sha256": file_hash(each)} for each in code if os.path.isfile(each)],
    }


def _as_written(value: Any, located: str, folder: str) -> str:
    """Which of the paths in a value, separated by ``|``, is the file that was found."""
    parts = [part.strip() for part in str(value).split("|")]
    return next((part for part in parts if located in (part, os.path.join(folder, part))), located)


def _weights(params: Mapping[str, Any], written: str, located: str) -> Iterator[str]:
    """The files with weights of a plain ONNX model, beside it."""
    file = ModelFile(located, params.get("key_file", ""), params.get("key_env", ""))
    if file.is_onnx and not file.has_key:
        import onnx

        for name in outside_files(onnx.load(located, load_external_data=False)):
            yield os.path.join(os.path.dirname(written), name)


def _located(path: str, folder: str) -> str:
    """The file of a path in a TOML file in ``folder``: in the working directory or else beside it, as plans have it."""
    beside = os.path.join(folder, path)
    return beside if not os.path.isfile(path) and os.path.isfile(beside) else path


# --- the certificate


def digest(content: Mapping[str, Any]) -> str:
    """The SHA-256, in hex, of everything in a certificate but the digest itself."""
    stated = {key: value for key, value in content.items() if key != DIGEST}
    text = json.dumps(stated, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def read_certificate(path: str) -> dict[str, Any]:
    """The content of a certificate; ``ConfigError`` if it is none, or was edited."""
    try:
        content = json.loads(read_bytes(path))
    except OSError as error:
        raise ConfigError(f"certificate {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or not isinstance(content.get(DIGEST), str) or "schema" not in content:
        raise ConfigError(f"certificate {path}: not a certificate, which torchpipe compile writes as NAME{ENDING}")
    if content["schema"] != SCHEMA:
        why = f"of version {content['schema']}, this torchpipe_py reads version {SCHEMA}"
        raise ConfigError(f"certificate {path}: {why}{_renewal(content)}")
    try:
        is_whole = content[DIGEST] == digest(content)
    except (ValueError, RecursionError):  # NaN, infinity or deep lists, which no certificate has
        is_whole = False
    if not is_whole:
        raise ConfigError(f"certificate {path}: it was edited: its content has another digest{_renewal(content)}")
    return content


def check_certificate(path: str, config: str, code: Sequence[str] = ()) -> Tables:
    """The tables of the TOML file ``config``, if files and versions are those that the certificate states.

    ``code`` are the modules and files with custom backends. Raises ``ConfigError``, a line for each difference, and the
    command that renews the certificate.
    """
    content, tables = read_certificate(path), parse_toml(config)
    try:
        differing = list(_differences(content, config, tables, code))
    except (KeyError, TypeError, AttributeError):
        raise ConfigError(f"certificate {path}: not a certificate of torchpipe compile{_renewal(content)}") from None
    if differing:
        lines = [f"certificate {path}: {line}" for line in differing]
        raise ConfigError("\n".join(lines) + _renewal(content))
    return tables


def _renewal(content: Mapping[str, Any]) -> str:
    commands = content.get("commands")
    renew = commands.get("renew") if isinstance(commands, dict) else None
    return f"; renew it: {renew}" if isinstance(renew, str) else "; torchpipe compile writes another one"


def _differences(content: Mapping[str, Any], config: str, tables: Tables, code: Sequence[str]) -> Iterator[str]:
    compiled = content["compiled"]
    if problem := _differs(config, compiled["sha256"]):
        yield f"{config} {problem}"
    for each in compiled["files"]:
        if problem := _differs(_located(each["path"], os.path.dirname(config)), each["sha256"]):
            yield f"node {each['node']!r}: key {each['key']!r}: {each['path']} {problem}"
    certified = {os.path.basename(each["path"]): each["sha256"] for each in compiled["code"]}
    for each in filter(os.path.isfile, code):
        name = os.path.basename(each)
        if name not in certified:
            yield f"--import {each} is not among the certified code"
        elif problem := _differs(each, certified[name]):
            yield f"--import {each} {problem}"
    here, there = versions(tables), content["versions"]
    for name in sorted({*here, *there}):
        if here.get(name) != there.get(name):
            one, other = (found.get(name, "not installed") for found in (there, here))
            yield f"{name} is {other} here, {one} in the certificate"


def _differs(path: str, certified: str) -> str:
    """Why a file is not the certified one; empty if it is."""
    try:
        found = file_hash(path)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return "" if found == certified else f"is not the certified file: SHA-256 {found[:12]}…, not {certified[:12]}…"
