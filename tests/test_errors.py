"""Errors, files, cores and freed memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import torchpipe_py
from torchpipe_py import TorchpipeError
from torchpipe_py.cores import usable_cores
from torchpipe_py.errors import counted, nearest
from torchpipe_py.files import output_problem, replace_file

# -- the package's own exceptions --------------------------------------------------------------------------------------


EXPORTED = [getattr(torchpipe_py, name) for name in torchpipe_py.__all__]


ERRORS = [each for each in EXPORTED if isinstance(each, type) and issubclass(each, BaseException)]


@pytest.mark.parametrize("kind", ERRORS)
def test_error_as_json(kind: type[Exception]) -> None:
    assert issubclass(kind, TorchpipeError)
    error = kind("why")
    when = {} if error.retry_after_ms is None else {"retry_after_ms": error.retry_after_ms}
    assert json.loads(json.dumps(error.as_dict())) == {"code": error.code, "message": "why", **when}


FLAGS = [f"--flag{index}" for index in range(38)]


@pytest.mark.parametrize(
    ("name", "valid", "clause"),
    [
        ("swop", ["swap", "or"], "did you mean 'swap'?"),
        ("zzz", ["swap", "or"], "valid: or, swap"),
        ("zzz", [], "none is valid here"),
        ("Nom9", [f"Name{index}" for index in range(38)], "the nearest of 38: Name9, Name29, Name19"),
        ("--clients", [*FLAGS, "--request_client"], "the nearest of 39: --request_client"),
        ("--x", FLAGS, "none of the 38 valid names is near"),
    ],
)
def test_suggests_nearest_names(name: str, valid: list[str], clause: str) -> None:
    assert nearest(name, valid) == clause


@pytest.mark.parametrize("said", ["0 items", "1 item", "2 items", "1 class", "3 classes"])
def test_counted_uses_singular_for_one(said: str) -> None:
    count, noun = said.split()
    assert counted(int(count), "class" if noun.startswith("class") else "item") == said


# -- torchpipe_py.files ------------------------------------------------------------------------------------------------


def test_output_problem_of_unwritable_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    assert output_problem("folder") == "is a directory"
    for folder in ("none", "file", "loop", "folder/none"):
        assert output_problem(f"{folder}/new") == f"no such folder: {folder}"
    for path in ("new", "file", "folder/new", tmp_path / "new", "n" * 255):
        assert output_problem(path) == ""
    assert output_problem("n" * 256) == output_problem("n" * 255, replaces=True) == "File name too long"
    replace_file("n" * 217, b"")
    assert output_problem("n" * 217, replaces=True) == ""


def test_output_problem_of_existing_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Access as for a user other than root, who may write everywhere."""
    writable: list[Path] = []
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.W_OK and Path(path) in writable)
    there, new = tmp_path / "there", tmp_path / "new"
    there.touch()
    for path in (there, new):
        assert output_problem(path) == output_problem(path, replaces=True) == "Permission denied"
    writable = [there]
    assert (output_problem(there), output_problem(there, replaces=True)) == ("", "Permission denied")
    writable = [tmp_path]
    assert (output_problem(there), output_problem(there, replaces=True)) == ("Permission denied", "")
    assert output_problem(new) == output_problem(new, replaces=True) == ""


# -- how many cores a process counts on --------------------------------------------------------------------------------


CORES = 64


V1 = "4:memory:/docker/a\n2:cpu,cpuacct:/docker/a\n0::/\n"


@pytest.fixture(autouse=True)
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(CORES)))


def write(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    """A tree with ``/proc/self/cgroup`` and files below ``/sys/fs/cgroup``."""
    for name, text in {"proc/self/cgroup": cgroup, **{f"sys/fs/cgroup/{name}": files[name] for name in files}}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("cgroup", "files", "cores"),
    [
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "10000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "9900000 100000\n"}, CORES),
        ("0::/\n", {"cpu.max": "max 100000\n"}, CORES),
        ("0::/a.slice/b.service\n", {"a.slice/b.service/cpu.max": "300000 100000\n"}, 3),
        ("0::/a.slice/b\n", {"a.slice/b/cpu.max": "max 100000\n", "a.slice/cpu.max": "400000 100000\n"}, 4),
        ("0::/a/b\n", {"a/b/cpu.max": "500000 100000\n", "a/cpu.max": "400000 100000\n"}, 4),
        ("0::/../elsewhere\n", {"cpu.max": "200000 100000\n"}, 2),
        (V1, {"cpu/docker/a/cpu.cfs_quota_us": "250000\n", "cpu/docker/a/cpu.cfs_period_us": "100000\n"}, 3),
        (V1, {"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
        (V1, {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, CORES),
        (V1, {"cpu/cpu.cfs_quota_us": "200000\n"}, CORES),
    ],
)
def test_quota_limits_cores_below_affinity(cgroup: str, files: Any, cores: int, tmp_path: Path) -> None:
    assert usable_cores(write(tmp_path, cgroup, files)) == cores


@pytest.mark.parametrize(
    "text", ["", "max", "2", "a b", "0 0", "100000 0", "-100000 100000", "1 2 3", "\0", f"{'9' * 5000} 1"]
)
def test_ignores_missing_or_invalid_quota(text: str, tmp_path: Path) -> None:
    assert usable_cores(write(tmp_path, "0::/\n", {"cpu.max": text})) == CORES


def test_uses_affinity_without_cgroups(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == CORES


# -- memory that an image took is there for the next one ---------------------------------------------------------------


FAULTS = """
import resource, sys
import cv2, numpy as np
from torchpipe_py.malloc import keep_freed_memory

if sys.argv[1] == "keeps":
    keep_freed_memory()
encoded = cv2.imencode(".jpg", np.zeros((1080, 1920, 3), np.uint8))[1]
for _ in range(2):
    cv2.imdecode(encoded, cv2.IMREAD_COLOR)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    cv2.imdecode(encoded, cv2.IMREAD_COLOR)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    """Page faults while 4 images of 6 MB were decoded."""
    command = [sys.executable, "-c", FAULTS, how]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def test_large_image_reuses_freed_memory() -> None:
    usual = faults("gives back")
    if usual < 4 * 1000:
        pytest.skip("this C library keeps it anyway, or the system counts nothing")
    assert faults("keeps") < usual / 10
