"""Images per second of data loaders that all make the same batches: torchvision, DALI, and ours.

    python scripts/loader_throughput.py --data DIR --workers 1,2,4,8,16 --batch-sizes 64,256

``DIR/train/<class>/*.jpg`` become float32 N×3×224×224 on the GPU (on the CPU where there is none), flipped at random
and normalised. Workers are processes, and for DALI threads. A loader that fails, or whose library is missing, is a line
of its own. Memory is the most that PyTorch allocated, and what nvidia-smi says of the whole GPU at the end of a
measurement; DALI and PyTorch keep what they once had, so ``--only`` gives the second figure of one loader alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from benchmarks.common import machine

from recipes.experiments.subjects import SUBJECTS, Setting
from torchpipe_py.arguments import ArgumentParser

LEAST = 3  # batches to warm up with, and to measure
LONGEST = 10  # times --seconds: how long one measurement may take
RATIOS = (
    ("ours-gpu", "dali-gpu", None),
    ("ours-workers", "dali-gpu", None),
    ("ours-workers", "dali-engines", None),
    ("ours-nvimgcodec-workers", "dali-gpu", None),
    ("ours-nvimgcodec-workers", "dali-engines", None),
    ("ours-gpu", "torchvision", 8),
    ("ours-workers", "torchvision", 8),
)


@dataclass(frozen=True)
class SubjectRow:
    """One loader with one setting: images per second, or why there are none; memory in bytes."""

    name: str
    batch_size: int
    workers: int
    images_per_s: float | None = None
    allocated: int | None = None
    used: int | None = None
    problem: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="a folder with train/, of class folders with JPEGs")
    parser.add_argument("--workers", type=numbers, default=[1, 2, 4, 8, 16], help="(default: 1,2,4,8,16)")
    parser.add_argument("--batch-sizes", type=numbers, default=[64, 256], help="(default: 64,256)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement (default: %(default)g)")
    parser.add_argument("--rounds", type=int, default=1, help="whose median is shown (default: %(default)s)")
    parser.add_argument("--only", type=names, default=list(SUBJECTS), help=f"of {','.join(SUBJECTS)} (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there as well")
    args = parser.parse_args(argv)
    if args.rounds < 1 or args.seconds <= 0:
        parser.error("--rounds is at least 1, and --seconds more than 0")
    if not (args.data / "train").is_dir():
        parser.error(f"--data {args.data}: there is no folder {args.data / 'train'}")
    if args.json and not args.json.parent.is_dir():
        parser.error(f"--json {args.json}: there is no folder {args.json.parent}")
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    where = describe(device)
    print(f"{where}; medians of {args.rounds} x {args.seconds:g} s", flush=True)
    print(
        f"  {'loader':23}  {'batch':>5}  {'workers':>7}  {'images/s':>8}  {'allocated MiB':>13}  {'GPU used MiB':>12}"
    )
    rows = []
    for row in measured(args, device):
        rows.append(row)
        print(line_of(row), flush=True)
    comparisons = list(ratios(rows))
    for text, _ in comparisons:
        print(f"  {text}")
    if args.json:
        content = {
            "machine": {**machine(), "device": where},
            "command": sys.argv,
            "rows": [asdict(row) for row in rows],
            "ratios": dict(value for _, value in comparisons if value),
        }
        args.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0 if any(row.images_per_s is not None for row in rows) else 1


def measured(args: argparse.Namespace, device: Any) -> Iterator[SubjectRow]:
    """A row for each loader, batch size and number of workers: the median of its rounds."""
    for name, batch_size, workers in product(args.only, args.batch_sizes, args.workers):
        setting = Setting(args.data / "train", batch_size, workers, device)
        rounds = [measure(name, setting, args.seconds) for _ in range(args.rounds)]
        failed = next((row for row in rounds if row.problem), None)
        if failed is not None:
            yield failed
            continue
        rate = statistics.median(row.images_per_s or 0.0 for row in rounds)
        allocated, used = (
            min((value for row in rounds if (value := getattr(row, field)) is not None), default=None)
            for field in ("allocated", "used")
        )
        yield SubjectRow(name, batch_size, workers, rate, allocated, used)


def measure(name: str, setting: Setting, seconds: float) -> SubjectRow:
    """Open the loader, measure it, close it; what it raises becomes the row's ``problem``."""
    row = (name, setting.batch_size, setting.workers)
    on_gpu = setting.device.type == "cuda"
    try:
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(setting.device)
        with SUBJECTS[name](setting) as batches:
            rate = images_per_second(batches, setting, seconds)
            allocated = torch.cuda.max_memory_allocated(setting.device) if on_gpu else None
            used = used_memory(setting.device) if on_gpu else None
    except Exception as error:
        return SubjectRow(*row, problem=f"{type(error).__name__}: {str(error).strip() or 'no message'}".splitlines()[0])
    return SubjectRow(*row, rate, allocated, used)


def images_per_second(batches: Iterator[Any], setting: Setting, seconds: float) -> float:
    """From the end of one batch to that of another, once the loader flows.

    Workers finish batches of theirs at about the same time, so warm-up and measurement have a batch of each at least.
    """
    enough = max(LEAST, setting.workers + 1)
    for _, images in zip(range(enough), batches, strict=False):
        shape = tuple(images.shape)
        if shape != (setting.batch_size, 3, 224, 224) or images.dtype != torch.float32:
            raise ValueError(f"a batch of {shape}, {images.dtype}")
    _synchronise(setting.device)
    count = 0
    began = perf_counter()
    for made, images in enumerate(batches, 1):
        count += len(images)
        elapsed = perf_counter() - began
        if (elapsed >= seconds and made >= enough) or elapsed >= LONGEST * seconds:
            break
    _synchronise(setting.device)
    return count / (perf_counter() - began)


def ratios(rows: Iterable[SubjectRow]) -> Iterator[tuple[str, tuple[str, float] | None]]:
    """Each ratio as a line of text, and its value: for each the best batch size, and the best number of workers."""
    rows = list(rows)
    names = {row.name for row in rows}
    for above, below, workers in RATIOS:
        if not {above, below} <= names:
            continue
        text = f"{above} / {below}{f' with {workers} workers' if workers else ''}"
        first, second = best(rows, above, None), best(rows, below, workers)
        if first is None or second is None:
            yield f"{text}: not measured", None
            continue
        value = (first.images_per_s or 0.0) / (second.images_per_s or 1.0)
        against = (
            f"batch {first.batch_size}, {first.workers} workers against batch {second.batch_size}, {second.workers}"
        )
        yield f"{text}: {value:.2f} ({against})", (text, value)


def best(rows: Iterable[SubjectRow], name: str, workers: int | None) -> SubjectRow | None:
    rated = [
        row for row in rows if row.name == name and row.images_per_s is not None and workers in (None, row.workers)
    ]
    return max(rated, key=lambda row: row.images_per_s or 0.0, default=None)


def line_of(row: SubjectRow) -> str:
    start = f"  {row.name:23}  {row.batch_size:5}  {row.workers:7}"
    if row.images_per_s is None:
        return f"{start}  not measured: {row.problem}"
    memory = "  ".join(
        f"{value / 2**20:{width}.0f}" if value is not None else f"{'-':>{width}}"
        for value, width in ((row.allocated, 13), (row.used, 12))
    )
    return f"{start}  {row.images_per_s:8.0f}  {memory}"


def describe(device: Any) -> str:
    here = machine()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU"
    return f"{name}, {here['cores']} cores {here['cpu']}, Python {here['python']}, PyTorch {torch.__version__}"


def used_memory(device: Any) -> int:
    """Bytes of the GPU that all processes use."""
    free, whole = torch.cuda.mem_get_info(device)
    return int(whole - free)


def numbers(text: str) -> list[int]:
    """``1,2,4`` as numbers of at least 1."""
    values = [int(value) for value in text.split(",")]
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text}: numbers of at least 1")
    return values


def names(text: str) -> list[str]:
    """``ours-gpu,dali-gpu`` as loaders that there are."""
    chosen = text.split(",")
    unknown = [name for name in chosen if name not in SUBJECTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: none of {', '.join(SUBJECTS)}")
    return chosen


def _synchronise(device: Any) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
