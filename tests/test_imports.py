"""Who may import whom: design.md, section 2, as a test."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import torchpipe_py

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "torchpipe_py"
SERVER = ROOT / "server" / "torchpipe_server"

MAY_IMPORT = {
    "errors": "",
    "keys": "",
    "values": "",
    "expression": "errors",
    "filters": "keys",
    "config": "errors expression values",
    "registry": "errors filters",
    "graph": "config errors",
    "request": "errors keys",
    "batching": "request",
    "backends": "",
    "backends.base": "errors keys",
    "roster": "",
    "tracing": "request",
    "histogram": "",
    "runner": "backends.base errors histogram keys request roster tracing",
    "node": "backends.base batching request roster runner tracing",
    "trip": "backends.base graph keys request",
    "binding": "backends.base backends.basic backends.jump backends.python config errors expression filters registry "
    "values",
    "build": "backends.base backends.ranges binding config errors filters graph",
    "routes": "backends.base build errors filters graph keys node request trip",
    "engine": "backends.base build errors keys node request routes",
    "statistics": "engine node",
    "pipe": "build engine errors keys request routes statistics tracing",
    "depict": "backends.python binding build config drawing.picture drawing.svg graph",
    "loadtest": "",
    "loadtest.errors": "",
    "loadtest.options": "",
    "loadtest.plans": "",
    "loadtest.ledger": "",
    "loadtest.progress": "",
    "loadtest.cpu": "",
    "loadtest.images": "loadtest.errors",
    "loadtest.statistics": "loadtest.ledger",
    "loadtest.report": "loadtest.cpu loadtest.errors loadtest.images loadtest.ledger loadtest.statistics",
    "loadtest.nodes": "loadtest.report",
    "loadtest.threads": "errors keys loadtest.images loadtest.ledger loadtest.plans pipe",
    "loadtest.command": "errors loadtest.cpu loadtest.errors loadtest.images loadtest.ledger loadtest.nodes "
    "loadtest.plans loadtest.progress loadtest.report loadtest.threads pipe",
    "parity": "",
    "parity.record": "errors",
    "parity.options": "",
    "parity.images": "parity.record",
    "parity.compare": "parity.record",
    "parity.results": "errors keys parity.record",
    "parity.run": "errors keys parity.compare parity.images parity.record parity.results pipe",
    "parity.report": "parity.compare parity.record parity.results",
    "parity.page": "parity.compare parity.record parity.report parity.results",
    "parity.command": "parity.compare parity.page parity.record parity.report parity.run",
    "drawing": "",
    "drawing.picture": "",
    "drawing.text": "drawing.picture",
    "drawing.shapes": "drawing.picture drawing.text",
    "drawing.layers": "drawing.picture",
    "drawing.coordinates": "drawing.layers drawing.text",
    "drawing.plan": "drawing.coordinates drawing.layers drawing.picture drawing.shapes drawing.text",
    "drawing.layout": "drawing.picture drawing.plan drawing.shapes drawing.text",
    "drawing.mermaid": "drawing.picture drawing.text",
    "drawing.svg": "drawing.layout drawing.picture drawing.shapes drawing.text",
    "drawing.page": "drawing.mermaid drawing.picture drawing.svg drawing.text",
    "training.batch": "",
    "training.errors": "errors",
    "training.transforms": "",
    "training.options": "errors",
    "training.randomness": "",
    "training.statistics": "",
    "training.streams": "",
    "training.buffer": "",
    "training.agreement": "errors training.errors",
    "training.devices": "errors training.errors",
    "training.libraries": "training.errors",
    "training.loaders": "errors training.errors",
    "training.sampler": "training.errors",
    "training.plan": "training.errors training.randomness",
    "training.prefetcher": "training.streams",
    "training.background": "training.buffer",
    "training.feeder": "training.buffer",
    "training.images": "training.errors training.loaders",
    "training.reading": "errors training.background training.errors training.loaders training.plan training.randomness",
    "training.packing": "training.errors training.images training.libraries",
    "training.decoding": "config errors keys pipe training.errors training.reading",
    "training.assembly": "training.batch training.decoding training.errors training.options training.plan "
    "training.prefetcher training.randomness training.reading training.statistics training.streams training.transforms",
    "training.loans": "",
    "training.sending": "errors training.errors",
    "training.source": "training.assembly training.background training.batch training.decoding training.plan "
    "training.reading training.statistics",
    "training.maker": "errors training.assembly training.batch training.decoding training.errors training.loans "
    "training.options training.plan training.prefetcher training.reading training.sending training.statistics",
    "training.remote": "training.assembly training.batch training.errors training.loans training.maker training.plan "
    "training.prefetcher training.reading training.sending training.statistics training.streams",
    "training.preload": "training.maker",
    "training.composition": "training.agreement training.assembly training.decoding training.devices training.errors "
    "training.loans training.maker training.options training.plan training.reading training.remote training.sending "
    "training.source training.statistics",
    "training.loader": "training.agreement training.background training.batch training.composition training.errors "
    "training.prefetcher",
    "training.wrap": "training.agreement training.composition training.decoding training.devices training.loader "
    "training.options",
    "training": "training.background training.batch training.errors training.feeder training.images training.loader "
    "training.loaders training.packing training.prefetcher training.sampler training.transforms "
    "training.wrap",
    "": "backends.base backends.jump config errors filters keys pipe registry",
}

BACKENDS_MAY_IMPORT = {"errors", "keys", "values", "filters", "registry"}
"""And ``backends.*``: a backend knows nothing of nodes, pipes and configurations."""


def module_name(path: Path) -> str:
    """``torchpipe_py/backends/base.py`` is ``backends.base``; the package itself is empty."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imported(path: Path, package: str) -> set[str]:
    """Modules of ``package`` that the file imports, anywhere in it, without its name; public names are of "" itself."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names = {alias.name for alias in node.names}
            private = names - set(torchpipe_py.__all__) if node.module == "torchpipe_py" else set()
            found |= {f"{node.module}.{name}" for name in private}
            if names - private:
                found.add(str(node.module))
    return {name.removeprefix(package).removeprefix(".") for name in found if name.split(".")[0] == package}


IMPORTS = {name: imported(path, "torchpipe_py") for name, path in MODULES.items()}


@pytest.mark.parametrize("name", [name for name in MODULES if name in MAY_IMPORT])
def test_a_module_imports_only_what_the_table_allows(name: str) -> None:
    assert IMPORTS[name] <= set(MAY_IMPORT[name].split())


def test_every_module_has_a_line_in_the_table() -> None:
    listed = {name for name in MODULES if name in MAY_IMPORT or name.startswith(("backends.", "cli"))}
    assert set(MODULES) - listed == set()
    assert set(MAY_IMPORT) - set(MODULES) == set()


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("backends.")])
def test_a_backend_knows_no_pipe(name: str) -> None:
    others = {other for other in IMPORTS[name] if not other.startswith("backends")}
    assert others <= BACKENDS_MAY_IMPORT


def test_arrows_go_one_way() -> None:
    order = list(TopologicalSorter(IMPORTS).static_order())
    assert order.index("errors") < order.index("node") < order.index("pipe") < order.index("")


def test_heavy_libraries_are_imported_inside_functions() -> None:
    for name, path in MODULES.items():
        heavy = {"cv2", "torch", "onnx", "onnxruntime", "tensorrt", "PIL", "torchvision", "lmdb"}
        if name.split(".")[0] == "training":
            heavy.remove("torch")  # without which there is nothing to train; nobody else imports these modules
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not heavy & {name.split(".")[0] for name in names}, path


@pytest.mark.parametrize("path", sorted(SERVER.rglob("*.py")), ids=lambda path: path.name)
def test_the_server_imports_public_names_only(path: Path) -> None:
    assert imported(path, "torchpipe_py") <= {"", "depict", "errors", "histogram"}


def test_the_package_never_imports_the_server() -> None:
    assert [name for name, path in MODULES.items() if imported(path, "torchpipe_server")] == []


def test_importing_the_package_imports_no_heavy_library() -> None:
    heavy = ("torch", "cv2", "onnxruntime", "tensorrt", "onnx", "PIL")
    code = f"import sys, torchpipe_py; print([name for name in {heavy} if name in sys.modules])"
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_the_training_side_needs_no_optional_library() -> None:
    optional = ("torchvision", "lmdb", "cv2", "PIL")
    code = f"import sys, torchpipe_py.training; print([name for name in {optional} if name in sys.modules])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_public_names_exist() -> None:
    assert [name for name in torchpipe_py.__all__ if not hasattr(torchpipe_py, name)] == []
