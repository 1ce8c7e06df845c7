"""The files that a plan reads, and what identifies their content."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torchpipe_py.encryption.model_file import ModelFile
from torchpipe_py.files import ENCRYPTED, FileContent
from torchpipe_py.plan.build import Pipeline
from torchpipe_py.plan.config import load_config
from torchpipe_py.wire.protobuf import fields_of, text_of, varint

_BLOCK = 2**20
_SMALL = 2**14

_LOCATION, _EXTERNAL, _ENTRIES = 14, 1, 13  # of a tensor: where it lies, in another file, what and where
_KEY, _VALUE = 1, 2
_WORD = b"location"  # the key of the file's name
_MESSAGES: Mapping[str, Mapping[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
}
"""The messages of ONNX with tensors inside, by the numbers of their fields."""


class PlanFile(NamedTuple):
    """A file that a backend of ``node`` reads, and the names of those with its weights, in the same folder.

    ``attribute`` is that of the parameter, ``key`` the key that names it, or ``None`` for a default.
    """

    node: str
    attribute: str
    key: str | None
    path: str
    weights: tuple[str, ...]

    def beside(self) -> list[str]:
        """The paths of the weights."""
        return paths_beside(self.path, self.weights)


def files_of(pipeline: Pipeline) -> Iterator[PlanFile]:
    """The files that the parameters of backends name: models, labels, keys. Not caches, which backends write."""
    for name, plan in pipeline.plans.items():
        for part in plan.parts():
            params = part.params
            has_key = bool(params.get("key_file") or params.get("key_env"))  # then the model has its weights inside
            for attribute, param in part.cls.parameters().items():
                if param.file and (located := params.get(attribute)):
                    weights = () if has_key else weights_of(str(located))
                    yield PlanFile(name, attribute, part.keys.get(attribute), str(located), weights)


def paths_named(tables: Mapping[str, Any]) -> Iterator[str]:
    """Paths that any value of a shared node may name, with those of weights; for a process that makes no plan."""
    for node in load_config(tables).nodes.values():
        folder = os.path.dirname(node.place.source)
        for value in node.params.values() if node.shared else ():
            for name in re.split(r"[|&]", value) if isinstance(value, str) else ():
                for path in (name.strip(), os.path.join(folder, name.strip())) if name.strip() else ():
                    yield from (path, *paths_beside(path, weights_of(path)))


def paths_beside(path: str, names: Iterable[str]) -> list[str]:
    """The paths of files with these names, such as a model's ``weights_of``, in the folder of ``path``."""
    return [os.path.join(os.path.dirname(path), name) for name in names]


def weights_of(path: str) -> tuple[str, ...]:
    """The names of the files with weights of a plain ONNX model, as it has them; none of any other file.

    Read without the onnx package, as the supervisor has no use for it otherwise.
    """
    # NOTE: opening a named pipe would wait for somebody who writes to it.
    if not ModelFile(path).is_onnx or not os.path.isfile(path):
        return ()
    names = set()
    try:
        with open(path, "rb") as file:
            content = FileContent(file)
            todo = [] if content[0 : len(ENCRYPTED)] == ENCRYPTED else [("model", (0, len(content)))]
            while todo:
                kind, (start, end) = todo.pop()
                if end - start < _SMALL and _WORD not in content[start:end]:
                    continue  # most nodes, which are many
                fields = fields_of(content, (start, end))
                for number, inner in _MESSAGES.get(kind, {}).items():
                    todo += [(inner, each) for each in fields[number]]
                if kind == "tensor" and [varint(content, at)[0] for at, _ in fields[_LOCATION]] == [_EXTERNAL]:
                    entries = [fields_of(content, each) for each in fields[_ENTRIES]]
                    names |= {
                        text_of(content, each[_VALUE])
                        for each in entries
                        if text_of(content, each[_KEY]) == _WORD.decode()
                    }
    except (OSError, ValueError, IndexError):  # missing, or not a whole ONNX file
        return ()
    return tuple(sorted(names))


def file_hash(path: str | os.PathLike[str]) -> str:
    """The SHA-256 of a file, in hex. Raises ``OSError``."""
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            found.update(block)
    return found.hexdigest()
