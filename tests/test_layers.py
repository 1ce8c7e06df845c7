"""Who may import whom: lists of layers, the lowest first. A module imports from its own layer and from lower ones."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from kit.waits import run

import torchpipe_py.serving
from torchpipe_py import Backend, registry

ROOT = Path(__file__).parent.parent

# A name is a module or a folder. Names that share a line import nothing of each other.
PACKAGE = [
    "aging cores errors idl keys malloc results",
    "arguments files values filters metrics",
    "encryption",
    "wire backends.params backends.signature",
    "backends.base",
    "registry",
    "plan",
    "backends certificate",
    "proc",
    "runtime",
    "methods streams",
    "tools tools.report tools.statistics",
    "tools.compare_models tools.team",
    "tools.options",
    "proc.engine training tools.draw tools.export tools.load tools.doctor tools.watch",
    "serving",
    "ray tools.from_triton tools.parity tools.quantize tools.tune",
    "tools.run tools.compile",
    "cli",
]
CLIENT = ["errors", "contract detections", "values", "core", "connection", "client", "aio"]
"""Imports neither ``torchpipe_py`` nor the server."""
SERVER = ["options", "logs", "wire", "front", "tracing", "methods", "worker", "supervisor", "cli", "__main__"]
TRAINING = ["errors", "options data plan prefetch ranks", "samples augment", "decode", "batcher", "workers.transfer"]
TRAINING += ["workers", "loader workers.preload", "wrap"]
"""Within ``torchpipe_py.training``."""
SCRIPTS = ["examples.textures examples.shapes", "benchmarks", "recipes", "examples"]

SEAM = {"", "serving", "methods.tracing", "methods.rpc.messages"}
"""The modules of ``torchpipe_py`` that the service and Ray Serve may import.

The public names are those of "". The last two are imported where their optional libraries are in use.
"""
RAY_SERVE = ["ray.serve", "ray.service"]


def module_name(path: Path, folder: Path) -> str:
    """``torchpipe_py/backends/base.py`` is ``backends.base``; the package itself is empty."""
    parts = path.relative_to(folder).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def modules(folder: Path) -> dict[str, Path]:
    return {module_name(path, folder): path for path in sorted(folder.rglob("*.py"))}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imported(path: Path) -> set[str]:
    """What the file imports, anywhere in it: names that could be modules, public ones as ``torchpipe_py``."""
    found: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            public = set(torchpipe_py.__all__) if node.module == "torchpipe_py" else set()
            names = {alias.name for alias in node.names}
            found |= {str(node.module)} if public & names else set()
            found |= {f"{node.module}.{name}" for name in names - public}
    return found


def arrows(folder: str) -> dict[str, set[str]]:
    """For each module of a folder the modules of the same folder that it imports."""
    known = modules(ROOT / folder)
    prefix = folder.removeprefix("server/").removeprefix("scripts").replace("/", ".")
    found: dict[str, set[str]] = {}
    for name, path in known.items():
        targets = {one.removeprefix(prefix).removeprefix(".") for one in imported(path) if one.startswith(prefix)}
        found[name] = {one if one in known else one.rpartition(".")[0] for one in targets} & known.keys() - {name}
    return found


def layer_of(module: str, layers: list[str]) -> tuple[int, str] | None:
    """The layer, and the name in its line, that a module belongs to: the longest name that fits."""
    names = [(name, index) for index, line in enumerate(layers) for name in line.split()]
    fitting = [(name, index) for name, index in names if module == name or module.startswith(f"{name}.")]
    name, index = max(fitting, key=lambda one: len(one[0]), default=("", -1))
    return (index, name) if name else None


def against(found: dict[str, set[str]], layers: list[str]) -> list[str]:
    """Imports that go up, or sideways, and modules that no layer names."""
    wrong = []
    for module, targets in found.items():
        here = layer_of(module, layers)
        if here is None:
            wrong.append(f"{module} is in no layer")
            continue
        for target in targets:
            there = layer_of(target, layers)
            if there is not None and there != here and there[0] >= here[0]:
                wrong.append(f"{module} imports {target}")
    return sorted(wrong)


@pytest.mark.parametrize(
    ("folder", "layers"),
    [
        ("torchpipe_py", PACKAGE),
        ("torchpipe_py/training", TRAINING),
        ("server/torchpipe_client", CLIENT),
        ("server/torchpipe_server", SERVER),
    ],
)
def test_a_package_keeps_its_layers(folder: str, layers: list[str]) -> None:
    found = arrows(folder)
    assert against({module: targets for module, targets in found.items() if module}, layers) == []
    TopologicalSorter(found).prepare()  # CycleError names the modules that import themselves through others


@pytest.mark.parametrize(
    ("folder", "others"),
    [
        ("torchpipe_py", {"torchpipe_server", "torchpipe_client"}),
        ("server/torchpipe_client", {"torchpipe_py", "torchpipe_server", "torch"}),
    ],
)
def test_a_package_keeps_to_itself(folder: str, others: set[str]) -> None:
    found = {name: imported(path) for name, path in modules(ROOT / folder).items()}
    assert [name for name, names in found.items() if others & {one.split(".")[0] for one in names}] == []


def test_scripts_keep_their_layers() -> None:
    found = arrows("scripts")
    TopologicalSorter(found).prepare()
    folders = {module: targets for module, targets in found.items() if "." in module}
    assert against(folders, SCRIPTS) == []
    entries = found.keys() - folders.keys()
    assert [module for module, targets in folders.items() if targets & entries - set(SCRIPTS)] == []


def test_an_import_that_goes_up_is_found() -> None:
    layers = ["errors", "plan", "runtime training"]
    found = {"plan.graph": {"errors", "runtime.node"}, "runtime.node": {"plan.graph", "training"}, "other": set()}
    wrong = ["other is in no layer", "plan.graph imports runtime.node", "runtime.node imports training"]
    assert against({"errors": set(), **found}, layers) == wrong


def test_heavy_libraries_are_imported_inside_functions() -> None:
    for name, path in modules(ROOT / "torchpipe_py").items():
        heavy = {"cv2", "torch", "onnx", "onnxruntime", "tensorrt", "PIL", "torchvision", "lmdb", "ray", "cryptography"}
        if name.split(".")[0] == "training":
            heavy.remove("torch")  # without which there is nothing to train; nobody else imports these modules
        if name.split(".")[0] == "ray":
            heavy.remove("ray")  # the same, with Ray: the package imports its modules when their names are used
        for node in parsed(path).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not heavy & {name.split(".")[0] for name in names}, path


def of_package(path: Path) -> set[str]:
    """The modules of ``torchpipe_py`` that the file imports."""
    known = modules(ROOT / "torchpipe_py")
    names = {name.partition(".")[2] for name in imported(path) if name.split(".")[0] == "torchpipe_py"}
    return {name if name in known else name.rpartition(".")[0] for name in names}


def test_service_imports_public_names_and_the_seam_only() -> None:
    for path in modules(ROOT / "server" / "torchpipe_server").values():
        assert of_package(path) <= SEAM, path


def test_ray_serve_imports_public_names_and_the_seam_only() -> None:
    package = modules(ROOT / "torchpipe_py")
    for name in RAY_SERVE:
        found = {one for one in of_package(package[name]) if one.split(".")[0] != "ray"}
        assert found <= SEAM, name


CALLS = """
import sys, torchpipe_client, torchpipe_py, torchpipe_py.ray
import torchpipe_server.front.server, torchpipe_server.worker.worker
with torchpipe_py.pipe({"backend": "Identity"}) as run:
    run({"data": 1})
"""


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        (CALLS, ("torch", "cv2", "onnxruntime", "tensorrt", "onnx", "PIL", "ray", "opentelemetry", "cryptography")),
        ("import sys, torchpipe_py.training\n", ("torchvision", "lmdb", "cv2", "PIL")),
    ],
)
def test_importing_the_packages_and_a_call_import_no_heavy_library(code: str, heavy: tuple[str, ...]) -> None:
    printing = f"{code}print([name for name in {heavy} if name in sys.modules])"
    done = run(sys.executable, "-W", "error", "-c", printing, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_each_module_of_tests_has_a_name_of_its_own() -> None:
    """pytest imports those outside packages by their bare names: two of one name, and it can collect neither."""
    tests = [path for path in (ROOT / "tests").rglob("*.py") if not (path.parent / "__init__.py").exists()]
    counts = Counter(path.name for path in tests)
    assert [name for name, count in counts.items() if count > 1] == []


def test_folders_of_tests_mirror_the_folders_that_they_test() -> None:
    homes = {"server": "server/torchpipe_server", "client": "server/torchpipe_client", "scripts": "scripts"}
    for folder in {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")}:
        first, *rest = folder.parts or ("",)
        if first not in ("", "chaos", "doors", "fuzz", "gpu"):
            assert ROOT.joinpath(homes.get(first, f"torchpipe_py/{first}"), *rest).is_dir(), folder


def test_tests_import_no_tests_of_other_folders() -> None:
    """They are on the path only where pytest has collected their folder before."""
    for path in (ROOT / "tests").rglob("*.py"):
        for name in re.findall(r"^\s*(?:from|import) (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            folders = (path.parent, ROOT / "tests", ROOT / "scripts")
            assert any((folder / f"{name}.py").exists() for folder in folders), f"{path}: {name}"


def test_no_command_takes_the_beginning_of_a_flag() -> None:
    """``--engine`` for ``--engines``, say: a parser is that of ``arguments``, or says so itself."""
    abbreviating = re.compile(r"from argparse import|argparse\.ArgumentParser\((?!allow_abbrev=False)")
    folders = ("torchpipe_py", "server", "scripts", "tests/chaos", "tests/fuzz")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    assert [file for file in files if abbreviating.search(file.read_text(encoding="utf-8"))] == []


def test_backends_are_at_most_three_classes_deep() -> None:
    for name in registry.BUILT_IN_BACKENDS:
        classes = [base for base in registry.default.find_backend(name).__mro__ if issubclass(base, Backend)]
        assert len(classes) <= 3, name


def test_the_seam_lists_nothing_that_its_users_do_not_use() -> None:
    package = modules(ROOT / "torchpipe_py")
    users = [*modules(ROOT / "server" / "torchpipe_server").values(), *(package[name] for name in RAY_SERVE)]
    used = set().union(*(imported(path) for path in users))
    assert {name for name in torchpipe_py.serving.__all__ if f"torchpipe_py.serving.{name}" not in used} == set()
