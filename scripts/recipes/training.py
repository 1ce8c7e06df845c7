"""The trainings that ``scripts/train*.py`` start: their options, and where they run."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import nn

from recipes.dali import AUGMENTS, dali_loaders
from recipes.options import guarded, make_parser, to_device
from recipes.place import Place, as_it_is, torchrun_place
from recipes.session import PRECISIONS, run

Arguments = Sequence[str] | None


def train(argv: Arguments = None) -> int:
    """Train a classifier on one GPU or the CPU, on images that a pipe decodes.

    Started again with the same ``--checkpoint``, it goes on with the very next batch.
    """
    args = make_parser(train.__doc__).parse_args(argv)
    return guarded("train", lambda: run(args, Place("single", devices=args.device)))


def train_amp(argv: Arguments = None) -> int:
    """Train a classifier in mixed precision on one GPU, or in bf16 on the CPU."""
    parser = make_parser(train_amp.__doc__)
    parser.add_argument("--precision", choices=("bf16", "fp16"), default="bf16", help="(default: %(default)s)")
    args = parser.parse_args(argv)
    return guarded("train_amp", lambda: run(args, Place("single", devices=args.device), args.precision))


def train_dp(argv: Arguments = None) -> int:
    """Train a classifier in one process on several GPUs: each decodes its share of a batch, and runs the model on it.

    ``train_ddp`` is faster; this needs no torchrun.
    """
    parser = make_parser(train_dp.__doc__)
    parser.add_argument("--devices", nargs="+", type=to_device, help="CUDA devices, or 'cpu' twice (default: all GPUs)")
    args = parser.parse_args(argv)
    wrap: Callable[[nn.Module], nn.Module] = as_it_is
    if args.devices is None or "cpu" not in args.devices:
        wrap = lambda model: nn.DataParallel(model, device_ids=args.devices)  # noqa: E731
    return guarded("train_dp", lambda: run(args, Place("dp", devices=args.devices, wrap=wrap)))


def train_ddp(argv: Arguments = None) -> int:
    """Train a classifier with a process for each GPU, or several on the CPU.

    Each process decodes its share on its own GPU. On GPUs batch norms are synchronised, unless told otherwise. Every
    validation image counts once.
    """
    parser = make_parser(train_ddp.__doc__)
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32", help="(default: %(default)s)")
    parser.add_argument(
        "--batch-norm",
        choices=("sync", "local"),
        default="sync",
        help="over the batches of all GPUs, which takes its time, or over each one's own (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    place = torchrun_place(args.device, args.batch_norm == "sync")
    try:
        return guarded("train_ddp", lambda: run(args, place, args.precision))
    finally:
        dist.destroy_process_group()


def train_dali(argv: Arguments = None) -> int:
    """Train a classifier on one GPU or the CPU, on images that NVIDIA DALI decodes.

    The training of ``train``, with another loader. Started again with the same ``--checkpoint``, it goes on with the
    next epoch: a DALI pipeline is saved between epochs only, so there is no ``--save-every``, and ``--max-steps``
    writes no checkpoint. Every file must be an image.
    """
    parser = make_parser(train_dali.__doc__, toml=False)
    option = parser.add_argument
    option("--size", type=int, default=224, help="both sides of an image, in pixels (default: %(default)s)")
    option("--decode", choices=["cpu", "gpu"], help="where (default: a GPU where there is one)")
    option("--augment", choices=AUGMENTS, default="none", help="to train with (default: %(default)s)")
    args = parser.parse_args(argv)
    reason = _not_with_dali(args)
    if reason:
        parser.error(reason)
    return guarded("train_dali", lambda: run(args, Place("single", devices=args.device), open_loaders=dali_loaders))


def _not_with_dali(args: argparse.Namespace) -> str:
    """Why the options do not go with DALI; empty if they do."""
    if args.bad_samples != "raise":
        return f"--bad-samples {args.bad_samples}: DALI stops at a file that is no image; only 'raise' works"
    if args.save_every:
        return "--save-every: a DALI pipeline is saved between epochs only; --checkpoint alone writes after each"
    if args.max_steps is not None and args.checkpoint is not None:
        return "--max-steps: a DALI pipeline is saved between epochs only; leave --checkpoint out, or use --epochs"
    return "--size: at least 1 pixel" if args.size < 1 else ""
