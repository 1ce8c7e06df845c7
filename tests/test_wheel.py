"""What the wheel holds, and that it works where there is no checkout."""

from __future__ import annotations

import ast
import configparser
import email
import os
import re
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kit.waits import run

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"torchpipe_py": ROOT, "torchpipe_client": ROOT / "server", "torchpipe_server": ROOT / "server"}

pytest.importorskip("hatchling")
tomllib = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")


@contextmanager
def built(project: Path, folder: Path) -> Iterator[zipfile.ZipFile]:
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=project).check_returncode()
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as opened:
        yield opened


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    with built(ROOT, tmp_path_factory.mktemp("wheel")) as opened:
        yield opened


def metadata_of(wheel: zipfile.ZipFile) -> email.message.Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(wheel.read(name))


def name_of(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None
    return found[0]


def test_it_holds_the_packages_and_the_contract_and_no_more(wheel: zipfile.ZipFile) -> None:
    wanted = {"torchpipe_py/inference.thrift"}
    for package, folder in PACKAGES.items():
        files = (path for path in (folder / package).rglob("*") if path.is_file() and path.parent.name != "__pycache__")
        wanted |= {str(path.relative_to(folder)) for path in files}
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == wanted
    assert wheel.read("torchpipe_py/inference.thrift") == (ROOT / "idl" / "inference.thrift").read_bytes()


def test_its_commands_and_extras(wheel: zipfile.ZipFile) -> None:
    (prefix,) = {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    scripts = configparser.ConfigParser()
    scripts.read_string(wheel.read(f"{prefix}/entry_points.txt").decode())
    commands = {"torchpipe": "torchpipe_py.cli:main", "torchpipe-serve": "torchpipe_server.cli:main"}
    assert dict(scripts["console_scripts"]) == commands
    extras = set(metadata_of(wheel).get_all("Provides-Extra", []))
    assert extras >= {"client", "server", "http", "gpu", "otel", "encryption", "ray"}


def test_table_of_extras_is_that_of_the_project() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    wanted = {}
    for extra, requirements in extras.items():
        others = re.findall(r"torchpipe_py\[(.*?)\]", " ".join(requirements))
        named = [f"`{other}`" for group in others for other in group.split(",")]
        wanted[extra] = [*named, *(name_of(each) for each in requirements if not each.startswith("torchpipe_py["))]
    page = (ROOT / "docs/deployment.md").read_text(encoding="utf-8")
    rows = re.findall(r"(?m)^\| `(\w+)` \| .* \| (.*) \|$", page.partition("<!-- extras -->")[2])
    assert {extra: adds.split(", ") for extra, adds in rows} == wanted


def test_it_works_away_from_the_repository(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    code = "from torchpipe_py.cli import main; main(['idl']); import torchpipe_client; print(torchpipe_client.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = run(sys.executable, "-c", code, cwd=tmp_path, env=environment)
    idl = (ROOT / "idl" / "inference.thrift").read_text(encoding="utf-8")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{idl}{tmp_path}/torchpipe_client/__init__.py\n", "")


def test_client_alone_needs_only_what_it_declares(tmp_path: Path) -> None:
    with built(ROOT / "server/client", tmp_path / "built") as alone:
        alone.extractall(tmp_path)
        metadata = metadata_of(alone)
    files = {path.relative_to(tmp_path) for path in (tmp_path / "torchpipe_client").rglob("*") if path.is_file()}
    sources = {path.relative_to(ROOT / "server") for path in (ROOT / "server/torchpipe_client").glob("*.py")}
    assert files == sources | {Path("torchpipe_client", name) for name in ("inference.thrift", "LICENSE", "py.typed")}
    needed = {name_of(each) for each in metadata.get_all("Requires-Dist", [])}
    assert needed == {"thriftpy2", "numpy"}
    imported = set()
    for path in (tmp_path / "torchpipe_client").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").partition(".")[0])
    assert imported - sys.stdlib_module_names == {"torchpipe_client", *needed}
    code = "import torchpipe_client as client; print(client.__file__); client.Client('127.0.0.1:1').close()"
    done = run(sys.executable, "-W", "error", "-c", code, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{tmp_path}/torchpipe_client/__init__.py\n", "")
