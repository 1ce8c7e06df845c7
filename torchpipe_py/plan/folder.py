"""A folder of TOML files as one configuration: ``NAME.toml`` is a model, ``NAME/2.toml`` a version of one."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torchpipe_py.errors import ConfigError, Problems, nearest
from torchpipe_py.plan.config import MapSource, NodeSpec, PipelineSpec, Place, Tables, parse_toml
from torchpipe_py.plan.graph import Graph
from torchpipe_py.values import Value

FIRST_VERSION = "1"
"""The version of ``NAME.toml``, and of each root of a configuration in one file."""

MOST_MODELS = 1000
"""Maximum number of files in a folder."""

NO_MODEL = "no model in it; NAME.toml is one, NAME/2.toml a version of one"

_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")
_VERSION = re.compile(r"[1-9][0-9]{0,8}")


@dataclass(frozen=True)
class Model:
    """A root, with the name and version that clients use for it."""

    name: str
    version: str
    root: str

    @property
    def node_name(self) -> str:
        """The ``node_name`` that requests use for it."""
        return self.name if self.name == self.root else f"{self.name}/{self.version}"


class Folder(Tables):
    """The tables of each file, by ``NAME/VERSION``; nodes of the combined configuration are ``NAME/VERSION/NODE``."""

    @property
    def names(self) -> list[str]:
        """The names of the models, without duplicates."""
        return list(dict.fromkeys(key.partition("/")[0] for key in self))

    def versions(self, name: str) -> list[str]:
        """The versions of a model in ascending order; empty for an unknown model."""
        return sorted([key.partition("/")[2] for key in self if key.partition("/")[0] == name], key=int)

    def without(self, name: str) -> Folder:
        """The folder without model ``name``."""
        return self._with({key: tables for key, tables in self.items() if key.partition("/")[0] != name})

    def having(self, name: str) -> Folder:
        """The folder with all versions of model ``name`` read again. ``ConfigError`` if the folder does not have it."""
        files = find_models(self.source)
        if name not in files:
            raise ConfigError(f"no model {name[:80]!r} in {self.source}; {nearest(name[:80], files)}")
        read = {f"{name}/{version}": parse_toml(path) for version, path in files[name].items()}
        return self._with(dict(sorted({**self.without(name), **read}.items())))

    def _with(self, tables: Mapping[str, Tables]) -> Folder:
        folder = Folder(tables)
        folder.source = self.source
        return folder

    def spec(self, problems: Problems) -> PipelineSpec:
        if not self:
            raise Place(self.source).error(NO_MODEL)
        parts = {key: Tables.spec(tables, problems) for key, tables in self.items()}
        return PipelineSpec(
            Place(self.source),
            {f"{key}/{name}": _moved(node, key) for key, part in parts.items() for name, node in part.nodes.items()},
            {},
            max(part.max_inflight for part in parts.values()),
            tuple(f"{key}/{name}" for key, part in parts.items() for name in part.broken),
            parts,
        )


def parse_folder(path: str | os.PathLike[str]) -> Folder:
    """Read all models of a folder, to be passed to ``pipe``. ``ConfigError`` for files that are not models."""
    folder = Folder()
    folder.source = os.fspath(path)
    for name, versions in sorted(find_models(folder.source).items()):
        folder.update({f"{name}/{version}": parse_toml(file) for version, file in versions.items()})
    return folder


def find_models(folder: str) -> dict[str, dict[str, str]]:
    """The files of a folder by model and version. ``ConfigError`` for TOML files whose names are not valid."""
    models: dict[str, dict[str, str]] = {}
    try:
        for name, path in _entries(folder):
            if name.endswith(".toml"):
                _add(models, name.removesuffix(".toml"), FIRST_VERSION, path)
            elif os.path.isdir(path):
                for version, file in _entries(path):
                    if version.endswith(".toml"):
                        _add(models, name, version.removesuffix(".toml"), file)
    except OSError as error:
        raise ConfigError(f"{error.filename or folder}: cannot be read: {error.strerror}") from None
    return models


def _entries(folder: str) -> list[tuple[str, str]]:
    """Names and paths, without names that begin with a dot, which editors and volumes create."""
    with os.scandir(folder) as entries:
        return sorted((entry.name, entry.path) for entry in entries if not entry.name.startswith("."))


def _add(models: dict[str, dict[str, str]], name: str, version: str, path: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{path}: the name of a model is letters from a to z, digits, '_' and '-'")
    if not _VERSION.fullmatch(version):
        raise ConfigError(f"{path}: a version is a number from 1, as {os.path.join(name, '2.toml')}")
    versions = models.setdefault(name, {})
    if version in versions:
        raise ConfigError(f"{path}: version {version} of {name!r} is {versions[version]}, too")
    versions[version] = path
    if sum(map(len, models.values())) > MOST_MODELS:
        raise ConfigError(f"{path}: more than {MOST_MODELS} files")


def _moved(node: NodeSpec, key: str) -> NodeSpec:
    """The node with ``key`` added to all node names. NOTE: ``jump`` is the only parameter that names a node."""

    def moved(value: Value) -> Value:
        return f"{key}/{value}" if isinstance(value, str) else value

    params = {
        name: moved(value) if name.rpartition("::")[2] == "jump" else value for name, value in node.params.items()
    }
    return replace(
        node,
        name=f"{key}/{node.name}",
        next=tuple(f"{key}/{name}" for name in node.next),
        map=tuple(MapSource(f"{key}/{source.node}" if source.node else "", source.pairs) for source in node.map),
        params=params,
    )


def models_of(spec: PipelineSpec, graph: Graph) -> tuple[Model, ...]:
    """Every root that a request may enter, as a model named after the root or, in a folder, after its file.

    If a file has several roots, each is a model ``NAME.ROOT``. Versions of a model are in ascending order.
    """
    if not spec.parts:
        return tuple(Model(root, FIRST_VERSION, root) for root in graph.entered)
    models = []
    for key in sorted(spec.parts, key=lambda key: (key.partition("/")[0], int(key.partition("/")[2]))):
        name, _, version = key.partition("/")
        roots = [root for root in graph.entered if root.startswith(f"{key}/")]
        for root in roots:
            own = name if len(roots) == 1 else f"{name}.{root.rpartition('/')[2]}"
            models.append(Model(own, version, root))
    return tuple(models)
