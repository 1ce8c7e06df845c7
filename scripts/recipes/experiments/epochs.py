"""How long an epoch takes: plain, in mixed precision, with DataParallel and with DistributedDataParallel."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

SCRIPTS = Path(__file__).resolve().parents[2]
LINE = re.compile(
    r"epoch (\d+): .* accuracy [\d.]+ of (\d+) images, ([\d.]+) s, (\d+) images/s, "
    r"waited for data (\d+)%.*?(?:GPU memory in use ([\d ]+) MiB)?$",
    re.MULTILINE,
)


def epochs_table(args: argparse.Namespace) -> dict[str, Any]:
    """A row for each way to train: of its last epoch seconds, images/s, and MiB in use on each GPU.

    Each of N processes or GPUs gets ``--batch-size`` images a step, and the learning is the same otherwise.
    """
    gpus = torch.cuda.device_count()
    some = max(2, gpus)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(some)]
    batch = args.batch_size
    ways: dict[str, tuple[list[str], int]] = {
        "plain": ([str(SCRIPTS / "train.py")], batch),
        "bf16": ([str(SCRIPTS / "train_amp.py"), "--precision", "bf16"], batch),
        "fp16": ([str(SCRIPTS / "train_amp.py"), "--precision", "fp16"], batch),
        f"DP, {some} devices": (
            [str(SCRIPTS / "train_dp.py"), *([] if gpus else ["--devices", "cpu", "cpu"])],
            some * batch,
        ),
        f"DDP, {some} processes": ([*torchrun, str(SCRIPTS / "train_ddp.py")], batch),
        f"DDP, {some} processes, bf16": ([*torchrun, str(SCRIPTS / "train_ddp.py"), "--precision", "bf16"], batch),
        f"DDP, {some} processes, bf16, own batch norms": (
            [*torchrun, str(SCRIPTS / "train_ddp.py"), "--precision", "bf16", "--batch-norm", "local"],
            batch,
        ),
    }
    rows = []
    for name, (command, size) in ways.items():
        if args.only and name.split(",")[0] not in args.only:
            continue
        if gpus == 1 and name.startswith(("DP", "DDP")):
            rows.append({"name": name, "not_measured": "PyTorch finds one CUDA device"})
        else:
            rows.append({"name": name, **_measured(args, command, size)})
            print(rows[-1], flush=True)
    by_name: dict[str, dict[str, Any]] = {row["name"]: row for row in rows}
    for parallel, many in by_name.items():
        single = by_name.get("bf16" if "bf16" in parallel else "plain", {})
        if parallel.startswith("D") and "images_per_s" in single and "images_per_s" in many:
            many["scaling"] = many["images_per_s"] / single["images_per_s"]
    return {"arch": args.arch, "batch": batch, "devices": gpus, "rows": rows}


def _reason(printed: str) -> str:
    """What the script itself said, if it did."""
    lines = [line for line in printed.splitlines() if line.strip()]
    own = [line for line in lines if line.startswith("train")]
    return (own or lines or ["it printed nothing"])[-1][-400:]


def _measured(args: argparse.Namespace, command: list[str], batch: int) -> dict[str, Any]:
    options = ["--data", args.data, "--toml", args.toml, "--arch", args.arch, "--epochs", args.epochs]
    options += ["--batch-size", batch, "--workers", args.workers, *(["--workers-decode"] * args.workers_decode)]
    done = subprocess.run(
        [sys.executable, *command, *map(str, options)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        check=False,
    )
    lines = LINE.findall(done.stdout)
    if done.returncode or not lines:
        return {"not_measured": _reason(done.stderr)}
    _, _, seconds, rate, waited, memory = lines[-1]
    return {
        "seconds": float(seconds),
        "images_per_s": float(rate),
        "waited_for_data": int(waited) / 100,
        "memory_mib": [int(mib) for mib in memory.split()],
    }
