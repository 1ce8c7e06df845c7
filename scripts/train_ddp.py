"""Train a classifier with a process for each GPU, or several on the CPU.

    torchrun --nproc_per_node 2 scripts/train_ddp.py --data DIR --toml configs/train_gpu.toml

Each process decodes its share on its own GPU. On GPUs batch norms are synchronised, unless told otherwise. Every
validation image counts once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch.distributed as dist
from recipes.command import guarded
from recipes.options import make_parser
from recipes.place import torchrun_place
from recipes.session import PRECISIONS, run


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__ or "")
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


if __name__ == "__main__":
    sys.exit(main())
