"""What the wheel holds, and that it works where there is no checkout."""

from __future__ import annotations

import configparser
import email
import os
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.waits import run

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"torchpipe_py": ROOT, "torchpipe_client": ROOT / "server", "torchpipe_server": ROOT / "server"}

pytest.importorskip("hatchling")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT).check_returncode()
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as opened:
        yield opened


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
    metadata = email.message_from_bytes(wheel.read(f"{prefix}/METADATA"))
    extras = set(metadata.get_all("Provides-Extra", []))
    assert extras >= {"client", "server", "http", "gpu", "otel", "encryption", "ray"}


def test_it_works_away_from_the_repository(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    code = "from torchpipe_py.cli import main; main(['idl']); import torchpipe_client; print(torchpipe_client.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = run(sys.executable, "-c", code, cwd=tmp_path, env=environment)
    idl = (ROOT / "idl" / "inference.thrift").read_text(encoding="utf-8")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{idl}{tmp_path}/torchpipe_client/__init__.py\n", "")
