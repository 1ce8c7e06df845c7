"""A folder of TOML files as one configuration: ``NAME.toml`` is a model, ``NAME/2.toml`` a version of one."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from torchpipe_py.errors import ConfigError, Problems, nearest
from torchpipe_py.plan.config import MapSource, NodeSpec, PipelineSpec, Place, Tables, load_config, parse_toml
from torchpipe_py.plan.graph import Graph
from torchpipe_py.values import Value

FIRST_VERSION = "1"
"""The version of ``NAME.toml``, and of each root of a configuration in one file."""

MOST_MODELS = 1000
"""Maximum number of files in a folder."""

NO_MODEL = "no model in it; expected TOML files: NAME.toml for each model, or NAME/2.toml for a version"

UNLOADED = "unloaded"
"""The problem of a model that was unloaded."""

MOST_NAME_CHARACTERS = 200
"""Of a model."""

_VERSION = re.compile(r"[1-9][0-9]{0,8}")


Listed = tuple[dict[str, dict[str, str]], dict[str, str]]
"""The files of a folder by model and version, and problems of other files by ``NAME/VERSION``."""


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
    """The tables of each file, by ``NAME/VERSION``; nodes of the combined configuration are ``NAME/VERSION/NODE``.

    ``problems`` says why files that are not among them are not served, by ``NAME/VERSION``.
    """

    def __init__(self, tables: Mapping[str, Tables] | None = None, source: str = Tables.source) -> None:
        super().__init__(tables or {})
        self.source = source
        self.problems: dict[str, str] = {}

    @property
    def names(self) -> list[str]:
        """The names of the models, without duplicates."""
        return list(dict.fromkeys(name_of(key) for key in self))

    def versions(self, name: str) -> list[str]:
        """The versions of a model in ascending order; empty for an unknown model."""
        return sorted([version_of(key) for key in self if name_of(key) == name], key=int)

    def only(self, key: str) -> Folder:
        """The folder with this file alone."""
        return Folder({key: self[key]}, self.source)

    def without(self, name: str) -> Folder:
        """The folder without model ``name``."""
        return self._where(lambda other: other != name)

    def having(self, name: str, listed: Listed | None = None) -> Folder:
        """The folder with all versions of model ``name`` read again. ``ConfigError`` if the folder does not have it.

        ``listed``: what ``list_models`` returned for it, if it was called before.
        """
        files, problems = listed or list_models(self.source)
        if name not in files:
            wrong = [problem for key, problem in problems.items() if name_of(key) == name]
            here = os.path.normpath(self.source)  # a client is shown its last part
            hint = wrong[0] if wrong else f"no model {name[:80]!r} in {here}; {nearest(name[:80], files)}"
            raise ConfigError(hint)
        read = {f"{name}/{version}": parse_toml(path) for version, path in files[name].items()}
        for tables in read.values():
            load_config(tables)
        rest = self.without(name)
        folder = Folder(dict(sorted({**rest, **read}.items())), self.source)
        folder.problems = rest.problems
        return folder

    def _where(self, is_wanted: Callable[[str], bool]) -> Folder:
        folder = Folder({key: tables for key, tables in self.items() if is_wanted(name_of(key))}, self.source)
        folder.problems = {key: problem for key, problem in self.problems.items() if is_wanted(name_of(key))}
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


def name_of(key: str) -> str:
    """The model of ``NAME/VERSION``."""
    return key.rpartition("/")[0]


def version_of(key: str) -> str:
    """The version of ``NAME/VERSION``."""
    return key.rpartition("/")[2]


def parse_folder(path: str | os.PathLike[str]) -> Folder:
    """Read all models of a folder, to be passed to ``pipe``. ``ConfigError`` for files that are not models."""
    folder = Folder(source=os.fspath(path))
    for name, versions in sorted(find_models(folder.source).items()):
        folder.update({f"{name}/{version}": parse_toml(file) for version, file in versions.items()})
    return folder


def read_folder(path: str | os.PathLike[str]) -> Folder:
    """Read the models of a folder. Files whose nodes cannot be read become ``problems``.

    Raises ``ConfigError`` if the folder cannot be read.
    """
    folder = Folder(source=os.fspath(path))
    files, folder.problems = list_models(folder.source)
    for name, versions in sorted(files.items()):
        for version, file in versions.items():
            try:
                tables = parse_toml(file)
                load_config(tables)
                folder[f"{name}/{version}"] = tables
            except ConfigError as error:
                folder.problems[f"{name}/{version}"] = str(error)
    return folder


def find_models(folder: str) -> dict[str, dict[str, str]]:
    """The files of a folder by model and version. ``ConfigError`` for TOML files whose names are not valid."""
    models, problems = list_models(folder)
    for problem in problems.values():
        raise ConfigError(problem)
    return models


def list_models(folder: str) -> Listed:
    """The files of a folder by model and version, and problems of files that cannot be models, by ``NAME/VERSION``.

    Raises ``ConfigError`` if the folder cannot be read, or has more than ``MOST_MODELS`` files.
    """
    models: dict[str, dict[str, str]] = {}
    problems: dict[str, str] = {}
    count = 0
    try:
        for name, version, path in _files(folder):
            count += 1
            if count > MOST_MODELS:
                raise ConfigError(f"{path}: more than {MOST_MODELS} files")
            versions = models.get(name, {})
            problem = _problem(name, version, path, versions)
            if problem:
                problems[_printable(f"{name}/{version}")] = problem
            else:
                models.setdefault(name, versions)[version] = path
    except OSError as error:
        raise ConfigError(f"{error.filename or folder}: cannot be read: {error.strerror}") from None
    except ConfigError:
        raise
    except ValueError as error:  # a null character in the path, say
        raise ConfigError(f"{folder!r}: cannot be read: {error}") from None
    return models, problems


def _files(folder: str) -> Iterator[tuple[str, str, str]]:
    """Name, version and path of each TOML file."""
    for name, path in _entries(folder):
        if os.path.isdir(path):
            for version, file in _entries(path):
                if version.endswith(".toml"):
                    yield name, version.removesuffix(".toml"), file
        elif name.endswith(".toml"):
            yield name.removesuffix(".toml"), FIRST_VERSION, path


def _entries(folder: str) -> list[tuple[str, str]]:
    """Names and paths, without names that begin with a dot, which editors and volumes create."""
    with os.scandir(folder) as entries:
        return sorted((entry.name, entry.path) for entry in entries if not entry.name.startswith("."))


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)


def _problem(name: str, version: str, path: str, versions: Mapping[str, str]) -> str:
    """Why the file cannot be a version of a model; empty if it can."""
    if not (name.isprintable() and 0 < len(name) <= MOST_NAME_CHARACTERS):
        most = MOST_NAME_CHARACTERS
        return f"{os.fsencode(path)!r}: the name of a model is at most {most} printable characters, as UTF-8"
    if not _VERSION.fullmatch(version):
        return f"{path}: a version is a number from 1, as {os.path.join(name, '2.toml')}"
    if version in versions:
        return f"{path}: version {version} of {name!r} is {versions[version]}, too"
    return ""


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
    for key in sorted(spec.parts, key=lambda key: (name_of(key), int(version_of(key)))):
        name, version = name_of(key), version_of(key)
        roots = [root for root in graph.entered if root.startswith(f"{key}/")]
        for root in roots:
            own = name if len(roots) == 1 else f"{name}.{root.rpartition('/')[2]}"
            models.append(Model(own, version, root))
    return tuple(models)
