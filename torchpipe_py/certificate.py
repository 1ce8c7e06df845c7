"""Certificates of ``torchpipe compile``: files, versions and figures of a compiled file, and whether they are the same.

A certificate states the SHA-256 of a TOML file and of the files that it names, what its backends chose at set-up,
versions, figures, and a digest of all this. The digest shows that a figure was edited. It is no signature: whoever
edits one can compute another digest.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.machinery import PathFinder
from typing import Any

import torchpipe_py
from torchpipe_py.errors import ConfigError
from torchpipe_py.files import read_bytes
from torchpipe_py.plan.build import Pipeline
from torchpipe_py.plan.config import Tables, parse_toml, used_backends
from torchpipe_py.plan.files import file_hash, files_of, paths_beside
from torchpipe_py.registry import ENTRY_POINT_GROUP

SCHEMA = 2
"""Version of the file; raised by incompatible changes."""

ENDING = ".certificate.json"

DIGEST = "digest"

_OPENCV = ("opencv-python", "opencv-python-headless", "opencv-contrib-python", "opencv-contrib-python-headless")
_ALWAYS = ("numpy", "torch", *_OPENCV, "pillow", "simplejpeg", "onnxruntime", "onnxruntime-gpu")
_BY_BACKEND = {
    "TensorrtTensor": ("tensorrt", "tensorrt-lean-cu13-bindings"),
    "DecodeTensor": ("nvidia-nvimgcodec-cu13", "torchvision"),
}
"""Distributions on which results depend."""


# --- files and versions


def versions(tables: Mapping[str, Any]) -> dict[str, str]:
    """The installed distributions that the results of a configuration depend on; imports none."""
    names, used = list(_ALWAYS), used_backends(tables)
    for backend in used:
        names += _BY_BACKEND.get(backend, ())
    found = {"torchpipe_py": torchpipe_py.__version__}
    for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):  # backends of other packages
        if point.name in used and point.dist is not None:
            names.append(point.dist.name)
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def code_files(name: str, others: Iterable[str] = ()) -> dict[str, str]:
    """The files of ``import_code(name)``, by the names of their modules; imports nothing.

    ``others`` are imported, too: a module may lie beside a file of these.

    They are the file or module itself, the ``__init__`` of each package around it and, of a package, all modules in it.
    """
    if name.endswith(".py"):
        return {os.path.splitext(os.path.basename(name))[0]: name}
    files, module = dict[str, str](), ""
    folders: list[str] | None = None
    for part in name.split("."):
        module = f"{module}.{part}" if module else part
        spec = PathFinder.find_spec(module, folders) if folders is not None else _top(module, others)
        if spec is None:
            return {}
        if spec.origin is not None and os.path.isfile(spec.origin):
            files[module] = spec.origin
        folders = list(spec.submodule_search_locations or ())
    for folder in folders or ():
        for place, _, names in os.walk(folder):
            for each in sorted(names):
                if each.endswith(".py"):
                    path = os.path.join(place, each)
                    parts = os.path.relpath(path, folder).removesuffix(".py").split(os.sep)
                    files.setdefault(".".join([module, *parts]).removesuffix(".__init__"), path)
    return files


def _top(module: str, others: Iterable[str]) -> Any:
    """Where a module that is in no package is found; ``None`` if nowhere."""
    folders = [os.getcwd(), *(os.path.dirname(os.path.abspath(name)) for name in others if name.endswith(".py"))]
    with suppress(ValueError):  # a module of this process without a spec, such as __main__
        return importlib.util.find_spec(module) or PathFinder.find_spec(module, folders)
    return None


def described(pipeline: Pipeline, path: str, sha256: str, code: Iterable[str]) -> dict[str, Any]:
    """A TOML file, the files that its backends read, and those of the modules and files of ``code``, with their hashes.

    ``sha256`` is that of the TOML file, which need not be written yet.
    """
    folder, files, code = os.path.dirname(path), dict[tuple[str, str, str], str](), [*code]
    for each in files_of(pipeline):
        # NOTE: a key of encryption is a secret that is as good under another name.
        if each.key is None or each.attribute == "key_file":
            continue
        written = _as_written(pipeline.plans[each.node].spec.params[each.key], each.path, folder)
        for name in (written, *paths_beside(written, each.weights)):
            files[each.node, each.key, name] = file_hash(_located(name, folder))
    return {
        "path": path,
        "sha256": sha256,
        "files": [
            {"node": node, "key": key, "path": written, "sha256": found}
            for (node, key, written), found in sorted(files.items())
        ],
        "code": [
            {"module": module, "path": file, "sha256": file_hash(file)}
            for module, file in sorted({k: file for name in code for k, file in code_files(name, code).items()}.items())
        ],
    }


def _as_written(value: Any, located: str, folder: str) -> str:
    """Which of the paths in a value, separated by ``|`` or ``&``, is the file that was found."""
    parts = [part.strip() for part in re.split(r"[|&]", str(value))]
    return next((part for part in parts if located in (part, os.path.join(folder, part))), located)


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


Runs = Callable[[str], bool]
"""Whether a process runs a node."""


@dataclass(frozen=True)
class Certificate:
    """What the certificate at ``path`` states for the processes that run its TOML file; ``renewal`` ends messages.

    ``files`` are node, key, path and SHA-256; ``code`` and ``versions`` are by module and distribution. ``choices`` are
    those of ``pipe.setup_choices``.
    """

    path: str
    digest: str
    files: Sequence[tuple[str, str, str, str]]
    code: Mapping[str, str]
    choices: Mapping[str, Sequence[str]]
    versions: Mapping[str, str]
    renewal: str

    def require(self, differences: Iterable[str]) -> None:
        """Raise ``ConfigError`` if there are any, with a line for each and the command that renews the certificate."""
        if lines := [f"certificate {self.path}: {line}" for line in differences]:
            raise ConfigError("\n".join(lines) + self.renewal)


class CertifiedTables(Tables):
    """The tables of a TOML file that is certified, with its certificate.

    Each process checks by itself what it loads, each time it starts: it loads within ``loading``, and then passes what
    backends chose to ``check_choices``; ``checking`` is for processes that it starts. These raise ``ConfigError``.
    ``code`` are the modules and files with custom code, each after the flag that names it.
    """

    certificate: Certificate
    code: Sequence[tuple[str, str]] = ()

    @contextmanager
    def loading(self, runs: Runs = lambda node: True) -> Iterator[None]:
        """A context in which a process loads the files of nodes that it runs, and code.

        They are compared before, and must be as they were then afterwards: what was loaded is what was certified.
        """
        before = self._states(runs)
        self.certificate.require(self._differences(runs))
        yield
        after = self._states(runs)
        changed = [path for path in {**before, **after} if before.get(path) != after.get(path)]
        self.certificate.require(f"{path} changed while it was loaded" for path in changed)

    def checking(self, plan: Pipeline) -> Pipeline:
        """The plan of these tables, with ``loading`` for processes of ``Process[…]`` in place of those that died."""

        def loading(owner: str) -> AbstractContextManager[None]:
            return self.loading(lambda node: node == owner)

        plans = {name: replace(each, reloading=partial(loading, each.spec.owner)) for name, each in plan.plans.items()}
        return replace(plan, plans=plans)

    def check_choices(self, choices: Mapping[str, Sequence[str]], runs: Runs = lambda node: True) -> None:
        """Compare the ``setup_choices`` of a pipe with the certified ones."""
        certified, differences = self.certificate.choices, []
        for node in sorted(filter(runs, {*choices, *certified})):
            here, there = choices.get(node, ()), certified.get(node, ())
            found = ", ".join(choice for choice in here if choice not in there)
            wanted = ", ".join(choice for choice in there if choice not in here)
            if found or wanted:
                stated = f"{wanted or 'nothing'} in the certificate"
                differences.append(f"node {node!r} uses {found or 'nothing'} here, {stated}")
        self.certificate.require(differences)

    def _located(self, path: str) -> str:
        return _located(path, os.path.dirname(self.source))

    def _code_files(self, name: str) -> dict[str, str]:
        return code_files(name, [other for _, other in self.code])

    def _states(self, runs: Runs) -> dict[str, tuple[int, ...]]:
        """The state of each file that a process with these nodes loads."""
        paths = [self._located(path) for node, _, path, _ in self.certificate.files if runs(node)]
        paths += [file for _, name in self.code for file in self._code_files(name).values()]
        return {path: _state(path) for path in paths}

    def _differences(self, runs: Runs) -> Iterator[str]:
        for node, key, path, certified in self.certificate.files:
            if runs(node) and (problem := _differs(self._located(path), certified)):
                yield f"node {node!r}: key {key!r}: {path} {problem}"
        for flag, name in self.code:
            yield from self._differing_code(flag, name)
        here, there = versions(self), self.certificate.versions
        for name in sorted({*here, *there}):
            found, wanted = here.get(name, "not installed"), there.get(name, "not installed")
            if found != wanted:
                yield f"{name} is {found} here, {wanted} in the certificate"

    def _differing_code(self, flag: str, name: str) -> Iterator[str]:
        certified, files = self.certificate.code, self._code_files(name)
        if not files or not certified.keys() & files.keys():
            yield f"{flag} {name} is not among the certified code (torchpipe compile --import)"
            return
        for module, file in files.items():
            if module not in certified:
                yield f"{flag} {name}: {file} is not among the certified code"
            elif problem := _differs(file, certified[module]):
                yield f"{flag} {name}: {file} {problem}"
        for module in certified:
            if module.startswith(f"{name}.") and module not in files:
                yield f"{flag} {name}: the certified module {module} is missing"


def read_certified(path: str, config: str, code: Sequence[tuple[str, str]] = ()) -> CertifiedTables:
    """The tables of the TOML file ``config``, if it is the one that the certificate at ``path`` certifies.

    It does not compare the files that the TOML file names: ``CertifiedTables`` does, where they are loaded. ``code`` is
    that of ``CertifiedTables``. Raises ``ConfigError``.
    """
    content, before = read_certificate(path), _state(config)
    tables = CertifiedTables(parsed := parse_toml(config))
    tables.source, tables.code = parsed.source, tuple(code)
    compiled: Any = content.get("compiled")
    try:
        tables.certificate = certificate = Certificate(
            path,
            content[DIGEST],
            [(each["node"], each["key"], each["path"], each["sha256"]) for each in compiled["files"]],
            {each["module"]: each["sha256"] for each in compiled["code"]},
            dict(compiled["choices"]),
            dict(content["versions"]),
            _renewal(content),
        )
        problem = _differs(config, compiled["sha256"])
        if not problem and _state(config) != before:
            problem = "changed while it was read"
    except (KeyError, TypeError, ValueError):
        raise ConfigError(f"certificate {path}: not a certificate of torchpipe compile{_renewal(content)}") from None
    certificate.require([f"{config} {problem}"] if problem else [])
    return tables


def is_same_certificate(one: object, other: object) -> bool:
    """Whether tables have the same certificate, or none has any."""
    return _digest_of(one) == _digest_of(other)


def _digest_of(tables: object) -> str | None:
    return tables.certificate.digest if isinstance(tables, CertifiedTables) else None


def _renewal(content: Mapping[str, Any]) -> str:
    commands = content.get("commands")
    renew = commands.get("renew") if isinstance(commands, dict) else None
    return f"; renew it: {renew}" if isinstance(renew, str) else "; torchpipe compile writes another one"


def _state(path: str) -> tuple[int, ...]:
    """What changes with the content of a file, however it is replaced; empty if there is none."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):  # ValueError: a path with a NUL
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _differs(path: str, certified: str) -> str:
    """Why a file is not the certified one; empty if it is."""
    try:
        found = file_hash(path)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except ValueError as error:  # a path with a NUL
        return f"cannot be read: {error}"
    return "" if found == certified else f"is not the certified file: SHA-256 {found[:12]}…, not {certified[:12]}…"
