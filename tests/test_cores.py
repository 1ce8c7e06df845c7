"""How many cores a process counts on: its affinity's, or its CPU quota where that is less."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torchpipe_py.cores import usable_cores

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
def test_a_quota_counts_where_it_is_less_than_the_affinity(
    cgroup: str, files: dict[str, str], cores: int, tmp_path: Path
) -> None:
    assert usable_cores(write(tmp_path, cgroup, files)) == cores


@pytest.mark.parametrize(
    "text", ["", "max", "2", "a b", "0 0", "100000 0", "-100000 100000", "1 2 3", "\0", f"{'9' * 5000} 1"]
)
def test_what_is_no_quota_changes_nothing(text: str, tmp_path: Path) -> None:
    assert usable_cores(write(tmp_path, "0::/\n", {"cpu.max": text})) == CORES


@pytest.mark.parametrize("cgroup", ["", "0", "0:", "0::", "\n\n", "x:y:z:w", "0::relative"])
def test_a_list_of_cgroups_that_makes_no_sense_leaves_the_root(cgroup: str, tmp_path: Path) -> None:
    assert usable_cores(write(tmp_path, cgroup, {"cpu.max": "200000 100000"})) == 2


def test_without_cgroups_it_is_the_affinity(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == CORES
