"""Train a classifier in one process on several GPUs: each decodes its share of a batch, and runs the model on one.

    python scripts/train_dp.py --data DIR --toml configs/train_gpu.toml

``train_ddp.py`` is faster; this one needs no torchrun.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from recipes.command import guarded
from recipes.options import make_parser, to_device
from recipes.place import Place, as_it_is
from recipes.session import run
from torch import nn


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--devices", nargs="+", type=to_device, help="CUDA devices, or 'cpu' twice (default: all GPUs)")
    args = parser.parse_args(argv)
    return guarded("train_dp", lambda: run(args, Place("dp", devices=args.devices, wrap=_parallel(args.devices))))


def _parallel(devices: list[int | str] | None) -> Callable[[nn.Module], nn.Module]:
    if devices is not None and "cpu" in devices:
        return as_it_is
    return lambda model: nn.DataParallel(model, device_ids=devices)


if __name__ == "__main__":
    sys.exit(main())
