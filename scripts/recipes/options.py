"""The options of a training, where it runs, and how its script ends."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from recipes.augmentation import AUGMENTS
from torchpipe_py import TorchpipeError
from torchpipe_py.arguments import ArgumentParser
from torchpipe_py.files import output_problem
from torchpipe_py.tools.options import at_least, number
from torchpipe_py.training.options import BAD_SAMPLES

DALI_SIZE = 224
MOST_SIDE = 32_768
MOST_AHEAD = 256
"""Batches made ahead."""

# Types of common options.
batch_size = at_least(1, 65_536)
epochs = at_least(1, 1_000_000)
learning_rate = number("a learning rate from 0 to 1000", 0, 1000)
whole_seed = number("a whole number of 64 bits", -(2**63), 2**63 - 1, int)


def checkpoint_file(text: str) -> Path:
    """The type of a checkpoint's path, whose folder is created if missing."""
    path = Path(text)
    folder = next((parent for parent in path.parents if os.path.lexists(parent)), path.parent)
    if not text:
        problem = "the name is empty"
    elif not folder.is_dir():
        problem = f"{folder} is not a folder"
    elif folder == path.parent:
        problem = output_problem(path, replaces=True)
    else:
        problem = "" if os.access(folder, os.W_OK) else "Permission denied"
    if problem:
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {problem}".lstrip())
    return path


def workers(least: int) -> Callable[[str], int]:
    """The type of a number of processes or threads."""
    return at_least(least, 256)


NOT_OF_DALI = {
    "toml": "its pipeline is code, not a pipe; --size and --augment change it",
    "val_toml": "its pipeline is code, not a pipe",
    "workers_decode": "its threads decode, --workers says how many",
    "bad_samples": "it stops at a file that is not an image",
    "in_memory": "its reader maps the files",
    "dp": "a pipeline of DALI runs on one GPU; --ddp has one for each",
    "devices": "a pipeline of DALI runs on one GPU; --device chooses it, --ddp has one for each",
}
"""Options of a training by a pipe, and why they do not go with ``--dali``."""


class Place:
    """The process's rank and devices. ``kind``, ``local_rank`` and ``devices`` are arguments of the loader."""

    def __init__(self, kind: str = "single", devices: Any = None, local_rank: int | None = None) -> None:
        self.kind, self.devices, self.local_rank = kind, devices, local_rank
        self.rank = dist.get_rank() if kind == "ddp" else 0
        self.synchronises_norms = False

    @classmethod
    def of(cls, args: argparse.Namespace) -> Place:
        """The place for the options. With ``--ddp``, join the process group: NCCL, or gloo on the CPU."""
        if args.dp:
            return cls("dp", args.devices)
        if not args.ddp:
            return cls("single", args.device)
        if "LOCAL_RANK" not in os.environ:
            raise SystemExit("start it with torchrun: torchrun --nproc_per_node 2 scripts/train.py --ddp …")
        local_rank = int(os.environ["LOCAL_RANK"])
        on_gpu = torch.cuda.is_available() and args.device != "cpu"
        if on_gpu:
            torch.cuda.set_device(local_rank)
        dist.init_process_group("nccl" if on_gpu else "gloo")
        place = cls("ddp", None if on_gpu else "cpu", local_rank)
        place.synchronises_norms = on_gpu and args.batch_norm == "sync"
        return place

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model as a parallel one."""
        if self.kind == "dp" and "cpu" not in (self.devices or ()):
            return nn.DataParallel(model, device_ids=self.devices)
        if self.kind != "ddp":
            return model
        if self.synchronises_norms:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        device_ids = None if self.devices == "cpu" else [self.local_rank]
        return nn.parallel.DistributedDataParallel(model, device_ids=device_ids)

    def summed(self, values: list[float], device: Any) -> list[float]:
        """Sums of the values over the processes."""
        if self.kind != "ddp":
            return values
        total = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(total)
        sums: list[float] = total.tolist()
        return sums


# -- the command --------------------------------------------------------------------------------------------------


def make_parser() -> ArgumentParser:
    """All options."""
    parser = ArgumentParser(description="Train a classifier on images that a pipe decodes, or NVIDIA DALI.")
    option = parser.add_argument
    data = "a folder with train/ and val/ of class folders, with train.lmdb and val.lmdb, or with train.tfrecord …"
    option("--data", type=Path, required=True, help=f"{data} (scripts/run.py lmdb, tfrecord)")
    option("--toml", type=Path, help="preprocessing, as it will be served; needed unless --dali is given")
    option("--val-toml", type=Path, help="preprocessing to validate with (default: --toml)")
    option(
        "--workers-decode", action="store_true", help="the workers, one at least, make whole batches, on the GPU too"
    )
    arch = "'small', a torchvision classifier, or file.py:function, which builds a network (default: %(default)s)"
    option("--arch", default="small", help=arch)
    weights = "to start from, but for a classifier of other classes (default: random)"
    option("--weights", metavar="FILE|pretrained", help=weights)
    option("--epochs", type=epochs, default=10, help="(default: %(default)s)")
    option("--batch-size", type=batch_size, default=32, help="of each process (default: %(default)s)")
    option(
        "--workers",
        type=workers(0),
        default=2,
        help="processes that read files; with --dali, its threads (default: %(default)s)",
    )
    ahead = "decoded batches that a background thread keeps ready; 0: none, and no thread (default: %(default)s)."
    pinned = "Copies to a GPU are asynchronous, through pinned memory."
    option("--prefetch", type=at_least(0, MOST_AHEAD), default=2, help=f"{ahead} {pinned}")
    option("--in-memory", action="store_true", help="read all files once, at the start, and keep them, encoded")
    tries = "let cuDNN time its algorithms for each size of input, and keep the fastest (default: its heuristics)"
    option("--cudnn-benchmark", action="store_true", help=tries)
    option("--lr", type=learning_rate, default=3e-3, help="the highest learning rate (default: %(default)s)")
    option("--seed", type=whole_seed, default=0, help="of weights, order and augmentation (default: %(default)s)")
    augment = "beside the random flip: crop (rotates too), color, cutout, gridmask (default: none)"
    option("--augment", nargs="+", choices=AUGMENTS, default=[], help=augment)
    option("--bad-samples", choices=BAD_SAMPLES, default="raise", help="(default: %(default)s)")
    option("--device", type=to_device, help="'cpu', or a CUDA device (default: a GPU where there is one)")
    kept = "written after each epoch, and read if it exists; NAME_best beside it is the one of the best epoch"
    option("--checkpoint", type=checkpoint_file, metavar="NAME.pt", help=kept)
    option("--log", type=Path, metavar="DIR", help="losses, accuracy and images/s of each epoch, for TensorBoard")
    option("--save-every", type=at_least(0), default=0, help="also after so many steps (default: never)")
    option("--max-steps", type=at_least(1), help="stop after so many steps of this run, with a checkpoint")
    amp = "mixed precision, bf16 unless fp16 is named (default: fp32)"
    option("--amp", nargs="?", const="bf16", default="fp32", choices=("bf16", "fp16"), help=amp)
    several = parser.add_mutually_exclusive_group()
    several.add_argument("--ddp", action="store_true", help="a process for each GPU; start it with torchrun")
    several.add_argument("--dp", action="store_true", help="one process for several GPUs")
    option("--devices", nargs="+", type=to_device, help="of --dp: CUDA devices, or 'cpu' twice (default: all GPUs)")
    norms = "of --ddp on GPUs: over the batches of all GPUs, which is slower, or of each (default: %(default)s)"
    option("--batch-norm", choices=("sync", "local"), default="sync", help=norms)
    option("--dali", action="store_true", help="decode and augment by NVIDIA DALI, in place of a pipe")
    where = "of --dali: what decodes and augments (default: the GPU where there is one)"
    option("--decode", choices=("cpu", "gpu"), help=where)
    option(
        "--size",
        type=at_least(1, MOST_SIDE),
        help=f"of --dali: both sides of its images in pixels (default: {DALI_SIZE})",
    )
    return parser


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of a training, checked against each other; exits with one line where they do not go together."""
    parser = make_parser()
    return check_options(parser, parser.parse_args(argv))


def check_options(parser: ArgumentParser, args: argparse.Namespace) -> argparse.Namespace:
    """``args`` with defaults that depend on others; exits with one line for contradictory options."""
    if not args.dali:
        if args.toml is None:
            parser.error("the following arguments are required: --toml, or --dali to train without a pipe")
        for name in ("decode", "size"):
            if getattr(args, name) is not None:
                parser.error(f"--{name} is an option of --dali; a pipe's TOML says it otherwise")
        return args
    for name, reason in NOT_OF_DALI.items():
        if getattr(args, name) != parser.get_default(name):
            parser.error(f"--{name.replace('_', '-')} does not go with --dali: {reason}")
    if not args.workers:
        parser.error("--workers 0 does not go with --dali: it needs a thread at least")
    if not args.prefetch:
        parser.error("--prefetch 0 does not go with --dali: it makes a batch ahead at least")
    args.size = args.size or DALI_SIZE
    return args


def to_device(text: str) -> int | str:
    """A CUDA device's number, or a name."""
    return int(text) if text.isdigit() else text


def guarded(name: str, work: Callable[[], object]) -> int:
    """Run ``work``; return 0, 2 with one line on stderr for an error that a user can mend, or 130 after Ctrl-C."""
    try:
        work()
    except (TorchpipeError, OSError) as error:
        sys.stderr.write(f"{name}: {'; '.join(str(error).splitlines())}\n")  # at once, beside other ranks'
        return 2
    except KeyboardInterrupt:
        return 130  # as in a shell after Ctrl-C
    return 0
