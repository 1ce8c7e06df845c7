"""Reads a model repository of Triton: models, served versions and files."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass

from torchpipe_py.backends.model.onnx_graph import declared_tensors
from torchpipe_py.errors import ConfigError, Problems, nearest, quoted
from torchpipe_py.plan.unknown import BACKENDS_ELSEWHERE
from torchpipe_py.tools.from_triton.pbtxt import Message, read_pbtxt
from torchpipe_py.tools.report import ToolError

FILES = {"OnnxTensor": ("model.onnx",), "TensorrtTensor": ("model.plan",), "TorchTensor": ("model.pt", "model.pt2")}
"""Backends that run a model file, and Triton's default names for it."""


@dataclass(frozen=True)
class Model:
    """A model. ``backend`` is a key of ``FILES``, Triton's backend or ``ensemble``; ``versions`` ascend."""

    name: str
    folder: str
    config: Message
    versions: list[str]
    backend: str

    def file(self, version: str) -> str:
        """The file of a version. ``ConfigError`` if it is missing."""
        named = self.config.text("default_model_filename")
        paths = [os.path.join(self.folder, version, name) for name in ([named] if named else FILES[self.backend])]
        # It may be a folder that also contains weights.
        for path in [*paths, *(os.path.join(path, os.path.basename(path)) for path in paths)]:
            if os.path.isfile(path):
                return path
        raise self.config.error(f"no such file: {' or '.join(paths)}", "default_model_filename")

    def names(self, version: str, kind: str) -> list[str]:
        """Names of its ``input`` or ``output`` tensors, in the model's order if known."""
        names = [tensor.text("name") for tensor in self.config.all(kind, Message)]
        if self.backend == "OnnxTensor":
            declared = declared_tensors(self.file(version))[kind == "output"]
            return [spec.name for spec in declared] or names
        is_numbered = self.backend == "TorchTensor" and all(re.search(r"__\d{1,9}$", name, re.ASCII) for name in names)
        return sorted(names, key=lambda name: int(name.rpartition("__")[2])) if is_numbered else names


def read_repository(root: str) -> dict[str, Model]:
    """The models by name. ``ConfigError`` has a line for each problem."""
    models, problems = dict[str, Model](), Problems()
    try:
        for name in sorted(os.listdir(root)):
            if not name.startswith(".") and os.path.isdir(folder := os.path.join(root, name)):
                with problems.gathered():
                    models |= _read_model(name, folder)
    except OSError as error:
        raise ToolError(f"{error.filename or root}: {error.strerror}") from None
    problems.raise_all()
    if not models:
        raise ToolError(f"{root}: no model in it, as NAME/config.pbtxt with NAME/1/model.onnx")
    return models


def _read_model(name: str, folder: str) -> dict[str, Model]:
    """The model in a folder; empty if the folder has neither a configuration nor versions."""
    path = os.path.join(folder, "config.pbtxt")
    versions = sorted([entry for entry in os.listdir(folder) if re.fullmatch("[1-9][0-9]*", entry)], key=int)
    if not (versions or os.path.lexists(path)):
        return {}
    if not name.isprintable():
        raise ConfigError(f"{folder!r}: expected a name of printable characters in UTF-8")
    config = read_pbtxt(path) if os.path.lexists(path) else Message(path)
    if config.text("name") not in ("", name):
        raise config.error(f"name: {config.text('name')!r} is in the folder of {name!r}, as Triton calls it", "name")
    backend = config.text("backend") or config.text("platform") or name.partition(".")[2]
    if "ensemble_scheduling" in config.fields:
        backend = "ensemble"
    elif not backend and versions:
        files = os.listdir(os.path.join(folder, versions[-1]))
        backends = {file: kind for kind, names in {**FILES, "python": ("model.py",)}.items() for file in names}
        backend = next((backends[file] for file in files if file in backends), "")
    if not backend:
        raise config.error("backend: is missing, and no file has a name that says it")
    if not config.text("runtime").endswith(".py"):
        backend = BACKENDS_ELSEWHERE.get(backend.lower(), backend)
    if backend in FILES and not versions:
        raise config.error(f"no version in {folder}, a folder with a number from 1 as its name")
    policy, versions = config.message("version_policy"), versions or ["1"]
    if "specific" in policy.fields:
        selected = sorted(policy.message("specific").all("versions", int))
        versions = [checked(policy, "specific", str(version), versions) for version in selected]
    elif "all" not in policy.fields:
        versions = versions[-(policy.message("latest").number("num_versions", 1) or 1) :]
    return {name: Model(name, folder, config, versions, backend)}


def checked(message: Message, field: str, name: str, valid: Collection[str]) -> str:
    """Return ``name``; ``ConfigError`` if it is not valid."""
    if name not in valid:
        raise message.error(f"{field}: no {quoted(name)}; {nearest(name, valid)}", field)
    return name
