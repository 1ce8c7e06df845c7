"""``scripts/setup.sh`` with a pip that only prints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRINTED = """\
Ignoring numpy: markers 'python_version < "3.11"' don't match your environment
Collecting torch==2.13.0 (from -r requirements.txt (line 50))
  Downloading torch-2.13.0-cp312-cp312-manylinux_2_28_x86_64.whl.metadata (30 kB)
  Downloading torch-2.13.0-cp312-cp312-manylinux_2_28_x86_64.whl (915.6 MB)
Installing collected packages: mpmath, torch, torchpipe_py
Successfully installed mpmath-1.3.0 torch-2.13.0
"""


def set_up(folder: Path, status: int) -> subprocess.CompletedProcess[str]:
    python = folder / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    (folder / "printed").write_text(PRINTED, encoding="utf-8")
    python.write_text(f'#!/bin/sh\ncat "{folder}/printed"\nexit {status}\n', encoding="utf-8")
    python.chmod(0o755)
    environment = {**os.environ, "VENV": str(folder / "venv"), "PYTHON": sys.executable}
    command = ["bash", str(ROOT / "scripts" / "setup.sh")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_downloads_and_the_installation_are_told(tmp_path: Path) -> None:
    done = set_up(tmp_path, 0)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[1:3] == ["setup: downloading torch, 915.6 MB", "setup: installing 3 packages"]
    assert lines[-1] == f"setup: ready; source {tmp_path}/venv/bin/activate"
    assert (tmp_path / "venv" / "installed").exists()


def test_a_pip_that_fails_ends_it(tmp_path: Path) -> None:
    done = set_up(tmp_path, 1)
    assert done.returncode == 1
    assert "ready" not in done.stdout
    assert not (tmp_path / "venv" / "installed").exists()
