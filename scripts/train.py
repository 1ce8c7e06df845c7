"""Train a classifier on images that a pipe decodes: on one GPU or the CPU, on several GPUs, in mixed precision.

    python scripts/train.py --data DIR --toml configs/preprocess_cpu.toml --checkpoint run/last.pt
    torchrun --nproc_per_node 2 scripts/train.py --ddp --amp --data DIR --toml configs/train_gpu.toml
    python scripts/train.py --dali --data DIR --size 224 --augment crop color cutout

Started again with the same ``--checkpoint``, it goes on with the very next batch. ``--ddp`` has a process for each GPU,
or several on the CPU; each decodes its share, and every validation image counts once. ``--dp`` has one process, in
which each GPU decodes its share of a batch and runs the model on it: it is slower, and needs no torchrun.
With ``--dali`` NVIDIA DALI makes the images in place of a pipe, from class folders or from a TFRecord.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch.distributed as dist
from recipes.options import Place, guarded, parse_options
from recipes.session import run


def main(argv: Sequence[str] | None = None) -> int:
    """0 when trained, 2 with one line on stderr otherwise."""
    args = parse_options(argv)
    place = Place.of(args)
    try:
        return guarded("train", lambda: run(args, place))
    finally:
        if args.ddp:
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
