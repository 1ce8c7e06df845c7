"""The number of cores that this process may use, and thread limits of libraries."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

SWITCH_SECONDS = 0.0005
"""Longest wait for the GIL of a thread that returns from OpenCV or a GPU; Python's default is 5 ms."""


NVIDIA = Path("/dev/nvidiactl")
"""Exists if an NVIDIA GPU can be used."""


def usable_cores(root: Path = Path("/")) -> int:
    """The cores of the affinity, or the CPU quota of the process's cgroups, rounded up, if that is less.

    A container on 64 cores with a quota of 2 has 2. ``root`` contains ``proc`` and ``sys``. A missing or invalid file
    sets no quota.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([cores, *_quotas(root)])


def limit_threads() -> None:
    """Set OpenCV and PyTorch to one thread each: parallelism comes from the instances."""
    import cv2
    import torch

    cv2.setNumThreads(1)
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_SECONDS)


def _quotas(root: Path) -> Iterator[int]:
    """CPU quotas, in cores, of the process's cgroup and its ancestors, of versions 2 and 1."""
    # NOTE: in a container with version 1 this is a path of the host, which does not exist: its own cgroup is the root.
    paths = {"": "/", "cpu": "/"}  # by controller; without one it is version 2
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        paths.update(dict.fromkeys(controllers.split(","), path))
    mounted = root / "sys/fs/cgroup"
    for group in _with_parents(paths[""]):
        yield from _in_cores(_text(mounted / group / "cpu.max"))
    for group in _with_parents(paths["cpu"]):
        folder = mounted / "cpu" / group
        yield from _in_cores(f"{_text(folder / 'cpu.cfs_quota_us')} {_text(folder / 'cpu.cfs_period_us')}")


def _with_parents(path: str) -> list[PurePosixPath]:
    group = PurePosixPath(path.lstrip("/"))
    return [group, *group.parents]


def _in_cores(text: str) -> list[int]:
    """A quota in cores from microseconds of CPU time and of the period; empty if unlimited: ``max`` or -1."""
    try:
        quota, period = map(int, text.split())
    except ValueError:
        return []
    return [-(-quota // period)] if quota > 0 and period > 0 else []


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
