"""``scripts/setup.sh`` with a pip that only prints, and what ``scripts/quickstart.sh`` says at its end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kit.waits import run

ROOT = Path(__file__).resolve().parents[2]
PRINTED = """\
Ignoring numpy: markers 'python_version < "3.11"' don't match your environment
Collecting torch==2.13.0 (from -r requirements.txt (line 50))
  Downloading torch-2.13.0-cp312-cp312-manylinux_2_28_x86_64.whl.metadata (30 kB)
  Downloading torch-2.13.0-cp312-cp312-manylinux_2_28_x86_64.whl (915.6 MB)
Installing collected packages: mpmath, torch, torchpipe_py
Successfully installed mpmath-1.3.0 torch-2.13.0
"""
TOLD = "echo WARNING: a folder is ignored >&2; echo ERROR: no space left >&2"


def write_program(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)


def set_up(venv: Path, python: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "VENV": str(venv), "PYTHON": str(python)}
    return run("bash", ROOT / "scripts" / "setup.sh", env=environment)


@pytest.mark.parametrize("status", [0, 1])
def test_reports_downloads_and_installation(tmp_path: Path, status: int) -> None:
    (tmp_path / "printed").write_text(PRINTED, encoding="utf-8")
    installs = f'cat "{tmp_path}/printed"; {TOLD}; exit {status}'
    python = tmp_path / "venv" / "bin" / "python"
    write_program(python, f'case "$*" in *requirements*) {installs};; esac; echo Python 3.12')
    done = set_up(tmp_path / "venv", Path(sys.executable))
    assert done.returncode == status, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"setup: {tmp_path}/venv with Python 3.12, one to three minutes"
    assert lines[1:3] == ["setup: downloading torch, 915.6 MB", "setup: installing 3 packages"]
    assert (lines[-1] == f"setup: ready; source {tmp_path}/venv/bin/activate") is (status == 0)
    assert (tmp_path / "venv" / "installed").exists() is (status == 0)
    assert set(done.stderr.splitlines()) == {"ERROR: no space left"}


def test_a_venv_without_pip_is_made_again(tmp_path: Path) -> None:
    python = tmp_path / "python"
    write_program(python, f'case "$*" in "-m venv "*) echo "$@" > "{tmp_path}/asked"; exit 1;; esac')
    venv = tmp_path / "venv"
    write_program(venv / "bin" / "python", 'echo "No module named pip" >&2; exit 1')
    done = set_up(venv, python)
    assert done.returncode == 1
    assert (tmp_path / "asked").read_text(encoding="utf-8") == f"-m venv {venv}\n"
